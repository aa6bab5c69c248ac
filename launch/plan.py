"""`plan`: where would overlap pay, on ranks and links that are not here?

Its own file because it is the command: options to predictions, predictions to a table, JSON and a page. The maths is
`launch.predict`'s, the costs are a profile's, measured by `calibrate` or derived by `launch.roofline`.

Intervals are from drawing what is uncertain again and again (seeded, so the output can be compared): costs within
their spread, the link by 10%, latency by 20%, the busiest rank's load by up to 10%, the tax by 20%.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dbo.errors import ConfigError
from launch.config import PlanOptions
from launch.fit import measured_link
from launch.predict import Cluster, Predictor, Shape, parse_link
from launch.profile import PHASES, Phase, Profile, check_out, read_profile, write_profile

DRAWS = 100
LEAST_SPREAD = 0.05  # of compute: no two machines are closer
MOST_RANKS = 1024
USUAL_RANKS = (2, 8, 16, 64, 256)


@dataclass(frozen=True, kw_only=True)
class Range:
    """A prediction, and where 80% of the draws lie."""

    value: float
    low: float
    high: float

    def text(self, digits: int = 2) -> str:
        """`1.23 [1.10 .. 1.40]`."""
        return f"{self.value:.{digits}f} [{self.low:.{digits}f} .. {self.high:.{digits}f}]"


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One step size on one number of ranks."""

    phase: Phase
    ep: int
    num_local_experts: int
    tokens: int  # of a rank
    whole_ms: Range
    overlap_ms: Range
    speedup: Range  # whole over overlap
    whole_tokens_per_s: float  # of one GPU
    overlap_tokens_per_s: float

    @property
    def verdict(self) -> str:
        """Which arm wins, if the draws agree."""
        if self.speedup.low > 1:
            return "overlap"
        return "whole" if self.speedup.high < 1 else "open"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that is printed, written and drawn."""

    source: str
    origin: str
    model: str
    num_ubatches: int
    options: Mapping[str, str]
    predictions: tuple[Prediction, ...]
    crossovers: Mapping[str, float | None]  # "decode, EP 64" -> tokens a rank from which on overlap wins
    self_check: Mapping[str, float] | None  # of a measured profile, against its own overlapped steps
    notes: tuple[str, ...]
    command: str

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        rows = [{**asdict(each), "verdict": each.verdict} for each in self.predictions]
        return {**asdict(self), "predictions": rows}

    def rows(self) -> list[list[str]]:
        """The table, its head first."""
        head = ["phase", "EP", "experts", "tokens", "whole ms", "overlap ms", "whole / overlap",
                "tok/s/GPU whole", "overlap", "pays"]  # fmt: skip
        return [
            head,
            *(
                [
                    p.phase, str(p.ep), str(p.num_local_experts), str(p.tokens), p.whole_ms.text(), p.overlap_ms.text(),
                    p.speedup.text(), f"{p.whole_tokens_per_s:.0f}", f"{p.overlap_tokens_per_s:.0f}", p.verdict,
                ]
                for p in self.predictions
            ),
        ]  # fmt: skip

    def sentences(self) -> list[str]:
        """What the table comes to."""
        said = [
            f"{name}: overlap wins from {tokens:.0f} tokens a rank on"
            if tokens is not None
            else f"{name}: overlap does not win at any size looked at"
            for name, tokens in self.crossovers.items()
        ]
        if self.self_check is not None:
            said.append(
                f"against the profile's own steps: overlap predicted within {self.self_check['median']:.0%} in the "
                f"median, {self.self_check['worst']:.0%} at worst (the tax was fitted to them)"
            )
        return [*said, *self.notes]

    def text(self) -> str:
        """Table and sentences, for a terminal."""
        rows = self.rows()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        title = f"{self.model}, {self.num_ubatches} ubatches, {self.origin} costs: {self.source}"
        return "\n".join([title, *lines, *self.sentences()])


def run(options: PlanOptions) -> int:
    """Run the command; returns the exit code."""
    profile, source = costs_of(options)
    if options.derive is not None:
        if options.shape is None:
            raise ConfigError("--derive", options.derive, "with --shape", "a measured profile is a file already")
        check_out(options.derive)
        write_profile(profile, Path(options.derive))
    if options.report is not None:
        check_out(options.report)
    plan = make_plan(profile, source, options)
    if options.report is not None:
        from launch.plan_page import page

        Path(options.report).write_text(page(plan), encoding="utf-8")
    print(json.dumps(plan.to_json()) if options.json else plan.text(), flush=True)
    return 0


def costs_of(options: PlanOptions) -> tuple[Profile, str]:
    """The profile to predict from, and its name. Raises ConfigError if the options name none, or two."""
    if (options.profile is None) == (options.shape is None):
        raise ConfigError("--profile", options.profile, "either --profile FILE or --shape NAME", "give one of the two")
    if options.profile is not None:
        return read_profile(options.profile), options.profile
    from launch.roofline import derive  # torch's dtypes come with named shapes

    name = str(options.shape)
    made = derive(
        name,
        options.hardware,
        context=options.context,
        prompt_tokens=options.prompt_tokens,
        command=" ".join(["python -m launch", *sys.argv[1:]]),
    )
    return made, f"{name} on {options.hardware}"


def make_plan(profile: Profile, source: str, options: PlanOptions) -> Plan:
    """All predictions. Raises ConfigError for ranks, tokens or links that cannot be."""
    shape, setup = Shape.of(profile.setup.model), profile.setup
    measured = measured_link(profile.layer, shape, setup.ranks)
    link = parse_link(options.link, measured)
    node_link = parse_link(options.node_link, measured, "--node-link")
    phases: Sequence[Phase] = PHASES if options.phase == "both" else (options.phase,)
    spread = profile_spread(profile)
    predictions: list[Prediction] = []
    crossovers: dict[str, float | None] = {}
    for phase in phases:
        sizes = numbers("--tokens", options.tokens, 1) if options.tokens else profile.layer.fixed_tokens(phase)
        sizes = [n for n in sizes if n >= setup.num_ubatches]
        if not sizes:
            raise ConfigError("--tokens", options.tokens, f"{setup.num_ubatches} or more, a token for each ubatch", "")
        for ep in ranks_of(options, shape):
            cluster = Cluster(
                ep=ep,
                gpus_per_node=options.gpus_per_node,
                link=link,
                node_link=node_link,
                redundant_experts=options.redundant_experts,
                imbalance=options.imbalance,
            )
            predictor = Predictor(shape=shape, costs=profile.layer, measured_ranks=setup.ranks, cluster=cluster)
            drawn = [predictor.scaled(scale) for scale in draws(spread)]
            predictions += [predict(predictor, drawn, phase, n, setup.num_ubatches) for n in sizes]
            crossovers[f"{phase}, EP {ep}"] = predictor.crossover(phase, sizes, setup.num_ubatches)
    return Plan(
        source=source,
        origin=profile.origin,
        model=f"{setup.model.get('family')} {setup.fingerprint}",
        num_ubatches=setup.num_ubatches,
        options={
            "link": f"{link.name}: {link.bandwidth_gbs:.4g} GB/s, {link.latency_us:g} us",
            "node link": f"{node_link.name}: {node_link.bandwidth_gbs:.4g} GB/s, {node_link.latency_us:g} us",
            "GPUs a node": str(options.gpus_per_node),
            "redundant experts": str(options.redundant_experts),
            "imbalance": str(options.imbalance),
        },
        predictions=tuple(predictions),
        crossovers=crossovers,
        self_check=self_check(profile, shape),
        notes=profile.notes,
        command=" ".join(["python -m launch", *sys.argv[1:]]),
    )


def ranks_of(options: PlanOptions, shape: Shape) -> list[int]:
    """Those that were asked for, or some usual ones for which there are experts. Raises ConfigError."""
    if options.ep is not None:
        return numbers("--ep", options.ep, 2, MOST_RANKS)
    return [ep for ep in USUAL_RANKS if ep <= max(shape.num_experts + options.redundant_experts, USUAL_RANKS[0])]


def predict(
    predictor: Predictor, drawn: Sequence[Predictor], phase: Phase, tokens: int, num_ubatches: int
) -> Prediction:
    """One prediction with its ranges."""
    whole, overlap = predictor.whole_ms(phase, tokens), predictor.overlap_ms(phase, tokens, num_ubatches)
    wholes = np.array([each.whole_ms(phase, tokens) for each in drawn])
    overlaps = np.array([each.overlap_ms(phase, tokens, num_ubatches) for each in drawn])
    return Prediction(
        phase=phase,
        ep=predictor.cluster.ep,
        num_local_experts=predictor.cluster.num_local_experts(predictor.shape.num_experts),
        tokens=tokens,
        whole_ms=_range(whole, wholes),
        overlap_ms=_range(overlap, overlaps),
        speedup=_range(whole / overlap, wholes / overlaps),
        whole_tokens_per_s=tokens / whole * 1e3,
        overlap_tokens_per_s=tokens / overlap * 1e3,
    )


def draws(spread: float) -> list[dict[str, float]]:
    """Factors by which parts are dearer than thought, the same in every run."""
    rng = np.random.default_rng(0)
    return [
        {
            "compute": float(np.exp(rng.normal(0, spread))),
            "bandwidth": float(np.exp(rng.normal(0, 0.1))),
            "latency": float(np.exp(rng.normal(0, 0.2))),
            "imbalance": float(rng.uniform(1.0, 1.1)),
            "tax": float(np.exp(rng.normal(0, 0.2))),
        }
        for _ in range(DRAWS)
    ]


def profile_spread(profile: Profile) -> float:
    """Relative uncertainty of compute: half the width of its measurements, in the median over the curves."""
    curves = [*profile.layer.attention.values(), *(each.costs for each in profile.layer.experts)]
    return max(float(np.median([series.spread for series in curves])), LEAST_SPREAD)


def self_check(profile: Profile, shape: Shape) -> dict[str, float] | None:
    """How far predictions are off the overlapped steps of the profile itself; None for a derived one or one rank."""
    link = measured_link(profile.layer, shape, profile.setup.ranks)
    if profile.steps is None or link is None:
        return None
    ranks = profile.setup.ranks
    cluster = Cluster(ep=ranks, gpus_per_node=ranks, link=link, node_link=link)
    predictor = Predictor(shape=shape, costs=profile.layer, measured_ranks=ranks, cluster=cluster)
    errors = [
        abs(predictor.overlap_ms(phase, n, profile.setup.num_ubatches) / cost.median - 1)
        for phase, steps in profile.steps.items()
        for n, cost in zip(steps.overlap.tokens, steps.overlap.costs, strict=True)
    ]
    return {"median": float(np.median(errors)), "worst": max(errors)}


def numbers(option: str, text: str, least: int, most: int | None = None) -> list[int]:
    """`2,8,16` -> ascending numbers. Raises ConfigError."""
    allowed = f"numbers from {least}" + (f" to {most}" if most else "") + ", such as 8,64"
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ConfigError(option, text, allowed, "") from None
    if found[0] < least or (most is not None and found[-1] > most):
        raise ConfigError(option, text, allowed, "")
    return found


def _range(value: float, drawn: np.ndarray[Any, np.dtype[np.float64]]) -> Range:
    low, high = np.quantile(drawn, (0.1, 0.9))
    return Range(value=value, low=min(float(low), value), high=max(float(high), value))
