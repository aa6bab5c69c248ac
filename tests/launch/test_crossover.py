"""A sweep over sizes: which way the ratio goes, where it crosses 1, and what a size without a verdict does not say."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from launch.crossover import Sweep, crossover
from tests.launch.test_report import arm, report

RATIOS = {16: 0.7, 64: 0.9, 256: 1.2, 1024: 1.4}


def sweep(ratios: dict[int, float | None]) -> Sweep:
    """A report for each size, in no order; None: nothing split."""
    reports = []
    for tokens, ratio in reversed(ratios.items()):
        arms = (arm("whole", 100.0, splits=0), arm("overlap", 100.0 / (ratio or 1), splits=3 if ratio else 0, seed=1))
        reports.append(
            replace(report(*(replace(a, prefill_step_tokens=tokens) for a in arms)), workload=f"of {tokens}")
        )
    return Sweep(reports=reports)


def test_the_crossing_is_interpolated_on_logarithmic_axes():
    assert crossover([(64, 0.5), (1024, 2.0)]) == pytest.approx(256)
    assert crossover([(64, 1.1), (128, 0.5), (512, 2.0), (2048, 2.1)]) == pytest.approx(256)
    assert crossover([(64, 0.9), (128, 0.5)]) is None
    assert crossover([(64, 1.5), (128, 1.2)]) is None
    assert crossover([]) is None


def test_the_verdict_names_the_sizes_and_the_crossing():
    verdict = sweep(RATIOS).verdict("prefill")
    assert verdict.startswith("prefill: overlap is faster at 256, 1024; slower at 16, 64 tokens a rank and step; ")
    crossing = float(verdict.rsplit(" ", 1)[1])
    assert 64 < crossing < 256
    part = math.log(0.9) / (math.log(0.9) - math.log(1.2))
    assert crossing == pytest.approx(64 * 4**part, rel=0.1)


def test_a_size_that_did_not_split_says_nothing():
    result = sweep({16: None, 64: 0.9, 256: 1.2})
    assert [point.speed is None for point in result.points("prefill")] == [True, False, False]
    assert "no step split" in result.points("prefill")[0].verdict
    assert "16" not in result.verdict("prefill")
    assert [point.tokens for point in result.curves("prefill")["overlap"]] == [64, 256]
    assert sweep({16: None, 64: None}).verdict("prefill") == "prefill: no speed-up is stated at any size"


def test_text_json_and_files(tmp_path):
    result = sweep(RATIOS)
    lines = result.text().splitlines()
    assert [line.split()[0] for line in lines[3:7]] == ["16", "64", "256", "1024"]
    assert "decode" not in result.text()
    result.write(tmp_path)
    data = json.loads((tmp_path / "ab.json").read_text())
    assert data["verdict"]["prefill"] == result.verdict("prefill")
    assert data["crossover"]["prefill"]["overlap"]["tokens"] == pytest.approx(120, rel=0.2)
    assert len(data["sizes"]) == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2", "3", "4", "ab.json", "report.html"]
