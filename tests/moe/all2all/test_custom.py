"""The example of a backend, and the ways in for one's own."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

from tests.ranks import REPOSITORY, launch_ranks


def test_the_example_runs() -> None:
    done = launch_ranks(2, ["examples/custom_all2all.py"])
    assert done.returncode == 0, done.stderr
    assert "every token came back, on 2 ranks" in done.stdout


def test_the_example_is_a_backend_in_40_lines() -> None:
    """All of the file counts but its docstring, the program that tries it, and blank lines."""
    source = (REPOSITORY / "examples/custom_all2all.py").read_text()
    docstring, *body = ast.parse(source).body
    assert isinstance(docstring, ast.Expr)
    program = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == "main")
    assert docstring.end_lineno is not None
    backend = source.splitlines()[docstring.end_lineno : program.lineno - 1]
    assert len([line for line in backend if line.strip()]) <= 40
    assert max(map(len, backend)) <= 120


def test_the_suite_takes_a_backend_by_name() -> None:
    """That the example passes is shown by the suite itself, which runs it beside the project's backends."""
    name = "examples.custom_all2all:GatherAll2All"
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "tests/moe/all2all", "--backend", name]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_every_case[GatherAll2All-2]" in done.stdout
    assert "test_every_case[torch" not in done.stdout
