"""Several ranks for a test: a pool that stays up for the whole session, and whole commands under torch's launcher.

Starting ranks costs seconds, so `RankPool` starts them once per world size and sends them one case after another. Each
case gets its own store prefix and groups, so collectives that one case abandons cannot poison the next. A case that
hangs costs its pool: the stacks of all ranks go into the error, every process the pool started is killed by id, and
the next case gets a fresh pool. Everything waits with a limit, and ranks exit when the test process disappears.

    def add(ctx, n):                       # runs on every rank, in a module that the ranks can import
        x = torch.full((1,), float(ctx.rank + n))
        dist.all_reduce(x, group=ctx.group)
        return x.item()

    def test_add(ranks):
        assert ranks(2).run(add, 10, timeout=20) == [21.0, 21.0]

Run as a program (`python -m tests.ranks ADDRESS`) this module is one rank of a pool.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
START_LIMIT_S = 120.0
GRACE_S = 10.0  # what the other ranks get to finish a case after the first one failed


class RankError(AssertionError):
    """A case failed on some rank; the text holds that rank's own traceback."""


# --------------------------------------------------------------------------- commands under torch's launcher


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in task.read_text().split()]
    return found


def process_tree(pid: int) -> list[int]:
    """`pid` and all its descendants, parents first."""
    tree = [pid]
    for parent in tree:
        tree += _children(parent)
    return tree


def kill_tree(process: subprocess.Popen[Any]) -> None:
    """Kill exactly the processes that `process` started, and it; returns when it is gone."""
    if process.poll() is None:
        for pid in process_tree(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait(timeout=30)


def rank_environment(extra: Mapping[str, str]) -> dict[str, str]:
    path = os.pathsep.join(p for p in (str(REPOSITORY), os.environ.get("PYTHONPATH")) if p)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TORCHELASTIC_"))}
    return {**inherited, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **extra}


@dataclass(frozen=True, kw_only=True)
class Finished:
    """How a command ended. `returncode` is torchrun's: 0, or 1 if any rank failed."""

    returncode: int
    stdout: str
    stderr: str
    elapsed_s: float


class RankCommand:
    """`argv` (as torchrun takes it: `["-m", "launch", ...]` or `["script.py", ...]`) running on `num_ranks` ranks."""

    def __init__(
        self,
        num_ranks: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        launcher_args: Sequence[str] = (),
        cwd: Path = REPOSITORY,
    ):
        self._files = tempfile.TemporaryDirectory(prefix="ranks-")
        self.stdout, self.stderr = (Path(self._files.name) / name for name in ("stdout", "stderr"))
        launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}", "--rdzv-backend=c10d"]
        address = ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]  # port 0: a free one is chosen
        self._started = time.monotonic()
        with self.stdout.open("wb") as out, self.stderr.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, *address, *launcher_args, *argv],
                env=rank_environment(env or {}),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,  # Ctrl-C in the test process must not reach the ranks before we do
            )

    def rank_pids(self) -> list[int]:
        """The process of each rank, by rank; empty until the launcher has started all of them."""
        ranks = {}
        for pid in _children(self.process.pid):
            with contextlib.suppress(OSError):
                settings = dict(
                    item.partition("=")[::2]
                    for item in Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
                )
                if "RANK" in settings:
                    ranks[int(settings["RANK"])] = (pid, int(settings["WORLD_SIZE"]))
        complete = ranks and len(ranks) == next(iter(ranks.values()))[1]
        return [ranks[rank][0] for rank in sorted(ranks)] if complete else []

    def wait(self, timeout: float) -> Finished:
        """Wait for the end; after `timeout` seconds kill everything and raise `TimeoutError` with the output."""
        try:
            self.process.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            kill_tree(self.process)
            raise TimeoutError(
                f"not finished after {timeout} s\n{self.stdout.read_text()[-5000:]}\n{self.stderr.read_text()[-5000:]}"
            ) from None
        return Finished(
            returncode=self.process.returncode,
            stdout=self.stdout.read_text(errors="replace"),
            stderr=self.stderr.read_text(errors="replace"),
            elapsed_s=time.monotonic() - self._started,
        )

    def close(self) -> None:
        kill_tree(self.process)
        self._files.cleanup()

    def __enter__(self) -> RankCommand:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def launch_ranks(
    num_ranks: int, argv: Sequence[str], *, timeout: float = 60.0, env: Mapping[str, str] | None = None
) -> Finished:
    """Run a whole command on `num_ranks` ranks and wait for its end."""
    with RankCommand(num_ranks, argv, env=env) as command:
        return command.wait(timeout)


# --------------------------------------------------------------------------- a pool of ranks that take many cases


@dataclass(frozen=True)
class RankContext:
    """What a case function gets: who it is, and a store and groups that belong to this case alone."""

    rank: int
    world_size: int
    case: str
    _cleanup: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @cached_property
    def store(self) -> Any:
        """A store of this case: keys are free of other cases' keys."""
        from datetime import timedelta

        import torch.distributed as dist

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        client = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
        return dist.PrefixStore(self.case, client)

    @cached_property
    def group(self) -> Any:
        """A gloo group over all ranks. There is no default group: use `group.rank()`, `group.size()`."""
        return self.new_group("group")

    def new_group(self, name: str) -> Any:
        """A further gloo group; every rank must ask for it under the same name."""
        import torch
        import torch.distributed as dist

        from dbo.groups import make_group

        made = make_group(dist.PrefixStore(name, self.store), self.rank, self.world_size, torch.device("cpu"))
        self._cleanup.callback(made.abort)  # dropping it would wait for what the case abandoned
        made.group.allreduce([torch.zeros(1)]).wait()  # a rank that is done at once must not leave while others connect
        return made.group

    def mesh(self, name: str = "", **options: Any) -> Any:
        """A `launch.mesh.Mesh` of this case, on the CPU; the case closes it. A second one needs a name of its own."""
        from launch.mesh import Mesh

        return Mesh.start(device="cpu", prefix=self.case + name, **options)


@dataclass(frozen=True)
class _Started:
    """The running ranks of a pool: by rank, the connection to each and its process."""

    command: RankCommand
    files: tempfile.TemporaryDirectory[str]
    connections: list[Connection]
    pids: list[int]

    def stacks(self) -> str:
        """What every thread of every rank is doing."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
        time.sleep(0.5)  # the ranks write their stacks
        files = sorted(Path(self.files.name).glob("stacks*"))
        return "\n".join(f"--- {file.name}\n{file.read_text()[-5000:]}" for file in files)

    def close(self) -> None:
        for connection in self.connections:
            connection.close()  # idle ranks exit on this
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.command.process.wait(timeout=2)
        self.command.close()
        self.files.cleanup()


class RankPool:
    """`world_size` ranks under torch's launcher, kept for many cases. Not for use from several threads."""

    def __init__(self, world_size: int, env: Mapping[str, str] | None = None):
        self.world_size = world_size
        self._env = env
        self._num_cases = 0
        self._started: _Started | None = None

    def run(self, function: Callable[..., Any] | str, *args: Any, timeout: float = 30.0) -> list[Any]:
        """Call `function(ctx, *args)` on every rank; return the results by rank.

        `function` is a module-level function or `"package.module:function"`; arguments and results are pickled.
        Raises `RankError` with the traceback of the rank that failed first, or the stacks of all ranks after
        `timeout` seconds.
        """
        name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
        started = self._start()
        self._num_cases += 1
        for connection in started.connections:
            connection.send((f"case{self._num_cases}", name, args))
        return self._collect(name, started, timeout)

    def close(self) -> None:
        """End the ranks; the next `run` starts new ones."""
        if self._started is not None:
            self._started.close()
            self._started = None

    def _start(self) -> _Started:
        if self._started is None:
            files = tempfile.TemporaryDirectory(prefix="pool-")
            address = str(Path(files.name) / "socket")
            with Listener(address, "AF_UNIX", backlog=self.world_size) as listener:
                command = RankCommand(self.world_size, ["-m", "tests.ranks", address], env=self._env)
                try:
                    connections, pids = _accept(listener, command, self.world_size)
                except BaseException:
                    command.close()
                    files.cleanup()
                    raise
            self._started = _Started(command, files, connections, pids)
        return self._started

    def _collect(self, name: str, started: _Started, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        first_error = None
        waiting = {connection: rank for rank, connection in enumerate(started.connections)}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                stacks = started.stacks()
                self.close()
                reason = first_error or f"{name}: not finished after {timeout} s"
                raise RankError(f"{reason}\nranks {sorted(waiting.values())} did not end:\n{stacks}")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    succeeded, value = connection.recv()
                except (EOFError, ConnectionResetError):
                    self._died(name, rank, first_error)
                if succeeded:
                    results[rank] = value
                elif first_error is None:
                    first_error = f"{name} failed on rank {rank}\n{value}"
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if first_error:
            raise RankError(first_error)
        return [results[rank] for rank in range(self.world_size)]

    def _died(self, name: str, rank: int, first_error: str | None) -> NoReturn:
        assert self._started is not None
        command = self._started.command
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.process.wait(timeout=5)  # the launcher then says how the rank died
        output = command.stderr.read_text(errors="replace")[-5000:]
        self.close()
        raise RankError(first_error or f"{name}: rank {rank} disappeared\n{output}")


def _accept(listener: Listener, command: RankCommand, world_size: int) -> tuple[list[Connection], list[int]]:
    """The connections and the processes of all ranks, by rank."""
    accepted: dict[int, tuple[Connection, int]] = {}
    deadline = time.monotonic() + START_LIMIT_S
    listening = listener._listener._socket  # type: ignore[attr-defined]  # accept() alone has no time limit
    while len(accepted) < world_size:
        if command.process.poll() is not None or time.monotonic() > deadline:
            raise RankError(f"the ranks did not start\n{command.stderr.read_text()[-5000:]}")
        if wait([listening], timeout=0.2):
            connection = listener.accept()
            rank, pid = connection.recv()
            accepted[rank] = connection, pid
    by_rank = [accepted[rank] for rank in range(world_size)]
    return [connection for connection, _ in by_rank], [pid for _, pid in by_rank]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(n)`: the session's pool of `n` ranks."""
    pools: dict[int, RankPool] = {}
    yield lambda n: pools.setdefault(n, RankPool(n))
    for pool in pools.values():
        pool.close()


# --------------------------------------------------------------------------- the program that a rank of a pool runs


def _receive(connection: Connection, cases: queue.SimpleQueue[Any]) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            cases.put(connection.recv())
    os._exit(0)  # the test process is gone or is done with this pool, whatever a case is still doing


def _run_case(case: str, name: str, args: tuple[Any, ...]) -> tuple[bool, Any]:
    context = RankContext(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), case)
    try:
        module, _, function = name.partition(":")
        with context._cleanup, warnings.catch_warnings():
            target = getattr(importlib.import_module(module), function)
            warnings.simplefilter("error")
            return True, target(context, *args)
    except BaseException:  # a case may well raise KeyboardInterrupt; the rank goes on
        return False, traceback.format_exc()


def main(address: str) -> None:
    """Take cases from the test process until it closes the connection."""
    import torch.distributed  # noqa: F401  # paid for before the first case's time limit runs

    rank = int(os.environ["RANK"])
    stacks = Path(address).with_name(f"stacks of rank {rank}").open("w")
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    connection = Client(address, "AF_UNIX")
    connection.send((rank, os.getpid()))
    cases: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, cases), daemon=True).start()
    while True:
        result = _run_case(*cases.get())
        try:
            connection.send(result)
        except Exception:  # a result that cannot be pickled
            connection.send((False, traceback.format_exc()))


if __name__ == "__main__":
    from tests.ranks import main as imported_main  # under its own name: cases import this module too

    imported_main(sys.argv[1])
