"""Matrix products with weights that never change: `make_linear`, and `make_head` for logits.

Its own file because the fastest form depends on device and dtype, and layers should not know. On CPU in float32 the
weight is kept in oneDNN's blocked layout: with a few rows, when a product costs what reading the weight costs, that is
1.5 to 2 times as fast as `F.linear` on this layout's source (`benchmarks/cpu_step.py` shows the whole step), and it is
no slower with many.

With `batch_invariant` (see `ModelConfig`) a row's bits do not depend on the other rows: one kernel of a fixed tile in a
16-bit type on CUDA, else the usual form on blocks of a fixed number of rows (`moe.blocks`).

Invariant: the packed weight replaces the plain one; a caller that drops its tensor has it in memory once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.blocks import product_in_blocks

Linear = Callable[[Tensor], Tensor]
HALVES = (torch.bfloat16, torch.float16)
ROWS_HINT = 16  # any from 4 up gives the same layout; oneDNN's choice for 1 is slower beyond one row


def make_linear(weight: Tensor, bias: Tensor | None = None, *, batch_invariant: bool = False) -> Linear:
    """`x [n, k] -> x @ weight.T + bias [n, m]` for weight [m, k], bias [m] or None; n may be 0."""
    if batch_invariant:
        if not has_tiles(weight):
            return product_in_blocks(make_linear(weight, bias))
        multiply = _in_tiles(weight, weight.dtype)
        return multiply if bias is None else lambda x: multiply(x).add_(bias)
    if not _can_pack(weight):
        return plain_linear(weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)
    pointwise = torch.ops.mkldnn._linear_pointwise
    return lambda x: pointwise(x, packed, bias, "none", [], "")


def plain_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The same, reading `weight` where it is in every call."""
    return lambda x: F.linear(x, weight, bias)


def make_head(weight: Tensor, *, batch_invariant: bool = False) -> Linear:
    """`x [n, k] -> x @ weight.T [n, m]` in float32, n may be 0.

    Half-precision products on CUDA are not rounded on their way out: in bfloat16 logits of 16 to 32 lie 0.125 apart,
    and many tokens would be equally likely.
    """
    if batch_invariant:
        return _in_tiles(weight, torch.float32) if has_tiles(weight) else product_in_blocks(make_head(weight))
    if not (weight.is_cuda and weight.dtype in HALVES):
        linear = make_linear(weight)
        return lambda x: linear(x).float()
    columns = weight.t()

    def head(x: Tensor) -> Tensor:
        if not x.shape[0]:
            return x.new_empty(0, columns.shape[1], dtype=torch.float32)
        return torch.mm(x, columns, out_dtype=torch.float32)

    return head


def has_tiles(weight: Tensor) -> bool:
    """Whether the kernels of products serve a weight [.., depth]: on a GPU, of a type and depth that their loads can
    carry."""
    return weight.is_cuda and weight.dtype in HALVES and weight.shape[-1] % 8 == 0


def _in_tiles(weight: Tensor, dtype: torch.dtype) -> Linear:
    from moe.kernels.dense import dense_product  # a laptop has no Triton
    from moe.kernels.grouped import GroupedWeight

    matrix = GroupedWeight(weight.contiguous()[None])
    return lambda x: dense_product(x, matrix, dtype)


def _can_pack(weight: Tensor) -> bool:
    """These two operators are torch's own (its compiler emits them) but not documented, hence the questions."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch._C._dispatch_has_kernel_for_dispatch_key("mkldnn::_reorder_linear_weight", "CPU")
    )
