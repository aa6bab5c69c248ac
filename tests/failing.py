"""Tests that must fail, under `python -O` too: `test_faults.py` runs them and counts. Not collected on their own."""

import sys
from typing import Any

from tests.dbo.toy import assert_right


def test_asserts_are_on() -> None:
    assert not sys.flags.optimize


def test_in_a_module_of_tests() -> None:
    assert sum([1, 1]) == 3


def test_in_a_helper() -> None:
    class Idle:
        def run(self, fn: Any, items: list[Any]) -> list[Any]:
            return items

    assert_right(Idle(), 2)  # type: ignore[arg-type]


def fail(ctx: Any) -> None:
    assert ctx.rank < 0


def test_on_a_rank(ranks: Any) -> None:
    ranks(1).run(fail)
