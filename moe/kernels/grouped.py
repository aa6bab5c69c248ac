"""Grouped products over device-side row counts, the first one with its gate: the bulk of the expert path's time.

Its own file because it is the one place where tile shapes matter. One kernel serves both layouts: it walks `Tiles` (which expert,
which rows), so the number of tiles is read on the device and rows beyond it cost nothing. It gathers its left rows through an
index (no permuted copy of the tokens is ever written) and applies SwiGLU before it stores (the gate and up halves never reach
memory). Invariant: a row's result depends on that row and its expert alone, whatever the batch, so split and whole agree.

The grid is persistent, one program a multiprocessor that compute may use (`num_sms`), so a partition holds for these kernels too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe.kernels.permute import Tiles
from moe.sms import compute_sms


@triton.jit
def _grouped_kernel(
    x,
    source,
    weight,
    out,
    spans,
    num_tiles,
    width,
    x_stride,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_n = tl.cdiv(width, BLOCK_N)
    total = tl.load(num_tiles) * tiles_n
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        span = spans + 3 * (tile // tiles_n)
        expert = tl.load(span)
        first = tl.load(span + 1)
        end = tl.load(span + 2)
        rows = first + tl.arange(0, BLOCK_M)
        live = rows < end
        # Rows past the end repeat the first one: finite, and never stored.
        reads = tl.where(live, rows, first)
        if GATHER:
            reads = tl.load(source + reads)
        cols = (tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
        depth = tl.arange(0, BLOCK_K)
        x_tile = x + reads.to(tl.int64)[:, None] * x_stride + depth[None, :]
        weight_rows = tl.where(cols < width, cols, 0)
        expert_weight = weight + expert.to(tl.int64) * (width * (2 if GATED else 1)) * DEPTH
        w_tile = expert_weight + weight_rows[None, :] * DEPTH + depth[:, None]
        up_tile = w_tile + width * DEPTH
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, DEPTH, BLOCK_K):
            if DEPTH % BLOCK_K == 0:
                a = tl.load(x_tile + k)
                b = tl.load(w_tile + k)
                acc = tl.dot(a, b, acc)
                if GATED:
                    up = tl.dot(a, tl.load(up_tile + k), up)
            else:
                inside = depth + k < DEPTH
                a = tl.load(x_tile + k, mask=inside[None, :], other=0.0)
                b = tl.load(w_tile + k, mask=inside[:, None], other=0.0)
                acc = tl.dot(a, b, acc)
                if GATED:
                    up = tl.dot(a, tl.load(up_tile + k, mask=inside[:, None], other=0.0), up)
        if GATED:
            acc = acc * tl.sigmoid(acc) * up
        tl.store(
            out + rows.to(tl.int64)[:, None] * width + cols[None, :],
            acc.to(out.dtype.element_ty),
            mask=live[:, None] & (cols < width)[None, :],
        )


def _launch(x: Tensor, source: Tensor | None, weight: Tensor, tiles: Tiles, out: Tensor, *, gated: bool) -> None:
    width, depth = out.shape[-1], x.shape[-1]
    block_n, block_k, num_warps, num_stages = _shape(tiles.block, gated)
    grid = min(compute_sms(x.device), max(1, tiles.spans.shape[0] * triton.cdiv(width, block_n)))
    _grouped_kernel[(grid,)](
        x,
        tiles.spans if source is None else source,
        weight,
        out,
        tiles.spans,
        tiles.count,
        width,
        x.stride(0),
        DEPTH=depth,
        GATED=gated,
        GATHER=source is not None,
        BLOCK_M=tiles.block,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def _shape(block_m: int, gated: bool) -> tuple[int, int, int, int]:
    """(block_n, block_k, num_warps, num_stages) for a tile of block_m rows; the gated product keeps two accumulators."""
    if block_m >= 128:
        return (128 if gated else 256), 64, 8, 4
    return 64, 128, 4, 3


def grouped_swiglu(x: Tensor, source: Tensor | None, w_gate_up: Tensor, tiles: Tiles, num_rows: int) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T) of each tile's expert: [num_rows, width] of x's dtype; rows outside all tiles undefined.

    x [n, hidden], rows strided; `source` [num_rows] int32: the row of x behind each row of the result, None = the same row;
    w_gate_up [num_experts, 2 * width, hidden], gate first, contiguous.
    """
    out = torch.empty(num_rows, w_gate_up.shape[1] // 2, dtype=x.dtype, device=x.device)
    _launch(x, source, w_gate_up, tiles, out, gated=True)
    return out


def grouped_product(x: Tensor, weight: Tensor, tiles: Tiles) -> Tensor:
    """x @ weight.T of each tile's expert: [n, width] of x's dtype; x [n, depth], weight [num_experts, width, depth], contiguous."""
    out = torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype, device=x.device)
    _launch(x, None, weight, tiles, out, gated=False)
    return out
