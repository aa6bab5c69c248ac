"""Steps from graphs give the tokens of eager steps, on one rank and on several, whole and overlapped."""

from __future__ import annotations

from typing import Any

import pytest

from dbo.errors import ConfigError
from launch.mesh import Mesh
from tests.launch.graph_cases import GraphReport, on_ranks, run_graphs
from tests.launch.test_engine import spread

ARMS: dict[str, dict[str, Any]] = {
    "off": {"overlap": "off"},
    "on": {"overlap": "on", "allow_single_rank": True},
    "on, greenlets": {"overlap": "on", "allow_single_rank": True, "driver": "greenlet"},
    "on, 3 ubatches": {"overlap": "on", "allow_single_rank": True, "num_ubatches": 3},
    "split": {"overlap": "on", "allow_single_rank": True, "interleave": False},
}


def check_graphs(found: GraphReport, arm: dict[str, Any]) -> None:
    num = arm.get("num_ubatches", 2) if arm["overlap"] == "on" else 1
    assert found.num_graphs > 0
    assert found.num_captures_after == 0
    assert set(found.steps) <= {("piecewise", 1), ("piecewise", num)}
    assert sum(found.steps.values()) == len(found.report.steps)  # every step
    assert found.steps["piecewise", num] > 0


@pytest.mark.parametrize("arm", ARMS)
def test_one_rank(tiny_models, arm: str) -> None:
    model = tiny_models("qwen3_moe")
    with Mesh.start(device="cpu", environment={}) as mesh:
        eager, found = run_graphs(mesh, model.directory, list(enumerate(model.prompts)), ARMS[arm])
    check_graphs(found, ARMS[arm])
    assert found.report.answers == eager.answers
    assert [found.report.answers[i] for i in range(len(model.answers))] == model.answers


@pytest.mark.parametrize("arm", ["off", "on", "on, 3 ubatches"])
def test_two_ranks(ranks, tiny_models, arm: str) -> None:
    """The transport is an eager part: messages interleave with segments of both ubatches."""
    model = tiny_models("mixtral")
    shares = spread(model.prompts, [9, 15])
    reports = ranks(2).run(on_ranks, model.directory, shares, ARMS[arm], timeout=240)
    for eager, found in reports:
        check_graphs(found, ARMS[arm])
        assert found.report.answers == eager.answers
    answers = {index: tokens for _, found in reports for index, tokens in found.report.answers.items()}
    assert [answers[i] for i in range(24)] == model.answers
    assert reports[0][1].report.plans == reports[1][1].report.plans


def test_steps_beyond_the_largest_size_run_eagerly(tiny_models) -> None:
    model = tiny_models("mixtral")
    with Mesh.start(device="cpu", environment={}) as mesh:
        eager, found = run_graphs(
            mesh, model.directory, list(enumerate(model.prompts)), ARMS["on"], "piecewise", (2, 4)
        )
    assert found.report.answers == eager.answers
    assert 0 < sum(found.steps.values()) < len(found.report.steps)


def test_a_mode_that_this_device_cannot_run_is_refused(tiny_models) -> None:
    model = tiny_models("mixtral")
    with Mesh.start(device="cpu", environment={}) as mesh, pytest.raises(ConfigError, match="use piecewise"):
        run_graphs(mesh, model.directory, [(0, model.prompts[0])], ARMS["off"], "full_decode_only")
