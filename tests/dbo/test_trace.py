from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest
import torch

from dbo.context import note_layer
from dbo.runner import UBatchRunner
from dbo.trace import Span, Tracer, chrome_trace, overlap_share, timeline
from dbo.work import Comm, Finish
from tests.dbo.toy import CPU, both_drivers


def span(lane: Any, t0: float, t1: float, ubatch: int = 0, label: str = "dispatch") -> Span:
    return Span(ubatch=ubatch, layer=0, label=label, lane=lane, t0=t0, t1=t1)


@pytest.mark.parametrize(
    ("compute", "share"),
    [
        ([(0, 10), (20, 30)], 0.0),
        ([(0, 15)], 0.5),
        ([(0, 15), (12, 13), (5, 15)], 0.5),  # what is counted twice counts once
        ([(0, 12), (12, 14), (14, 30)], 1.0),
        ([(11, 12), (13, 14)], 0.2),
        ([], 0.0),
    ],
)
def test_overlap_share_by_interval_union(compute: list[tuple[float, float]], share: float) -> None:
    comm = [span("comm", 10, 18), span("comm", 14, 20), span("comm", 15, 16)]
    assert overlap_share(comm + [span("compute", *times) for times in compute]) == pytest.approx(share)


def test_no_message_no_share() -> None:
    assert overlap_share([span("compute", 0, 1)]) == 0.0
    assert overlap_share([]) == 0.0


def test_timeline_has_two_lanes_to_scale() -> None:
    spans = [span("compute", 0, 50), span("compute", 50, 100, ubatch=1), span("comm", 50, 75), span("comm", 99, 100, 1)]
    compute, comm, scale = timeline(spans, width=20).splitlines()
    assert compute == "compute |0=========1=========|"
    assert comm == "comm    |          d0---    d|"
    assert scale.endswith("|100 us")
    assert timeline([]) == ""


def test_chrome_trace_has_a_process_for_each_rank_and_a_thread_for_each_lane() -> None:
    spans = [span("compute", 0, 5), span("comm", 5, 7.5, ubatch=1)]
    events = json.loads(chrome_trace({0: spans, 3: spans}))["traceEvents"]
    names = {(e["pid"], e.get("tid"), e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert names >= {(3, None, "rank 3"), (3, 0, "compute"), (3, 1, "comm"), (0, 0, "compute")}
    boxes = [e for e in events if e["ph"] == "X"]
    assert len(boxes) == 4
    assert {"pid": 3, "tid": 1, "ts": 5, "dur": 2.5, "name": "dispatch 1", "cat": "comm"}.items() <= boxes[3].items()


@both_drivers
@pytest.mark.parametrize("interleave", [True, False])
def test_a_traced_step(driver: Any, interleave: bool) -> None:
    """Interleaved, the sibling computes while a message is under way; one after another, nobody does."""
    tracer, comm = Tracer(CPU), Comm(CPU)

    def launch(ready: Any) -> Finish[None]:
        return lambda: time.sleep(0.002)

    def fn(k: int) -> None:
        for layer in range(2):
            note_layer(layer)
            time.sleep(0.002)
            comm.start(launch, label="dispatch").result()

    with UBatchRunner(2, device=CPU, driver=driver, tracer=tracer) as runner:
        runner.run(fn, [0, 1], interleave=interleave)
    spans = tracer.spans()
    assert [(s.ubatch, s.layer) for s in spans if s.lane == "comm"] == (
        [(0, 0), (1, 0), (0, 1), (1, 1)] if interleave else [(0, 0), (0, 1), (1, 0), (1, 1)]
    )
    assert {s.label for s in spans if s.lane == "comm"} == {"dispatch"}
    compute = [s for s in spans if s.lane == "compute"]
    assert all(a.t1 <= b.t0 for a, b in pairwise(compute)), "two ubatches ran at once"
    assert spans[0].t0 == 0
    assert tracer.take() == spans
    assert tracer.take() == []


@pytest.mark.gpu
@both_drivers
def test_a_traced_step_on_a_gpu_shows_messages_beside_compute(driver: Any) -> None:
    """Two streams, each held up for a while: the spans come from events, so they show the device and not the host."""
    device = torch.device("cuda")
    tracer, comm = Tracer(device), Comm(device)

    def launch(ready: Any) -> Finish[None]:
        torch.cuda._sleep(4_000_000)
        return lambda: None

    def fn(k: int) -> None:
        for layer in range(3):
            note_layer(layer)
            torch.cuda._sleep(4_000_000)
            comm.start(launch, label="dispatch").result()

    shares = {}
    with UBatchRunner(2, device=device, driver=driver, tracer=tracer) as runner:
        runner.run(fn, [0, 1])
        tracer.take()
        for interleave in (True, False):
            runner.run(fn, [0, 1], interleave=interleave)
            spans = tracer.take()
            assert len([s for s in spans if s.lane == "comm"]) == 6
            shares[interleave] = overlap_share(spans)
    assert shares[True] > 0.5
    assert shares[False] < 0.1
