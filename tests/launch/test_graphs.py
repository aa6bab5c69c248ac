"""Steps from graphs give the tokens of eager steps, on one rank and on several, whole and overlapped."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo.agreement import BatchPlan, Reason
from dbo.config import DBOConfig
from dbo.errors import ConfigError
from dbo.graphs.descriptor import BatchDescriptor
from dbo.slices import make_slices, pad_batch, split_batch
from launch.cli import CommandError
from launch.config import GenerateOptions
from launch.inputs import GraphInputs, Inputs
from launch.mesh import Mesh
from launch.sampling import SamplingParams
from launch.scheduler import Chunk, Limits, Request, Schedule
from launch.session import load_engine, resolve, start_graphs
from moe.attention.base import StoringPlan
from moe.attention.cuda import CudaAttention
from moe.config import named_shape, read_config
from moe.kv_cache import KVCache
from tests.launch.engine_cases import OPTIONS
from tests.launch.graph_cases import GraphReport, StoringAttention, on_ranks, run_graphs
from tests.launch.test_engine import spread

TINY = named_shape("tiny")

ARMS: dict[str, dict[str, Any]] = {
    "off": {"overlap": "off"},
    "on": {"overlap": "on", "allow_single_rank": True},
    "on, greenlets": {"overlap": "on", "allow_single_rank": True, "driver": "greenlet"},
    "on, 3 ubatches": {"overlap": "on", "allow_single_rank": True, "num_ubatches": 3},
    "split": {"overlap": "on", "allow_single_rank": True, "interleave": False},
}


def check_graphs(found: GraphReport, arm: dict[str, Any]) -> None:
    num = arm.get("num_ubatches", 2) if arm["overlap"] == "on" else 1
    assert found.num_graphs > 0
    assert found.num_captures_after == 0
    assert set(found.steps) <= {("piecewise", 1), ("piecewise", num)}
    assert sum(found.steps.values()) == len(found.report.steps)  # every step
    assert found.steps["piecewise", num] > 0


@pytest.mark.parametrize("arm", ARMS)
def test_one_rank(tiny_models, arm: str) -> None:
    model = tiny_models("qwen3_moe")
    with Mesh.start(device="cpu", environment={}) as mesh:
        eager, found = run_graphs(mesh, model.directory, list(enumerate(model.prompts)), ARMS[arm])
    check_graphs(found, ARMS[arm])
    assert found.report.answers == eager.answers
    assert [found.report.answers[i] for i in range(len(model.answers))] == model.answers


@pytest.mark.parametrize("arm", ["off", "on, greenlets"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_what_attention_stores_is_captured_and_what_it_sees_is_not(tiny_models, family: str, arm: str) -> None:
    """Known fault 35 for a plan of two parts: replays have other lengths than the capture."""
    assert issubclass(CudaAttention, StoringPlan)
    model = tiny_models(family)
    prompts = list(enumerate(model.prompts))
    with Mesh.start(device="cpu", environment={}) as mesh:
        eager, found = run_graphs(mesh, model.directory, prompts, ARMS[arm], attention=StoringAttention)
    check_graphs(found, ARMS[arm])
    assert found.report.answers == eager.answers
    assert [found.report.answers[i] for i in range(len(model.answers))] == model.answers


@pytest.mark.parametrize("arm", ["off", "on", "on, 3 ubatches"])
def test_two_ranks(ranks, tiny_models, arm: str) -> None:
    """The transport is an eager part: messages interleave with segments of both ubatches."""
    model = tiny_models("mixtral")
    shares = spread(model.prompts, [9, 15])
    reports = ranks(2).run(on_ranks, model.directory, shares, ARMS[arm], timeout=240)
    for eager, found in reports:
        check_graphs(found, ARMS[arm])
        assert found.report.answers == eager.answers
    answers = {index: tokens for _, found in reports for index, tokens in found.report.answers.items()}
    assert [answers[i] for i in range(24)] == model.answers
    assert reports[0][1].report.plans == reports[1][1].report.plans


def test_steps_beyond_the_largest_size_run_eagerly(tiny_models) -> None:
    model = tiny_models("mixtral")
    with Mesh.start(device="cpu", environment={}) as mesh:
        eager, found = run_graphs(
            mesh, model.directory, list(enumerate(model.prompts)), ARMS["on"], "piecewise", (2, 4)
        )
    assert found.report.answers == eager.answers
    assert 0 < sum(found.steps.values()) < len(found.report.steps)


def test_a_mode_that_this_device_cannot_run_is_refused(tiny_models) -> None:
    model = tiny_models("mixtral")
    with Mesh.start(device="cpu", environment={}) as mesh, pytest.raises(ConfigError, match="use piecewise"):
        run_graphs(mesh, model.directory, [(0, model.prompts[0])], ARMS["off"], "full_decode_only")


@pytest.mark.parametrize("mode", ["full_decode_only", "full_and_piecewise"])
@pytest.mark.parametrize("arm", ["off", "on", "on, 3 ubatches"])
def test_decode_from_whole_graphs(tiny_models, arm: str, mode: str) -> None:
    """Nothing in a decode step is read on the host: lengths, padding and routing come from memory that was refilled."""
    model, num = tiny_models("qwen3_moe"), ARMS[arm].get("num_ubatches", 2) if arm != "off" else 1
    with Mesh.start(device="cpu", environment={}) as mesh:
        prompts = list(enumerate(model.prompts))
        eager, found = run_graphs(mesh, model.directory, prompts, ARMS[arm], mode, (1, 2, 4, 6, 32), None, True)
    assert found.report.answers == eager.answers
    assert [found.report.answers[i] for i in range(len(model.answers))] == model.answers
    decodes = [step for step in found.report.steps if step["phase"] == "decode"]
    whole = sum(count for (kind, _), count in found.steps.items() if kind == "full")
    assert whole >= len(decodes) > 0
    assert found.steps["full", num] > 0
    rest = sum(count for (kind, _), count in found.steps.items() if kind == "piecewise")
    assert (rest > 0) == (mode == "full_and_piecewise")


@pytest.mark.parametrize("arm", ["off", "on", "split"])
def test_offloaded_experts_give_the_same(tiny_models, arm: str) -> None:
    """Eagerly and from segments, whole and in ubatches: each as without offloading. The two may differ from each other:
    in bfloat16 a processor may add up a padded batch in another order."""
    model, answers = tiny_models("qwen3_moe"), []
    prompts = list(enumerate(model.prompts[:10]))
    for count in (0, 3):
        with Mesh.start(device="cpu", environment={}) as mesh:
            options = {"dtype": "bfloat16", "offload_layers": count}
            eager, found = run_graphs(mesh, model.directory, prompts, ARMS[arm], "piecewise", (4, 32), options)
        check_graphs(found, ARMS[arm])
        answers.append((eager.answers, found.report.answers))
    assert answers[0] == answers[1]


def test_the_options_of_graphs(tiny_models) -> None:
    model = tiny_models("mixtral")
    given = dict(model=model.directory, prompts="-", output="out.jsonl", cudagraph_mode="piecewise", **OPTIONS)
    with pytest.raises(ConfigError, match="--offload-layers=2 is not allowed: 0, or 3 or more"):
        GenerateOptions(**given, offload_layers=2)
    with pytest.raises(ConfigError, match="--cudagraph-capture-sizes='4,x' is not allowed: numbers of tokens such as"):
        GenerateOptions(**given, cudagraph_capture_sizes="4,x")
    options = GenerateOptions(**given)
    with Mesh.start(device="cpu", environment={}) as mesh:
        engine = load_engine(options, resolve(options, read_config(model.directory)), mesh, model=Path(model.directory))
        with pytest.raises(CommandError, match="--cudagraph-mode='piecewise' is not allowed: a CUDA device"):
            start_graphs(options, engine)
        engine.close()


# ------------------------------------------------------------------------------------------- inputs that stay put


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=6),
    num=st.integers(1, 4),
    padding=st.integers(0, 7),
)
def test_the_batches_of_ubatches(lens: list[tuple[int, int]], num: int, padding: int) -> None:
    """Tokens, tables and lengths of every ubatch, on the host and on the device, against the eager batch cut in parts;
    and the keys that a captured attention gathers."""
    limits = Limits(max_num_tokens=64, max_num_seqs=6, max_model_len=32, block_size=4, num_blocks=64)
    schedule = schedule_of(lens, limits)
    tokens = schedule.num_tokens
    end = -(-(tokens + padding) // num) * num
    dbo = DBOConfig(num_ubatches=max(num, 2))
    plan = BatchPlan(
        config=dbo, votes={"num_tokens": (tokens,), "uniform_decode": (0,)}, reason=Reason.SPLIT, reason_rank=None,
        num_ubatches=num, num_tokens_padded=end,
    )  # fmt: skip
    slices = make_slices(plan, schedule.query_lens, seq_lens=schedule.seq_lens)
    cpu = torch.device("cpu")
    expected = split_batch(pad_batch(Inputs(limits, cpu, lambda: None).build(schedule, plan), end), slices)
    inputs = GraphInputs(limits, cpu, lambda: None, num_tokens=72, num_ubatches=num, num_ranks=2)
    shape = BatchDescriptor(num_tokens=end, num_requests=6, num_ubatches=num)
    first = inputs.empty(shape)
    assert [batch.fixed.num_tokens.item() for batch in first if batch.fixed] == [0] * num
    batches = inputs.build(schedule, slices, shape)
    assert all(a is b for a, b in zip(first, batches, strict=True))
    for batch, wanted in zip(batches, expected, strict=True):
        fixed = batch.fixed
        assert fixed is not None
        for name in ("input_ids", "positions", "slot_mapping"):
            assert torch.equal(getattr(batch, name), getattr(wanted, name)), name
        count = len(wanted.query_lens)
        width = wanted.block_tables.shape[1]
        assert torch.equal(batch.block_tables[:count, :width], wanted.block_tables)
        assert fixed.host_query_lens.tolist() == wanted.query_lens.tolist()
        assert fixed.host_seq_lens.tolist() == wanted.seq_lens.tolist()
        assert fixed.host_num_tokens == wanted.num_tokens == fixed.num_tokens.item()
        assert fixed.seq_lens.tolist() == [*wanted.seq_lens, *[0] * (6 - count)]
        for ends, lengths in ((fixed.query_ends, wanted.query_lens), (fixed.key_ends, wanted.seq_lens)):
            summed = [0, *np.cumsum(lengths)]
            assert ends.tolist() == summed + [summed[-1]] * (6 - count)
        plan_ = CudaAttention(TINY, replace(batch, fixed=replace(fixed, max_num_keys=200)), kv_of(limits))
        keys = [
            wanted.block_tables[request, at // 4].item() * 4 + at % 4
            for request, length in enumerate(wanted.seq_lens)
            for at in range(length)
        ]
        slots = plan_._prompts[0].slots
        assert slots is not None
        assert slots[: len(keys)].tolist() == keys
        assert 0 <= int(slots.min()) <= int(slots.max()) < 64 * 4


def kv_of(limits: Limits) -> KVCache:
    return KVCache(TINY, limits.num_blocks, limits.block_size, torch.float32)


def schedule_of(lens: list[tuple[int, int]], limits: Limits) -> Schedule:
    """Requests of so many computed and so many new tokens."""
    chunks, blocks = [], iter(range(limits.num_blocks))
    for index, (computed, new) in enumerate(lens):
        total = computed + new
        request = Request(
            id=str(index), index=index, prompt_ids=[(index * 37 + k) % 251 for k in range(total)],
            params=SamplingParams(max_new_tokens=1),
        )  # fmt: skip
        held = array("i", [next(blocks) for _ in range(-(-total // limits.block_size))])
        chunks.append(Chunk(request, computed, new, True, held))
    return Schedule(tuple(chunks), foreseeable=True, num_ended=0)
