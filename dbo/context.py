"""What a ubatch knows about itself, and the functions that model code and backends call while it runs.

A file of its own because it is the seam between the two halves of the package: `work.py` (and engines with their own
backends) call these functions, `runner.py` answers them. Neither half imports the other.

Invariants:
- `current_ubatch()` is a `ContextVar`, so each thread and each greenlet sees its own; outside a ubatch it is None and
  every function here does nothing.
- Whatever orders work on the GPU (an event record) happens *before* a turn is passed. After it, the same record would
  cover the sibling's work as well, and nothing would overlap.
- A receive hook runs exactly once, before the ubatch that registered it gets its turn back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol

import torch

from dbo.graphs.active import between_segments, next_segment
from dbo.trace import Lane, Tracer


class Turns(Protocol):
    """Who runs now: the part of a step that its ubatches talk to."""

    def pass_turn(self, index: int) -> None:
        """Let the next ubatch run; return when ubatch `index` has the turn again, or raise `UBatchCancelled`."""

    def next_ubatch(self, index: int) -> UBatchContext:
        """Return the ubatch that runs when `index` passes its turn: itself, if it is the only one left."""

    def check(self) -> None:
        """Raise `UBatchCancelled` in a step that failed, `StepTimeout` in one that is past its limit."""


class UBatchContext:
    """One ubatch of a running step: which one it is, how far it got, and its streams (None on the CPU)."""

    __slots__ = (
        "_comm_event",
        "_compute_event",
        "_pass_turn",
        "_recv_hook",
        "_since",
        "_turns",
        "comm_stream",
        "compute_stream",
        "index",
        "label",
        "layer",
        "num_ubatches",
        "tracer",
    )

    def __init__(
        self,
        index: int,
        num_ubatches: int,
        turns: Turns,
        *,
        tracer: Tracer | None = None,
        comm_stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.index = index
        self.num_ubatches = num_ubatches
        self.tracer = tracer
        self.comm_stream = comm_stream
        self._turns = turns
        self._pass_turn = turns.pass_turn
        if comm_stream is not None:
            self._compute_event, self._comm_event = torch.cuda.Event(), torch.cuda.Event()
        self.reset(num_ubatches)

    def reset(self, num_ubatches: int, compute_stream: torch.cuda.Stream | None = None) -> None:
        """Forget the last step; contexts are kept, so that a step allocates nothing."""
        self.num_ubatches = num_ubatches
        self.compute_stream = compute_stream
        self.layer: int | None = None
        self.label: str | None = None
        self._recv_hook: Callable[[], None] | None = None
        self._since: Any = None

    @property
    def position(self) -> str:
        """How far this ubatch got, in words."""
        where = f"ubatch {self.index} of {self.num_ubatches}"
        where += ", before the first layer" if self.layer is None else f", layer {self.layer}"
        return where + (", no yield point yet" if self.label is None else f", last yield point {self.label!r}")

    def yield_turn(self, label: str) -> None:
        """Pass the turn and return when it comes back; raises `UBatchCancelled` if the step failed meanwhile."""
        if self._recv_hook is not None:
            self.run_recv_hook()
        if self.tracer is None:
            self.label = label
            self._pass_turn(self.index)
        else:
            self.end_compute()
            self.label = label
            self._pass_turn(self.index)
            self.begin_compute()
        next_segment()

    def check(self) -> None:
        """Raise if this step was cancelled or is past its time limit; for host-side waits."""
        self._turns.check()

    def run_recv_hook(self) -> None:
        """Run the hook that a sibling left here, if there is one."""
        hook, self._recv_hook = self._recv_hook, None
        if hook is not None:
            hook()

    def leave_recv_hook(self, hook: Callable[[], None]) -> None:
        """Leave `hook` for the ubatch that runs next."""
        sibling = self._turns.next_ubatch(self.index)
        sibling.run_recv_hook()  # a second hook must not replace one that has not run
        sibling._recv_hook = hook

    def begin_compute(self) -> Any:
        """Open a span on the compute lane; returns its stamp."""
        self._since = self.stamp()
        return self._since

    def end_compute(self) -> None:
        """Close the span on the compute lane; it carries the label of the yield point before it."""
        if self._since is not None:
            self.add_span(self.label or "start", "compute", self._since, self.stamp())
            self._since = None

    def stamp(self) -> Any:
        """Return a mark of now on the current stream, None without a tracer."""
        return None if self.tracer is None else self.tracer.stamp()

    def add_span(self, label: str, lane: Lane, start: Any, end: Any) -> None:
        """Trace what this ubatch did between two stamps."""
        if self.tracer is not None:
            self.tracer.add(self.index, self.layer, label, lane, start, end)


_current: ContextVar[UBatchContext | None] = ContextVar("dbo_current_ubatch", default=None)


def current_ubatch() -> UBatchContext | None:
    """Return the ubatch that this thread or greenlet runs, None outside one."""
    return _current.get()


def current_ubatch_id() -> int:
    """Return the index of the running ubatch, 0 outside one."""
    context = _current.get()
    return 0 if context is None else context.index


def dbo_enabled() -> bool:
    """Say whether this code runs as one of several ubatches."""
    context = _current.get()
    return context is not None and context.num_ubatches > 1


def note_layer(layer: int) -> None:
    """Note that the model entered `layer`; error notes, time-outs and traces name it."""
    context = _current.get()
    if context is not None:
        context.layer = layer


def yield_turn(label: str) -> None:
    """Let the next ubatch run until the turn comes back; streams stay as they are. `label` names the yield point."""
    context = _current.get()
    if context is not None:
        context.yield_turn(label)


# The low-level functions, for engines with their own backends. On the CPU only the yields are left of them.


def switch_to_comm() -> None:
    """Make the comm stream current, ordered after nothing."""
    _switch(to_comm=True, ordered=False)


def switch_to_compute() -> None:
    """Make the compute stream current, ordered after nothing."""
    _switch(to_comm=False, ordered=False)


def switch_to_comm_sync() -> None:
    """Make the comm stream current, ordered after everything on the compute stream so far."""
    _switch(to_comm=True, ordered=True)


def switch_to_compute_sync() -> None:
    """Make the compute stream current, ordered after everything on the comm stream so far."""
    _switch(to_comm=False, ordered=True)


def yield_and_switch_from_compute_to_comm(label: str = "to comm") -> None:
    """Pass the turn; afterwards the comm stream is current, ordered after the compute queued *before* the yield."""
    _switch(to_comm=True, ordered=True, label=label)


def yield_and_switch_from_comm_to_compute(label: str = "to compute") -> None:
    """Pass the turn; afterwards the compute stream is current, ordered after the messages queued *before* the yield."""
    _switch(to_comm=False, ordered=True, label=label)


def register_recv_hook(hook: Callable[[], None]) -> bool:
    """Leave `hook`, which receives what was sent, to the ubatch that runs next.

    It runs there at `maybe_run_recv_hook()`, at the latest when that ubatch passes its turn or ends: before the caller
    gets its own turn back. Returns False outside a ubatch, where nobody would run it: then the caller must.
    """
    context = _current.get()
    if context is None:
        return False
    context.leave_recv_hook(hook)
    return True


def maybe_run_recv_hook() -> None:
    """Run the receive hook that a sibling left, if there is one: before the next send."""
    context = _current.get()
    if context is not None:
        context.run_recv_hook()


def _switch(*, to_comm: bool, ordered: bool, label: str | None = None) -> None:
    context = _current.get()
    if context is None:
        return
    compute, comm = context.compute_stream, context.comm_stream
    if compute is None or comm is None:
        if label is not None:
            context.yield_turn(label)
        return
    source, target = (compute, comm) if to_comm else (comm, compute)
    event = context._compute_event if to_comm else context._comm_event
    if ordered:
        between_segments(event.record, source)
    if label is not None:
        context.yield_turn(label)  # after the record, see the invariants above
    torch.cuda.set_stream(target)
    next_segment()
    if ordered:
        between_segments(target.wait_event, event)
