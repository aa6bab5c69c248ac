"""A step of several ubatches as one callable, which a wrapper captures like any other.

A file of its own because it is where turns and graphs meet, and there is little to say: while a graph is captured the
ubatch threads (or greenlets) run the step as always, one at a time, and their work, in the order in which they take
turns, *is* the graph. A replay needs none of them.

    capture | compute stream  A0  A1  E0  E1  ...       captured as it is queued, whoever queues it
            | comm stream         d0  d1  c0  ...       joins by the events of `Work`

Invariants:
- Every thread has made its cuBLAS handles on every stream before the capture starts (`prepare`), because making one
  allocates; the threads are then parked, each at its turn.
- The parts are cut by `tokens`, all of one size, so what they give joins to the rows of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from dbo.runner import UBatchRunner

A = TypeVar("A")


class UBatchStep(Generic[A]):
    """`step(parts)` runs `fn` on each part as a ubatch of `runner` and joins what they give: [num_tokens, ...].

    With one part `fn` is called plainly. Parts of equal padded size, in order.
    """

    def __init__(self, fn: Callable[[A], Tensor], runner: UBatchRunner, *, interleave: bool = True) -> None:
        self._fn, self._runner, self._interleave = fn, runner, interleave

    def __call__(self, parts: Sequence[A]) -> Tensor:
        """Run one step."""
        if len(parts) == 1:
            return self._fn(parts[0])
        return torch.cat(self._runner.run(self._fn, parts, interleave=self._interleave))


def prepare(runner: UBatchRunner, streams: Sequence[Any], device: torch.device) -> None:
    """Have the caller and every ubatch thread make their cuBLAS handles and workspaces on `streams`."""

    def make_handles(_: int) -> None:
        for stream in streams:
            with torch.cuda.stream(stream):
                one = torch.ones(16, 16, device=device, dtype=torch.bfloat16)
                torch.mm(one, one)

    if device.type == "cuda":
        make_handles(0)
        runner.run(make_handles, range(runner.num_ubatches), interleave=False)
        torch.cuda.synchronize(device)
