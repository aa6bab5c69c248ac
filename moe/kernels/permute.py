"""Received rows sorted by expert: who goes where, counted on the device.

Its own file because both halves of the expert path read what is decided here: the grouped products (which rows belong
to an expert) and the weighted sum (where a row's results lie). Expert ids are small, so positions are counted, not
sorted: a histogram of every block of rows, then each block starts where the blocks before it end. Invariants: no
atomics, so the order is the same every time (by expert, then by row); no count reaches the host, so nothing waits and
a CUDA graph may hold it; filler (id -1) takes no place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe.kernels.launch import Launcher
from moe.kernels.sizes import ceil_div, power_of_2

_MAX_BLOCKS = 256  # each reads what all of them counted
_CHUNK = 64


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Blocks of rows for a grouped product; device tensors.

    spans [max_tiles, 3] int32: expert, first row, end row of the expert's rows; count [1] int32: how many spans are
    meant. `block` rows a tile.
    """

    spans: Tensor
    count: Tensor
    block: int


@dataclass(frozen=True, kw_only=True)
class Permutation:
    """Sorted places of n rows' choices; device tensors, int32.

    position [n, num_topk]: sorted place of a choice, -1 = not on this rank. source [n * num_topk]: the row that fills
    a place, undefined from `ends[-1]` on. ends [num_experts]: end of each expert's places.
    """

    position: Tensor
    source: Tensor
    ends: Tensor
    tiles: Tiles


@triton.jit
def _count_kernel(
    topk_idx, counts, num_slots, slots_per_block, NUM_EXPERTS: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr
):
    block = tl.program_id(0)
    experts = tl.arange(0, E)
    total = tl.zeros([E], tl.int32)
    first = block * slots_per_block
    end = tl.minimum(first + slots_per_block, num_slots)
    for start in range(first, end, CHUNK):
        slots = start + tl.arange(0, CHUNK)
        chosen = tl.load(topk_idx + slots, mask=slots < end, other=-1).to(tl.int32)
        total += tl.sum((chosen[:, None] == experts[None, :]).to(tl.int32), 0)
    tl.store(counts + block * NUM_EXPERTS + experts, total, mask=experts < NUM_EXPERTS)


_count = Launcher(_count_kernel)


@triton.jit
def _write_tiles(spans, num_tiles, begins, sizes, experts, NUM_EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Spans of every expert's rows, in expert order; the expert's end is the same in all its tiles."""
    tiles = (sizes + BLOCK_M - 1) // BLOCK_M
    tiles_end = tl.cumsum(tiles, 0)
    tl.store(num_tiles, tl.sum(tiles, 0))
    for i in range(0, tl.max(tiles, 0)):
        span = spans + 3 * (tiles_end - tiles + i)
        live = (i < tiles) & (experts < NUM_EXPERTS)
        tl.store(span, experts, mask=live)
        tl.store(span + 1, begins + i * BLOCK_M, mask=live)
        tl.store(span + 2, begins + sizes, mask=live)


@triton.jit
def _place_kernel(
    topk_idx,
    counts,
    position,
    source,
    ends,
    spans,
    num_tiles,
    num_slots,
    slots_per_block,
    num_blocks,
    NUM_TOPK: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    E: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    block = tl.program_id(0)
    experts = tl.arange(0, E)
    before = tl.zeros([E], tl.int32)
    sizes = tl.zeros([E], tl.int32)
    for first_block in range(0, num_blocks, 128):
        blocks = first_block + tl.arange(0, 128)
        mask = (blocks[:, None] < num_blocks) & (experts[None, :] < NUM_EXPERTS)
        of_blocks = tl.load(counts + blocks[:, None] * NUM_EXPERTS + experts[None, :], mask=mask, other=0)
        sizes += tl.sum(of_blocks, 0)
        before += tl.sum(tl.where(blocks[:, None] < block, of_blocks, 0), 0)
    ends_of = tl.cumsum(sizes, 0)
    if block == 0:
        tl.store(ends + experts, ends_of, mask=experts < NUM_EXPERTS)
        _write_tiles(spans, num_tiles, ends_of - sizes, sizes, experts, NUM_EXPERTS, BLOCK_M)

    free = ends_of - sizes + before
    first = block * slots_per_block
    end = tl.minimum(first + slots_per_block, num_slots)
    for start in range(first, end, CHUNK):
        slots = start + tl.arange(0, CHUNK)
        chosen = tl.load(topk_idx + slots, mask=slots < end, other=-1).to(tl.int32)
        is_expert = (chosen[:, None] == experts[None, :]).to(tl.int32)
        place = tl.sum(is_expert * (free[None, :] + tl.cumsum(is_expert, 0) - 1), 1)
        here = (chosen >= 0) & (slots < end)
        tl.store(position + slots, tl.where(here, place, -1), mask=slots < end)
        tl.store(source + place, slots // NUM_TOPK, mask=here)
        free += tl.sum(is_expert, 0)


_place = Launcher(_place_kernel)


def make_permutation(topk_idx: Tensor, num_experts: int, block: int) -> Permutation:
    """Sort the choices topk_idx [n, num_topk] int64 (local ids, -1 = not here) by expert; two launches, no host wait.

    `block`: rows a tile of the grouped products that follow.
    """
    num_rows, num_topk = topk_idx.shape
    num_slots = topk_idx.numel()
    rows_per_block = max(_CHUNK // num_topk, 1, ceil_div(num_rows, _MAX_BLOCKS))
    num_blocks = max(1, ceil_div(num_rows, rows_per_block))
    max_tiles = ceil_div(num_slots, block) + num_experts
    # One allocation for all the index tensors: an allocation costs the host as much as a launch.
    sizes = [num_blocks * num_experts, num_slots, num_slots, num_experts, 3 * max_tiles, 1]
    buffer = torch.empty(sum(sizes), dtype=torch.int32, device=topk_idx.device)
    counts, position, source, ends, spans, count = buffer.split_with_sizes(sizes)  # `split` is slow Python
    shape = {
        "NUM_EXPERTS": num_experts,
        "E": max(16, power_of_2(num_experts)),
        "CHUNK": _CHUNK,
    }
    slots = (num_slots, rows_per_block * num_topk)
    topk_idx = topk_idx.contiguous()
    _count((num_blocks, 1, 1), topk_idx, counts, *slots, **shape)
    _place(
        (num_blocks, 1, 1),
        topk_idx,
        counts,
        position,
        source,
        ends,
        spans,
        count,
        *slots,
        num_blocks,
        NUM_TOPK=num_topk,
        **shape,
        BLOCK_M=block,
    )
    tiles = Tiles(spans=spans.view(-1, 3), count=count, block=block)
    return Permutation(position=position.view(num_rows, num_topk), source=source, ends=ends, tiles=tiles)


@triton.jit
def _padded_tiles_kernel(
    counts, spans, num_tiles, capacity, NUM_EXPERTS: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr
):
    experts = tl.arange(0, E)
    sizes = tl.load(counts + experts, mask=experts < NUM_EXPERTS, other=0)
    _write_tiles(spans, num_tiles, experts * capacity, sizes, experts, NUM_EXPERTS, BLOCK_M)


_padded_tiles = Launcher(_padded_tiles_kernel)


def padded_tiles(num_tokens_per_expert: Tensor, capacity: int, block: int) -> Tiles:
    """Tiles of the padded layout [num_experts, capacity, ...]: the first num_tokens_per_expert [num_experts] int32
    rows of each.
    """
    num_experts = num_tokens_per_expert.numel()
    max_tiles = num_experts * ceil_div(capacity, block)
    buffer = torch.empty(3 * max_tiles + 1, dtype=torch.int32, device=num_tokens_per_expert.device)
    spans, count = buffer.split_with_sizes([3 * max_tiles, 1])
    _padded_tiles(
        (1, 1, 1),
        num_tokens_per_expert,
        spans,
        count,
        capacity,
        NUM_EXPERTS=num_experts,
        E=max(16, power_of_2(num_experts)),
        BLOCK_M=block,
    )
    return Tiles(spans=spans.view(-1, 3), count=count, block=block)
