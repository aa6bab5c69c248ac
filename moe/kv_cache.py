"""The paged KV cache: fixed blocks of `block_size` token slots, named by block tables.

Its own file because the engine asks only for its size and hands out block numbers, and attention only for one layer's
memory. Invariant: every slot of a block that can be handed out holds finite numbers (zeros, or what a real token
wrote), because attention reads whole blocks and masks afterwards, and 0 times NaN is NaN.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from moe.config import ModelConfig


class KVCache:
    """Keys and values of all layers, [num_layers, 2, num_blocks + 1, block_size, num_kv_heads, head_dim].

    The extra last block is a sink: slot -1 is its last row, so rows of padding are written there without a branch or
    a host synchronisation, and nothing reads it.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate `num_blocks` usable blocks, zeroed; on the CPU a block costs memory once it is written."""
        self.num_blocks, self.block_size, self.dtype = num_blocks, block_size, dtype
        self.num_layers = config.num_layers
        num_slots = (num_blocks + 1) * block_size
        shape = (config.num_layers, 2, num_slots, config.num_kv_heads, config.head_dim)
        self._memory = _zeros(shape, dtype, torch.device(device))
        self._layers = [(keys, values) for keys, values in self._memory]  # views cost the host as much as launches

    @staticmethod
    def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        """Memory of one block over all layers, in bytes."""
        per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
        return block_size * per_token

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [num_slots, num_kv_heads, head_dim], indexed by slot."""
        return self._layers[index]

    def write(self, index: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [T, num_kv_heads, head_dim] of layer `index` at `slots` [T] int64; -1 = nowhere."""
        for stored, new in zip(self.layer(index), (keys, values), strict=True):
            stored[slots] = new


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.zeros`, but on the CPU from memory that the system zeroes page by page when it is first touched."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
