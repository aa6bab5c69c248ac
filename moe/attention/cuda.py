"""Attention on a GPU: one launch a layer for a batch of prompts or of decodes, a few for a mixture.

Its own file beside `torch_sdpa.py`, which serves any device. A batch takes one of these ways, chosen on the host from
lengths that it already has:

    decodes (one new token each)         the paged kernel over block tables, lengths read on the device
    whole prompts of one length          cuDNN, as a dense batch: nearly twice as fast as the next; its plans are made
                                         per shape and thread, so only lengths that are multiples of 128 go there
    whole prompts of several lengths     torch's variable-length flash attention on the packed rows
    the rest (continued prompts)         the same, over keys gathered from the cache

A batch with `fixed` inputs, of which a graph may be captured, takes the first way or the last one, with nothing read on
the host: lengths come from the device, grids are laid out for the most requests and the longest ones.

Invariants: leading decodes and the prompts after them are two parts, so a mixture costs two launches; nothing waits
for the device; keys and values are in the cache before anything reads them there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from dbo.slices import IntArray
from moe.batch import FixedInputs, ForwardBatch
from moe.config import ModelConfig
from moe.kernels.paged_decode import paged_decode
from moe.kernels.rope import rotate_and_cache
from moe.kv_cache import KVCache
from moe.sms import compute_sms

_DENSE_UNIT = 128
_KEYS_PER_SPLIT = 256
_MAX_SPLITS = 16


class CudaAttention:
    """An `AttentionPlan`."""

    captures = "all"

    def __init__(self, config: ModelConfig, batch: ForwardBatch, kv: KVCache) -> None:
        self._config, self._batch, self._kv = config, batch, kv
        self._dense_length: int | None = None
        self._slots: Tensor | None = None
        self._num_rows = batch.num_tokens
        if batch.fixed is not None:
            self._plan_fixed(batch.fixed)
            return
        device = batch.input_ids.device
        num_requests = int(np.count_nonzero(batch.query_lens))  # padding comes last
        query_lens, seq_lens = batch.query_lens[:num_requests], batch.seq_lens[:num_requests]
        self._num_decodes = int((query_lens == 1).cumprod().sum())
        lengths = torch.from_numpy(
            np.concatenate(
                [seq_lens, _offsets(query_lens[self._num_decodes :]), _offsets(seq_lens[self._num_decodes :])]
            )
        )
        on_device = lengths.to(torch.int32).pin_memory().to(device, non_blocking=True)
        num_prompts = num_requests - self._num_decodes
        self._seq_lens, self._query_ends, self._key_ends = on_device.split(
            [num_requests, num_prompts + 1, num_prompts + 1]
        )
        if self._num_decodes:
            self._num_splits = self._choose_splits(int(seq_lens[: self._num_decodes].max()), device)
        if num_prompts:
            self._plan_prompts(query_lens[self._num_decodes :], seq_lens[self._num_decodes :])

    def attend(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, angles: tuple[Tensor, Tensor]
    ) -> Tensor:
        """See `AttentionPlan.attend`; qkv is overwritten."""
        c, end, start = self._config, self._num_rows, self._num_decodes
        keys, values = self._kv.layer(layer)
        rotate_and_cache(
            qkv,
            q_norm,
            k_norm,
            *angles,
            self._batch.slot_mapping,
            keys,
            values,
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            eps=c.rms_norm_eps,
        )
        heads = qkv.unflatten(-1, (-1, c.head_dim))
        parts = []
        if start:
            parts.append(self._decode(heads[:start, : c.num_heads], keys, values))
        if end > start:
            q, k, v = heads[start:end].split([c.num_heads, c.num_kv_heads, c.num_kv_heads], 1)
            parts.append(
                self._prefill(q, *((k, v) if self._slots is None else (keys[self._slots], values[self._slots])))
            )
        if end < qkv.shape[0] or not parts:
            parts.append(qkv.new_zeros(qkv.shape[0] - end, c.num_heads, c.head_dim))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)

    def _decode(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        block_shape = (-1, self._kv.block_size)
        return paged_decode(
            q,
            keys.unflatten(0, block_shape),
            values.unflatten(0, block_shape),
            self._batch.block_tables,
            self._seq_lens,
            window=self._config.sliding_window,
            num_splits=self._num_splits,
        )

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, num_heads, head_dim], k and v [keys, num_kv_heads, head_dim] -> like q."""
        if self._dense_length is not None:
            shape = (-1, self._dense_length)
            q, k, v = (t.unflatten(0, shape).transpose(1, 2) for t in (q, k, v))
            return (
                F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(0, 1)
            )
        window = self._config.sliding_window
        result: Tensor = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            self._query_ends,
            self._key_ends,
            self._longest_query,
            self._longest_keys,
            0.0,
            True,
            False,
            window_size_left=None if window is None else window - 1,
            window_size_right=None if window is None else 0,
        )[0]
        return result

    def _plan_fixed(self, fixed: FixedInputs) -> None:
        self._num_rows = self._batch.input_ids.shape[0]
        self._seq_lens, self._query_ends, self._key_ends = fixed.seq_lens, fixed.query_ends, fixed.key_ends
        self._num_decodes = self._num_rows if fixed.uniform_decode else 0
        if fixed.uniform_decode:
            self._num_splits = self._choose_splits(fixed.max_seq_len, self._batch.input_ids.device)
            return
        self._longest_query = min(self._num_rows, fixed.max_seq_len)
        self._longest_keys = min(fixed.max_num_keys, fixed.max_seq_len)
        self._slots = self._packed_slots(fixed.max_num_keys)

    def _plan_prompts(self, query_lens: IntArray, seq_lens: IntArray) -> None:
        self._longest_query, self._longest_keys = int(query_lens.max()), int(seq_lens.max())
        fresh = bool((query_lens == seq_lens).all())
        window = self._config.sliding_window
        dense = (
            fresh
            and bool((query_lens == self._longest_query).all())
            and self._longest_query % _DENSE_UNIT == 0
            and (window is None or window >= self._longest_query)
        )
        self._dense_length = self._longest_query if dense else None
        self._slots = None if fresh else self._packed_slots(int(seq_lens.sum()))

    def _packed_slots(self, num_keys: int) -> Tensor:
        """Cache slots of all keys of the prompts, request after request: [num_keys] int64; any slot beyond the last."""
        size = self._kv.block_size
        key = torch.arange(num_keys, dtype=torch.int32, device=self._key_ends.device)
        request = torch.searchsorted(self._key_ends[1:], key, right=True)
        tables = self._batch.block_tables
        if self._batch.fixed is not None:  # there may be fewer keys than that
            request.clamp_(max=len(self._key_ends) - 2)
        position = key - self._key_ends[request]
        column = position // size
        if self._batch.fixed is not None:
            column.clamp_(max=tables.shape[1] - 1)
        block = tables[request + self._num_decodes, column].long()
        slots: Tensor = block * size + position % size
        return slots

    def _choose_splits(self, longest: int, device: torch.device) -> int:
        """Programs a request's keys are split over: enough to fill the device, none with little to do; a power of 2."""
        programs = self._num_decodes * self._config.num_kv_heads
        wanted = min(2 * compute_sms(device) // programs, longest // _KEYS_PER_SPLIT, _MAX_SPLITS)
        return 1 << max(0, wanted.bit_length() - 1)


def _offsets(lens: IntArray) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lens, dtype=np.int64)])
