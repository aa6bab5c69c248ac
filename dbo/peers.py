"""`Peers`: what became of the other ranks. A rank that fails says so; one that disappears is missed.

A file of its own because every wait of the runtime leans on it and it leans on nothing but a store. One thread looks
at the store and at the processes of this host ten times a second; a wait calls `check()`, which reads a flag.

    rank fails         it posts who and why under its generation; the others raise `PeerFailed` within a second
    process ends       missed at once by the ranks of its host (a descriptor of the process), which tell the rest
    host disappears    none of its ranks has been heard for `silence_limit_s`, or for half of it if a connection broke
    store is lost      the host that keeps it died: a message like the others
    rank is slow       it is not known to have failed, but `late` names it: all others wait, it does not

A failed step poisons its process groups. `renew` is how the ranks agree to go on with new ones: each arrives, and when
all have, the generation counts one up and failures of the old one are forgotten. A process that died is never
forgotten.

Invariants: every store operation is short (a key is read once it is there), so the thread and its caller can share one
client; every wait has a limit and names who was missing; `close` leaves no thread and no descriptor.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch._C._distributed_c10d import Store

from dbo.errors import AgreementError, ConfigError, DBOError, PeerFailed

POLL_S = 0.1
BEAT_S = 1.0
BUSY_S = 2.0  # a rank that has not waited for others for so long is busy with something of its own
POST_LIMIT_S = 2.0
LEFT = b"left"

# How gloo, NCCL and the store put it when the other side is gone. Such an error says that somebody died, not who.
_CONNECTION_ERRORS = (
    "connection",
    "broken pipe",
    "socket",
    "timed out",
    "timeout",
    "pair closure",
    "remote process exited",
    "nccl",
)


@dataclass(frozen=True, kw_only=True)
class _Peer:
    """One rank as it introduces itself. `node` is equal for ranks that can see each other's processes."""

    rank: int
    host: str
    pid: int
    place: str
    near_store: bool = False

    @property
    def node(self) -> tuple[str, str]:
        return self.place, self.host


class Peers:
    """Watches the other ranks from creation to `close`.

    store: the same keys on every rank, used by nobody else (a `PrefixStore`, over a client of its own).
    host: this host's name. Ranks with different names do not look at each other's processes.
    near_store: whether this host keeps the store; on none of them means that rank 0 does.
    start_limit_s: how long the ranks wait for each other, here and in `compare_options` and `renew`.
    silence_limit_s: a host none of whose ranks is heard for so long is given up.
    Blocks until all ranks are here. Raises `PeerFailed` naming those that did not come.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        host: str | None = None,
        near_store: bool = False,
        start_limit_s: float = 60.0,
        silence_limit_s: float = 8.0,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.generation = 0
        self.store_lost = False  # its host is gone or silent
        self._store = store
        self._start_limit_s, self._silence_limit_s = start_limit_s, silence_limit_s
        self._on_failure: list[Callable[[], None]] = []
        self._failure: PeerFailed | None = None
        self._fatal = False  # a process is gone: no renewal helps
        self._noticed = threading.Event()
        self._closing = threading.Event()
        self._to_post: str | None = None
        self._posted = threading.Event()
        self._lock = threading.Lock()
        self._last_look = self._last_check = time.monotonic()
        self._connection_broke = False
        self._beats_read: dict[int, bytes] = {}
        self._peers: list[_Peer] = []
        self._peers = self._introduce(host or socket.gethostname(), near_store)
        self._processes = _watch_processes(self._peers, self._peers[rank])
        self._listened_to = _next_node(self._peers, self._peers[rank])
        self._beats = {p.rank: (b"", time.monotonic()) for p in self._listened_to}
        self._thread: threading.Thread | None = None
        if world_size > 1:
            self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
            self._thread.start()

    # ------------------------------------------------------------------ what waits and steps call

    def check(self) -> None:
        """Raise `PeerFailed` if another rank failed. Reads a flag: call it in every loop that waits."""
        if self._failure is not None:
            raise _copy(self._failure)
        self._last_check = now = time.monotonic()
        if self._thread is not None and now - self._last_look > self._silence_limit_s:
            self._check_thread()

    def fail(self, error: BaseException | str) -> None:
        """Tell the other ranks that this one failed, and why. Blocks for at most `POST_LIMIT_S`; does not raise."""
        if self._thread is None or self._failure is not None:
            return
        self._posted.clear()
        self._to_post = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self._posted.wait(POST_LIMIT_S)

    def explain(self, error: BaseException) -> BaseException:
        """The `PeerFailed` behind an error that merely says that a connection broke, else `error` itself.

        Blocks until the watcher knows who is behind it, at most `silence_limit_s` and a little.
        """
        cause = error.__cause__ if isinstance(error, AgreementError) else error
        if isinstance(cause, DBOError) or not isinstance(cause, RuntimeError) or self._thread is None:
            return error
        if not any(words in str(cause).lower() for words in _CONNECTION_ERRORS):
            return error
        self._connection_broke = True
        deadline = time.monotonic() + self._explain_limit_s()
        while time.monotonic() < deadline:
            left = self._left_early()  # asked first: a rank that failed says so before it leaves
            who = self.wait_failure(3 * POLL_S) or left
            if who is not None:
                return who
        return error

    def wait_failure(self, limit_s: float) -> PeerFailed | None:
        """The failure of another rank, if one is known within `limit_s`."""
        self._noticed.wait(limit_s)
        return None if self._failure is None else _copy(self._failure)

    def late(self) -> dict[int, str]:
        """The ranks that others wait for, with words for each. Asks the store: call it at intervals of seconds.

        A rank that waits for others calls `check` all the time. Late is who does not, or who has not been heard since
        the last call.
        """
        late = {}
        for peer in self._peers:
            key = f"beat/{peer.rank}"
            if peer.rank == self.rank or not self._store.check([key]) or (beat := self._store.get(key)) == LEFT:
                continue
            busy_s = int(beat.split()[1])
            if busy_s >= BUSY_S or beat == self._beats_read.get(peer.rank):
                how = f"busy for {busy_s} s" if busy_s >= BUSY_S else "silent"
                late[peer.rank] = f"rank {peer.rank} on {peer.host} ({how})"
            self._beats_read[peer.rank] = beat
        return late

    def speaks_of(self, failure: PeerFailed) -> bool:
        """Whether it is up to this rank to report `failure`: one rank of every host does, if possible its own."""
        here = {peer.rank for peer in self._peers if peer.node == self._peers[self.rank].node}
        said_so_itself = failure.rank in here and self._failure is not None and not self._fatal
        return not said_so_itself and self.rank == min(here - ({failure.rank} - {self.rank}))

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Around a step: an exception inside is explained, and posted if it is this rank's own, before it goes on."""
        try:
            yield
        except BaseException as error:
            cause = self.explain(error)
            if not isinstance(cause, PeerFailed):
                self.fail(cause)
            if cause is error:
                raise
            cause.__notes__ = getattr(error, "__notes__", [])  # where this rank was
            raise cause from error

    @property
    def hosts(self) -> list[str]:
        """The host of every rank, by rank."""
        return [peer.host for peer in self._peers]

    @property
    def gone(self) -> bool:
        """Whether a process, a host or the store is gone: somebody who cannot act, and no renewal helps."""
        return self._fatal

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, from the watching thread, when another rank failed: it ends blocking collectives."""
        self._on_failure.append(callback)

    # ------------------------------------------------------------------ what all ranks call together

    def compare_options(self, options: Mapping[str, str]) -> None:
        """Raise `ConfigError`, on every rank, if an option differs between ranks. Call once, before anything else."""
        told = self._gather("options", json.dumps(dict(options)), "compare options")
        of_rank = [json.loads(text) for text in told]
        for name in sorted(set().union(*of_rank)):
            ranks_with: dict[str | None, list[int]] = {}
            for rank, theirs in enumerate(of_rank):
                ranks_with.setdefault(theirs.get(name), []).append(rank)
            if len(ranks_with) > 1:
                values = "; ".join(f"{value!r} on {_ranks(ranks)}" for value, ranks in ranks_with.items())
                why = f"it differs between ranks: {values}"
                raise ConfigError(name, options.get(name), why, "start all ranks alike")

    def barrier(self, name: str, limit_s: float) -> None:
        """Wait for all ranks, on the store, under a name used once. Raises `PeerFailed`, also for who does not come."""
        self._gather(f"barrier/{name}", "", f"reach {name}", limit_s)

    def renew(self) -> int:
        """After a failed step: wait until every rank gave the step up, forget the failure, return the new generation.

        Raises `PeerFailed` if a rank is gone or does not come within `start_limit_s`.
        """
        target = self.generation + 1
        self._gather(f"renew/{target}", "", "give up the failed step", check=self._check_fatal)
        with self._lock:
            self.generation = target
            if not self._fatal:
                self._failure = None
                self._noticed.clear()
        return target

    def close(self) -> None:
        """Say goodbye and stop watching. Blocks for at most `POST_LIMIT_S`."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(POST_LIMIT_S)
            self._thread = None
        for descriptor in self._processes:
            os.close(descriptor)
        self._processes = {}

    def num_left(self) -> int:
        """How many other ranks have said goodbye or are gone. Asks the store."""
        return sum(self._has_left(r) for r in range(self.world_size) if r != self.rank)

    # ------------------------------------------------------------------ the watching thread

    def _watch(self) -> None:
        next_beat, num_beats = 0.0, 0
        try:
            while not self._closing.wait(POLL_S):
                self._post()
                self._look_at_processes()
                self._look_at_store()
                if time.monotonic() >= next_beat:
                    num_beats += 1
                    self._store.set(f"beat/{self.rank}", f"{num_beats} {time.monotonic() - self._last_check:.0f}")
                    self._listen()
                    next_beat = time.monotonic() + BEAT_S
                self._last_look = time.monotonic()
            self._post()
            self._store.set(f"beat/{self.rank}", LEFT.decode())
        except Exception as error:  # the store does not answer: whatever it raises, there is nothing left to watch
            self._lose_store(f"is lost ({_first_line(error)})")
            self._posted.set()

    def _post(self) -> None:
        if self._to_post is not None:
            me = self._peers[self.rank]
            self._tell(f"failed/{self.generation}", me, self._to_post)
            self._to_post = None
            self._posted.set()

    def _tell(self, key: str, peer: _Peer, reason: str) -> None:
        self._store.compare_set(key, "", json.dumps([peer.rank, peer.host, reason]))  # the first to say so is kept

    def _look_at_processes(self) -> None:
        for descriptor in [d for d in self._processes if _has_ended(d)]:
            peer = self._processes.pop(descriptor)
            os.close(descriptor)
            if not self._has_left(peer.rank):
                silence = f"its process {peer.pid} ended without a word (killed, or crashed)"
                self._tell("gone", peer, self._last_words(peer.rank) or silence)

    def _last_words(self, rank: int) -> str | None:
        key = f"failed/{self.generation}"
        if self._store.check([key]):
            who, _, reason = json.loads(self._store.get(key))
            return str(reason) if who == rank else None
        return None

    def _look_at_store(self) -> None:
        generation = self.generation
        for key, fatal in (("gone", True), (f"failed/{generation}", False)):
            if self._store.check([key]):
                rank, host, reason = json.loads(self._store.get(key))
                if rank != self.rank:
                    self._notice(PeerFailed(rank, host, reason), fatal=fatal, generation=generation)

    def _listen(self) -> None:
        """Hear the next node, whose processes this rank cannot see; give it up when all its ranks are silent.

        One silent rank is no proof: it may hold the interpreter for seconds (loading, compiling). The ranks of its host
        see its process, and would say so. Each node is heard by one other only, so the store's work grows with the
        number of ranks and not with its square.
        """
        now = time.monotonic()
        limit_s = self._silence_limit_s / (2 if self._connection_broke else 1)
        if now - self._last_look > self._silence_limit_s / 2:  # this process itself was stopped: listen anew
            self._beats = {rank: (beat, now) for rank, (beat, _) in self._beats.items()}
        heard = []
        for peer in self._listened_to:
            key = f"beat/{peer.rank}"
            beat = self._store.get(key) if self._store.check([key]) else b""
            if beat != self._beats[peer.rank][0]:
                self._beats[peer.rank] = (beat, now)
            if beat != LEFT:
                heard.append((self._beats[peer.rank][1], -peer.rank))
        if heard and now - max(heard)[0] > limit_s:
            when, rank = max(heard)
            self._tell("gone", self._peers[-rank], f"nothing was heard from its host for {now - when:.0f} s")

    def _lose_store(self, how: str) -> None:
        self.store_lost = True
        keeper = next((peer for peer in self._peers if peer.near_store), self._peers[0])
        reason = f"the store that this job's ranks meet in, on that host, {how}"
        # A failure that is known already is why: launchers end when a rank of theirs has, and the store with them.
        self._notice(self._failure or PeerFailed(keeper.rank, keeper.host, reason), fatal=True)

    def _notice(self, failure: PeerFailed, *, fatal: bool, generation: int | None = None) -> None:
        with self._lock:
            outdated = generation is not None and generation != self.generation
            if self._fatal or (not fatal and (outdated or self._failure is not None)):
                return
            self._failure, self._fatal = failure, fatal
            self._noticed.set()
        for callback in self._on_failure:
            callback()

    # ------------------------------------------------------------------ small helpers

    def _introduce(self, host: str, near_store: bool) -> list[_Peer]:
        me = _Peer(rank=self.rank, host=host, pid=os.getpid(), place=_place(), near_store=near_store)
        introductions = self._gather("peer", json.dumps(asdict(me)), "start", check=lambda: None)
        return [_Peer(**json.loads(text)) for text in introductions]

    def _gather(
        self,
        name: str,
        value: str,
        what: str,
        limit_s: float | None = None,
        check: Callable[[], None] | None = None,
    ) -> list[bytes]:
        """Put this rank's value into the store, wait for those of all ranks, and return them by rank."""
        keys = [f"{name}/{rank}" for rank in range(self.world_size)]
        try:
            self._store.set(keys[self.rank], value)
            self._wait_for(keys, what, self._start_limit_s if limit_s is None else limit_s, check or self.check)
            return [self._store.get(key) for key in keys]
        except RuntimeError as error:  # from the store
            cause = self.explain(error)
            if cause is error:
                raise
            raise cause from error

    def _wait_for(self, keys: Sequence[str], what: str, limit_s: float, check: Callable[[], None]) -> None:
        started = time.monotonic()
        pause_s, next_look_s = 0.001, 0.5
        while not self._store.check(list(keys)):
            check()
            waited_s = time.monotonic() - started
            if waited_s > min(next_look_s, limit_s):
                self._look_for_missing(keys, what, None if waited_s < limit_s else limit_s)
                next_look_s += 0.5
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)

    def _look_for_missing(self, keys: Sequence[str], what: str, waited_s: float | None) -> None:
        """Raise for ranks that will not come: they have left, or have been waited for long enough (`waited_s`)."""
        missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        why = f"did not {what}" + ("" if waited_s is None else f" within {waited_s:g} s")
        late = [rank for rank in missing if waited_s is not None or self._has_left(rank)]
        if late:
            host = self._peers[late[0]].host if self._peers else "an unknown host"
            raise PeerFailed(late[0], host, f"{_ranks(late)} {why}" + (" but left" if waited_s is None else ""))

    def _check_fatal(self) -> None:
        if self._fatal:
            self.check()

    def _check_thread(self) -> None:
        """The watcher has not looked for long: it hangs in the store, or this process has only just been resumed."""
        before = self._last_look
        time.sleep(5 * POLL_S)
        if self._last_look == before and self._failure is None:
            self._lose_store(f"has not answered for {self._silence_limit_s:.0f} s")
        if self._failure is not None:
            raise _copy(self._failure)

    def _explain_limit_s(self) -> float:
        return 2.0 + (self._silence_limit_s if self._listened_to else 0.0)

    def _left_early(self) -> PeerFailed | None:
        with contextlib.suppress(RuntimeError):  # the store is lost: the watcher will say so
            for peer in self._peers:
                if peer.rank != self.rank and self._has_left(peer.rank):
                    return PeerFailed(peer.rank, peer.host, "it left before the others were done")
        return None

    def _has_left(self, rank: int) -> bool:
        key = f"beat/{rank}"
        return bool(self._store.check([key]) and self._store.get(key) == LEFT)


def _copy(failure: PeerFailed) -> PeerFailed:
    """A new exception each time: one that is raised twice would collect both tracebacks."""
    return PeerFailed(failure.rank, failure.host, failure.reason)


def _watch_processes(peers: Sequence[_Peer], me: _Peer) -> dict[int, _Peer]:
    """A descriptor for the process of every other rank that this one can see. Where there is none, beats must do."""
    descriptors = {}
    for peer in peers:
        if peer.rank != me.rank and peer.node == me.node:
            try:
                descriptors[os.pidfd_open(peer.pid)] = peer
            except ProcessLookupError:
                raise PeerFailed(peer.rank, peer.host, f"its process {peer.pid} ended while starting") from None
    return descriptors


def _next_node(peers: Sequence[_Peer], me: _Peer) -> list[_Peer]:
    """The ranks of the node after this one; the last one's next is the first."""
    nodes = list(dict.fromkeys(peer.node for peer in peers))
    following = nodes[(nodes.index(me.node) + 1) % len(nodes)]
    return [peer for peer in peers if peer.node == following != me.node]


def _has_ended(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


def _place() -> str:
    """The running kernel and the process namespace: where these are equal, process numbers mean the same.

    Where the kernel cannot watch processes every rank is a place of its own, and is listened to.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.close(os.pidfd_open(os.getpid()))
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return f"unknown, pid {os.getpid()}"


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
