"""A product with one matrix whose rows do not depend on how many there are.

Its own file because a library's product is faster: it chooses another kernel, or another split of the sum, for another
number of rows, and so rounds a row otherwise when its neighbours change. Here the tile is the same for any number, as
of an expert (`grouped.product_tile`), and a sum runs over the depth in one order. The idea of fixing tiles is that of
batch-invariant kernels (Thinking Machines, "Defeating Nondeterminism in LLM Inference", 2025).

Invariant: a row of the result depends on that row and the matrix alone. One launch, a program a tile, so programs end
soon where an all2all waits for multiprocessors; tiles of the same columns run side by side, so a matrix is read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe.kernels.grouped import GroupedWeight, product_tile
from moe.kernels.launch import Launcher
from moe.kernels.sizes import ceil_div

_ROWS, _COLUMNS, _DEPTH = 64, 64, 128  # of a tile: fits decode and prefill without being best for either


@triton.jit
def _dense_kernel(
    x,
    weight,
    out,
    num_rows,
    width,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # x: descriptor of [num_rows, DEPTH]; weight: descriptor of [width, DEPTH]
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    tile = tl.program_id(0)
    product_tile(
        x, out, weight, out, 0, (tile % tiles_m) * BLOCK_M, num_rows, (tile // tiles_m) * BLOCK_N, width, 0,
        DEPTH, False, False, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


_dense = Launcher(_dense_kernel)


def dense_product(x: Tensor, weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """x @ weight[0].T, summed in float32 and rounded once, to `dtype`: [n, width].

    x [n, depth] of the weight's dtype, n may be 0; weight [1, width, depth]; depth a multiple of 8.
    """
    (num_rows, depth), width = x.shape, weight.shape[1]
    out = torch.empty(num_rows, width, dtype=dtype, device=x.device)
    if num_rows:
        _dense(
            (ceil_div(num_rows, _ROWS) * ceil_div(width, _COLUMNS), 1, 1),
            TensorDescriptor.from_tensor(x.contiguous(), [_ROWS, _DEPTH]),
            weight.blocks(_COLUMNS, _DEPTH),
            out,
            num_rows,
            width,
            DEPTH=depth,
            BLOCK_M=_ROWS,
            BLOCK_N=_COLUMNS,
            BLOCK_K=_DEPTH,
            num_warps=4,
            num_stages=3,
        )
    return out
