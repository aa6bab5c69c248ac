"""Who ran when in one step of an A/B's arms: recorded, gathered from all ranks, and written for Perfetto.

Its own file because a timeline is an observation of one extra run, apart from the runs that are timed: a traced step
pays for its stamps, and so it is never one of those that count.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from dbo.agreement import BatchPlan
from dbo.trace import Span, Tracer, chrome_trace, overlap_share
from launch.engine import StepRecord, Unobserved


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """The spans of one step on every rank, in us since the first one of that rank."""

    phase: str
    num_tokens: int  # of all ranks
    num_ubatches: int
    spans_of_rank: Mapping[int, Sequence[Span]]

    @property
    def duration_us(self) -> float:
        """From the first span to the end of the last one, on the rank where that is longest."""
        return max((span.t1 for spans in self.spans_of_rank.values() for span in spans), default=0.0)

    @property
    def overlap_share(self) -> float:
        """The part of the time with a message under way that also had compute under way; mean over the ranks."""
        return fmean(overlap_share(spans) for spans in self.spans_of_rank.values())

    def to_json(self) -> dict[str, Any]:
        """All but the spans, as plain data."""
        return {
            "phase": self.phase,
            "num_tokens": self.num_tokens,
            "num_ubatches": self.num_ubatches,
            "duration_us": self.duration_us,
            "overlap_share": self.overlap_share,
        }


class StepTracer(Unobserved):
    """Observes a run of a traced engine, and keeps the spans of step `number`."""

    def __init__(self, tracer: Tracer, number: int) -> None:
        self._tracer, self._number, self._count = tracer, number, 0
        self._spans: list[Span] = []
        self._record: StepRecord | None = None

    def stepped(self, record: StepRecord, plan: BatchPlan) -> None:
        """Keep the spans of the step that was asked for, forget those of the others."""
        spans = self._tracer.take()
        if self._count == self._number:
            self._spans, self._record = spans, record
        self._count += 1

    def to_json(self) -> dict[str, Any]:
        """This rank's part of the timeline, to be sent to the others. Raises ValueError if the step did not come."""
        if self._record is None:
            raise ValueError(f"the run ended after {self._count} steps, before step {self._number}")
        return {
            "phase": self._record.phase,
            "num_tokens": self._record.num_tokens_of_all,
            "num_ubatches": self._record.num_ubatches,
            "spans": [dataclasses.asdict(span) for span in self._spans],
        }


def step_to_trace(steps: Sequence[StepRecord]) -> int:
    """The step that shows most: the first with the most tokens among those that split, or among all if none did.

    A pure function of what all ranks know alike.
    """
    return max(range(len(steps)), key=lambda n: (steps[n].num_ubatches > 1, steps[n].num_tokens_of_all, -n))


def join_ranks(parts: Sequence[Mapping[str, Any]]) -> StepTimeline:
    """One timeline from what `StepTracer.to_json` gave on each rank, in order of ranks."""
    return StepTimeline(
        phase=parts[0]["phase"],
        num_tokens=parts[0]["num_tokens"],
        num_ubatches=parts[0]["num_ubatches"],
        spans_of_rank={rank: [Span(**span) for span in part["spans"]] for rank, part in enumerate(parts)},
    )


def perfetto_trace(timelines: Mapping[str, StepTimeline]) -> str:
    """Chrome/Perfetto JSON of all arms: a process for each arm and rank, a thread for each lane."""
    events: list[dict[str, Any]] = []
    for arm, timeline in timelines.items():
        first_pid = 1 + max((event["pid"] for event in events), default=-1)
        events += _moved(json.loads(chrome_trace(timeline.spans_of_rank))["traceEvents"], arm, first_pid)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _moved(events: Iterable[dict[str, Any]], arm: str, first_pid: int) -> list[dict[str, Any]]:
    moved = [{**event, "pid": event["pid"] + first_pid} for event in events]
    for event in moved:
        if event["name"] == "process_name":
            event["args"] = {"name": f"{arm}: {event['args']['name']}"}
    return moved
