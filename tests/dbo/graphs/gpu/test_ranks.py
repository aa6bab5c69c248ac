"""Graphs between GPUs: every replay equals the eager run, with each of DeepEP's transports, whole and overlapped."""

import json
from pathlib import Path

import pytest

from tests.ranks import launch_ranks

pytestmark = pytest.mark.multigpu


@pytest.mark.parametrize("driver", ["greenlet", "threads"])
@pytest.mark.parametrize(
    "what", [["prefill", "--tokens", "512,2048", "--sms", "8,24"], ["decode", "--tokens", "1,8,64"]]
)
def test_replay_equals_eager(tmp_path: Path, what: list[str], driver: str) -> None:
    pytest.importorskip("deep_ep")
    out = tmp_path / "graphs.json"
    argv = ["-m", "benchmarks.gpu.graphs", *what, "--num-layers", "2", "--rounds", "2", "--driver", driver]
    finished = launch_ranks(2, [*argv, "--out", str(out)], timeout=240)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    sizes = json.loads(out.read_text())["sizes"]
    assert sizes
    assert all(size["gates"]["passed"] for size in sizes), finished.stdout
