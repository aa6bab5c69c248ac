"""Grouped products over device-side row counts, the first one with its gate: the bulk of the expert path's time.

Its own file because it is the one place where tile shapes matter. One kernel serves both layouts: it walks `Tiles`
(which expert, which rows), so the number of tiles is read on the device and rows beyond it cost nothing. The first
product gathers its rows through an index (no permuted copy of the tokens is written) and applies SwiGLU before it
stores (the gate and up halves never reach memory). Invariant: a row's result depends on that row and its expert alone,
whatever the batch, so split and whole agree.

The grid is persistent, sized by the multiprocessors that compute may use, so a carve-out holds for these kernels
too; where multiprocessors are shared (`moe/sms.py`) the first product, the longer one, runs a program a tile on all.
Tile shapes and what to load how were chosen by measurement on an H200 (benchmarks/gpu/): weights and plain rows through
the tensor memory accelerator, gathered rows by pointer; flattening the two loops helps where the depth is short, and an
expert's last rows, where they fill half a tile at most, are a tile of half the size (3 to 7% of the first product).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe.kernels.launch import Launcher
from moe.kernels.permute import Tiles
from moe.kernels.sizes import ceil_div
from moe.sms import compute_sms, shared_sms


@triton.jit
def product_tile(
    x,
    source,
    weight,
    out,
    expert,
    first,
    end,
    col,
    width,
    x_stride,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rows first to first + BLOCK_M, before `end`, times BLOCK_N of the expert's columns from `col` on."""
    rows = first + tl.arange(0, BLOCK_M)
    live = rows < end
    weight_row = expert * (2 * width if GATED else width) + col
    depth = tl.arange(0, BLOCK_K)
    if GATHER:
        # Rows past the end repeat the first one: they are never stored.
        reads = tl.load(source + tl.where(live, rows, first)).to(tl.int64)
        x_tile = x + reads[:, None] * x_stride + depth[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, DEPTH, BLOCK_K):
        if not GATHER:
            a = x.load([first, k])
        elif DEPTH % BLOCK_K == 0:
            a = tl.load(x_tile + k)
        else:
            a = tl.load(x_tile + k, mask=(depth + k < DEPTH)[None, :], other=0.0)
        acc = tl.dot(a, weight.load([weight_row, k]).T, acc)
        if GATED:
            up = tl.dot(a, weight.load([weight_row + width, k]).T, up)
    if GATED:
        acc = acc * tl.sigmoid(acc) * up
    cols = col + tl.arange(0, BLOCK_N)
    at = out + rows.to(tl.int64)[:, None] * width + cols[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=live[:, None] & (cols < width)[None, :])


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
    HALVES: tl.constexpr,
):
    # x: pointer if GATHER else descriptor of [rows, DEPTH]; weight: descriptor of [experts * width (* 2), DEPTH]
    tiles_n = tl.cdiv(width, BLOCK_N)
    total = tl.load(num_tiles) * tiles_n
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=not GATED):
        span = spans + 3 * (tile // tiles_n)
        expert = tl.load(span)
        first = tl.load(span + 1)
        end = tl.load(span + 2)
        col = (tile % tiles_n) * BLOCK_N
        if HALVES and end - first <= BLOCK_M // 2:  # an expert's last rows: the rest of a tile would be for nothing
            product_tile(
                x, source, weight, out, expert, first, end, col, width, x_stride,
                DEPTH, GATED, GATHER, BLOCK_M // 2, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            product_tile(
                x, source, weight, out, expert, first, end, col, width, x_stride,
                DEPTH, GATED, GATHER, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip


_grouped = Launcher(_grouped_kernel)


class GroupedWeight:
    """One matrix an expert, [num_experts, rows, depth], contiguous; kept with its descriptors, as slow to make as a
    launch."""

    def __init__(self, weight: Tensor):
        self.shape = weight.shape
        self._matrix = weight.view(-1, weight.shape[-1])
        self._descriptors: dict[tuple[int, int], TensorDescriptor] = {}

    def blocks(self, num_rows: int, depth: int) -> TensorDescriptor:
        """To load blocks of this size."""
        made = self._descriptors.get((num_rows, depth))
        if made is None:
            made = self._descriptors[num_rows, depth] = TensorDescriptor.from_tensor(self._matrix, [num_rows, depth])
        return made


def _launch(x: Tensor, source: Tensor | None, weight: GroupedWeight, tiles: Tiles, out: Tensor, *, gated: bool) -> None:
    width, depth = out.shape[-1], x.shape[-1]
    if tiles.block >= 128:
        block_n, block_k, num_warps, num_stages, per_sm = (128, 64, 8, 4, 1) if gated else (256, 64, 8, 3, 1)
    else:
        block_n, block_k, num_warps, num_stages, per_sm = 64, 128, 4, 2 if gated and tiles.block == 64 else 3, 2
    most, shared = max(1, tiles.spans.shape[0] * ceil_div(width, block_n)), shared_sms()
    num_sms = compute_sms(x.device) if shared is None else min(compute_sms(x.device), shared)
    sharing = num_sms == shared  # nothing narrower is in force
    grid = most if sharing and gated and tiles.block >= 128 else min(per_sm * num_sms, most)
    _grouped(
        (grid, 1, 1),
        TensorDescriptor.from_tensor(x, [tiles.block, block_k]) if source is None else x,
        tiles.spans if source is None else source,
        weight.blocks(block_n, block_k),
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
        HALVES=gated and source is not None and tiles.block >= 128,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def grouped_swiglu(x: Tensor, source: Tensor | None, w_gate_up: GroupedWeight, tiles: Tiles, num_rows: int) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T) of each tile's expert: [num_rows, width] of x's dtype; other rows undefined.

    x [n, hidden], rows strided; `source` [num_rows] int32: the row of x behind each row of the result, None = the same
    row; w_gate_up [num_experts, 2 * width, hidden], gate first, contiguous; hidden and width multiples of 8.
    """
    out = torch.empty(num_rows, w_gate_up.shape[1] // 2, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        _launch(x, source, w_gate_up, tiles, out, gated=True)
    return out


def grouped_product(x: Tensor, weight: GroupedWeight, tiles: Tiles) -> Tensor:
    """x @ weight.T of each tile's expert: [n, width] of x's dtype; rows outside all tiles undefined.

    x [n, depth]; weight [num_experts, width, depth], contiguous; depth and width multiples of 8.
    """
    out = torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype, device=x.device)
    if x.shape[0]:
        _launch(x, None, weight, tiles, out, gated=False)
    return out
