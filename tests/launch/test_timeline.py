"""Timelines: which step is traced, that its spans survive the way between ranks, and what Perfetto gets."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from dbo.trace import Span
from launch.engine import StepRecord
from launch.timeline import StepTimeline, StepTracer, join_ranks, perfetto_trace, step_to_trace


def record(num_tokens: int, num_ubatches: int) -> StepRecord:
    return StepRecord(
        phase="prefill",
        num_tokens=num_tokens,
        num_tokens_padded=num_tokens,
        num_tokens_of_all=num_tokens,
        num_rows_of_all=num_tokens,
        num_ubatches=num_ubatches,
        reason="split",
        agree_ms=0.0,
        wait_ms=None,
        wall_ms=1.0,
    )


def span(lane, t0: float, t1: float, ubatch: int = 0) -> Span:
    return Span(ubatch=ubatch, layer=1, label="dispatch", lane=lane, t0=t0, t1=t1)


class FakeTracer:
    def __init__(self, *steps: Sequence[Span]) -> None:
        self.steps = list(steps)

    def take(self):
        return self.steps.pop(0)


def timeline(*parts: Sequence[Span]) -> StepTimeline:
    """One step whose spans came from as many ranks, each sent as JSON."""
    sent = []
    for spans in parts:
        watch = StepTracer(FakeTracer([], spans, []), 1)  # type: ignore[arg-type]
        for tokens in (1, 64, 2):
            watch.stepped(record(tokens, 2), None)  # type: ignore[arg-type]
        sent.append(json.loads(json.dumps(watch.to_json())))
    return join_ranks(sent)


def test_the_largest_split_step_is_traced_or_the_largest_of_all():
    assert step_to_trace([record(9, 1), record(4, 2), record(6, 2), record(6, 2)]) == 2
    assert step_to_trace([record(4, 1), record(6, 1)]) == 1


@pytest.mark.parametrize(("compute", "share"), [((0, 10), 0.0), ((15, 30), 0.5), ((0, 30), 1.0)])
def test_overlap_is_told_of_hand_made_spans(compute, share):
    one_rank = [span("comm", 10, 20), span("compute", *compute, ubatch=1)]
    found = timeline(one_rank, one_rank)
    assert found.spans_of_rank == {0: one_rank, 1: one_rank}
    assert (found.num_tokens, found.num_ubatches, found.phase) == (64, 2, "prefill")
    assert found.overlap_share == share
    assert found.duration_us == max(20, compute[1])


def test_a_step_that_did_not_come_is_an_error():
    with pytest.raises(ValueError, match="before step 3"):
        StepTracer(FakeTracer(), 3).to_json()  # type: ignore[arg-type]


def test_perfetto_gets_a_process_for_each_arm_and_rank_and_a_thread_for_each_lane():
    arms = {name: timeline([span("comm", 1, 2)], [span("compute", 3, 5)]) for name in ("whole", "overlap")}
    events = json.loads(perfetto_trace(arms))["traceEvents"]
    processes = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert list(processes) == ["whole: rank 0", "whole: rank 1", "overlap: rank 0", "overlap: rank 1"]
    assert len(set(processes.values())) == 4
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    spans = [event for event in events if event["ph"] == "X"]
    assert [(e["pid"], threads[e["pid"], e["tid"]], e["ts"], e["dur"]) for e in spans if e["pid"] > 1] == [
        (processes["overlap: rank 0"], "comm", 1, 1),
        (processes["overlap: rank 1"], "compute", 3, 2),
    ]
