"""Attention by torch's own functions in which a token does not depend on its batch: every token as a batch of its own.

Its own file beside `torch_sdpa.py`, which pads requests to the longest of a call and gives a chunk of a prompt to
another kernel than a single token. Here a token goes through that plan alone, so each function that is called gets a
shape which follows from the token's position. A Python loop over tokens: slow, and plainly right.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from moe.attention.torch_sdpa import TorchAttention
from moe.batch import ForwardBatch
from moe.config import ModelConfig
from moe.kv_cache import KVCache


class TorchAttentionByToken:
    """An `AttentionPlan`. In order of position, so a token finds the keys of those before it in the cache."""

    def __init__(self, config: ModelConfig, batch: ForwardBatch, kv: KVCache) -> None:
        self._width = config.num_heads * config.head_dim
        ends = np.cumsum(batch.query_lens)
        requests = np.repeat(np.arange(len(ends)), batch.query_lens)
        lens = (batch.seq_lens - ends)[requests] + np.arange(batch.num_tokens) + 1
        pairs = zip(requests.tolist(), lens.tolist(), strict=True)
        self._plans = [
            TorchAttention(config, _one_token(batch, row, request, length), kv)
            for row, (request, length) in enumerate(pairs)
        ]

    def attend(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, angles: tuple[Tensor, Tensor]
    ) -> Tensor:
        """See `AttentionPlan.attend`."""
        out = qkv.new_zeros(qkv.shape[0], self._width)
        for row, plan in enumerate(self._plans):
            own = slice(row, row + 1)
            cos, sin = angles[0][own], angles[1][own]
            out[own] = plan.attend(layer, qkv[own].clone(), q_norm, k_norm, (cos, sin))
        return out


def _one_token(batch: ForwardBatch, row: int, request: int, length: int) -> ForwardBatch:
    own = slice(row, row + 1)
    return ForwardBatch(
        input_ids=batch.input_ids[own],
        positions=batch.positions[own],
        slot_mapping=batch.slot_mapping[own],
        block_tables=batch.block_tables[request : request + 1],
        query_lens=np.array([1], np.int32),
        seq_lens=np.array([length], np.int32),
        num_tokens=1,
    )
