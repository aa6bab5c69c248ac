"""What a GPU draws, by its own counters.

Its own file because it alone knows NVML. A GPU that draws the most it may lowers its clock, and every kernel takes
longer then, messages too. Overlap leaves a GPU no rest, so it gets there first: where whole steps are near the limit,
hiding messages gains less than their length.

Needs the package `nvidia-ml-py`; without it, or without a GPU, nothing is known of power.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

AT_LIMIT = 0.95
"""From this share of the limit on a GPU lowers its clock, in the mean over a second or more."""


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
        except nvml.NVMLError:  # a partition of a GPU, say, counts no energy
            return None
        return meter

    def joules(self) -> float:
        """Energy since the driver was loaded; the counter moves every tenth of a second or so."""
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3

    def clock_mhz(self) -> int:
        """The clock of the multiprocessors now."""
        return int(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))
