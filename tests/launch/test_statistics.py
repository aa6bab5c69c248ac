import numpy as np
import pytest

from launch.statistics import drift, speedup, summarise


def rounds(
    rng: np.random.Generator, effect: float, *, n: int = 20, drift: float = 0.3
) -> tuple[list[float], list[float]]:
    """Paired step times of two arms whose true ratio is `effect`, on a machine that slows down during the run."""
    machine = np.linspace(0.0, drift, n)
    baseline = 100.0 * np.exp(machine + rng.normal(0, 0.05, n))
    other = 100.0 / effect * np.exp(machine + rng.normal(0, 0.05, n))
    return list(baseline), list(other)


def test_the_interval_covers_the_truth_and_a_null_effect_is_rarely_a_win() -> None:
    rng = np.random.default_rng(0)
    covered = sum(speedup(*rounds(rng, 1.2)).includes(1.2) for _ in range(300))
    wins = sum(speedup(*rounds(rng, 1.0)).low > 1.0 for _ in range(300))
    assert 0.91 <= covered / 300 <= 0.98
    assert wins / 300 < 0.05


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


def test_drift_is_found_where_it_is_and_only_there() -> None:
    rng = np.random.default_rng(2)
    found = [drift(np.exp(np.linspace(0, np.log(1.3), 20) + rng.normal(0, 0.05, 20))) for _ in range(100)]
    none = [drift(np.exp(rng.normal(0, 0.05, 20))) for _ in range(100)]
    assert sum(interval.includes(1.3) for interval in found) >= 85
    assert sum(interval.includes(1.0) for interval in none) >= 85
    assert sum(interval.includes(1.0) for interval in found) <= 5
    assert drift([1.0, 2.0, 4.0, 8.0, 16.0]).value == pytest.approx(16.0)
    with pytest.raises(ValueError, match="too few"):
        drift([1.0, 2.0])
