"""Attention of one new token a request over its paged KV cache.

Its own file because prefill is served by library kernels and decode is not: each request reads its own blocks through
its block table, lengths are read on the device, and one launch (two where few requests have long contexts) serves the
whole batch. Invariants: a request's result does not depend on the other requests of the batch, only on how many there
are, unless `block` is given, and on `num_splits`; a request of length 0 (padding) gives zeros. The split of the keys
over programs and their merge by log-sum-exp is Flash-Decoding's (Dao et al., 2023).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe.kernels.launch import Launcher
from moe.kernels.sizes import power_of_2

_FEW_PROGRAMS, _MANY_PROGRAMS = 256, 1024  # to here large ones are faster, from here small ones


@triton.jit
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    block_tables,
    seq_lens,
    out,
    partial,
    q_stride,
    table_stride,
    scale,
    window,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(seq_lens + request).to(tl.int32)
    oldest = tl.maximum(length - window, 0)
    heads = tl.arange(0, GROUP_BLOCK)
    dims = tl.arange(0, DIM_BLOCK)
    in_group = (heads[:, None] < GROUP) & (dims[None, :] < HEAD_DIM)
    head_at = (kv_head * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
    query = tl.load(q + request * q_stride + head_at, mask=in_group, other=0.0)
    largest = tl.full([GROUP_BLOCK], -1.0e30, tl.float32)
    weight_sum = tl.zeros([GROUP_BLOCK], tl.float32)
    total = tl.zeros([GROUP_BLOCK, DIM_BLOCK], tl.float32)
    per_split = tl.cdiv(tl.cdiv(length - oldest, BLOCK), SPLITS) * BLOCK
    begin = oldest + split * per_split
    end = tl.minimum(begin + per_split, length)
    at = begin + tl.arange(0, BLOCK)
    table = block_tables + request * table_stride
    page = tl.load(table + at // PAGE, mask=at < end, other=0).to(tl.int64)
    for _ in range(begin, end, BLOCK):
        known = at < end
        row = (page * PAGE + at % PAGE) * NUM_KV_HEADS + kv_head
        reads = known[:, None] & (dims[None, :] < HEAD_DIM)
        keys = tl.load(k_cache + row[:, None] * HEAD_DIM + dims[None, :], mask=reads, other=0.0)
        values = tl.load(v_cache + row[:, None] * HEAD_DIM + dims[None, :], mask=reads, other=0.0)
        at += BLOCK
        page = tl.load(table + at // PAGE, mask=at < end, other=0).to(tl.int64)  # of the next block: one wait less
        scores = tl.dot(query, tl.trans(keys)) * scale
        scores = tl.where(known[None, :], scores, -1.0e30)
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp(largest - new_largest)
        weights = tl.where(known[None, :], tl.exp(scores - new_largest[:, None]), 0.0)
        total = total * shrink[:, None] + tl.dot(weights.to(values.dtype), values)
        weight_sum = weight_sum * shrink + tl.sum(weights, 1)
        largest = new_largest
    if SPLITS == 1:
        result = total / tl.maximum(weight_sum, 1.0e-30)[:, None]
        tl.store(
            out + request * (NUM_KV_HEADS * GROUP * HEAD_DIM) + head_at, result.to(out.dtype.element_ty), mask=in_group
        )
    else:
        # partial [requests, heads, SPLITS, HEAD_DIM + 2]: unnormalised sum, its weight, its largest score
        slot = ((request * NUM_KV_HEADS + kv_head) * GROUP + heads) * SPLITS + split
        base = partial + slot * (HEAD_DIM + 2)
        tl.store(base[:, None] + dims[None, :], total, mask=in_group)
        tl.store(base + HEAD_DIM, weight_sum, mask=heads < GROUP)
        tl.store(base + HEAD_DIM + 1, largest, mask=heads < GROUP)


_decode = Launcher(_decode_kernel)


@triton.jit
def _merge_kernel(partial, out, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, DIM_BLOCK)
    base = partial + (head * SPLITS + tl.arange(0, SPLITS)) * (HEAD_DIM + 2)
    largest = tl.load(base + HEAD_DIM + 1)
    shrink = tl.exp(largest - tl.max(largest, 0))
    weight_sum = tl.sum(tl.load(base + HEAD_DIM) * shrink, 0)
    sums = tl.load(base[:, None] + dims[None, :], mask=dims[None, :] < HEAD_DIM, other=0.0)
    result = tl.sum(sums * shrink[:, None], 0) / tl.maximum(weight_sum, 1.0e-30)
    tl.store(out + head * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


_merge = Launcher(_merge_kernel)


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    window: int | None = None,
    num_splits: int = 1,
    block: int | None = None,
) -> Tensor:
    """Attend q [B, num_heads, head_dim] (heads contiguous, rows strided) to the first seq_lens[b] cached tokens of
    each request.

    k_cache, v_cache [num_blocks, page, num_kv_heads, head_dim]; block_tables [B, max_blocks] int32; seq_lens [B] int,
    with the new token counted; `window`: a token sees itself and the `window - 1` before it; `num_splits` a power of
    2; `block`: keys that a program reads at once (16, 32 or 64), None = as the number of programs suggests. Gives
    [B, num_heads, head_dim].
    """
    num_requests, num_heads, head_dim = q.shape
    page, num_kv_heads = k_cache.shape[1:3]
    out = torch.empty(num_requests, num_heads, head_dim, dtype=q.dtype, device=q.device)
    if not num_requests:
        return out
    partial = out
    if num_splits > 1:
        partial = torch.empty(
            num_requests * num_heads * num_splits * (head_dim + 2), dtype=torch.float32, device=q.device
        )
    group = num_heads // num_kv_heads
    dim_block = power_of_2(head_dim)
    programs = num_requests * num_kv_heads * num_splits
    if block is None:
        block = 16 if programs >= _MANY_PROGRAMS else 64 if programs <= _FEW_PROGRAMS else 32
    _decode(
        (num_requests, num_kv_heads, num_splits),
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        out,
        partial,
        q.stride(0),
        block_tables.stride(0),
        1.0 / math.sqrt(head_dim),
        window or 1 << 30,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_BLOCK=max(16, power_of_2(group)),
        HEAD_DIM=head_dim,
        DIM_BLOCK=dim_block,
        PAGE=page,
        BLOCK=block,
        SPLITS=num_splits,
        num_warps=block // 16,
    )
    if num_splits > 1:
        _merge(
            (num_requests * num_heads, 1, 1), partial, out, HEAD_DIM=head_dim, DIM_BLOCK=dim_block, SPLITS=num_splits
        )
    return out
