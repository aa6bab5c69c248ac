"""From sorted expert rows back to one row per received token: gather, weigh, add.

Its own file because it is the other end of `permute`. Invariant: each token's rows are added by one program in the
order of its choices, in float32, so there are no atomics and the result is the same every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe.kernels.launch import Launcher
from moe.kernels.sizes import ceil_div, power_of_2


@triton.jit
def _weighted_sum_kernel(y, position, weights, out, hidden, NUM_TOPK: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(NUM_TOPK):
        place = tl.load(position + token * NUM_TOPK + k).to(tl.int64)
        here = place >= 0
        row = tl.load(y + place * hidden + cols, mask=cols < tl.where(here, hidden, 0), other=0.0).to(tl.float32)
        # A weight beside an id of -1 is undefined and may be NaN: it is not used.
        total += tl.where(here, tl.load(weights + token * NUM_TOPK + k), 0.0) * row
    tl.store(out + token * hidden + cols, total.to(out.dtype.element_ty), mask=inside)


_weighted_sum = Launcher(_weighted_sum_kernel)


def weighted_sum(y: Tensor, position: Tensor, weights: Tensor) -> Tensor:
    """out[t] = sum over k of weights[t, k] * y[position[t, k]], without the k whose position is -1; one launch.

    y [m, hidden]; position [n, num_topk] int32; weights [n, num_topk] float32. Gives [n, hidden] of y's dtype.
    """
    num_rows, num_topk = position.shape
    hidden = y.shape[-1]
    out = torch.empty(num_rows, hidden, dtype=y.dtype, device=y.device)
    if num_rows:
        block = min(2048, power_of_2(hidden))
        grid = (num_rows, ceil_div(hidden, block), 1)
        _weighted_sum(grid, y, position, weights.contiguous(), out, hidden, NUM_TOPK=num_topk, BLOCK=block)
    return out
