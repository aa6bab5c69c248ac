"""From received tokens to one weighted, summed row each: the compute between dispatch and combine.

Its own file because it is where the time goes, and where devices differ: `make_experts` is the one door, and what is
behind it may keep the weights in whatever form multiplies fastest.

Invariants: a row's result depends on that row, its ids and its weights, and not on the rows beside it (but for what a
matrix product of another size rounds differently); experts are added in ascending order, in float32, so the same batch
gives the same bits; filler rows give 0, NaN or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.all2all.base import Dispatched
from moe.linear import make_linear

Experts = Callable[[Dispatched], Tensor]


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """This rank's experts of one layer.

    w_gate_up [num_local_experts, 2 * width, hidden], gate first; w_down [num_local_experts, hidden, width].
    """

    w_gate_up: Tensor
    w_down: Tensor


def make_experts(weights: ExpertWeights) -> Experts:
    """Make the function that runs the rows of a `Dispatched` through the experts they chose.

    It gives, contiguous and in the dtype of `received.x`: for the rows layout [n, hidden], weighted and summed over
    these experts; for the padded layout [num_local_experts, capacity, hidden], not weighted, undefined beyond each
    expert's count. The weights may be kept in another form: a caller that drops its tensors has them in memory once.
    """
    if weights.w_gate_up.is_cuda:
        from moe.experts_cuda import CudaExperts  # a laptop has no Triton

        if CudaExperts.takes(weights.w_gate_up) and CudaExperts.takes(weights.w_down):
            return CudaExperts(weights.w_gate_up, weights.w_down)
    return _ExpertByExpert(weights)


class _ExpertByExpert:
    """One product after another: the form of the CPU, and of any device without a better one. The host reads counts."""

    def __init__(self, weights: ExpertWeights):
        self._mlps = [_mlp(gate_up, down) for gate_up, down in zip(weights.w_gate_up, weights.w_down, strict=True)]

    def __call__(self, received: Dispatched) -> Tensor:
        if received.topk_idx is not None and received.topk_weights is not None:
            return self._rows(received.x, received.topk_idx, received.topk_weights)
        if received.num_tokens_per_expert is None:
            raise ValueError("the padded layout needs num_tokens_per_expert")
        return self._padded(received.x, [int(n) for n in received.num_tokens_per_expert])

    def _rows(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        experts, order = topk_idx.flatten().sort(stable=True)
        skipped, *counts = torch.bincount(experts + 1, minlength=len(self._mlps) + 1).tolist()
        order = order[skipped:]  # the ids -1 come first
        rows = order // topk_idx.shape[1]
        total = x.new_zeros(x.shape, dtype=torch.float32)
        parts = torch.split(x[rows], counts)
        if len(rows):
            results = torch.cat([mlp(part) for mlp, part in zip(self._mlps, parts, strict=True) if len(part)])
            total.index_add_(0, rows, results.float() * topk_weights.flatten()[order].unsqueeze(1))
        return total.to(x.dtype)

    def _padded(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        y = torch.empty_like(x)
        for expert, count in enumerate(counts):
            y[expert, :count] = self._mlps[expert](x[expert, :count])
        return y


def _mlp(w_gate_up: Tensor, w_down: Tensor) -> Callable[[Tensor], Tensor]:
    gate_up, down = make_linear(w_gate_up), make_linear(w_down)

    def mlp(x: Tensor) -> Tensor:
        gate, up = gate_up(x).chunk(2, dim=-1)
        return down(F.silu(gate) * up)

    return mlp
