"""CUDA graphs on one GPU: two lanes, ubatches, memory, and what a capture that fails says (known faults 35 to 39)."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dbo.graphs.breakable import BreakableCapture, eager_break_during_capture
from dbo.graphs.cuda import CudaGraphs
from dbo.graphs.descriptor import BatchDescriptor, step_context
from dbo.graphs.mode import CUDAGraphMode as Mode
from dbo.graphs.ubatches import UBatchStep, prepare
from dbo.graphs.wrapper import CaptureError, CUDAGraphWrapper, GraphPool, set_cudagraph_capturing_enabled
from dbo.offload import Offloader
from dbo.runner import UBatchRunner
from dbo.work import Comm

pytestmark = pytest.mark.gpu

MIB = 1 << 20
WIDTH = 256


@pytest.fixture
def device() -> Iterator[torch.device]:
    with torch.inference_mode():
        yield torch.device("cuda", 0)


@pytest.fixture(params=["threads", "greenlet"])
def runner(request: pytest.FixtureRequest, device: torch.device) -> Iterator[UBatchRunner]:
    if request.param == "greenlet":
        pytest.importorskip("greenlet")
    with UBatchRunner(3, device=device, driver=request.param, step_timeout_s=60) as made:
        yield made


@eager_break_during_capture
def centred(x: Tensor, num_tokens: Tensor, out: Tensor) -> None:
    """Reads a number on the host, as attention's plan does."""
    real = int(num_tokens)
    out.zero_()
    out[:real] = x[:real] - x[:real].mean(0)


def model(comm: Comm, weights: list[Tensor], *, breaks: bool) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    """Layers of a product, a message on the comm stream, a product."""

    def run(part: tuple[Tensor, Tensor]) -> Tensor:
        x, num_tokens = part
        for w in weights:
            if breaks:
                centred(x, num_tokens, out := torch.empty_like(x))
                x = out
            h = F.linear(x, w)

            def launch(_: object, h: Tensor = h) -> Callable[[], Tensor]:
                moved = h.flip(0) * 0.5
                return lambda: moved + 1

            x = torch.tanh(comm.start(launch, label="dispatch").result()) + F.linear(h, w.t())
            x = x / x.norm(dim=-1, keepdim=True).clamp(min=1e-3)
        return x

    return run


def weights_of(device: torch.device, num_layers: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(WIDTH, WIDTH, device=device, dtype=torch.bfloat16) / 16 for _ in range(num_layers)]


def parts_of(device: torch.device, num: int, rows: int) -> list[tuple[Tensor, Tensor]]:
    made = torch.randn(num * rows, WIDTH, device=device, dtype=torch.bfloat16)
    return [(part, torch.tensor(rows, device=device)) for part in made.chunk(num)]


@pytest.mark.parametrize("mode", [Mode.FULL, Mode.PIECEWISE])
def test_replay_equals_eager(device: torch.device, runner: UBatchRunner, mode: Mode) -> None:
    """Split and whole graphs of many sizes, replayed in random order with other lengths, 500 times."""
    comm = Comm(device)
    pool = GraphPool(CudaGraphs(device, {"comm": comm.stream} if comm.stream else None), debug=True)
    step = UBatchStep(model(comm, weights_of(device, 4), breaks=mode is Mode.PIECEWISE), runner)
    wrapped = CUDAGraphWrapper(step, pool)
    shapes = [(num, rows) for rows in (99, 64, 33, 8, 1) for num in (1, 2, 3)]
    inputs = {shape: parts_of(device, *shape) for shape in shapes}

    def context(num: int, rows: int) -> BatchDescriptor:
        return BatchDescriptor(num_tokens=num * rows, num_ubatches=num)

    with pool.stream():
        prepare(runner, [torch.cuda.current_stream()], device)
        with set_cudagraph_capturing_enabled():
            for shape in shapes:
                step(inputs[shape])
                with step_context(mode, context(*shape)):
                    assert torch.equal(wrapped(inputs[shape]), step(inputs[shape])), shape
        order = random.Random(0)
        for _ in range(500):
            num, rows = order.choice(shapes)
            parts = inputs[num, rows]
            for x, num_tokens in parts:
                x.normal_()
                num_tokens.fill_(order.randint(0, rows))
            with step_context(mode, context(num, rows)):
                replayed = wrapped(parts).clone()
            assert torch.equal(replayed, step(parts)), (num, rows)


def test_replay_waits_for_nothing(device: torch.device, runner: UBatchRunner) -> None:
    comm = Comm(device)
    pool = GraphPool(CudaGraphs(device))
    step = UBatchStep(model(comm, weights_of(device, 4), breaks=False), runner)
    wrapped, parts = CUDAGraphWrapper(step, pool), parts_of(device, 2, 64)
    with pool.stream(), set_cudagraph_capturing_enabled():
        prepare(runner, [torch.cuda.current_stream()], device)
        step(parts)
        for mode in (Mode.FULL, Mode.PIECEWISE):
            with step_context(mode, BatchDescriptor(num_tokens=128, num_ubatches=2)):
                wrapped(parts)
                done = torch.cuda.Event()
                torch.cuda._sleep(2_000_000_000)  # about a second
                wrapped(parts)
                done.record()
                assert not done.query(), f"{mode.name}: the host waited for the device"
                torch.cuda.synchronize()


def test_recaptures_and_aborts_give_memory_back(device: torch.device) -> None:
    backend = CudaGraphs(device)
    pool = GraphPool(backend, mode="thread_local")
    fail = [False]

    def fn(x: Tensor) -> Tensor:
        y = torch.cat([x] * 64)
        y = F.linear(y, torch.eye(WIDTH, device=device, dtype=x.dtype)) * 2
        return y * y.max().item() if fail[0] else y

    wrapped = CUDAGraphWrapper(fn, pool)
    x = torch.randn(1024, WIDTH, device=device, dtype=torch.bfloat16)
    with pool.stream():
        fn(x)

    def capture() -> int:
        with set_cudagraph_capturing_enabled(), step_context(Mode.FULL, BatchDescriptor(num_tokens=1024)):
            wrapped(x)
        pool.clear_all_graphs()
        return backend.reserved_bytes()

    first = capture()
    assert all(capture() <= first for _ in range(10))
    fail[0] = True
    with pytest.raises(CaptureError, match=r"`return y \* y.max\(\).item\(\)"):
        capture()
    gc.collect()
    pool.clear_all_graphs()
    assert backend.reserved_bytes() <= first + MIB
    fail[0] = False
    assert capture() <= first + MIB


def test_smaller_sizes_take_little_more_memory(device: torch.device) -> None:
    """20 sizes in one pool: no more than 15% over the largest alone, with 1 ubatch, with 2, and with both beside."""
    pytest.importorskip("greenlet")
    backend, comm = CudaGraphs(device), Comm(device)
    pool = GraphPool(backend, mode="thread_local")
    with UBatchRunner(2, device=device, driver="greenlet") as runner:
        step = UBatchStep(model(comm, weights_of(device, 4), breaks=False), runner)
        wrapped = CUDAGraphWrapper(step, pool)
        for nums in ((1,), (2,), (1, 2)):
            inputs = {(n, rows): parts_of(device, n, rows // n) for rows in range(20480, 0, -1024) for n in nums}
            pool.captured.clear()
            with pool.stream(), set_cudagraph_capturing_enabled():
                for (num, rows), parts in inputs.items():
                    step(parts)
                    with step_context(Mode.FULL, BatchDescriptor(num_tokens=rows, num_ubatches=num)):
                        wrapped(parts)
            grown = [graph.num_bytes for graph in pool.captured]
            assert sum(grown[len(nums) :]) <= 0.15 * sum(grown[: len(nums)]) + 2 * MIB, (nums, grown)
            pool.clear_all_graphs()


def test_a_stream_that_is_not_joined_is_named(device: torch.device) -> None:
    stray = torch.cuda.Stream(device)
    pool = GraphPool(CudaGraphs(device, {"stray": stray}), mode="thread_local")

    def forks(x: Tensor) -> Tensor:
        stray.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stray):
            return x * 2

    wrapped = CUDAGraphWrapper(forks, pool)
    x = torch.ones(8, device=device)
    with (
        set_cudagraph_capturing_enabled(),
        step_context(Mode.FULL, BatchDescriptor(num_tokens=8)),
        pytest.raises(CaptureError, match=r"streams in the capture: .*stray"),
    ):
        wrapped(x)
    torch.cuda.synchronize()
    assert (x * 2).sum().item() == 16  # the device is usable


def test_an_event_from_before_the_capture(device: torch.device) -> None:
    pool = GraphPool(CudaGraphs(device), mode="thread_local")
    before = torch.cuda.Event()
    before.record()

    def waits(x: Tensor) -> Tensor:
        torch.cuda.current_stream().wait_event(before)
        return x * 2

    wrapped = CUDAGraphWrapper(waits, pool)
    with (
        set_cudagraph_capturing_enabled(),
        step_context(Mode.FULL, BatchDescriptor(num_tokens=8)),
        pytest.raises(CaptureError, match=r"(?s)in waits: `torch.cuda.current_stream.*compute"),
    ):
        wrapped(torch.ones(8, device=device))


@pytest.mark.parametrize("mode", [Mode.NONE, Mode.FULL, Mode.PIECEWISE])
@pytest.mark.parametrize("num", [1, 2])
def test_offloaded_weights(device: torch.device, runner: UBatchRunner, mode: Mode, num: int) -> None:
    comm, breaks = Comm(device), mode is not Mode.FULL
    weights = weights_of(device, 5)
    offloader = Offloader([{"w": w.cpu()} for w in weights], device)
    resident = UBatchStep(model(comm, weights, breaks=breaks), runner)

    def layered(part: tuple[Tensor, Tensor]) -> Tensor:
        for k in range(5):
            held = offloader.weights(k)["w"]
            part = offloader.using(k, model(comm, [held], breaks=breaks))(part), part[1]
        return part[0]

    step = UBatchStep(layered, runner)

    def forward(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
        out = step(parts)
        offloader.join_after_forward()
        return out

    pool = GraphPool(CudaGraphs(device, {"copies": offloader.stream} if offloader.stream else None))
    wrapped, parts = CUDAGraphWrapper(forward, pool), parts_of(device, num, 48)
    with pool.stream(), set_cudagraph_capturing_enabled():
        prepare(runner, [torch.cuda.current_stream()], device)
        offloader.sync_prev_onload()
        forward(parts)
        for _ in range(20):
            for x, _num_tokens in parts:
                x.normal_()
            offloader.sync_prev_onload()
            with step_context(mode, BatchDescriptor(num_tokens=48 * num, num_ubatches=num)):
                found = wrapped(parts).clone()
            assert torch.equal(found, resident(parts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.uint8])
def test_weak_references(device: torch.device, dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (4, 6), device=device).to(dtype)[1:, ::2]
    weak = CudaGraphs(device).weak_ref(tensor)
    assert (weak.data_ptr(), weak.dtype, weak.shape, weak.stride()) == (
        tensor.data_ptr(),
        dtype,
        tensor.shape,
        tensor.stride(),
    )
    assert torch.equal(weak, tensor)
    before = torch.cuda.memory_allocated(device)
    del tensor
    assert torch.cuda.memory_allocated(device) < before


def test_segments_without_work_are_dropped(device: torch.device) -> None:
    backend = CudaGraphs(device)
    x, out = torch.ones(3, 8, device=device), torch.empty(3, 8, device=device)
    with backend.joined(backend.capture_stream()), BreakableCapture(backend, backend.new_pool()) as capture:
        centred(x, torch.tensor(3), out)
        centred(out, torch.tensor(3), x)
    assert (capture.num_graphs, capture.num_breaks) == (0, 2)
