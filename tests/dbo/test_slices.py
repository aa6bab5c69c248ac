"""Cuts and what follows from them, against a brute force that looks at every single token."""

from dataclasses import KW_ONLY, dataclass, fields
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo.agreement import Vote
from dbo.slices import (
    Batch,
    by_request,
    by_token,
    can_cut,
    cut_query_lens,
    cut_seq_lens,
    derived,
    make_slices,
    pad_batch,
    ruled,
    shared,
    split_batch,
    tokens_per_rank_of_ubatch,
)
from tests.dbo.votes import config_on, plan_for

FREE = {"prefill_token_threshold": 0, "decode_token_threshold": 0}


@dataclass
class ToyBatch(Batch):
    SHARED_CONSTANT: ClassVar[int] = 3
    input_ids: torch.Tensor = ruled(by_token())
    positions: torch.Tensor = ruled(by_token(dim=-1))
    slot_mapping: torch.Tensor = ruled(by_token(pad=-1))
    inputs_embeds: torch.Tensor | None = ruled(by_token())
    intermediate_tensors: dict[str, Any] = ruled(by_token())
    query_lens: np.ndarray = ruled(derived(lambda b, s: cut_query_lens(b.query_lens, s), padded_as=by_request()))
    seq_lens: torch.Tensor = ruled(derived(lambda b, s: cut_seq_lens(b.seq_lens, s), padded_as=by_request()))
    block_tables: torch.Tensor = ruled(by_request())
    rotary: torch.Tensor = ruled(shared())
    num_tokens: int = ruled(derived(lambda _, s: s.num_tokens))
    ubatch: int = ruled(derived(lambda _, s: s.index), default=0)


def toy_batch(requests):
    """A batch of `requests`, each (computed tokens, new tokens); token ids and slots tell where they come from."""
    tokens = [(r, computed + i) for r, (computed, new) in enumerate(requests) for i in range(new)]
    ids = torch.tensor([r * 1000 + position for r, position in tokens], dtype=torch.int64)
    positions = torch.tensor([position for _, position in tokens], dtype=torch.int64)
    return ToyBatch(
        input_ids=ids,
        positions=positions.expand(3, -1),
        slot_mapping=ids + 5,
        inputs_embeds=None,
        intermediate_tensors={"residual": ids[:, None].float(), "pairs": [(ids, ids.numpy())]},
        query_lens=np.array([new for _, new in requests], dtype=np.int32),
        seq_lens=torch.tensor([computed + new for computed, new in requests], dtype=torch.int32),
        block_tables=torch.arange(len(requests) * 2, dtype=torch.int32).reshape(-1, 2),
        rotary=torch.zeros(4),
        num_tokens=len(tokens),
    )


def plan_and_batch(requests, config, others=(), padded=0, **vote):
    """A plan in which this rank, rank 0, has `requests`; and its batch, padded as planned."""
    batch = toy_batch(requests)
    votes = [Vote(num_tokens=batch.num_tokens, num_tokens_padded=padded, **vote)]
    plan = plan_for(votes + [Vote(num_tokens=n, **vote) for n in others], config)
    return plan, batch if plan.num_tokens_padded is None else pad_batch(batch, plan.num_tokens_padded)


def check_partition(slices, requests, num_padded):
    """The true slices hold every token once and in order, the padded ones every row."""
    owner = [r for r, (_, new) in enumerate(requests) for _ in range(new)]
    assert [s.index for s in slices] == list(range(len(slices)))
    assert [row for s in slices for row in range(s.tokens.start, s.tokens.stop)] == list(range(len(owner)))
    assert [row for s in slices for row in range(s.tokens_padded.start, s.tokens_padded.stop)] == list(
        range(num_padded)
    )
    for s in slices:
        assert list(range(s.requests.start, s.requests.stop)) == sorted(set(owner[s.tokens]))
        assert s.num_tokens == len(owner[s.tokens]) <= s.num_tokens_padded
        assert s.num_requests == len(set(owner[s.tokens]))


def check_parts(parts, slices, requests):
    """Each part's counts and positions are those of its own tokens, with earlier ones counted as computed."""
    computed = [c for c, _ in requests]
    for part, s in zip(parts, slices, strict=True):
        n = s.num_tokens
        assert part.num_tokens == n
        assert part.ubatch == s.index
        assert len(part.input_ids) == part.positions.shape[-1] == len(part.slot_mapping) == s.num_tokens_padded
        assert part.slot_mapping[:n].equal(part.input_ids[:n] + 5)
        assert (part.slot_mapping[n:] == -1).all()
        assert (part.input_ids[n:] == 0).all()
        at = 0
        rows = range(s.requests.start, s.requests.stop)
        assert len(part.query_lens) == len(part.seq_lens) == len(part.block_tables) == len(rows)
        for local, r in enumerate(rows):
            new = int(part.query_lens[local])
            expected = list(range(computed[r], computed[r] + new))
            assert part.positions[:, at : at + new].tolist() == [expected] * 3
            assert part.input_ids[at : at + new].tolist() == [r * 1000 + p for p in expected]
            computed[r] += new
            assert int(part.seq_lens[local]) == computed[r]
            assert part.block_tables[local].tolist() == [2 * r, 2 * r + 1]
            at += new
        assert at == n
    assert computed == [c + new for c, new in requests]


def check(plan, batch, requests):
    query_lens = np.array([new for _, new in requests], dtype=np.int32)
    slices = make_slices(plan, query_lens, seq_lens=np.array([c + new for c, new in requests], dtype=np.int32))
    assert len(slices) == plan.num_ubatches
    check_partition(slices, requests, plan.num_tokens_padded or int(query_lens.sum()))
    parts = split_batch(batch, slices)
    check_parts(parts, slices, requests)
    return slices, parts


# ------------------------------------------------------------------------------------------------- known shapes


def test_the_second_half_of_a_request_goes_on_where_the_first_ended():
    plan, batch = plan_and_batch([(0, 160)], config_on(**FREE), others=[160])
    _, (first, second) = check(plan, batch, [(0, 160)])
    assert (first.seq_lens.tolist(), second.seq_lens.tolist()) == ([80], [160])
    assert (first.query_lens.tolist(), second.query_lens.tolist()) == ([80], [80])
    assert second.positions[0, 0] == 80
    assert batch.seq_lens.tolist() == [160]
    assert batch.query_lens.tolist() == [160]


def test_a_cut_inside_the_second_of_three_requests():
    requests = [(0, 50), (10, 160), (0, 30)]
    plan, batch = plan_and_batch(requests, config_on(**FREE), others=[240])
    _, (first, second) = check(plan, batch, requests)
    assert (first.query_lens.tolist(), second.query_lens.tolist()) == ([50, 70], [90, 30])
    assert (first.seq_lens.tolist(), second.seq_lens.tolist()) == ([50, 80], [170, 30])


def test_one_request_over_three_ubatches():
    requests = [(7, 161)]
    plan, batch = plan_and_batch(requests, config_on(num_ubatches=3, **FREE), others=[162])
    slices, parts = check(plan, batch, requests)
    assert [part.seq_lens.tolist() for part in parts] == [[61], [115], [168]]
    assert [(s.cut_head, s.cut_tail) for s in slices] == [(0, 107), (54, 53), (108, 0)]


def test_index_fields_have_as_many_rows_as_their_ubatch_for_a_batch_of_32():
    requests = [(100 + r, 1) for r in range(32)]
    plan, batch = plan_and_batch(requests, config_on(num_ubatches=3, **FREE), others=[32], uniform_decode=True)
    check(plan, batch, requests)


def test_parts_made_first_and_used_later_in_any_order_do_not_share_what_differs():
    requests = [(0, 50), (10, 160), (0, 30)]
    plan, batch = plan_and_batch(requests, config_on(**FREE), others=[240])
    slices, _ = check(plan, batch, requests)
    forwards, backwards = split_batch(batch, slices), split_batch(batch, slices[::-1])[::-1]
    check_parts(forwards, slices, requests)
    check_parts(backwards, slices, requests)


@pytest.mark.parametrize(("num_tokens", "parts"), [(14, [7, 7]), (18, [9, 9])])
def test_odd_cuts_give_views_unless_a_kernel_needs_aligned_rows(num_tokens, parts):
    @dataclass
    class Aligned(Batch):
        plain: torch.Tensor = ruled(by_token())
        aligned: torch.Tensor = ruled(by_token(align_bytes=16))

    plan, _ = plan_and_batch([(0, num_tokens)], config_on(**FREE), others=[num_tokens])
    slices = make_slices(plan, np.array([num_tokens]))
    ids = torch.arange(num_tokens)
    assert ids.data_ptr() % 16 == 0
    split = split_batch(Aligned(plain=ids, aligned=ids), slices)
    assert [len(part.plain) for part in split] == parts
    assert split[1].plain.data_ptr() == ids.data_ptr() + 8 * parts[0]
    assert [part.aligned.data_ptr() % 16 for part in split] == [0, 0]
    assert split[1].aligned.equal(split[1].plain)
    assert split[0].aligned.data_ptr() == ids.data_ptr()


def test_alignment_moves_the_cut_to_a_multiple():
    plan, batch = plan_and_batch([(0, 30)], config_on(cut_alignment=8, **FREE), others=[31])
    slices, _ = check(plan, batch, [(0, 30)])
    assert [(s.tokens.stop, s.tokens_padded.stop) for s in slices] == [(16, 16), (30, 32)]


def test_a_step_that_is_not_split_is_one_slice_also_without_tokens():
    for requests, others in ([(3, 5), (0, 2)], []), ([], [40]):
        plan, batch = plan_and_batch(requests, config_on(**FREE), others=others)
        (s,), (part,) = check(plan, batch, requests)
        assert s.num_tokens_per_rank == plan.num_tokens_per_rank
        assert part.input_ids.equal(batch.input_ids)


def test_an_idle_rank_pads_to_the_graph_of_the_others():
    plan, batch = plan_and_batch([], config_on(), others=[60], padded=64, graph_mode=1, uniform_decode=True)
    (s,), (part,) = check_partition_only(plan, batch)
    assert (s.num_tokens, s.num_tokens_padded, s.requests_padded) == (0, 64, slice(0, 64))
    assert (part.slot_mapping == -1).all()


def check_partition_only(plan, batch):
    slices = make_slices(plan, batch.query_lens)
    return slices, split_batch(batch, slices)


def test_padding_of_a_uniform_decode_is_one_request_a_token_so_that_graphs_see_equal_shapes():
    requests = [(9, 1)] * 5
    config = config_on(**FREE)
    plan, batch = plan_and_batch(requests, config, others=[8], padded=8, graph_mode=2, uniform_decode=True)
    slices, parts = check(plan, batch, requests)
    assert [(s.requests, s.requests_padded) for s in slices] == [
        (slice(0, 4), slice(0, 4)),
        (slice(4, 5), slice(4, 8)),
    ]
    assert [len(part.block_tables) for part in parts] == [4, 1]
    padded = split_batch(pad_batch(batch, 8, num_requests=8), slices)
    assert [len(part.block_tables) for part in padded] == [4, 4]
    assert padded[1].seq_lens.tolist() == [10, 0, 0, 0]


def test_the_tokens_of_every_rank_in_a_ubatch_are_known_where_cuts_are_common():
    plan, _ = plan_and_batch([(0, 7)], config_on(num_ubatches=3, **FREE), others=[9, 8])
    assert [tokens_per_rank_of_ubatch(plan, k) for k in range(3)] == [(3, 3, 3), (3, 3, 3), (1, 3, 2)]
    plan, _ = plan_and_batch([(0, 7), (0, 3)], config_on(cut="requests", **FREE), others=[9])
    assert tokens_per_rank_of_ubatch(plan, 0) is None
    assert [s.num_tokens_per_rank for s in make_slices(plan, np.array([7, 3]))] == [None, None]


# --------------------------------------------------------------------------------------------------- other cuts


@pytest.mark.parametrize(
    ("query_lens", "num_ubatches", "alignment", "ends"),
    [
        ([10, 10, 10, 10], 2, 1, [20, 40]),
        ([100, 1, 1], 3, 1, [100, 101, 102]),
        ([1, 1, 100], 2, 1, [2, 102]),
        ([30, 50], 2, 1, [30, 80]),
        ([30, 34, 2, 14], 2, 16, [64, 80]),
        ([30, 50], 2, 16, None),
        ([160], 2, 1, None),
        ([5, 5], 3, 1, None),
        ([], 2, 1, None),
    ],
)
def test_cut_at_the_nearest_request_boundary(query_lens, num_ubatches, alignment, ends):
    config = config_on(cut="requests", num_ubatches=num_ubatches, cut_alignment=alignment, **FREE)
    lengths = np.array(query_lens, dtype=np.int32)
    assert can_cut(lengths, config) == (ends is not None)
    if ends is not None:
        plan, batch = plan_and_batch([(0, n) for n in query_lens], config, others=[3])
        slices, _ = check(plan, batch, [(0, n) for n in query_lens])
        assert [s.tokens.stop for s in slices] == ends
        assert all(s.cut_head == s.cut_tail == 0 for s in slices)


def test_a_balanced_cut_gives_the_later_longer_sequences_fewer_tokens():
    requests = [(0, 1000)]
    plan, batch = plan_and_batch(requests, config_on(cut="balanced", **FREE), others=[3])
    slices, _ = check(plan, batch, requests)
    assert [s.num_tokens for s in slices] == [707, 293]  # 707^2 is half of 1000^2
    requests = [(5000, 100), (0, 100)]
    plan, batch = plan_and_batch(requests, config_on(cut="balanced", cut_alignment=16, **FREE), others=[3])
    slices, _ = check(plan, batch, requests)
    assert slices[0].num_tokens == 48


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.uint32, np.uint64])
def test_a_balanced_cut_takes_lengths_of_any_integer_type(dtype):
    config = config_on(cut="balanced", **FREE)
    requests = [(5000, 100), (0, 100)]
    plan, _ = plan_and_batch(requests, config, others=[3])
    query_lens, seq_lens = np.array([100, 100], dtype), np.array([5100, 100], dtype)
    slices = make_slices(plan, query_lens, seq_lens=seq_lens)
    assert [s.num_tokens for s in slices] == [51, 149]


def test_a_balanced_cut_needs_a_token_for_each_ubatch():
    config = config_on(cut="balanced", num_ubatches=3)
    assert [can_cut(np.full(n, 1), config) for n in range(5)] == [False, False, False, True, True]


def test_a_batch_that_does_not_fit_the_plan_is_refused():
    plan, _ = plan_and_batch([(0, 30)], config_on(**FREE), others=[30])
    with pytest.raises(ValueError, match="31 tokens in the batch, but the plan pads to 30"):
        make_slices(plan, np.array([31]))
    with pytest.raises(ValueError, match="must be positive, found 0"):
        make_slices(plan, np.array([30, 0]))
    plan, _ = plan_and_batch([(0, 30), (0, 2)], config_on(cut="requests", **FREE), others=[30])
    with pytest.raises(ValueError, match="cannot be cut in 2 by requests"):
        make_slices(plan, np.array([32]))


request_lists = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 25)), min_size=1, max_size=8)


@settings(max_examples=400, deadline=None)
@given(
    requests=request_lists,
    num_ubatches=st.integers(2, 5),
    alignment=st.integers(1, 4),
    cut=st.sampled_from(["tokens", "requests", "balanced"]),
    more=st.integers(0, 20),
    graph=st.booleans(),
)
def test_every_cut_against_brute_force(requests, num_ubatches, alignment, cut, more, graph):
    config = config_on(num_ubatches=num_ubatches, cut_alignment=alignment, cut=cut, **FREE)
    query_lens = np.array([new for _, new in requests])
    seq_lens = np.array([c + new for c, new in requests])
    possible = can_cut(query_lens, config, seq_lens=seq_lens)
    vote = {"graph_mode": int(graph), "can_cut": possible}
    plan, batch = plan_and_batch(requests, config, others=[int(query_lens.sum()) + more], **vote)
    slices, _ = check(plan, batch, requests)
    if not plan.should_ubatch:
        return
    assert all(s.num_tokens > 0 for s in slices)
    assert all(s.tokens.start % alignment == 0 for s in slices)
    if cut == "tokens":
        assert len({s.num_tokens_padded for s in slices}) == 1
    if cut == "requests":
        assert {s.tokens.start for s in slices} <= {0, *np.cumsum(query_lens)}
    if cut == "balanced" and alignment == 1:
        work = [sum(p + 1 for r, p in tokens_of(requests)[s.tokens]) for s in slices]
        if num_ubatches == 2 and int(query_lens.sum()) > 2:
            costs = [p + 1 for _, p in tokens_of(requests)]
            best = min(abs(sum(costs[:i]) - sum(costs[i:])) for i in range(1, len(costs)))
            assert abs(work[0] - work[1]) <= best + 2 * max(costs)


def tokens_of(requests):
    return [(r, c + i) for r, (c, new) in enumerate(requests) for i in range(new)]


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=10), num_ubatches=st.integers(2, 5))
def test_a_cut_by_requests_exists_exactly_if_there_are_enough_requests(lengths, num_ubatches):
    config = config_on(cut="requests", num_ubatches=num_ubatches)
    assert can_cut(np.array(lengths), config) == (len(lengths) >= num_ubatches)
    if num_ubatches == 2 <= len(lengths):
        plan, _ = plan_and_batch([(0, n) for n in lengths], config_on(cut="requests", **FREE), others=[5])
        at = make_slices(plan, np.array(lengths))[1].tokens.start
        distances = [abs(2 * sum(lengths[:i]) - sum(lengths)) for i in range(1, len(lengths))]
        assert abs(2 * at - sum(lengths)) == min(distances)


# ------------------------------------------------------------------------------------------------ batch classes


def test_a_field_without_a_rule_fails_when_its_class_is_made():
    with pytest.raises(TypeError, match=r"Forgetful\.mrope has no slicing rule"):

        @dataclass
        class Forgetful(ToyBatch):
            mrope: torch.Tensor | None = None

    with pytest.raises(TypeError, match=r"Bare\.ids has no slicing rule"):

        class Bare(Batch):
            ids: torch.Tensor


def test_a_field_from_a_class_that_is_no_batch_needs_a_rule_too():
    @dataclass
    class Mixin:
        lora_ids: torch.Tensor

    with pytest.raises(TypeError, match=r"Mixed\.lora_ids has no slicing rule"):

        class Mixed(Mixin, ToyBatch):
            pass

    class NotAClassVar:
        pass

    with pytest.raises(TypeError, match=r"Named\.ids has no slicing rule"):

        class Named(Batch):
            ids: NotAClassVar


@pytest.mark.parametrize("in_quotes", [False, True])
def test_what_a_dataclass_makes_no_field_of_needs_no_rule(in_quotes):
    kinds = ("ClassVar[int]", "KW_ONLY") if in_quotes else (ClassVar[int], KW_ONLY)
    members = {"NUM": 3, "ids": ruled(by_token())}
    annotations = {"NUM": kinds[0], "_": kinds[1], "ids": torch.Tensor}
    small = dataclass(type("Small", (Batch,), {**members, "__annotations__": annotations, "__module__": __name__}))
    assert pad_batch(small(ids=torch.ones(1)), 2).ids.tolist() == [1, 0]


class Pair(NamedTuple):
    key: torch.Tensor
    value: torch.Tensor | None


def test_a_named_tuple_keeps_its_names():
    @dataclass
    class Named(Batch):
        pair: Pair = ruled(by_token())

    padded = pad_batch(Named(pair=Pair(torch.ones(2), None)), 3).pair
    assert type(padded) is Pair
    assert padded.key.tolist() == [1, 1, 0]
    assert padded.value is None


def test_a_batch_class_that_is_not_a_dataclass_is_refused_rather_than_losing_fields():
    class Undecorated(ToyBatch):
        extra: torch.Tensor = ruled(shared())

    batch = Undecorated(**{f.name: getattr(toy_batch([(0, 3)]), f.name) for f in fields(ToyBatch)})
    with pytest.raises(TypeError, match="Undecorated is not a dataclass"):
        pad_batch(batch, 4)


def test_slotted_and_frozen_batches_work():
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Small(Batch):
        ids: torch.Tensor = ruled(by_token())

    assert pad_batch(Small(ids=torch.ones(3)), 4).ids.tolist() == [1, 1, 1, 0]


def test_padding_is_pure_shares_what_is_long_enough_and_reaches_into_structures():
    batch = toy_batch([(0, 3), (4, 2)])
    padded = pad_batch(batch, 8)
    assert len(batch.input_ids) == 5
    assert padded.intermediate_tensors["residual"].shape == (8, 1)
    assert [len(t) for t in padded.intermediate_tensors["pairs"][0]] == [8, 8]
    assert padded.positions.shape == (3, 8)
    assert padded.inputs_embeds is None
    assert padded.block_tables is batch.block_tables
    assert pad_batch(padded, 8).input_ids is padded.input_ids
    with pytest.raises(ValueError, match="more than the 4"):
        pad_batch(batch, 4)


@pytest.mark.parametrize("num_ubatches", [2, 3, 4, 5])
def test_a_field_that_was_not_padded_is_refused_for_every_number_of_ubatches(num_ubatches):
    requests = [(0, 6 * num_ubatches - 1)]
    plan, batch = plan_and_batch(requests, config_on(num_ubatches=num_ubatches, **FREE), others=[6 * num_ubatches])
    batch.positions = batch.positions[:, : requests[0][1]]
    with pytest.raises(ValueError, match="pad_batch first"):
        split_batch(batch, make_slices(plan, np.array([requests[0][1]])))


def test_parts_are_views_and_cover_structures():
    requests = [(0, 8), (2, 8)]
    plan, batch = plan_and_batch(requests, config_on(**FREE), others=[16])
    slices, (first, second) = check(plan, batch, requests)
    batch.input_ids[8] = -77
    assert second.input_ids[0] == -77
    assert second.rotary is first.rotary is batch.rotary
    residual = [part.intermediate_tensors["residual"] for part in (first, second)]
    assert torch.cat(residual).equal(batch.intermediate_tensors["residual"])
    assert isinstance(second.intermediate_tensors["pairs"][0], tuple)
    starts = [s.tokens_padded.start for s in slices]
    assert all(a < b for a, b in pairwise(starts))
