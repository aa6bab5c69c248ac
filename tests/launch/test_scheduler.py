"""The scheduler alone: budgets, chunks, preemption, and that no block is lost or shared."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.sampling import SamplingParams
from launch.scheduler import Limits, Request, Schedule, Scheduler, fit_cache


def limits(**changes: int) -> Limits:
    values = dict(max_num_tokens=16, max_num_seqs=4, max_model_len=64, block_size=4, num_blocks=32)
    return Limits(**{**values, **changes})


def request(index: int, num_prompt: int, num_new: int = 4, **changes) -> Request:
    params = SamplingParams(max_new_tokens=num_new, ignore_eos=changes.pop("ignore_eos", False))
    return Request(id=str(index), index=index, prompt_ids=list(range(num_prompt)), params=params, **changes)


def next_token(r: Request, position: int) -> int:
    return (r.index * 31 + position * 7) % 50


def step(scheduler: Scheduler) -> tuple[Schedule, list[Request]]:
    schedule = scheduler.schedule()
    tokens = [next_token(c.request, c.start + c.num_tokens) for c in schedule.sampling]
    return schedule, scheduler.commit(schedule, tokens)


def shape(schedule: Schedule) -> list[tuple[int, int, int, bool]]:
    return [(c.request.index, c.start, c.num_tokens, c.samples) for c in schedule.chunks]


def run(scheduler: Scheduler, requests: list[Request], max_steps: int = 2000) -> list[list[tuple]]:
    for r in requests:
        scheduler.add(r)
    shapes = []
    while scheduler.has_work:
        shapes.append(shape(step(scheduler)[0]))
        assert len(shapes) <= max_steps
    return shapes


def test_prompts_are_cut_into_chunks_and_mixed_with_decode():
    scheduler = Scheduler(limits())
    shapes = run(scheduler, [request(0, 6, 3), request(1, 30, 2)])
    assert shapes == [
        [(0, 0, 6, True), (1, 0, 10, False)],
        [(0, 6, 1, True), (1, 10, 15, False)],
        [(0, 7, 1, True), (1, 25, 5, True)],
        [(1, 30, 1, True)],
    ]


def test_no_more_requests_than_places_and_no_more_tokens_than_the_budget():
    scheduler = Scheduler(limits(max_num_seqs=2, max_num_tokens=7))
    for r in (request(i, 5) for i in range(5)):
        scheduler.add(r)
    while scheduler.has_work:
        schedule, _ = step(scheduler)
        assert 0 < schedule.num_tokens <= 7
        assert len(schedule.chunks) <= 2


def test_decode_and_prefill_are_told_apart():
    scheduler = Scheduler(limits())
    scheduler.add(request(0, 5))
    first, _ = step(scheduler)
    second, _ = step(scheduler)
    assert (first.uniform_decode, second.uniform_decode) == (False, True)
    assert [c.is_decode for c in (*first.chunks, *second.chunks)] == [False, True]
    assert Scheduler(limits()).schedule().uniform_decode


def test_the_latest_request_gives_way_and_is_computed_again():
    tiny = limits(num_blocks=6, max_num_tokens=64)
    requests = [request(i, 8, 9) for i in range(3)]
    scheduler = Scheduler(tiny)
    run(scheduler, requests)
    assert requests[0].num_preemptions == 0
    assert sum(r.num_preemptions for r in requests) == scheduler.num_preemptions > 0
    alone = [request(i, 8, 9) for i in range(3)]
    for r in alone:
        run(Scheduler(limits(num_blocks=100)), [r])
    assert [r.output_ids for r in requests] == [r.output_ids for r in alone]
    assert [r.finish_reason for r in requests] == ["length"] * 3


def test_answers_end_at_every_limit():
    cases = {
        "max_new_tokens": (limits(), 5, 3, 3),
        "context": (limits(max_model_len=10), 8, 50, 2),
        "cache": (limits(num_blocks=2), 6, 50, 3),  # 8 places, and the last token needs none
    }
    for name, (bounds, num_prompt, num_new, expected) in cases.items():
        r = request(0, num_prompt, num_new)
        run(Scheduler(bounds), [r])
        assert (name, len(r.output_ids), r.finish_reason) == (name, expected, "length")


def test_end_tokens_stop_and_are_kept():
    end = next_token(request(0, 5), 6)
    r = request(0, 5, 9, eos_token_ids=frozenset([end]))
    run(Scheduler(limits()), [r])
    assert (r.finish_reason, len(r.output_ids), r.output_ids[-1]) == ("stop", 2, end)
    r = request(0, 5, 9, eos_token_ids=frozenset([end]), ignore_eos=True)
    run(Scheduler(limits()), [r])
    assert (r.finish_reason, len(r.output_ids)) == ("length", 9)


@pytest.mark.parametrize(
    ("num_prompt", "words"), [(0, "empty"), (64, "--max-model-len"), (65, "--max-model-len"), (13, "--kv-cache-memory")]
)
def test_prompts_that_never_fit_are_refused_with_the_reason(num_prompt, words):
    assert words in Scheduler(limits(num_blocks=3)).check(num_prompt)


def test_the_longest_prompt_that_fits_runs():
    bounds = limits(num_blocks=3)
    assert Scheduler(bounds).check(12) is None
    r = request(0, 12, 5)
    run(Scheduler(bounds), [r])
    assert len(r.output_ids) == 1


def test_a_fitted_cache_never_preempts_and_changes_nothing():
    bounds = limits(num_blocks=1000, max_num_seqs=3)
    for num_new in (1, 9, 100):
        requests, same = ([request(i, 3 + 5 * i, num_new) for i in range(6)] for _ in range(2))
        fitted = fit_cache(bounds, requests)
        assert fitted.num_blocks <= 3 * 16
        scheduler = Scheduler(fitted)
        assert run(scheduler, requests) == run(Scheduler(bounds), same)
        assert [r.output_ids for r in requests] == [r.output_ids for r in same]
        assert scheduler.num_preemptions == 0
    assert fit_cache(limits(num_blocks=2), [request(0, 60)]).num_blocks == 2
    assert fit_cache(limits(), []).num_blocks == 1


workloads = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12), st.booleans()), min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(workloads, st.integers(1, 20), st.integers(1, 5), st.integers(1, 5), st.integers(8, 24))
def test_blocks_are_never_lost_or_shared(work, budget, seqs, block_size, num_blocks):
    bounds = limits(max_num_tokens=budget, max_num_seqs=seqs, block_size=block_size, num_blocks=num_blocks)
    scheduler = Scheduler(bounds)
    requests = [request(i, p, n, eos_token_ids=frozenset([7, 9])) for i, (p, n, _) in enumerate(work)]
    accepted = [r for r in requests if scheduler.check(len(r.prompt_ids)) is None]
    for r in accepted:
        scheduler.add(r)
    computed: dict[int, int] = {}
    for _ in range(5000):
        if not scheduler.has_work:
            break
        schedule = scheduler.schedule()
        assert 0 < schedule.num_tokens <= budget
        for chunk in schedule.chunks:
            assert len(chunk.blocks) * block_size >= chunk.start + chunk.num_tokens
            assert chunk.start in (0, computed.get(chunk.request.index, 0))
            computed[chunk.request.index] = chunk.start + chunk.num_tokens
        in_step = [b for c in schedule.chunks for b in c.blocks]
        assert len(set(in_step)) == len(in_step)
        scheduler.commit(schedule, [next_token(c.request, c.start + c.num_tokens) for c in schedule.sampling])
        held = [b for r in scheduler.running for b in r.blocks]
        assert sorted(held + scheduler.free_blocks) == list(range(num_blocks))
        indices = [r.index for r in (*scheduler.running, *scheduler.waiting)]
        assert indices == sorted(indices)
    assert not scheduler.has_work
    for r in accepted:
        expected = [next_token(r, len(r.prompt_ids) + i) for i in range(len(r.output_ids))]
        assert r.output_ids == expected
        assert r.finish_reason is not None


@settings(max_examples=100, deadline=None)
@given(workloads, st.integers(1, 20), st.integers(6, 16))
def test_a_foreseeable_schedule_is_the_same_before_and_after_the_tokens(work, budget, num_blocks):
    """Ask for the next schedule before the tokens of this one where that is allowed: nothing may change."""

    def shapes(early: bool) -> list[list[tuple]]:
        scheduler = Scheduler(limits(max_num_tokens=budget, num_blocks=num_blocks))
        for i, (p, n, ignore) in enumerate(work):
            scheduler.add(request(i, p, n, ignore_eos=ignore, eos_token_ids=frozenset([7, 9, 14])))
        found, schedule, num_early = [], scheduler.schedule(), 0
        while schedule.chunks:
            found.append(shape(schedule))
            tokens = [next_token(c.request, c.start + c.num_tokens) for c in schedule.sampling]
            following = None
            if early and schedule.foreseeable:
                following, num_early = scheduler.schedule(), num_early + 1
            ended = scheduler.commit(schedule, tokens)
            if schedule.foreseeable:
                assert len(ended) == schedule.num_ended
            schedule = following or scheduler.schedule()
        return found

    assert shapes(early=True) == shapes(early=False)
