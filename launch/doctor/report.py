"""What all ranks found, as tables for people or as JSON.

Its own file because it is pure: outcomes in, text out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launch.doctor.base import Check, Cohort, Finding, Outcome, ranks_text

Outcomes = Mapping[int, Mapping[str, Outcome]]
_MATRIX_RANKS = 16


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcomes by rank and name of the check, and the findings, each with the name of its check."""

    world_size: int
    cohort: Cohort
    checks: Sequence[Check]
    outcomes: Outcomes
    findings: Sequence[tuple[str, Finding]]

    @property
    def num_failures(self) -> int:
        """Findings that make the exit code 1."""
        return sum(finding.level == "fail" for _, finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain JSON."""
        return {
            "ok": self.num_failures == 0,
            "world_size": self.world_size,
            "device": self.cohort.device,
            "ranks": [
                {
                    "rank": rank,
                    "host": self.cohort.hosts[rank],
                    "checks": {
                        name: {"status": self._status(rank, name), **asdict(outcome)} for name, outcome in made.items()
                    },
                }
                for rank, made in sorted(self.outcomes.items())
            ],
            "findings": [
                {"check": name, **asdict(f), "hosts": [self.cohort.hosts.get(rank) for rank in f.ranks]}
                for name, f in self.findings
            ],
        }

    def lines(self) -> Iterator[str]:
        """A table for each rank, matrices of what pairs measured, the findings with their remedies, a last line."""
        for rank in sorted(self.outcomes):
            yield f"rank {rank} on {self.cohort.hosts[rank]}"
            yield from self._table(rank)
        for check in self.checks:
            yield from self._matrix(check.name)
        for name, finding in self.findings:
            who = "" if not finding.ranks else f"{self._who(finding.ranks)}: "
            yield f"{finding.level.upper()}  {name}: {who}{finding.what}"
            yield f"      {finding.remedy}"
        yield self.last_line()

    def last_line(self) -> str:
        """The verdict."""
        hosts = len(set(self.cohort.hosts.values()))
        where = f"{_count(self.world_size, 'rank')} on {_count(hosts, 'host')}, {self.cohort.device}"
        warnings = len(self.findings) - self.num_failures
        if not self.findings:
            return f"{where}: all fine"
        return f"{where}: {_count(self.num_failures, 'failure')}, {_count(warnings, 'warning')}"

    def _table(self, rank: int) -> Iterator[str]:
        width = max(len(check.name) for check in self.checks)
        for check in self.checks:
            outcome = self.outcomes[rank].get(check.name, Outcome(error="nothing was heard"))
            text = outcome.error if outcome.facts is None else check.show(outcome.facts)
            yield f"  {check.name:{width}}  {self._status(rank, check.name):4}  {text}"

    def _status(self, rank: int, name: str) -> str:
        levels = {finding.level for check, finding in self.findings if check == name and rank in finding.ranks}
        return "fail" if "fail" in levels else "warn" if levels else "ok"

    def _matrix(self, name: str) -> Iterator[str]:
        """Bandwidth and latency from the rank of a row to the rank of a column, for few ranks; all of it is in the
        JSON."""
        cells: dict[tuple[int, int], str] = {}
        for rank, made in self.outcomes.items():
            facts = made[name].facts if name in made else None
            for other, value in ((facts or {}).get("to") or {}).items():
                if isinstance(value, dict) and "gbs" in value:
                    cells[rank, int(other)] = f"{value['gbs']:.3g} ({value['latency_us']:.0f})"
        if not cells or len(self.outcomes) > _MATRIX_RANKS:
            return
        ranks = sorted(self.outcomes)
        width = max(len(cell) for cell in cells.values())
        yield f"{name}, GB/s (latency in us), from row to column"
        yield "  ".join(["    ", *(f"{rank:>{width}}" for rank in ranks)])
        for row in ranks:
            yield "  ".join([f"{row:4}", *(f"{cells.get((row, column), '-'):>{width}}" for column in ranks)])

    def _who(self, ranks: Sequence[int]) -> str:
        hosts = list(dict.fromkeys(self.cohort.hosts.get(rank, "an unknown host") for rank in ranks))
        return f"{ranks_text(ranks)} on {', '.join(hosts[:4])}{', ...' if len(hosts) > 4 else ''}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
