"""Intervals against data whose truth is known: how often they hold it, and how often nothing looks like something."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from launch.statistics import drift, median_interval, speedup, summarise

Noise = Callable[[np.random.Generator, int], np.ndarray]

NOISES: dict[str, Noise] = {
    "normal": lambda rng, n: rng.normal(0, 0.05, n),
    "heavy tails": lambda rng, n: 0.03 * rng.standard_t(2, n),
    "skewed": lambda rng, n: rng.exponential(0.05, n),
    "rare stalls": lambda rng, n: rng.normal(0, 0.01, n) + (rng.random(n) < 0.1) * rng.exponential(0.5, n),
}
TRIALS = 1000


def rounds(
    rng: np.random.Generator, effect: float, *, n: int = 20, drift: float = 0.3, noise: str = "normal"
) -> tuple[list[float], list[float]]:
    """Paired step times of two arms whose true ratio is `effect`, on a machine that slows down during the run."""
    machine = np.linspace(0.0, drift, n)
    baseline = 100.0 * np.exp(machine + NOISES[noise](rng, n))
    other = 100.0 / effect * np.exp(machine + NOISES[noise](rng, n))
    return list(baseline), list(other)


def check_coverage(n: int, noise: str, seed: int, trials: int = TRIALS) -> None:
    """The truth lies in 93 to 97% of the intervals, and a null effect is called a win in under 5%."""
    rng = np.random.default_rng(seed)
    held = sum(speedup(*rounds(rng, 1.2, n=n, noise=noise)).includes(1.2) for _ in range(trials))
    wins = sum(speedup(*rounds(rng, 1.0, n=n, noise=noise)).low > 1.0 for _ in range(trials))
    assert 0.93 <= held / trials <= 0.97
    assert wins / trials < 0.05


@pytest.mark.parametrize(("n", "noise"), [(6, "heavy tails"), (7, "normal"), (10, "rare stalls"), (20, "skewed")])
def test_intervals_hold_the_truth_as_often_as_they_say(n: int, noise: str) -> None:
    check_coverage(n, noise, seed=n)


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("n", [6, 7, 8, 10, 12, 15, 20, 30, 50])
def test_intervals_hold_the_truth_for_any_number_of_rounds(n: int, noise: str) -> None:
    check_coverage(n, noise, seed=1000 + n, trials=4 * TRIALS)  # luck moves 36 shares by less than 1.5%


def test_five_rounds_reach_less_and_their_extremes_are_the_bounds() -> None:
    assert median_interval([5.0, 1.0, 4.0, 2.0, 3.0]) == (1.0, 5.0)
    rng = np.random.default_rng(5)
    held = sum(speedup(*rounds(rng, 1.2, n=5)).includes(1.2) for _ in range(2000))
    assert 0.92 <= held / 2000 <= 0.955  # 1 - 2 / 2**5 = 0.9375


def test_bounds_lie_between_the_orders_that_enclose_95_percent() -> None:
    """Of 20, the 6th and 15th hold the median with 95.9%, the 7th and 14th with 88.5%."""
    low, high = median_interval(range(1, 21))
    assert 6.0 < low < 6.5
    assert high == pytest.approx(21 - low)
    assert median_interval([7.0] * 9) == (7.0, 7.0)


def test_pairs_cancel_a_drift_that_is_larger_than_the_effect() -> None:
    interval = speedup(*rounds(np.random.default_rng(1), 1.25, drift=2.0))
    assert 1.15 < interval.low < interval.value < interval.high < 1.35


def test_too_few_or_unpaired_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        speedup([1.0, 2.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="paired"):
        speedup([1.0, 2.0, 3.0], [1.0])
    with pytest.raises(ValueError, match="no samples"):
        summarise([])


def test_summary_of_known_samples() -> None:
    summary = summarise([3.0, 1.0, 2.0, 10.0])
    assert (summary.n, summary.median, summary.low, summary.high) == (4, 2.5, 1.0, 10.0)


@pytest.mark.parametrize("n", [5, 8, 20])
def test_drift_is_found_where_it_is_and_only_there(n: int) -> None:
    rng = np.random.default_rng(n)

    def trial(truth: float) -> list[float]:
        return list(np.exp(np.linspace(0, np.log(truth), n) + rng.normal(0, 0.05, n)))

    assert 0.93 <= sum(drift(trial(1.3)).includes(1.3) for _ in range(TRIALS)) / TRIALS <= 0.97
    assert 0.93 <= sum(drift(trial(1.0)).includes(1.0) for _ in range(TRIALS)) / TRIALS <= 0.97


def test_drift_of_a_straight_line_is_the_line() -> None:
    assert drift([1.0, 2.0, 4.0, 8.0, 16.0]).value == pytest.approx(16.0)
    with pytest.raises(ValueError, match="too few"):
        drift([1.0, 2.0])
