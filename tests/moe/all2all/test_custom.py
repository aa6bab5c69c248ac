"""The example of a backend, and the ways in for one's own."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.ranks import REPOSITORY, launch_ranks


def test_the_example_runs() -> None:
    done = launch_ranks(2, ["examples/custom_all2all.py"])
    assert done.returncode == 0, done.stderr
    assert "every token came back, on 2 ranks" in done.stdout


def test_the_suite_takes_a_backend_by_name() -> None:
    """That the example passes is shown by the suite itself, which runs it beside the project's backends."""
    name = "examples.custom_all2all:GatherAll2All"
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "tests/moe/all2all", "--backend", name]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_every_case[GatherAll2All-2]" in done.stdout
    assert "test_every_case[torch" not in done.stdout
