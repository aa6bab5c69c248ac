"""The MoE layer in plain torch, in one process: what everything else is compared with.

Its own file, and free of the rest of the package, so that it can be checked by reading. One expert at a time,
no tricks, float32 accumulation over experts in ascending order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def moe_reference(
    x: Tensor,
    gate: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    num_topk: int,
    norm_topk_prob: bool,
    num_tokens: int | None = None,
) -> Tensor:
    """Run x [T, hidden] through its experts; gives [T, hidden], 0 in the rows from `num_tokens` on.

    gate [num_experts, hidden], w_gate_up [num_experts, 2 * width, hidden] (gate rows first), w_down
    [num_experts, hidden, width].
    """
    topk_weights, topk_idx = route_reference(x, gate, num_topk, norm_topk_prob, num_tokens)
    return experts_reference(x, topk_idx, topk_weights, w_gate_up, w_down)


def route_reference(
    x: Tensor, gate: Tensor, num_topk: int, norm_topk_prob: bool, num_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """Choose experts for x [T, hidden]: weights [T, num_topk] float32 and ids [T, num_topk] int64, 0 and -1
    where padded."""
    topk_weights = torch.zeros(x.shape[0], num_topk)
    topk_idx = torch.full((x.shape[0], num_topk), -1)
    for t in range(x.shape[0] if num_tokens is None else num_tokens):
        probabilities = torch.softmax((gate @ x[t]).float(), dim=0)
        topk_weights[t], topk_idx[t] = probabilities.topk(num_topk)
        if norm_topk_prob:
            topk_weights[t] /= topk_weights[t].sum()
    return topk_weights, topk_idx


def experts_reference(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """Weighted sum over the chosen experts of x [T, hidden]; ids are rows of the weights, -1 = none."""
    total = torch.zeros(x.shape, dtype=torch.float32)
    for expert in range(w_gate_up.shape[0]):
        for token, slot in (topk_idx == expert).nonzero().tolist():
            gate, up = (w_gate_up[expert] @ x[token]).chunk(2)
            y = w_down[expert] @ (F.silu(gate) * up)
            total[token] += topk_weights[token, slot] * y
    return total.to(x.dtype)


def received_reference(topk_idx: list[Tensor], num_experts: int) -> list[int]:
    """Tokens that every expert receives, given each rank's topk_idx [T, num_topk] of global ids."""
    return [sum(int((idx == expert).sum()) for idx in topk_idx) for expert in range(num_experts)]


def rows_reference(topk_idx: Tensor, experts: range) -> list[int]:
    """The tokens of topk_idx [T, num_topk] that travel to the rank that holds `experts`: each once, ascending."""
    return [t for t, row in enumerate(topk_idx.tolist()) if any(expert in experts for expert in row)]
