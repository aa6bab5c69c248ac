"""From received tokens to one weighted, summed row each: the compute between dispatch and combine.

Its own file because it is where the time goes, and where devices differ: `make_experts` is the one door, and what is
behind it may keep the weights in whatever form multiplies fastest.

Invariants: a row's result depends on that row, its ids and its weights, and not on the rows beside it (but for what a
matrix product of another size rounds differently, unless `batch_invariant` is asked for); experts are added in
ascending order, in float32, so the same batch gives the same bits; filler rows give 0, NaN or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.all2all.base import Dispatched
from moe.blocks import product_in_blocks
from moe.linear import Linear, has_tiles, make_linear, plain_linear
from moe.swiglu import swiglu

Experts = Callable[[Dispatched], Tensor]


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """This rank's experts of one layer.

    w_gate_up [num_local_experts, 2 * width, hidden], gate first; w_down [num_local_experts, hidden, width].
    """

    w_gate_up: Tensor
    w_down: Tensor


def make_experts(weights: ExpertWeights, *, packed: bool = True, batch_invariant: bool = False) -> Experts:
    """Make the function that runs the rows of a `Dispatched` through the experts they chose.

    It gives, contiguous and in the dtype of `received.x`: for the rows layout [n, hidden], weighted and summed over
    these experts; for the padded layout [num_local_experts, capacity, hidden], not weighted, undefined beyond each
    expert's count. The weights may be kept in another form: a caller that drops its tensors has them in memory once.
    `packed=False` keeps them as they are, for tensors whose values change. `batch_invariant`: see `ModelConfig`.
    """
    if has_tiles(weights.w_gate_up) and has_tiles(weights.w_down):
        from moe.experts_cuda import CudaExperts  # a laptop has no Triton

        return CudaExperts(weights.w_gate_up, weights.w_down, batch_invariant=batch_invariant)
    return _ExpertByExpert(weights, packed, batch_invariant)


class _ExpertByExpert:
    """One product after another: the form of the CPU, and of any device without a better one. The host reads counts.

    All first products come before all second ones, so that what lies between them is a few large operations.
    """

    reads_host = True

    def __init__(self, weights: ExpertWeights, packed: bool = True, batch_invariant: bool = False):
        self._batch_invariant = batch_invariant

        def linear(weight: Tensor) -> Linear:
            made = make_linear(weight) if packed else plain_linear(weight)
            return product_in_blocks(made) if batch_invariant else made

        self._gate_up = [linear(weight) for weight in weights.w_gate_up]
        self._down = [linear(weight) for weight in weights.w_down]

    def __call__(self, received: Dispatched) -> Tensor:
        if received.topk_idx is not None and received.topk_weights is not None:
            return self._rows(received.x, received.topk_idx, received.topk_weights)
        if received.num_tokens_per_expert is None:
            raise ValueError("the padded layout needs num_tokens_per_expert")
        return self._padded(received.x, [int(n) for n in received.num_tokens_per_expert])

    def _rows(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        experts, order = topk_idx.flatten().sort(stable=True)
        skipped, *counts = torch.bincount(experts + 1, minlength=len(self._down) + 1).tolist()
        order = order[skipped:]  # the ids -1 come first
        rows = order // topk_idx.shape[1]
        total = x.new_zeros(x.shape, dtype=torch.float32)
        if len(rows):
            results = self._mlp(x[rows], counts).float() * topk_weights.flatten()[order].unsqueeze(1)
            if x.is_cuda:  # a row twice in one call would be added in any order
                for own, result in zip(rows.split(counts), results.split(counts), strict=True):
                    total.index_add_(0, own, result)
            else:
                total.index_add_(0, rows, results)
        return total.to(x.dtype)

    def _padded(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        y = torch.empty_like(x)
        parts = [x[expert, :count] for expert, count in enumerate(counts)]
        if sum(counts):
            for expert, part in enumerate(torch.split(self._mlp(torch.cat(parts), counts), list(counts))):
                y[expert, : len(part)] = part
        return y

    def _mlp(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """x [n, hidden], n > 0, the first `counts[0]` rows for expert 0 and so on -> [n, hidden]."""
        h = swiglu(_grouped(self._gate_up, x, counts), batch_invariant=self._batch_invariant)
        return _grouped(self._down, h, counts)


def _grouped(linears: Sequence[Linear], x: Tensor, counts: Sequence[int]) -> Tensor:
    parts = torch.split(x, list(counts))
    return torch.cat([linear(part) for linear, part in zip(linears, parts, strict=True) if len(part)])
