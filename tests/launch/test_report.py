import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from launch.report import ABReport, ArmResult, Gate, Latencies, RoundTimes


def arm(name: str, ms: float, *, splits: int = 3, rounds: int = 12, seed: int = 0, decode: float = 0.0) -> ArmResult:
    noise = np.random.default_rng(seed).normal(0, 0.01, rounds)
    return ArmResult(
        name=name,
        rounds=tuple(RoundTimes(prefill=ms * float(np.exp(x)), decode=decode) for x in noise),
        prefill_steps=4,
        decode_steps=0,
        split_prefill_steps=splits,
        split_decode_steps=0,
        num_tokens=4096,
        num_rows=4608,
        new_tokens=0,
        reasons=Counter({"split": splits} if splits else {"below threshold": 4}),
    )


def report(*arms: ArmResult, bitwise: bool = True, tokens: bool = True, difference: float = 1e-6) -> ABReport:
    gate = Gate(split_equals_overlap=bitwise, tokens_equal=tokens, max_relative_difference=difference, tolerance=1e-4)
    return ABReport(
        command="ab", workload="synthetic", environment={}, options={}, arms={a.name: a for a in arms}, gate=gate
    )


def test_a_clear_win_and_a_clear_loss_are_stated_with_their_interval() -> None:
    won = report(arm("whole", 150.0, splits=0), arm("overlap", 100.0, seed=1))
    assert "1.5" in won.verdict("prefill")
    assert "faster" in won.verdict("prefill")
    lost = report(arm("whole", 100.0, splits=0), arm("overlap", 150.0, seed=1))
    assert "slower" in lost.verdict("prefill")


@pytest.mark.parametrize(
    "broken", [{"bitwise": False}, {"tokens": False}, {"difference": 1.0}, {"difference": float("nan")}]
)
def test_a_failed_gate_forbids_any_speedup(broken: dict[str, float]) -> None:
    result = report(arm("whole", 150.0, splits=0), arm("overlap", 100.0, seed=1), **broken)  # type: ignore[arg-type]
    assert "no speed-up is stated: the equality gate failed" in result.verdict("prefill")
    assert "FAILED" in result.text()


def test_no_split_forbids_any_speedup_and_names_the_reason() -> None:
    result = report(arm("whole", 150.0, splits=0), arm("overlap", 100.0, splits=0, seed=1))
    assert result.verdict("prefill") == "prefill: no speed-up is stated: no step split (below threshold)"


def test_an_interval_that_includes_one_shows_no_difference() -> None:
    result = report(arm("whole", 100.0, splits=0), arm("overlap", 100.0, seed=1))
    assert "no difference shown" in result.verdict("prefill")


def test_fewer_than_five_rounds_state_nothing() -> None:
    result = report(arm("whole", 150.0, splits=0, rounds=4), arm("overlap", 100.0, rounds=4))
    assert "fewer than 5 rounds" in result.verdict("prefill")


def test_columns_stand_apart_however_long_the_numbers() -> None:
    result = report(arm("whole", 1.0, splits=0, decode=8e7), arm("overlap", 123456789.0, seed=1))
    header, rule, *rows = result.text().splitlines()[:4]
    assert {len(line) for line in (rule, *rows)} == {len(header)}
    for end in (header.index("prefill ms") + len("prefill ms"), header.index("ms/step") + len("ms/step")):
        assert all(row[end - 1] in "]-" and row[end : end + 3] == "   " for row in rows)


def test_a_difference_without_a_number_is_still_json(tmp_path: Path) -> None:
    result = report(arm("whole", 1.0, splits=0), arm("overlap", 1.0), difference=float("nan"))
    assert json.loads((result.write(tmp_path) / "ab.json").read_text())["gate"]["max_relative_difference"] is None


def test_table_and_json_hold_splits_padding_and_samples(tmp_path: Path) -> None:
    result = report(arm("whole", 150.0, splits=0), arm("overlap", 100.0, seed=1))
    table = result.text()
    assert "0/4" in table
    assert "3/4" in table
    assert "11.1%" in table
    data = json.loads((result.write(tmp_path / "new") / "ab.json").read_text())
    assert data["arms"]["overlap"]["split_steps"] == {"prefill": 3, "decode": 0}
    assert len(data["arms"]["whole"]["prefill_ms"]["samples"]) == 12
    assert data["speedup"]["overlap_over_whole"]["prefill"]["low"] > 1.4


def test_order_and_drift_are_told_apart() -> None:
    numbers = range(12)
    place = [n % 2 for n in numbers]  # of `whole`, in each round
    slow_second = [1.1 if p else 1.0 for p in place]
    growing = np.linspace(1.0, 1.5, 12)
    rounds = {
        "whole": [RoundTimes(prefill=100 * s * g, decode=0.0) for s, g in zip(slow_second, growing, strict=True)],
        "overlap": [
            RoundTimes(prefill=80 * (2.1 - s) * g, decode=0.0) for s, g in zip(slow_second, growing, strict=True)
        ],
    }
    arms = [replace(arm(name, 1.0), rounds=tuple(times)) for name, times in rounds.items()]
    result = report(replace(arms[0], positions=tuple(place)), replace(arms[1], positions=tuple(1 - p for p in place)))
    order, drift = result.order_effect(), result.drift()
    assert order is not None
    assert drift is not None
    assert 1.05 < order.low < 1.1 < order.high < 1.15
    assert 1.4 < drift.low < 1.5 < drift.high < 1.6
    assert "order within a round: the last arm took 1.10x" in result.text()
    assert report(arm("whole", 1.0)).order_effect() is None


def test_percentiles_and_waiting_stand_in_table_and_json() -> None:
    latencies = Latencies(decode_step=tuple(map(float, range(1, 101))), ttft=(5.0,))
    result = report(replace(arm("overlap", 1.0), latencies=latencies, wait_share=0.25))
    assert "50.5 / 90.1 / 99.0" in result.text()
    assert "25.0%" in result.text()
    data = result.to_json()["arms"]["overlap"]
    assert data["latency_ms"].keys() == {"decode_step", "ttft"}
    assert data["latency_ms"]["decode_step"]["p99"] == pytest.approx(99.01)
    assert (data["wait_share"], data["padding_share"]) == (0.25, pytest.approx(1 / 9))


def test_power_is_told_by_arm_and_the_limit_where_it_was_reached() -> None:
    whole = replace(arm("whole", 2.0), joules=40.96, watts=577.0, limit_watts=700.0)
    overlap = replace(arm("overlap", 1.0), joules=36.864, watts=695.0, limit_watts=700.0)
    text = report(whole, overlap).text()
    assert "of 700 W at most: whole 577 W and 10.00 mJ a token, overlap 695 W and 9.00 mJ a token" in text
    assert "lowers its clock, for kernels and messages alike: overlap\n" in text
    assert "lowers its clock" not in report(whole).text()
    assert "power of a GPU" not in report(arm("whole", 2.0)).text()
    assert report(overlap).to_json()["arms"]["overlap"]["watts"] == 695.0
