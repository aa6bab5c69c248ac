"""What a device must offer for its work to be captured: the seam between the logic of graphs and CUDA.

A file of its own so that everything above it runs, and is tested, without a GPU: `cuda.py` implements it with torch's
graphs, `tests/dbo/graphs/emulator.py` by recording operators.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from torch import Tensor

ErrorMode = Literal["thread_local", "relaxed"]
"""What other threads may do meanwhile. `relaxed` where several threads take part in one capture (ubatch threads): only
then may one thread end what another began."""


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Enqueue it on the current stream; never waits."""

    def reset(self) -> None:
        """Give it up, with its hold on the pool."""


class GraphBackend(Protocol):
    """Captures the work of one device; takes no graphs but its own.

    A stream is whatever `current_stream` gives; None where there are none.
    """

    def new_pool(self) -> Any:
        """Memory that graphs share. They must be replayed in one order at a time, never concurrently."""

    def begin(self, pool: Any, mode: ErrorMode) -> Graph:
        """From now on work on the current stream, and on streams that wait for it, is captured, not run."""

    def end(self, graph: Any) -> bool:
        """The opposite, on the same stream. False if nothing was captured: such a graph is given up already."""

    def abort(self, graph: Any, pool: Any) -> None:
        """Give up a capture that failed, whatever state it is in; nothing more is captured into `pool`."""

    def capture_stream(self) -> Any:
        """A stream that can be captured: the current one if it can."""

    def current_stream(self) -> Any:
        """The stream that work goes to now."""

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Make `stream` current, ordered after nothing."""

    def joined(self, stream: Any) -> AbstractContextManager[Any]:
        """Make `stream` current, ordered after the one that was, which is ordered after it at the end."""

    def weak_ref(self, tensor: Tensor) -> Tensor:
        """The same memory, which may be given away while this lives."""

    def collect(self) -> None:
        """Free what nobody uses: unreachable objects, and cached memory. Waits for the device."""

    def reserved_bytes(self) -> int:
        """Memory that the device has given to this process."""

    def describe(self) -> str:
        """The streams that are in a capture now, for an error."""
