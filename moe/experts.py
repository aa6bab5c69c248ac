"""From received tokens to one weighted, summed row each: the compute between dispatch and combine.

Its own file because it is where the time goes, and where devices differ: `run_experts` is the one door, behind
it is one form per device and layout.

Invariants: a row's result depends on that row, its ids and its weights, not on the rows beside it (up to what
the matrix product of another size rounds differently); experts are added in ascending order, so the same batch
gives the same bits; filler rows, NaN included, give 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.all2all.base import Dispatched


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """This rank's experts of one layer: w_gate_up [E_local, 2 * width, hidden] (gate first), w_down [E_local,
    hidden, width]."""

    w_gate_up: Tensor
    w_down: Tensor


def run_experts(received: Dispatched, weights: ExpertWeights) -> Tensor:
    """Run the rows of `received` through the experts they chose.

    rows layout: [n, hidden], weighted and summed over this rank's experts, 0 for filler. padded layout:
    [E_local, capacity, hidden], not weighted, undefined beyond each expert's count. Dtype of `received.x`,
    contiguous.
    """
    if received.topk_idx is None or received.topk_weights is None:
        return _padded(received.x, weights)
    return _rows(received.x, received.topk_idx, received.topk_weights, weights)


def _rows(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, weights: ExpertWeights) -> Tensor:
    """One expert after another over the rows that chose it."""
    num_topk, num_experts = topk_idx.shape[1], weights.w_gate_up.shape[0]
    experts, order = topk_idx.flatten().sort(stable=True)
    counts = torch.bincount(experts + 1, minlength=num_experts + 1).tolist()
    rows = torch.split(order // num_topk, counts)[1:]
    scales = torch.split(topk_weights.flatten()[order], counts)[1:]
    total = x.new_zeros(x.shape, dtype=torch.float32)
    for expert, (chosen, scale) in enumerate(zip(rows, scales, strict=True)):
        if len(chosen):
            y = _mlp(x[chosen], weights.w_gate_up[expert], weights.w_down[expert])
            total.index_add_(0, chosen, y.float() * scale[:, None])
    return total.to(x.dtype)


def _padded(x: Tensor, weights: ExpertWeights) -> Tensor:
    """All experts at once over all rows, used or not: no host read, whatever the counts."""
    gate, up = torch.bmm(x, weights.w_gate_up.transpose(1, 2)).chunk(2, dim=-1)
    return torch.bmm(F.silu(gate) * up, weights.w_down.transpose(1, 2))


def _mlp(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    gate, up = F.linear(x, w_gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, w_down)
