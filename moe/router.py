"""Which experts a token goes to, and with what weight.

Its own file because families differ here and nowhere else in the layer: Mixtral always renormalises the chosen
weights, Qwen3-MoE does so if its `norm_topk_prob` says it. Invariant: rows at and beyond `num_tokens` get id -1
and weight 0, whatever they contain.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Router:
    """The gate of one layer: gate [num_experts, hidden]."""

    gate: Tensor
    num_topk: int
    norm_topk_prob: bool

    def __call__(self, x: Tensor, num_tokens: int | Tensor) -> tuple[Tensor, Tensor]:
        """Route x [T, hidden]; gives topk_weights [T, num_topk] float32 and topk_idx [T, num_topk] int64."""
        logits = F.linear(x.to(self.gate.dtype), self.gate)
        if logits.is_cuda:
            from moe.kernels.topk import softmax_topk  # `route` in one launch

            return softmax_topk(logits, self.num_topk, norm_topk_prob=self.norm_topk_prob, num_tokens=num_tokens)
        return route(logits, self.num_topk, norm_topk_prob=self.norm_topk_prob, num_tokens=num_tokens)


def route(logits: Tensor, num_topk: int, *, norm_topk_prob: bool, num_tokens: int | Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over all experts in float32, then the `num_topk` largest; they sum to 1 if `norm_topk_prob`.

    logits [T, num_experts] of any float type; `num_tokens` an int, or a 0-d device tensor where a graph replays
    with other counts. Gives topk_weights [T, num_topk] float32 and topk_idx [T, num_topk] int64, largest weight
    first; -1 and 0 in padded rows.
    """
    weights, experts = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(num_topk, dim=-1)
    if norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    padded = (torch.arange(logits.shape[0], device=logits.device) >= num_tokens).unsqueeze(-1)
    return weights.masked_fill(padded, 0.0), experts.masked_fill(padded, -1)
