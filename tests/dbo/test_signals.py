"""SIGINT, SIGUSR1, SIGTERM are answered while the main thread waits inside C++, where Python's handlers do not run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from dbo.signals import Signals
from tests.ranks import REPOSITORY

# Waits in C++ for a key that never comes, as the main thread of a rank waits for a message.
PROGRAM = """
import sys
from datetime import timedelta
import torch.distributed as dist
from dbo.signals import Signals
why = {"none": lambda: None, "failed": lambda: "rank 2 on b failed: no memory"}[sys.argv[1]]
signals = Signals("rank 1", why)
signals.on_exit(lambda: 1 / 0)
signals.on_exit(lambda: print("flushed", signals.finish_requested, flush=True))
print("waiting", flush=True)
dist.HashStore().wait(["never"], timedelta(seconds=60))
"""


def end_by(*numbers: int, why: str = "none") -> tuple[int, str, str, float]:
    """Return code, standard output and error of the program that gets these signals, and how long the last one took."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, why],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout.readline() == "waiting\n"
            for number in numbers:
                time.sleep(0.3)
                assert process.poll() is None
                process.send_signal(number)
            sent = time.monotonic()
            out, err = process.communicate(timeout=15)
            return process.returncode, out, err, time.monotonic() - sent
        finally:
            process.kill()


def test_sigusr1_asks_for_an_end_as_often_as_it_comes():
    returncode, out, err, _ = end_by(signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM)
    assert (returncode, out) == (128 + signal.SIGTERM, "flushed True\n")
    assert err.startswith(2 * "rank 1: told by SIGUSR1 to end, finishing this step\n")


def test_sigterm_flushes_and_ends_the_process():
    returncode, out, err, elapsed_s = end_by(signal.SIGTERM)
    assert (returncode, out) == (128 + signal.SIGTERM, "flushed False\n")
    assert err == "rank 1: stopped by SIGTERM\nrank 1: could not flush: division by zero\n"
    assert elapsed_s < 2


def test_sigterm_names_the_failure_behind_it():
    returncode, out, err, elapsed_s = end_by(signal.SIGTERM, why="failed")
    assert (returncode, out) == (128 + signal.SIGTERM, "flushed False\n")
    assert "rank 1: stopped by SIGTERM because rank 2 on b failed: no memory" in err
    assert elapsed_s < 6


def test_the_second_sigint_ends_the_process():
    returncode, out, err, _ = end_by(signal.SIGINT, signal.SIGINT)
    assert (returncode, out) == (128 + signal.SIGINT, "flushed True\n")
    assert "rank 1: interrupted, finishing" in err


@pytest.fixture
def interruptible():
    """Python's own answer to SIGINT, which a job that a shell started in the background is born without."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, inherited)


def test_the_first_sigint_only_asks(capfd, interruptible):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    threads, descriptors = threading.active_count(), len(os.listdir("/dev/fd"))
    signals = Signals("rank 0")
    try:
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 5
        while not signals.finish_requested and time.monotonic() < deadline:
            time.sleep(0.01)
        assert signals.finish_requested
    finally:
        signals.close()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert signal.set_wakeup_fd(-1) == -1
    assert (threading.active_count(), len(os.listdir("/dev/fd"))) == (threads, descriptors)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
