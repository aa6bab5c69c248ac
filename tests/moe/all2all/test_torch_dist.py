"""What the torch backend puts on the wire: one exchange each way, each token once a rank, nothing that is padding."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe.all2all.torch_dist import TorchAll2All
from moe.reference import rows_reference
from tests.moe.all2all import forms as forms_of_nccl
from tests.moe.all2all.test_conformance import there_and_back
from tests.moe.cases import Case, make_backend, make_inputs

LAYOUTS = [(1, 256), (256, 1), (0, 30), (40, 40), (12, 0, 33)]


def count_on_the_wire(ctx: Any, sizes: tuple[int, ...], told: bool) -> None:
    case = Case(name="wire", num_tokens=sizes, num_padded=256, num_experts=12, num_topk=4, tell_counts=told)
    all2all = make_backend(ctx, "torch", case)
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
        there_and_back(all2all, case)
    dispatched, combined = (call.args[1] for call in exchange.call_args_list)
    routing = [make_inputs(case, rank).topk_idx for rank in range(case.ep_size)]
    others = [rank for rank in range(case.ep_size) if rank != ctx.rank]
    assert len(dispatched) == sum(len(rows_reference(routing[ctx.rank], case.experts(rank))) for rank in others)
    assert len(combined) == sum(len(rows_reference(routing[rank], case.experts(ctx.rank))) for rank in others)
    assert all2all.traffic.num_bytes == dispatched.numel() + combined.numel()
    assert all2all.traffic.messages == sum(
        len(rows_reference(routing[source], case.experts(holder))) > 0
        for source, holder in [(ctx.rank, rank) for rank in others] + [(rank, ctx.rank) for rank in others]
    )
    row_bytes = case.hidden * case.dtype.itemsize
    assert combined.shape[1] == row_bytes
    assert dispatched.shape[1] - row_bytes < 8 * case.num_topk + 4 + 32


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_rows_on_the_wire(ranks: Any, sizes: tuple[int, ...], told: bool) -> None:
    ranks(len(sizes)).run(count_on_the_wire, sizes, told)


def run_over_the_bound(ctx: Any) -> None:
    case = Case(name="bound", num_tokens=(4, 4), num_topk=8)
    all2all = make_backend(ctx, "torch", case)
    inputs = make_inputs(Case(name="more", num_tokens=(5, 5), num_topk=8), ctx.rank)
    for told in ((4, 4), None):
        with pytest.raises(ValueError, match="5 tokens to one rank; the others expect 4 at most"):
            all2all.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, told)
    there_and_back(all2all, case)


def test_more_tokens_than_announced_are_refused(ranks: Any) -> None:
    ranks(2).run(run_over_the_bound)


def run_new_group(ctx: Any) -> None:
    case = Case(name="renewed", num_tokens=(6, 6))
    all2all = make_backend(ctx, "torch", case)
    first = there_and_back(all2all, case)
    all2all.group = ctx.new_group("second")
    assert torch.equal(first, there_and_back(all2all, case))


def test_it_goes_on_in_a_new_group(ranks: Any) -> None:
    ranks(2).run(run_new_group)


def run_all_forms(ctx: Any) -> None:
    """With experts that round: their parts are added in one order, whichever form the size of a batch suggests."""
    case = Case(name="forms", num_tokens=(9, 30, 17), num_experts=12, num_topk=6, dtype=torch.bfloat16)
    forms = [TorchAll2All, forms_of_nccl.dense, forms_of_nccl.counted]
    setup: Any = {"group": ctx.group, "device": torch.device("cpu"), "config": case, "max_tokens_per_rank": 33}
    results = [there_and_back(form(**setup), case) for form in forms]
    assert results[0].abs().max() > 0.1
    assert all(torch.equal(result, results[0]) for result in results)


def test_all_forms_give_the_same_bits(ranks: Any) -> None:
    ranks(3).run(run_all_forms)
