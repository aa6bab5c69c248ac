"""The power meter, with a made-up NVML: there is no GPU here."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from launch.power import PowerMeter


class NVMLError(Exception):
    pass


def made_up(uuid: str, *, counts: bool = True) -> ModuleType:
    """One GPU of that name, which has taken 12.5 J."""

    def energy(handle: str) -> int:
        if not counts:
            raise NVMLError("not supported")
        return {uuid: 12_500}[handle]

    def handle_of(name: str) -> str:
        if name != uuid:
            raise NVMLError("not found")
        return name

    nvml = ModuleType("pynvml")
    nvml.__dict__.update(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=handle_of,
        nvmlDeviceGetEnforcedPowerLimit=lambda handle: 700_000,
        nvmlDeviceGetTotalEnergyConsumption=energy,
        nvmlDeviceGetClockInfo=lambda handle, kind: 1605 if kind == 1 else 0,
    )
    return nvml


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device whose properties can be asked for."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="ab-12"))
    return torch.device("cuda:0")


def test_a_meter_reads_energy_limit_and_clock(monkeypatch: pytest.MonkeyPatch, gpu: torch.device) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", made_up("GPU-ab-12"))
    meter = PowerMeter.of(gpu)
    assert meter is not None
    assert (meter.joules(), meter.limit_watts, meter.clock_mhz()) == (12.5, 700.0, 1605)


@pytest.mark.parametrize("nvml", [None, made_up("GPU-other"), made_up("GPU-ab-12", counts=False)])
def test_there_is_no_meter_where_nothing_counts(
    monkeypatch: pytest.MonkeyPatch, gpu: torch.device, nvml: ModuleType | None
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert PowerMeter.of(gpu) is None
    assert PowerMeter.of(torch.device("cpu")) is None
