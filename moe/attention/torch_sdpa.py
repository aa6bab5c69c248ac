"""Attention over paged blocks with torch's own `scaled_dot_product_attention`, on any device.

Requests with one new token are gathered into one call, or a few of less unlike lengths or bounded memory; each of the
others gets its own call. Grouped queries never repeat a key: the query heads of a group become query rows (one new
token) or share their key head through a stride of zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from dbo.slices import IntArray
from moe.attention.rotary import rotate
from moe.batch import ForwardBatch
from moe.config import ModelConfig
from moe.kv_cache import KVCache

MAX_RATIO = 16  # of the longest request in a call for single tokens to the shortest
MAX_GATHERED_SLOTS = 1 << 16  # of one call for single tokens: bounds the copy of keys and values


@dataclass(frozen=True)
class _Singles:
    """Requests with one new token each, padded to the longest."""

    rows: Tensor | slice  # [n] of the batch
    blocks: Tensor  # [n, num_blocks]
    mask: Tensor  # [n, 1, 1, num_blocks * block_size], added to the scores


@dataclass(frozen=True)
class _Chunk:
    """One request with several new tokens."""

    rows: slice
    blocks: Tensor | None  # [1, num_blocks]; None = all its keys are in this batch
    length: int  # of keys
    mask: Tensor | None  # [num_rows, length] bool, True = sees; None = plainly causal


class TorchAttention:
    """An `AttentionPlan`."""

    def __init__(self, config: ModelConfig, batch: ForwardBatch, kv: KVCache) -> None:
        self._kv, self._batch, self._window = kv, batch, config.sliding_window
        self._num_kv_heads, self._head_dim, self._eps = config.num_kv_heads, config.head_dim, config.rms_norm_eps
        self._starts = np.cumsum(batch.query_lens) - batch.query_lens
        self._parts: list[_Singles | _Chunk] = [*self._plan_singles(), *self._plan_chunks()]

    def attend(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, angles: tuple[Tensor, Tensor]
    ) -> Tensor:
        """See `AttentionPlan.attend`."""
        heads = qkv.unflatten(-1, (-1, self._head_dim))
        if q_norm is None or k_norm is None:
            turned = rotate(heads[:, : -self._num_kv_heads], angles)
            q, k = turned[:, : -self._num_kv_heads], turned[:, -self._num_kv_heads :]
        else:
            q, k = heads[:, : -2 * self._num_kv_heads], heads[:, -2 * self._num_kv_heads : -self._num_kv_heads]
            q, k = rotate(self._norm(q, q_norm), angles), rotate(self._norm(k, k_norm), angles)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self._attend(layer, q, k, heads[:, -self._num_kv_heads :], out)
        return out.flatten(1)

    def _norm(self, heads: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(heads, weight.shape, weight, self._eps)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """q and out [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim], rotated."""
        self._kv.write(layer, self._batch.slot_mapping, k, v)
        out[self._batch.num_tokens :] = 0.0
        keys, values = (t.unflatten(0, (-1, self._kv.block_size)) for t in self._kv.layer(layer))
        for part in self._parts:
            if isinstance(part, _Singles):
                seen = (_gather(keys, part.blocks), _gather(values, part.blocks))
                out[part.rows] = self._attend_singles(part, q[part.rows], *seen)
            else:
                seen = (k[part.rows], v[part.rows])
                if part.blocks is not None:
                    seen = (_gather(keys, part.blocks)[0], _gather(values, part.blocks)[0])
                self._attend_chunk(part, q[part.rows], seen[0][: part.length], seen[1][: part.length], out[part.rows])

    def _attend_singles(self, part: _Singles, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q [n, num_heads, head_dim], keys and values [n, length, num_kv_heads, head_dim] -> like q."""
        grouped = q.reshape(q.shape[0], self._num_kv_heads, -1, self._head_dim)
        seen = F.scaled_dot_product_attention(
            grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=part.mask
        )
        return seen.reshape(q.shape)

    def _attend_chunk(self, part: _Chunk, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """q and out [n, num_heads, head_dim], keys and values [length, num_kv_heads, head_dim]."""
        grouped = q.unflatten(1, (self._num_kv_heads, -1)).permute(1, 2, 0, 3)  # [kv_heads, group, n, head_dim]
        shape = (*grouped.shape[:2], keys.shape[0], self._head_dim)
        seen = F.scaled_dot_product_attention(
            grouped,
            keys.transpose(0, 1).unsqueeze(1).expand(shape),
            values.transpose(0, 1).unsqueeze(1).expand(shape),
            attn_mask=part.mask,
            is_causal=part.mask is None,
        )
        out.copy_(seen.flatten(0, 1).transpose(0, 1))

    def _plan_singles(self) -> Iterator[_Singles]:
        requests = np.flatnonzero(self._batch.query_lens == 1)
        requests = requests[np.argsort(self._batch.seq_lens[requests], kind="stable")]
        lens = self._batch.seq_lens[requests]
        for first, last in _groups(lens):
            yield self._singles(requests[first:last], lens[first:last])

    def _singles(self, requests: npt.NDArray[np.intp], lens: IntArray) -> _Singles:
        device, starts = self._batch.input_ids.device, self._starts[requests]
        blocks = self._blocks(torch.as_tensor(requests, device=device), int(lens.max()))
        kv_len = torch.as_tensor(lens, device=device)[:, None]
        position = torch.arange(blocks.shape[1] * self._kv.block_size, device=device)
        hidden = position >= kv_len
        if self._window is not None:
            hidden |= position < kv_len - self._window
        mask = torch.zeros(hidden.shape, dtype=self._kv.dtype, device=device).masked_fill_(hidden, -torch.inf)
        contiguous = bool((np.diff(starts) == 1).all())
        rows = slice(int(starts[0]), int(starts[-1]) + 1) if contiguous else torch.as_tensor(starts, device=device)
        return _Singles(rows, blocks, mask[:, None, None])

    def _plan_chunks(self) -> Iterator[_Chunk]:
        for request in np.flatnonzero(self._batch.query_lens > 1):
            num_new, length = int(self._batch.query_lens[request]), int(self._batch.seq_lens[request])
            start = int(self._starts[request])
            blocks = None if num_new == length else self._blocks(torch.tensor([request]), length)
            windowed = self._window is not None and self._window < length
            mask = self._chunk_mask(num_new, length) if windowed or blocks is not None else None
            yield _Chunk(slice(start, start + num_new), blocks, length, mask)

    def _chunk_mask(self, num_new: int, length: int) -> Tensor:
        """[num_new, length] bool: the last `num_new` of `length` tokens look back, within the window."""
        query = torch.arange(length - num_new, length, device=self._batch.input_ids.device)[:, None]
        key = torch.arange(length, device=query.device)
        seen = key <= query
        return seen if self._window is None else seen & (key > query - self._window)

    def _blocks(self, requests: Tensor, length: int) -> Tensor:
        """The blocks that hold the first `length` tokens of some requests, [num_requests, num_blocks] int32."""
        return self._batch.block_tables[requests, : -(-length // self._kv.block_size)]


def _gather(stored: Tensor, blocks: Tensor) -> Tensor:
    """stored [all blocks, block_size, heads, D], blocks [n, num_blocks] -> [n, num_blocks * block_size, heads, D]."""
    return stored.index_select(0, blocks.flatten()).view(len(blocks), -1, *stored.shape[2:])


def _groups(lens: IntArray) -> Iterator[tuple[int, int]]:
    """Ranges of ascending lengths that share a call: a call costs more than padding, until padding is most of it."""
    first = 0
    for last in range(1, len(lens) + 1):
        if last < len(lens):
            length = int(lens[last])
            fits = length <= MAX_RATIO * lens[first] and length * (last + 1 - first) <= MAX_GATHERED_SLOTS
            if fits:
                continue
        yield first, last
        first = last
