"""Torch's CUDA graphs behind `backend.GraphBackend`.

A file of its own because nothing else here calls `torch.cuda`. It uses `CUDAGraph.capture_begin` and `capture_end`
rather than the context manager `torch.cuda.graph`, which collects garbage on every entry: segments are many.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dbo.graphs.backend import ErrorMode


class CudaGraphs:
    """Graphs of one CUDA device. `streams`: those that take part beside the capturing one, by name, for errors."""

    def __init__(self, device: torch.device, streams: Mapping[str, torch.cuda.Stream] | None = None) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        # Torch allocates what graphs know of random numbers with the first graph, and keeps it until the last one is
        # gone, so after an aborted capture for good. This graph, never captured, has it lie here from the start.
        self._first = torch.cuda.CUDAGraph()
        index = torch.cuda.current_device() if device.index is None else device.index
        with torch.cuda.device(index):
            self._first.register_generator_state(torch.cuda.default_generators[index])
        self._streams = {"compute": self._side, **(streams or {})}

    def new_pool(self) -> _Pool:
        """See `GraphBackend.new_pool`."""
        handle = torch.cuda.graph_pool_handle()
        return _Pool(handle, self._tiny_graph(handle))

    def begin(self, pool: _Pool, mode: ErrorMode) -> torch.cuda.CUDAGraph:
        """See `GraphBackend.begin`."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool.handle, capture_error_mode=mode)
        return graph

    def end(self, graph: torch.cuda.CUDAGraph) -> bool:
        """See `GraphBackend.end`. Torch tells of an empty graph by a warning, and there is no other way to know."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            graph.capture_end()
        empty = any("CUDA Graph is empty" in str(warning.message) for warning in caught)
        for warning in caught:
            if "CUDA Graph is empty" not in str(warning.message):
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        if empty:
            graph.reset()
        return not empty

    def abort(self, graph: torch.cuda.CUDAGraph, pool: _Pool) -> None:
        """See `GraphBackend.abort`. When `capture_end` fails it leaves the allocator and the random numbers' generator
        as they were in the capture. A capture that succeeds puts the generator right; the allocator of pinned memory
        goes on knowing the graph, so the graph must live, and its pool must not be used again.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(index, pool.handle)
            with suppress(RuntimeError):
                torch._C._cuda_releasePool(index, pool.handle)
            _ABORTED.append(graph)
            pool.anchor.reset()
            self._tiny_graph(torch.cuda.graph_pool_handle())
        graph.reset()

    def capture_stream(self) -> torch.cuda.Stream:
        """See `GraphBackend.capture_stream`. The legacy default stream cannot be captured."""
        current = self.current_stream()
        return self._side if current == torch.cuda.default_stream(self._device) else current

    def current_stream(self) -> torch.cuda.Stream:
        """See `GraphBackend.current_stream`."""
        return torch.cuda.current_stream(self._device)

    def on_stream(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """See `GraphBackend.on_stream`. A stream is a context itself, in C; `torch.cuda.stream` is slow Python."""
        context: AbstractContextManager[Any] = stream
        return context

    @contextmanager
    def joined(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """See `GraphBackend.joined`."""
        current = self.current_stream()
        if stream == current:
            yield
            return
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            current.wait_stream(stream)

    def weak_ref(self, tensor: Tensor) -> Tensor:
        """See `GraphBackend.weak_ref`. By the CUDA array interface, whose owner here is an object without memory."""
        if not tensor.is_cuda or tensor.numel() == 0:
            return tensor
        return torch.as_tensor(_Address(tensor), device=tensor.device).view(tensor.dtype)

    def collect(self) -> None:
        """See `GraphBackend.collect`."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def reserved_bytes(self) -> int:
        """See `GraphBackend.reserved_bytes`."""
        return torch.cuda.memory_reserved(self._device)

    def describe(self) -> str:
        """See `GraphBackend.describe`."""
        found = {name: stream for name, stream in self._streams.items() if _captures(stream)}
        current = self.current_stream()
        if current not in found.values() and _captures(current):
            found[f"stream {current.cuda_stream:#x}"] = current
        return ", ".join(found) or "no stream that has a name here"

    def _tiny_graph(self, handle: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._side):
            graph.capture_begin(pool=handle, capture_error_mode="relaxed")
            torch.zeros(1, device=self._device)
            graph.capture_end()
        return graph


@dataclass(frozen=True, slots=True)
class _Pool:
    """Memory of graphs. Torch's allocator refuses a pool that was without any graph for a moment, as it is while the
    first segment turns out to be empty: so one graph is in it from the start."""

    handle: Any
    anchor: torch.cuda.CUDAGraph


_ABORTED: list[torch.cuda.CUDAGraph] = []
"""For as long as the process: see `CudaGraphs.abort`."""

_WORDS = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8", 16: "<c16"}


class _Address:
    """Where a tensor lies, without keeping it there."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": _WORDS[size],
            "data": (tensor.data_ptr(), False),
            "stream": None,
            "version": 3,
        }


def _captures(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream), suppress(RuntimeError):
        return bool(torch.cuda.is_current_stream_capturing())
    return True  # torch raises for a stream whose capture was invalidated
