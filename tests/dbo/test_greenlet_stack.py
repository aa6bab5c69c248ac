"""Greenlets and the C stack: an error that torch throws walks down it, below the first frame of a greenlet too."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from dbo.drivers.stack import make_mark
from tests.dbo.toy import without_greenlet

# Steps at other depths of the stack than the first one, with errors that walk down it. Kept greenlets crash in 2 of 5.
PROGRAM = """
import random, torch
from dbo.context import yield_turn
from dbo.runner import UBatchRunner

def below(depth, call):
    if depth:
        random.choice((sorted, max))([0], key=lambda _: below(depth - 1, call) or 0)
    else:
        call()

def fails(k):
    yield_turn("here")
    if k:
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    yield_turn("there")

def step():
    try:
        runner.run(fails, [0, 1])
    except RuntimeError as error:
        assert "shapes cannot be multiplied" in str(error)
    else:
        raise AssertionError("nothing was raised")

for seed in range(8):
    random.seed(seed)
    with UBatchRunner(2, device=torch.device("cpu"), driver="greenlet") as runner:
        below(random.randint(0, 10), lambda: runner.run(yield_turn, ["a", "b"]))
        for _ in range(60):
            below(random.randint(0, 40), step)
"""


@without_greenlet
def test_errors_at_any_depth_of_the_stack() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"


def test_marks_tell_where_the_stack_stands() -> None:
    mark = make_mark()
    if mark() is None:
        pytest.skip("not known for this machine")

    def below(depth: int, call: Callable[[], int | None]) -> int | None:
        found: list[int | None] = []
        sorted([0], key=lambda _: found.append(below(depth - 1, call) if depth else call()) or 0)
        return found[0]

    assert len({below(depth, mark) for depth in range(8)}) == 8
    assert len({below(3, mark) for _ in range(8)}) == 1
