"""Ubatches in graphs: driven by threads or greenlets in the capture, by nobody in a replay."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

import dbo.work
from dbo.context import current_ubatch_id
from dbo.graphs.breakable import EagerPart, Segment, eager_break_during_capture
from dbo.graphs.descriptor import BatchDescriptor, step_context
from dbo.graphs.mode import CUDAGraphMode as Mode
from dbo.graphs.ubatches import UBatchStep
from dbo.graphs.wrapper import CaptureError, CUDAGraphWrapper, GraphPool, set_cudagraph_capturing_enabled
from dbo.runner import UBatchRunner
from dbo.work import Comm
from tests.dbo.graphs.emulator import Emulator

CPU = torch.device("cpu")


@pytest.fixture(params=["threads", "greenlet"])
def runner(request: pytest.FixtureRequest) -> Iterator[UBatchRunner]:
    with UBatchRunner(4, device=CPU, driver=request.param, step_timeout_s=30) as made:
        yield made


@eager_break_during_capture
def mean_of(x: Tensor, num_tokens: Tensor, out: Tensor) -> None:
    """Reads on the host how many rows are real, as attention reads lengths."""
    real = int(num_tokens)
    out.zero_()
    out[:real] = x[:real] - x[:real].mean() if real else 0


class Layers:
    """Three layers: an eager operation, compute, a message, compute."""

    def __init__(self) -> None:
        self.comm, self.calls, self.threads = Comm(CPU), 0, set[str]()

    def __call__(self, part: tuple[Tensor, Tensor]) -> Tensor:
        self.calls += 1
        self.threads.add(threading.current_thread().name)
        x, num_tokens = part
        for layer in range(3):
            mean_of(x, num_tokens, out := torch.empty_like(x))
            sent = out * (layer + 2)
            arrived = self.comm.start(lambda _, sent=sent: lambda: sent.flip(-1), label="dispatch").result()  # type: ignore[misc]
            x = (x + arrived).tanh()
        return x


def parts_of(num: int, rows: int = 4) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(rows, 3), torch.tensor(rows)) for _ in range(num)]


@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_replay_equals_eager_without_a_thread(emulator: Emulator, runner: UBatchRunner, num: int) -> None:
    model = Layers()
    step = UBatchStep(emulator.watched(model), runner)
    wrapped, parts = CUDAGraphWrapper(step, GraphPool(emulator)), parts_of(num)
    shape = BatchDescriptor(num_tokens=4 * num, num_ubatches=num)
    with set_cudagraph_capturing_enabled(), step_context(Mode.PIECEWISE, shape):
        assert torch.equal(wrapped(parts), step(parts))
    calls = model.calls
    for real in (4, 0, 2, 3, 1):
        for x, num_tokens in parts:
            x.normal_()
            num_tokens.fill_(real)
        with step_context(Mode.PIECEWISE, shape):
            replayed = wrapped(parts).clone()
        assert model.calls == calls  # nothing but graphs and eager parts ran
        assert torch.equal(replayed, step(parts))
        calls = model.calls


def test_segments_interleave_and_a_yield_ends_one(emulator: Emulator, runner: UBatchRunner) -> None:
    wrapped = CUDAGraphWrapper(UBatchStep(emulator.watched(Layers()), runner), GraphPool(emulator))
    with set_cudagraph_capturing_enabled(), step_context(Mode.PIECEWISE, BatchDescriptor(num_tokens=8, num_ubatches=2)):
        wrapped(parts_of(2))
    (capture,) = wrapped.captured().values()
    found = [(type(part), part.ubatch) for part in capture.parts]
    # A ubatch's turn: what follows a message (but in the first layer), the eager operation, the next message's input.
    first = [(Segment, 0), (EagerPart, 0), (Segment, 0)], [(Segment, 1), (EagerPart, 1), (Segment, 1)]
    assert found == [*first[0], *first[1]] * 3 + [(Segment, 0), (Segment, 1), (Segment, None)]


@pytest.mark.parametrize("num", [1, 2, 3])
def test_a_full_step_is_one_graph(emulator: Emulator, runner: UBatchRunner, num: int) -> None:
    comm = Comm(CPU)

    def model(x: Tensor) -> Tensor:
        for _ in range(4):
            y = x * 1.5
            x = comm.start(lambda _, y=y: lambda: y.sin(), label="dispatch").result() + x  # type: ignore[misc]
        return x

    step, parts = UBatchStep(emulator.watched(model), runner), [torch.randn(4, 3) for _ in range(num)]
    wrapped = CUDAGraphWrapper(step, GraphPool(emulator))
    shape = BatchDescriptor(num_tokens=4 * num, num_ubatches=num)
    with set_cudagraph_capturing_enabled(), step_context(Mode.FULL, shape):
        wrapped(parts)
    (capture,) = wrapped.captured().values()
    assert (capture.num_graphs, capture.num_breaks) == (1, 0)
    for _ in range(3):
        for x in parts:
            x.normal_()
        with step_context(Mode.FULL, shape):
            assert torch.equal(wrapped(parts), step(parts))


def test_split_and_whole_graphs_of_a_shape_exist_together(emulator: Emulator, runner: UBatchRunner) -> None:
    step = UBatchStep(emulator.watched(Layers()), runner)
    wrapped = CUDAGraphWrapper(step, GraphPool(emulator))
    whole = torch.randn(12, 3)
    inputs: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for num in (1, 2, 3, 4):
        inputs[num] = [(part, torch.tensor(len(part))) for part in whole.chunk(num)]
    with set_cudagraph_capturing_enabled():
        for num, parts in inputs.items():
            with step_context(Mode.PIECEWISE, BatchDescriptor(num_tokens=12, num_ubatches=num)):
                wrapped(parts)
    for num in (3, 1, 4, 2, 1):
        whole.normal_()
        with step_context(Mode.PIECEWISE, BatchDescriptor(num_tokens=12, num_ubatches=num)):
            assert torch.equal(wrapped(inputs[num]), step(inputs[num]))


def test_a_ubatch_that_fails_in_a_capture(emulator: Emulator, runner: UBatchRunner) -> None:
    """The message names the ubatch and its layer, no graph is left, the runner and the next capture work."""
    model, fail = Layers(), [True]

    def fails(part: tuple[Tensor, Tensor]) -> Tensor:
        y = model(part)
        if fail[0] and current_ubatch_id() == 1:
            return y * y.max().item()
        return y

    step = UBatchStep(emulator.watched(fails), runner)
    wrapped, parts = CUDAGraphWrapper(step, GraphPool(emulator)), parts_of(2)
    shape = BatchDescriptor(num_tokens=8, num_ubatches=2)
    with set_cudagraph_capturing_enabled(), step_context(Mode.PIECEWISE, shape):
        with pytest.raises(CaptureError, match=r"in fails: `return y \* y.max\(\).item\(\)`.*rank 0, ubatch 1 of 2"):
            wrapped(parts)
        assert (emulator.num_live, emulator.open) == (0, None)
        fail[0] = False
        assert torch.equal(wrapped(parts), step(parts))


# ------------------------------------------------------------------------------------------------------- two lanes
#
# Streams and events that only write down what is queued where. What counts is the sequence: kernels, records and waits
# of an eager overlapped step, of the capture of it in segments, and of its replays must be the same.


class Lanes:
    """The log, and stand-ins for `torch.cuda` and for the graph backend."""

    def __init__(self) -> None:
        self.log: list[tuple[str, ...]] = []
        self.compute, self.comm = FakeStream(self, "compute"), FakeStream(self, "comm")
        self.open: FakeGraph | None = None
        self._local = threading.local()

    @property
    def current(self) -> FakeStream:
        return getattr(self._local, "stream", self.compute)

    @current.setter
    def current(self, stream: FakeStream) -> None:
        self._local.stream = stream

    def kernel(self, name: str) -> None:
        if self.open is not None:
            assert self.open.stream is self.current, f"{name} is queued on {self.current.name}, which nobody captures"
            self.open.kernels.append(name)
        else:
            self.log.append((self.current.name, name))

    # the backend

    def new_pool(self) -> None: ...

    def begin(self, pool: object, mode: str) -> FakeGraph:
        assert self.open is None
        self.open = FakeGraph(self, self.current)
        return self.open

    def end(self, graph: FakeGraph) -> bool:
        assert self.open is graph
        assert graph.stream is self.current, "a capture must end on the stream it began on"
        self.open = None
        return bool(graph.kernels)

    def abort(self, graph: FakeGraph, pool: object) -> None:
        self.open = None

    def capture_stream(self) -> FakeStream:
        return self.compute

    def current_stream(self) -> FakeStream:
        return self.current

    def on_stream(self, stream: FakeStream) -> FakeStream:
        return stream

    joined = on_stream

    def weak_ref(self, tensor: Tensor) -> Tensor:
        return tensor

    def collect(self) -> None: ...

    def reserved_bytes(self) -> int:
        return 0

    def describe(self) -> str:
        return "fakes"


class FakeGraph:
    def __init__(self, lanes: Lanes, stream: FakeStream) -> None:
        self.lanes, self.stream, self.kernels = lanes, stream, list[str]()

    def replay(self) -> None:
        assert self.lanes.current is self.stream, "a segment is replayed on another lane"
        for kernel in self.kernels:
            self.lanes.kernel(kernel)

    def reset(self) -> None: ...


class FakeStream:
    def __init__(self, lanes: Lanes, name: str) -> None:
        self.lanes, self.name, self._before = lanes, name, list[FakeStream]()

    def wait_event(self, event: FakeEvent) -> None:
        assert self.lanes.open is None, "an event of another lane inside a segment"
        self.lanes.log.append((self.name, "waits for", *event.recorded))

    def __enter__(self) -> None:
        self._before.append(self.lanes.current)
        self.lanes.current = self

    def __exit__(self, *_: object) -> None:
        self.lanes.current = self._before.pop()


class FakeEvent:
    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.recorded: tuple[str, ...] = ("never",)

    def record(self, stream: FakeStream) -> None:
        assert self.lanes.open is None, "an event recorded inside a segment"
        kernels = [entry for entry in self.lanes.log if entry[0] == stream.name and len(entry) == 2]
        self.recorded = kernels[-1] if kernels else (stream.name, "start")


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Lanes:
    made = Lanes()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.comm)
    monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(made))
    monkeypatch.setattr(dbo.work, "_current_stream", lambda device: made.current)
    return made


def overlapped(lanes: Lanes, comm: Comm, num_layers: int) -> Callable[[int], Tensor]:
    def model(k: int) -> Tensor:
        for layer in range(num_layers):
            lanes.kernel(f"A{layer}.{k}")
            for name, after in (("d", "E"), ("c", "S")):

                def launch(_: object, name: str = f"{name}{layer}.{k}") -> Callable[[], None]:
                    lanes.kernel(name)
                    return lambda: lanes.kernel(f"unpack {name}")

                work = comm.start(launch, label=name)
                work.pass_turn()
                if after == "S":
                    lanes.kernel(f"S{layer}.{k}")
                work.wait()
                if after == "E":
                    lanes.kernel(f"E{layer}.{k}")
        return torch.zeros(1)

    return model


@pytest.mark.parametrize("order", ["early", "late"])
@pytest.mark.parametrize("num", [1, 2, 3])
def test_segments_keep_the_order_of_both_lanes(lanes: Lanes, runner: UBatchRunner, num: int, order: str) -> None:
    comm = Comm(torch.device("cuda"), order=order)  # type: ignore[arg-type]
    step = UBatchStep(overlapped(lanes, comm, 3), runner)
    wrapped = CUDAGraphWrapper(step, GraphPool(lanes))
    shape = BatchDescriptor(num_tokens=num, num_ubatches=num)

    def logged(run: Callable[[Sequence[int]], Tensor]) -> list[tuple[str, ...]]:
        lanes.log.clear()
        run(range(num))
        return lanes.log.copy()

    eager = logged(step)
    assert ("comm", "d2.0") in eager
    with set_cudagraph_capturing_enabled(), step_context(Mode.PIECEWISE, shape):
        assert logged(wrapped) == eager
        assert logged(wrapped) == eager
        assert logged(wrapped) == eager
    (capture,) = wrapped.captured().values()
    on_comm = [part for part in capture.parts if isinstance(part, Segment) and part.stream is lanes.comm]
    assert len(on_comm) == 2 * 3 * num  # each message is a segment of its own lane
