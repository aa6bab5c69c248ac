"""Attention on a GPU: one launch a layer for a batch of prompts or of decodes, a few for a mixture.

Its own file beside `torch_sdpa.py`, which serves any device. A batch takes one of these ways, chosen on the host from
lengths that it already has:

    decodes (one new token each)         the paged kernel over block tables, lengths read on the device
    whole prompts of one length          cuDNN, as a dense batch: nearly twice as fast as the next; its plans are made
                                         per shape and thread, so only lengths that are multiples of 128 go there
    whole prompts of several lengths     cuDNN on the packed rows where its package is installed, else torch's
                                         variable-length flash attention, which takes twice as long
    the rest (continued prompts)         the same, over keys gathered from the cache

where prompts that lie side by side and take the same way share a call (`segments.py`).

A batch with `fixed` inputs, of which a graph may be captured, takes the first way or the last one, with nothing read on
the host: lengths come from the device, grids are laid out for the most requests and the longest ones.

Invariants: leading decodes and the prompts after them are apart, so a mixture costs two launches and seldom more;
nothing waits for the device; keys and values are in the cache before anything reads them there.
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
from moe.attention import cudnn_packed
from moe.attention.cuda_common import CudaPlan, to_device
from moe.attention.cudnn_packed import PackedPrompts
from moe.attention.segments import Segment, plan_segments
from moe.batch import FixedInputs, ForwardBatch
from moe.config import ModelConfig
from moe.kernels.key_slots import key_slots
from moe.kernels.paged_decode import paged_decode
from moe.kernels.sizes import power_of_2
from moe.kv_cache import KVCache
from moe.sms import compute_sms

_KEYS_PER_SPLIT = 256
_MAX_SPLITS = 16


@dataclass(frozen=True, kw_only=True)
class _Prompts:
    """A segment with what its call needs."""

    rows: slice  # of the batch
    length: int | None  # of each prompt, where they are a dense batch
    slots: Tensor | None  # [keys] of the cache; None = the keys are those of `rows`
    packed: PackedPrompts | None  # None for a dense batch


class CudaAttention(CudaPlan):
    """An `AttentionPlan`."""

    def __init__(self, config: ModelConfig, batch: ForwardBatch, kv: KVCache) -> None:
        super().__init__(config, batch, kv)
        self._num_rows = batch.num_tokens
        self._cudnn = config.sliding_window is None and cudnn_packed.takes(
            batch.input_ids.device, kv.dtype, config.head_dim
        )
        if batch.fixed is not None:
            self._plan_fixed(batch.fixed)
            return
        num_requests = int(np.count_nonzero(batch.query_lens))  # padding comes last
        query_lens, seq_lens = batch.query_lens[:num_requests], batch.seq_lens[:num_requests]
        self._num_decodes = n = int((query_lens == 1).cumprod().sum())
        prompts = query_lens[n:], seq_lens[n:]
        segments = plan_segments(*prompts, config.sliding_window) if num_requests > n else []
        offsets = [_offsets(lens[s.first : s.last]) for s in segments if s.length is None for lens in prompts]
        parts = iter(to_device([seq_lens[:n], *offsets] if n else offsets, batch.input_ids.device))
        if n:
            self._decode_lens = next(parts)
            self._num_splits = self._choose_splits(int(seq_lens[:n].max()), batch.input_ids.device)
        self._prompts = [self._plan_prompts(s, *prompts, parts) for s in segments]

    def attend_stored(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> Tensor:
        """The other part: every query sees its keys. [T, num_heads * head_dim], in `out` if given."""
        total, end, start = q.shape[0], self._num_rows, self._num_decodes
        if out is None and total and start == total:
            return self._decode(layer, q).flatten(1)
        if out is None and len(self._prompts) == 1 and self._prompts[0].rows == slice(0, total):
            return self._prefill(layer, self._prompts[0], q, k, v, None).flatten(1)
        if out is None:
            out = torch.empty(total, q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        into = out.view(q.shape)
        if start:
            into[:start] = self._decode(layer, q[:start])
        for p in self._prompts:
            if p.rows == slice(0, total):  # a slice costs the host as much as a launch
                self._prefill(layer, p, q, k, v, into)
            else:
                self._prefill(layer, p, q[p.rows], k[p.rows], v[p.rows], into[p.rows])
        if end < total:
            into[end:] = 0
        return out

    def _decode(self, layer: int, q: Tensor) -> Tensor:
        keys, values = self._kv.layer(layer)
        block_shape = (-1, self._kv.block_size)
        return paged_decode(
            q,
            keys.unflatten(0, block_shape),
            values.unflatten(0, block_shape),
            self._batch.block_tables,
            self._decode_lens,
            window=self._config.sliding_window,
            num_splits=self._num_splits,
        )

    def _prefill(self, layer: int, prompts: _Prompts, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None) -> Tensor:
        """q, and out if given, [rows, num_heads, head_dim], k and v [rows, num_kv_heads, head_dim] -> like q."""
        if prompts.slots is not None:
            keys, values = self._kv.layer(layer)
            k, v = keys[prompts.slots], values[prompts.slots]
        if prompts.packed is None:
            assert prompts.length is not None
            q, k, v = (t.view(-1, prompts.length, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
            dense = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            result: Tensor = dense.transpose(1, 2).flatten(0, 1)
        elif self._cudnn and max(q.shape[0] * q.stride(0), k.shape[0] * k.stride(0)) < cudnn_packed.MAX_ELEMENTS:
            result = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
            if not cudnn_packed.attend_packed(q, k, v, prompts.packed, result):
                result = _flash(q, k, v, prompts.packed, self._config.sliding_window)
        else:
            result = _flash(q, k, v, prompts.packed, self._config.sliding_window)
        return result if out is None or result is out else out.copy_(result)

    def _plan_fixed(self, fixed: FixedInputs) -> None:
        self._num_rows = self._batch.input_ids.shape[0]
        self._decode_lens, self._num_decodes, self._prompts = fixed.seq_lens, 0, []
        if fixed.uniform_decode:
            self._num_decodes = self._num_rows
            self._num_splits = self._choose_splits(fixed.max_seq_len, self._batch.input_ids.device)
            return
        self._prompts.append(
            _Prompts(
                rows=slice(0, self._num_rows),
                length=None,
                slots=self._packed_slots(fixed.key_ends, fixed.max_num_keys, 0),
                packed=PackedPrompts(
                    query_ends=fixed.query_ends,
                    key_ends=fixed.key_ends,
                    longest_query=min(self._num_rows, fixed.max_seq_len),
                    longest_keys=min(fixed.max_num_keys, fixed.max_seq_len),
                    fresh=False,  # nobody knows yet
                ),
            )
        )

    def _plan_prompts(self, s: Segment, query_lens: IntArray, seq_lens: IntArray, ends: Iterator[Tensor]) -> _Prompts:
        first_row = self._num_decodes + int(query_lens[: s.first].sum())
        lens, seen = query_lens[s.first : s.last], seq_lens[s.first : s.last]
        packed = slots = None
        if s.length is None:
            packed = PackedPrompts(
                query_ends=next(ends),
                key_ends=next(ends),
                longest_query=int(lens.max()),
                longest_keys=int(seen.max()),
                fresh=s.fresh,
            )
            if not s.fresh:
                slots = self._packed_slots(packed.key_ends, int(seen.sum()), self._num_decodes + s.first)
        rows = slice(first_row, first_row + int(lens.sum()))
        return _Prompts(rows=rows, length=s.length, slots=slots, packed=packed)

    def _packed_slots(self, key_ends: Tensor, num_keys: int, first: int) -> Tensor:
        """Cache slots of all keys of the requests from `first` on: [num_keys] int64."""
        return key_slots(key_ends, self._batch.block_tables, first, num_keys, self._kv.block_size)

    def _choose_splits(self, longest: int, device: torch.device) -> int:
        """Programs a request's keys are split over: enough to fill the device, none with little to do; a power of 2."""
        programs = self._num_decodes * self._config.num_kv_heads
        wanted = min(2 * compute_sms(device) // programs, longest // _KEYS_PER_SPLIT, _MAX_SPLITS)
        return 1 << max(0, wanted.bit_length() - 1)


def _flash(q: Tensor, k: Tensor, v: Tensor, prompts: PackedPrompts, window: int | None) -> Tensor:
    """Causal attention of packed requests, the last query of each at its last key."""
    result: Tensor = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        prompts.query_ends,
        prompts.key_ends,
        prompts.longest_query,
        prompts.longest_keys,
        0.0,
        True,
        False,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[0]
    return result


def _offsets(lens: IntArray) -> npt.NDArray[np.int64]:
    """0, where each prompt ends, and prompts of length 0 up to a power of 2: kernels are planned for their number."""
    ends = np.cumsum(lens, dtype=np.int64)
    return np.concatenate([[0], ends, np.full(power_of_2(len(lens)) - len(lens), ends[-1])])
