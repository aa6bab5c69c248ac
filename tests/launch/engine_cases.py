"""What the ranks of an engine test do: load a tiny model once, run it under several settings, report everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dbo.agreement import BatchPlan
from dbo.config import DBOConfig
from launch.config import EngineOptions
from launch.engine import Engine, Unobserved
from launch.mesh import Mesh
from launch.sampling import SamplingParams
from launch.scheduler import Request
from launch.session import load_engine, resolve
from moe.config import read_config

BASE = dict(prefill_token_threshold=2, decode_token_threshold=2)

Prompts = Sequence[tuple[int, list[int]]]  # (index, token ids)

OPTIONS = dict(
    device="cpu", max_num_tokens=32, max_num_seqs=6, block_size=4, kv_cache_memory=2**22,
    dbo_prefill_token_threshold=2, dbo_decode_token_threshold=2,
)  # fmt: skip


@dataclass
class Report:
    """What one run did on one rank."""

    answers: dict[int, list[int]]
    steps: list[dict[str, Any]]
    plans: list[tuple[Any, ...]]
    num_collectives: int
    num_preemptions: int


class Recorder(Unobserved):
    """Keeps what matters of every plan."""

    def __init__(self) -> None:
        self.plans: list[tuple[Any, ...]] = []

    def planned(self, plan: BatchPlan) -> None:
        self.plans.append(
            (plan.num_tokens_per_rank, plan.num_ubatches, plan.num_tokens_padded, str(plan.reason), plan.reason_rank,
             plan.finished, plan.num_rows_per_rank, plan.uniform_decode)
        )  # fmt: skip


def run_arms(
    mesh: Mesh,
    directory: str,
    prompts: Prompts,
    arms: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any] | None = None,
    params: Mapping[str, Any] | None = None,
) -> list[Report]:
    """One report for each arm: changes to the `DBOConfig`, and `early_votes`."""
    chosen = EngineOptions(model=directory, **{**OPTIONS, **(options or {})})
    resolved = resolve(chosen, read_config(directory))
    engine = load_engine(chosen, resolved, mesh, model=Path(directory))
    reports = [run_arm(engine, prompts, {**BASE, **arm}, params) for arm in arms]
    engine.close()
    return reports


def run_arm(
    engine: Engine, prompts: Prompts, arm: Mapping[str, Any], params: Mapping[str, Any] | None = None
) -> Report:
    """One run on this rank."""
    changes = dict(arm)
    early_votes = changes.pop("early_votes", True)
    recorder = Recorder()
    requests = [_request(index, tokens, params or {}) for index, tokens in prompts]
    result = engine.run(requests, DBOConfig(**changes), recorder, early_votes=early_votes)
    assert all(r.finish_reason for r in requests)
    steps = [asdict(step) for step in result.steps]
    answers = {r.index: r.output_ids for r in requests}
    return Report(answers, steps, recorder.plans, result.num_collectives, result.num_preemptions)


def _request(index: int, tokens: list[int], params: Mapping[str, Any]) -> Request:
    sampling = SamplingParams(**{"max_new_tokens": 8, "seed": index, "ignore_eos": index % 2 == 0, **params})
    return Request(
        id=str(index), index=index, prompt_ids=tokens, params=sampling, eos_token_ids=frozenset([10**6])
    )  # an end token that never comes: odd requests make the next schedule depend on this step's tokens


def on_ranks(ctx: Any, directory: str, prompts_by_rank: Sequence[Prompts], *args: Any) -> list[Report]:
    """`run_arms` on a rank of a pool."""
    torch.set_num_threads(1)
    with ctx.mesh() as mesh:
        return run_arms(mesh, directory, prompts_by_rank[ctx.rank], *args)
