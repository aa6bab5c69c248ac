"""What the plans on a GPU share: the part of attention that does not depend on lengths, and the way of lengths there.

Its own file because the plan for speed and the one for results that do not depend on the batch differ in nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe.config import ModelConfig
from moe.kernels.rope import rotate_and_cache


def store_heads(
    config: ModelConfig,
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    angles: tuple[Tensor, Tensor],
    slots: Tensor,
    cache: tuple[Tensor, Tensor],
) -> Sequence[Tensor]:
    """Norms and angles, in place, and the writing of keys and values at `slots` [T]: one launch for any lengths.

    qkv as for `AttentionPlan.attend`; cache: see `KVCache.layer`. Gives the query, key and value heads of `qkv`, each
    [T, heads, head_dim].
    """
    c = config
    rotate_and_cache(
        qkv,
        q_norm,
        k_norm,
        *angles,
        slots,
        *cache,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        eps=c.rms_norm_eps,
    )
    heads = qkv.view(qkv.shape[0], qkv.shape[1] // c.head_dim, c.head_dim)
    sizes = [c.num_heads, c.num_kv_heads, c.num_kv_heads]
    parts: Sequence[Tensor] = heads.split_with_sizes(sizes, 1)  # `split` is slow Python
    return parts


def to_device(arrays: Sequence[npt.NDArray[np.integer]], device: torch.device) -> Sequence[Tensor]:
    """Each as int32 on the device, by one copy that the host does not wait for; none for nothing."""
    if not arrays:
        return ()
    host = torch.from_numpy(np.concatenate(arrays)).to(torch.int32)
    on_device = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
    parts: Sequence[Tensor] = on_device.split([len(array) for array in arrays])
    return parts
