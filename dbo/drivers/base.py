"""What a turn driver is: it can start ubatch 0, hand the turn from one ubatch to another, and stop.

A file of its own because the runner knows only this. *Who* runs next is decided elsewhere (`runner.Step`), once, for
all drivers; a driver only knows how to park one ubatch and wake another.

Invariant: at most one ubatch runs at any time, and the caller of `run` is parked meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dbo.torch_state import TorchState

# Runs ubatch k to its end, whatever happens in it, and returns the ubatch that goes on: None after the last one.
Body = Callable[[int], int | None]


class Driver(Protocol):
    """Kept ubatch threads or greenlets, parked between steps."""

    own_threads: bool
    """Ubatches run in threads with a torch state of their own, which must be put into the caller's."""

    def run(self, body: Body, state: TorchState, timeout_s: float) -> bool:
        """Wake ubatch 0 and block until the last ubatch has ended; False when `timeout_s` (0 = no limit) ran out.

        `state` is the caller's, which every ubatch starts with. Raises what a signal handler raises in the caller.
        """

    def settle(self, timeout_s: float) -> bool:
        """After `run` was left early: wait until no ubatch runs any more; False if one still does."""

    def switch(self, src: int, dst: int) -> None:
        """Called by ubatch `src`: wake `dst`, return when somebody wakes `src`."""

    def close(self) -> None:
        """End the parked threads or greenlets. A second call does nothing."""
