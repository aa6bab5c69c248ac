"""What the decoder asks of attention: one plan a forward, one call a layer.

Its own file so that other kernels (variable-length, captured, fused) come in beside `torch_sdpa.py` without a change to
a model. A plan belongs to one (u)batch: it is made by that ubatch's forward and shares nothing with its siblings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from moe.batch import ForwardBatch
from moe.config import ModelConfig
from moe.kv_cache import KVCache


class AttentionPlan(Protocol):
    """Attention of one batch, with everything prepared that is the same in all layers."""

    def attend(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, angles: tuple[Tensor, Tensor]
    ) -> Tensor:
        """All that happens between the two products of attention; gives [T, num_heads * head_dim].

        qkv [T, (num_heads + 2 * num_kv_heads) * head_dim]: query heads, key heads, value heads; may be overwritten.
        Norms the query and key heads where the family does (weights [head_dim]), turns them by `Rotary.angles`, stores
        keys and values, and lets every query see the keys of its request up to itself; zeros in rows of padding. Does
        not block the host on a device.
        """


@runtime_checkable
class StoringPlan(AttentionPlan, Protocol):
    """One whose first part is the same work for batches of any lengths, so that it can be captured in every graph."""

    def store(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, angles: tuple[Tensor, Tensor]
    ) -> Sequence[Tensor]:
        """Norms, angles, and the keys and values into the cache. Gives the query, key and value heads, in `qkv`."""

    def attend_stored(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> Tensor:
        """The rest of `attend`, on what `store` gave; in `out`, contiguous, if that is given."""


class AttentionBackend(Protocol):
    """A way to compute attention.

    One that can be captured in a graph says so by an attribute `captures`: "decode" (uniform decodes) or "all", and
    then reads lengths from `ForwardBatch.fixed` where that is set.
    """

    def __call__(self, config: ModelConfig, batch: ForwardBatch, kv: KVCache) -> AttentionPlan:
        """Prepare one forward."""
