"""The turn protocol, explored exhaustively: every interleaving of up to three ubatches, their failures, an interrupt.

The decisions are the real `Step`'s. Around it stands a model of the thread driver with one transition for each of its
lock operations, so that a thread that gave its turn away may still be about to park while others run on:

    wait    acquire the own lock            (ThreadDriver._loop and .switch)
    run     model code up to the next yield, the end, or a failure
    give    release the next one's lock     (ThreadDriver.switch)
    leave   release the next one's lock, or the caller's    (the end of ThreadDriver._loop)

Greenlets are the special case without concurrency: give and wait are one transition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NoReturn, cast

import pytest

from dbo.context import UBatchContext
from dbo.drivers.base import Driver
from dbo.errors import UBatchCancelled
from dbo.runner import Step
from tests.dbo.toy import Boom

DONE = -1  # the caller's lock


@dataclass(frozen=True, kw_only=True)
class Program:
    """What each ubatch does: how often it yields, and before which yield (or its end) it fails, None = never."""

    num_yields: tuple[int, ...]
    fails_at: tuple[int | None, ...]
    interleave: bool
    interrupt: bool

    @property
    def num(self) -> int:
        return len(self.num_yields)


@dataclass(frozen=True, kw_only=True)
class State:
    """One state: where each thread is, which locks are free, and what the step knows."""

    at: tuple[str, ...]
    target: tuple[int, ...]  # whose lock a thread in give or leave will release
    yields: tuple[int, ...]
    free: frozenset[int]
    live: tuple[int, ...]
    next: tuple[int, ...]
    error: str | None
    returned: bool

    def with_thread(self, k: int, **changes: object) -> State:
        new = {name: _put(getattr(self, name), k, value) for name, value in changes.items()}
        return replace(self, **new)


class _Switch(Exception):
    """Instead of parking a thread, the model's driver says who is to be woken."""


class _NoWait:
    def switch(self, src: int, dst: int) -> NoReturn:
        raise _Switch(dst)


def _put(values: tuple[object, ...], k: int, value: object) -> tuple[object, ...]:
    return (*values[:k], value, *values[k + 1 :])


def _step(state: State) -> Step:
    step = Step(cast(Driver, _NoWait()), cast("list[UBatchContext]", []))
    step.live, step._next = list(state.live), list(state.next)
    step.error = None if state.error is None else Boom(state.error)
    return step


def _know(state: State, step: Step) -> State:
    error = None if step.error is None else str(step.error)
    return replace(state, live=tuple(step.live), next=tuple(step._next), error=error)


def _begin(program: Program) -> State:
    step = Step(cast(Driver, _NoWait()), cast("list[UBatchContext]", []))
    step.begin(program.num, interleave=program.interleave)
    zero = (0,) * program.num
    return State(
        at=("wait",) * program.num,
        target=zero,
        yields=zero,
        free=frozenset({0}),  # the caller has given the first turn
        live=tuple(step.live),
        next=tuple(step._next),
        error=None,
        returned=False,
    )


def _run(program: Program, state: State, k: int) -> State:
    """Ubatch k has the turn: it starts or goes on, up to its next transition."""
    step, yields = _step(state), state.yields[k]
    try:
        if step.error is not None:
            raise UBatchCancelled
        if program.fails_at[k] == yields:
            raise Boom(f"ubatch {k}")
        if yields < program.num_yields[k]:
            state = state.with_thread(k, yields=yields + 1)
            step.pass_turn(k)
            return state  # kept the turn: it was the only one, or the ubatches run one after another
    except _Switch as switch:
        return state.with_thread(k, at="give", target=switch.args[0])
    except BaseException as error:
        step.fail(error, "")
    following = step.leave(k)
    return _know(state.with_thread(k, at="leave", target=DONE if following is None else following), step)


def _transitions(program: Program, state: State) -> Iterator[State]:
    for k, at in enumerate(state.at):
        if at == "wait" and k in state.free:
            yield replace(state.with_thread(k, at="run"), free=state.free - {k})
        elif at == "run":
            yield _run(program, state, k)
        elif at in ("give", "leave"):
            assert state.target[k] not in state.free, "a lock released twice"
            after = state.with_thread(k, at="wait" if at == "give" else "ended")
            yield replace(after, free=state.free | {state.target[k]})
    if DONE in state.free:
        yield replace(state, free=state.free - {DONE}, returned=True)
    if program.interrupt and not state.returned and state.error is None:
        yield replace(state, error="interrupt")


def _explore(program: Program) -> int:
    seen, todo = set(), [_begin(program)]
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        assert sum(at in ("run", "give", "leave") for at in state.at) <= 1, f"two run at once: {program} {state}"
        following = list(_transitions(program, state))
        if not following:
            _check_end(program, state)
        todo.extend(following)
    return len(seen)


def _check_end(program: Program, state: State) -> None:
    assert state.returned, f"deadlock: {program} {state}"
    assert state.at == ("ended",) * program.num, f"left behind: {program} {state}"
    assert not state.free, f"a stale turn: {program} {state}"
    if state.error is None:
        assert state.yields == program.num_yields
        assert set(program.fails_at) == {None}
    elif state.error != "interrupt":
        assert program.fails_at[int(state.error[-1])] is not None


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("num", [1, 2, 3])
def test_no_deadlock_and_never_two_at_once(num: int, interleave: bool) -> None:
    num_states = 0
    for num_yields in product(range(3), repeat=num):
        for fails_at in product(*([None, *range(n + 1)] for n in num_yields)):
            for interrupt in (False, True):
                num_states += _explore(
                    Program(num_yields=num_yields, fails_at=fails_at, interleave=interleave, interrupt=interrupt)
                )
    assert num_states > 50


def test_the_exploration_finds_a_deadlock() -> None:
    """A protocol that never takes the finished out of the rotation must be caught, or the exploration shows nothing."""
    program = Program(num_yields=(2, 0), fails_at=(None, None), interleave=True, interrupt=False)
    forgetful = Step.leave

    def leave(step: Step, index: int) -> int | None:
        ring = list(step._next)
        following = forgetful(step, index)
        step._next = ring
        return following

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "leave", leave)
        with pytest.raises(AssertionError, match="deadlock"):
            _explore(program)
