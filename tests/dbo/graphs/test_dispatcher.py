"""The dispatcher against brute force, and what `settle` makes of agreed plans (known faults 13, 14, 34, 40)."""

from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo.agreement import WANTS, BatchPlan, Reason, decide
from dbo.config import DBOConfig
from dbo.errors import ConfigError
from dbo.graphs.descriptor import BatchDescriptor
from dbo.graphs.dispatcher import GraphDispatcher, default_capture_sizes
from dbo.graphs.mode import CUDAGraphMode as Mode
from dbo.policy import make_policy

MODES = st.sampled_from(Mode)
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=6)
UBATCHES = st.lists(st.integers(2, 4), max_size=3)
ADAPTERS = (("active_adapters", 2),)


def make(mode: Mode, sizes: list[int], num_ubatches: list[int], **options: int) -> GraphDispatcher:
    options = {"max_num_requests": 16} | options
    return GraphDispatcher(mode, sizes, num_ubatches=num_ubatches, variants=((), ADAPTERS), **options)


def brute_force(
    dispatcher: GraphDispatcher, num_tokens: int, *, uniform: bool, num_ubatches: int, variants: object, limit: int
) -> tuple[Mode, BatchDescriptor | None]:
    """The best key that can hold the step, found by looking at all of them."""
    best: tuple[tuple[int, bool, int], Mode, BatchDescriptor] | None = None
    for mode, key in dispatcher.shapes():
        fits = key.num_tokens >= num_tokens and key.num_ubatches == num_ubatches and key.variants == variants
        level = 1 if mode is Mode.PIECEWISE else 2 if key.uniform_decode else 3
        if fits and level <= limit and (uniform or not key.uniform_decode):
            rank = (-mode.level, not key.uniform_decode, key.num_tokens)
            if best is None or rank < best[0]:
                best = rank, mode, key
    return (Mode.NONE, None) if best is None else best[1:]


@settings(max_examples=150, deadline=None)
@given(
    mode=MODES,
    sizes=SIZES,
    ubatches=UBATCHES,
    num_tokens=st.integers(0, 50),
    uniform=st.booleans(),
    num=st.integers(1, 4),
    variants=st.sampled_from([(), ADAPTERS, (("active_adapters", 3),)]),
    limit=st.integers(0, 3),
    multiple=st.integers(1, 8),
)
def test_dispatch_is_the_best_key(mode, sizes, ubatches, num_tokens, uniform, num, variants, limit, multiple) -> None:  # type: ignore[no-untyped-def]
    dispatcher = make(mode, sizes, ubatches, multiple=multiple)
    found, descriptor = dispatcher.dispatch(
        num_tokens, uniform_decode=uniform, num_ubatches=num, variants=variants, limit=limit
    )
    expected, key = brute_force(
        dispatcher, num_tokens, uniform=uniform, num_ubatches=num, variants=variants, limit=limit
    )
    assert found is expected
    if key is None:
        key = BatchDescriptor(
            num_tokens=num_tokens, uniform_decode=uniform, num_ubatches=num, variants=variants
        )  # its own shape: nothing is padded for no graph
    assert descriptor == key


@pytest.mark.parametrize("num", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", [Mode.PIECEWISE, Mode.FULL, Mode.FULL_AND_PIECEWISE])
def test_saved_under_what_is_looked_up(mode: Mode, num: int) -> None:
    """Every key is found by its own size, by each smaller one down to the key before, and divides into its ubatches."""
    dispatcher = make(mode, list(range(1, 130)), [2, 3, 4], max_num_requests=100)
    keys = {(m, key) for m, key in dispatcher.shapes() if key.num_ubatches == num}
    assert keys
    for runtime, key in keys:
        at = key.num_tokens, key.uniform_decode
        limit = 1 if runtime is Mode.PIECEWISE else 3
        found = dispatcher.dispatch(at[0], uniform_decode=at[1], num_ubatches=num, variants=key.variants, limit=limit)
        assert found == (runtime, key)
        assert key.num_tokens_per_ubatch * num == key.num_tokens


@pytest.mark.parametrize("size", [90, 96, 99])
def test_three_ubatches(size: int) -> None:
    dispatcher = make(Mode.FULL, [90, 96, 99], [3], max_num_requests=128)
    _, key = dispatcher.dispatch(size - 1, uniform_decode=True, num_ubatches=3)
    assert (key.num_tokens, key.num_tokens_per_ubatch) == (size, size // 3)


def test_keys_largest_first() -> None:
    sizes = [key.num_tokens for _, key in make(Mode.FULL_AND_PIECEWISE, [4, 16, 1, 8], [2]).shapes()]
    assert sizes == sorted(sizes, reverse=True)


def test_a_shape_that_was_dropped_is_gone() -> None:
    dispatcher = make(Mode.PIECEWISE, [4, 8], [2])
    dispatcher.drop(Mode.PIECEWISE, BatchDescriptor(num_tokens=4))
    assert dispatcher.dispatch(3, uniform_decode=False)[1].num_tokens == 8
    assert dispatcher.dispatch(3, uniform_decode=False, num_ubatches=2)[1].num_tokens == 4


def test_uniform_decode_never_larger_than_its_requests() -> None:
    dispatcher = make(Mode.FULL_AND_PIECEWISE, [8, 64], [], max_num_requests=16)
    assert dispatcher.dispatch(8, uniform_decode=True)[0] is Mode.FULL
    assert dispatcher.dispatch(9, uniform_decode=True)[0] is Mode.PIECEWISE


@pytest.mark.parametrize("sizes", [[], [0, 4]])
def test_sizes_are_checked(sizes: list[int]) -> None:
    with pytest.raises(ConfigError, match="cudagraph_capture_sizes"):
        make(Mode.FULL, sizes, [])


@pytest.mark.parametrize("largest", [1, 3, 4, 255, 256, 512, 1000, 8192])
def test_default_sizes(largest: int) -> None:
    sizes = default_capture_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, largest)
    assert all(after <= max(2 * before, before + 16) for before, after in pairwise(sizes))
    assert all(after <= 1.5 * before for before, after in pairwise(sizes) if before >= 16)


# ------------------------------------------------------------------------------------------- after the agreement


def agreed(
    dispatcher: GraphDispatcher, num_tokens: tuple[int, ...], uniform: tuple[bool, ...], config: DBOConfig
) -> BatchPlan:
    """The plan of ranks that vote as the dispatcher says."""
    votes = [dispatcher.vote(n, uniform_decode=u) for n, u in zip(num_tokens, uniform, strict=True)]
    policy = make_policy(config)
    thresholds = [config.decode_token_threshold if u else config.prefill_token_threshold for u in uniform]
    ones = (1,) * len(num_tokens)
    table = {
        "num_tokens": num_tokens,
        "num_tokens_padded": tuple(padded for _, padded in votes),
        "uniform_decode": tuple(map(int, uniform)),
        "can_cut": ones,
        "graph_mode": tuple(level for level, _ in votes),
        "finished": (0,) * len(num_tokens),
        "num_rows": (0,) * len(num_tokens),
        WANTS: tuple(int(n >= t) for n, t in zip(num_tokens, thresholds, strict=True)),
    }
    return decide(table, config, policy)


def config(num_ubatches: int = 2, threshold: int = 1, **options: object) -> DBOConfig:
    return DBOConfig(
        overlap="on",
        num_ubatches=num_ubatches,
        decode_token_threshold=threshold,
        prefill_token_threshold=threshold,
        **options,  # type: ignore[arg-type]
    )


@settings(max_examples=300, deadline=None)
@given(
    mode=MODES,
    sizes=SIZES,
    num=st.integers(2, 4),
    ranks=st.lists(st.tuples(st.integers(0, 45), st.booleans()), min_size=2, max_size=4),
    threshold=st.integers(0, 30),
    multiple=st.integers(1, 4),
)
def test_settled_plans_hold(mode, sizes, num, ranks, threshold, multiple) -> None:  # type: ignore[no-untyped-def]
    """Whatever ranks vote: the graph exists, holds every rank, leaves no ubatch empty, and no less than it must."""
    settings_ = config(num, threshold, cut_alignment=multiple)
    dispatcher = GraphDispatcher(mode, sizes, num_ubatches=[num], multiple=multiple, max_num_requests=16)
    num_tokens, uniform = zip(*ranks, strict=True)
    plan = agreed(dispatcher, num_tokens, uniform, settings_)
    settled, runtime, key = dispatcher.settle(plan)
    assert settled.num_ubatches == plan.num_ubatches == key.num_ubatches
    assert runtime.level <= plan.graph_mode
    if runtime is Mode.FULL and not key.uniform_decode:
        assert plan.graph_mode == 3
    if runtime is Mode.NONE:
        assert settled.num_tokens_padded == (plan.num_tokens_padded if plan.should_ubatch else None)
        return
    assert (runtime, key) in set(dispatcher.shapes())
    assert settled.num_tokens_padded == key.num_tokens >= max(num_tokens)
    assert not key.uniform_decode or all(u for n, u in ranks if n)
    if settled.should_ubatch:
        assert key.num_tokens - key.num_tokens_per_ubatch < min(num_tokens)


def settle(
    tokens: tuple[int, ...], sizes: list[int], settings_: DBOConfig, mode: Mode = Mode.FULL
) -> tuple[BatchPlan, Mode, BatchDescriptor]:
    dispatcher = GraphDispatcher(mode, sizes, num_ubatches=[settings_.num_ubatches], max_num_requests=4096)
    return dispatcher.settle(agreed(dispatcher, tokens, (True,) * len(tokens), settings_))


def test_the_agreed_number_chooses_the_graph() -> None:
    plan, mode, key = settle((3, 60), [4, 64], config(threshold=100))
    assert (mode, key.num_tokens, plan.num_tokens_padded) == (Mode.FULL, 64, 64)


def test_one_rank_beyond_the_largest_size() -> None:
    plan, mode, _ = settle((5, 600), [8, 512], config(threshold=1000))
    assert (mode, plan.num_tokens_padded, plan.reason) == (Mode.NONE, None, Reason.BELOW_THRESHOLD)


def test_backing_out_of_a_split_keeps_the_graph() -> None:
    plan, mode, key = settle((25, 30), [32, 64], config(threshold=26))
    assert (plan.num_ubatches, mode, key.num_tokens) == (1, Mode.FULL, 32)
    plan, mode, key = settle((25, 60), [64], config(threshold=1))
    assert (plan.reason, mode, key.num_tokens) == (Reason.LAST_UBATCH_EMPTY, Mode.FULL, 64)


def test_one_size_that_one_rank_exceeds() -> None:
    plan, mode, _ = settle((4, 5), [4], config(threshold=4))
    assert (mode, plan.num_ubatches, plan.num_tokens_padded) == (Mode.NONE, 2, 6)


@pytest.mark.parametrize(("size", "num"), list(product([5, 7, 64], [2, 3, 4])))
def test_sizes_that_ubatches_do_not_divide(size: int, num: int) -> None:
    plan, mode, key = settle((size, size), [size], config(num))
    rounded = -(-size // num) * num
    if plan.should_ubatch:
        assert (mode, key.num_tokens) == (Mode.FULL, rounded)
    else:
        assert (plan.reason, mode, key.num_tokens) == (Reason.LAST_UBATCH_EMPTY, Mode.FULL, size)


def test_decode_on_one_rank_and_prefill_on_another() -> None:
    for mode, expected in ((Mode.FULL_AND_PIECEWISE, Mode.PIECEWISE), (Mode.FULL_DECODE_ONLY, Mode.NONE)):
        dispatcher = GraphDispatcher(mode, [8, 64], num_ubatches=[2], max_num_requests=16)
        plan = agreed(dispatcher, (5, 40), (True, False), config(threshold=100))
        settled, found, key = dispatcher.settle(plan)
        assert (found, key.uniform_decode) == (expected, False)
        assert settled.num_tokens_padded == (64 if expected.level else None)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [(Mode.FULL, Mode.NONE), (Mode.FULL_AND_PIECEWISE, Mode.PIECEWISE), (Mode.PIECEWISE, Mode.PIECEWISE)],
)
def test_a_decode_that_no_mixed_graph_holds(mode: Mode, expected: Mode) -> None:
    """One rank's contexts are too long for a graph of a mixed step, and another rank has a mixed step."""
    dispatcher = GraphDispatcher(mode, [8, 64], num_ubatches=[2], max_num_requests=16)
    votes = [
        dispatcher.vote(5, uniform_decode=True, fits=lambda key: False),
        dispatcher.vote(40, uniform_decode=False, fits=lambda key: True),
    ]
    limit = min(level for level, _ in votes)
    assert dispatcher.dispatch(64, uniform_decode=False, limit=limit)[0] is expected
    alone = dispatcher.dispatch(8, uniform_decode=True, limit=votes[0][0])[0]
    assert alone is (Mode.PIECEWISE if mode is Mode.PIECEWISE else Mode.FULL)


def test_requests_of_a_mixed_graph() -> None:
    dispatcher = GraphDispatcher(Mode.FULL, [10, 1000], num_ubatches=[], max_num_requests=8, tokens_per_request=100)
    found = [dispatcher.dispatch(n, uniform_decode=False)[1].num_requests for n in (10, 11)]
    assert found == [1, 8]


def test_an_idle_rank_is_in_nobodys_way() -> None:
    plan, mode, key = settle((0, 30), [32], config())
    assert (plan.reason, mode, key.num_tokens) == (Reason.IDLE_RANK, Mode.FULL, 32)
