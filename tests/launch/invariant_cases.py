"""What the ranks of a batch-invariance test do: one model under many settings, with the bits of every token."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dbo.agreement import BatchPlan
from dbo.config import DBOConfig
from launch.config import EngineOptions
from launch.engine import Engine, sample_chunks
from launch.mesh import Mesh
from launch.sampling import SamplingParams
from launch.scheduler import Chunk, Request, Schedule
from launch.session import load_engine, resolve
from moe.config import ModelConfig, named_shape
from tests.dbo.graphs.emulator import Emulator
from tests.launch.engine_cases import BASE, OPTIONS, Prompts
from tests.launch.graph_cases import watch, with_graphs

MODEL = replace(
    named_shape("tiny"), vocab_size=260, num_layers=3, qk_norm=True, dense_layers=frozenset({0}), dense_width=72,
    shared_expert_width=40, expert_width=56, num_experts=7, num_topk=3, max_position=128,
)  # fmt: skip
MODELS = {
    "float32": MODEL,
    "offloaded": replace(MODEL, num_layers=4),
    "bfloat16": replace(MODEL, dtype=torch.bfloat16, sliding_window=11, attention_bias=True, qk_norm=False),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How the same requests are run."""

    arm: Mapping[str, Any]  # changes to the `DBOConfig`
    options: Mapping[str, Any] = field(default_factory=dict)  # and to the `EngineOptions`
    graphs: Sequence[int] = ()  # sizes to capture; none = eagerly


@dataclass(frozen=True)
class Seen:
    """What came of the requests of a rank."""

    answers: dict[int, list[int]]
    bits: dict[tuple[int, int, str], str]  # by request, position and what: a digest
    num_split: int  # steps
    num_graphs: int  # steps from graphs
    num_preemptions: int


class Watched:
    """Notes the bits of every hidden state and of all logits; the same token computed again must have the same."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.bits: dict[tuple[int, int, str], str] = {}

    def forward(self, schedule: Schedule, plan: BatchPlan, dbo: DBOConfig) -> Tensor:
        hidden = self._engine.forward(schedule, plan, dbo)
        places = [(c.request.index, c.start + k) for c in schedule.chunks for k in range(c.num_tokens)]
        self._note(places, hidden, "hidden")
        return hidden

    def sample(self, chunks: Sequence[Chunk], logits: Tensor) -> Tensor:
        assert logits.dtype == torch.float32
        self._note([(c.request.index, c.start + c.num_tokens - 1) for c in chunks], logits, "logits")
        return sample_chunks(chunks, logits)

    def _note(self, places: Sequence[tuple[int, int]], rows: Tensor, what: str) -> None:
        for place, row in zip(places, rows.view(torch.uint8).numpy(), strict=True):
            digest = hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest()
            assert self.bits.setdefault((*place, what), digest) == digest, (what, place)


def run_setting(mesh: Mesh, model: ModelConfig, prompts: Prompts, setting: Setting) -> Seen:
    options = EngineOptions(model="", load_format="dummy", batch_invariant=True, **{**OPTIONS, **setting.options})
    engine = load_engine(options, resolve(options, model), mesh, model=model)
    dbo = DBOConfig(**{**BASE, "allow_single_rank": True, **setting.arm})
    if setting.graphs:
        emulator = Emulator()
        watch(engine.model, emulator)
        with_graphs(engine, emulator, dbo, "piecewise", setting.graphs)
    watched = Watched(engine)
    requests = [_request(index, tokens) for index, tokens in prompts]
    result = engine.run(requests, dbo, sampler=watched.sample, forward=watched.forward)
    num_graphs = 0 if engine.graphs is None else sum(engine.graphs.steps.values())
    engine.close()
    return Seen(
        {r.index: r.output_ids for r in requests},
        watched.bits,
        sum(step.num_ubatches > 1 for step in result.steps),
        num_graphs,
        result.num_preemptions,
    )


def _request(index: int, tokens: list[int]) -> Request:
    """Every third one draws its tokens."""
    params = SamplingParams(max_new_tokens=6, seed=index, temperature=float(index % 3 == 0), ignore_eos=True)
    return Request(id=str(index), index=index, prompt_ids=tokens, params=params)


def on_ranks(ctx: Any, name: str, settings: Sequence[tuple[Setting, Sequence[Prompts]]]) -> list[Seen]:
    """Each setting with the prompts of each rank."""
    torch.set_num_threads(1)
    seen = []
    for number, (setting, shares) in enumerate(settings):
        with ctx.mesh(f"setting{number}") as mesh:
            seen.append(run_setting(mesh, MODELS[name], shares[ctx.rank], setting))
    return seen
