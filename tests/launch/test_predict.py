"""The planner's maths against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo.errors import ConfigError
from launch.fit import fit_rest, measured_link, skew_of
from launch.predict import (
    PRESETS,
    Cluster,
    LayerTimes,
    Link,
    Predictor,
    Shape,
    busiest,
    chance_of_copy,
    fit_link,
    overlapped_us,
    parse_link,
    remote_copies,
)
from launch.profile import ExpertCosts
from tests.launch.profiles import MODEL, RANK, flat, layer, series, steps

SHAPE = Shape.of(MODEL)
FREE = Link(name="free", bandwidth_gbs=1e9, latency_us=0.0)


def cluster(ep=2, per_node=8, link=FREE, node_link=FREE, **more) -> Cluster:
    return Cluster(ep=ep, gpus_per_node=per_node, link=link, node_link=node_link, **more)


def predictor(costs=None, **at) -> Predictor:
    return Predictor(shape=SHAPE, costs=costs or layer(), measured_ranks=2, cluster=cluster(**at))


def test_a_message_is_latency_and_bytes():
    link = Link(name="x", bandwidth_gbs=45, latency_us=10)
    assert link.time_us(450_000) == pytest.approx(20)
    assert link.time_us(0) == 10


@pytest.mark.parametrize(
    ("experts", "local", "topk", "chance"),
    [(8, 4, 2, 1 - (4 / 8) * (3 / 7)), (8, 1, 2, 0.25), (8, 8, 2, 1.0), (8, 7, 2, 1.0), (6, 2, 1, 1 / 3)],
)
def test_the_chance_that_a_token_has_an_expert_there(experts, local, topk, chance):
    assert chance_of_copy(experts, local, topk) == pytest.approx(chance)


def test_the_chance_agrees_with_drawing_experts():
    rng = np.random.default_rng(1)
    chosen = np.argsort(rng.random((20_000, 16)), axis=1)[:, :3]
    assert chance_of_copy(16, 4, 3) == pytest.approx((chosen < 4).any(axis=1).mean(), abs=0.01)


@pytest.mark.parametrize(
    ("copies", "ep", "per_node", "near", "far"),
    [
        ("rank", 2, 8, 1 - 12 / 56, 0),
        ("expert", 2, 8, 1.0, 0),  # half of two experts is elsewhere
        ("expert", 8, 4, 2 * 3 / 8, 2 * 4 / 8),
        ("rank", 8, 4, 3 * 0.25, 4 * 0.25),
        ("node", 8, 4, 7 * 0.25, 1 - 12 / 56),  # one copy to the other node, then on to its ranks
        ("node", 4, 4, 3 * (1 - (6 / 8) * (5 / 7)), 0),
        ("rank", 8, 1, 0, 7 * 0.25),
    ],
)
def test_copies_that_leave_a_rank(copies, ep, per_node, near, far):
    assert remote_copies(SHAPE, cluster(ep=ep, per_node=per_node), copies) == pytest.approx((near, far))


def test_the_busiest_rank_by_chance():
    rng = np.random.default_rng(2)
    rows = 64 * SHAPE.num_topk * 8  # of 8 ranks with 64 tokens each
    loads = rng.multinomial(rows, [1 / 8] * 8, size=4000).max(axis=1) / (rows / 8)
    # The square root of 2 ln R is a bound for the largest of R, so it is somewhat above the mean.
    assert loads.mean() < busiest(SHAPE, cluster(ep=8), 64) < loads.mean() * 1.08
    assert busiest(SHAPE, cluster(ep=8, imbalance=1.5), 64) == pytest.approx(busiest(SHAPE, cluster(ep=8), 64) * 1.5)


def times(attention=10.0, dispatch=1.0, experts=10.0, combine=1.0, latency=0.0) -> LayerTimes:
    return LayerTimes(attention=attention, dispatch=dispatch, experts=experts, combine=combine, latency=latency)


@pytest.mark.parametrize("num_layers", [1, 2, 6, 7, 50])
def test_two_lanes_are_as_long_as_the_longer_one(num_layers):
    # Compute: A0 0-10, A1 10-20, E0 20-30, E1 30-40, and the last combine.
    assert overlapped_us(times(), num_layers, 2, 0.0) == pytest.approx(40 * num_layers + 1)
    # Messages: the first leaves at 1, then the link is never free.
    slow = times(attention=1, dispatch=10, experts=1, combine=10)
    assert overlapped_us(slow, num_layers, 2, 0.0) == pytest.approx(40 * num_layers + 1)


def test_latency_delays_arrival_and_leaves_the_link_free():
    # A0 0-1 d0 1-2, here at 22; A1 1-2 d1 2-3, at 23; E0 22-23 c0 23-24, at 44; E1 23-24 c1 24-25, at 45.
    assert overlapped_us(times(1, 1, 1, 1, latency=20), 1, 2, 0.0) == pytest.approx(45)
    assert times(1, 1, 1, 1, latency=20).whole == 44


def test_the_tax_slows_compute_while_the_link_is_taken():
    # A1 starts at 10, five us of it beside d0: 2.5 done, 7.5 left, ends at 22.5; E0 22.5-35, E1 35-47.5, c1 to 52.5.
    assert overlapped_us(times(dispatch=5, combine=5), 1, 2, 1.0) == pytest.approx(52.5)
    # A message that outlasts compute: all of it is slowed.
    assert overlapped_us(times(2, 50, 0.5, 0), 1, 2, 1.0) == pytest.approx(2 + 50 + 50 + 0.5)


@settings(max_examples=200, deadline=None)
@given(
    layer=st.builds(times, *[st.floats(0, 1e4)] * 5),
    num_layers=st.integers(1, 12),
    num_ubatches=st.integers(2, 4),
    tax=st.floats(0, 2),
)
def test_overlap_is_never_below_either_lane_nor_above_one_after_the_other(layer, num_layers, num_ubatches, tax):
    us = overlapped_us(layer, num_layers, num_ubatches, tax)
    compute = num_layers * num_ubatches * (layer.attention + layer.experts)
    link = num_layers * num_ubatches * (layer.dispatch + layer.combine)
    assert us >= max(compute, link) * (1 - 1e-9)
    assert us <= (num_layers * num_ubatches * layer.whole + tax * compute) * (1 + 1e-9)


def test_a_whole_step_by_hand():
    link = Link(name="x", bandwidth_gbs=1.0, latency_us=5.0)  # a byte a ns
    made = predictor(ep=8, per_node=1, link=link)
    load = 1 + math.sqrt((1 - 1 / 8) / 200) * math.sqrt(2 * math.log(8))
    messages = 100 * (2 * 7 / 8) * 1000 * load / 1000  # us, each way
    assert made.layer("decode", 100).dispatch == pytest.approx(messages)
    assert made.whole_ms("decode", 100) == pytest.approx(1 + 4 * (40 + 20 + 2 * messages + 2 * 5) / 1e3)


def test_the_slower_of_two_ways_counts_and_its_latency():
    near = Link(name="near", bandwidth_gbs=100.0, latency_us=1.0)
    far = Link(name="far", bandwidth_gbs=1.0, latency_us=9.0)
    inside = predictor(ep=4, per_node=4, link=far, node_link=near).layer("decode", 100)
    across = predictor(ep=4, per_node=2, link=far, node_link=near).layer("decode", 100)
    assert (inside.latency, across.latency) == (1, 9)
    assert across.dispatch > 20 * inside.dispatch


def test_fewer_local_experts_are_taken_from_their_own_curve():
    experts = tuple(ExpertCosts(num_local_experts=e, costs=flat(0.01 * e)) for e in (1, 4))
    for ep, us in ((8, 10.0), (4, 20.0), (2, 40.0)):
        assert predictor(layer(experts=experts), ep=ep).layer("decode", 10).experts == pytest.approx(us)


def test_more_ranks_than_experts_need_copies_that_are_stated():
    with pytest.raises(ConfigError, match=r"--ep=12.*up to 8 ranks.*--redundant-experts 4"):
        predictor(ep=12).layer("decode", 10)
    assert predictor(ep=12, redundant_experts=4).cluster.num_local_experts(8) == 1
    assert predictor(ep=12, redundant_experts=4).whole_ms("decode", 10) > 0
    few = layer(experts=(ExpertCosts(num_local_experts=1, costs=flat(0.01)),))
    with pytest.raises(ConfigError, match="they need 4 experts each, measured were 1"):
        predictor(few, ep=2).layer("decode", 10)


def test_packing_grows_with_the_copies_that_leave():
    packed = layer(packing=flat(0.010))
    plain = predictor(layer()).layer("decode", 10)
    two = predictor(packed).layer("decode", 10)  # as measured: on 2 ranks, half of it on each side of the message
    assert two.attention - plain.attention == pytest.approx(5)
    eight = predictor(packed, ep=8).layer("decode", 10)
    assert eight.experts - plain.experts == pytest.approx(5 * (2 * 7 / 8) / 1.0)


def test_dense_layers_send_nothing():
    dense = Shape(num_layers=4, num_dense_layers=1, num_experts=8, num_topk=2)
    made = Predictor(shape=dense, costs=layer(), measured_ranks=2, cluster=cluster())
    assert made.whole_ms("decode", 10) == pytest.approx(1 + (3 * 60 + 40) / 1e3, rel=1e-3)


def test_crossover():
    link = Link(name="x", bandwidth_gbs=1.0, latency_us=0.0)
    growing = layer(
        attention={phase: series({1: 0.02, 1000: 0.9}) for phase in ("prefill", "decode")},
    )
    made = predictor(growing, ep=8, per_node=1, link=link)
    found = made.crossover("decode", (2, 1000))
    assert found is not None
    assert made.overlap_ms("decode", found) <= made.whole_ms("decode", found)
    assert made.overlap_ms("decode", found - 2) > made.whole_ms("decode", found - 2) or found == 2
    assert predictor(growing).crossover("decode", (2, 1000)) is None  # nothing to hide


@pytest.mark.parametrize(
    ("text", "bandwidth", "latency"), [("45,10", 45, 10), ("0.05,200", 0.05, 200), ("400gb", 45, 10)]
)
def test_links(text, bandwidth, latency):
    link = parse_link(text, None)
    assert (link.bandwidth_gbs, link.latency_us) == pytest.approx((bandwidth, latency))


@pytest.mark.parametrize("text", ["measured", "fast", "1", "0,1", "1,-1", "1,2,3", "nan,1", ""])
def test_what_is_no_link_is_refused(text):
    with pytest.raises(ConfigError, match="--link"):
        parse_link(text, None)
    assert parse_link("measured", PRESETS["200gb"]) is PRESETS["200gb"]


def test_a_line_through_messages_gives_back_latency_and_bandwidth():
    sizes = [1e3, 1e4, 1e5, 1e6]
    link = fit_link("m", sizes, [50 + n / 2000 for n in sizes])
    assert (link.latency_us, link.bandwidth_gbs) == pytest.approx((50, 2.0))
    through_zero = fit_link("m", [1e3, 1e6], [0.98, 1000.0])
    assert through_zero.latency_us == 0
    assert through_zero.bandwidth_gbs == pytest.approx(1.0, rel=0.05)
    alike = fit_link("m", [1e3, 1e6], [5.0, 4.0])
    assert 4 < alike.latency_us < 5
    assert alike.transfer_us(1e6) < 0.01
    with pytest.raises(ConfigError, match="messages"):
        fit_link("m", [1e3], [5.0])


def test_what_is_fitted_explains_what_was_measured():
    """Steps made by the model itself, with a tax of 0.3 and 2 ms beside layers, give both back."""
    link = Link(name="x", bandwidth_gbs=0.2, latency_us=20.0)
    sizes = (8, 32, 128)
    copies = 1 - 12 / 56
    truth = layer(
        copies=RANK,
        sm_tax={"prefill": 0.3, "decode": 0.1},
        fixed={phase: flat(2.0) for phase in ("prefill", "decode")},
        messages=series({n: 2 * link.time_us(n * copies * 1000) / 1e3 for n in sizes}),
        attention={phase: series({4: 0.05, 128: 1.0}) for phase in ("prefill", "decode")},
    )
    assert measured_link(truth, SHAPE, 1) is None
    found = measured_link(truth, SHAPE, 2)
    assert found is not None
    assert (found.bandwidth_gbs, found.latency_us) == pytest.approx((0.2, 20.0))
    made = Predictor(
        shape=SHAPE, costs=truth, measured_ranks=2, cluster=cluster(ep=2, per_node=2, link=link, node_link=link)
    )
    phases = {
        phase: steps(
            {n: made.whole_ms(phase, n) for n in sizes}, {n: made.overlap_ms(phase, n) for n in sizes}
        )
        for phase in ("prefill", "decode")
    }  # fmt: skip
    fitted = fit_rest(layer(copies=RANK, messages=truth.messages, attention=truth.attention), SHAPE, phases, 2, 2)
    assert fitted.sm_tax == pytest.approx({"prefill": 0.3, "decode": 0.1})
    assert fitted.fixed["decode"].curve().at(32) == pytest.approx(2.0)


def test_skew():
    curve = series({10: 10.0, 100: 100.0}).curve()
    assert skew_of(curve, 75.0, 100, 50) == pytest.approx(0.5, abs=1e-3)
    assert skew_of(curve, 1000.0, 100, 50) == 1.0
    assert skew_of(curve, 1.0, 100, 50) == 0.0
