"""Run one step as N ubatches that take turns: the heart of the overlap.

A file of its own because it owns the two things that nothing else may decide: who runs next, and what happens when one
of them fails.

Two ubatches run the same, unchanged model code. Each passes the turn where it would otherwise wait for a message, so
its sibling's compute fills the gap::

    compute | A0 | A1 | E0      | E1      | S0 A0' | S1 A1' |      A attention+router, E experts, S shared expert,
    comm    |    | d0 | d1      | c0      | c1     | d0'    |      d dispatch, c combine; 0/1 the ubatch, ' next layer

Invariants:
- One ubatch runs at a time, the caller is parked meanwhile, and the turn goes round in order. A ubatch that returns
  leaves the rotation, so unequal numbers of yields are fine.
- The first error wins. Each sibling gets the turn once more, finds `UBatchCancelled` at the yield point where it was
  parked, runs its `finally` blocks, and leaves; one that had not started does not start. When `run` raises, nothing of
  the step runs any more, and the runner can be used again.
- Nothing outside the runner changes: no module state, no process-wide setting.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from types import TracebackType
from typing import Literal, TypeVar, cast

import torch

from dbo.context import UBatchContext, _current
from dbo.drivers.base import Body, Driver
from dbo.drivers.greenlets import GreenletDriver
from dbo.drivers.threads import ThreadDriver
from dbo.errors import ConfigError, DBOError, StepTimeout, UBatchCancelled
from dbo.graphs.active import active_capture, next_segment
from dbo.torch_state import TorchState
from dbo.trace import Tracer

A = TypeVar("A")
T = TypeVar("T")

_DRIVERS = ("threads", "greenlet")

# How long a step that failed may take to unwind before the runner gives up on a ubatch that does not come back.
_UNWIND_S = 5.0


class Step:
    """The turn protocol of one step: who is left, who runs, who is next, what went wrong first.

    It waits for nothing itself, that is the driver's part; `tests/dbo/test_turn_protocol.py` runs it through all
    interleavings. Kept by the runner and begun anew for every step. Ubatches see it as `context.Turns`.
    """

    def __init__(self, driver: Driver, contexts: list[UBatchContext]) -> None:
        self.error: BaseException | None = None
        self.running = 0
        self.live: list[int] = []
        self._switch = driver.switch
        self._contexts = contexts
        self._next: list[int] = []
        self._deadline = float("inf")

    def begin(self, num_ubatches: int, *, interleave: bool, timeout_s: float = 0) -> None:
        """Start a step. Without `interleave` a yield keeps the turn, so the ubatches run one after another."""
        self.error = None
        self.running = 0
        self.live = order = list(range(num_ubatches))
        self._next = order[1:] + order[:1] if interleave else order.copy()
        self._deadline = time.monotonic() + timeout_s if timeout_s > 0 else float("inf")

    def pass_turn(self, index: int) -> None:
        """See `Turns.pass_turn`."""
        following = self._next[index]
        if following != index:
            self.running = following
            self._switch(index, following)
        if self.error is not None or time.monotonic() > self._deadline:  # cheaper than the call
            self.check()

    def next_ubatch(self, index: int) -> UBatchContext:
        """See `Turns.next_ubatch`."""
        return self._contexts[self._next[index]]

    def check(self) -> None:
        """See `Turns.check`."""
        if self.error is not None:
            raise UBatchCancelled
        if time.monotonic() > self._deadline:
            raise StepTimeout(f"the step ran out of time in ubatch {self.running}: {self.positions()}")

    def fail(self, error: BaseException, where: str) -> None:
        """Keep the first error and say where it happened; what comes after it is a consequence."""
        if self.error is None:
            self.error = error
            _add_note(error, where)
        elif not isinstance(error, UBatchCancelled):
            _add_note(self.error, f"while stopping: {where}: {_describe(error)}")

    def leave(self, index: int) -> int | None:
        """Take a ubatch that ended out of the rotation; return who goes on, None after the last one."""
        live, following = self.live, self._next
        place = live.index(index)
        del live[place]
        if not live:
            return None
        for k in live:
            if following[k] == index:
                following[k] = following[index]
        self.running = live[place % len(live)]
        return self.running

    def positions(self) -> str:
        """Say how far every ubatch got."""
        num = len(self._next)
        return "; ".join(c.position + ("" if c.index in self.live else ", ended") for c in self._contexts[:num])


class UBatchRunner:
    """Runs steps of up to `num_ubatches` ubatches, in kept threads or greenlets. Close it, or use it as a context.

    device: where the model runs. driver: "threads" (default) or "greenlet" (one OS thread, much cheaper turns, needs
    the package greenlet; a host-side wait then holds up every ubatch). rank: only named in messages. step_timeout_s:
    limit of one step, 0 = none; with greenlets only yields and host-side waits watch it. tracer: records who ran when.
    """

    def __init__(
        self,
        num_ubatches: int,
        *,
        device: torch.device,
        driver: Literal["threads", "greenlet"] = "threads",
        rank: int = 0,
        step_timeout_s: float = 60.0,
        tracer: Tracer | None = None,
    ) -> None:
        if num_ubatches < 1:
            raise ConfigError("num_ubatches", num_ubatches, "at least 1")
        if driver not in _DRIVERS:
            raise ConfigError("driver", driver, " or ".join(_DRIVERS))
        if not (math.isfinite(step_timeout_s) and step_timeout_s >= 0):
            raise ConfigError("step_timeout_s", step_timeout_s, "seconds, 0 = no limit")
        self.num_ubatches = num_ubatches
        self._device = torch.device(device)
        self._rank = rank
        self._timeout_s = step_timeout_s
        self._busy, self._settled = False, True
        self._state: TorchState | None = None
        self._driver = self._make_driver(driver)
        self._contexts: list[UBatchContext] = []
        self._step = Step(self._driver, self._contexts)
        comm = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        for k in range(num_ubatches):
            self._contexts.append(UBatchContext(k, num_ubatches, self._step, tracer=tracer, comm_stream=comm))
        self._close = weakref.finalize(self, self._driver.close)  # a runner that is dropped leaks no thread either

    def run(self, fn: Callable[[A], T], items: Sequence[A], *, interleave: bool = True) -> list[T]:
        """Run `fn(items[k])` in ubatch k, and return the results in order. Blocks until every ubatch has ended.

        `fn` sees the caller's thread-local state: device, current stream, grad and inference mode, autocast, function
        and dispatch modes, context variables. With `interleave=False` the ubatches run one after another, through the
        same code and to the same bits. Raises the first error of any ubatch, with a note that says where it happened;
        `StepTimeout` past the limit; `DBOError` for a run inside a run, one at the same time as another, or one after a
        step whose ubatch never came back.
        """
        num, step, contexts = len(items), self._step, self._contexts
        if not 1 <= num <= self.num_ubatches:
            raise ConfigError("items", num, f"1 to {self.num_ubatches}", "make a runner with a larger num_ubatches")
        if _current.get() is not None or not self._close.alive:
            self._refuse_inside_or_closed()
        busy, self._busy = self._busy, True  # one statement without a call: no other thread gets in between
        if busy:
            raise DBOError("this runner runs a step already, for another thread: one step at a time")
        try:
            if not self._settled and not self._driver.settle(0):
                raise DBOError(f"a ubatch of an earlier step has not come back yet: {self.report()}")
            results: list[T | None] = [None] * num
            variables = [copy_context() for _ in range(num)]
            state, foreign, capturing = self._state, self._driver.own_threads, active_capture.get() is not None
            if state is None or not state.exact():
                self._state = state = TorchState.capture(self._device)

            def body(k: int) -> int | None:
                try:
                    if step.error is None:
                        with state.applied() if foreign and not state.exact() else state:
                            results[k] = variables[k].run(_run_ubatch, contexts[k], fn, items[k], capturing)
                except BaseException as error:
                    step.fail(error, f"rank {self._rank}, {contexts[k].position}")
                return step.leave(k)

            for context in contexts[:num]:
                context.reset(num, state.stream)
            step.begin(num, interleave=interleave, timeout_s=self._timeout_s)
            self._settled = False
            self._settled = self._drive(body, state)
            if step.error is not None:
                raise step.error
            if capturing:
                next_segment()
            return cast("list[T]", results)
        finally:
            try:
                if self._settled or self._driver.settle(0):
                    step.error = None  # it holds the frames, and so the tensors, of the step
            finally:
                self._busy = False

    def report(self) -> str:
        """Say how far each ubatch of the current or last step got. For watchdogs: callable from any thread."""
        return f"rank {self._rank}: {self._step.positions()}"

    def close(self) -> None:
        """End the kept threads or greenlets. A second call does nothing. Raises `DBOError` during a step."""
        if self._busy:
            raise DBOError("a runner cannot be closed while it runs a step")
        self._close()

    def __enter__(self) -> UBatchRunner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _drive(self, body: Body, state: TorchState) -> bool:
        """Start the step and wait for it; on an interrupt or a time-out have the ubatches stop, and wait for that.

        Gives whether nothing of it runs any more.
        """
        step, driver = self._step, self._driver
        try:
            if driver.run(body, state, self._timeout_s):
                return True
            step.fail(StepTimeout(f"the step took longer than {self._timeout_s:g} s"), self.report())
        except BaseException as error:  # whatever a signal handler raised while this thread was parked
            step.fail(error, f"rank {self._rank}, in the caller, interrupted; {step.positions()}")
        return driver.settle(_UNWIND_S)

    def _make_driver(self, name: str) -> Driver:
        if name == "greenlet":
            return GreenletDriver(self.num_ubatches)
        return ThreadDriver(self.num_ubatches, one_core=self._device.type == "cuda")

    def _refuse_inside_or_closed(self) -> None:
        if not self._close.alive:
            raise DBOError("this runner is closed")
        raise DBOError("a run inside a run: ubatches cannot be split again")


def _run_ubatch(context: UBatchContext, fn: Callable[[A], T], item: A, capturing: bool) -> T:
    _current.set(context)
    if capturing:
        next_segment()
    if context.tracer is not None:
        context.begin_compute()
    result = fn(item)
    if context._recv_hook is not None:
        context.run_recv_hook()
    if context.tracer is not None:
        context.end_compute()
    return result


def _add_note(error: BaseException, note: str) -> None:
    # The class is the model's: whatever it does, the siblings must be stopped.
    with suppress(Exception):
        BaseException.add_note(error, note)


def _describe(error: BaseException) -> str:
    try:
        return repr(error)
    except Exception:
        return type(error).__name__
