"""`Work[T]` is one collective of one ubatch, `Comm` the lane that a backend's collectives run on, in one launch order.

A file of its own because it is the whole contract between models, backends and the overlap: a backend says what to
launch and how to finish, a model asks for `result()`, and neither of them touches a stream or a turn.

    early order   start: ready, launch     result: yield, wait      the message travels while the siblings compute
    late order    start: ready             result: yield, launch, wait      for a launch that blocks the host: the
                                                                    siblings have queued their compute before it does

Invariants:
- The ready point is recorded when the `Work` is made, before any yield. Recorded later it would also cover the
  sibling's compute, the message would wait for it, and nothing would overlap.
- A `Work` holds its closures, and so every tensor that they name, until the compute stream is ordered after the
  message. No tensor that crosses streams can be freed too early, and none needs `record_stream` (which a CUDA graph
  capture would not like). The other direction: what `launch` allocates belongs to the comm stream; in early order the
  next launch there is ordered after all compute queued so far, so a freed block is safe to use again. In late order it
  is not: allocate what the message writes *before* `start()`.
- In a capture in segments (`dbo.graphs`) the events are recorded and waited for between segments, and what `launch`
  queues is a segment on the comm stream.
- A dropped `Work` (its ubatch was cancelled) is waited for by the compute stream only, never by the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Generic, Literal, TypeVar, cast

import torch
import torch.distributed as dist

from dbo.context import current_ubatch, yield_turn
from dbo.errors import ConfigError
from dbo.graphs.active import between_segments, next_segment

T = TypeVar("T")
Finish = Callable[[], T]
Order = Literal["early", "late"]

# How long a host-side wait stays in gloo before it looks whether it should give up. Completion ends it at once; this
# only bounds how late a cancellation or a failed peer is noticed.
_WAIT_SLICE = timedelta(milliseconds=50)


class Comm:
    """The lane on which one backend's collectives run, and the order in which they are launched.

    own_stream: on CUDA, `launch` runs under a comm stream that first waits for the ready event, and the compute stream
    waits for the end of what it queued before `finish` runs. With `own_stream=False` the backend has a stream of its
    own: `launch` gets what `make_ready()` returned at creation, runs under the compute stream, and `finish` orders the
    compute stream itself (or calls a receive hook). On the CPU there are no streams: `launch` starts an asynchronous
    operation and `finish` waits for it with `wait_host`.
    check: called now and then while a host-side wait goes on; raises to abandon the wait (a peer failed).
    """

    def __init__(
        self,
        device: torch.device,
        *,
        order: Order = "early",
        own_stream: bool = True,
        make_ready: Callable[[], Any] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        if order not in ("early", "late"):
            raise ConfigError("order", order, "early or late")
        self.device = torch.device(device)
        self.order = order
        self.stream = torch.cuda.Stream(self.device) if own_stream and self.device.type == "cuda" else None
        self._make_ready = make_ready or (lambda: None)
        self._check = check
        self.waited_s = 0.0  # how long the host stood still in `wait_host`, all in all
        self._events: list[torch.cuda.Event] = []
        self._noticed: Any = None

    def start(self, launch: Callable[[Any], Finish[T]], *, label: str) -> Work[T]:
        """Record that the inputs are ready now; in early order launch. Does not pass the turn.

        `launch(ready)` starts the collective and returns `finish`, which runs on the compute stream, waits where that
        is still needed, unpacks and returns the result. `label` names the yield point.
        """
        return Work(self, launch, label)

    def wait_host(self, work: dist.Work) -> None:
        """Block the host until a gloo collective is done; returns within microseconds of its end.

        Raises what the collective raised, what `check` raises, `UBatchCancelled` when a sibling failed, `StepTimeout`
        past the step's limit. The collective itself goes on then; its group is no longer usable in order. Only for
        collectives: gloo's point-to-point operations do not survive a wait with a time limit.
        """
        context = current_ubatch()
        if context is not None:
            context.end_compute()
        started = time.perf_counter()
        while not done_within(work, _WAIT_SLICE):
            if self._check is not None:
                self._check()
            if context is not None:
                context.check()
        self.waited_s += time.perf_counter() - started
        if context is not None and context.tracer is not None:
            self._noticed = context.begin_compute()

    def _record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = self._events.pop() if self._events else torch.cuda.Event()
        between_segments(event.record, stream)
        return event

    def _order_after(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        between_segments(stream.wait_event, event)
        self._events.append(event)  # a wait refers to the record that it found, so the event can be recorded again


class Work(Generic[T]):
    """One collective of one ubatch. Made by `Comm.start`; used by the ubatch that made it."""

    __slots__ = (
        "_comm",
        "_compute",
        "_done",
        "_finish",
        "_launch",
        "_launched",
        "_ready",
        "_result",
        "_traced",
        "_waited",
        "label",
    )

    def __init__(self, comm: Comm, launch: Callable[[Any], Finish[T]], label: str) -> None:
        context = current_ubatch()
        self.label = label
        self._comm = comm
        self._launch: Callable[[Any], Finish[T]] | None = launch
        self._finish: Finish[T] | None = None
        self._done: torch.cuda.Event | None = None
        self._launched: Any = None
        self._result: T | None = None
        self._waited = False
        self._traced = context if context is not None and context.tracer is not None else None
        self._compute = None if comm.stream is None else _current_stream(comm.device)
        self._ready: Any = comm._make_ready() if self._compute is None else comm._record(self._compute)
        if comm.order == "early":
            self._start()

    def result(self) -> T:
        """Pass the turn, then wait: the yield point of a model. With one ubatch it just waits."""
        self.pass_turn()
        return self.wait()

    def pass_turn(self) -> None:
        """Let the siblings run; in late order launch afterwards. Compute that follows still hides the message."""
        yield_turn(self.label)
        self._start()

    def wait(self) -> T:
        """Order the compute stream after the collective (on gloo: block the host), and return its result, once made."""
        if not self._waited:
            self._start()
            self._order_compute()
            self._result = cast("Finish[T]", self._finish)()
            if self._launched is not None:
                self._end_span()
            self._waited = True
            self._launch = self._finish = self._ready = self._traced = None
        return cast("T", self._result)

    def _start(self) -> None:
        launch, comm = self._launch, self._comm
        if launch is None or self._finish is not None:
            return
        if comm.stream is None:
            self._begin_span()
            self._finish = launch(self._ready)
            return
        with comm.stream:  # what `torch.cuda.stream` does, without its Python
            comm._order_after(self._ready, comm.stream)
            self._begin_span()
            self._finish = launch(self._ready)
            self._done = comm._record(comm.stream)
            self._end_span()
        next_segment()

    def _order_compute(self) -> None:
        if self._done is None or self._compute is None:
            return
        if self._traced is not None:
            self._traced.end_compute()
        self._comm._order_after(self._done, self._compute)
        self._done = None
        if self._traced is not None:
            self._traced.begin_compute()

    def _begin_span(self) -> None:
        if self._traced is not None:
            self._launched = self._traced.stamp()

    def _end_span(self) -> None:
        if self._traced is not None:
            noticed, self._comm._noticed = self._comm._noticed, None
            self._traced.add_span(self.label, "comm", self._launched, noticed or self._traced.stamp())
            self._launched = None

    def __del__(self) -> None:
        # Cancelled between launch and wait: when this object is gone its tensors go back to the allocator, which gives
        # them to later compute, so the compute stream must come after the message that still uses them.
        done, compute = getattr(self, "_done", None), getattr(self, "_compute", None)
        if done is not None and compute is not None:
            with suppress(RuntimeError):  # after an aborted capture the event belongs to no stream
                compute.wait_event(done)


_streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}


def _current_stream(device: torch.device) -> torch.cuda.Stream:
    """What `torch.cuda.current_stream` gives, without its Python, which takes the host as long as a launch."""
    key = torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice() if device.index is None else device.index)
    stream = _streams.get(key)
    if stream is None:
        stream = _streams[key] = torch.cuda.current_stream(device)
    return stream


def done_within(work: dist.Work, limit: timedelta) -> bool:
    """Wait for a gloo collective, at most `limit`. A wait that ran out of time leaves the collective as it was."""
    try:
        work.wait(limit)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # completed at the last moment, or failed: this returns or raises what really happened
    return True
