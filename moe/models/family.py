"""What a model family is: how its `config.json` is read and what its tensors are called on disk.

Its own file because the families and the registry both need it. All families so far are the same decoder
(`moe/models/decoder.py`) with other names; a family whose decoder differs brings its own `params` and layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moe.config import HFConfig, ModelConfig


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family, by the names that Hugging Face checkpoints use."""

    name: str
    """`model_type` of config.json and `ModelConfig.family`."""
    architecture: str
    """What config.json lists in `architectures`."""
    parse: Callable[[HFConfig], ModelConfig]
    moe_module: str
    """The layer's submodule with `gate` and `experts`."""
    expert_names: tuple[str, str, str]
    """Gate, up and down projection of one expert in `experts.<i>.<name>.weight`."""
