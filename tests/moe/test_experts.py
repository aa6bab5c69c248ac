"""The expert path against the plain loop."""

from __future__ import annotations

import pytest
import torch

from moe.all2all.base import Dispatched
from moe.experts import ExpertWeights, make_experts
from moe.reference import experts_reference
from tests.moe.cases import tolerance

HIDDEN, WIDTH, NUM_EXPERTS = 40, 24, 6


def make_weights(dtype: torch.dtype = torch.float32) -> ExpertWeights:
    random = torch.Generator().manual_seed(1)
    return ExpertWeights(
        w_gate_up=(torch.randn(NUM_EXPERTS, 2 * WIDTH, HIDDEN, generator=random) / 6).to(dtype),
        w_down=(torch.randn(NUM_EXPERTS, HIDDEN, WIDTH, generator=random) / 6).to(dtype),
    )


def make_received(num_rows: int, num_topk: int, dtype: torch.dtype = torch.float32) -> Dispatched:
    """Some rows with experts of other ranks, some filler, poisoned where nobody may look; strided like a message."""
    random = torch.Generator().manual_seed(num_rows)
    topk_idx = torch.rand(num_rows, NUM_EXPERTS, generator=random).topk(num_topk).indices
    topk_weights = torch.rand(num_rows, num_topk, generator=random)
    elsewhere = torch.rand(num_rows, num_topk, generator=random) < 0.4
    topk_idx[elsewhere], topk_weights[elsewhere] = -1, torch.nan
    x = torch.randn(num_rows, HIDDEN + 8, generator=random).to(dtype)[:, :HIDDEN]
    x[(topk_idx < 0).all(-1)] = torch.nan
    return Dispatched(x=x, topk_idx=topk_idx, topk_weights=topk_weights, num_tokens_per_expert=None, handle=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_topk", [1, 2, 6])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 17, 200])
def test_rows(num_rows: int, num_topk: int, dtype: torch.dtype) -> None:
    received, weights = make_received(num_rows, num_topk, dtype), make_weights(dtype)
    run = make_experts(weights)
    y = run(received)
    assert received.topk_idx is not None
    assert received.topk_weights is not None
    expected = experts_reference(
        received.x.float(), received.topk_idx, received.topk_weights, weights.w_gate_up.float(), weights.w_down.float()
    )
    assert y.dtype == dtype
    assert y.is_contiguous()
    torch.testing.assert_close(y.float(), expected, **tolerance(dtype))
    assert torch.equal(y, run(received))
    assert (y[(received.topk_idx < 0).all(-1)] == 0).all()


def test_all_rows_to_one_expert() -> None:
    weights = make_weights()
    x, idx = torch.randn(50, HIDDEN), torch.full((50, 1), 4)
    received = Dispatched(x=x, topk_idx=idx, topk_weights=torch.ones(50, 1), num_tokens_per_expert=None, handle=None)
    expected = experts_reference(x, idx, torch.ones(50, 1), weights.w_gate_up, weights.w_down)
    torch.testing.assert_close(make_experts(weights)(received), expected, **tolerance(torch.float32))


@pytest.mark.parametrize("as_tensor", [True, False])
def test_padded(as_tensor: bool) -> None:
    weights, counts = make_weights(), [0, 3, 8, 1, 0, 5]
    x = torch.full((NUM_EXPERTS, 8, HIDDEN), torch.nan)
    for expert, count in enumerate(counts):
        x[expert, :count] = torch.randn(count, HIDDEN)
    received = Dispatched(
        x=x,
        topk_idx=None,
        topk_weights=None,
        num_tokens_per_expert=torch.tensor(counts, dtype=torch.int32) if as_tensor else counts,
        handle=None,
    )
    y = make_experts(weights)(received)
    for expert, count in enumerate(counts):
        one = torch.full((count, 1), expert)
        expected = experts_reference(x[expert, :count], one, torch.ones(count, 1), weights.w_gate_up, weights.w_down)
        torch.testing.assert_close(y[expert, :count], expected, **tolerance(torch.float32))
