"""What its messages cost a step, and how fast perfect overlap could make it: one step, taken apart.

Its own file because it is a measurement of its own, apart from the rounds. One step of a run is stopped at its
forward, and the forward runs again and again in several forms, in random order, all ranks starting together:

    whole, split, overlap   the arms, for this step
    compute                 whole, on the tokens that were received in a recorded run, with nothing sent
    split_compute           the same for the ubatches one after another, under the partition of overlap
    messages                the messages of `whole` alone, packing and unpacking included
    split_messages          those of the ubatches, one after another

A step can run again because it gives the same result each time: it writes the same keys and values to the same slots.

Invariants: nothing here changes what the run computes; the time of a form is that of the slowest rank.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._autograd import DeviceType

from dbo.agreement import BatchPlan, decide
from dbo.config import DBOConfig
from dbo.policy import make_policy
from dbo.trace import busy
from dbo.work import Comm, Work, done_within
from launch.engine import Engine, StepRecord, wait_event
from launch.scheduler import Schedule
from moe.all2all.base import All2All, Dispatched
from moe.sms import make_partition

Form = Literal["whole", "split", "overlap", "compute", "split_compute", "messages", "split_messages"]

_LEAST_REPEATS, _BUDGET_S = 3, 10.0  # of one step, where that gives more repeats than these
_WAIT_SLICE = timedelta(milliseconds=50)  # how late a failed peer is noticed
_LEAST_GAIN = 0.02  # of a whole step: if perfect overlap gained less, a share of it would be a share of noise
_MEMORY_SHARE = 0.5  # of what is free, at most, for what a recorded step received


@dataclass(frozen=True, kw_only=True)
class DeviceWork:
    """What the device did in one step, by its own clock."""

    busy_ms: float  # at least one kernel or copy under way; one that waits for another rank counts
    span_ms: float  # from the first to the last
    launches: int  # kernels and copies


@dataclass(frozen=True, kw_only=True)
class StepBreakdown:
    """One step taken apart. Times in ms by form, a repetition each, of the slowest rank."""

    phase: str
    num_tokens: int  # of all ranks
    num_ubatches: int  # 1 = the ranks did not agree to split it
    times: Mapping[Form, Sequence[float]]
    device: Mapping[Form, DeviceWork] = field(default_factory=dict)  # of the whole arms, on rank 0; empty on the CPU

    def ms(self, form: Form) -> float | None:
        """Median time of a form; None if it did not run."""
        return median(self.times[form]) if self.times.get(form) else None

    @property
    def communication_share(self) -> float | None:
        """The part of a whole step that is there only because of messages: what overlap may hide."""
        whole, compute = self.ms("whole"), self.ms("compute")
        return None if whole is None or compute is None else max(0.0, 1.0 - compute / whole)

    @property
    def ceiling(self) -> float | None:
        """How many times faster than whole a step would be whose compute and messages hid each other entirely."""
        return self._ceiling("compute")

    @property
    def split_ceiling(self) -> float | None:
        """The same with the compute of ubatches, which overlap cannot avoid."""
        return self._ceiling("split_compute")

    @property
    def efficiency(self) -> float | None:
        """What overlap gained, of what it could gain: 1.0 is the ceiling. None where there is nothing to gain."""
        return self._efficiency("compute")

    @property
    def split_efficiency(self) -> float | None:
        """The same against the split ceiling."""
        return self._efficiency("split_compute")

    def busy_share(self, form: Form) -> float | None:
        """The part of a step in which the device had work, of the step under the profiler; None where not known."""
        work = self.device.get(form)
        return work.busy_ms / work.span_ms if work is not None and work.span_ms else None

    def _bound(self, compute: Form) -> float | None:
        parts = self.ms(compute), self.ms("messages")
        return None if parts[0] is None or parts[1] is None else max(parts[0], parts[1])

    def _ceiling(self, compute: Form) -> float | None:
        whole, bound = self.ms("whole"), self._bound(compute)
        return whole / bound if whole and bound else None

    def _efficiency(self, compute: Form) -> float | None:
        whole, overlap, bound = self.ms("whole"), self.ms("overlap"), self._bound(compute)
        if whole is None or overlap is None or bound is None or whole - bound < _LEAST_GAIN * whole:
            return None
        return (whole - overlap) / (whole - bound)

    def to_json(self) -> dict[str, Any]:
        """Plain data; documented in docs/ab.md."""
        figures = ("communication_share", "ceiling", "split_ceiling", "efficiency", "split_efficiency")
        return {
            "phase": self.phase,
            "num_tokens": self.num_tokens,
            "num_ubatches": self.num_ubatches,
            "ms": {form: median(times) for form, times in self.times.items()},
            **{name: getattr(self, name) for name in figures},
            "device": {
                form: {
                    "busy_share": self.busy_share(form),
                    "busy_ms": work.busy_ms,
                    "span_ms": work.span_ms,
                    "launches": work.launches,
                }
                for form, work in self.device.items()
            },
            "samples_ms": {form: list(times) for form, times in self.times.items()},
        }


def steps_to_measure(steps: Sequence[StepRecord]) -> dict[int, str]:
    """The step of each phase that shows most, by number: the largest that split, or the largest if none did.

    A pure function of what all ranks know alike.
    """
    chosen = {}
    for phase, decode in (("prefill", False), ("decode", True)):
        numbers = [n for n, step in enumerate(steps) if (step.phase == "decode") == decode]
        if numbers:
            best = max(numbers, key=lambda n: (steps[n].num_ubatches > 1, steps[n].num_tokens_of_all, -n))
            chosen[best] = phase
    return chosen


class StepMeter:
    """A forward for `Engine.run` that takes the steps in `wanted` apart, and runs all of them as usual.

    base: the settings of the overlap arm. Every rank needs one, with the same arguments.
    """

    def __init__(self, engine: Engine, base: DBOConfig, wanted: Mapping[int, str], repeats: int, seed: int) -> None:
        self._engine, self._wanted, self._repeats, self._seed = engine, wanted, repeats, seed
        self._settings: dict[Form, DBOConfig] = {
            "whole": replace(base, overlap="off"),
            "split": replace(base, overlap="on", interleave=False),
            "overlap": replace(base, overlap="on", interleave=True),
        }
        self._count = 0
        self.found: list[dict[str, Any]] = []  # of this rank, as plain data

    def __call__(self, schedule: Schedule, plan: BatchPlan, dbo: DBOConfig) -> Tensor:
        """See `launch.engine.Forward`."""
        if self._count in self._wanted:
            self.found.append(self._measure(self._wanted[self._count], schedule, plan))
            self._engine.clock.start()
        self._count += 1
        return self._engine.forward(schedule, plan, dbo)

    def _measure(self, phase: str, schedule: Schedule, plan: BatchPlan) -> dict[str, Any]:
        forms, num_ubatches = self._forms(schedule, plan)
        order = list(forms)
        warmup_s = sum(self._time(forms[form]) for form in order) / 1e3
        repeats = max(_LEAST_REPEATS, min(self._repeats, int(_BUDGET_S / self._meet(warmup_s))))
        times: dict[Form, list[float]] = {form: [] for form in forms}
        for number in range(repeats):
            random.Random(self._seed * 1_000_003 + number).shuffle(order)
            for form in order:
                times[form].append(self._time(forms[form]))
        return {
            "phase": phase,
            "num_tokens": sum(plan.num_tokens_per_rank),
            "num_ubatches": num_ubatches,
            "times": times,
            "device": self._profile({form: forms[form] for form in self._settings if form in forms}),
        }

    def _forms(self, schedule: Schedule, plan: BatchPlan) -> tuple[dict[Form, Callable[[], object]], int]:
        """What to run for each form, and how many ubatches there are."""
        engine = self._engine

        def forward(arm: Form) -> Tensor:
            settings = self._settings[arm]
            return engine.forward(schedule, decide(plan.votes, settings, make_policy(settings)), settings)

        forms: dict[Form, Callable[[], object]] = {"whole": partial(forward, "whole")}
        recorded = self._record(forms["whole"])
        forms["compute"] = self._replayed(forms["whole"], recorded)
        forms["messages"] = partial(self._send, recorded)
        settings = self._settings["overlap"]
        num_ubatches = decide(plan.votes, settings, make_policy(settings)).num_ubatches
        if num_ubatches > 1:
            forms["split"], forms["overlap"] = partial(forward, "split"), partial(forward, "overlap")
            recorded = self._record(forms["split"])
            forms["split_compute"] = self._replayed(forms["split"], recorded)
            forms["split_messages"] = partial(self._send, recorded)
        return forms, num_ubatches

    def _time(self, run: Callable[[], object]) -> float:
        """ms from the moment when all ranks are there to the end of this rank's work."""
        engine = self._engine
        engine.clock.start()
        self._meet()
        started = time.perf_counter()
        run()
        self._settle()
        return (time.perf_counter() - started) * 1e3

    def _meet(self, value: float = 0.0, *, on_host: bool = False) -> float:
        """Wait for all ranks, on the group that a step uses or without a device; gives the largest of their values."""
        mesh = self._engine.mesh
        if mesh.world_size == 1:
            return value
        on_host |= mesh.device.type == "cpu"
        mark = torch.full((1,), value, device="cpu" if on_host else mesh.device)
        group = mesh.agreement_group if on_host else mesh.device_group
        work = dist.all_reduce(mark, dist.ReduceOp.MAX, group=group, async_op=True)
        if on_host and work is not None:
            while not done_within(work, _WAIT_SLICE):
                self._engine.clock.check()
        elif work is not None:
            work.wait()
            self._settle()
        return float(mark)

    def _settle(self) -> None:
        """Wait for the device."""
        if self._engine.mesh.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
            wait_event(done, self._engine.clock.check)

    def _record(self, run: Callable[[], object]) -> list[_Exchange]:
        self._engine.clock.start()
        recorder = _Recorder(self._engine.all2all, self._engine.mesh.device)
        with _transport(self._engine, recorder):
            run()
        self._settle()
        return recorder.exchanges

    def _replayed(self, run: Callable[[], object], exchanges: Sequence[_Exchange]) -> Callable[[], None]:
        def replayed() -> None:
            with _transport(self._engine, _Replay(self._engine.all2all, self._engine.mesh.device, exchanges)):
                run()

        return replayed

    def _send(self, exchanges: Sequence[_Exchange]) -> None:
        """All messages of a recorded step, one after another, with the SMs that overlap gives them."""
        all2all, comm_sms = self._engine.all2all, self._settings["overlap"].comm_sms
        with make_partition(all2all, comm_sms, self._engine.mesh.device):
            for each in exchanges:
                sent = all2all.dispatch(each.x, each.topk_idx, each.topk_weights, each.num_tokens_per_rank).result()
                all2all.combine(each.y, sent).result()

    def _profile(self, forms: Mapping[Form, Callable[[], object]]) -> dict[Form, dict[str, float]]:
        """The device's work in one more run of each form; nothing on the CPU."""
        if self._engine.mesh.device.type != "cuda":
            return {}
        found: dict[Form, dict[str, float]] = {}
        for form, run in forms.items():
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                self._meet(on_host=True)  # starting a profiler takes each rank its own time
                run()
                self._settle()
            found[form] = device_work(
                (event.time_range.start, event.time_range.end)
                for event in profiler.events() or ()
                if event.device_type == DeviceType.CUDA
            )
        return found


def device_work(spans_us: Iterator[tuple[float, float]]) -> dict[str, float]:
    """`DeviceWork` as plain data, from when each kernel and copy began and ended, in us."""
    spans = list(spans_us)
    span = max((end for _, end in spans), default=0.0) - min((start for start, _ in spans), default=0.0)
    return {"busy_ms": busy(spans) / 1e3, "span_ms": span / 1e3, "launches": len(spans)}


def join_breakdowns(parts: Sequence[Mapping[str, Any]]) -> StepBreakdown:
    """One step taken apart, from what each rank's `StepMeter` found, in order of ranks."""
    first = parts[0]
    return StepBreakdown(
        phase=first["phase"],
        num_tokens=first["num_tokens"],
        num_ubatches=first["num_ubatches"],
        times={
            form: [max(ms) for ms in zip(*(p["times"][form] for p in parts), strict=True)] for form in first["times"]
        },
        device={form: DeviceWork(**work) for form, work in first["device"].items()},
    )


def why_too_large(engine: Engine, steps: Sequence[StepRecord], numbers: Sequence[int]) -> str | None:
    """Why what these steps receive cannot be recorded on this rank, or None if it can."""
    config = engine.model.config
    rows = max((steps[number].num_rows_of_all for number in numbers), default=0)  # a rank may receive all of them
    needed = 8 * rows * config.num_layers * config.hidden * config.dtype.itemsize  # x and y, there and back, twice
    if engine.mesh.device.type == "cuda":
        free = torch.cuda.mem_get_info(engine.mesh.device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed <= _MEMORY_SHARE * free:
        return None
    return f"recording a step may take {needed / 2**30:.1f} GiB, of which {free / 2**30:.1f} GiB are free"


# ------------------------------------------------------------------------------------------------ transports


@dataclass(kw_only=True)
class _Exchange:
    """What went there and back in one layer of one ubatch."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    num_tokens_per_rank: Sequence[int] | None
    received: Dispatched
    y: Tensor = field(default_factory=lambda: torch.empty(0))
    combined: Tensor = field(default_factory=lambda: torch.empty(0))


class _Stand:
    """The face of a transport, for stand-ins."""

    def __init__(self, inner: All2All, device: torch.device) -> None:
        self.name, self.capabilities, self.group = inner.name, inner.capabilities, inner.group
        self.ep_rank, self.ep_size, self.num_experts = inner.ep_rank, inner.ep_size, inner.num_experts
        self._comm = Comm(device, own_stream=False)

    def close(self) -> None:
        """Nothing is held."""


class _Recorder(_Stand):
    """Passes everything on, waits for it, and keeps it. For ubatches that run one after another."""

    def __init__(self, inner: All2All, device: torch.device) -> None:
        super().__init__(inner, device)
        self._inner = inner
        self.exchanges: list[_Exchange] = []

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        num_tokens_per_rank: Sequence[int] | None = None,
    ) -> Work[Dispatched]:
        received = self._inner.dispatch(x, topk_idx, topk_weights, num_tokens_per_rank).result()
        kept = replace(received, x=received.x.clone())  # a transport may use its buffers again
        self.exchanges.append(
            _Exchange(
                x=x,
                topk_idx=topk_idx,
                topk_weights=topk_weights,
                num_tokens_per_rank=num_tokens_per_rank,
                received=kept,
            )
        )
        return self._comm.start(lambda _: lambda: received, label="dispatch")

    def combine(self, y: Tensor, sent: Dispatched) -> Work[Tensor]:
        exchange = self.exchanges[-1]
        exchange.y, exchange.combined = y, self._inner.combine(y, sent).result()
        return self._comm.start(lambda _: lambda: exchange.combined, label="combine")


class _Replay(_Stand):
    """Gives at once what was received when the step was recorded, in the same order."""

    def __init__(self, inner: All2All, device: torch.device, exchanges: Sequence[_Exchange]) -> None:
        super().__init__(inner, device)
        self._coming, self._current = iter(exchanges), exchanges[0] if exchanges else None

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        num_tokens_per_rank: Sequence[int] | None = None,
    ) -> Work[Dispatched]:
        self._current = exchange = next(self._coming)
        return self._comm.start(lambda _: lambda: exchange.received, label="dispatch")

    def combine(self, y: Tensor, sent: Dispatched) -> Work[Tensor]:
        assert self._current is not None
        combined = self._current.combined
        return self._comm.start(lambda _: lambda: combined, label="combine")


@contextmanager
def _transport(engine: Engine, stand: All2All) -> Iterator[None]:
    """All layers of the engine's model use another transport."""
    layers = engine.model.moe_layers
    before = [layer.all2all for layer in layers]
    try:
        for layer in layers:
            layer.all2all = stand
        yield
    finally:
        for layer, all2all in zip(layers, before, strict=True):
            layer.all2all = all2all
