"""Weights that come and go: the same bits as weights that stay, in every way a step can run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dbo.context import yield_turn
from dbo.errors import ConfigError, DBOError
from dbo.graphs.breakable import eager_break_during_capture
from dbo.graphs.descriptor import BatchDescriptor, step_context
from dbo.graphs.mode import CUDAGraphMode as Mode
from dbo.graphs.ubatches import UBatchStep
from dbo.graphs.wrapper import CaptureError, CUDAGraphWrapper, GraphPool, set_cudagraph_capturing_enabled
from dbo.offload import Offloader
from dbo.runner import UBatchRunner
from tests.dbo.graphs.emulator import Emulator

CPU = torch.device("cpu")
Layer = Callable[[Tensor], Tensor]


@eager_break_during_capture
def largest(x: Tensor, out: Tensor) -> None:
    out.copy_(x - float(x.max()))


def weights(num_layers: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    return [{"up": torch.randn(6, 4), "down": torch.randn(4, 6)} for _ in range(num_layers)]


def layer_of(held: dict[str, Tensor]) -> Layer:
    return lambda x: F.linear(F.linear(x, held["up"]).sin(), held["down"])


def forward(layers: list[Layer], breaks: bool) -> Layer:
    def run(x: Tensor) -> Tensor:
        for layer in layers:
            if breaks:
                largest(x, out := torch.empty_like(x))
                x = out
            yield_turn("dispatch")
            x = layer(x)
            yield_turn("combine")
        return x

    return run


class Case:
    """One model twice: with all weights where they are, and with two of them at a time."""

    def __init__(self, num_layers: int, runner: UBatchRunner, emulator: Emulator, *, interleave: bool = True) -> None:
        resident, self.offloader = weights(num_layers), Offloader(weights(num_layers), CPU)
        offloaded = [self.offloader.using(k, layer_of(self.offloader.weights(k))) for k in range(num_layers)]
        self.breaks = True
        self.pool = GraphPool(emulator)

        def step(layers: list[Layer]) -> UBatchStep[Tensor]:
            run = emulator.watched(lambda x: forward(layers, self.breaks)(x))
            return UBatchStep(run, runner, interleave=interleave)

        self.resident = step([layer_of(held) for held in resident])
        self.offloaded = step(offloaded)
        self.wrapped = CUDAGraphWrapper(self.joined, self.pool)

    def joined(self, parts: list[Tensor]) -> Tensor:
        out = self.offloaded(parts)
        self.offloader.join_after_forward()
        return out

    def __call__(self, parts: list[Tensor]) -> Tensor:
        self.offloader.sync_prev_onload()
        return self.wrapped(parts).clone()


@pytest.fixture(params=["threads", "greenlet"])
def runner(request: pytest.FixtureRequest) -> Iterator[UBatchRunner]:
    with UBatchRunner(3, device=CPU, driver=request.param, step_timeout_s=30) as made:
        yield made


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5])
def test_same_bits_in_every_mode(emulator: Emulator, runner: UBatchRunner, num_layers: int, interleave: bool) -> None:
    case = Case(num_layers, runner, emulator, interleave=interleave)
    shapes = {num: BatchDescriptor(num_tokens=2 * num, num_ubatches=num) for num in (1, 2, 3)}
    parts = {num: [torch.randn(2, 4) for _ in range(num)] for num in shapes}
    for mode in (Mode.NONE, Mode.PIECEWISE, Mode.FULL, Mode.NONE, Mode.PIECEWISE):
        case.breaks = mode is not Mode.FULL
        for num in (3, 1, 2):
            with set_cudagraph_capturing_enabled(), step_context(mode, shapes[num]):
                for _ in range(2):
                    for part in parts[num]:
                        part.normal_()
                    assert torch.equal(case(parts[num]), case.resident(parts[num]))


def test_a_layer_stays_while_a_sibling_has_yielded_inside_it(runner: UBatchRunner) -> None:
    offloader = Offloader(weights(5), CPU)

    def twice(held: dict[str, Tensor]) -> Layer:
        def run(x: Tensor) -> Tensor:
            before = layer_of(held)(x)
            yield_turn("inside")
            return before + layer_of(held)(x)

        return run

    layers = [offloader.using(k, twice(offloader.weights(k))) for k in range(5)]
    parts = [torch.randn(2, 4) for _ in range(3)]
    offloader.sync_prev_onload()
    found = runner.run(forward(layers, breaks=False), parts)
    expected = [forward([twice(held) for held in weights(5)], breaks=False)(part) for part in parts]
    assert all(map(torch.equal, found, expected))


def test_ubatches_too_far_apart_for_their_slots(runner: UBatchRunner) -> None:
    offloader = Offloader(weights(3), CPU)

    def stays(x: int) -> int:
        yield_turn("inside")
        return x

    first, third = offloader.using(0, stays), offloader.using(2, stays)
    offloader.sync_prev_onload()
    with pytest.raises(DBOError, match=r"offloaded layer 2 is needed in slot 0, where another one is still in use"):
        runner.run(lambda k: (first, third)[k](k), [0, 1])


def test_each_layer_is_copied_once_a_forward(emulator: Emulator, runner: UBatchRunner) -> None:
    case = Case(4, runner, emulator)
    size = sum(t.nbytes for t in weights(1)[0].values())
    case([torch.randn(2, 4)] * 2)
    before = case.offloader.num_copied_bytes
    case([torch.randn(2, 4)] * 2)  # interleaved: both ubatches use a layer before the next one takes its place
    assert case.offloader.num_copied_bytes - before == 4 * size


def test_a_replay_needs_no_copy_before_it(emulator: Emulator, runner: UBatchRunner) -> None:
    case = Case(3, runner, emulator)
    part = torch.randn(2, 4)
    with set_cudagraph_capturing_enabled(), step_context(Mode.PIECEWISE, BatchDescriptor(num_tokens=2)):
        case([part])
        before = case.offloader.num_copied_bytes
        for _ in range(3):
            assert torch.equal(case([part.normal_()]), case.resident([part]))
    assert case.offloader.num_copied_bytes == before


def test_weights_that_fit_are_copied_once(emulator: Emulator, runner: UBatchRunner) -> None:
    case = Case(2, runner, emulator)
    for _ in range(3):
        case([torch.randn(2, 4)])
    assert case.offloader.num_copied_bytes == sum(t.nbytes for layer in weights(2) for t in layer.values())


def test_after_a_failed_capture_nothing_is_trusted(emulator: Emulator, runner: UBatchRunner) -> None:
    """In a capture that fails copies were planned but never run."""
    case = Case(3, runner, emulator)
    part = torch.randn(2, 4)
    case([part])
    with (
        set_cudagraph_capturing_enabled(),
        step_context(Mode.FULL, BatchDescriptor(num_tokens=2)),
        pytest.raises(CaptureError, match="not permitted"),
    ):
        case([part])  # a break is a plain call in FULL, and reads the host
    assert torch.equal(case([part]), case.resident([part]))


def test_one_slot_would_be_no_prefetch() -> None:
    with pytest.raises(ConfigError, match="num_slots=1 is not allowed: 2 or more"):
        Offloader(weights(3), CPU, num_slots=1)
