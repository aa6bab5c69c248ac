"""CUDA graphs on a CPU, by recording operators: `dbo.graphs.backend.GraphBackend` for tests.

It keeps what makes graphs hard. While one is captured nothing runs: results are memory that nobody wrote (NaN, 0), and
an operation that reads a value on the host fails, as it would on a GPU. A replay runs the recorded operators on the
same memory, so a result that a later capture or replay overwrote is wrong here too, and a value that was a Python
number in the capture stays what it was.

Operators are seen by a dispatch mode, which belongs to a thread: run everything inside `emulator.watching()`, ubatch
threads too (`emulator.watched(fn)`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dbo.graphs.backend import ErrorMode

_NO_STREAM = None


class EmulatedGraph:
    """Recorded operators."""

    def __init__(self, emulator: Emulator) -> None:
        self.operators: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.num_replays = 0
        self.released = False
        self._emulator = emulator

    def replay(self) -> None:
        assert not self.released, "a graph that was given up is replayed"
        assert self._emulator.open is None, "a replay inside a capture"
        self.num_replays += 1
        with torch.inference_mode():
            for operator, args, kwargs, result in self.operators:
                fresh = operator(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(fresh), strict=True):
                    if isinstance(old, Tensor) and _storage(old) != _storage(new):
                        old.copy_(new)

    def reset(self) -> None:
        self.released = True
        self.operators.clear()


class Emulator:
    """See the module. `calls` names what was asked of it, in order."""

    def __init__(self) -> None:
        self.open: EmulatedGraph | None = None
        self.calls: list[str] = []
        self.graphs: list[EmulatedGraph] = []
        self.bytes_per_graph = 0
        self._dead_pools: list[object] = []  # of aborted captures
        self._threads = threading.local()

    # --- the seam

    def new_pool(self) -> object:
        self.calls.append("new_pool")
        return object()

    def begin(self, pool: object, mode: ErrorMode) -> EmulatedGraph:
        assert self.open is None, "two captures at once"
        assert not any(pool is dead for dead in self._dead_pools), "a capture into the pool of an aborted one"
        self.calls.append("begin")
        self.open = EmulatedGraph(self)
        self.graphs.append(self.open)
        return self.open

    def end(self, graph: EmulatedGraph) -> bool:
        assert self.open is graph
        self.calls.append("end")
        self.open = None
        if not graph.operators:
            graph.reset()
        return not graph.released

    def abort(self, graph: EmulatedGraph, pool: object) -> None:
        self.calls.append("abort")
        self._dead_pools.append(pool)
        self.open = None
        graph.reset()

    def capture_stream(self) -> None:
        return _NO_STREAM

    def current_stream(self) -> None:
        return _NO_STREAM

    def on_stream(self, stream: None) -> AbstractContextManager[None]:
        return nullcontext()

    def joined(self, stream: None) -> AbstractContextManager[None]:
        return nullcontext()

    def weak_ref(self, tensor: Tensor) -> Tensor:
        return tensor.detach()

    def collect(self) -> None:
        assert self.open is None, "memory given back inside a capture"
        self.calls.append("collect")

    def reserved_bytes(self) -> int:
        return self.bytes_per_graph * sum(not graph.released for graph in self.graphs)

    def describe(self) -> str:
        return "none on a CPU"

    # --- for tests

    @property
    def num_live(self) -> int:
        """Graphs that hold something."""
        return sum(not graph.released for graph in self.graphs)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See what this thread does."""
        if getattr(self._threads, "watching", False):
            yield
            return
        self._threads.watching = True
        try:
            with _Recorder(self):
                yield
        finally:
            self._threads.watching = False

    def watched(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` for threads that are not watched."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.watching():
                return fn(*args, **kwargs)

        return call


class _Recorder(TorchDispatchMode):
    def __init__(self, emulator: Emulator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._emulator = emulator

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, graph = kwargs or {}, self._emulator.open
        if graph is None:
            return operator(*args, **kwargs)
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(operator.tags) and not (
            operator is torch.ops.aten.index.Tensor and all(t is None or t.dtype != torch.bool for t in args[1])
        ):
            raise RuntimeError(f"{operator}: operation not permitted when stream is capturing")
        schema = operator._schema
        writes = [argument for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
        if writes:
            named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
            result: Any = tuple(named[argument.name] for argument in writes) if schema.returns else None
            result = result[0] if result is not None and len(result) == 1 else result
        else:
            result = operator(*args, **kwargs)
            given = {_storage(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
            fresh = [t for t in tree_leaves(result) if isinstance(t, Tensor) and _storage(t) not in given]
            if not fresh:
                return result  # views: addresses, not work
            for tensor in fresh:
                _forget(tensor)
        graph.operators.append((operator, args, kwargs, result))
        return result


def _storage(tensor: Tensor) -> int:
    packed = tensor.layout is not torch.strided  # a weight in a layout of its own
    return id(tensor) if packed else tensor.untyped_storage().data_ptr()


def _forget(tensor: Tensor) -> None:
    """Make it memory that nobody wrote."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
