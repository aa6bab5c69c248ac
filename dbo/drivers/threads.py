"""The default driver: one kept OS thread for each ubatch, a raw lock for each as its turn.

A file of its own, like each driver. A raw lock is the cheapest thing that parks a thread: a release and an acquire,
where `threading.Event` needs a condition with a lock of its own. Nothing is started, joined or allocated in a step,
and there is no barrier: a ubatch thread starts with its first turn.

With `one_core` the ubatches run on the core that the caller leaves when it parks. A turn then wakes a thread on a core
that is awake: on another one, asleep for as long as the sibling ran, waking takes a virtual machine up to hundreds of
microseconds. For devices where a ubatch's own thread is all the host does; one that computes with more threads needs
its cores.

Invariants:
- Every lock is held (taken) while its owner runs or somebody else has the turn; a release is the turn itself, so there
  is at most one free lock among the turns and `_done`, and never two running.
- `_running` is False before `_done` is released, and is set in the very statement before the first turn is given: an
  interrupt in the caller finds either a step that never started or one that ends by itself.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from _thread import LockType, allocate_lock

from dbo.drivers.base import Body
from dbo.torch_state import TorchState

_POLL_S = 0.0005  # only after an interrupt or a time-out


class ThreadDriver:
    """Ubatch k runs in thread k, always the same one: cuBLAS and cuDNN keep handles and plans for each thread."""

    own_threads = True

    def __init__(self, num_ubatches: int, *, one_core: bool = False) -> None:
        self.one_core = one_core and hasattr(os, "sched_setaffinity")
        self._core_of_caller = ctypes.CDLL(None).sched_getcpu if self.one_core else lambda: -1
        self._core: int | None = None
        self._turns = [_taken_lock() for _ in range(num_ubatches)]
        self._done = _taken_lock()
        self._running = False
        self._left_early = False
        self._closing = False
        self._end_once = allocate_lock()
        self._body: Body | None = None
        self._threads = [
            threading.Thread(target=self._loop, args=(k,), name=f"ubatch-{k}", daemon=True) for k in range(num_ubatches)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, body: Body, state: TorchState, timeout_s: float) -> bool:
        """See `Driver.run`. `body` puts `state` into force itself; a thread keeps it from turn to turn."""
        if self.one_core:
            self._follow_caller()
        self._body = body
        self._left_early = True
        self._running = True  # these two lines must stay together, see the invariants
        self._turns[0].release()
        finished = self._done.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX) if timeout_s > 0 else -1)
        self._left_early = not finished
        return finished

    def settle(self, timeout_s: float) -> bool:
        """See `Driver.settle`."""
        if not self._left_early:
            return True
        deadline = time.monotonic() + timeout_s
        while self._running and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if self._running:
            return False
        self._done = _taken_lock()  # whether the old one was released, or taken, is not known any more
        self._left_early = False
        return True

    def switch(self, src: int, dst: int) -> None:
        """See `Driver.switch`."""
        self._turns[dst].release()
        self._turns[src].acquire()

    def close(self) -> None:
        """See `Driver.close`. Does not wait for a ubatch that never came back: should it, all threads end then."""
        threads, self._threads = self._threads, []
        self._closing = True
        if self._running:
            return
        self._end()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _follow_caller(self) -> None:
        """Move the threads to this thread's core: a call that is cheap where they are there already."""
        core = self._core_of_caller()
        if core >= 0 and core != self._core:
            for thread in self._threads:
                os.sched_setaffinity(thread.native_id or 0, {core})
            self._core = core

    def _end(self) -> None:
        if self._end_once.acquire(blocking=False):
            self._body = None
            for turn in self._turns:
                turn.release()

    def _loop(self, k: int) -> None:
        turn = self._turns[k]
        while True:
            turn.acquire()
            if self._body is None:
                return
            following = self._body(k)
            if following is not None:
                self._turns[following].release()
            else:
                done = self._done
                self._body = None
                self._running = False
                done.release()
                if self._closing:
                    self._end()


def _taken_lock() -> LockType:
    lock = allocate_lock()
    lock.acquire()
    return lock
