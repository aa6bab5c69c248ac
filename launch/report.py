"""What an A/B measured, as data, as a text table and as JSON.

A file of its own so that the numbers and the sentences about them are made in one place, apart from the runs.
Invariant: `verdict` never names a speed-up unless the equality gate passed, some step split, and the interval
excludes 1.
"""

import dataclasses
import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dbo.errors import ConfigError
from launch.ceiling import Form, StepBreakdown
from launch.html import page
from launch.power import AT_LIMIT
from launch.statistics import MIN_ROUNDS, Interval, Summary, drift, speedup, summarise
from launch.timeline import StepTimeline, perfetto_trace

PHASES = ("prefill", "decode", "total")
LATENCIES = ("ttft", "itl")
PAIRS = (("overlap", "whole"), ("split", "whole"), ("overlap", "split"), ("auto", "whole"), ("auto", "overlap"))
"""Which arm is compared with which."""


@dataclass(frozen=True, kw_only=True)
class RoundTimes:
    """One arm's times in one round, in ms: the sum over prefill steps, the sum over decode steps, and both; the median
    over its requests of the time to the first token and of that between tokens, 0 where there is none."""

    prefill: float
    decode: float
    ttft: float = 0.0
    itl: float = 0.0

    @property
    def total(self) -> float:
        """All steps of the round, in ms."""
        return self.prefill + self.decode


@dataclass(frozen=True, kw_only=True)
class Latencies:
    """Single samples of one arm over all rounds, in ms."""

    prefill_step: tuple[float, ...] = ()  # steps with prefill in them, by rank 0's clock
    decode_step: tuple[float, ...] = ()
    ttft: tuple[float, ...] = ()  # from a request's arrival to its first token; requests of all ranks
    itl: tuple[float, ...] = ()  # from a request's first token to its last, over the tokens after the first

    def summaries(self) -> dict[str, Summary]:
        """A summary of everything that has samples, by name."""
        samples = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: summarise(values) for name, values in samples.items() if values}


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """Everything one arm did over all rounds."""

    name: str
    rounds: tuple[RoundTimes, ...]
    prefill_steps: int  # per round
    decode_steps: int
    split_prefill_steps: int
    split_decode_steps: int
    num_tokens: int  # real tokens that went through the model, per round, all ranks
    num_rows: int  # rows that did, real or padding
    new_tokens: int
    reasons: Counter[str]
    positions: tuple[int, ...] = ()  # the arm's place in the order of each round, from 0
    latencies: Latencies = field(default_factory=Latencies)
    wait_share: float | None = None  # of all ranks' step time, the host standing still for messages; None: not known
    prefill_step_tokens: float = 0.0  # median tokens a rank and step
    decode_step_tokens: float = 0.0
    messages: float | None = None  # that all ranks sent to each other in a round; None: the transport does not know
    sent_bytes: float | None = None
    joules: float | None = None  # that all GPUs took in a round; None: nobody counts
    watts: float | None = None  # of a GPU, the mean
    limit_watts: float | None = None  # the most it may draw

    def times(self, phase: str) -> list[float]:
        """The arm's samples of `phase` in ms, a round each."""
        return [getattr(times, phase) for times in self.rounds]

    def relative(self, number: int) -> float:
        """The total of a round over the arm's median of all rounds."""
        return self.rounds[number].total / summarise(self.times("total")).median

    @property
    def padding_share(self) -> float:
        """The part of all computed rows that is padding."""
        return 1.0 - self.num_tokens / self.num_rows if self.num_rows else 0.0

    def splits(self, phase: str) -> int:
        """Steps of `phase` in one round that ran as ubatches."""
        known = {"prefill": self.split_prefill_steps, "decode": self.split_decode_steps}
        return known.get(phase, self.split_steps)

    def step_tokens(self, phase: str) -> float:
        """Tokens of a rank in a step of `phase`, the median."""
        return self.prefill_step_tokens if phase == "prefill" else self.decode_step_tokens

    @property
    def split_steps(self) -> int:
        """Steps of one round that ran as ubatches."""
        return self.split_prefill_steps + self.split_decode_steps


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Whether the arms computed the same thing, from one run of each with the same forced tokens."""

    split_equals_overlap: bool  # bitwise, every logit of every sampled row on every rank
    max_relative_difference: float  # whole against any other arm, over the largest logit
    tolerance: float
    tokens_equal: bool  # the greedy tokens of whole and of any other arm, near-ties aside

    @property
    def passed(self) -> bool:
        """All three conditions."""
        return self.split_equals_overlap and self.tokens_equal and self.max_relative_difference <= self.tolerance

    def describe(self) -> str:
        """The gate in one line."""
        bits = "bitwise equal" if self.split_equals_overlap else "DIFFER"
        tokens = "same" if self.tokens_equal else "DIFFERENT"
        return (
            f"{'passed' if self.passed else 'FAILED'}: split and overlap {bits}; whole within "
            f"{self.max_relative_difference:.1e} of them (allowed {self.tolerance:.0e}); greedy tokens {tokens}"
        )


@dataclass(frozen=True, kw_only=True)
class ABReport:
    """The result of `launch ab`: arms, gate, what ran where."""

    command: str
    workload: str
    environment: dict[str, str]
    options: dict[str, str]
    arms: dict[str, ArmResult]
    gate: Gate
    timelines: Mapping[str, StepTimeline] = field(default_factory=dict)  # of one step, by arm
    breakdowns: Sequence[StepBreakdown] = ()  # one step of each phase, taken apart
    breakdown_note: str = ""  # why there are none
    notes: Sequence[str] = ()  # what a reader must know of this run
    paced: bool = False  # requests arrived by the clock

    @property
    def measures(self) -> tuple[str, ...]:
        """What arms are compared by: latencies only where requests arrive by the clock, else they tell of the queue."""
        return (*PHASES, *LATENCIES) if self.paced else PHASES

    def compare(self, baseline: str, other: str, phase: str) -> Interval | None:
        """How many times faster `other` ran `phase` than `baseline`; None when an arm or the phase did not run."""
        if baseline not in self.arms or other not in self.arms:
            return None
        before, after = self.arms[baseline].times(phase), self.arms[other].times(phase)
        if len(before) < MIN_ROUNDS or min(before) <= 0.0 or min(after) <= 0.0:
            return None
        return speedup(before, after)

    @property
    def headline(self) -> str:
        """The verdict that matters most: on the time to the first token where requests arrive by the clock."""
        return self.verdict("ttft") if self.paced else self.verdict().removeprefix("total: ")

    def verdict(self, phase: str = "total", name: str = "overlap") -> str:
        """One sentence: what an arm did to `phase`, or why nothing can be said."""
        said = self._verdict(phase, name)
        return f"{phase.upper() if phase in LATENCIES else phase}: {said}"

    def _verdict(self, phase: str, name: str) -> str:
        if not self.gate.passed:
            return "no speed-up is stated: the equality gate failed"
        arm = self.arms.get(name)
        if arm is None:
            return f"no speed-up is stated: the {name} arm did not run"
        if not _may_differ(arm, phase):
            return f"no speed-up is stated: no step split ({_top_reason(arm.reasons)})"
        ratio = self.compare("whole", name, phase)
        if ratio is None:
            return f"no speed-up is stated: fewer than {MIN_ROUNDS} rounds of both arms"
        if ratio.includes(1.0):
            return f"no difference shown ({name} / whole speed {ratio.low:.2f}x to {ratio.high:.2f}x)"
        word = "faster" if ratio.value > 1.0 else "slower"
        factor = ratio if ratio.value > 1.0 else Interval(value=1 / ratio.value, low=1 / ratio.high, high=1 / ratio.low)
        interval = f"95% interval {factor.low:.2f}x to {factor.high:.2f}x"
        return f"{name} is {factor.value:.2f}x {word} than whole ({interval})"

    def order_effect(self) -> Interval | None:
        """How many times longer whatever ran last in a round took than what ran first, each over its arm's median."""
        arms, numbers = list(self.arms.values()), range(self.num_rounds)
        known = all(arm.positions and min(arm.times("total")) > 0 for arm in arms)
        if len(arms) < 2 or len(numbers) < MIN_ROUNDS or not known:
            return None
        first = [next(arm.relative(n) for arm in arms if arm.positions[n] == 0) for n in numbers]
        last = [next(arm.relative(n) for arm in arms if arm.positions[n] == len(arms) - 1) for n in numbers]
        return speedup(last, first)

    def drift(self) -> Interval | None:
        """How many times longer the last round took than the first, whatever the arm."""
        arms = list(self.arms.values())
        if self.num_rounds < MIN_ROUNDS or not all(min(arm.times("total")) > 0 for arm in arms):
            return None
        return drift([summarise([arm.relative(n) for arm in arms]).median for n in range(self.num_rounds)])

    def stability(self) -> list[str]:
        """Sentences on what the machine did to the times: the place in a round, and the rounds over time."""
        effects = {
            "order within a round: the last arm took {} the time of the first": self.order_effect(),
            "drift: the last round took {} the time of the first": self.drift(),
        }
        return [
            f"{words.format(f'{effect.value:.2f}x')} (95% interval {effect.low:.2f}x to {effect.high:.2f}x)"
            for words, effect in effects.items()
            if effect is not None
        ]

    def overlaps(self) -> list[str]:
        """A sentence on the step that was traced, if one was."""
        if not self.timelines:
            return []
        step = next(iter(self.timelines.values()))
        shares = ", ".join(f"{name} {timeline.overlap_share:.0%}" for name, timeline in self.timelines.items())
        return [
            f"messages hidden behind compute, in one traced {step.phase} step of {step.num_tokens} tokens: {shares}"
        ]

    def breakdown_rows(self) -> list[Sequence[str]]:
        """The table of steps that were taken apart; the first row names the columns. No row where there is none."""
        return (
            [_BREAKDOWN_COLUMNS, *(_breakdown_row(step, self.gate.passed) for step in self.breakdowns)]
            if self.breakdowns
            else []
        )

    def breakdown_notes(self) -> list[str]:
        """Sentences on the device's work, and on what was not measured."""
        if self.breakdown_note:
            return [f"communication and its ceiling were not measured: {self.breakdown_note}"]
        on_device = [
            f"{form} busy {step.busy_share(form) or 0:.0%} of a {step.phase} step, {work.launches} launches"
            for step in self.breakdowns
            for form, work in step.device.items()
        ]
        if on_device:
            return [f"GPU: {'; '.join(on_device)}"]
        return ["GPU-busy share and launches per step: not measured, CUDA only"] if self.breakdowns else []

    def power_notes(self) -> list[str]:
        """A sentence on what the GPUs drew, if that is known."""
        known = [arm for arm in self.arms.values() if arm.watts and arm.limit_watts and arm.joules and arm.num_tokens]
        if not known:
            return []
        limit = known[0].limit_watts or 0.0
        drew = ", ".join(
            f"{arm.name} {arm.watts:.0f} W and {(arm.joules or 0.0) / arm.num_tokens * 1e3:.2f} mJ a token"
            for arm in known
        )
        said = [f"power of a GPU, of {limit:.0f} W at most: {drew}"]
        limited = [arm.name for arm in known if (arm.watts or 0.0) >= AT_LIMIT * limit]
        if limited:
            said.append(f"at that limit a GPU lowers its clock, for kernels and messages alike: {', '.join(limited)}")
        return said

    def reason_lines(self) -> list[str]:
        """Why steps ran as they did, a sentence for each arm that may split."""
        return [
            f"steps of {name}: {', '.join(f'{count} {reason}' for reason, count in arm.reasons.most_common())}"
            for name, arm in self.arms.items()
            if name != "whole"
        ]

    def rows(self) -> list[Sequence[str]]:
        """The table of what each arm did in a round; the first row names the columns."""
        return [_COLUMNS, *(_row(arm) for arm in self.arms.values())]

    def latency_rows(self) -> list[Sequence[str]]:
        """The table of percentiles of steps and requests; the first row names the columns."""
        columns = ("arm", *_LATENCY_COLUMNS.values(), "waiting")
        return [columns, *(_latency_row(arm) for arm in self.arms.values())]

    def phase_verdicts(self) -> list[str]:
        """A verdict for each measure that there is, on overlap and on auto if it ran."""
        names = [name for name in ("overlap", "auto") if name == "overlap" or name in self.arms]
        ran = [phase for phase in self.measures if any(min(arm.times(phase)) > 0 for arm in self.arms.values())]
        return [self.verdict(phase, name) for name in names for phase in ran]

    def ratios(self) -> dict[tuple[str, str, str], Interval]:
        """All comparisons that can be made, by (arm, baseline, phase): where the gate passed and the arm split."""
        found = {
            (other, baseline, phase): self.compare(baseline, other, phase)
            for other, baseline in PAIRS
            for phase in self.measures
            if self.gate.passed and other in self.arms and _may_differ(self.arms[other], phase)
        }
        return {key: ratio for key, ratio in found.items() if ratio is not None}

    def step_samples(self) -> dict[str, dict[str, Sequence[float]]]:
        """The times in ms of all steps of a phase, by phase and arm, where every arm has some."""
        phases = {
            "prefill": {name: arm.latencies.prefill_step for name, arm in self.arms.items()},
            "decode": {name: arm.latencies.decode_step for name, arm in self.arms.items()},
        }
        return {phase: dict(samples) for phase, samples in phases.items() if all(samples.values())}

    def text(self) -> str:
        """The table for a terminal."""
        lines = text_table(self.rows())
        lines += [
            f"median [smallest .. largest] over {self.num_rounds} rounds; tokens/s counts prompt and new tokens",
            "",
        ]
        lines += text_table(self.latency_rows())
        lines += ["p50 / p90 / p99 of all rounds; waiting: the host standing still for messages, of all step time", ""]
        if self.breakdowns:
            lines += text_table(self.breakdown_rows())
            lines += ["one step in ms, medians of the slowest rank; in brackets: of ubatches, one after another", ""]
        lines += self.breakdown_notes()
        lines += self.power_notes()
        lines += self.overlaps()
        lines += self.reason_lines()
        lines += self.stability()
        lines += self.notes
        lines += [f"equality gate {self.gate.describe()}"]
        lines += self.phase_verdicts()
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON data; documented in docs/ab.md."""
        known = self.ratios()
        ratios = {
            f"{other}_over_{baseline}": {phase: _plain(known.get((other, baseline, phase))) for phase in self.measures}
            for other, baseline in PAIRS
            if baseline in self.arms and other in self.arms
        }
        return {
            "verdict": {phase: self.verdict(phase) for phase in self.measures},
            "speedup": ratios,
            "gate": {
                **dataclasses.asdict(self.gate),
                "max_relative_difference": _finite(self.gate.max_relative_difference),
                "passed": self.gate.passed,
            },
            "arms": {name: _arm_json(arm) for name, arm in self.arms.items()},
            "breakdown": [step.to_json() for step in self.breakdowns],
            "breakdown_note": self.breakdown_note,
            "timeline": {name: timeline.to_json() for name, timeline in self.timelines.items()},
            "order": _plain(self.order_effect()),
            "drift": _plain(self.drift()),
            "notes": list(self.notes),
            "paced": self.paced,
            "workload": self.workload,
            "options": self.options,
            "environment": self.environment,
            "command": self.command,
        }

    def write(self, directory: Path) -> Path:
        """Write `ab.json`, `report.html` and, if a step was traced, `trace.json` into `directory`; returns it."""
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n"
        (directory / "ab.json").write_text(text, encoding="utf-8")
        (directory / "report.html").write_text(page(self), encoding="utf-8")
        if self.timelines:
            (directory / "trace.json").write_text(perfetto_trace(self.timelines), encoding="utf-8")
        return directory

    @property
    def num_rounds(self) -> int:
        """Measured rounds."""
        return len(next(iter(self.arms.values())).rounds)


def check_directory(directory: Path) -> None:
    """Make the directory of a report, before the hours of measuring. Raises ConfigError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError("--report", str(directory), "a directory that can be written", str(error.strerror)) from None


_COLUMNS = ("arm", "prefill ms", "decode ms/step", "tokens/s", "split steps", "padding", "messages", "MB sent")


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell, the first one to the left; a rule below the first row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "   ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def _row(arm: ArmResult) -> Sequence[str]:
    decode = [ms / max(arm.decode_steps, 1) for ms in arm.times("decode")]
    rate = arm.num_tokens / (summarise(arm.times("total")).median / 1e3)
    splits = f"{arm.split_steps}/{arm.prefill_steps + arm.decode_steps}"
    sent = "-" if arm.messages is None else f"{arm.messages:.0f}", _megabytes(arm.sent_bytes)
    padding = f"{arm.padding_share:.1%}"
    return arm.name, _spread(arm.times("prefill")), _spread(decode), f"{rate:.0f}", splits, padding, *sent


_BREAKDOWN_COLUMNS = (
    "one step",
    "whole / split / overlap",
    "compute alone",
    "messages alone",
    "comm. share",
    "ceiling",
    "efficiency",
)


def _breakdown_row(step: StepBreakdown, gate_passed: bool) -> Sequence[str]:
    """Of the whole batch, in brackets of ubatches; no figure that speaks of a gain unless the gate passed."""

    def alone(form: Form, split: Form) -> str:
        return _bracketed(step.ms(form), step.ms(split), _ms)

    gained = (step.efficiency, step.split_efficiency) if gate_passed else (None, None)
    return (
        f"{step.phase}, {step.num_tokens} tokens",
        " / ".join(_ms(step.ms(form)) for form in _WHOLE_FORMS),
        alone("compute", "split_compute"),
        alone("messages", "split_messages"),
        _share(step.communication_share),
        _bracketed(step.ceiling, step.split_ceiling, _factor),
        _bracketed(*gained, _gain),
    )


_WHOLE_FORMS: tuple[Form, ...] = ("whole", "split", "overlap")


def _bracketed(value: float | None, split: float | None, show: Callable[[float | None], str]) -> str:
    return show(value) if split is None else f"{show(value)} ({show(split)})"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _gain(value: float | None) -> str:
    return "loses" if value is not None and value < 0 else _share(value)


def _factor(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _megabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:.1f}"


def _may_differ(arm: ArmResult, phase: str) -> bool:
    """Whether a ratio says anything of the arm: it split, or was free to decide."""
    return arm.splits(phase) > 0 or arm.name == "auto"


_LATENCY_COLUMNS = {
    "prefill_step": "prefill step ms",
    "decode_step": "decode step ms",
    "ttft": "TTFT ms",
    "itl": "ITL ms",
}


def _latency_row(arm: ArmResult) -> Sequence[str]:
    found = arm.latencies.summaries()
    cells = (_percentiles(found.get(name)) for name in _LATENCY_COLUMNS)
    return arm.name, *cells, "-" if arm.wait_share is None else f"{arm.wait_share:.1%}"


def _percentiles(summary: Summary | None) -> str:
    return "-" if summary is None else f"{summary.median:.1f} / {summary.p90:.1f} / {summary.p99:.1f}"


def _spread(samples: Sequence[float]) -> str:
    summary: Summary = summarise(samples)
    if summary.high == 0.0:
        return "-"
    return f"{summary.median:.1f} [{summary.low:.1f} .. {summary.high:.1f}]"


def _arm_json(arm: ArmResult) -> dict[str, Any]:
    return {
        "prefill_ms": {
            **dataclasses.asdict(summarise(arm.times("prefill"))),
            "samples": arm.times("prefill"),
        },
        "decode_ms": {**dataclasses.asdict(summarise(arm.times("decode"))), "samples": arm.times("decode")},
        "total_ms": {**dataclasses.asdict(summarise(arm.times("total"))), "samples": arm.times("total")},
        "steps": {"prefill": arm.prefill_steps, "decode": arm.decode_steps},
        "split_steps": {"prefill": arm.split_prefill_steps, "decode": arm.split_decode_steps},
        "latency_ms": {name: dataclasses.asdict(found) for name, found in arm.latencies.summaries().items()},
        "wait_share": arm.wait_share,
        "padding_share": arm.padding_share,
        "messages": arm.messages,
        "sent_bytes": arm.sent_bytes,
        "joules": arm.joules,
        "watts": arm.watts,
        "limit_watts": arm.limit_watts,
        "tokens_per_rank_and_step": {"prefill": arm.prefill_step_tokens, "decode": arm.decode_step_tokens},
        "positions": list(arm.positions),
        "tokens": {"computed": arm.num_tokens, "new": arm.new_tokens, "rows": arm.num_rows},
        "reasons": dict(arm.reasons),
    }


def _finite(value: float) -> float | None:
    """`value`, or None for what JSON has no number for."""
    return value if math.isfinite(value) else None


def _plain(interval: Interval | None) -> dict[str, float] | None:
    return None if interval is None else dataclasses.asdict(interval)


def _top_reason(reasons: Counter[str]) -> str:
    return reasons.most_common(1)[0][0] if reasons else "no steps ran"
