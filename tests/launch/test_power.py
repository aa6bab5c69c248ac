"""The power meter, with a made-up NVML: there is no GPU here."""

import sys
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch

from launch.power import LOOK_S, PowerLog, PowerMeter


class NVMLError(Exception):
    pass


def made_up(uuid: str, *, counts: bool = True) -> ModuleType:
    """One GPU of that name, which takes 12.5 J before each look at it."""
    taken = {uuid: 0}

    def energy(handle: str) -> int:
        if not counts:
            raise NVMLError("not supported")
        taken[handle] += 12_500
        return taken[handle]

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
    before = meter.joules()
    assert (meter.joules() - before, meter.limit_watts, meter.clock_mhz()) == (12.5, 700.0, 1605)


def test_a_watch_looks_until_it_ends(monkeypatch: pytest.MonkeyPatch, gpu: torch.device) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", made_up("GPU-ab-12"))
    meter = PowerMeter.of(gpu)
    assert meter is not None
    with meter.watch() as log:
        deadline = time.monotonic() + 10
        while len(log.samples) < 4 and time.monotonic() < deadline:
            time.sleep(LOOK_S)
    seen = len(log.samples)
    time.sleep(5 * LOOK_S)
    assert log.mhz == 1605
    assert log.watts is not None
    assert 0 < log.watts <= 12.5 / 0.01
    assert len(log.samples) == seen


def test_a_watch_raises_what_a_look_raised(monkeypatch: pytest.MonkeyPatch, gpu: torch.device) -> None:
    nvml = made_up("GPU-ab-12")
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    meter = PowerMeter.of(gpu)
    assert meter is not None
    monkeypatch.setattr(nvml, "nvmlDeviceGetClockInfo", lambda handle, kind: {}[kind])
    with pytest.raises(KeyError), meter.watch():
        pass


def test_watts_are_counted_between_moves_of_the_counter() -> None:
    # 100 J every 0.2 s, seen late; before the first and after the last move nothing is known.
    times = [k * 0.03 for k in range(40)]
    log = PowerLog([(t, 100.0 * int(t / 0.2), 1500 + k) for k, t in enumerate(times)])
    assert log.watts == pytest.approx(500, rel=0.05)
    assert log.mhz == 1519.5
    assert PowerLog([(0.0, 1.0, 0), (0.1, 2.0, 0)]).watts is None
    assert (PowerLog().watts, PowerLog().mhz) == (None, 0.0)


@pytest.mark.parametrize("nvml", [None, made_up("GPU-other"), made_up("GPU-ab-12", counts=False)])
def test_there_is_no_meter_where_nothing_counts(
    monkeypatch: pytest.MonkeyPatch, gpu: torch.device, nvml: ModuleType | None
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert PowerMeter.of(gpu) is None
    assert PowerMeter.of(torch.device("cpu")) is None
