"""The expert path on a GPU, both layouts, without a host wait and without a permuted copy of the tokens.

Its own file because it is `moe.experts` again with kernels that need a GPU. Five launches for rows (count, place, first
product with its gate, second product, weighted sum), three for the padded layout. Every count stays on the device, so
filler costs next to nothing and a CUDA graph may hold it all.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe.all2all.base import Dispatched
from moe.kernels.grouped import GroupedWeight, grouped_product, grouped_swiglu
from moe.kernels.permute import make_permutation, padded_tiles
from moe.kernels.weighted_sum import weighted_sum

_TILES = (16, 32, 64, 128)  # rows
_FIXED_TILE = 64  # where the rows of a batch must not decide


class CudaExperts:
    """See `moe.experts.make_experts`, and `ExpertWeights` for the shapes."""

    def __init__(self, w_gate_up: Tensor, w_down: Tensor, *, batch_invariant: bool = False):
        """Weights for which `moe.linear.has_tiles` holds. `batch_invariant` (see `ModelConfig`): one size of tile for
        every batch, for tiles of another size may round otherwise."""
        self._w_gate_up, self._w_down = GroupedWeight(w_gate_up.contiguous()), GroupedWeight(w_down.contiguous())
        self._batch_invariant = batch_invariant

    def __call__(self, received: Dispatched) -> Tensor:
        """Run what was received; see `moe.experts.make_experts`."""
        if received.topk_idx is not None and received.topk_weights is not None:
            return self._rows(received.x, received.topk_idx, received.topk_weights, received.rows_per_expert)
        counts = received.num_tokens_per_expert
        if not isinstance(counts, Tensor):
            counts = torch.tensor(counts, dtype=torch.int32, device=received.x.device)
        return self._padded(received.x, counts, received.rows_per_expert)

    def _rows(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, expected: int | None) -> Tensor:
        num_experts, num_slots = self._w_gate_up.shape[0], topk_idx.numel()
        made = make_permutation(
            topk_idx, num_experts, self._tile(num_slots // num_experts if expected is None else expected)
        )
        h = grouped_swiglu(x, made.source, self._w_gate_up, made.tiles, num_slots)
        return weighted_sum(grouped_product(h, self._w_down, made.tiles), made.position, topk_weights)

    def _padded(self, x: Tensor, counts: Tensor, expected: int | None) -> Tensor:
        num_experts, capacity, _ = x.shape
        tiles = padded_tiles(counts, capacity, self._tile(capacity if expected is None else expected, capacity))
        h = grouped_swiglu(x.flatten(0, 1), None, self._w_gate_up, tiles, num_experts * capacity)
        return grouped_product(h, self._w_down, tiles).view(x.shape)

    def _tile(self, rows_per_expert: int, at_most: float = math.inf) -> int:
        return _FIXED_TILE if self._batch_invariant else _tile(rows_per_expert, at_most)


def _tile(rows_per_expert: int, at_most: float = math.inf) -> int:
    """Rows a tile: the smallest that holds nearly every expert's rows, which spread about their mean as random choices
    do. A half empty tile costs as much as a full one, and a second one reads the expert's weights again."""
    most = min(rows_per_expert + 2 * math.sqrt(rows_per_expert), at_most)
    return next((tile for tile in _TILES if tile >= most), _TILES[-1])
