"""Fixtures of the tests of `moe`."""

from tests.moe.checkpoints import checkpoints

__all__ = ["checkpoints"]
