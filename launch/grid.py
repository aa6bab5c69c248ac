"""Grids: the same command under every combination of some options, and one report of what came of them.

Its own file because a grid is known by two sides that run at different times: the job file is written from its points,
and the report is made, run by run, from the directories that the runs leave behind:

    GRID/<point>/stdout       the last JSON object is the run's summary (`--json`)
    GRID/<point>/exit_code
    GRID/<point>/output.jsonl of `generate`: answers, compared with those of the first point
    GRID/report.json, report.txt

A point's directory is named by its options (`overlap=on,num-ubatches=4`), so the report needs nothing else.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbo.errors import ConfigError
from launch.files import replace_file

_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
MAX_POINTS = 256


@dataclass(frozen=True)
class Point:
    """One combination: option names without dashes, and values, both safe as words of a shell and names of files."""

    options: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """`overlap=on,num-ubatches=4`."""
        return ",".join(f"{option}={value}" for option, value in self.options)

    @property
    def arguments(self) -> list[str]:
        """`--overlap=on --num-ubatches=4`; `option=true` and `option=false` are a flag that is there or not."""
        return [
            f"--{option}" if value == "true" else f"--{option}={value}"
            for option, value in self.options
            if value != "false"
        ]


def parse_grid(text: str) -> list[Point]:
    """`overlap=off,on;num-ubatches=2,4` -> its four points. Raises ConfigError."""
    axes: list[list[tuple[str, str]]] = []
    for axis in text.split(";"):
        option, equals, values = axis.partition("=")
        option = option.strip().replace("_", "-")
        if not equals or not _OPTION.fullmatch(option):
            raise ConfigError("--grid", text, "OPTION=VALUE,VALUE;OPTION=VALUE,...", "")
        if option in (axis[0][0] for axis in axes):
            raise ConfigError("--grid", text, "every option once", "")
        each = [value.strip() for value in values.split(",")]
        for value in each:
            if not _VALUE.fullmatch(value):
                raise ConfigError(f"--grid {option}", value, "values of letters, digits, . _ + -", "")
        axes.append([(option, value) for value in dict.fromkeys(each)])
    points = [Point(options) for options in itertools.product(*axes)]
    if len(points) > MAX_POINTS:
        raise ConfigError("--grid", text, f"up to {MAX_POINTS} combinations", f"these are {len(points)}")
    return points


def collect(grid: Path) -> str:
    """Write `report.json` and `report.txt` of the runs in `grid` so far; returns the text.

    Several runs may end at once: the lock makes the last report the complete one.
    """
    if not grid.is_dir():
        raise ConfigError("--collect", str(grid), "the directory of a grid", "if all runs ended early, see their logs")
    with (grid / ".lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        runs = [_read_run(directory) for directory in sorted(grid.iterdir()) if directory.is_dir()]
        _compare_answers(grid, runs)
        text = _table(runs)
        replace_file(grid / "report.json", json.dumps(runs, indent=2) + "\n")
        replace_file(grid / "report.txt", text)
    return text


def _read_run(directory: Path) -> dict[str, Any]:
    code = _text(directory / "exit_code").strip()
    return {
        "point": directory.name,
        "exit_code": int(code) if code.isdigit() else None,
        "summary": _last_object(_text(directory / "stdout")),
    }


def _last_object(text: str) -> dict[str, Any] | None:
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                return dict(json.loads(line))
            except ValueError:
                continue
    return None


def _compare_answers(grid: Path, runs: Sequence[dict[str, Any]]) -> None:
    """Note in every run how many of its answers differ from those of the first run that has any."""
    first: Mapping[str, Any] | None = None
    for run in runs:
        answers = _answers(_text(grid / run["point"] / "output.jsonl"))
        if answers:
            first = answers if first is None else first
            run["answers_that_differ"] = sum(answers.get(i) != first.get(i) for i in answers.keys() | first.keys())


def _answers(lines: str) -> dict[str, Any]:
    rows = [json.loads(line) for line in lines.splitlines() if line.endswith("}")]
    return {row["id"]: row["token_ids"] for row in rows}


def _table(runs: Sequence[Mapping[str, Any]]) -> str:
    rows = [["run", "exit", "result"]]
    for run in runs:
        code = run["exit_code"]
        rows.append([run["point"], "not ended" if code is None else str(code), _result(run)])
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "".join(f"{run:<{widths[0]}}  {code:<{widths[1]}}  {result}\n" for run, code, result in rows)


def _result(run: Mapping[str, Any]) -> str:
    summary = run["summary"]
    if summary is None:
        return "no summary"
    if "verdict" in summary:  # of `ab`: its own words, they depend on its gate
        return "; ".join(summary["verdict"].values())
    phases = summary["phases"].values()
    steps, split = (sum(phase[what] for phase in phases) for what in ("steps", "split"))
    differ = run.get("answers_that_differ")
    return f"{summary['output_tokens_per_s']:.1f} new tokens/s, {split} of {steps} steps split, " + (
        "no answers" if differ is None else f"{differ} answers differ from the first run" if differ else "same answers"
    )


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""
