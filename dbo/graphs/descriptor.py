"""The shape of a step, which is the key of its graph, and the step under way.

A file of its own because the dispatcher makes descriptors, wrappers store graphs under them and the engine pads to
them; they must mean the same. Invariant: two steps with equal descriptors launch the same kernels with the same sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from dbo.graphs.mode import CUDAGraphMode

Variants = tuple[tuple[str, int], ...]
"""What else changes the kernels of a step, by name, such as `(("active_adapters", 2),)`: opaque here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchDescriptor:
    """A step's shape after padding; all ubatches together."""

    num_tokens: int
    num_requests: int | None = None
    """Most requests that the graph can hold; None = it does not matter, the parts that look at requests are eager."""
    uniform_decode: bool = False
    """Every request has one new token, so `num_requests` is `num_tokens`."""
    num_ubatches: int = 1
    variants: Variants = ()

    @property
    def num_tokens_per_ubatch(self) -> int:
        """Padded tokens of each ubatch."""
        return self.num_tokens // self.num_ubatches

    def relaxed(self) -> BatchDescriptor:
        """The key of PIECEWISE graphs, in which only tokens have a fixed number."""
        return replace(self, num_requests=None, uniform_decode=False)

    def __str__(self) -> str:
        kind = "decode tokens" if self.uniform_decode else "tokens"
        requests = "" if self.num_requests is None or self.uniform_decode else f" of {self.num_requests} requests"
        ubatches = "" if self.num_ubatches == 1 else f" in {self.num_ubatches} ubatches"
        variants = "".join(f", {name} {value}" for name, value in self.variants)
        return f"{self.num_tokens} {kind}{requests}{ubatches}{variants}"


@dataclass(frozen=True, slots=True)
class StepContext:
    """The step under way: what wrappers look at."""

    mode: CUDAGraphMode
    descriptor: BatchDescriptor


_step: ContextVar[StepContext | None] = ContextVar("dbo_graph_step", default=None)


def current_step() -> StepContext | None:
    """The step that this thread runs, None outside one. Ubatches see that of their caller."""
    return _step.get()


@contextmanager
def step_context(mode: CUDAGraphMode, descriptor: BatchDescriptor) -> Iterator[None]:
    """Run one step in a runtime mode, as the dispatcher gave them."""
    token = _step.set(StepContext(mode, descriptor))
    try:
        yield
    finally:
        _step.reset(token)
