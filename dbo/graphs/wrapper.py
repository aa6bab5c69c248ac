"""A callable that is captured once for each shape, and replayed afterwards.

A file of its own because this is the contract that both kinds of capture share: when to capture, when to replay, when
to stay out of the way. What a step runs in is said by `descriptor.step_context`, never guessed from arguments.

    no step, mode NONE, another mode     the callable itself
    a shape with a graph                 replay; the result is where the capture left it, valid until the next replay
    a shape without one                  capture, in a session that allows it; else `CaptureError`

Invariants: a graph is stored under the very descriptor it is looked up by; results are kept by weak references, made
before the last segment closes, so that the pool reuses their memory; a replay never makes the host wait.
"""

from __future__ import annotations

import inspect
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from dbo.errors import DBOError
from dbo.graphs.backend import ErrorMode, GraphBackend
from dbo.graphs.breakable import BreakableCapture
from dbo.graphs.descriptor import BatchDescriptor, StepContext, current_step
from dbo.graphs.mode import CUDAGraphMode
from dbo.graphs.tensors import map_tensors, named_tensors

T = TypeVar("T")

_allowed: ContextVar[bool] = ContextVar("dbo_graph_capture_allowed", default=False)


class CaptureError(DBOError):
    """A capture that is not allowed, or that failed: with the shape, the operation, its place and the streams."""


@contextmanager
def set_cudagraph_capturing_enabled(enabled: bool = True) -> Iterator[None]:
    """Allow captures, or forbid them, for as long as the block lasts. Outside any such block they are forbidden."""
    token = _allowed.set(enabled)
    try:
        yield
    finally:
        _allowed.reset(token)


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """What one graph, or one list of segments, cost."""

    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    num_bytes: int  # by which this process's memory grew
    seconds: float


class GraphPool:
    """What all wrappers of a process share: the device, one memory pool, and what was captured into it.

    mode: `relaxed` where ubatches run in threads (see `backend.ErrorMode`). debug: check at each replay that inputs lie
    where they lay in the capture. eager: the debug switch of `BreakableCapture`, for all captures in segments.
    """

    def __init__(
        self, backend: GraphBackend, *, mode: ErrorMode = "relaxed", debug: bool = False, eager: bool = False
    ) -> None:
        self.backend, self.mode, self.debug, self.eager = backend, mode, debug, eager
        self.captured: list[Captured] = []  # in order
        self._pool: Any = None
        self._wrappers: weakref.WeakSet[CUDAGraphWrapper[Any]] = weakref.WeakSet()

    def stream(self) -> AbstractContextManager[Any]:
        """A stream that can be captured. Steps that run under it replay without changing streams."""
        return self.backend.joined(self.backend.capture_stream())

    def capture(self, *, breaks: bool, eager: bool = False) -> BreakableCapture:
        """A new capture into the pool."""
        if self._pool is None and not eager:
            self._pool = self.backend.new_pool()
        return BreakableCapture(
            self.backend, self._pool, mode=self.mode, breaks=breaks, eager=eager, on_abort=self._renew
        )

    def register(self, wrapper: CUDAGraphWrapper[Any]) -> None:
        """Have `clear_all_graphs` reach `wrapper`."""
        self._wrappers.add(wrapper)

    def clear_all_graphs(self) -> None:
        """Give up every graph of every wrapper; memory goes back to the device."""
        for wrapper in list(self._wrappers):
            wrapper.clear_graphs()
        self._renew()
        self.backend.collect()

    def _renew(self) -> None:
        """Have the next capture begin another pool; this one goes with its last graph."""
        self._pool = None


@dataclass(frozen=True, slots=True)
class _Entry:
    capture: BreakableCapture
    output: Any
    addresses: dict[str, int]


class CUDAGraphWrapper(Generic[T]):
    """`fn` from graphs. Attributes that it does not have are `fn`'s.

    mode: the runtime mode in which this wrapper acts; None = in any but NONE (a FULL step in one graph, a PIECEWISE one
    in segments). Tensors in the arguments must lie at the same addresses in every call of one shape.
    """

    def __init__(self, fn: Callable[..., T], pool: GraphPool, *, mode: CUDAGraphMode | None = None) -> None:
        if mode is not None and not (mode.is_runtime and mode.level):
            raise DBOError(f"a wrapper acts in FULL or PIECEWISE, not in {mode.name}")
        self._fn, self._graphs, self._mode = fn, pool, mode
        self._entries: dict[tuple[CUDAGraphMode, BatchDescriptor], _Entry] = {}
        pool.register(self)

    def __call__(self, *args: Any, **kwargs: Any) -> T:
        """See the table of the module. Raises `CaptureError`, and what `fn` raises outside a capture."""
        step = current_step()
        if step is None or not step.mode.level or self._mode not in (None, step.mode):
            return self._fn(*args, **kwargs)
        if self._graphs.eager and step.mode is CUDAGraphMode.PIECEWISE:
            with self._graphs.capture(breaks=True, eager=True):
                return self._fn(*args, **kwargs)
        entry = self._entries.get((step.mode, step.descriptor))
        if entry is None:
            entry = self._entries[step.mode, step.descriptor] = self._capture(step, args, kwargs)
        else:
            if self._graphs.debug:
                _check_addresses(entry, step, args, kwargs)
            entry.capture.replay()
        result: T = entry.output
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_fn"], name)

    def unwrap(self) -> Callable[..., T]:
        """The callable itself."""
        return self._fn

    def captured(self) -> dict[tuple[CUDAGraphMode, BatchDescriptor], BreakableCapture]:
        """All captures so far, by mode and shape."""
        return {key: entry.capture for key, entry in self._entries.items()}

    def clear_graphs(self) -> None:
        """Give up this wrapper's graphs."""
        entries, self._entries = self._entries, {}
        for entry in entries.values():
            entry.capture.reset()

    def _capture(self, step: StepContext, args: Any, kwargs: Any) -> _Entry:
        if not _allowed.get():
            raise CaptureError(
                f"{step.mode.name} graph of {step.descriptor}: not captured, and this is no capture session; shapes "
                "come from the dispatcher, which knows what was captured"
            )
        backend = self._graphs.backend
        backend.collect()  # before the capture: memory cannot be given back inside it
        before, started = backend.reserved_bytes(), time.perf_counter()
        try:
            breaks = step.mode is CUDAGraphMode.PIECEWISE
            with self._graphs.stream(), self._graphs.capture(breaks=breaks) as capture:
                output = map_tensors(self._fn(*args, **kwargs), backend.weak_ref)
        except Exception as error:
            explained = _explained(step, error, backend)
            backend.collect()
            raise explained from error
        num_bytes, seconds = max(0, backend.reserved_bytes() - before), time.perf_counter() - started
        self._graphs.captured.append(
            Captured(mode=step.mode, descriptor=step.descriptor, num_bytes=num_bytes, seconds=seconds)
        )
        return _Entry(capture, output, _addresses(args, kwargs) if self._graphs.debug else {})


def _addresses(args: Any, kwargs: Any) -> dict[str, int]:
    found = [*named_tensors(args, "args"), *named_tensors(kwargs, "kwargs")]
    return {name: tensor.data_ptr() for name, tensor in found}


def _check_addresses(entry: _Entry, step: StepContext, args: Any, kwargs: Any) -> None:
    now = _addresses(args, kwargs)
    for name in entry.addresses.keys() | now.keys():
        before, after = entry.addresses.get(name), now.get(name)
        if before != after:
            where = ["nowhere" if at is None else f"at {at:#x}" for at in (before, after)]
            raise DBOError(
                f"{step.mode.name} graph of {step.descriptor}: input {name} lay {where[0]} in the capture and lies "
                f"{where[1]} now; the graph would read the old memory"
            )


def _explained(step: StepContext, error: Exception, backend: GraphBackend) -> CaptureError:
    """Name operation and place, then let go of the frames, and so of the tensors of the capture."""
    frames = traceback.extract_tb(error.__traceback__)
    machinery = (str(Path(torch.__file__).parent), str(Path(__file__).parent), inspect.getfile(type(backend)))
    at = [*frames[:1], *(frame for frame in frames if not frame.filename.startswith(machinery))][-1]
    notes = "; ".join(["", *dict.fromkeys(getattr(error, "__notes__", ()))])
    message = (
        f"{step.mode.name} graph of {step.descriptor}: capture failed at {at.filename}:{at.lineno} in {at.name}: "
        f"`{at.line}`; {type(error).__name__}: {error}{notes}"
    )
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
    return CaptureError(message)
