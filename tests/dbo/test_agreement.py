"""Votes to plans, as a table, as properties, and between ranks: alike everywhere, one collective a step, no hang."""

import inspect
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import dbo.agreement
from dbo.agreement import WANTS, Agreement, Reason, Vote
from dbo.config import DBOConfig
from dbo.errors import AgreementError, PeerFailed, StepTimeout
from dbo.policy import make_policy
from tests.dbo.votes import config_on, last_part_has_a_token_everywhere, plan_for, plan_of, random_run

FREE = {"prefill_token_threshold": 0, "decode_token_threshold": 0}


# --------------------------------------------------------------------------------------------- the decision


@pytest.mark.parametrize(
    ("num_tokens", "num_ubatches", "reason", "rank", "padded"),
    [
        ([1, 400], 2, Reason.LAST_UBATCH_EMPTY, 0, None),
        ([2, 400], 2, Reason.LAST_UBATCH_EMPTY, 0, None),
        ([3, 400], 3, Reason.LAST_UBATCH_EMPTY, 0, None),
        ([400, 200], 2, Reason.LAST_UBATCH_EMPTY, 1, None),
        ([400, 201], 2, Reason.SPLIT, None, 400),
        ([64, 0], 2, Reason.IDLE_RANK, 1, None),
        ([0, 0], 2, Reason.IDLE_RANK, 0, None),
        ([0, 64, 0, 1], 2, Reason.IDLE_RANK, 0, None),
        ([1, 1], 2, Reason.LAST_UBATCH_EMPTY, 0, None),
        ([2, 2], 2, Reason.SPLIT, None, 2),
        ([2, 2], 3, Reason.LAST_UBATCH_EMPTY, 0, None),
        ([4, 4], 3, Reason.LAST_UBATCH_EMPTY, 0, None),
        ([5, 5], 3, Reason.SPLIT, None, 6),
        ([8, 8], 8, Reason.SPLIT, None, 8),
        ([9, 9], 8, Reason.LAST_UBATCH_EMPTY, 0, None),
        ([160], 2, Reason.SINGLE_RANK, None, None),
        ([2048, 64, 64, 64], 2, Reason.LAST_UBATCH_EMPTY, 1, None),
    ],
)
def test_the_table(num_tokens, num_ubatches, reason, rank, padded):
    plan = plan_of(num_tokens, config_on(num_ubatches=num_ubatches, **FREE))
    assert (plan.reason, plan.reason_rank, plan.num_tokens_padded) == (reason, rank, padded)
    assert plan.num_ubatches == (num_ubatches if reason is Reason.SPLIT else 1)
    assert plan.num_tokens_per_rank == tuple(num_tokens)


def test_overlap_off_and_a_single_rank():
    assert plan_of([900, 900], DBOConfig()).reason is Reason.OVERLAP_OFF
    assert plan_of([900], config_on(allow_single_rank=True)).should_ubatch


def test_a_refusal_weighs_the_padding_that_a_split_would_have_cost():
    text = plan_of([2048, 64, 64, 64]).explain()
    assert "last ubatch empty on rank 1" in text
    assert "last ubatch would start at token 1024" in text
    assert "padding every rank to 2048 makes 5952 of 8192 rows padding" in text
    assert "makes 900 of 4096 rows padding" in plan_of([2048, 1148]).explain()


def test_all_take_the_padded_size_of_the_largest_when_a_graph_runs():
    votes = [
        Vote(num_tokens=3, num_tokens_padded=4, graph_mode=2),
        Vote(num_tokens=60, num_tokens_padded=64, graph_mode=2),
    ]
    plan = plan_for(votes, config_on())
    assert (plan.should_ubatch, plan.num_tokens_padded, plan.graph_mode) == (False, 64, 2)


def test_a_rank_beyond_the_largest_captured_size_takes_all_to_the_lowest_mode_without_padding():
    votes = [
        Vote(num_tokens=300, num_tokens_padded=512, graph_mode=2),
        Vote(num_tokens=600, graph_mode=0),
    ]
    plan = plan_for(votes, DBOConfig())
    assert (plan.num_tokens_padded, plan.graph_mode) == (None, 0)


def test_backing_out_of_a_split_keeps_the_graph():
    votes = [Vote(num_tokens=n, num_tokens_padded=32, uniform_decode=True, graph_mode=2) for n in (25, 30)]
    plan = plan_for(votes, config_on(decode_token_threshold=26))
    assert (plan.reason, plan.reason_rank) == (Reason.BELOW_THRESHOLD, 0)
    assert (plan.num_tokens_padded, plan.graph_mode, plan.uniform_decode) == (32, 2, True)


@pytest.mark.parametrize("cut", ["requests", "balanced"])
def test_cuts_that_differ_between_ranks_are_voted_on_need_no_padding_and_no_graph(cut):
    config = config_on(cut=cut, **FREE)
    plan = plan_of([400, 9], config)
    assert (plan.reason, plan.num_tokens_padded) == (Reason.SPLIT, None)
    plan = plan_for([Vote(num_tokens=400), Vote(num_tokens=9, can_cut=False)], config)
    assert (plan.reason, plan.reason_rank) == (Reason.CANNOT_CUT, 1)
    plan = plan_of([400, 9], config, graph_mode=1)
    assert (plan.reason, plan.num_tokens_padded) == (Reason.GRAPH_MODE, 400)
    assert f"identical shape, which cut={cut} does not give; use cut=tokens" in plan.explain()


def test_the_end_is_agreed_and_rows_are_carried():
    last = Vote(num_tokens=0, finished=True, num_rows=4)
    plan = plan_for([last, Vote(num_tokens=7)], config_on())
    assert (plan.finished, plan.reason, plan.num_rows_per_rank) == (False, Reason.IDLE_RANK, (4, 0))
    plan = plan_for([last, last], config_on())
    assert (plan.finished, plan.reason) == (True, Reason.FINISHED)


def test_an_idle_rank_does_not_make_a_decode_step_look_mixed():
    votes = [Vote(num_tokens=8, uniform_decode=True), Vote(num_tokens=0)]
    assert plan_for(votes, config_on()).uniform_decode
    assert not plan_for([votes[0], Vote(num_tokens=8)], config_on()).uniform_decode


@settings(max_examples=300, deadline=None)
@given(
    num_tokens=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    num_ubatches=st.integers(2, 5),
    alignment=st.integers(1, 4),
    threshold=st.integers(0, 20),
    graph_mode=st.integers(0, 2),
)
def test_a_plan_splits_exactly_when_every_part_of_every_rank_has_a_token(
    num_tokens, num_ubatches, alignment, threshold, graph_mode
):
    config = config_on(num_ubatches=num_ubatches, cut_alignment=alignment, prefill_token_threshold=threshold)
    plan = plan_of(num_tokens, config, graph_mode=graph_mode)
    expected = (
        len(num_tokens) > 1
        and min(num_tokens) >= max(threshold, 1)
        and last_part_has_a_token_everywhere(num_tokens, config)
    )
    assert plan.should_ubatch == expected == (plan.reason is Reason.SPLIT)
    assert plan.explain().startswith("split" if expected else f"no split: {plan.reason}")
    if expected:
        assert plan.num_tokens_padded % (num_ubatches * alignment) == 0
        assert 0 <= plan.num_tokens_padded - max(num_tokens) < num_ubatches * alignment
    else:
        assert plan.num_tokens_padded == (max(num_tokens) if graph_mode else None)
        assert plan.reason_rank is None or num_tokens[plan.reason_rank] == min(num_tokens) or threshold > 0


# --------------------------------------------------------------------------------------------- between ranks


def on_ranks(num_ranks, function, timeout_s=60):
    """`function(rank, group)` on threads of this process that are joined by gloo: cheap for any number of ranks."""
    store = dist.HashStore()

    def run(rank):
        return function(rank, dist.ProcessGroupGloo(store, rank, num_ranks, timedelta(seconds=timeout_s)))

    with ThreadPoolExecutor(num_ranks) as threads:
        futures = [threads.submit(run, rank) for rank in range(num_ranks)]
        return [future.result(timeout=timeout_s) for future in futures]


def agreement_on(rank, num_ranks, group, config=None, **kwargs):
    config = config or config_on()
    return Agreement(group, dp_rank=rank, dp_size=num_ranks, config=config, policy=make_policy(config), **kwargs)


def take_part(rank, num_ranks, group, seed, max_steps, late_s):
    """Vote through a random run until the end is agreed; what this rank saw."""
    config = config_on(num_ubatches=2 + seed % 3)
    agreement = agreement_on(rank, num_ranks, group, config)
    rng = random.Random(seed * 100 + rank)
    plans = []
    for votes in random_run(seed, num_ranks, max_steps, config):
        pending = agreement.issue(votes[rank])
        if rng.random() < 0.1:
            time.sleep(rng.random() * late_s)  # others wait in result(), this one computes
        plans.append(pending.result())
        if plans[-1].finished:
            break
    return plans, agreement.num_collectives, sum(agreement.reasons.values())


def check_run(results, seed, num_ranks, max_steps):
    run = random_run(seed, num_ranks, max_steps, config := results[0][0][0].config)
    expected = [plan_for(votes, config) for votes in run]
    assert [plan.finished for plan in expected] == [False] * (len(run) - 1) + [True]
    for plans, num_collectives, num_reasons in results:
        assert plans == expected
        assert num_collectives == num_reasons == len(run)
    return sum(plan.should_ubatch for plan in expected)


@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_random_runs_are_planned_alike_on_every_rank(num_ranks):
    num_splits = 0
    for seed in range(3):
        results = on_ranks(num_ranks, lambda rank, group, s=seed: take_part(rank, num_ranks, group, s, 40, 0.002))
        num_splits += check_run(results, seed, num_ranks, 40)
    assert num_splits > 0


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_thousands_of_random_steps_are_planned_alike_on_every_rank(num_ranks):
    for seed in range(100, 120):
        results = on_ranks(num_ranks, lambda rank, group, s=seed: take_part(rank, num_ranks, group, s, 200, 0.002))
        check_run(results, seed, num_ranks, 200)


def take_part_in_a_process(ctx, seed):
    return take_part(ctx.rank, ctx.world_size, ctx.group, seed, 60, 0.005)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_random_runs_between_processes(ranks, num_ranks):
    results = ranks(num_ranks).run(take_part_in_a_process, 7)
    assert check_run(results, 7, num_ranks, 60) > 0


def finish_at(rank, group, steps):
    agreement = agreement_on(rank, len(steps), group)
    done = 0
    while not agreement.agree(Vote(num_tokens=int(done < steps[rank]), finished=done >= steps[rank])).finished:
        done += 1
    return done, agreement.num_collectives


def test_ranks_that_finish_at_different_steps_learn_of_the_end_from_the_same_vote():
    assert on_ranks(4, lambda rank, group: finish_at(rank, group, [31, 32, 33, 64])) == [(64, 65)] * 4


def wait_for_an_absent_rank(rank, group, **kwargs):
    agreement = agreement_on(rank, 2, group, **kwargs)
    if rank == 1:
        return None
    started = time.monotonic()
    with pytest.raises((StepTimeout, PeerFailed)) as error:
        agreement.agree(Vote(num_tokens=1))
    with pytest.raises(AgreementError, match="still pending"):
        agreement.issue(Vote(num_tokens=1))
    return str(error.value), time.monotonic() - started


def held_until(done, function):
    """`function`, after which rank 1's group stays open until rank 0 has its result."""

    def run(rank, group):
        try:
            return function(rank, group)
        finally:
            done.set() if rank == 0 else done.wait(30)

    return run


def test_a_wait_for_another_rank_ends_at_the_step_timeout():
    config = config_on(step_timeout_s=0.2)
    function = held_until(threading.Event(), lambda r, group: wait_for_an_absent_rank(r, group, config=config))
    message, elapsed_s = on_ranks(2, function)[0]
    assert "rank 0: not all ranks voted within 0.2 s" in message
    assert 0.2 <= elapsed_s < 5


def test_a_wait_is_abandoned_when_a_peer_is_known_to_have_failed():
    def check():
        raise PeerFailed(1, "host", "out of memory")

    function = held_until(threading.Event(), lambda r, group: wait_for_an_absent_rank(r, group, check=check))
    message, elapsed_s = on_ranks(2, function)[0]
    assert "rank 1" in message
    assert "out of memory" in message
    assert elapsed_s < 5


def test_a_closed_connection_is_an_agreement_error():
    ready = threading.Barrier(2)

    def run(rank, group):
        agreement = agreement_on(rank, 2, group)
        agreement.agree(Vote(num_tokens=1))
        ready.wait()
        if rank == 0:
            with pytest.raises(AgreementError, match="rank 0 lost the other ranks"):
                agreement.agree(Vote(num_tokens=1))

    on_ranks(2, run)


def test_an_agreement_goes_on_in_a_new_group():
    store = dist.HashStore()
    failed = threading.Barrier(2)

    def group_of(rank, attempt):
        prefix = dist.PrefixStore(f"attempt{attempt}", store)
        return dist.ProcessGroupGloo(prefix, rank, 2, timedelta(seconds=30))

    def run(rank):
        agreement = agreement_on(rank, 2, first := group_of(rank, 0), config_on(step_timeout_s=0.2))
        if rank == 0:
            stale = agreement.issue(Vote(num_tokens=100_000))
            with pytest.raises(StepTimeout):
                stale.result()
        failed.wait(30)
        agreement.renew(group_of(rank, 1))
        if rank == 0:
            with pytest.raises(AgreementError, match="abandoned"):
                stale.result()
        plan = agreement.agree(Vote(num_tokens=rank + 1))
        failed.wait(30)
        del first
        return plan

    with ThreadPoolExecutor(2) as threads:
        plans = list(threads.map(run, range(2), timeout=60))
    assert plans[0] == plans[1]
    assert plans[0].num_tokens_per_rank == (1, 2)


class Alone:
    """Stands for a group in which this rank's vote is the only one."""

    def __init__(self):
        self.tensors = []

    def allreduce(self, tensors):
        self.tensors += [tensor.clone() for tensor in tensors]
        return self

    def wait(self, timeout=None):
        return True


def test_a_vote_fills_this_rank_s_column_of_one_int32_tensor_and_no_other():
    agreement = agreement_on(1, 3, group := Alone())
    agreement.agree(Vote(num_tokens=700, num_rows=9))
    agreement.agree(Vote(num_tokens=5, graph_mode=2, finished=True))
    first, second = group.tensors
    assert first.dtype == torch.int32
    assert first.device.type == "cpu"
    assert first.shape == (len(fields(Vote)) + 1, 3)
    assert first[:, [0, 2]].count_nonzero() == second[:, [0, 2]].count_nonzero() == 0
    names = [*(field.name for field in fields(Vote)), WANTS]
    said = [{n: value for n, value in zip(names, t[:, 1].tolist(), strict=True) if value} for t in (first, second)]
    assert said[0] == {"num_tokens": 700, "can_cut": 1, "num_rows": 9, WANTS: 1}
    assert said[1] == {"num_tokens": 5, "can_cut": 1, "graph_mode": 2, "finished": 1}


def test_further_fields_need_no_change_here():
    @dataclass(frozen=True, kw_only=True, slots=True)
    class TimedVote(Vote):
        queue_us: int = 0

    agreement = agreement_on(0, 1, None, vote_type=TimedVote)
    assert agreement.agree(TimedVote(num_tokens=3, queue_us=-17)).votes["queue_us"] == (-17,)


def test_numbers_and_flags_may_be_numpy_s():
    lengths = np.array([1, 1, 1])
    vote = Vote(num_tokens=lengths.sum(), num_tokens_padded=np.uint8(4), uniform_decode=(lengths == 1).all())
    plain = Vote(num_tokens=3, num_tokens_padded=4, uniform_decode=True)
    plans = [agreement_on(0, 1, None).agree(v) for v in (vote, plain)]
    assert plans[0] == plans[1]
    assert {type(value) for row in plans[0].votes.values() for value in row} == {int}


@pytest.mark.parametrize("value", [3.0, np.float32(3), "3", None, 2**31, -(2**31) - 1])
def test_a_field_that_is_no_int32_is_named_before_anything_is_cast(value):
    agreement = agreement_on(0, 1, group := Alone())
    with pytest.raises(TypeError, match=r"num_rows=.*a vote holds"):
        agreement.issue(Vote(num_tokens=3, num_rows=value))
    assert group.tensors == []
    assert agreement.agree(Vote(num_tokens=3)).num_tokens_per_rank == (3,)


def test_one_vote_at_a_time_and_its_plan_is_kept():
    agreement = agreement_on(0, 1, None)
    pending = agreement.issue(Vote(num_tokens=3))
    with pytest.raises(AgreementError, match="one step, one vote"):
        agreement.issue(Vote(num_tokens=3))
    assert pending.result() is pending.result()
    assert agreement.num_collectives == 0


def test_several_ranks_need_a_group():
    with pytest.raises(AgreementError, match="2 ranks need a process group"):
        agreement_on(0, 2, None)


def test_every_step_has_a_counted_reason_and_the_summary_names_ranks():
    agreement = agreement_on(0, 2, Alone())
    for num_tokens in (600, 600, 3):
        agreement.agree(Vote(num_tokens=num_tokens))
    assert agreement.reasons == {Reason.IDLE_RANK: 3}
    assert agreement.reason_ranks == {(Reason.IDLE_RANK, 1): 3}
    assert agreement.summary().endswith("steps: idle rank: 3 (rank 1: 3)")
    assert agreement.summary().startswith("overlap on by thresholds")


def test_nothing_here_can_wait_for_a_device():
    source = inspect.getsource(dbo.agreement)
    assert not any(word in source for word in ("cuda", "synchronize", ".item(", ".cpu("))
