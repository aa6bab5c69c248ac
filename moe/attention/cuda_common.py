"""What the plans on a GPU share: the part of attention that does not depend on lengths, and the way of lengths there.

Its own file because the plan for speed and the one for results that do not depend on the batch differ in nothing here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe.batch import ForwardBatch
from moe.config import ModelConfig
from moe.kernels.rope import rotate_and_cache
from moe.kv_cache import KVCache


class CudaPlan(ABC):
    """A `StoringPlan` but for what comes after the keys and values are stored."""

    captures = "all"

    def __init__(self, config: ModelConfig, batch: ForwardBatch, kv: KVCache) -> None:
        self._config, self._batch, self._kv = config, batch, kv

    def attend(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, angles: tuple[Tensor, Tensor]
    ) -> Tensor:
        """See `AttentionPlan.attend`; qkv is overwritten."""
        return self.attend_stored(layer, *self.store(layer, qkv, q_norm, k_norm, angles))

    def store(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, angles: tuple[Tensor, Tensor]
    ) -> Sequence[Tensor]:
        """The part that is the same for all lengths, so graphs of any mode may hold it: norms and angles, in place,
        and the writing of keys and values. Gives the query, key and value heads of `qkv`, each [T, heads, head_dim]."""
        c, (keys, values) = self._config, self._kv.layer(layer)
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
        heads = qkv.view(qkv.shape[0], qkv.shape[1] // c.head_dim, c.head_dim)
        sizes = [c.num_heads, c.num_kv_heads, c.num_kv_heads]
        parts: Sequence[Tensor] = heads.split_with_sizes(sizes, 1)  # `split` is slow Python
        return parts

    @abstractmethod
    def attend_stored(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> Tensor:
        """See `StoringPlan.attend_stored`."""


def to_device(arrays: Sequence[npt.NDArray[np.integer]], device: torch.device) -> Sequence[Tensor]:
    """Each as int32 on the device, by one copy that the host does not wait for; none for nothing."""
    if not arrays:
        return ()
    host = torch.from_numpy(np.concatenate(arrays)).to(torch.int32)
    on_device = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
    parts: Sequence[Tensor] = on_device.split([len(array) for array in arrays])
    return parts
