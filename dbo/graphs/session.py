"""The one time at which graphs are captured: after the model is loaded, before the first step.

A file of its own because the order matters and belongs to nobody else: shapes largest first, so that smaller graphs fit
into memory that larger ones have given back to the pool; before each capture a run of the very same shape, so that
every plan, handle and workspace exists; after the last one the workspace is locked.

Invariants: every rank captures the same shapes (what one leaves out for want of memory all leave out); a shape that was
not captured is no key of the dispatcher any more; a session that fails leaves no graph behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from dbo.graphs.descriptor import BatchDescriptor, step_context
from dbo.graphs.dispatcher import GraphDispatcher
from dbo.graphs.mode import CUDAGraphMode
from dbo.graphs.wrapper import Captured, GraphPool, set_cudagraph_capturing_enabled
from dbo.workspace import Workspace

Shape = tuple[CUDAGraphMode, BatchDescriptor]


@dataclass(kw_only=True)
class CaptureReport:
    """What a session did."""

    captured: list[Captured] = field(default_factory=list)
    left_out: list[Shape] = field(default_factory=list)  # for want of memory
    memory_limit: int | None = None

    @property
    def num_bytes(self) -> int:
        """Memory that all graphs took."""
        return sum(graph.num_bytes for graph in self.captured)

    @property
    def seconds(self) -> float:
        """Time that all of them took."""
        return sum(graph.seconds for graph in self.captured)

    def lines(self) -> list[str]:
        """For people: a summary, and what was left out."""
        said = [f"{len(self.captured)} graphs in {self.seconds:.1f} s and {self.num_bytes / 2**20:.0f} MiB"]
        if self.left_out and self.memory_limit is not None:
            first = self.left_out[0][1]
            said.append(
                f"{len(self.left_out)} shapes from {first} down have no graph: the limit of "
                f"{self.memory_limit / 2**20:.0f} MiB (--cudagraph-memory-limit) is reached"
            )
        return said


def capture_all(
    pool: GraphPool,
    dispatcher: GraphDispatcher,
    step: Callable[[BatchDescriptor], object],
    *,
    workspace: Workspace | None = None,
    partition: Callable[[BatchDescriptor], AbstractContextManager[object]] = lambda _: nullcontext(),
    memory_limit: int | None = None,
    all_ranks: Callable[[bool], bool] = lambda here: here,
    progress: Callable[[list[Shape]], Iterable[Shape]] = lambda shapes: shapes,
) -> CaptureReport:
    """Capture every shape of `dispatcher`, by calling `step(descriptor)` in the step context of each. Collective.

    step: runs the wrapped model on a batch of that shape whose rows are all padding. partition: what to hold around a
    step of that shape (its SMs); around the run before the capture too. memory_limit: bytes; once they are used no
    further shape is added. all_ranks: True if all ranks say so. progress: passes shapes on, and may show a bar. Raises
    `CaptureError`, after all graphs were given up.
    """
    report, shapes = CaptureReport(memory_limit=memory_limit), list(dispatcher.shapes())
    report.left_out, pool.captured = shapes.copy(), report.captured
    try:
        with pool.stream():
            for mode, descriptor in progress(shapes):
                used_up = memory_limit is not None and report.num_bytes >= memory_limit
                if not all_ranks(not used_up):
                    break
                with partition(descriptor):
                    with step_context(CUDAGraphMode.NONE, descriptor):
                        step(descriptor)
                    with set_cudagraph_capturing_enabled(), step_context(mode, descriptor):
                        step(descriptor)
                report.left_out.remove((mode, descriptor))
    except BaseException:
        pool.clear_all_graphs()
        raise
    for mode, descriptor in report.left_out:
        dispatcher.drop(mode, descriptor)
    if workspace is not None:
        workspace.lock()
    return report
