"""Attention on a GPU in which a token does not depend on its batch: every token as a request of its own.

Its own file beside `cuda.py`, which picks kernels by what is in the batch: those of a library for prompts, with other
tiles for other lengths, and splits of the keys by how many requests share the device. Here each token, of a prompt or
not, goes through the kernel for decode with its own context as the length, after the keys and values of the whole
(u)batch are in the cache. It costs what it saves the others: no two tokens of a prompt share a read of their keys.

Invariants: a token's result depends on its query and the keys up to itself, for the keys are never split and the kernel
has one form; which request a token belongs to is found on the device, from memory that a graph may find refilled, so a
batch with `fixed` inputs takes the same way; rows of padding (slot -1) have no keys and give zeros.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moe.attention.cuda_common import CudaPlan, to_device
from moe.batch import ForwardBatch
from moe.config import ModelConfig
from moe.kernels.paged_decode import paged_decode
from moe.kv_cache import KVCache

_KEYS = 32  # of a program at once: between what is best for few tokens and for many


class CudaAttentionByToken(CudaPlan):
    """An `AttentionPlan`."""

    def __init__(self, config: ModelConfig, batch: ForwardBatch, kv: KVCache) -> None:
        super().__init__(config, batch, kv)
        self._lens = torch.where(batch.slot_mapping >= 0, batch.positions + 1, 0).int()
        self._tables = _tables_of_tokens(batch)

    def attend_stored(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> Tensor:
        """Every query sees its keys in the cache. [T, num_heads * head_dim], in `out` if given."""
        keys, values = (part.unflatten(0, (-1, self._kv.block_size)) for part in self._kv.layer(layer))
        seen = paged_decode(
            q,
            keys,
            values,
            self._tables,
            self._lens,
            window=self._config.sliding_window,
            num_splits=1,
            block=_KEYS,
        ).flatten(1)
        return seen if out is None else out.copy_(seen)


def _tables_of_tokens(batch: ForwardBatch) -> Tensor:
    """The block table of each row's request, [T, max_blocks] int32; any one for padding. For 16384 tokens of requests
    that may have 131072 in blocks of 16 that is half a GiB."""
    device, num_rows = batch.input_ids.device, batch.input_ids.shape[0]
    num_requests, max_blocks = batch.block_tables.shape
    if not num_requests:
        return batch.block_tables.new_zeros(num_rows, max_blocks)
    if batch.fixed is None:
        (ends,) = to_device([np.cumsum(batch.query_lens)], device)
    else:
        ends = batch.fixed.query_ends[1:]
    rows = torch.arange(num_rows, dtype=torch.int32, device=device)
    requests = torch.searchsorted(ends, rows, right=True)
    return batch.block_tables[requests.clamp_(max=num_requests - 1)]
