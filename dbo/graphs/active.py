"""What the rest of `dbo` must know of a capture under way: whether something has to happen between two segments.

A file of its own, with nothing but a variable and functions, because work, contexts, runners and offloading call them
in eager steps too, where they must cost next to nothing, and must not import what implements them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol


class Capture(Protocol):
    """A capture under way (`breakable.BreakableCapture`)."""

    takes_breaks: bool
    """Segments may be ended now: not in a FULL capture, and not inside an eager part."""

    def add_eager(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """End the segment, run `fn` now and again at this place of every replay, begin the next segment."""

    def next_segment(self) -> None:
        """End the segment and begin another on what is now the current stream."""


active_capture: ContextVar[Capture | None] = ContextVar("dbo_graph_capture", default=None)
"""Set by the capture; ubatches see that of their caller."""


def current_capture() -> Capture | None:
    """The capture in segments that this code runs in, None if there is none or it takes no break here."""
    capture = active_capture.get()
    return capture if capture is not None and capture.takes_breaks else None


def between_segments(fn: Callable[..., Any], *args: Any) -> None:
    """Call `fn(*args)`; in a capture in segments outside of any graph, and again at every replay."""
    capture = active_capture.get()
    if capture is None or not capture.takes_breaks:
        fn(*args)
    else:
        capture.add_eager(fn, *args)


def next_segment() -> None:
    """Say that another ubatch, or another stream, goes on from here."""
    capture = active_capture.get()
    if capture is not None and capture.takes_breaks:
        capture.next_segment()
