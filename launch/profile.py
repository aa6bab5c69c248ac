"""The profile file: what steps and their parts cost, where that was measured, and whether it holds here.

Its own file because three parties share it and must not know each other: `calibrate` writes it, `--overlap auto`
decides by its steps, `plan` predicts from its parts. It is JSON, versioned, and small enough to read.

Invariants: a `Profile` that exists is complete and its costs are positive numbers; one from another model, rank count
or transport never decides anything here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal, TypeVar, cast, get_args

from dbo.errors import ConfigError
from dbo.policy import MARGIN, ArmCosts, Curve, StepCosts
from launch.files import replace_file
from moe.config import ModelConfig

FORMAT, VERSION = "dbo-moe profile", 1

Origin = Literal["measured", "derived"]
Phase = Literal["prefill", "decode"]
Copies = Literal["rank", "expert", "node"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
ARMS = ("whole", "split", "overlap")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Repeated measurements of one thing, in ms."""

    median: float
    low: float  # smallest
    high: float  # largest
    n: int

    def __post_init__(self) -> None:
        if not (0 < self.low <= self.median <= self.high < math.inf and self.n >= 1):
            raise ConfigError("cost", dataclasses.asdict(self), "0 < low <= median <= high, of 1 or more", "")

    @property
    def standard_error(self) -> float:
        """Of the median, relative: for a normal spread of which `low` and `high` are the extremes of n (Chen and Tyler,
        1999, for their expected distance)."""
        deviations_apart = 2 * NormalDist().inv_cdf(0.5264 ** (1 / max(self.n, 2)))
        return 1.25 * (self.high - self.low) / self.median / deviations_apart / math.sqrt(self.n)


@dataclass(frozen=True, kw_only=True)
class Series:
    """Costs over tokens a rank."""

    tokens: tuple[int, ...]
    costs: tuple[Cost, ...]

    def __post_init__(self) -> None:
        self.curve()

    def curve(self) -> Curve:
        """The medians."""
        return Curve(self.tokens, tuple(cost.median for cost in self.costs))

    @property
    def spread(self) -> float:
        """Half the relative width from smallest to largest, in the median over the points."""
        widths = sorted((cost.high - cost.low) / cost.median / 2 for cost in self.costs)
        return widths[len(widths) // 2]


@dataclass(frozen=True, kw_only=True)
class PhaseSteps:
    """Steps of one kind. `whole` and `overlap` have the same tokens; skews as in `dbo.policy.ArmCosts`."""

    whole: Series
    overlap: Series
    split: Series | None = None
    whole_skew: float = 1.0
    overlap_skew: float = 1.0

    def costs(self) -> ArmCosts:
        """What `auto` needs of it."""
        return ArmCosts(
            whole=self.whole.curve(),
            overlap=self.overlap.curve(),
            whole_skew=self.whole_skew,
            overlap_skew=self.overlap_skew,
            margin=self.margin,
        )

    @property
    def margin(self) -> float:
        """The standard error of the ratio of two medians, in the median over the sizes; `MARGIN` to 0.1."""
        errors = [
            math.hypot(whole.standard_error, overlap.standard_error)
            for whole, overlap in zip(self.whole.costs, self.overlap.costs, strict=True)
        ]
        return min(max(sorted(errors)[len(errors) // 2], MARGIN), 0.1)


@dataclass(frozen=True, kw_only=True)
class ExpertCosts:
    """The expert path of one layer with so many local experts, over the tokens of *each* rank: as many ranks as make
    all experts, evenly loaded."""

    num_local_experts: int
    costs: Series


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """What one layer of a whole step is made of, on one rank: what `plan` composes."""

    attention: Mapping[Phase, Series]  # with the router, norms and shared experts
    experts: tuple[ExpertCosts, ...]  # ascending
    packing: Series | None  # the processor's part of a dispatch and a combine together; None where the device does it
    messages: Series | None  # of a dispatch and a combine together, in flight; None if no other rank was there
    fixed: Mapping[Phase, Series]  # the rest of a whole step: embedding, head, sampling, agreement
    sm_tax: Mapping[Phase, float]  # share by which compute slows down while messages travel
    dispatch_bytes: int  # of one copy of a token
    combine_bytes: int
    copies: Mapping[Phase, Copies]  # one to each rank that is chosen, to each expert, or to each node
    min_latency_us: float = 0.0  # of one message besides that of the link: launches, notification

    def __post_init__(self) -> None:
        if not self.experts:
            raise ConfigError("layer.experts", "none", "one measured number of local experts or more", "")
        for name in ("attention", "fixed", "sm_tax", "copies"):
            if set(getattr(self, name)) != set(PHASES):
                raise ConfigError(f"layer.{name}", sorted(getattr(self, name)), "both phases", "")
        for phase in PHASES:
            if not 0 <= self.sm_tax[phase] < math.inf:
                raise ConfigError("layer.sm_tax", self.sm_tax[phase], "0 or more", "")
            if self.copies[phase] not in get_args(Copies):
                raise ConfigError("layer.copies", self.copies[phase], ", ".join(get_args(Copies)), "")

    def fixed_tokens(self, phase: Phase) -> list[int]:
        """The sizes of whole steps that were measured, or else those of attention."""
        steps = self.fixed[phase].tokens
        return list(steps if len(steps) > 1 else self.attention[phase].tokens)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What was measured: a profile holds only for the same."""

    model: Mapping[str, Any]  # every size of the model, see `fingerprint`
    ranks: int
    device: str
    all2all: str
    num_ubatches: int
    driver: str
    cut: str
    comm_sms: int | None  # best of those tried; None where the transport has no such setting
    whole_comm_sms: int | None = None  # of whole steps; None likewise

    @property
    def fingerprint(self) -> str:
        """A short name for the model's sizes."""
        text = json.dumps(self.model, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Everything in one file."""

    origin: Origin
    setup: Setup
    environment: Mapping[str, str]
    command: str
    steps: Mapping[Phase, PhaseSteps] | None  # None in a derived profile: nothing ran
    layer: LayerCosts
    comm_sms: Mapping[str, Mapping[Phase, Series]] = field(default_factory=dict)  # overlap at every number tried
    notes: tuple[str, ...] = ()

    def step_costs(self) -> StepCosts:
        """What `auto` decides by. Raises ConfigError for a derived profile."""
        if self.steps is None:
            raise ConfigError("--profile", self.origin, "a measured profile", "measure one with launch calibrate")
        steps = self.steps
        return StepCosts(prefill=steps["prefill"].costs(), decode=steps["decode"].costs(), comm_sms=self.setup.comm_sms)

    def to_json(self) -> dict[str, Any]:
        """The file's content."""
        return {"format": FORMAT, "version": VERSION, **_plain(self)}

    @classmethod
    def from_json(cls, content: Any, source: str) -> Profile:
        """Raises ConfigError, naming `source` and what is wrong."""
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ConfigError("--profile", source, f"a {FORMAT}", "make one with launch calibrate")
        if content.get("version") != VERSION:
            raise ConfigError(
                "--profile", source, f"version {VERSION}, not {content.get('version')}", "calibrate again"
            )
        try:
            return _read(cls, {k: v for k, v in content.items() if k not in ("format", "version")})
        except ConfigError as error:
            raise ConfigError("--profile", source, str(error), "the file is damaged: calibrate again") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"every field of a profile ({type(error).__name__}: {error})"
            raise ConfigError("--profile", source, why, "the file is damaged: calibrate again") from None


def fingerprint(model: ModelConfig) -> dict[str, Any]:
    """Everything about a model that its steps' cost depends on, as JSON has it."""
    told = {f.name: getattr(model, f.name) for f in fields(model)}
    told |= {"dtype": str(model.dtype).removeprefix("torch."), "dense_layers": sorted(model.dense_layers)}
    for name in ("eos_token_ids", "rms_norm_eps", "rope_theta", "rope_scaling", "max_position"):
        told.pop(name, None)
    if not model.batch_invariant:  # as in profiles from before there was a choice
        told.pop("batch_invariant")
    return cast("dict[str, Any]", json.loads(json.dumps(told, default=str)))


def read_profile(file: str | Path) -> Profile:
    """Raises ConfigError for a file that cannot be read or is no profile of this version."""
    return parse_profile(read_text(file), str(file))


def read_text(file: str | Path) -> str:
    """Raises ConfigError."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            "--profile", str(file), f"a file that can be read ({why})", "make one with calibrate"
        ) from None


def parse_profile(text: str, source: str) -> Profile:
    """Raises ConfigError."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError("--profile", source, f"JSON ({error})", "calibrate again") from None
    return Profile.from_json(content, source)


def write_profile(profile: Profile, file: Path) -> None:
    """Whole or not at all. Raises ConfigError."""
    text = json.dumps(profile.to_json(), indent=1) + "\n"
    try:
        replace_file(file, text)
    except OSError as error:
        raise ConfigError("--out", str(file), "a file that can be written", error.strerror or "") from None


def check_out(file: str) -> None:
    """Find out before hours of work whether a file can be written. Raises ConfigError."""
    path = Path(file)
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError("--out", file, "a file in a directory that exists", "")


def mismatches(profile: Profile, here: Setup) -> list[str]:
    """What the profile was measured with that is not so here: one line each, with both values."""
    there = profile.setup
    keys = [key for key in {**there.model, **here.model} if there.model.get(key) != here.model.get(key)]
    found = [f"{key} {there.model.get(key)} in the profile, {here.model.get(key)} here" for key in keys]
    for name in ("ranks", "device", "all2all", "num_ubatches", "whole_comm_sms"):
        if getattr(there, name) != getattr(here, name):
            found.append(f"{name} {getattr(there, name)} in the profile, {getattr(here, name)} here")
    return found


def differences(profile: Profile, here: Setup, environment: Mapping[str, str]) -> list[str]:
    """What differs and may matter: worth a warning each."""
    there = profile.setup
    found = [
        f"{name} {getattr(there, name)} in the profile, {getattr(here, name)} here"
        for name in ("driver", "cut")
        if getattr(there, name) != getattr(here, name)
    ]
    for name in ("host", "processor", "gpu", "torch", "threads", "NCCL_P2P_DISABLE", "CUDA_DEVICE_MAX_CONNECTIONS"):
        if profile.environment.get(name) != environment.get(name):
            found.append(f"{name} {profile.environment.get(name)} in the profile, {environment.get(name)} here")
    return found


def costs_for(text: str, source: str, here: Setup, environment: Mapping[str, str]) -> tuple[Profile, list[str]]:
    """The profile in `text` if it holds here, and warnings. Raises ConfigError naming both values where it does not."""
    profile = parse_profile(text, source)
    if wrong := mismatches(profile, here):
        remedy = "calibrate with this model, these ranks and this transport"
        raise ConfigError("--profile", source, f"one measured with the same: {'; '.join(wrong)}", remedy)
    profile.step_costs()
    return profile, differences(profile, here, environment)


# ------------------------------------------------------------------------------------------------- to JSON and back


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if isinstance(value, Series):  # a table reads better than a list of objects
            return {
                "tokens": list(value.tokens),
                **{f.name: [getattr(cost, f.name) for cost in value.costs] for f in fields(Cost)},
            }
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _series(raw: Mapping[str, Any]) -> Series:
    columns: Sequence[Sequence[Any]] = [raw[f.name] for f in fields(Cost)]
    rows = zip(*columns, strict=True)
    costs = tuple(Cost(median=float(m), low=float(low), high=float(high), n=int(n)) for m, low, high, n in rows)
    return Series(tokens=tuple(int(n) for n in raw["tokens"]), costs=costs)


def _optional(read: Any, raw: Any) -> Any:
    return None if raw is None else read(raw)


def _by_phase(read: Any, raw: Mapping[str, Any]) -> dict[Phase, Any]:
    if set(raw) != set(PHASES):
        raise ConfigError("phases", sorted(raw), " and ".join(PHASES), "")
    return {phase: read(raw[phase]) for phase in PHASES}


def _read(cls: type[T], raw: Mapping[str, Any]) -> T:
    """A dataclass from its JSON form; unknown and missing fields raise."""
    readers: Mapping[str, Any] = {
        "setup": lambda r: _read(Setup, r),
        "layer": lambda r: _read(LayerCosts, r),
        "steps": lambda r: _optional(lambda s: _by_phase(lambda p: _read(PhaseSteps, p), s), r),
        "whole": _series,
        "overlap": _series,
        "split": lambda r: _optional(_series, r),
        "attention": lambda r: _by_phase(_series, r),
        "fixed": lambda r: _by_phase(_series, r),
        "experts": lambda r: tuple(
            ExpertCosts(num_local_experts=int(e["num_local_experts"]), costs=_series(e["costs"])) for e in r
        ),
        "packing": lambda r: _optional(_series, r),
        "messages": lambda r: _optional(_series, r),
        "comm_sms": lambda r: (
            r if not isinstance(r, Mapping) else {sms: _by_phase(_series, each) for sms, each in r.items()}
        ),
        "notes": tuple,
    }
    return cls(**{name: readers.get(name, lambda r: r)(value) for name, value in raw.items()})
