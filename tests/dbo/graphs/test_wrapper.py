"""When a wrapper captures, replays and stays out of the way; what it holds; what it says when it must refuse."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dbo.errors import DBOError
from dbo.graphs.breakable import eager_break_during_capture
from dbo.graphs.descriptor import BatchDescriptor, current_step, step_context
from dbo.graphs.mode import CUDAGraphMode as Mode
from dbo.graphs.wrapper import CaptureError, CUDAGraphWrapper, GraphPool, set_cudagraph_capturing_enabled
from tests.dbo.graphs.emulator import Emulator

FOUR = BatchDescriptor(num_tokens=4)


class Model:
    """Counts its calls; `y = 2 x + 1`, with a break in between."""

    def __init__(self) -> None:
        self.calls = 0
        self.config = {"hidden": 3}

    def __call__(self, x: Tensor, more: dict[str, Tensor] | None = None) -> Tensor:
        self.calls += 1
        doubled = x * 2
        plus_one(doubled, out := torch.empty_like(doubled))
        return out.clone()


@eager_break_during_capture
def plus_one(x: Tensor, out: Tensor) -> None:
    torch.add(x, 1, out=out)


@pytest.mark.parametrize("mode", [Mode.FULL, Mode.PIECEWISE])
def test_capture_once_then_replay(emulator: Emulator, mode: Mode) -> None:
    model = Model()
    wrapped = CUDAGraphWrapper(model, GraphPool(emulator))
    x = torch.randn(4)
    with set_cudagraph_capturing_enabled(), step_context(mode, FOUR):
        assert torch.equal(wrapped(x), 2 * x + 1)
    for _ in range(3):
        x.normal_()
        with step_context(mode, FOUR):
            assert torch.equal(wrapped(x), 2 * x + 1)
    assert model.calls == 1
    (capture,) = wrapped.captured().values()
    assert (capture.num_graphs, capture.num_breaks) == ((1, 0) if mode is Mode.FULL else (2, 1))


def test_one_graph_for_each_shape_and_mode(emulator: Emulator) -> None:
    wrapped = CUDAGraphWrapper(Model(), GraphPool(emulator))
    shapes = [FOUR, BatchDescriptor(num_tokens=4, num_ubatches=2), BatchDescriptor(num_tokens=4, variants=(("a", 1),))]
    inputs = {(mode, shape): torch.randn(4) for mode in (Mode.FULL, Mode.PIECEWISE) for shape in shapes}
    with set_cudagraph_capturing_enabled():
        for (mode, shape), x in inputs.items():
            with step_context(mode, shape):
                wrapped(x)
    assert set(wrapped.captured()) == set(inputs)
    for (mode, shape), x in inputs.items():
        with step_context(mode, shape):
            assert torch.equal(wrapped(x.normal_()), 2 * x + 1)


def test_out_of_the_way(emulator: Emulator) -> None:
    """No step, mode NONE, another mode than its own: the plain callable, in a session too."""
    model = Model()
    full = CUDAGraphWrapper(model, GraphPool(emulator), mode=Mode.FULL)
    with set_cudagraph_capturing_enabled():
        full(torch.ones(4))
        for mode in (Mode.NONE, Mode.PIECEWISE):
            with step_context(mode, FOUR):
                full(torch.ones(4))
    assert (model.calls, full.captured(), "begin" in emulator.calls) == (3, {}, False)
    assert current_step() is None


def test_a_capture_outside_a_session_names_the_shape(emulator: Emulator) -> None:
    wrapped = CUDAGraphWrapper(Model(), GraphPool(emulator))
    shape = BatchDescriptor(num_tokens=96, num_requests=96, uniform_decode=True, num_ubatches=3)
    with (
        step_context(Mode.FULL, shape),
        pytest.raises(CaptureError, match="FULL graph of 96 decode tokens in 3 ubatches: not captured"),
    ):
        wrapped(torch.ones(96))
    with (
        step_context(Mode.FULL, shape),
        set_cudagraph_capturing_enabled(),
        set_cudagraph_capturing_enabled(False),
        pytest.raises(CaptureError, match="no capture session"),
    ):
        wrapped(torch.ones(96))


def test_memory_is_given_back_once_for_each_shape_before_its_capture(emulator: Emulator) -> None:
    wrapped = CUDAGraphWrapper(Model(), GraphPool(emulator))
    with set_cudagraph_capturing_enabled(), step_context(Mode.PIECEWISE, FOUR):
        x = torch.ones(4)
        wrapped(x)
        wrapped(x)
    assert emulator.calls == ["collect", "new_pool", "begin", "end", "begin", "end"]


@dataclass
class Inputs:
    ids: Tensor
    extra: dict[str, list[Tensor]]


def test_an_input_that_moved_is_named(emulator: Emulator) -> None:
    wrapped = CUDAGraphWrapper(lambda batch: batch.ids + batch.extra["a"][0], GraphPool(emulator, debug=True))
    batch = Inputs(torch.ones(4), {"a": [torch.ones(4)]})
    with set_cudagraph_capturing_enabled(), step_context(Mode.FULL, FOUR):
        wrapped(batch)
        wrapped(batch)
        moved = Inputs(batch.ids, {"a": [torch.ones(4)]})
        with pytest.raises(
            DBOError, match=r"input args\[0\].extra\['a'\]\[0\] lay at 0x\w+ in the capture and lies at"
        ):
            wrapped(moved)
        with pytest.raises(
            DBOError, match=r"input args\[0\].extra\['a'\]\[0\] lay at 0x\w+ in the capture and lies now"
        ):
            wrapped(Inputs(batch.ids, {"a": []}))


def test_attributes_of_the_wrapped_model(emulator: Emulator) -> None:
    model = Model()
    wrapped = CUDAGraphWrapper(model, GraphPool(emulator))
    assert wrapped.config is model.config
    assert wrapped.unwrap() is model
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = wrapped.no_such_thing


def test_clearing(emulator: Emulator) -> None:
    pool = GraphPool(emulator)
    wrappers = [CUDAGraphWrapper(Model(), pool) for _ in range(2)]
    x = torch.ones(4)
    with set_cudagraph_capturing_enabled(), step_context(Mode.FULL, FOUR):
        for wrapped in wrappers:
            wrapped(x)
        assert emulator.num_live == 2
        wrappers[0].clear_graphs()
        assert emulator.num_live == 1
        pool.clear_all_graphs()
        assert (emulator.num_live, emulator.calls[-1]) == (0, "collect")
        wrappers[0](x)
    assert emulator.calls.count("new_pool") == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_nothing_is_captured_into_the_pool_of_an_aborted_capture(
    emulator: Emulator, error: type[BaseException]
) -> None:
    broken = [True]

    def breaks(x: Tensor) -> Tensor:
        if broken:
            raise error
        return x * 2

    wrapped, x = CUDAGraphWrapper(breaks, GraphPool(emulator)), torch.ones(4)
    with set_cudagraph_capturing_enabled(), step_context(Mode.FULL, FOUR):
        with pytest.raises((CaptureError, KeyboardInterrupt)):
            wrapped(x)
        broken.clear()
        assert torch.equal(wrapped(x), x * 2)
    assert emulator.calls.count("new_pool") == 2


def test_a_failed_capture_leaves_nothing_and_says_where(emulator: Emulator) -> None:
    def read(x: Tensor) -> Tensor:
        return x * x.max().item()

    kept: list[weakref.ref[Tensor]] = []

    def fails(x: Tensor) -> Tensor:
        y = x + 1
        kept.append(weakref.ref(y))
        return read(y)

    wrapped = CUDAGraphWrapper(fails, GraphPool(emulator))
    with pytest.raises(CaptureError) as caught, set_cudagraph_capturing_enabled(), step_context(Mode.FULL, FOUR):
        wrapped(torch.ones(4))
    message = str(caught.value)
    assert "FULL graph of 4 tokens: capture failed at " in message
    assert "test_wrapper.py:" in message
    assert "in read: `return x * x.max().item()`" in message
    assert "streams in the capture: none on a CPU" in message
    assert (emulator.num_live, wrapped.captured()) == (0, {})
    gc.collect()
    assert kept[0]() is None  # the error holds no frame that holds a tensor


@pytest.mark.parametrize("mode", [Mode.NONE, Mode.FULL_AND_PIECEWISE])
def test_a_wrapper_acts_in_a_runtime_mode(emulator: Emulator, mode: Mode) -> None:
    with pytest.raises(DBOError, match="FULL or PIECEWISE"):
        CUDAGraphWrapper(Model(), GraphPool(emulator), mode=mode)


def test_the_debug_switch_runs_every_segment_eagerly(emulator: Emulator) -> None:
    model = Model()
    wrapped = CUDAGraphWrapper(model, GraphPool(emulator, eager=True))
    for _ in range(2):
        x = torch.randn(4)
        with step_context(Mode.PIECEWISE, FOUR):
            assert torch.equal(wrapped(x), 2 * x + 1)
    assert (model.calls, "begin" in emulator.calls) == (2, False)


class Weak(Emulator):
    """Runs nothing of its own, so that only strong references keep a result alive; weak ones are copies."""

    def __init__(self) -> None:
        super().__init__()
        self.alive_at_end: list[bool] = []
        self.result: weakref.ref[Tensor] | None = None

    def weak_ref(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def end(self, graph) -> bool:  # type: ignore[no-untyped-def]
        graph.operators.clear()
        self.alive_at_end.append(self.result is not None and self.result() is not None)
        return super().end(graph)


def test_the_result_is_let_go_before_the_last_segment_closes() -> None:
    backend = Weak()

    def fn(x: Tensor) -> dict[str, Tensor]:
        result = x.clone()
        backend.result = weakref.ref(result)
        return {"hidden": result}

    wrapped = CUDAGraphWrapper(fn, GraphPool(backend))
    with torch.inference_mode(), backend.watching(), set_cudagraph_capturing_enabled(), step_context(Mode.FULL, FOUR):
        wrapped(torch.ones(4))
    assert backend.alive_at_end == [False]
