"""Whether a split is worth it: the policies behind `overlap`.

A file of its own because it is opinion, where `agreement` is law: a policy may decline a split that is possible, never
force one that is not. Invariant: a policy is pure and the same on every rank (see `agreement.Policy`). What a rank has
learnt on its own lives in a `Correction`, beside the policy, and reaches it only as fields of everybody's vote.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from dbo.agreement import BatchPlan, Policy, Reason, Vote
from dbo.config import DBOConfig
from dbo.errors import ConfigError

__all__ = [
    "ArmCosts",
    "Auto",
    "Correction",
    "Curve",
    "Estimate",
    "Policy",
    "Probes",
    "StepCosts",
    "Thresholds",
    "Tuner",
    "make_policy",
]

PROBE_WHOLE, PROBE_OVERLAP = 1, 2
"""What `Vote.probe` may ask for."""

MARGIN = 0.01
"""Overlap must promise to be faster by this share at least: below it, whole is as good and simpler."""
DRIFT_UNIT = 1 / 4096
"""`Vote.prefill_drift` and `Vote.decode_drift` count in this unit of a natural logarithm."""
DRIFT_BOUND = math.log(2)
"""No rank's clock may move the ratio of the two costs by more."""


@dataclass(frozen=True)
class Thresholds:
    """A rank wants to split from so many tokens on: one threshold for a uniform decode, another for all else."""

    config: DBOConfig
    name: str = "thresholds"

    def vote(self, vote: Vote) -> bool:
        """Whether this rank has at least as many tokens as the threshold of its kind of step."""
        if vote.uniform_decode:
            return vote.num_tokens >= self.config.decode_token_threshold
        return vote.num_tokens >= self.config.prefill_token_threshold

    def approve(self, plan: BatchPlan) -> Reason | None:
        """No objection: thresholds are all there is."""
        return None

    def describe(self) -> str:
        """The thresholds in effect."""
        decode, prefill = self.config.decode_token_threshold, self.config.prefill_token_threshold
        return f"overlap {self.config.overlap} by {self.name} (decode {decode}, prefill {prefill} tokens)"


@dataclass(frozen=True)
class Curve:
    """A measured cost in ms over tokens a rank: straight lines between the points.

    Below the first point the cost is the first one's, beyond the last it goes on as between the last two, but never
    falls. Raises `ConfigError` unless tokens ascend from 1 or more and every cost is a positive number.
    """

    tokens: tuple[int, ...]
    ms: tuple[float, ...]

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip((0, *self.tokens), self.tokens, strict=False))
        if not self.tokens or len(self.tokens) != len(self.ms) or not ascending:
            raise ConfigError("tokens", self.tokens, "ascending numbers of tokens from 1, one for each cost", "")
        for ms in self.ms:
            if not (math.isfinite(ms) and ms > 0):
                raise ConfigError("ms", ms, "a cost above 0", "")

    def at(self, num_tokens: float) -> float:
        """The cost of a step of so many tokens."""
        tokens, ms = self.tokens, self.ms
        if num_tokens <= tokens[0] or len(tokens) == 1:
            return ms[0]
        right = min(bisect_right(tokens, num_tokens), len(tokens) - 1)
        slope = (ms[right] - ms[right - 1]) / (tokens[right] - tokens[right - 1])
        if num_tokens > tokens[-1]:
            return ms[-1] + max(slope, 0.0) * (num_tokens - tokens[-1])
        return ms[right - 1] + slope * (num_tokens - tokens[right - 1])


@dataclass(frozen=True, kw_only=True)
class ArmCosts:
    """What steps of one kind cost, measured with equal token counts on all ranks.

    Where counts differ, a step costs as much as one of `skew * largest + (1 - skew) * mean` tokens on every rank: 1 =
    the slowest rank alone decides (attention), 0 = all share the work (experts). `margin`: the share by which overlap
    must promise to be faster, so that noise of the measurement does not decide.
    """

    whole: Curve
    overlap: Curve
    whole_skew: float = 1.0
    overlap_skew: float = 1.0
    margin: float = MARGIN

    def __post_init__(self) -> None:
        for name in ("whole_skew", "overlap_skew", "margin"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(name, getattr(self, name), "0 to 1", "")


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """A measured cost model: what `auto` decides by. The same on every rank."""

    prefill: ArmCosts
    decode: ArmCosts
    comm_sms: int | None = None  # with which overlap was measured; None = whatever the settings say

    def estimate(self, plan: BatchPlan) -> Estimate:
        """Cost of the step behind a plan, run whole and split. Whole runs unpadded (but under graphs), split pads every
        rank to the largest."""
        costs = self.decode if plan.uniform_decode else self.prefill
        num_tokens = plan.num_tokens_per_rank
        largest = max(num_tokens)
        if 0 not in plan.votes["graph_mode"]:
            largest = max(largest, *plan.votes["num_tokens_padded"])
        multiple = plan.config.part_multiple if plan.config.cut == "tokens" else 1
        padded = -(-largest // multiple) * multiple
        mean = sum(num_tokens) / len(num_tokens)
        drifts = plan.votes.get("decode_drift" if plan.uniform_decode else "prefill_drift", ())
        drift = sum(drifts) * DRIFT_UNIT / len(drifts) if drifts else 0.0
        return Estimate(
            whole_ms=costs.whole.at(_weighed(costs.whole_skew, largest, mean)),
            overlap_ms=costs.overlap.at(_weighed(costs.overlap_skew, padded, mean)),
            drift=min(max(drift, -DRIFT_BOUND), DRIFT_BOUND),
            margin=costs.margin,
        )


def _weighed(skew: float, largest: float, mean: float) -> float:
    return skew * largest + (1 - skew) * mean


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What one step costs either way."""

    whole_ms: float  # both as the profile says
    overlap_ms: float
    drift: float  # logarithm by which all clocks together have found overlap dearer, against whole, than the profile
    margin: float = MARGIN

    @property
    def pays(self) -> bool:
        """Whether overlap is worth it, with what clocks have found."""
        return self.overlap_ms * math.exp(self.drift) < self.whole_ms * (1 - self.margin)

    @property
    def corrected(self) -> bool:
        """Whether the profile alone would have decided otherwise."""
        return self.pays != (self.overlap_ms < self.whole_ms * (1 - self.margin))

    def __str__(self) -> str:
        found = f", found {math.exp(self.drift):.2f}x dearer than that" if self.drift else ""
        return f"whole {self.whole_ms:.2f} ms, overlap {self.overlap_ms:.2f} ms{found}"


@dataclass(frozen=True)
class Auto:
    """Split where a measured cost model says that it pays, padding and the slowest rank included.

    A rank may ask for a look at the other arm (`Vote.probe`); the arm that would run anyway gives way to it.
    """

    config: DBOConfig
    costs: StepCosts
    name: str = "a measured profile"

    def vote(self, vote: Vote) -> bool:
        """Always: what a step costs depends on all ranks, so nothing is decided by one."""
        return True

    def approve(self, plan: BatchPlan) -> Reason | None:
        """Split only if it pays, or is asked for."""
        asked = plan.votes.get("probe", ())
        if PROBE_WHOLE in asked:
            return Reason.PROBE
        if PROBE_OVERLAP in asked or self.costs.estimate(plan).pays:
            return None
        return Reason.NOT_PROFITABLE

    def describe(self) -> str:
        """What decides."""
        return f"overlap {self.config.overlap} by {self.name}"


@dataclass(frozen=True)
class Probes:
    """Split exactly where rank 0's vote asks for it: for measuring both arms within one run."""

    config: DBOConfig

    def vote(self, vote: Vote) -> bool:
        """Always."""
        return True

    def approve(self, plan: BatchPlan) -> Reason | None:
        """As rank 0 asks."""
        return None if plan.votes["probe"][0] == PROBE_OVERLAP else Reason.PROBE

    def describe(self) -> str:
        """What decides."""
        return "overlap where a measurement asks for it"


class Tuner(Protocol):
    """What one rank says about costs in its votes, and what it learns from its steps. It may keep state."""

    def fields(self, uniform_decode: bool) -> Mapping[str, int]:
        """Fields of the next vote: `prefill_drift`, `decode_drift`, `probe`."""

    def observe(self, plan: BatchPlan, step_ms: float) -> None:
        """A step of this plan took so long on this rank."""


@dataclass
class _Seen:
    """What this rank's clock has shown of one arm in one kind of step."""

    error: float = 0.0  # mean logarithm of measured over predicted
    weight: float = 0.0  # of how many recent steps
    warm: bool = False

    def add(self, error: float) -> None:
        if not self.warm:  # the first one warms up kernels, threads and connections
            self.warm = True
            return
        self.weight = min(self.weight + 1, _MEMORY)
        change = (error - self.error) / self.weight
        self.error += change if self.weight <= 2 else min(max(change, -_STRIDE), _STRIDE)


_MEMORY = 16  # steps over which a mean is taken
_STRIDE = 0.05  # by which one step may move it: a stall is no trend
_FADING = 1 - 1 / 256  # of the weight of what was seen, in a step of the same kind
_PRIOR = 4  # steps of either arm that the profile counts for
_CONTRADICTION = math.log(1.1)  # beyond this, what runs contradicts the profile, and the other arm deserves a look
_PROBE_EVERY = 16  # steps of a kind between two looks


class Correction:
    """Compares this rank's steps with the cost model, and votes by how much overlap was misjudged against whole.

    An error that both arms share (longer contexts, a slower machine) decides nothing; only their difference is voted,
    weighed by how many recent steps of *both* arms it rests on, so that it fades when one is no longer seen. While the
    arm that runs contradicts the profile and the other is unknown, a look at the other is asked for now and then.
    """

    def __init__(self, policy: Auto, *, speaks: bool = False):
        """`speaks`: this rank logs when a correction begins or ceases to change decisions."""
        self._policy, self._speaks = policy, speaks
        self._seen = {(kind, arm): _Seen() for kind in _KINDS for arm in _ARMS}
        self._since_probe = dict.fromkeys(_KINDS, 0)
        self._changed = dict.fromkeys(_KINDS, False)

    def fields(self, uniform_decode: bool) -> Mapping[str, int]:
        """See `Tuner`."""
        return {
            "prefill_drift": self._drift("prefill"),
            "decode_drift": self._drift("decode"),
            "probe": self._probe(_kind(uniform_decode)),
        }

    def observe(self, plan: BatchPlan, step_ms: float) -> None:
        """See `Tuner`. Steps in which a rank was idle say nothing: the profile does not know them."""
        if 0 in plan.num_tokens_per_rank or step_ms <= 0:
            return
        kind, estimate = _kind(plan.uniform_decode), self._policy.costs.estimate(plan)
        for arm in _ARMS:
            self._seen[kind, arm].weight *= _FADING
        predicted = estimate.overlap_ms if plan.should_ubatch else estimate.whole_ms
        self._seen[kind, "overlap" if plan.should_ubatch else "whole"].add(math.log(step_ms / predicted))
        asked = any(plan.votes.get("probe", ()))
        self._since_probe[kind] = 0 if asked else self._since_probe[kind] + 1
        if not asked and plan.reason in (Reason.SPLIT, Reason.NOT_PROFITABLE):
            self._tell(kind, estimate)

    def _drift(self, kind: Kind) -> int:
        whole, overlap = self._seen[kind, "whole"], self._seen[kind, "overlap"]
        weight = min(whole.weight, overlap.weight)
        drift = (overlap.error - whole.error) * weight / (weight + _PRIOR)
        return round(min(max(drift, -DRIFT_BOUND), DRIFT_BOUND) / DRIFT_UNIT)

    def _probe(self, kind: Kind) -> int:
        if self._since_probe[kind] < _PROBE_EVERY:
            return 0
        whole, overlap = self._seen[kind, "whole"], self._seen[kind, "overlap"]
        for known, other, ask in ((whole, overlap, PROBE_OVERLAP), (overlap, whole, PROBE_WHOLE)):
            if known.weight >= _MEMORY / 2 and abs(known.error) > _CONTRADICTION and other.weight < _PRIOR:
                return ask
        return 0

    def _tell(self, kind: Kind, estimate: Estimate) -> None:
        if self._speaks and estimate.corrected != self._changed[kind]:
            self._changed[kind] = estimate.corrected
            now = ("overlap" if estimate.pays else "whole") + (", against the profile" if estimate.corrected else "")
            logging.getLogger(__name__).info("overlap auto: %s steps run %s (%s)", kind, now, estimate)


Kind = Literal["prefill", "decode"]
_KINDS: tuple[Kind, ...] = ("prefill", "decode")
_ARMS = ("whole", "overlap")


def _kind(uniform_decode: bool) -> Kind:
    return "decode" if uniform_decode else "prefill"


def make_policy(config: DBOConfig, costs: StepCosts | None = None) -> Policy:
    """The policy that `config` asks for. Without a measured profile `auto` falls back to thresholds and says so."""
    if config.overlap == "auto" and costs is not None:
        return Auto(config, costs)
    return Thresholds(
        config, "thresholds, for want of a measured profile" if config.overlap == "auto" else "thresholds"
    )
