"""Capture in segments: one pass over the model becomes a list of graphs and of eager parts between them.

A file of its own because it is the whole of PIECEWISE: no compiler cuts the model, the code itself says where a graph
must end, at operations that read host values or vary from step to step::

    @eager_break_during_capture          ends the segment, runs, is kept for replay, begins the next segment
    def attend(q, k, v, plan, out): ...  writes into `out`, which the caller gives

    parts   | graph | attend | graph | attend | graph |       replay walks the list

Ubatches interleave in the same list: a yield ends a segment, the events that order lanes are recorded between segments,
and a segment on the comm stream is a part like any other. So overlapped steps replay without a thread.

Invariants:
- A segment runs as soon as it is closed: the capture pass gives the true result, and an eager part never sees memory
  that nobody wrote.
- Arguments of eager parts are referred to weakly: the pool may reuse their memory after the last graph that reads them,
  just as it does inside one graph. Whatever an eager part returns would be a new tensor in each replay, so it must
  return nothing or one of its arguments.
- An eager part runs outside any ubatch, in the capture as in a replay: it does not yield.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import Token
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from dbo.context import _current, current_ubatch
from dbo.errors import DBOError
from dbo.graphs.active import Capture, active_capture, current_capture
from dbo.graphs.backend import ErrorMode, Graph, GraphBackend
from dbo.graphs.tensors import map_tensors, named_tensors

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Segment:
    """A captured part: its graph, the stream it was captured on and is replayed on, the ubatch it belongs to."""

    graph: Graph
    stream: Any
    ubatch: int | None


@dataclass(frozen=True, slots=True)
class EagerPart:
    """A part that runs as plain code: in each replay with the arguments of the capture."""

    run: Callable[[], Any]
    name: str
    ubatch: int | None


class BreakableCapture:
    """`with BreakableCapture(backend, pool) as capture: model(x)`, then `capture.replay()` at will.

    breaks: False takes no break, so that everything is one graph (FULL). eager: captures nothing, every segment runs as
    it comes: for finding out whether a wrong result comes from a graph. on_abort: called when nothing more may be
    captured into `pool`. Raises `DBOError` for a capture inside another one. If the block raises, the graphs are given
    up and memory goes back to the pool.
    """

    def __init__(
        self,
        backend: GraphBackend,
        pool: Any,
        *,
        mode: ErrorMode = "thread_local",
        breaks: bool = True,
        eager: bool = False,
        on_abort: Callable[[], object] = lambda: None,
    ) -> None:
        self.parts: list[Segment | EagerPart] = []
        self.takes_breaks = False
        self._backend, self._pool, self._mode = backend, pool, mode
        self._breaks, self._eager, self._on_abort = breaks, eager, on_abort
        self._stream: Any = None
        self._open: Segment | None = None
        self._token: Token[Capture | None] | None = None
        self._replays: list[Callable[[], Any]] = []

    @property
    def num_graphs(self) -> int:
        """Segments that hold work."""
        return sum(isinstance(part, Segment) for part in self.parts)

    @property
    def num_breaks(self) -> int:
        """Eager parts."""
        return len(self.parts) - self.num_graphs

    def __enter__(self) -> BreakableCapture:
        if active_capture.get() is not None:
            raise DBOError("a capture inside a capture: one at a time for each thread, and none inside an eager part")
        self._stream = self._backend.current_stream()
        self._begin()
        self.takes_breaks = self._breaks
        self._token = active_capture.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._token is not None
        active_capture.reset(self._token)
        self.takes_breaks = False
        if error is not None:
            error.add_note(f"streams in the capture: {self._backend.describe()}")
            self.reset()
            return
        try:
            self._end()
        except BaseException:
            self.reset()
            raise
        self._replays = [self._replay_of(part) for part in self.parts]

    def add_eager(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `active.Capture.add_eager`. Raises `DBOError` if `fn` returns a tensor that is not an argument."""
        name = getattr(fn, "__qualname__", type(fn).__name__)
        self._end()
        self.takes_breaks = False
        ubatch, outside = current_ubatch(), _current.set(None)
        try:
            result = fn(*args, **kwargs)
        finally:
            _current.reset(outside)
            self.takes_breaks = True
        _refuse_new_tensors(name, result, (args, kwargs))
        weak_args, weak_kwargs = map_tensors((args, kwargs), self._backend.weak_ref)
        again = functools.partial(fn, *weak_args, **weak_kwargs)
        self.parts.append(EagerPart(again, name, None if ubatch is None else ubatch.index))
        self._begin()
        return result

    def next_segment(self) -> None:
        """See `active.Capture.next_segment`."""
        self._end()
        self._begin()

    def replay(self) -> None:
        """Run all parts again; waits for nothing that an eager part does not wait for."""
        if len(self._replays) == 1 or self._backend.current_stream() == self._stream:
            for run in self._replays:
                run()
        else:  # events between segments name the streams of the capture
            with self._backend.joined(self._stream):
                for run in self._replays:
                    run()

    def reset(self) -> None:
        """Give all graphs up."""
        opened, self._open = self._open, None
        if opened is not None:
            with self._backend.on_stream(opened.stream):
                self._backend.abort(opened.graph, self._pool)
            self._on_abort()
        for part in self.parts:
            if isinstance(part, Segment):
                part.graph.reset()
        self.parts.clear()
        self._replays.clear()

    def _begin(self) -> None:
        if not self._eager:
            ubatch, stream = current_ubatch(), self._backend.current_stream()
            graph = self._backend.begin(self._pool, self._mode)
            self._open = Segment(graph, stream, None if ubatch is None else ubatch.index)

    def _end(self) -> None:
        """Close the segment, if it is open, and run it. It stays open if closing fails, so that `reset` aborts it."""
        if self._open is None:
            return
        segment = self._open
        with self._backend.on_stream(segment.stream):
            streams = self._backend.describe()  # once it failed, none is in the capture any more
            try:
                captured = self._backend.end(segment.graph)
            except RuntimeError as error:
                error.add_note(f"streams in the capture: {streams}")
                raise
            self._open = None
            if captured:
                self.parts.append(segment)
                segment.graph.replay()

    def _replay_of(self, part: Segment | EagerPart) -> Callable[[], Any]:
        if isinstance(part, EagerPart):
            return part.run
        if part.stream == self._stream:
            return part.graph.replay

        def on_its_stream() -> None:
            with self._backend.on_stream(part.stream):
                part.graph.replay()

        return on_its_stream


def eager_break_during_capture(fn: Callable[P, T]) -> Callable[P, T]:
    """Decorate an operation that must not be captured. Plain outside a capture in segments, and in FULL mode.

    The outermost decorator: what is under it runs again in every replay, what is above it only in the capture. `fn`
    writes its result into a tensor that the caller gives, so that later segments find it at the same address.
    """

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        capture = current_capture()
        if capture is None:
            return fn(*args, **kwargs)
        result: T = capture.add_eager(fn, *args, **kwargs)
        return result

    return call


def _refuse_new_tensors(name: str, result: Any, arguments: Any) -> None:
    given = {id(tensor) for _, tensor in named_tensors(arguments, "")}
    for where, tensor in named_tensors(result, "result"):
        if isinstance(tensor, Tensor) and id(tensor) not in given:
            raise DBOError(
                f"{name} returned a new tensor ({where}, {tuple(tensor.shape)}) from an eager part of a capture: later "
                "segments would read it at this address for ever; write into a tensor that the caller gives"
            )
