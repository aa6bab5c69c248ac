"""Attention over paged blocks with torch's own `scaled_dot_product_attention`, on any device.

Requests with one new token are gathered into one call (or a few, of bounded memory); each of the others gets its own
call. Grouped queries never repeat a key: the query heads of a group become query rows (one new token) or share their
key head through a stride of zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from moe.batch import ForwardBatch
from moe.config import ModelConfig
from moe.kv_cache import KVCache

MAX_GATHERED_SLOTS = 1 << 16  # of one call for single tokens: bounds the copy of keys and values


@dataclass(frozen=True)
class _Singles:
    """Requests with one new token each, padded to the longest."""

    rows: Tensor | slice  # [n] of the batch
    slots: Tensor  # [n, length], of every key
    mask: Tensor  # [n, 1, 1, length], added to the scores


@dataclass(frozen=True)
class _Chunk:
    """One request with several new tokens."""

    rows: slice
    slots: Tensor | None  # [length]; None = all its keys are in this batch
    mask: Tensor | None  # [num_rows, length] bool, True = sees; None = plainly causal


class TorchAttention:
    """An `AttentionPlan`."""

    def __init__(self, config: ModelConfig, batch: ForwardBatch, kv: KVCache) -> None:
        self._kv, self._batch, self._window = kv, batch, config.sliding_window
        self._num_kv_heads, self._head_dim = config.num_kv_heads, config.head_dim
        self._starts = np.cumsum(batch.query_lens) - batch.query_lens
        self._parts: list[_Singles | _Chunk] = [*self._plan_singles(), *self._plan_chunks()]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """See `AttentionPlan.attend`."""
        self._kv.write(layer, self._batch.slot_mapping, k, v)
        out[self._batch.num_tokens :] = 0.0
        keys, values = self._kv.layer(layer)
        for part in self._parts:
            if isinstance(part, _Singles):
                out[part.rows] = self._attend_singles(part, q[part.rows], keys[part.slots], values[part.slots])
            else:
                fresh = part.slots is None
                self._attend_chunk(
                    part,
                    q[part.rows],
                    k[part.rows] if fresh else keys[part.slots],
                    v[part.rows] if fresh else values[part.slots],
                    out[part.rows],
                )

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
        lens = self._batch.seq_lens[requests]
        if len(requests) and lens.max() * len(requests) > MAX_GATHERED_SLOTS:
            order = np.argsort(lens, kind="stable")
            requests, lens = requests[order], lens[order]
        for first, last in _bounded(lens):
            yield self._singles(requests[first:last], lens[first:last])

    def _singles(self, requests: npt.NDArray[np.intp], lens: npt.NDArray[np.int32]) -> _Singles:
        device, starts = self._batch.input_ids.device, self._starts[requests]
        slots = self._slots(torch.as_tensor(requests, device=device), int(lens.max()))
        kv_len = torch.as_tensor(lens, device=device)[:, None]
        position = torch.arange(slots.shape[1], device=device)
        hidden = position >= kv_len
        if self._window is not None:
            hidden |= position < kv_len - self._window
        mask = torch.zeros(slots.shape, dtype=self._kv.dtype, device=device).masked_fill_(hidden, -torch.inf)
        contiguous = bool((np.diff(starts) == 1).all())
        rows = slice(int(starts[0]), int(starts[-1]) + 1) if contiguous else torch.as_tensor(starts, device=device)
        return _Singles(rows, slots, mask[:, None, None])

    def _plan_chunks(self) -> Iterator[_Chunk]:
        for request in np.flatnonzero(self._batch.query_lens > 1):
            num_new, length = int(self._batch.query_lens[request]), int(self._batch.seq_lens[request])
            start = int(self._starts[request])
            slots = None if num_new == length else self._slots(torch.tensor([request]), length)[0]
            windowed = self._window is not None and self._window < length
            mask = self._chunk_mask(num_new, length) if windowed or slots is not None else None
            yield _Chunk(slice(start, start + num_new), slots, mask)

    def _chunk_mask(self, num_new: int, length: int) -> Tensor:
        """[num_new, length] bool: the last `num_new` of `length` tokens look back, within the window."""
        query = torch.arange(length - num_new, length, device=self._batch.input_ids.device)[:, None]
        key = torch.arange(length, device=query.device)
        seen = key <= query
        return seen if self._window is None else seen & (key > query - self._window)

    def _slots(self, requests: Tensor, length: int) -> Tensor:
        """KV slots of the first `length` tokens of some requests, [num_requests, length] int64."""
        size = self._kv.block_size
        blocks = self._batch.block_tables[requests.to(self._batch.block_tables.device), : -(-length // size)].long()
        slots = blocks[:, :, None] * size + torch.arange(size, device=blocks.device)
        return slots.flatten(1)[:, :length]


def _bounded(lens: npt.NDArray[np.int32]) -> Iterator[tuple[int, int]]:
    """Ranges of requests whose padded lengths stay under MAX_GATHERED_SLOTS together, one request at least."""
    first = 0
    for last in range(1, len(lens) + 1):
        full = last < len(lens) and int(lens[first : last + 1].max()) * (last + 1 - first) > MAX_GATHERED_SLOTS
        if full or last == len(lens):
            yield first, last
            first = last
