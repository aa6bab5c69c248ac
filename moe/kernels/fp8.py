"""Block-scaled 8-bit floats for the wire: one float32 scale for each 128 values of a row.

Its own file because only transports use it: tokens cross in float8_e4m3fn and are bfloat16 again before the experts
see them. The layout (scales [..., hidden // 128] float32) is DeepEP's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe.kernels.launch import Launcher
from moe.kernels.sizes import ceil_div, power_of_2

BLOCK = 128
_LARGEST = 448.0  # of float8_e4m3fn


@triton.jit
def _quantise_kernel(x, out, scales, num_blocks, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr):
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = blocks < num_blocks
    value = tl.load(x + at, mask=live[:, None], other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 1), 1.0e-4) / LARGEST
    tl.store(out + at, (value / scale[:, None]).to(out.dtype.element_ty), mask=live[:, None])
    tl.store(scales + blocks, scale, mask=live)


_quantise = Launcher(_quantise_kernel)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, hidden], hidden a multiple of 128 -> (float8_e4m3fn [n, hidden], scales [n, hidden // 128] float32); one
    launch.
    """
    num_rows, hidden = x.shape
    out = torch.empty(num_rows, hidden, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, hidden // BLOCK, dtype=torch.float32, device=x.device)
    if num_rows:
        blocks = 16
        grid = (ceil_div(scales.numel(), blocks), 1, 1)
        _quantise(grid, x.contiguous(), out, scales, scales.numel(), BLOCKS=blocks, BLOCK=BLOCK, LARGEST=_LARGEST)
    return out, scales


@triton.jit
def _dequantise_kernel(
    x, scales, counts, out, rows_per_group, hidden, scale_group, scale_row, scale_col,
    COUNTED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0)
    if COUNTED and row >= tl.load(counts + group):
        return
    cols = tl.arange(0, WIDTH)
    inside = cols < hidden
    at = (group * rows_per_group + row) * hidden + cols
    scale = tl.load(
        scales + group * scale_group + row * scale_row + (cols // BLOCK) * scale_col, mask=inside, other=0.0
    )
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


_dequantise = Launcher(_dequantise_kernel)


def dequantise(x: Tensor, scales: Tensor, counts: Tensor | None = None) -> Tensor:
    """The bfloat16 values of x [n, hidden] or [groups, n, hidden] float8 and scales [..., hidden // 128] of any
    strides; one launch.

    With counts [groups] int32 only the first counts[g] rows of each group are written, the rest are undefined.
    """
    grouped = x.view(-1, *x.shape[-2:])
    scales_of = scales if scales.dim() == 3 else scales.unsqueeze(0)
    num_groups, num_rows, hidden = grouped.shape
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    if num_groups and num_rows:
        _dequantise(
            (num_rows, num_groups, 1),
            grouped,
            scales_of,
            scales_of if counts is None else counts,
            out,
            num_rows,
            hidden,
            *scales_of.stride(),
            COUNTED=counts is not None,
            WIDTH=power_of_2(hidden),
            BLOCK=BLOCK,
        )
    return out
