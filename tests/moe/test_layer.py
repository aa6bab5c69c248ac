"""The whole layer, on 1 to 4 ranks, against the plain layer in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dbo.runner import UBatchRunner
from moe.experts import ExpertWeights
from moe.layer import MoELayer
from moe.reference import moe_reference
from moe.router import Router
from tests.moe.cases import Case, make_backend, tolerance

WIDTH = 20
SHAPES = [
    Case(name="top 2 of 8", num_tokens=()),
    Case(name="top 1 of 5", num_tokens=(), num_experts=5, num_topk=1),
    Case(name="top 8 of 8", num_tokens=(), num_topk=8),
    Case(name="bfloat16", num_tokens=(), num_experts=9, num_topk=3, dtype=torch.bfloat16),
]


def make_weights(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    shapes = (
        (case.num_experts, case.hidden),
        (case.num_experts, 2 * WIDTH, case.hidden),
        (case.num_experts, case.hidden, WIDTH),
    )
    gate, w_gate_up, w_down = ((torch.randn(s, generator=random) / 5).to(case.dtype) for s in shapes)
    return gate, w_gate_up, w_down


def make_layer(ctx: Any, case: Case, backend: str = "auto", shared: Any = None) -> MoELayer:
    gate, w_gate_up, w_down = make_weights(case)
    experts = slice(case.experts(ctx.rank).start, case.experts(ctx.rank).stop)
    return MoELayer(
        Router(gate=gate, num_topk=case.num_topk, norm_topk_prob=True),
        ExpertWeights(w_gate_up=w_gate_up[experts], w_down=w_down[experts]),
        make_backend(ctx, backend, case),
        shared,
    )


def make_x(case: Case, rank: int, salt: int = 0) -> Tensor:
    """3 rows of NaN follow the real ones."""
    random = torch.Generator().manual_seed(100 * salt + rank)
    real = torch.randn(case.num_tokens[rank], case.hidden, generator=random)
    return torch.cat([real, torch.full((3, case.hidden), torch.nan)]).to(case.dtype)


def reference(case: Case, x: Tensor, num_tokens: int) -> Tensor:
    weights = (w.float() for w in make_weights(case))
    return moe_reference(x.float(), *weights, case.num_topk, True, num_tokens)


def run_layer(ctx: Any, sizes: tuple[int, ...]) -> None:
    for shape in SHAPES:
        case = replace(shape, num_tokens=sizes)
        n, x = sizes[ctx.rank], make_x(case, ctx.rank)
        layer = make_layer(ctx, case)
        y = layer(x, n, sizes)
        if case.dtype == torch.float32:  # in bfloat16 near-ties of the router go either way
            torch.testing.assert_close(y, reference(case, x, n), **tolerance(case.dtype))
        assert (y[n:] == 0).all()
        assert torch.equal(y, layer(x, n)), "with and without the counts of the others"


def run_shared(ctx: Any) -> None:
    case = replace(SHAPES[0], num_tokens=(7,) * ctx.world_size)
    w = torch.randn(case.hidden, case.hidden, generator=torch.Generator().manual_seed(9)) / 7
    x = make_x(case, ctx.rank)
    y = make_layer(ctx, case, shared=lambda rows: F.linear(rows, w))(x, 7, case.num_tokens)
    expected = reference(case, x, 7)[:7] + F.linear(x[:7], w)
    torch.testing.assert_close(y[:7], expected, **tolerance(case.dtype))


def run_ubatches(ctx: Any, num_ubatches: int, driver: str) -> None:
    """Three layers deep, shared experts, unequal ubatches: the same bits interleaved, in turn, and alone."""
    sizes = [tuple((5 * k + 3 * r) % 13 for r in range(ctx.world_size)) for k in range(num_ubatches)]
    case = replace(SHAPES[0], num_tokens=(13,) * ctx.world_size)
    layers = [make_layer(ctx, case, shared=F.silu if i else None) for i in range(3)]

    def model(item: tuple[int, Tensor]) -> Tensor:
        k, x = item
        for layer in layers:
            x = x + layer(x, sizes[k][ctx.rank], sizes[k])
        return x[: sizes[k][ctx.rank]]

    items = [(k, make_x(replace(case, num_tokens=sizes[k]), ctx.rank, k)) for k in range(num_ubatches)]
    with UBatchRunner(num_ubatches, device=torch.device("cpu"), driver=driver) as runner:  # type: ignore[arg-type]
        interleaved = runner.run(model, items)
        in_turn = runner.run(model, items, interleave=False)
    for item, one, other in zip(items, interleaved, in_turn, strict=True):
        assert torch.isfinite(one).all()
        assert torch.equal(one, other)
        assert torch.equal(one, model(item))


@pytest.mark.parametrize("sizes", [(16,), (5, 11), (0, 9), (9, 0), (0, 0), (3, 0, 17), (1, 2, 3, 4), (0, 0, 6, 0)])
def test_equals_the_reference(ranks: Any, sizes: tuple[int, ...]) -> None:
    ranks(len(sizes)).run(run_layer, sizes)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_shared_experts(ranks: Any, num_ranks: int) -> None:
    ranks(num_ranks).run(run_shared)


@pytest.mark.parametrize(
    ("num_ranks", "num_ubatches", "driver"),
    [(1, 2, "threads"), (2, 2, "threads"), (2, 3, "greenlet"), (3, 4, "threads")],
)
def test_ubatches_change_nothing(ranks: Any, num_ranks: int, num_ubatches: int, driver: str) -> None:
    ranks(num_ranks).run(run_ubatches, num_ubatches, driver)
