"""Rotary position embeddings and the ways of stretching them that published Mixtral and Qwen3-MoE models use.

Its own file because it is arithmetic on a `ModelConfig`, checked against transformers by itself. The halves of a head
turn against each other (element i with element i + head_dim / 2), as Hugging Face checkpoints expect.

Sources: linear is Chen et al. 2023 (position interpolation); dynamic is NTK-aware scaling as in transformers; yarn is
Peng et al. 2023, equations 17 to 23; llama3 is the Llama 3.1 release's rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe.blocks import row_by_row
from moe.config import ModelConfig


class Rotary:
    """The turning speeds of a model's heads."""

    def __init__(self, config: ModelConfig, device: torch.device | str = "cpu") -> None:
        speeds = config.rope_theta ** -(torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim)
        self._scale, self._batch_invariant = 1.0, config.batch_invariant
        scaling = config.rope_scaling or {"rope_type": "default"}
        match scaling["rope_type"]:
            case "linear":
                speeds = speeds / scaling["factor"]
            case "yarn":
                speeds = _yarn(speeds, config.rope_theta, scaling)
                self._scale = _yarn_attention_factor(scaling)
            case "llama3":
                speeds = _llama3(speeds, scaling)
            # dynamic scaling starts beyond `max_position`, which is this runtime's limit: below, it is the default.
        self.speeds = speeds.to(device)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine, each [T, 1, head_dim / 2], for positions [T] int64; once a forward, for all layers."""
        angle = positions[:, None, None] * self.speeds
        if self._batch_invariant:
            cos, sin = (row_by_row(function, angle) * self._scale for function in (torch.cos, torch.sin))
            return cos.to(dtype), sin.to(dtype)
        if self._scale != 1.0:
            return (angle.cos() * self._scale).to(dtype), (angle.sin() * self._scale).to(dtype)
        cos, sin = (torch.empty(angle.shape, dtype=dtype, device=angle.device) for _ in range(2))
        return torch.cos(angle, out=cos), torch.sin(angle, out=sin)  # rounded as they are stored: half the launches


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turn x [T, heads, head_dim] by angles from `Rotary.angles`."""
    cos, sin = angles
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _yarn(speeds: Tensor, theta: float, scaling: Mapping[str, Any]) -> Tensor:
    """Fast pairs keep their speed, slow ones are divided by the factor, those between are blended."""
    head_dim = 2 * len(speeds)

    def pair_that_turns(times: float) -> float:
        """The (fractional) pair that makes so many full turns over the original context."""
        original = float(scaling["original_max_position_embeddings"])
        return head_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_that_turns(scaling.get("beta_fast") or 32)
    high = pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    slowed: Tensor = ((torch.arange(len(speeds)) - low) / max(high - low, 0.001)).clamp(0, 1)
    factor = float(scaling["factor"])
    return speeds / factor * slowed + speeds * (1 - slowed)


def _yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    """How much longer queries and keys become, against the flatter softmax over a longer context."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return growth(scaling["mscale"]) / growth(scaling["mscale_all_dim"])
    return growth(1.0)


def _llama3(speeds: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """By full turns over the original context: many keep their speed, few are divided, between blended."""
    turns = float(scaling["original_max_position_embeddings"]) * speeds / (2 * math.pi)
    low, high, factor = (float(scaling[k]) for k in ("low_freq_factor", "high_freq_factor", "factor"))
    kept: Tensor = ((turns - low) / (high - low)).clamp(0, 1)
    return speeds / factor * (1 - kept) + speeds * kept
