"""Medians, spreads and honest intervals of repeated timings.

A file of its own because every figure the experiments print passes through these few pure functions, and because a
statistic is only believed when its coverage has been tested on data whose truth is known.

Samples are compared in pairs: value `i` of each arm comes from the same round, so a machine that drifts or slows down
during a run moves both members of a pair and leaves their ratio alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 4000
MIN_ROUNDS = 5
"""Of n rounds, the smallest and largest lie on both sides of the median with probability 1 - 2 / 2**n: 75% for 3."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Where `n` samples lie. The unit is the samples'."""

    n: int
    median: float
    low: float  # smallest
    high: float  # largest
    p90: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate with the bounds of its 95% bootstrap interval."""

    value: float
    low: float
    high: float

    def includes(self, value: float) -> bool:
        """Whether `value` is one the data cannot rule out."""
        return self.low <= value <= self.high


def summarise(samples: Sequence[float]) -> Summary:
    """Median, extremes and upper percentiles of at least one sample; raises ValueError for none."""
    if not len(samples):
        raise ValueError("no samples to summarise")
    values = np.asarray(samples, dtype=np.float64)
    return Summary(
        n=len(values),
        median=float(np.median(values)),
        low=float(values.min()),
        high=float(values.max()),
        p90=float(np.quantile(values, 0.9)),
        p99=float(np.quantile(values, 0.99)),
    )


def speedup(baseline: Sequence[float], other: Sequence[float], *, seed: int = 0) -> Interval:
    """How many times faster `other` is than `baseline`, from paired samples of time, with a 95% interval.

    The statistic is the median over rounds of log(baseline / other); rounds are resampled `RESAMPLES` times.
    Raises ValueError when the two have different lengths, or fewer than `MIN_ROUNDS` pairs: no interval is honest then.
    """
    if len(baseline) != len(other):
        raise ValueError(f"samples are paired by round: {len(baseline)} against {len(other)}")
    if len(baseline) < MIN_ROUNDS:
        raise ValueError(f"{len(baseline)} rounds are too few for an interval; use at least {MIN_ROUNDS}")
    ratios = np.log(np.asarray(baseline, dtype=np.float64) / np.asarray(other, dtype=np.float64))
    low, high = np.quantile(np.median(ratios[_resampled(len(ratios), seed)], axis=1), (0.025, 0.975))
    return Interval(value=float(np.exp(np.median(ratios))), low=float(np.exp(low)), high=float(np.exp(high)))


def drift(samples: Sequence[float], *, seed: int = 0) -> Interval:
    """How many times longer the last round took than the first, by a line through the logarithms of all, with a 95%
    interval. Raises ValueError for fewer than `MIN_ROUNDS`."""
    if len(samples) < MIN_ROUNDS:
        raise ValueError(f"{len(samples)} rounds are too few for an interval; use at least {MIN_ROUNDS}")
    y = np.log(np.asarray(samples, dtype=np.float64))
    x = np.linspace(0.0, 1.0, len(y))
    rows = _resampled(len(y), seed)
    low, high = np.quantile(_slopes(x[rows], y[rows]), (0.025, 0.975))
    return Interval(value=float(np.exp(_slopes(x[None], y[None])[0])), low=float(np.exp(low)), high=float(np.exp(high)))


def _resampled(n: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, n, (RESAMPLES, n))


def _slopes(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Slope of the least-squares line of each row; rows that hold one round only are left out."""
    x = x - x.mean(axis=1, keepdims=True)
    spread = (x * x).sum(axis=1)
    slopes: NDArray[np.float64] = (x * y).sum(axis=1)[spread > 0] / spread[spread > 0]
    return slopes
