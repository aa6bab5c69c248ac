"""With `batch_invariant`, a row has the same bits whatever is beside it, wherever it lies, however many there are.

The usual forms are not asked for that: they may differ, or not, by processor and library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe.all2all.base import Dispatched
from moe.all2all.local import LocalAll2All
from moe.attention.rotary import Rotary
from moe.blocks import PRODUCT_ROWS, product_in_blocks, row_by_row
from moe.config import named_shape
from moe.experts import ExpertWeights, make_experts
from moe.kv_cache import KVCache
from moe.linear import make_head, make_linear
from moe.models import load_model
from moe.norm import add_rms_norm
from moe.router import Router, route
from moe.swiglu import swiglu
from tests.moe.cases import tolerance
from tests.moe.checkpoints import BLOCK, BLOCKS_PER_REQUEST, VOCAB, make_batch, make_ids

DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [(24, 40), (48, 100), (100, 96), (576, 192), (1000, 24)]  # with and without a rest beside vector lengths
LARGEST = 200


def parts(seed: int = 0) -> Iterator[slice]:
    """Some rows of `LARGEST`: few, around the size of a block, many; from the start and from anywhere."""
    random = torch.Generator().manual_seed(seed)
    for size in (1, 2, 3, PRODUCT_ROWS - 1, PRODUCT_ROWS, PRODUCT_ROWS + 1, 33, 100, LARGEST - 1):
        for first in (0, int(torch.randint(0, LARGEST - size + 1, (1,), generator=random))):
            yield slice(first, first + size)


def check(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Every part of x alone gives its rows of the whole; so do x's rows in another order, and strided ones."""
    whole = function(x)
    for part in parts():
        assert torch.equal(function(x[part]), whole[part]), part
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    assert torch.equal(function(x[order]), whole[order])
    strided = torch.cat([x, x], dim=-1).chunk(2, dim=-1)[1]
    assert torch.equal(function(strided), whole)
    assert function(x[:0]).shape == (0, *whole.shape[1:])
    return whole


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("depth", "width"), WIDTHS)
def test_products(depth: int, width: int, biased: bool, dtype: torch.dtype) -> None:
    weight, bias = normal(width, depth, dtype=dtype) / depth**0.5, normal(width, dtype=dtype) if biased else None
    x = normal(LARGEST, depth, dtype=dtype)
    y = check(make_linear(weight, bias, batch_invariant=True), x)
    assert y.dtype == dtype
    torch.testing.assert_close(y, make_linear(weight, bias)(x), **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("depth", "width"), WIDTHS)
def test_logits(depth: int, width: int, dtype: torch.dtype) -> None:
    weight, x = normal(width, depth, dtype=dtype) / depth**0.5, normal(LARGEST, depth, dtype=dtype)
    y = check(make_head(weight, batch_invariant=True), x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, make_head(weight)(x), **tolerance(dtype))


def test_a_product_sees_one_shape_in_memory_of_its_own() -> None:
    """What its bits rest on, whatever the library: the same shape, alignment and zeros behind the last row."""
    seen: list[Tensor] = []

    def product(rows: Tensor) -> Tensor:
        seen.append(rows)
        return rows[:, :1]

    for size in (1, PRODUCT_ROWS, PRODUCT_ROWS + 3):
        x = normal(size + 1, 7)[1:]
        assert torch.equal(product_in_blocks(product)(x), x[:, :1])
    assert {rows.shape for rows in seen} == {(PRODUCT_ROWS, 7)}
    assert len(seen) == 4
    for rows in seen:
        assert rows.is_contiguous()
        assert rows.data_ptr() % 64 == 0
    assert not seen[-1][3:].any()


def test_other_functions_see_one_row() -> None:
    seen: list[tuple[int, ...]] = []
    row_by_row(lambda rows: seen.append(rows.shape) or rows, normal(5, 3))  # type: ignore[func-returns-value]
    assert seen == [(1, 3)] * 5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 24, 56, 100, 1000])
def test_elements(width: int, dtype: torch.dtype) -> None:
    x = normal(LARGEST, 2 * width, dtype=dtype)
    y = check(lambda rows: swiglu(rows, batch_invariant=True), x)
    torch.testing.assert_close(y, swiglu(x), **tolerance(dtype))
    weight = normal(2 * width, dtype=dtype)
    y = check(lambda rows: add_rms_norm(rows, None, weight, 1e-6, batch_invariant=True)[0], x)
    torch.testing.assert_close(y, add_rms_norm(x, None, weight, 1e-6)[0], **tolerance(dtype))
    residual = normal(LARGEST, 2 * width, dtype=dtype).flip(0)
    normed, total = add_rms_norm(x, residual.clone(), weight, 1e-6, batch_invariant=True)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, add_rms_norm(x + residual, None, weight, 1e-6)[0], **tolerance(dtype))


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize(("num_experts", "num_topk"), [(5, 2), (8, 8), (60, 4), (128, 8)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_routes(num_experts: int, num_topk: int, norm_topk_prob: bool, dtype: torch.dtype) -> None:
    x, gate = normal(LARGEST, 72, dtype=dtype), normal(num_experts, 72, dtype=dtype)
    router = Router(gate=gate, num_topk=num_topk, norm_topk_prob=norm_topk_prob, batch_invariant=True)
    ids = check(lambda rows: router(rows, LARGEST)[1], x)
    weights = check(lambda rows: router(rows, LARGEST)[0], x)
    logits = make_linear(gate, batch_invariant=True)(x)
    expected, expected_ids = route(logits, num_topk, norm_topk_prob=norm_topk_prob, num_tokens=LARGEST)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected)
    padded_weights, padded_ids = router(x, 150)
    assert torch.equal(padded_ids[:150], ids[:150])
    assert torch.equal(padded_weights[:150], weights[:150])
    assert (padded_ids[150:] == -1).all()
    assert not padded_weights[150:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [12, 16, 128])
def test_angles(head_dim: int, dtype: torch.dtype) -> None:
    config = replace(named_shape("tiny"), head_dim=head_dim)
    fixed = Rotary(replace(config, batch_invariant=True))
    positions = torch.randint(0, 30000, (LARGEST,), generator=torch.Generator().manual_seed(0))
    for k in range(2):
        whole = fixed.angles(positions, dtype)[k]
        for part in parts():
            assert torch.equal(fixed.angles(positions[part], dtype)[k], whole[part])
        torch.testing.assert_close(whole, Rotary(config).angles(positions, dtype)[k])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts(dtype: torch.dtype, packed: bool) -> None:
    """Other rows, and so other counts for each expert, and filler between them."""
    hidden, width, num_experts, num_topk = 72, 40, 6, 3
    weights = ExpertWeights(
        w_gate_up=normal(num_experts, 2 * width, hidden, dtype=dtype) / hidden**0.5,
        w_down=normal(num_experts, hidden, width, dtype=dtype) / width**0.5,
    )
    random = torch.Generator().manual_seed(2)
    ids = torch.rand(LARGEST, num_experts, generator=random).topk(num_topk).indices
    ids[torch.rand(ids.shape, generator=random) < 0.3] = -1
    shares = torch.rand(ids.shape, generator=random)
    x = normal(LARGEST, hidden, dtype=dtype)
    run = make_experts(weights, packed=packed, batch_invariant=True)

    def of(rows: Tensor) -> Tensor:
        return run(Dispatched(x=x[rows], topk_idx=ids[rows], topk_weights=shares[rows], handle=None))

    y = of(torch.arange(LARGEST))
    for part in parts():
        assert torch.equal(of(torch.arange(LARGEST)[part]), y[part])
    order = torch.randperm(LARGEST, generator=random)
    assert torch.equal(of(order), y[order])
    usual = make_experts(weights)(Dispatched(x=x, topk_idx=ids, topk_weights=shares, handle=None))
    torch.testing.assert_close(y, usual, **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_padded_experts(dtype: torch.dtype) -> None:
    hidden, width, counts = 72, 40, [0, 3, 40, 17]
    weights = ExpertWeights(
        w_gate_up=normal(4, 2 * width, hidden, dtype=dtype) / 8, w_down=normal(4, hidden, width, dtype=dtype) / 8
    )
    run, x = make_experts(weights, batch_invariant=True), normal(4, 40, hidden, dtype=dtype)

    def of(counts: list[int]) -> Tensor:
        return run(Dispatched(x=x, topk_idx=None, topk_weights=None, num_tokens_per_expert=counts, handle=None))

    whole = of(counts)
    for count in (1, 2, 16, 17):
        fewer = of([min(count, n) for n in counts])
        for expert, n in enumerate(counts):
            assert torch.equal(fewer[expert, : min(count, n)], whole[expert, : min(count, n)])


# ------------------------------------------------------------------------------------------------- the whole model

ROUNDING = {  # operators whose result may depend on the shape, or on the place in it
    "linear", "_linear_pointwise", "mm", "addmm", "bmm", "matmul", "sum", "mean", "softmax", "_softmax", "rms_norm",
    "_fused_rms_norm", "silu", "exp", "sigmoid", "cos", "sin", "rsqrt", "scaled_dot_product_attention",
}  # fmt: skip


class Shapes(TorchDispatchMode):
    """Notes what shapes the operators that round are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, tuple[tuple[int, ...], ...]]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ROUNDING:
            self.seen.add((name, tuple(tuple(each.shape) for each in args if isinstance(each, Tensor))))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_calls_libraries_with_the_same_shapes_for_every_batch(dtype: torch.dtype) -> None:
    """Whether results would differ otherwise is up to the library. Attention's shapes follow from positions, which are
    the same ones here."""
    config = replace(
        named_shape("tiny"), vocab_size=VOCAB, hidden=48, num_heads=6, head_dim=8, num_layers=2, attention_bias=True,
        qk_norm=True, dense_layers=frozenset({0}), dense_width=72, shared_expert_width=40, num_experts=3,
        dtype=dtype, batch_invariant=True,
    )  # fmt: skip
    setup: Any = {"group": None, "device": torch.device("cpu"), "config": config, "max_tokens_per_rank": 64}
    model = load_model(config, all2all=LocalAll2All(**setup), load_format="dummy", progress=False)
    seen = []
    for chunks in ([(2, 0, 9)], [(0, 0, 9), (2, 0, 9), (3, 0, 6), (1, 0, 1)]):
        kv = KVCache(config, BLOCKS_PER_REQUEST * 4, BLOCK, dtype)
        with Shapes() as shapes:
            hidden = model(make_batch(make_ids(), chunks), kv)
            model.compute_logits(hidden)
        seen.append(shapes.seen)
    assert seen[0] == seen[1]
    products = {shapes for name, shapes in seen[0] if name in ("linear", "_linear_pointwise", "mm", "addmm")}
    assert {shapes[0][0] for shapes in products} == {PRODUCT_ROWS}
    assert len(products) >= 9  # qkv, out, router, head, and two of each MLP, the experts' too, which are all alike
