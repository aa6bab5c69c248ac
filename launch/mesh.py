"""`Mesh`: which rank this process is, its device, and everything that connects it with the others.

A file of its own because it is the only place that reads the launcher's environment (torchrun's variables, Slurm's, or
none: a process alone is a mesh of one rank) and that opens and closes what ranks share.

    store              keys of this run; a client of its own, so a blocking read holds up nobody else
    agreement_group    gloo, for the one small all-reduce of a step
    device_group       for the all2all: NCCL on CUDA, gloo on the CPU; never the one above, they run at the same time
    peers              who is still there; ends blocked collectives of both groups when somebody is not
    signals            SIGINT, SIGUSR1 and SIGTERM

Invariants: there is no default process group, nothing is shared with other users of `torch.distributed` in the
process; groups live under the prefix of their generation, so `renew` leaves nothing of a failed step behind; `close`
takes seconds at most, even when the other ranks are gone.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import TracebackType

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from dbo.errors import ConfigError, DBOError, PeerFailed
from dbo.groups import AbortableGroup, abandon, give_up_silence, make_group, open_connections
from dbo.peers import Peers
from dbo.signals import Signals

CLOSE_LIMIT_S = 5.0
DROP_LIMIT_S = 2.0
UNWIND_LIMIT_S = 10.0  # what a rank gets to end, or to renew, once it knows that another failed
STORE_SILENCE_LIMIT_S = 8.0
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class RendezvousError(DBOError):
    """The ranks did not find each other."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this process stands among the ranks of the job."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int
    launcher_keeps_store: bool
    attempt: str = "0"  # a launcher that restarts a job keeps its store; the keys of the attempt before must not count


def read_place(environment: Mapping[str, str]) -> Place | None:
    """What the launcher said: torchrun's variables, else Slurm's, else None (a single process)."""
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _read_torchrun(environment)
    if int(environment.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environment:
        return _read_slurm(environment)
    return None


def _read_torchrun(environment: Mapping[str, str]) -> Place:
    for name in _TORCHRUN:
        if name not in environment:
            raise ConfigError(
                name, None, "RANK and WORLD_SIZE come with it", "start with torchrun, or unset RANK and WORLD_SIZE"
            )
    return Place(
        rank=int(environment["RANK"]),
        world_size=int(environment["WORLD_SIZE"]),
        local_rank=int(environment["LOCAL_RANK"]),
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", "1")),
        address=environment["MASTER_ADDR"],
        port=int(environment["MASTER_PORT"]),
        launcher_keeps_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _read_slurm(environment: Mapping[str, str]) -> Place:
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    tasks = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", "1")))
    step = 100 * int(environment.get("SLURM_JOB_ID", "0")) + int(environment.get("SLURM_STEP_ID", "0"))
    return Place(
        rank=int(environment["SLURM_PROCID"]),
        world_size=int(environment["SLURM_NTASKS"]),
        local_rank=int(environment.get("SLURM_LOCALID", "0")),
        local_world_size=int(tasks[0]) if tasks else 1,
        address=environment.get("MASTER_ADDR") or first_node(nodes),
        port=int(environment.get("MASTER_PORT") or 20000 + step % 12000),  # below the range of outgoing connections
        launcher_keeps_store=False,
    )


def first_node(nodes: str) -> str:
    """The first name of a Slurm node list: `a`, `a,b`, `gpu[03-07,9]`, `rack[1-2]n[1-4]`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0] if first else nodes)


def choose_device(device: str, place: Place | None) -> torch.device:
    """`auto` is CUDA where there is any. All GPUs may be visible to every process of a host, or one to each."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if device not in ("auto", "cuda"):
        raise ConfigError("device", device, "auto, cpu or cuda")
    if not torch.cuda.is_available():
        raise ConfigError("device", device, "this process sees no CUDA device", "use --device cpu")
    num_visible = torch.cuda.device_count()
    local_rank, num_local = (place.local_rank, place.local_world_size) if place else (0, 1)
    if num_visible < num_local and num_visible > 1:
        remedy = f"start at most {num_visible} processes on this host, or use --device cpu"
        raise ConfigError("device", device, f"{num_local} processes of this host share {num_visible} GPUs", remedy)
    return torch.device("cuda", local_rank if num_visible > 1 else 0)


class Mesh:
    """The ranks of this job. Made by `start`; close it, or use it as a context (which also tells the others of an
    exception that ends it)."""

    rank: int
    world_size: int
    local_rank: int
    node: str
    device: torch.device
    store: Store
    peers: Peers
    signals: Signals | None  # None where the mesh was started outside the main thread

    @classmethod
    def start(
        cls,
        *,
        device: str = "auto",
        environment: Mapping[str, str] | None = None,
        prefix: str = "",
        limit_s: float = 60.0,
    ) -> Mesh:
        """Find the other ranks and connect. Blocks until all are here, `limit_s` at most.

        environment: the launcher's variables, `os.environ` if not given. prefix: of all keys, for a process that starts
        one mesh after another. Raises ConfigError for variables or a device that cannot be, RendezvousError or
        PeerFailed when ranks are missing.
        """
        place = read_place(os.environ if environment is None else environment)
        return cls(place, choose_device(device, place), prefix, limit_s)

    def __init__(self, place: Place | None, device: torch.device, prefix: str, limit_s: float) -> None:
        self.rank, self.world_size = (place.rank, place.world_size) if place else (0, 1)
        self.local_rank = place.local_rank if place else 0
        self.node = socket.gethostname()
        self.device = device
        self.signals = None
        self._launcher_keeps_store = place is not None and place.launcher_keeps_store
        self._keeps_store = place is not None and self.rank == 0 and not self._launcher_keeps_store
        self._groups: list[AbortableGroup] = []
        self._dropping: list[threading.Thread] = []
        self._left = threading.Event()
        prefix += f"/attempt{place.attempt}" if place else ""
        root = HashStore() if place is None else connect_store(place, limit_s, keeps=self._keeps_store)
        self.store = PrefixStore(f"{prefix}/run", root)
        self.peers = Peers(
            PrefixStore(f"{prefix}/peers", root if place is None else connect_store(place, limit_s)),
            rank=self.rank,
            world_size=self.world_size,
            host=self.node,
            near_store=place is not None and _is_here(place.address),
            start_limit_s=limit_s,
        )
        self._forced_end: threading.Timer | None = None
        self._forced_end_lock = threading.Lock()
        self.peers.on_failure(self._unblock)
        try:
            self._connect_groups()
            if threading.current_thread() is threading.main_thread():
                self.signals = Signals(f"rank {self.rank}", self._why_stopped)
        except BaseException:
            self._leave()
            raise

    @property
    def agreement_group(self) -> dist.ProcessGroup:
        """gloo, of the current generation."""
        return self._groups[0].group

    @property
    def device_group(self) -> dist.ProcessGroup:
        """NCCL on CUDA, gloo on the CPU, of the current generation."""
        return self._groups[1].group

    def renew(self, *, must_exit: str | None = None) -> None:
        """Leave the groups of a failed step behind and connect new ones. Collective.

        Raises PeerFailed if a rank is gone. Users of the old groups take the new ones from here afterwards.
        must_exit: what is still running and cannot be recalled (a DeepEP operation): the process then ends, with that
        as its message, and the others are told.
        """
        if must_exit is not None:
            reason = f"{must_exit} cannot be recalled, so this process cannot go on after the failed step"
            self.peers.fail(reason)
            raise SystemExit(f"rank {self.rank}: {reason}")
        self._dropping = [thread for thread in self._dropping if thread.is_alive()] + [
            abandon(self._groups, self._left)
        ]
        self.peers.renew()
        self._unlimit_unwinding()
        self._connect_groups()

    def barrier(self, name: str, limit_s: float = 60.0) -> None:
        """Wait on the host for all ranks; `name` is used once. Raises PeerFailed."""
        self.peers.barrier(name, limit_s)

    def close(self) -> None:
        """Wait until all ranks want to leave, `CLOSE_LIMIT_S` at most, and leave."""
        with contextlib.suppress(Exception):  # they failed, or are gone: then there is nobody to wait for
            self.peers.barrier("close", CLOSE_LIMIT_S)
        self._leave()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        if not isinstance(error, PeerFailed):
            self.peers.fail(error)
        self._leave()

    # ------------------------------------------------------------------ helpers

    def _connect_groups(self) -> None:
        prefix = f"groups{self.peers.generation}"
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        with self.peers.guard():
            for name, device in (("agreement", torch.device("cpu")), ("device", self.device)):
                store = PrefixStore(f"{prefix}/{name}", self.store)
                self._groups.append(make_group(store, self.rank, self.world_size, device))

    def _leave(self) -> None:
        for made in self._groups:
            made.abort()
        self._groups = []  # may wait for a collective that gloo missed: then the forced end comes first
        self._left.set()
        for thread in self._dropping:
            thread.join(DROP_LIMIT_S)
        if self._keeps_store:
            self._outlast_others()
        self.peers.close()
        self._unlimit_unwinding()
        self._end_launcher()
        if self.signals is not None:
            self.signals.close()
            self.signals = None

    def _unblock(self) -> None:
        """Another rank failed: collectives end at once, and a rank that is busy with something else must not keep its
        host from the end of the job. Called by the watcher's thread, while `renew` may be over the same failure."""
        with self._forced_end_lock:
            if self.peers.wait_failure(0) is None:
                return  # the groups are new ones
            for made in self._groups:
                made.abort()
            if self.signals is not None and self._forced_end is None:
                self._forced_end = threading.Timer(UNWIND_LIMIT_S, self._end_by_force)
                self._forced_end.daemon = True
                self._forced_end.start()

    def _unlimit_unwinding(self) -> None:
        with self._forced_end_lock:
            forced_end, self._forced_end = self._forced_end, None
        if forced_end is not None:
            forced_end.cancel()
            forced_end.join(1.0)

    def _end_by_force(self) -> None:
        if self.signals is not None and (failure := self.peers.wait_failure(0)) is not None:
            self._end_launcher()
            self.signals.end(f"{failure}; this rank was busy and is ended after {UNWIND_LIMIT_S:g} s", 1)

    def _end_launcher(self) -> None:
        """torchrun hangs in its store's client for ever where the store fell silent, deaf to SIGTERM."""
        if self.peers.store_lost and self._launcher_keeps_store:
            launcher = os.getppid()
            with contextlib.suppress(OSError):
                if is_torchrun(Path(f"/proc/{launcher}/cmdline").read_bytes()):  # not a shell between it and this rank
                    os.kill(launcher, signal.SIGKILL)

    def _why_stopped(self) -> str | None:
        failure = self.peers.wait_failure(1.0)
        if failure is not None:
            return str(failure)
        self.peers.fail("stopped by SIGTERM")
        return None

    def _outlast_others(self) -> None:
        """The store ends with this process: the others must have said goodbye before."""
        deadline = time.monotonic() + CLOSE_LIMIT_S
        while self.peers.num_left() < self.world_size - 1 and time.monotonic() < deadline:
            time.sleep(0.02)


def is_torchrun(command: bytes) -> bool:
    """Whether a command line, as /proc shows it, is torch's launcher, by any of its names."""
    words = command.split(b"\0")
    modules = (b"torch.distributed.run", b"torch.distributed.launch")
    as_module = any(flag == b"-m" and name in modules for flag, name in pairwise(words))
    return as_module or any(word.endswith(b"/torchrun") for word in words[:2])


def _is_here(address: str) -> bool:
    """Whether an address or a name is this host's."""
    with contextlib.suppress(OSError):
        for family, *_, where in socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind(where)
                return True
    return False


def _bound(address: str, port: int) -> int | None:
    """A socket at this address and no other, None for a name."""
    try:
        version = ipaddress.ip_address(address).version
    except ValueError:
        return None
    with socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        return listener.detach()


def connect_store(place: Place, limit_s: float, *, keeps: bool = False) -> TCPStore:
    """A client of the job's store, which lives in the launcher or, with `keeps`, in this process.

    A store kept here listens on `place.address` alone if that is an IP address, and on all if it is a name, which hosts
    may read differently. Its operations fail when the store's host is silent for `STORE_SILENCE_LIMIT_S`. Raises
    RendezvousError.
    """
    before = open_connections()
    try:
        store = TCPStore(
            place.address,
            place.port,
            is_master=keeps,
            timeout=timedelta(seconds=limit_s),
            wait_for_workers=False,
            master_listen_fd=_bound(place.address, place.port) if keeps else None,
        )
    except Exception as error:
        role = "opened" if keeps else "reached"
        raise RendezvousError(
            f"rank {place.rank}: the store at {place.address}:{place.port} could not be {role} "
            f"({str(error).splitlines()[0]}); check that rank 0 runs, that MASTER_ADDR is its host as seen from here, "
            "and that MASTER_PORT is free there and not blocked"
        ) from error
    give_up_silence(open_connections() - before, STORE_SILENCE_LIMIT_S)
    return store
