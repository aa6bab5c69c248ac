"""What a GPU draws, by its own counters.

Its own file because it alone knows NVML. A GPU that draws the most it may lowers its clock, and every kernel takes
longer then, messages too. Overlap leaves a GPU no rest, so it gets there first: where whole steps are near the limit,
hiding messages gains less than their length.

Needs the package `nvidia-ml-py`; without it, or without a GPU, nothing is known of power.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch

LOOK_S = 0.01  # between looks
AT_LIMIT = 0.95
"""From this share of the limit on a GPU lowers its clock, in the mean over a second or more."""
SHORTEST_S = 2.0
"""What takes less, in the mean, has no power of its own: its neighbours' is counted in, for a tenth of a second."""


class PowerMeter:
    """Of one GPU."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self.limit_watts = nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3

    @classmethod
    def of(cls, device: torch.device) -> PowerMeter | None:
        """The meter of a device; None where there is none to read."""
        if device.type != "cuda":
            return None
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return None
        try:
            nvml.nvmlInit()
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
            meter = cls(nvml, handle)
            meter.joules()
            meter.clock_mhz()
        except nvml.NVMLError:  # a partition of a GPU, say, counts no energy
            return None
        return meter

    def joules(self) -> float:
        """Energy since the driver was loaded. The counter moves every tenth of a second or so: differences of shorter
        times mean little."""
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3

    def clock_mhz(self) -> int:
        """The clock of the multiprocessors now."""
        return int(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))

    @contextmanager
    def watch(self) -> Iterator[PowerLog]:
        """Look at the counters again and again, in a thread, until the context ends. Raises then what a look raised."""
        log, done = PowerLog(), threading.Event()
        with ThreadPoolExecutor(1, "power") as pool:
            filled = pool.submit(self._fill, log, done)
            try:
                yield log
            finally:
                done.set()
            filled.result()

    def _fill(self, log: PowerLog, done: threading.Event) -> None:
        while True:
            log.samples.append((time.perf_counter(), self.joules(), self.clock_mhz()))
            if done.wait(LOOK_S):
                return


@dataclass
class PowerLog:
    """What a meter showed: (seconds by `time.perf_counter`, joules, MHz), in order."""

    samples: list[tuple[float, float, int]] = field(default_factory=list)

    @property
    def watts(self) -> float | None:
        """The mean, from the first to the last move of the counter; None if it moved less than twice."""
        moved = [later for earlier, later in pairwise(self.samples) if later[1] > earlier[1]]
        if len(moved) < 2:
            return None
        (start, first, _), (end, last, _) = moved[0], moved[-1]
        return (last - first) / (end - start)

    @property
    def mhz(self) -> float:
        """The mean clock of the multiprocessors; 0 without a sample."""
        return fmean(mhz for _, _, mhz in self.samples) if self.samples else 0.0
