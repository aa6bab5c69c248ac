"""The engine on 1, 2 and 4 ranks: the tokens of transformers, whatever the overlap; ranks that stay in step."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from dbo.config import DBOConfig
from dbo.errors import StepTimeout
from launch.config import EngineOptions
from launch.engine import StepClock
from launch.mesh import Mesh
from launch.sampling import SamplingParams
from launch.scheduler import Request
from launch.session import load_engine, resolve
from moe.config import read_config
from tests.launch.engine_cases import BASE, OPTIONS, Report, on_ranks, run_arm, run_arms

ARMS = {
    "off": {"overlap": "off"},
    "on": {"overlap": "on"},
    "split": {"overlap": "on", "interleave": False},
    "on, 3 ubatches": {"overlap": "on", "num_ubatches": 3},
    "on, by requests": {"overlap": "on", "cut": "requests"},
    "on, balanced": {"overlap": "on", "cut": "balanced"},
    "on, greenlets": {"overlap": "on", "driver": "greenlet"},
}


def spread(prompts, counts_per_rank):
    """Prompts in order, so many to each rank."""
    numbered, given = list(enumerate(prompts)), 0
    shares = []
    for count in counts_per_rank:
        shares.append(numbered[given : given + count])
        given += count
    return shares


def merged(reports: list[list[Report]], arm: int) -> dict[int, list[int]]:
    return {index: tokens for of_rank in reports for index, tokens in of_rank[arm].answers.items()}


def check_in_step(reports: list[list[Report]], arm: int) -> None:
    """All ranks made the same plans and took part in the same number of collectives."""
    plans = [of_rank[arm].plans for of_rank in reports]
    assert all(p == plans[0] for p in plans)
    assert {of_rank[arm].num_collectives for of_rank in reports} == {len(plans[0])}
    rows = [sum(plan[6][rank] for plan in plans[0]) for rank in range(len(reports))]
    assert rows == [len(of_rank[arm].answers) for of_rank in reports]


def splits(report: Report, phase: str) -> int:
    return sum(step["num_ubatches"] > 1 for step in report.steps if step["phase"] == phase)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_tokens_equal_transformers_with_every_overlap(ranks, tiny_models, family, world_size):
    model = tiny_models(family)
    shares = spread(model.prompts, [24 // world_size] * world_size)
    reports = ranks(world_size).run(on_ranks, model.directory, shares, list(ARMS.values()), timeout=120)
    for number, name in enumerate(ARMS):
        check_in_step(reports, number)
        answers = merged(reports, number)
        assert [answers[i] for i in range(24)] == model.answers, name
        for phase in ("prefill", "decode"):
            assert (splits(reports[0][number], phase) > 0) == (name != "off"), (name, phase)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_one_rank_alone_splits_only_when_asked_to(tiny_models, family):
    model = tiny_models(family)
    with Mesh.start(device="cpu", environment={}) as mesh:
        arms = [{"overlap": "on"}, {"overlap": "on", "allow_single_rank": True}]
        reports = run_arms(mesh, model.directory, list(enumerate(model.prompts)), arms)
    for report in reports:
        assert [report.answers[i] for i in range(24)] == model.answers
    assert {plan[3] for plan in reports[0].plans} == {"single rank", "finished"}
    assert splits(reports[1], "prefill") > 0
    assert splits(reports[1], "decode") > 0


@pytest.mark.parametrize("counts", [[5, 1, 0, 3], [1, 0, 0, 0], [0, 0, 0, 2], [0, 0, 0, 0]])
def test_ranks_with_unequal_work_stay_in_step(ranks, tiny_models, counts):
    model = tiny_models("mixtral")
    arms = [ARMS["on"], ARMS["off"]]
    reports = ranks(4).run(on_ranks, model.directory, spread(model.prompts, counts), arms, timeout=60)
    for arm in range(2):
        check_in_step(reports, arm)
        answers = merged(reports, arm)
        assert [answers[i] for i in range(sum(counts))] == model.answers[: sum(counts)]


def test_early_votes_change_no_decision(ranks, tiny_models):
    """With end tokens to wait for on some requests, without on others, and with a cache that overflows."""
    model = tiny_models("mixtral")
    arms = [{"overlap": "on", "early_votes": early} for early in (True, False)]
    options = {"kv_cache_memory": 16 * 4 * 3 * 2 * 16 * 4}
    reports = ranks(2).run(on_ranks, model.directory, spread(model.prompts, [9, 8]), arms, options, timeout=60)
    for of_rank in reports:
        assert of_rank[0].plans == of_rank[1].plans
        assert of_rank[0].answers == of_rank[1].answers
        assert of_rank[0].num_preemptions > 0


def test_a_tiny_cache_preempts_and_gives_the_same_tokens(ranks, tiny_models):
    model = tiny_models("qwen3_moe")
    num_blocks, block = 12, 4 * 3 * 2 * 2 * 16 * 4  # tokens x layers x (k, v) x heads x head_dim x bytes
    options = {"kv_cache_memory": (num_blocks + 1) * block}
    arms = [ARMS["on"], ARMS["off"]]
    shares = spread(model.prompts, [9, 8])
    reports = ranks(2).run(on_ranks, model.directory, shares, arms, options, timeout=60)
    for arm in range(2):
        check_in_step(reports, arm)
        answers = merged(reports, arm)
        assert [answers[i] for i in range(17)] == model.answers[:17]
        assert sum(of_rank[arm].num_preemptions for of_rank in reports) > 0


def test_sampling_does_not_depend_on_rank_or_batch(ranks, tiny_models):
    model = tiny_models("mixtral")
    params = {"temperature": 1.0, "top_p": 0.9, "top_k": 20}
    with Mesh.start(device="cpu", environment={}) as mesh:
        prompts = list(enumerate(model.prompts[:12]))
        (alone,) = run_arms(mesh, model.directory, prompts, [ARMS["off"]], {"max_num_seqs": 1}, params)
    assert [alone.answers[i] for i in range(12)] != model.answers[:12]
    shares = [[(i, p) for i, p in prompts if i % 2 != rank] for rank in range(2)]
    reports = ranks(2).run(on_ranks, model.directory, shares, [ARMS["on"], ARMS["off"]], {}, params, timeout=60)
    assert merged(reports, 0) == merged(reports, 1) == alone.answers


def test_steps_tell_what_they_did(ranks, tiny_models):
    model = tiny_models("mixtral")
    reports = ranks(2).run(on_ranks, model.directory, spread(model.prompts, [6, 6]), [ARMS["on"]], timeout=60)
    steps = reports[0][0].steps
    assert steps[0]["phase"] == "prefill"
    assert {s["phase"] for s in steps} == {"prefill", "mixed", "decode"}
    for step in steps:
        assert step["num_tokens"] <= step["num_tokens_padded"]
        assert (step["reason"] == "split") == (step["num_ubatches"] > 1)
        assert 0 <= step["agree_ms"] <= step["wall_ms"]
    assert [s["phase"] for s in steps] == [s["phase"] for s in reports[1][0].steps]


def test_the_clock_bounds_every_wait_of_a_step():
    clock = StepClock(lambda: None, 0.05, rank=3)
    clock.check()
    clock.start()
    clock.check()
    time.sleep(0.06)
    with pytest.raises(StepTimeout, match=r"rank 3: .* 0\.05 s"):
        clock.check()
    clock.stop()
    clock.check()
    unlimited = StepClock(lambda: None, 0, rank=0)
    unlimited.start()
    unlimited.check()


def wait_in_a_whole_step(ctx, directory):
    """Rank 1 takes part in the agreement and then stays away from the step."""
    with ctx.mesh() as mesh:
        options = EngineOptions(model=directory, **{**OPTIONS, "step_timeout": 1.0})
        engine = load_engine(options, resolve(options, read_config(directory)), mesh, model=Path(directory))
        if mesh.rank == 1:
            engine.forward = lambda *_: time.sleep(4)
        started = time.monotonic()
        try:
            with mesh.peers.guard():
                run_arm(engine, list(enumerate([[1, 2, 3]])), {"overlap": "off", "step_timeout_s": 1.0})
        except Exception as error:
            return type(error).__name__, str(error), time.monotonic() - started
        return None


def test_a_rank_that_stays_away_from_a_whole_step_is_not_waited_for(ranks, tiny_models):
    (name, text, elapsed_s), _ = ranks(2).run(wait_in_a_whole_step, tiny_models("mixtral").directory)
    assert name == "StepTimeout"
    assert "more than 1 s" in text
    assert elapsed_s < 4


ARRIVALS = ([0.0, 0.3], [0.15])


def run_paced(ctx, directory, prompts):
    """Requests that arrive while the run goes on, with a pause in which nobody has work."""
    torch.set_num_threads(1)
    with ctx.mesh() as mesh:
        options = EngineOptions(model=directory, **OPTIONS)
        engine = load_engine(options, resolve(options, read_config(directory)), mesh, model=Path(directory))
        params = SamplingParams(max_new_tokens=2, ignore_eos=True)
        requests = [
            Request(id=str(i), index=i, prompt_ids=prompts[i], params=params, arrival_s=arrival)
            for i, arrival in enumerate(ARRIVALS[ctx.rank])
        ]
        started = time.perf_counter()
        result = engine.run(requests, DBOConfig(overlap="on", **BASE))
        engine.close()
        waited = [request.first_token_s - started for request in requests]
        return waited, [request.output_ids for request in requests], len(result.steps), result.num_collectives


def test_requests_start_when_they_arrive_and_nobody_leaves_before(ranks, tiny_models):
    model = tiny_models("mixtral")
    found = ranks(2).run(run_paced, model.directory, model.prompts[:2], timeout=60)
    for arrivals, (waited, answers, _, _) in zip(ARRIVALS, found, strict=True):
        assert all(first >= arrival for first, arrival in zip(waited, arrivals, strict=True))
        assert answers == [answer[:2] for answer in model.answers[: len(arrivals)]]
    (_, _, steps, collectives), other = found
    assert other[2:] == (steps, collectives)
    assert collectives > steps + 10  # votes of ranks that wait for requests
