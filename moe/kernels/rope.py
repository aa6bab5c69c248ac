"""Query and key norm, rotary embedding and the KV cache write in one launch, in place on the fused projection.

Its own file, as each fused kernel is; the plain form is about ten launches a layer. Invariant: rows whose slot is -1
(padding) touch no cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe.kernels.launch import Launcher
from moe.kernels.sizes import power_of_2


@triton.jit
def _rope_kernel(
    qkv,
    q_gain,
    k_gain,
    cos,
    sin,
    slots,
    k_cache,
    v_cache,
    eps,
    row_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    NORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, HALF_BLOCK)
    inside = (heads[:, None] < NUM_HEADS + NUM_KV_HEADS) & (dims[None, :] < HALF)
    is_key = heads[:, None] >= NUM_HEADS
    pointer = qkv + token * row_stride + heads[:, None] * (2 * HALF) + dims[None, :]
    low = tl.load(pointer, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(pointer + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + eps)[:, None]
        gain = tl.where(is_key, k_gain + dims[None, :], q_gain + dims[None, :])
        low = low * scale * tl.load(gain, mask=inside, other=0.0).to(tl.float32)
        high = high * scale * tl.load(gain + HALF, mask=inside, other=0.0).to(tl.float32)
    angle = token * HALF + dims
    c = tl.load(cos + angle, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    new_low = (low * c - high * s).to(qkv.dtype.element_ty)
    new_high = (high * c + low * s).to(qkv.dtype.element_ty)
    tl.store(pointer, new_low, mask=inside)
    tl.store(pointer + HALF, new_high, mask=inside)
    if slot >= 0:
        in_cache = (slot * NUM_KV_HEADS + heads[:, None] - NUM_HEADS) * (2 * HALF) + dims[None, :]
        tl.store(k_cache + in_cache, new_low, mask=inside & is_key)
        tl.store(k_cache + in_cache + HALF, new_high, mask=inside & is_key)
        kv_heads = tl.arange(0, KV_HEADS)
        kv_inside = (kv_heads[:, None] < NUM_KV_HEADS) & (dims[None, :] < HALF)
        value = qkv + token * row_stride + (NUM_HEADS + NUM_KV_HEADS + kv_heads[:, None]) * (2 * HALF) + dims[None, :]
        in_cache = (slot * NUM_KV_HEADS + kv_heads[:, None]) * (2 * HALF) + dims[None, :]
        tl.store(v_cache + in_cache, tl.load(value, mask=kv_inside), mask=kv_inside)
        tl.store(v_cache + in_cache + HALF, tl.load(value + HALF, mask=kv_inside), mask=kv_inside)


_rope = Launcher(_rope_kernel)


def rotate_and_cache(
    qkv: Tensor,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
) -> None:
    """Norm (where gains are given) and rotate the query and key heads of qkv in place; keys and values go to the cache.

    qkv [T, (num_heads + 2 * num_kv_heads) * head_dim], query heads first, then keys, then values, rows strided; cos,
    sin [T, head_dim // 2] of each token's position; slots [T] int64, -1 = no write; k_cache, v_cache [num_slots,
    num_kv_heads, head_dim] contiguous. Dimensions i and i + head_dim // 2 turn together.
    """
    num_tokens = qkv.shape[0]
    if not num_tokens:
        return
    half = cos.shape[-1]
    norm = q_gain is not None
    _rope(
        (num_tokens, 1, 1),
        qkv,
        q_gain if norm else cos,
        k_gain if norm else cos,
        cos,
        sin,
        slots,
        k_cache,
        v_cache,
        eps,
        qkv.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=half,
        HALF_BLOCK=power_of_2(half),
        HEADS=power_of_2(num_heads + num_kv_heads),
        KV_HEADS=power_of_2(num_kv_heads),
        NORM=norm,
    )
