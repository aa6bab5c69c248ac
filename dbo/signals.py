"""SIGINT, SIGUSR1 and SIGTERM, answered even while the main thread waits inside C++.

A file of its own because it is the only code that touches signal set-up. Python's handlers run in the main thread,
between two of its instructions: not while it sits in a collective. The descriptor given to `signal.set_wakeup_fd` is
written at once, so a thread that reads it can report, flush and end the process.

    SIGINT    the first asks for a clean end: `finish_requested` turns true, the program looks at it between steps
              the second ends the process at once
    SIGUSR1   asks for a clean end too, as often as it comes: schedulers send it before they take the nodes away
    SIGTERM   ends the process; launchers send it when another rank died, so the thread first asks why

Invariants: `close` restores handlers and descriptor exactly and leaves no thread; nothing waits without limit.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType

UNWIND_LIMIT_S = 3.0  # what the main thread gets to end by itself when it has been told of a failure
FLUSH_LIMIT_S = 5.0


class Signals:
    """Answers them from creation to `close`. Both must run in the main thread.

    name: who is speaking, for the messages on standard error, e.g. `"rank 3"`.
    why: asked on SIGTERM, in the reporting thread; may take a second. Returns what is known to have failed elsewhere
    (the main thread is then unwinding and gets `UNWIND_LIMIT_S` to end by itself), or None.
    """

    def __init__(self, name: str, why: Callable[[], str | None] = lambda: None) -> None:
        self.finish_requested = False
        self._name = name
        self._why = why
        self._flush: list[Callable[[], None]] = []
        self._closed = threading.Event()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # A signal reaches the descriptor only if it has a handler in Python; what that does is up to the thread.
        answered = (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)
        self._handlers_before = {n: signal.signal(n, _ignore) for n in answered}
        self._thread = threading.Thread(target=self._read, name="signals", daemon=True)
        self._thread.start()

    def on_exit(self, flush: Callable[[], None]) -> None:
        """Have `flush` called, in another thread, `FLUSH_LIMIT_S` at most, before a signal ends the process."""
        self._flush.append(flush)

    def close(self) -> None:
        """Restore what was there before."""
        self._closed.set()
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._writer.close()
        self._thread.join(UNWIND_LIMIT_S)
        self._reader.close()

    def _read(self) -> None:
        while numbers := self._reader.recv(64):  # empty once the writer is closed
            for number in numbers:
                if number == signal.SIGTERM:
                    self._terminate()
                elif number == signal.SIGINT:
                    self._interrupt()
                elif number == signal.SIGUSR1:
                    self.finish_requested = True
                    self._say("told by SIGUSR1 to end, finishing this step")

    def _interrupt(self) -> None:
        if self.finish_requested:
            self.end("interrupted again, stopping now", 128 + signal.SIGINT)
        self.finish_requested = True
        self._say("interrupted, finishing this step (interrupt again to stop at once)")

    def _terminate(self) -> None:
        failed = self._why()
        if failed is not None and self._closed.wait(UNWIND_LIMIT_S):
            return
        self.end("stopped by SIGTERM" + (f" because {failed}" if failed is not None else ""), 128 + signal.SIGTERM)

    def end(self, text: str, code: int) -> None:
        """Say `text`, flush, and end the process with `code`, whatever its threads are doing. Does not return."""
        self._say(text)
        flusher = threading.Thread(target=self._run_flush, daemon=True)
        flusher.start()
        flusher.join(FLUSH_LIMIT_S)
        os._exit(code)

    def _run_flush(self) -> None:
        for flush in self._flush:
            try:
                flush()
            except Exception as error:  # the others still get their turn
                self._say(f"could not flush: {error}")

    def _say(self, text: str) -> None:
        sys.stderr.write(f"{self._name}: {text}\n")
        sys.stderr.flush()


def _ignore(number: int, frame: FrameType | None) -> None:
    """The thread has the signal already."""
