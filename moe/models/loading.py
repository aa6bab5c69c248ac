"""From a directory or a shape to a running model.

Its own file because it is the one place that joins configuration, weights and decoder.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from dbo.errors import ConfigError
from moe.all2all.base import All2All, expert_range
from moe.config import DTYPES, ModelConfig, read_config
from moe.models.decoder import Model, declare_params
from moe.models.registry import family_named
from moe.offload import attach, offload, offloaded_layers, parameters_on_host
from moe.weights import Checkpoint, DummyWeights, WeightSource, load_params


def load_model(
    model: str | Path | ModelConfig,
    *,
    all2all: All2All,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    load_format: Literal["auto", "dummy"] = "auto",
    seed: int = 0,
    offload_layers: int = 0,
    batch_invariant: bool = False,
    progress: bool = True,
) -> Model:
    """Load what rank `all2all.ep_rank` holds of a Hugging Face directory; a ModelConfig gets random weights.

    `dtype="auto"` keeps the checkpoint's. `load_format="dummy"` takes only the shape from `model` and random weights
    from `seed`, the same for any number of ranks. The experts of `offload_layers` layers live in host memory, see
    `Model.offloader`. `batch_invariant` here or in `model`: see `ModelConfig`. The progress bar (standard error) is
    rank 0's. Blocks until loaded.
    Raises ConfigError for what the config asks and WeightError for what the checkpoint lacks, on every rank alike and
    before anything is loaded; takes part in no collective.
    """
    config = model if isinstance(model, ModelConfig) else read_config(model)
    source: WeightSource
    if load_format == "dummy":
        source = DummyWeights(seed)
    elif isinstance(model, ModelConfig):
        raise ConfigError("load_format", load_format, "dummy", "a shape has no weights on disk")
    else:
        source = Checkpoint(model)
    kept = config.dtype if dtype == "auto" else DTYPES[dtype] if isinstance(dtype, str) else dtype
    experts = expert_range(config.num_experts, all2all.ep_size, all2all.ep_rank)
    layers = offloaded_layers(config, offload_layers) if offload_layers else []
    params = load_params(
        source,
        declare_params(config, family_named(config.family), experts),
        dtype=kept,
        device=torch.device(device),
        progress=progress and all2all.ep_rank == 0,
        on_host=parameters_on_host(layers),
    )
    offloader = offload(params, layers, torch.device(device))
    config = replace(config, dtype=kept, batch_invariant=batch_invariant or config.batch_invariant)
    loaded = Model(config, params, all2all)
    if offloader is not None:
        attach(loaded, layers, offloader)
    return loaded


def count_parameters(config: ModelConfig) -> int:
    """Parameters of the whole model, tied ones once."""
    params = declare_params(config, family_named(config.family), range(config.num_experts))
    return sum(math.prod(param.shape) for param in params.values())
