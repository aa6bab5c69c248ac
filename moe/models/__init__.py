"""Model families: what a checkpoint holds and how it is run. Entry points: `load_model`, `Model`, `count_parameters`."""

from moe.models.decoder import Model
from moe.models.loading import count_parameters, load_model

__all__ = ["Model", "count_parameters", "load_model"]
