"""A step taken apart: what its figures come to, which steps are chosen, and what is too large to record."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from launch.ceiling import DeviceWork, StepBreakdown, device_work, join_breakdowns, steps_to_measure, why_too_large
from tests.launch.test_timeline import record


def breakdown(**ms: float) -> StepBreakdown:
    return StepBreakdown(
        phase="prefill", num_tokens=64, num_ubatches=2, times={form: [0.9 * t, t, 1.2 * t] for form, t in ms.items()}
    )


def test_figures_of_a_step():
    step = breakdown(whole=100, split=110, overlap=75, compute=60, split_compute=70, messages=50, split_messages=55)
    assert step.communication_share == pytest.approx(0.4)
    assert step.ceiling == pytest.approx(100 / 60)
    assert step.efficiency == pytest.approx(25 / 40)
    assert step.split_ceiling == pytest.approx(100 / 70)
    assert step.split_efficiency == pytest.approx(25 / 30)


@pytest.mark.parametrize(("compute", "messages"), [(40, 80), (80, 40)])
def test_the_longer_of_the_two_is_the_ceiling(compute, messages):
    step = breakdown(whole=120, overlap=80, compute=compute, messages=messages)
    assert step.ceiling == pytest.approx(1.5)
    assert step.efficiency == pytest.approx(1.0)
    assert (step.split_ceiling, step.split_efficiency) == (None, None)


def test_overlap_that_loses_has_a_negative_efficiency():
    assert breakdown(whole=100, overlap=110, compute=80, messages=50).efficiency == pytest.approx(-0.5)


@pytest.mark.parametrize("compute", [99, 101])
def test_no_efficiency_where_there_is_nothing_to_gain(compute):
    step = breakdown(whole=100, overlap=90, compute=compute, messages=1)
    assert step.efficiency is None
    assert 0 <= step.communication_share < 0.011


def test_a_step_that_did_not_split_has_a_ceiling_only():
    data = breakdown(whole=100, compute=50, messages=40).to_json()
    assert (data["ceiling"], data["efficiency"], data["split_ceiling"]) == (2.0, None, None)
    assert data["ms"] == {"whole": 100, "compute": 50, "messages": 40}


def test_the_slowest_rank_counts_and_rank_0_tells_of_its_device():
    parts = [
        {"phase": "decode", "num_tokens": 8, "num_ubatches": 1, "times": {"whole": times}, "device": device}
        for times, device in (
            ([1.0, 5.0], {"whole": {"busy_ms": 2.0, "span_ms": 4.0, "launches": 7}}),
            ([3.0, 4.0], {}),
        )
    ]
    step = join_breakdowns(parts)
    assert list(step.times["whole"]) == [3.0, 5.0]
    assert step.device == {"whole": DeviceWork(busy_ms=2.0, span_ms=4.0, launches=7)}
    assert step.busy_share("whole") == pytest.approx(0.5)
    assert step.busy_share("overlap") is None


def test_work_at_the_same_time_is_busy_once():
    assert device_work(iter([(0.0, 10.0), (5.0, 20.0), (30.0, 31.0)])) == {
        "busy_ms": 0.021,
        "span_ms": 0.031,
        "launches": 3,
    }
    assert device_work(iter([])) == {"busy_ms": 0.0, "span_ms": 0.0, "launches": 0}


def test_the_largest_split_step_of_each_phase_is_taken_apart():
    prefill = [record(900, 1), record(300, 2), record(500, 2)]
    decode = [SimpleNamespace(phase="decode", num_ubatches=1, num_tokens_of_all=n) for n in (4, 8, 8)]
    assert steps_to_measure([*prefill, *decode]) == {2: "prefill", 4: "decode"}
    assert steps_to_measure(decode) == {1: "decode"}
    assert steps_to_measure([]) == {}


def test_what_does_not_fit_into_memory_is_not_recorded():
    config = SimpleNamespace(num_layers=48, hidden=2048, dtype=torch.bfloat16)
    engine = SimpleNamespace(model=SimpleNamespace(config=config), mesh=SimpleNamespace(device=torch.device("cpu")))
    assert why_too_large(engine, [record(64, 2)], [0]) is None
    assert "GiB are free" in why_too_large(engine, [record(10**9, 2)], [0])
