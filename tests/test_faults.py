"""Every known fault has tests, which hold under `python -O` as well; and under it a test can still fail."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterable

import pytest

from tests.faults import FAULTS
from tests.ranks import REPOSITORY, kill_tree

CASES = {*range(1, 22), *range(27, 34)}  # 22 to 26 need GPUs or are about their streams; 34 on are graphs and figures


def run_optimized(tests: Iterable[str], *, timeout: float) -> tuple[int, str]:
    """pytest under PYTHONOPTIMIZE=1, which its ranks and other processes inherit: its exit code and output."""
    unrewritten = "ignore:assertions not in test modules"  # see `tests/__init__.py`
    command = [sys.executable, "-m", "pytest", "-q", "-W", unrewritten, "-p", "no:cacheprovider", *tests]
    env = os.environ | {"PYTHONOPTIMIZE": "1", "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command += ["-m", "not slow and not gpu and not multigpu and not slurm and not hosts and not browser"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            kill_tree(process)
            pytest.fail(f"not finished after {timeout:g} s\n{process.communicate()[0][-5000:]}")
        finally:
            kill_tree(process)
        return process.returncode, output


def collected(path: str) -> set[str]:
    tree = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def named(kind: str, *, here: bool = True) -> list[str]:
    tests = {test for fault in FAULTS.values() for test in getattr(fault, kind)}
    return sorted(test for test in tests if here or not test.startswith("tests/test_faults.py"))


def test_every_case_has_tests_that_exist() -> None:
    assert set(FAULTS) == CASES
    assert all(fault.what and (fault.tests or fault.rank_tests) for fault in FAULTS.values())
    for test in named("tests") + named("rank_tests"):
        path, _, function = test.partition("::")
        assert function.startswith("test_")
        assert function in collected(path), test


def test_tests_of_one_process_start_no_ranks() -> None:
    """So that the table tells what is quick."""
    for test in named("tests"):
        path, _, function = test.partition("::")
        tree = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
        (found,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
        assert "ranks" not in {argument.arg for argument in found.args.args}, test


def test_tests_can_fail_without_asserts() -> None:
    code, output = run_optimized(["tests/failing.py"], timeout=100)
    assert code == 1, output
    assert "4 failed in" in output, output


def test_they_hold_without_asserts() -> None:
    code, output = run_optimized(named("tests", here=False), timeout=280)
    assert code == 0, output[-5000:]
    assert "skipped" not in output, output[-5000:]


@pytest.mark.slow
def test_those_between_ranks_hold_without_asserts() -> None:
    code, output = run_optimized(named("rank_tests"), timeout=1500)
    assert code == 0, output[-5000:]
