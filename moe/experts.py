"""From received tokens to one weighted, summed row each."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe.all2all.base import Dispatched


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """This rank's experts of one layer: w_gate_up [E_local, 2 * width, hidden] (gate first), w_down [E_local, hidden, width]."""

    w_gate_up: Tensor
    w_down: Tensor


def run_experts(received: Dispatched, weights: ExpertWeights) -> Tensor:
    """Rows of `received.x` through the experts they chose: [n, hidden], weighted and summed; 0 for filler rows."""
    raise NotImplementedError
