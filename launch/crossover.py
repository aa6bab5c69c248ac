"""The same comparison at several sizes: from how many tokens a rank on does overlap pay?

Its own file because a sweep is made of finished reports: it only puts their ratios in order, and interpolates.
Invariant: a size speaks for an arm only as its own report does (gate passed, the arm split, the interval leaves out 1).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launch.html import sweep_page
from launch.report import ABReport, text_table
from launch.statistics import Interval

SWEPT = ("prefill", "decode")
"""The phases whose steps have a size."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One size: an arm against whole. `speed` is None where nothing can be said, for the reason in `verdict`."""

    tokens: float  # of a rank in a step of the phase, the median
    speed: Interval | None
    verdict: str
    workload: str


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Reports of the same arms, options and machine, one for each size of the workload."""

    reports: Sequence[ABReport]

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms that are compared with whole."""
        return tuple(name for name in self.reports[0].arms if name != "whole")

    @property
    def phases(self) -> list[str]:
        """The phases whose steps differ in size between the reports; all that ran if none does."""
        ran = [phase for phase in SWEPT if self.points(phase)]
        return [phase for phase in ran if len({point.tokens for point in self.points(phase)}) > 1] or ran

    def points(self, phase: str, arm: str = "overlap") -> list[Point]:
        """The sizes at which `phase` ran, ascending."""
        found = [
            Point(
                tokens=report.arms["whole"].step_tokens(phase),
                speed=report.ratios().get((arm, "whole", phase)),
                verdict=report.verdict(phase, arm),
                workload=report.workload,
            )
            for report in self.reports
            if report.arms["whole"].step_tokens(phase) > 0
        ]
        return sorted(found, key=lambda point: point.tokens)

    def curves(self, phase: str) -> Mapping[str, list[Point]]:
        """The points of every arm that has some with a speed."""
        curves = {arm: [point for point in self.points(phase, arm) if point.speed] for arm in self.arms}
        return {arm: points for arm, points in curves.items() if points}

    def verdict(self, phase: str) -> str:
        """One sentence: from which size on overlap pays."""
        points = [point for point in self.points(phase) if point.speed is not None]
        if not points:
            return f"{phase}: no speed-up is stated at any size"
        where = {word: _listed(points, word) for word in ("faster", "slower", "not shown to differ")}
        said = "; ".join(f"{word} at {sizes}" for word, sizes in where.items() if sizes)
        crossing = crossover([(point.tokens, point.speed.value) for point in points if point.speed is not None])
        at = "" if crossing is None else f"; the ratio crosses 1 at about {crossing:.0f}"
        return f"{phase}: overlap is {said} tokens a rank and step{at}"

    def verdicts(self) -> list[str]:
        """A verdict for each phase that was swept."""
        return [self.verdict(phase) for phase in self.phases]

    def rows(self, phase: str) -> list[Sequence[str]]:
        """The table of a phase; the first row names the columns."""
        rows: list[Sequence[str]] = [("tokens a rank", *(f"{arm} / whole" for arm in self.arms), "workload")]
        for of_size in zip(*(self.points(phase, arm) for arm in self.arms), strict=True):
            rows.append((f"{of_size[0].tokens:.0f}", *(_speed(point) for point in of_size), of_size[0].workload))
        return rows

    def text(self) -> str:
        """The tables for a terminal."""
        lines: list[str] = []
        for phase in self.phases:
            lines += [f"{phase} steps", *text_table(self.rows(phase)), ""]
        failed = [report for report in self.reports if not report.gate.passed]
        lines += [
            f"equality gate {report.gate.describe()} ({report.workload})" for report in failed or self.reports[:1]
        ]
        return "\n".join([*lines, *self.reports[0].notes, *self.verdicts()])

    def to_json(self) -> dict[str, Any]:
        """Plain data; documented in docs/ab.md."""
        return {
            "verdict": {phase: self.verdict(phase) for phase in SWEPT},
            "crossover": {
                phase: {
                    arm: {
                        "tokens": crossover([(p.tokens, p.speed.value) for p in points if p.speed is not None]),
                        "points": [asdict(point) for point in points],
                    }
                    for arm, points in ((arm, self.points(phase, arm)) for arm in self.arms)
                }
                for phase in SWEPT
            },
            "sizes": [report.to_json() for report in self.reports],
        }

    def write(self, directory: Path) -> Path:
        """Write `ab.json` and `report.html` into `directory`, and each size's own report into `1`, `2`, ... below it;
        returns it."""
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n"
        (directory / "ab.json").write_text(text, encoding="utf-8")
        (directory / "report.html").write_text(sweep_page(self), encoding="utf-8")
        for number, report in enumerate(self.reports, start=1):
            report.write(directory / str(number))
        return directory


def crossover(points: Sequence[tuple[float, float]]) -> float | None:
    """Where a curve of (tokens, ratio), ascending in tokens, last rises through 1, on logarithmic axes; None if it
    does not."""
    crossing = None
    for (t0, r0), (t1, r1) in itertools.pairwise(points):
        if r0 < 1.0 <= r1 and t0 < t1:
            part = math.log(r0) / (math.log(r0) - math.log(r1))
            crossing = t0 * (t1 / t0) ** part
    return crossing


def _listed(points: Sequence[Point], word: str) -> str:
    return ", ".join(f"{point.tokens:.0f}" for point in points if point.speed and _word(point.speed) == word)


def _word(speed: Interval) -> str:
    if speed.includes(1.0):
        return "not shown to differ"
    return "faster" if speed.value > 1.0 else "slower"


def _speed(point: Point) -> str:
    speed = point.speed
    return "-" if speed is None else f"{speed.value:.2f}x [{speed.low:.2f}, {speed.high:.2f}]"
