"""An engine's steps from CUDA graphs: what to capture, what a rank votes, and how a step finds its graph.

Its own file because the engine only asks three things of it: `vote`, `settle`, `run`. Everything else is `dbo.graphs`
(when and how to capture), `moe.graphs` (what of the model must not be) and `launch.inputs` (memory that stays put).

Invariant: graphs are captured for one setting of the overlap; a step under another one that is split runs eagerly.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from dbo.agreement import BatchPlan
from dbo.config import DBOConfig
from dbo.graphs.backend import GraphBackend
from dbo.graphs.descriptor import BatchDescriptor, step_context
from dbo.graphs.dispatcher import GraphDispatcher, default_capture_sizes
from dbo.graphs.mode import CUDAGraphMode
from dbo.graphs.session import CaptureReport, Shape, capture_all
from dbo.graphs.ubatches import UBatchStep, prepare
from dbo.graphs.wrapper import CUDAGraphWrapper, GraphPool
from dbo.offload import Offloader
from dbo.slices import make_slices
from dbo.work import done_within
from dbo.workspace import Workspace
from launch.inputs import GraphInputs
from launch.scheduler import Schedule
from moe.batch import ForwardBatch
from moe.graphs import check_mode, make_capturable
from moe.sms import make_partition

if TYPE_CHECKING:
    from launch.engine import Engine

TOKENS_PER_REQUEST = 256  # fewest, on average, in a mixed step captured whole: its attention has room for no more
_WAIT_SLICE = timedelta(milliseconds=50)


class Graphs:
    """Graphs of the steps of one engine under the setting `dbo`. Raises ConfigError for what cannot be captured.

    sizes: tokens a step of a rank; None takes the default ones. memory_limit: bytes; None = no limit. debug: see
    `GraphPool`.
    """

    def __init__(
        self,
        engine: Engine,
        dbo: DBOConfig,
        mode: CUDAGraphMode,
        backend: GraphBackend,
        *,
        sizes: Sequence[int] | None = None,
        memory_limit: int | None = None,
        debug: bool = False,
        offloader: Offloader | None = None,
    ):
        check_mode(mode, engine.model)
        limits, num = engine.limits, dbo.num_ubatches if dbo.overlap != "off" else 1
        self.dispatcher = GraphDispatcher(
            mode,
            sizes or default_capture_sizes(limits.max_num_tokens),
            num_ubatches=[num],
            multiple=dbo.cut_alignment,
            max_num_requests=min(limits.max_num_seqs, limits.max_num_tokens),
            tokens_per_request=TOKENS_PER_REQUEST,
        )
        self._engine, self._dbo, self._memory_limit, self._offloader = engine, dbo, memory_limit, offloader
        self._workspace = Workspace(engine.mesh.device, num)
        make_capturable(engine.model, self._workspace)
        self._inputs = GraphInputs(
            limits,
            engine.mesh.device,
            engine.check,
            num_tokens=max(self.dispatcher.max_num_tokens(), limits.max_num_tokens),
            num_ubatches=num,
            num_ranks=engine.mesh.world_size,
        )
        threads = num > 1 and dbo.driver == "threads"
        self.pool = GraphPool(backend, mode="relaxed" if threads else "thread_local", debug=debug)
        self.steps: Counter[tuple[CUDAGraphMode, int]] = Counter()  # by mode and number of ubatches, those from graphs
        self._step = UBatchStep(self._model, engine.runner(dbo), interleave=dbo.interleave)
        self._wrapped = CUDAGraphWrapper(self._forward, self.pool)

    def capture(self) -> CaptureReport:
        """Capture everything, under a progress bar on rank 0. Collective; raises `CaptureError`."""
        mesh = self._engine.mesh
        with torch.inference_mode():
            if mesh.device.type == "cuda":
                with self.pool.stream():
                    prepare(self._engine.runner(self._dbo), [torch.cuda.current_stream()], mesh.device)
            return capture_all(
                self.pool,
                self.dispatcher,
                lambda descriptor: self._run(self._inputs.empty(descriptor)),
                workspace=self._workspace,
                partition=self._partition,
                memory_limit=self._memory_limit,
                all_ranks=self._all_ranks,
                progress=self._bar,
            )

    def stream(self) -> AbstractContextManager[object]:
        """What to run steps under."""
        return self.pool.stream()

    def vote(self, schedule: Schedule) -> tuple[int, int]:
        """`graph_mode` and `num_tokens_padded` of this rank's vote."""
        num_requests, num_keys = len(schedule.chunks), int(np.sum(schedule.seq_lens))
        return self.dispatcher.vote(
            schedule.num_tokens,
            uniform_decode=schedule.uniform_decode,
            fits=lambda key: num_requests <= (key.num_requests or 0) and num_keys <= key.num_tokens,
        )

    def settle(self, plan: BatchPlan, dbo: DBOConfig) -> tuple[BatchPlan, CUDAGraphMode, BatchDescriptor]:
        """See `GraphDispatcher.settle`."""
        plan_, mode, descriptor = self.dispatcher.settle(plan)
        same = all(getattr(dbo, name) == getattr(self._dbo, name) for name in ("interleave", "comm_sms", "driver"))
        if plan.should_ubatch and not same:
            return plan, CUDAGraphMode.NONE, replace(descriptor, num_tokens=plan.num_tokens_padded or 0)
        return plan_, mode, descriptor

    def run(self, schedule: Schedule, plan: BatchPlan, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> Tensor:
        """Hidden states [num_tokens, hidden] of a settled step, valid until the next one; does not wait."""
        slices = make_slices(plan, schedule.query_lens, seq_lens=schedule.seq_lens)
        parts = self._inputs.build(schedule, slices, descriptor)
        self.steps[mode, descriptor.num_ubatches] += 1
        with step_context(mode, descriptor), self._partition(descriptor):
            return self._run(parts)[: schedule.num_tokens]

    def close(self) -> None:
        """Give the graphs up."""
        self.pool.clear_all_graphs()

    def _run(self, parts: list[ForwardBatch]) -> Tensor:
        if self._offloader is not None:
            self._offloader.sync_prev_onload()
        return self._wrapped(parts)

    def _forward(self, parts: list[ForwardBatch]) -> Tensor:
        hidden = self._step(parts)
        if self._offloader is not None:
            self._offloader.join_after_forward()
        return hidden

    def _model(self, part: ForwardBatch) -> Tensor:
        return self._engine.model(part, self._engine.kv)

    def _partition(self, descriptor: BatchDescriptor) -> AbstractContextManager[object]:
        if descriptor.num_ubatches == 1:
            return nullcontext()
        num_tokens = descriptor.num_tokens // descriptor.num_ubatches
        return make_partition(self._engine.all2all, self._dbo.comm_sms, self._engine.mesh.device, num_tokens)

    def _all_ranks(self, here: bool) -> bool:
        mesh = self._engine.mesh
        if mesh.world_size == 1:
            return here
        lowest = torch.tensor(int(here))
        work = dist.all_reduce(lowest, dist.ReduceOp.MIN, group=mesh.agreement_group, async_op=True)
        while not done_within(work, _WAIT_SLICE):
            self._engine.check()
        return bool(lowest)

    def _bar(self, shapes: list[Shape]) -> Iterable[Shape]:
        bar = tqdm(shapes, desc="capture", unit="graph", file=sys.stderr, disable=self._engine.mesh.rank != 0)
        for shape in bar:
            bar.set_postfix_str(str(shape[1]), refresh=False)
            yield shape
