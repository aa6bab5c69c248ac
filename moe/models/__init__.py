"""Models: one short file for each family over a shared decoder."""

from moe.models.decoder import Model
from moe.models.loading import count_parameters, load_model

__all__ = ["Model", "count_parameters", "load_model"]
