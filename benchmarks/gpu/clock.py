"""What the GPU benchmarks measure with: a device's events and profiler, or, in a rehearsal, the host's clock.

Its own file because it is all of a benchmark that a rehearsal cannot run as it is.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

_CYCLES_PER_MS = 1_900_000  # about; more is no harm


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What a device ran in one call: how many kernels and copies, for how long it ran any, and from the first to the
    last of them."""

    launches: int
    busy_ms: float
    span_ms: float


class Clock:
    """For one device."""

    def __init__(self, device: torch.device):
        self.device, self._cuda = device, device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._cuda:
            torch.cuda.synchronize()

    def sleep(self, ms: float) -> None:
        """Queue so much of nothing, so that the host gets ahead of the device."""
        if self._cuda:
            torch.cuda._sleep(int(ms * _CYCLES_PER_MS))

    def device_ms(
        self, function: Callable[[], object], *, rounds: int, ahead_ms: float, meet: Callable[[], object] | None = None
    ) -> float:
        """Median of the device's own time for a call that takes the host less than `ahead_ms`."""
        found = []
        for _ in range(rounds):
            self.synchronize()
            if meet is not None:
                meet()
            found.append(self._once(function, ahead_ms))
        return sorted(found)[rounds // 2]

    def _once(self, function: Callable[[], object], ahead_ms: float) -> float:
        if not self._cuda:
            start = time.perf_counter()
            function()
            return (time.perf_counter() - start) * 1e3
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.sleep(ahead_ms)
        first.record()
        function()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last)

    def kernels(self, function: Callable[[], object], meet: Callable[[], object]) -> Kernels:
        """Run `function` under the profiler, after `meet`: a message's kernel that waits for another rank counts as
        busy. On the CPU operators stand for kernels."""
        from torch.profiler import ProfilerActivity, profile

        kind = torch.autograd.DeviceType.CUDA if self._cuda else torch.autograd.DeviceType.CPU
        with profile(activities=[ProfilerActivity.CUDA if self._cuda else ProfilerActivity.CPU]) as profiled:
            meet()
            function()
            self.synchronize()
        events = [event for event in profiled.events() if event.device_type == kind]
        spans = [(event.time_range.start, event.time_range.end) for event in events]
        span = max(end for _, end in spans) - min(start for start, _ in spans)
        return Kernels(launches=len(events), busy_ms=covered(spans) / 1e3, span_ms=span / 1e3)

    def memory_mib(self) -> tuple[float, float]:
        """In use now, and kept by the allocator; on the CPU the most this process ever had, twice."""
        if not self._cuda:
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
            return most, most
        return torch.cuda.memory_allocated() / 2**20, torch.cuda.memory_reserved() / 2**20


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
