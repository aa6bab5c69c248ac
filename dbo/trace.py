"""Who ran when: spans of compute and of messages, as text, as a Chrome/Perfetto trace, and as one overlap share.

A file of its own because it only observes: nothing depends on it but a `stamp()` here and there, and where the tracer
is None those places cost one comparison.

Invariants: a stamp taken on a CUDA stream is an event, read only in `spans()`, after the step; so tracing never makes
the host wait. All times are microseconds since the tracer's first stamp.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

Lane = Literal["compute", "comm"]
LANES: tuple[Lane, Lane] = ("compute", "comm")


@dataclass(frozen=True, kw_only=True)
class Span:
    """One stretch of one lane. A compute span carries the label of the yield point before it; `layer` may be None.

    On the CPU a comm span ends when the host noticed that the message was complete: an upper bound.
    """

    ubatch: int
    layer: int | None
    label: str
    lane: Lane
    t0: float
    t1: float


class Tracer:
    """Collects spans of one rank. On CUDA it records timing events on the current stream (not during a capture)."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device(device)
        self._origin: Any = None
        self._raw: list[tuple[int, int | None, str, Lane, Any, Any]] = []

    def stamp(self) -> Any:
        """Return a mark of now: host nanoseconds, or a timing event on the current CUDA stream."""
        if self._device.type == "cuda":
            mark: Any = torch.cuda.Event(enable_timing=True)
            mark.record(torch.cuda.current_stream(self._device))
        else:
            mark = time.perf_counter_ns()
        if self._origin is None:
            self._origin = mark
        return mark

    def add(self, ubatch: int, layer: int | None, label: str, lane: Lane, start: Any, end: Any) -> None:
        """Add a span between two stamps."""
        self._raw.append((ubatch, layer, label, lane, start, end))

    def spans(self) -> list[Span]:
        """Return all spans so far, sorted by start. On CUDA this waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        found = [
            Span(ubatch=u, layer=layer, label=label, lane=lane, t0=self._us(start), t1=self._us(end))
            for u, layer, label, lane, start, end in self._raw
        ]
        return sorted(found, key=lambda span: (span.t0, span.t1))

    def take(self) -> list[Span]:
        """Return `spans()` and forget them, the origin of time included."""
        spans = self.spans()
        self._raw.clear()
        self._origin = None
        return spans

    def _us(self, mark: Any) -> float:
        if self._device.type == "cuda":
            return float(self._origin.elapsed_time(mark)) * 1e3
        return float(mark - self._origin) / 1e3


def overlap_share(spans: Iterable[Span]) -> float:
    """Return the part of the time with a message under way that also had compute under way: 0.0 to 1.0."""
    spans = list(spans)
    comm, compute = (_union((s.t0, s.t1) for s in spans if s.lane == lane) for lane in ("comm", "compute"))
    total = sum(end - start for start, end in comm)
    both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in comm for c, d in compute)
    return both / total if total > 0 else 0.0


def busy(intervals: Iterable[tuple[float, float]]) -> float:
    """Return how much time is covered by any of the intervals (start, end)."""
    return sum(end - start for start, end in _union(intervals))


def timeline(spans: Sequence[Span], *, width: int = 100) -> str:
    """Draw the two lanes as text, `width` columns of time; a cell is the label's first letter and the ubatch."""
    if not spans:
        return ""
    start, end = min(s.t0 for s in spans), max(s.t1 for s in spans)
    scale = width / max(end - start, 1e-9)
    lines = []
    for lane in LANES:
        row = [" "] * width
        for span in (s for s in spans if s.lane == lane):
            a = min(int((span.t0 - start) * scale), width - 1)
            b = max(a + 1, min(int((span.t1 - start) * scale), width))
            text = f"{span.label[:1] or '.'}{span.ubatch}" if lane == "comm" else f"{span.ubatch}"
            row[a:b] = f"{text:{'-' if lane == 'comm' else '='}<{b - a}}"[: b - a]
        lines.append(f"{lane:<8}|{''.join(row)}|")
    return "\n".join([*lines, f"{'':8}|{end - start:.0f} us"])


def chrome_trace(spans_of_rank: Mapping[int, Sequence[Span]]) -> str:
    """Return Chrome/Perfetto JSON: a process for each rank, a thread for each lane."""
    events: list[dict[str, object]] = []
    for rank, spans in spans_of_rank.items():
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for tid, lane in enumerate(LANES):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": lane}})
        for s in spans:
            name = f"{s.label or 'end'} {s.ubatch}"
            place = {"pid": rank, "tid": LANES.index(s.lane), "ts": s.t0, "dur": s.t1 - s.t0}
            args = {"ubatch": s.ubatch, "layer": s.layer}
            events.append({"ph": "X", "name": name, "cat": s.lane, "args": args, **place})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
