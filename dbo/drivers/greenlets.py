"""The single-threaded driver: one greenlet for each ubatch; a turn is a stack switch of well under a microsecond.

A file of its own, like each driver, and because `greenlet` is optional: it is imported when a driver is made.

Invariants:
- Whenever a greenlet is left, the thread's torch state is the caller's. Threads get that for free; here a ubatch that
  yields inside a `with` (no_grad, autocast, a stream, a mode) would leak its state into its sibling. So a ubatch in
  another state than the caller's is left through `state.applied()`, which puts its own state back when it goes on. The
  usual case costs one comparison.
- Below a greenlet's first frame lies the stack of whoever entered it first. It must be the caller's, parked and whole:
  any error that torch throws walks down there. So greenlets are kept for callers whose stack stands at the same place,
  as an engine's does in every step, and made anew for others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch._C import (
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    is_grad_enabled,
    is_inference_mode_enabled,
)

from dbo.drivers.base import Body
from dbo.drivers.stack import make_mark
from dbo.errors import DBOError, UBatchCancelled
from dbo.torch_state import TorchState


class GreenletDriver:
    """Ubatch k runs in greenlet k of the calling thread. A wait of the host in one ubatch holds up all of them."""

    own_threads = False

    def __init__(self, num_ubatches: int) -> None:
        try:
            import greenlet
        except ImportError as error:
            raise DBOError(
                "driver='greenlet' needs the package greenlet: pip install greenlet, or driver='threads'"
            ) from error
        self._greenlet, self._current, self._mark = greenlet.greenlet, greenlet.getcurrent, make_mark()
        self._num_ubatches = num_ubatches
        self._lanes: list[Any] = []
        self._wake: list[Callable[..., Any]] = []
        self._made_at: tuple[Any, int | None] = None, None  # by whom, and where the stack stood
        self._left_early = False
        self._hub: Any = None
        self._body: Body | None = None
        self._state: TorchState

    def run(self, body: Body, state: TorchState, timeout_s: float) -> bool:
        """See `Driver.run`. The limit is watched by the waits of the ubatches: there is no other thread to do it."""
        self._body, self._state, self._hub = body, state, (hub := self._current())
        self._left_early = True
        maker, place = self._made_at
        mark = self._mark()
        if maker is not hub or place is None or place != mark:
            self._make_lanes(hub)
            self._made_at = hub, mark
        self._wake[0]()
        self._left_early = False
        self._body = self._hub = None
        return True

    def settle(self, timeout_s: float) -> bool:
        """See `Driver.settle`.

        An interrupt in a ubatch's own code is that ubatch's error. One between two ubatches ends the greenlet that it
        hits: then the others are stopped from here.
        """
        if not self._left_early:
            return True
        deadline = time.monotonic() + timeout_s
        self._hub = self._current()
        with self._state:
            for lane in self._lanes:
                lane.parent = self._hub
            for lane in self._lanes:
                self._stop(lane, deadline)
        self._made_at = None, None
        self._body = self._hub = None
        self._left_early = False
        return True

    @staticmethod
    def _stop(lane: Any, deadline: float) -> None:
        while not lane.dead:  # more than once, if model code catches it and yields again
            with suppress(UBatchCancelled):
                lane.throw(UBatchCancelled)
            if time.monotonic() > deadline:
                return

    def switch(self, src: int, dst: int) -> None:
        """See `Driver.switch`."""
        state = self._state
        if (  # `state.in_force()`, its usual case written out: the call would cost a tenth of a turn
            is_grad_enabled() is state.grad
            and is_inference_mode_enabled() is state.inference
            and _is_any_autocast_enabled() is state.any_autocast
            and _len_torch_function_stack() == state.num_function_modes
            and _len_torch_dispatch_stack() == state.num_dispatch_modes
            and (state.plain or state.in_force())
        ):
            self._wake[dst]()
        else:
            with state.applied():
                self._wake[dst]()

    def close(self) -> None:
        """See `Driver.close`. Greenlets of a thread other than this one end with their last reference."""
        if self._hub is None:  # else the interpreter ends while another thread runs a step
            self._end_lanes(self._current())

    def _make_lanes(self, hub: Any) -> None:
        self._end_lanes(hub)
        self._lanes = [self._greenlet(self._loop, hub) for _ in range(self._num_ubatches)]
        self._wake = [lane.switch for lane in self._lanes]
        for k, wake in enumerate(self._wake):
            wake(k)

    def _end_lanes(self, here: Any) -> None:
        """End parked greenlets, if they are this thread's."""
        lanes, self._lanes, self._wake = self._lanes, [], []
        maker, _ = self._made_at
        self._made_at = None, None
        if maker is not None and _root(maker) is _root(here):
            for lane in lanes:
                lane.parent = here
                lane.throw()

    def _loop(self, k: int) -> None:
        self._hub.switch()  # parked before the first step, like a thread
        while True:
            body = self._body
            assert body is not None
            following = body(k)
            del body
            (self._hub.switch if following is None else self._wake[following])()


def _root(greenlet: Any) -> Any:
    """The greenlet that is its thread itself."""
    while greenlet.parent is not None:
        greenlet = greenlet.parent
    return greenlet
