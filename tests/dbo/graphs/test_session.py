"""The capture session: order, warm-up, lock, limit, failure, and that all ranks leave out the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from dbo.graphs.breakable import eager_break_during_capture
from dbo.graphs.descriptor import BatchDescriptor, current_step, step_context
from dbo.graphs.dispatcher import GraphDispatcher
from dbo.graphs.mode import CUDAGraphMode as Mode
from dbo.graphs.session import Shape, capture_all
from dbo.graphs.wrapper import CaptureError, CUDAGraphWrapper, GraphPool
from dbo.workspace import Workspace, WorkspaceLocked
from tests.dbo.graphs.emulator import Emulator

MIB = 1 << 20


@eager_break_during_capture
def read(x: Tensor, out: Tensor) -> None:
    out.copy_(x * float(x.max()))


class Steps:
    """An engine in small: buffers at fixed addresses, a wrapped model, and a note of every run of it."""

    def __init__(self, emulator: Emulator, workspace: Workspace | None = None) -> None:
        self.pool = GraphPool(emulator, debug=True)
        self.workspace, self.buffer = workspace, torch.ones(64)
        self.runs: list[tuple[Mode, BatchDescriptor]] = []
        self.wrapped = CUDAGraphWrapper(self.model, self.pool)

    def model(self, x: Tensor) -> Tensor:
        step = current_step()
        assert step is not None
        self.runs.append((step.mode, step.descriptor))
        if self.workspace is not None:
            self.workspace.take(((len(x),), torch.float32))
        y = x + 1
        if step.mode is not Mode.FULL:
            read(y, out := torch.empty_like(y))
            y = out
        return y * 2

    def step(self, descriptor: BatchDescriptor) -> Tensor:
        return self.wrapped(self.buffer[: descriptor.num_tokens])


def dispatcher(mode: Mode = Mode.FULL_AND_PIECEWISE) -> GraphDispatcher:
    return GraphDispatcher(mode, [2, 8, 32], num_ubatches=[2], max_num_requests=16)


def test_each_shape_runs_once_before_its_capture_largest_first(emulator: Emulator) -> None:
    steps, table, seen = Steps(emulator), dispatcher(), list[int]()

    def progress(shapes: list[Shape]) -> list[Shape]:
        seen.append(len(shapes))
        return shapes

    report = capture_all(steps.pool, table, steps.step, progress=progress)
    shapes = list(table.shapes())
    assert seen == [len(shapes)] == [len(report.captured)]
    assert steps.runs == [pair for mode, key in shapes for pair in ((Mode.NONE, key), (mode, key))]
    assert [key.num_tokens for _, key in shapes] == sorted((key.num_tokens for _, key in shapes), reverse=True)
    assert set(steps.wrapped.captured()) == set(shapes)
    assert emulator.calls.count("new_pool") == 1
    assert report.lines()[0].startswith(f"{len(shapes)} graphs in ")


def test_every_dispatched_step_replays(emulator: Emulator) -> None:
    steps, table = Steps(emulator), dispatcher()
    capture_all(steps.pool, table, steps.step)
    num_runs = len(steps.runs)
    for num_tokens in range(1, 33):
        for uniform in (True, False):
            for num in (1, 2):
                mode, key = table.dispatch(num_tokens, uniform_decode=uniform, num_ubatches=num)
                assert mode is not Mode.NONE
                steps.buffer.normal_()
                with step_context(mode, key):
                    found = steps.step(key)
                y = steps.buffer[: key.num_tokens] + 1
                assert torch.equal(found, (y if mode is Mode.FULL else y * float(y.max())) * 2)
    assert len(steps.runs) == num_runs


def test_the_workspace_is_locked_at_the_end(emulator: Emulator) -> None:
    workspace = Workspace(torch.device("cpu"), 2)
    steps = Steps(emulator, workspace)
    capture_all(steps.pool, dispatcher(), steps.step, workspace=workspace)
    workspace.take(((32,), torch.float32))
    with pytest.raises(WorkspaceLocked):
        workspace.take(((65,), torch.float32))


def test_the_limit_stops_adding_sizes_and_says_so(emulator: Emulator) -> None:
    emulator.bytes_per_graph = MIB
    steps, table = Steps(emulator), dispatcher(Mode.FULL)
    wanted = list(table.shapes())
    report = capture_all(steps.pool, table, steps.step, memory_limit=2 * MIB)
    assert len(report.captured) == 2
    assert list(table.shapes()) == wanted[:2]
    assert report.left_out == wanted[2:]
    assert report.lines()[1] == (
        f"{len(wanted) - 2} shapes from {wanted[2][1]} down have no graph: the limit of 2 MiB "
        "(--cudagraph-memory-limit) is reached"
    )
    for mode, key in wanted:  # what has no graph of its own runs from a larger one
        found, larger = table.dispatch(key.num_tokens, uniform_decode=False, num_ubatches=key.num_ubatches)
        assert (found, larger.num_tokens) == (mode, 32)


def test_a_rank_without_memory_decides_for_all(emulator: Emulator) -> None:
    steps, table, asked = Steps(emulator), dispatcher(Mode.PIECEWISE), list[bool]()

    def all_ranks(here: bool) -> bool:
        asked.append(here)
        return here and len(asked) <= 3

    report = capture_all(steps.pool, table, steps.step, all_ranks=all_ranks)
    assert (asked, len(report.captured), len(list(table.shapes()))) == ([True] * 4, 3, 3)


def test_the_partition_is_held_around_warm_up_and_capture(emulator: Emulator) -> None:
    steps, log = Steps(emulator), list[str]()

    @contextmanager
    def partition(descriptor: BatchDescriptor) -> Iterator[None]:
        log.append(f"enter {descriptor.num_ubatches}")
        runs = len(steps.runs)
        yield
        log.append(f"leave after {len(steps.runs) - runs}")

    capture_all(steps.pool, GraphDispatcher(Mode.PIECEWISE, [4], num_ubatches=[2], max_num_requests=4), steps.step,
                partition=partition)  # fmt: skip
    assert log == ["enter 1", "leave after 2", "enter 2", "leave after 2"]


def test_a_failed_session_leaves_no_graph(emulator: Emulator) -> None:
    steps = Steps(emulator)

    def fails_when_small(descriptor: BatchDescriptor) -> Tensor:
        found = steps.step(descriptor)
        if descriptor.num_tokens < 8:
            raise RuntimeError("no more")
        return found

    with pytest.raises(RuntimeError, match="no more"):
        capture_all(steps.pool, dispatcher(), fails_when_small)
    assert (emulator.num_live, steps.wrapped.captured()) == (0, {})
    report = capture_all(steps.pool, dispatcher(), steps.step)
    assert emulator.num_live > 0
    assert not report.left_out


def test_after_the_session_nothing_is_captured(emulator: Emulator) -> None:
    steps = Steps(emulator)
    capture_all(steps.pool, dispatcher(), steps.step)
    three = BatchDescriptor(num_tokens=3)
    with (
        pytest.raises(CaptureError, match="PIECEWISE graph of 3 tokens: not captured"),
        step_context(Mode.PIECEWISE, three),
    ):
        steps.wrapped(steps.buffer[:3])
