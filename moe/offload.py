"""Experts of some layers in host memory: which layers, and how they are called.

Its own file because it joins two things that know nothing of each other: `dbo.offload` (memory and streams) and a
model's experts. Invariant: the layers lie evenly among the others, so that each copy has as much time as it can get.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dbo.errors import ConfigError
from dbo.offload import Offloader
from moe.all2all.base import Dispatched
from moe.config import ModelConfig
from moe.experts import Experts, ExpertWeights, make_experts
from moe.models.decoder import Model, Params, RoutedMLP

EXPERTS = ("w_gate_up", "w_down")


class OffloadedExperts:
    """An `Experts` whose weights come and go."""

    def __init__(self, offloader: Offloader, index: int, inner: Experts) -> None:
        self.inner = inner
        self._call = offloader.using(index, lambda received: self.inner(received))

    def __call__(self, received: Dispatched) -> Tensor:
        """See `moe.experts.make_experts`."""
        return self._call(received)


def offloaded_layers(config: ModelConfig, count: int) -> list[int]:
    """The layers, `count` of those with experts. Raises ConfigError."""
    layers = [index for index in range(config.num_layers) if index not in config.dense_layers]
    if count > len(layers):
        raise ConfigError("--offload-layers", count, f"at most the model's {len(layers)} layers with experts")
    return [layers[k * len(layers) // count] for k in range(count)]


def parameters_on_host(layers: list[int]) -> frozenset[str]:
    """Names of the parameters that live there."""
    return frozenset(f"layers.{index}.{name}" for index in layers for name in EXPERTS)


def offload(params: Params, layers: list[int], device: torch.device) -> Offloader | None:
    """Put the slots in the place of the parameters on the host; before the model is made of `params`."""
    if not layers:
        return None
    held = [{name: params[f"layers.{index}.{name}"] for name in EXPERTS} for index in layers]
    offloader = Offloader(held, device)
    for k, index in enumerate(layers):
        for name in EXPERTS:
            params[f"layers.{index}.{name}"] = offloader.weights(k)[name]
    return offloader


def attach(model: Model, layers: list[int], offloader: Offloader) -> None:
    """Have the experts of these layers wait for their weights."""
    for k, index in enumerate(layers):
        mlp, held = model.layers[index].mlp, offloader.weights(k)
        assert isinstance(mlp, RoutedMLP)
        weights = ExpertWeights(w_gate_up=held["w_gate_up"], w_down=held["w_down"])
        experts = make_experts(weights, packed=False, batch_invariant=model.config.batch_invariant)
        mlp.moe.experts = OffloadedExperts(offloader, k, experts)
    model.offloader = offloader
