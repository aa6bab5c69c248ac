"""Residual addition and RMS norm in one pass over the row.

Its own file, as each fused kernel is: the plain form is two or three launches and reads the row again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe.kernels.launch import Launcher
from moe.kernels.sizes import power_of_2


@triton.jit
def _add_rms_norm_kernel(x, residual, weight, normed, hidden, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * hidden
    cols = tl.arange(0, BLOCK)
    inside = cols < hidden
    value = tl.load(x + row + cols, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row + cols, mask=inside, other=0.0).to(tl.float32)
        # The norm sees the sum as it is stored, so that fused and plain give the same bits.
        stored = value.to(residual.dtype.element_ty)
        tl.store(residual + row + cols, stored, mask=inside)
        value = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / hidden + eps)
    gain = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row + cols, (value * scale * gain).to(normed.dtype.element_ty), mask=inside)


_add_rms_norm = Launcher(_add_rms_norm_kernel)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Give (rms_norm(x + residual) * weight, x + residual) for x, residual [n, hidden]; one launch.

    The sum is written into `residual`; without one the second result is x itself.
    """
    assert residual is None or residual.is_contiguous()
    num_rows, hidden = x.shape
    normed = torch.empty_like(x)
    total = x if residual is None else residual
    if num_rows:
        block = power_of_2(hidden)
        _add_rms_norm(
            (num_rows, 1, 1),
            x,
            total,
            weight,
            normed,
            hidden,
            eps,
            ADD=residual is not None,
            BLOCK=block,
            num_warps=4 if block <= 2048 else 8,
        )
    return normed, total
