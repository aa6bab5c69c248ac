"""The expert path on a GPU, both layouts, without a host wait and without a permuted copy of the tokens.

Its own file because it is `moe.experts` again with kernels that need a GPU. Six launches for rows (count, place, first product with
its gate, second product, weighted sum), three for the padded layout; every count stays on the device, so filler costs next to
nothing and a CUDA graph may hold it all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.kernels.grouped import grouped_product, grouped_swiglu
from moe.kernels.permute import make_permutation, padded_tiles
from moe.kernels.weighted_sum import weighted_sum

_LARGE, _SMALL = 128, 64  # rows a tile


def run_rows(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """See `moe.experts.run_experts`, rows layout; x may be strided by rows, the weights are contiguous."""
    num_experts, num_slots = w_gate_up.shape[0], topk_idx.numel()
    made = make_permutation(topk_idx, num_experts, _LARGE if num_slots >= _LARGE * num_experts else _SMALL)
    h = grouped_swiglu(x, made.source, w_gate_up, made.tiles, num_slots)
    return weighted_sum(grouped_product(h, w_down, made.tiles), made.position, topk_weights)


def run_padded(x: Tensor, num_tokens_per_expert: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """See `moe.experts.run_experts`, padded layout; num_tokens_per_expert [num_experts] int32 on the device."""
    num_experts, capacity, hidden = x.shape
    tiles = padded_tiles(num_tokens_per_expert, capacity, _SMALL)
    h = grouped_swiglu(x.view(-1, hidden), None, w_gate_up, tiles, num_experts * capacity)
    return grouped_product(h, w_down, tiles).view(x.shape)


def fits(x: Tensor) -> bool:
    """Whether this path serves x: on a GPU, in a type the tensor cores multiply."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
