"""`auto`: a pure function of what all ranks share, padding and the slowest rank included; what clocks may change."""

import logging
import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo.agreement import WANTS, BatchPlan, Reason, Vote, decide
from dbo.config import DBOConfig
from dbo.errors import ConfigError
from dbo.policy import (
    DRIFT_BOUND,
    DRIFT_UNIT,
    PROBE_OVERLAP,
    PROBE_WHOLE,
    ArmCosts,
    Auto,
    Correction,
    Curve,
    Probes,
    StepCosts,
    make_policy,
)
from tests.dbo.votes import plan_for

CONFIG = DBOConfig(overlap="auto")
# Prefill pays from 512 tokens on, decode never.
COSTS = StepCosts(
    prefill=ArmCosts(whole=Curve((64, 1024), (10.0, 170.0)), overlap=Curve((64, 1024), (50.0, 120.0))),
    decode=ArmCosts(whole=Curve((1, 256), (5.0, 20.0)), overlap=Curve((1, 256), (9.0, 24.0))),
)


def plan(num_tokens, costs=COSTS, config=CONFIG, **vote) -> BatchPlan:
    return plan_for([Vote(num_tokens=n, **vote) for n in num_tokens], config, Auto(config, costs))


@pytest.mark.parametrize(
    ("num_tokens", "ms"),
    [(1, 10.0), (64, 10.0), (544, 90.0), (1024, 170.0), (1504, 250.0)],
)
def test_a_curve_is_straight_between_points_and_beyond_the_last(num_tokens, ms):
    assert COSTS.prefill.whole.at(num_tokens) == pytest.approx(ms)


def test_a_curve_that_falls_at_its_end_does_not_go_on_falling():
    assert Curve((1, 2), (5.0, 3.0)).at(100) == 3.0
    assert Curve((8,), (5.0,)).at(100) == 5.0


@pytest.mark.parametrize(
    ("tokens", "ms"),
    [((), ()), ((1, 2), (1.0,)), ((2, 1), (1.0, 1.0)), ((0,), (1.0,)), ((1,), (0.0,)), ((1,), (math.nan,)),
     ((1,), (math.inf,))],
)  # fmt: skip
def test_what_is_no_curve_is_refused(tokens, ms):
    with pytest.raises(ConfigError):
        Curve(tokens, ms)


def test_it_splits_where_the_profile_says_so_whatever_the_thresholds():
    assert plan([512, 512]).should_ubatch
    small = plan([128, 128])
    assert (small.should_ubatch, small.reason) == (False, Reason.NOT_PROFITABLE)
    assert not plan([256, 256], uniform_decode=True).should_ubatch
    assert str(Auto(CONFIG, COSTS).costs.estimate(small)) == "whole 20.67 ms, overlap 54.67 ms"


def test_padding_to_the_largest_rank_is_weighed_against_work_that_is_shared():
    skewed = ArmCosts(
        whole=COSTS.prefill.whole, overlap=COSTS.prefill.overlap, whole_skew=0.2, overlap_skew=1.0
    )  # whole: the mean counts most; overlap: every rank computes the padding
    costs = StepCosts(prefill=skewed, decode=COSTS.decode)
    assert plan([700, 700, 700, 700], costs).should_ubatch
    uneven = plan([700, 360, 360, 360], costs)
    assert uneven.reason is Reason.NOT_PROFITABLE
    estimate = costs.estimate(uneven)
    assert estimate.whole_ms == pytest.approx(costs.prefill.whole.at(0.2 * 700 + 0.8 * 445))
    assert estimate.overlap_ms == pytest.approx(costs.prefill.overlap.at(700))


def test_what_cannot_be_split_is_not_even_if_it_would_pay():
    assert plan([2048, 64, 64, 64]).reason is Reason.LAST_UBATCH_EMPTY
    assert plan([900, 0]).reason is Reason.IDLE_RANK
    assert plan([1000, 1]).reason is Reason.LAST_UBATCH_EMPTY


def test_under_graphs_whole_pads_too():
    def estimate(graph_mode):
        return COSTS.estimate(plan([500, 500], graph_mode=graph_mode, num_tokens_padded=512))

    assert estimate(1).whole_ms == pytest.approx(COSTS.prefill.whole.at(512))
    assert estimate(0).whole_ms == pytest.approx(COSTS.prefill.whole.at(500))


def test_clocks_of_all_ranks_move_the_decision_together():
    dear = round(0.6 / DRIFT_UNIT)  # 1.8x
    assert not plan([700, 700], prefill_drift=dear).should_ubatch
    assert plan([700, 700], decode_drift=dear).should_ubatch
    cheap = plan([700, 700], prefill_drift=-dear)
    assert cheap.should_ubatch
    one = [Vote(num_tokens=700, prefill_drift=dear), Vote(num_tokens=700, prefill_drift=-dear)]
    assert COSTS.estimate(plan_for(one, CONFIG, Auto(CONFIG, COSTS))).drift == 0
    assert COSTS.estimate(plan([700], prefill_drift=10**6)).drift == DRIFT_BOUND


def test_a_rank_may_ask_for_a_look_at_the_other_arm():
    votes = [Vote(num_tokens=700), Vote(num_tokens=700, probe=PROBE_WHOLE)]
    assert plan_for(votes, CONFIG, Auto(CONFIG, COSTS)).reason is Reason.PROBE
    votes = [Vote(num_tokens=70, probe=PROBE_OVERLAP), Vote(num_tokens=70)]
    assert plan_for(votes, CONFIG, Auto(CONFIG, COSTS)).should_ubatch
    both = [Vote(num_tokens=700, probe=PROBE_OVERLAP), Vote(num_tokens=700, probe=PROBE_WHOLE)]
    assert plan_for(both, CONFIG, Auto(CONFIG, COSTS)).reason is Reason.PROBE


def test_probes_split_as_rank_0_asks():
    for ask, splits in ((PROBE_OVERLAP, True), (PROBE_WHOLE, False), (0, False)):
        votes = [Vote(num_tokens=70, probe=ask), Vote(num_tokens=70, probe=PROBE_OVERLAP)]
        assert plan_for(votes, CONFIG, Probes(CONFIG)).should_ubatch == splits


def test_make_policy():
    assert isinstance(make_policy(CONFIG, COSTS), Auto)
    assert "auto by a measured profile" in make_policy(CONFIG, COSTS).describe()
    assert "for want of" in make_policy(CONFIG).describe()
    assert not isinstance(make_policy(DBOConfig(overlap="on"), COSTS), Auto)


def curves():
    points = st.dictionaries(st.integers(1, 5000), st.floats(1e-3, 1e5), min_size=1, max_size=6)
    return points.map(lambda found: Curve(tuple(sorted(found)), tuple(found[n] for n in sorted(found))))


ARMS = st.builds(ArmCosts, whole=curves(), overlap=curves(), whole_skew=st.floats(0, 1), overlap_skew=st.floats(0, 1))
INT32 = st.integers(-(2**31), 2**31 - 1)


@settings(max_examples=300, deadline=None)
@given(
    costs=st.builds(StepCosts, prefill=ARMS, decode=ARMS),
    votes=st.lists(
        st.builds(
            Vote,
            num_tokens=st.integers(0, 10_000),
            num_tokens_padded=st.integers(0, 10_000),
            uniform_decode=st.booleans(),
            graph_mode=st.integers(0, 2),
            prefill_drift=INT32,
            decode_drift=INT32,
            probe=st.integers(0, 2),
        ),
        min_size=1,
        max_size=8,
    ),
    num_ubatches=st.integers(2, 4),
)
def test_the_plan_is_a_pure_function_of_the_votes_and_every_cost_is_a_positive_number(costs, votes, num_ubatches):
    config = DBOConfig(overlap="auto", num_ubatches=num_ubatches)
    names = Vote.__dataclass_fields__
    rows = {name: tuple(int(getattr(vote, name)) for vote in votes) for name in names}
    plans = []
    for _ in votes:  # every rank decides with a policy of its own, from its own copy
        policy = Auto(config, costs)
        plans.append(decide({**rows, WANTS: tuple(int(policy.vote(vote)) for vote in votes)}, config, policy))
    assert all(plan == plans[0] for plan in plans)
    estimate = costs.estimate(plans[0])
    for value in (estimate.whole_ms, estimate.overlap_ms, math.exp(estimate.drift)):
        assert math.isfinite(value)
        assert value > 0
    assert abs(estimate.drift) <= DRIFT_BOUND


@settings(max_examples=200, deadline=None)
@given(
    whole=curves(), overlap=curves(), num_tokens=st.integers(2, 6000), drift=st.integers(0, 3000),
    factor=st.floats(1, 10),
)  # fmt: skip
def test_what_makes_overlap_dearer_never_makes_it_chosen(whole, overlap, num_tokens, drift, factor):
    def splits(overlap, drift):
        arms = ArmCosts(whole=whole, overlap=overlap)
        return plan([num_tokens] * 2, StepCosts(prefill=arms, decode=arms), prefill_drift=drift).should_ubatch

    dearer = Curve(overlap.tokens, tuple(ms * factor for ms in overlap.ms))
    assert splits(overlap, 0) or not splits(dearer, 0)
    assert splits(overlap, 0) or not splits(overlap, drift)


@settings(max_examples=100, deadline=None)
@given(curve=curves(), a=st.floats(1, 10_000), b=st.floats(1, 10_000))
def test_a_rising_curve_stays_rising(curve, a, b):
    rising = Curve(curve.tokens, tuple(sorted(curve.ms)))
    low, high = sorted((a, b))
    assert rising.at(low) <= rising.at(high) * (1 + 1e-9)


# --------------------------------------------------------------------------------------------- what a clock may change


class Clock:
    """Ranks that run steps under `auto` and find that the arms cost `whole` and `overlap` times what was predicted."""

    def __init__(self, whole: float, overlap: float, num_tokens: int = 700, num_ranks: int = 2):
        self.policy = Auto(CONFIG, COSTS)
        self.corrections = [Correction(self.policy, speaks=rank == 0) for rank in range(num_ranks)]
        self.factors = {False: whole, True: overlap}
        self.num_tokens = num_tokens

    def step(self, stall: float = 1.0) -> BatchPlan:
        votes = [Vote(num_tokens=self.num_tokens, **each.fields(False)) for each in self.corrections]
        planned = plan_for(votes, CONFIG, self.policy)
        estimate = COSTS.estimate(planned)
        predicted = estimate.overlap_ms if planned.should_ubatch else estimate.whole_ms
        for each in self.corrections:
            each.observe(planned, predicted * self.factors[planned.should_ubatch] * stall)
        return planned

    def run(self, num_steps: int) -> list[bool]:
        return [self.step().should_ubatch for _ in range(num_steps)]


def test_a_profile_that_holds_is_left_alone():
    assert all(Clock(1.0, 1.0).run(300))
    assert not any(Clock(1.02, 0.98, num_tokens=100).run(300))


def test_a_machine_that_is_slower_in_both_arms_changes_nothing_but_for_a_look_now_and_then():
    splits = Clock(1.5, 1.5).run(2000)
    assert splits.count(False) < 2000 * 0.02
    assert all(splits[-_gap(splits) :])


def _gap(splits):
    at = [i for i, split in enumerate(splits) if not split]
    assert at, "a contradiction deserves a look"
    assert all(b - a >= 16 for a, b in pairwise(at))
    return len(splits) - at[-1] - 1


def test_overlap_that_loses_against_its_profile_is_given_up_and_the_log_says_so(caplog):
    caplog.set_level(logging.INFO)
    splits = Clock(1.0, 1.6).run(600)  # 700 tokens: 116 ms whole, 96 ms overlap as predicted
    assert all(splits[:10])
    assert splits[-200:].count(True) < 10
    messages = [record.getMessage() for record in caplog.records]
    assert any("prefill steps run whole, against the profile (whole 116.00 ms, overlap 96.38 ms" in m for m in messages)
    assert len(messages) <= 4


def test_whole_that_loses_against_its_profile_gives_way():
    assert Clock(2.5, 1.0, num_tokens=400).run(600)[-200:].count(False) < 10


def test_one_stall_changes_nothing():
    clock = Clock(1.0, 1.0)
    clock.run(50)
    clock.step(stall=100.0)
    assert all(clock.run(100))


def test_a_correction_is_bounded_and_fades():
    clock = Clock(1.0, 50.0)
    clock.run(400)
    (drift,) = {each.fields(False)["prefill_drift"] for each in clock.corrections}
    assert drift == round(DRIFT_BOUND / DRIFT_UNIT)
    assert clock.corrections[0].fields(False)["decode_drift"] == 0
    clock.factors[True] = 1.0  # the link recovers: looks go on, so this is found
    clock.run(3000)
    assert clock.corrections[0].fields(False)["prefill_drift"] < drift / 4
    assert clock.step().should_ubatch


def test_steps_with_an_idle_rank_say_nothing():
    policy = Auto(CONFIG, COSTS)
    correction = Correction(policy)
    idle = plan([700, 0])
    for _ in range(50):
        correction.observe(idle, 1e6)
    assert set(correction.fields(False).values()) == {0}
