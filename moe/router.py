"""Which experts a token goes to, and with what weight.

Its own file because families differ here and nowhere else in the layer: Mixtral always renormalises the chosen
weights, Qwen3-MoE does so if its `norm_topk_prob` says it. Invariant: rows at and beyond `num_tokens` get id -1
and weight 0, whatever they contain.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from moe.blocks import row_by_row
from moe.linear import Linear, make_linear, plain_linear


class Route(Protocol):
    """Chooses the experts of a layer."""

    def __call__(self, x: Tensor, num_tokens: int | Tensor, slots: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Route x [T, hidden]; gives topk_weights [T, num_topk] float32 and topk_idx [T, num_topk] int64.

        `slots` [T] int64: where in the KV cache each token lies, -1 for padding: a name of the token that stays the
        same however the batch is cut.
        """


@dataclass(frozen=True, kw_only=True)
class Router:
    """The gate of one layer: gate [num_experts, hidden]."""

    gate: Tensor
    num_topk: int
    norm_topk_prob: bool
    batch_invariant: bool = False  # see `ModelConfig`

    @cached_property
    def _scores(self) -> Linear:
        return make_linear(self.gate, batch_invariant=True) if self.batch_invariant else plain_linear(self.gate)

    def __call__(self, x: Tensor, num_tokens: int | Tensor, slots: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `Route`; `slots` does not matter here."""
        logits = self._scores(x.to(self.gate.dtype))
        if logits.is_cuda:
            from moe.kernels.topk import softmax_topk  # `route` in one launch

            return softmax_topk(logits, self.num_topk, norm_topk_prob=self.norm_topk_prob, num_tokens=num_tokens)
        return route(
            logits,
            self.num_topk,
            norm_topk_prob=self.norm_topk_prob,
            num_tokens=num_tokens,
            batch_invariant=self.batch_invariant,
        )


def route(
    logits: Tensor,
    num_topk: int,
    *,
    norm_topk_prob: bool,
    num_tokens: int | Tensor,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Softmax over all experts in float32, then the `num_topk` largest; they sum to 1 if `norm_topk_prob`.

    logits [T, num_experts] of any float type; `num_tokens` an int, or a 0-d device tensor where a graph replays
    with other counts; `batch_invariant`: see `ModelConfig`. Gives topk_weights [T, num_topk] float32 and topk_idx
    [T, num_topk] int64, largest weight first; -1 and 0 in padded rows.
    """
    chosen = row_by_row(_softmax, logits) if batch_invariant else _softmax(logits)
    weights, experts = chosen.topk(num_topk, dim=-1)
    if norm_topk_prob:
        weights = row_by_row(_shares, weights) if batch_invariant else _shares(weights)
    padded = (torch.arange(logits.shape[0], device=logits.device) >= num_tokens).unsqueeze(-1)
    return weights.masked_fill(padded, 0.0), experts.masked_fill(padded, -1)


def _softmax(logits: Tensor) -> Tensor:
    return torch.softmax(logits, dim=-1, dtype=torch.float32)


def _shares(weights: Tensor) -> Tensor:
    return weights / weights.sum(dim=-1, keepdim=True)


# ---------------------------------------------------------------------------------------------- for experiments

_TABLE_ROWS = 4093  # a prime: slots that lie a power of two apart get different rows


@dataclass(frozen=True, kw_only=True)
class ScriptedRouter:
    """A router whose choice of experts is replaced by that of a table, to study other loads than the model's own.

    The gate still runs: its time and its weights stay. table [n, num_topk] int64: a token takes the row of its slot
    (modulo n), so its experts do not depend on how the batch was cut, and the rule is the same on every rank.
    """

    gate: Route
    table: Tensor

    def __call__(self, x: Tensor, num_tokens: int | Tensor, slots: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `Route`. Raises ValueError without `slots`."""
        if slots is None:
            raise ValueError("a scripted router needs the slots of its tokens")
        weights, chosen = self.gate(x, num_tokens, slots)
        scripted = self.table[slots.remainder(len(self.table))]
        return weights, scripted.where(chosen >= 0, -1)


def routing_table(rule: str, *, num_experts: int, num_topk: int, seed: int) -> Tensor:
    """[n, num_topk] int64 of experts, each at most once a row, on the CPU; the same for the same arguments.

    `uniform`: all experts alike. `zipf:A`: the r-th most popular expert with a probability in proportion to r ** -A,
    drawn without replacement, in an order of popularity that `seed` shuffles. `one-expert`: every token goes to expert
    0, and to 1 .. num_topk - 1 where it takes several. Raises ValueError for another rule.
    """
    kind, _, exponent = rule.partition(":")
    random = torch.Generator().manual_seed(seed)
    if kind == "one-expert" and not exponent:
        return torch.arange(num_topk).expand(_TABLE_ROWS, -1).contiguous()
    if kind == "uniform" and not exponent:
        power = 0.0
    elif kind == "zipf" and exponent:
        power = float(exponent)
    else:
        raise ValueError(f"{rule!r} is not uniform, zipf:A or one-expert")
    popularity = torch.randperm(num_experts, generator=random) + 1.0
    # The num_topk largest of log p + Gumbel noise are a draw without replacement.
    noise = -torch.rand(_TABLE_ROWS, num_experts, generator=random, dtype=torch.float64).log_().neg_().log_()
    return (noise - power * popularity.log()).topk(num_topk, dim=-1).indices
