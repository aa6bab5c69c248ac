"""The single-threaded driver: one kept greenlet for each ubatch; a turn is a stack switch of well under a microsecond.

A file of its own, like each driver, and because `greenlet` is optional: it is imported when a driver is made.

Invariant: whenever a greenlet is left, the thread's torch state is the caller's. Threads get that for free; here a
ubatch that yields inside a `with` (no_grad, autocast, a stream, a mode) would leak its state into its sibling. So a
ubatch in another state than the caller's is left through `state.applied()`, which puts its own state back when it goes
on. The usual case costs one comparison.
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
        self._greenlet = greenlet
        self._num_ubatches = num_ubatches
        self._lanes: list[Any] = []
        self._wake: list[Callable[..., Any]] = []
        self._main: Any = None
        self._left_early = False
        self._hub: Any = None
        self._body: Body | None = None
        self._state: TorchState

    def run(self, body: Body, state: TorchState, timeout_s: float) -> bool:
        """See `Driver.run`. The limit is watched by the waits of the ubatches: there is no other thread to do it."""
        self._body, self._state = body, state
        self._hub = hub = self._greenlet.getcurrent()
        self._left_early = True
        main = hub if hub.parent is None else _root(hub)
        if main is not self._main:  # greenlets belong to the thread that made them, and its number is used again
            self._lanes = [self._greenlet.greenlet(self._loop) for _ in range(self._num_ubatches)]
            self._wake = [lane.switch for lane in self._lanes]
            for k, wake in enumerate(self._wake):
                wake(k)
            self._main = main
        self._wake[0]()
        self._left_early = False
        self._body = self._hub = None
        return True

    def settle(self, timeout_s: float) -> bool:
        """See `Driver.settle`.

        An interrupt in a ubatch's own code is that ubatch's error. One between two ubatches ends the greenlet that it
        hits: then the others are stopped from here, and the next step makes new ones.
        """
        if not self._left_early:
            return True
        deadline = time.monotonic() + timeout_s
        self._hub = self._greenlet.getcurrent()
        with self._state:
            for lane in self._lanes:
                lane.parent = self._hub
            for lane in self._lanes:
                self._stop(lane, deadline)
        self._main, self._lanes, self._wake = None, [], []
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
        if self._hub is not None:
            return  # the interpreter ends while another thread runs a step
        lanes, main = self._lanes, self._main
        self._main, self._lanes, self._wake = None, [], []
        here = self._greenlet.getcurrent()
        if main is _root(here):
            for lane in lanes:
                lane.parent = here
                lane.throw()

    def _loop(self, k: int) -> None:
        self._greenlet.getcurrent().parent.switch()  # parked before the first step, like a thread
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
