"""What ranks find out together: clocks, ports, and what a message between each pair costs.

Its own file because these checks need another rank at the same moment, and each other rank may be the one that does
not answer. Every wait has the deadline of its check; a pair that cannot connect is found once, by plain sockets, and
not tried again by what would wait longer for it.

Pairs are measured in the rounds of a tournament: every rank is in one pair at a time, all pairs of a round run side by
side. On one host they share its cores and memory, between hosts its adapter, as they do when the model runs.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore

from dbo.groups import AbortableGroup, make_group
from launch.doctor.base import Check, Cohort, Facts, Finding, Site
from launch.doctor.host import gloo_address, interfaces

_CONNECT_LIMIT_S = 3.0
_PAIR_LIMIT_S = 6.0
_CLOCK_EXCHANGES = 5
_MEASURE_S = 0.1  # how long one direction of one pair sends

# ------------------------------------------------------------------------------------------------------------- clocks


def gather_clock(site: Site) -> Facts:
    """How far this rank's clock is ahead of the first one's, in s; `error_s` is half the fastest round trip.

    As the network time protocol does: the other clock was read somewhere within the round trip, at its middle give or
    take half of it.
    """
    first = site.present[0]
    if site.rank == first:
        _serve_time(site)
        return {"ahead_s": 0.0, "error_s": 0.0}
    readings = []
    for number in range(_CLOCK_EXCHANGES):
        before, sent = site.now(), time.monotonic()
        site.tell(f"clock/ask/{site.rank}/{number}", None)
        theirs = site.ask(f"clock/say/{site.rank}/{number}")
        half = (time.monotonic() - sent) / 2
        readings.append((half, before + half - theirs))
    error_s, ahead_s = min(readings)
    return {"ahead_s": round(ahead_s, 6), "error_s": round(error_s, 6)}


def _serve_time(site: Site) -> None:
    for other in site.others:
        with contextlib.suppress(RuntimeError, TimeoutError):  # that rank does not ask, and its own outcome says so
            for number in range(_CLOCK_EXCHANGES):
                site.ask(f"clock/ask/{other}/{number}", share=0.5)  # the ranks behind it get their turn
                site.tell(f"clock/say/{other}/{number}", site.now())


def judge_clock(facts: Mapping[int, Facts], _: Cohort) -> Iterator[Finding]:
    """Clocks agree within a second; ten are a failure."""
    for rank, found in facts.items():
        off = abs(found["ahead_s"]) - found["error_s"]
        if off > 1:
            direction = "ahead of" if found["ahead_s"] > 0 else "behind"
            yield Finding(
                level="fail" if off > 10 else "warn",
                ranks=(rank,),
                what=f"its clock is {abs(found['ahead_s']):.1f} s {direction} rank {min(facts)}'s",
                remedy="start time synchronisation on this host (chrony or systemd-timesyncd); credentials and logs of "
                "several hosts depend on it",
            )


# -------------------------------------------------------------------------------------------------------------- ports


def listen(address: str) -> socket.socket:
    """A listening socket at `address`, on a port that the system chooses, as gloo and NCCL have theirs chosen."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=128)


def gather_reach(site: Site) -> Facts:
    """Whether this rank can connect to every other one, at the address gloo would use: "" or why not, by rank.

    None for a rank that has no address.
    """
    address, _ = gloo_address(os.environ, interfaces(), socket.gethostname())
    if not address:
        site.tell(f"reach/at/{site.rank}", None)
        site.tell(f"reach/done/{site.rank}", None)
        return {"at": None, "to": dict.fromkeys(map(str, site.others))}
    with listen(address) as server:
        threading.Thread(target=_answer, args=(server, site.rank), daemon=True).start()
        at = server.getsockname()[:2]
        site.tell(f"reach/at/{site.rank}", at)
        with ThreadPoolExecutor(min(32, len(site.present))) as pool:
            reached = dict(zip(map(str, site.others), pool.map(lambda r: _reach(site, r), site.others), strict=True))
        site.tell(f"reach/done/{site.rank}", None)
        with contextlib.suppress(RuntimeError, TimeoutError):  # the others may still be trying this rank
            for other in site.others:
                site.ask(f"reach/done/{other}")
    return {"at": f"{at[0]}:{at[1]}", "to": reached}


def _answer(server: socket.socket, rank: int) -> None:
    """Tell everyone who connects which rank this is, until the server is closed."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(f"rank {rank}\n".encode())


def _reach(site: Site, other: int) -> str | None:
    try:
        at = site.ask(f"reach/at/{other}", share=0.7)
    except (RuntimeError, TimeoutError):
        return "it did not say where it listens"
    if at is None:
        return None
    where = f"{at[0]}:{at[1]}"
    try:
        with socket.create_connection(tuple(at), timeout=min(_CONNECT_LIMIT_S, site.left_s())) as connection:
            said = connection.makefile().readline().strip()
    except TimeoutError:
        return f"{where} does not answer (packets are dropped)"
    except OSError as error:
        return f"{where}: {error.strerror or error}"
    return "" if said == f"rank {other}" else f"{where} is not rank {other}, but {said or 'something silent'}"


def judge_reach(facts: Mapping[int, Facts], _: Cohort) -> Iterator[Finding]:
    """Every pair connects, both ways."""
    for pair, problems in _by_pair(facts, lambda value: value or ""):
        yield Finding(
            level="fail",
            ranks=pair,
            what="; ".join(f"rank {a} cannot connect to rank {b}: {why}" for a, b, why in problems),
            remedy="open all ports above 1023 between these hosts (firewall, security group), or set "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to an interface of a network that is open",
        )


def _by_pair(
    facts: Mapping[int, Facts], problem: Callable[[Any], str]
) -> Iterator[tuple[tuple[int, int], list[tuple[int, int, str]]]]:
    """The pairs of ranks between which something is wrong: the pair, and (from, to, what) for each direction."""
    wrong: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    for rank, found in facts.items():
        for other, value in found["to"].items():
            if why := problem(value):
                pair = (min(rank, int(other)), max(rank, int(other)))
                wrong.setdefault(pair, []).append((rank, int(other), why))
    yield from sorted(wrong.items())


# ---------------------------------------------------------------------------------------------- latency and bandwidth


def partners(present: Sequence[int], rank: int) -> list[int | None]:
    """Whom `rank` meets in each round of a tournament in which all pairs meet once; None = it pauses."""
    seats: list[int | None] = [*present, *([None] if len(present) % 2 else [])]
    rounds: list[int | None] = []
    for _ in range(len(seats) - 1):
        rounds.append(seats[len(seats) - 1 - seats.index(rank)])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


@dataclass(frozen=True, kw_only=True)
class Link:
    """Messages between this rank and another one of a group. `wait` waits for what was started, on the host."""

    group: dist.ProcessGroup
    other: int  # by its place in the group
    device: torch.device
    deadline: float
    probe_bytes: int
    block_bytes: int

    def send(self, tensor: Tensor) -> None:
        """Send, and wait until it has been taken."""
        self._wait(self.group.send([tensor], self.other, 0))

    def receive(self, tensor: Tensor) -> None:
        """Wait for a message."""
        self._wait(self.group.recv([tensor], self.other, 0))

    def _wait(self, work: dist.Work) -> None:
        work.wait()
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
            while not done.query():
                if time.monotonic() > self.deadline:
                    raise TimeoutError("no message within the limit")


def measure(link: Link, *, first: bool) -> Facts:
    """One-way latency and bandwidth from this rank to the other; both call it, one of them with `first`."""
    result: Facts = {}
    for sends in (first, not first):
        if sends:
            result = {"latency_us": _send_pings(link), "gbs": _send_blocks(link)}
        else:
            _answer_pings(link)
            _receive_blocks(link)
    return result


_PINGS = 20


def _send_pings(link: Link) -> float:
    byte, trips = torch.zeros(8, dtype=torch.uint8, device=link.device), []
    for _ in range(_PINGS):
        started = time.perf_counter()
        link.send(byte)
        link.receive(byte)
        trips.append(time.perf_counter() - started)
    return round(median(trips) / 2 * 1e6, 1)


def _answer_pings(link: Link) -> None:
    byte = torch.zeros(8, dtype=torch.uint8, device=link.device)
    for _ in range(_PINGS):
        link.receive(byte)
        link.send(byte)


def _send_blocks(link: Link) -> float:
    """GB/s. One small block says how many large ones to send."""
    count = torch.zeros(1, dtype=torch.int64, device=link.device)
    seconds = _send_and_confirm(link, link.probe_bytes, 1)
    num_blocks = max(1, min(64, int(_MEASURE_S / seconds * link.probe_bytes / link.block_bytes)))
    link.send(count.fill_(num_blocks))
    seconds = _send_and_confirm(link, link.block_bytes, num_blocks)
    return round(num_blocks * link.block_bytes / seconds / 1e9, 4)


def _send_and_confirm(link: Link, num_bytes: int, num_blocks: int) -> float:
    block = torch.zeros(num_bytes, dtype=torch.uint8, device=link.device)
    confirmed = torch.zeros(1, dtype=torch.uint8, device=link.device)
    started = time.perf_counter()
    for _ in range(num_blocks):
        link.send(block)
    link.receive(confirmed)
    return time.perf_counter() - started


def _receive_blocks(link: Link) -> None:
    count = torch.zeros(1, dtype=torch.int64, device=link.device)
    confirmed = torch.zeros(1, dtype=torch.uint8, device=link.device)
    link.receive(torch.empty(link.probe_bytes, dtype=torch.uint8, device=link.device))
    link.send(confirmed)
    link.receive(count)
    block = torch.empty(link.block_bytes, dtype=torch.uint8, device=link.device)
    for _ in range(int(count.item())):
        link.receive(block)
    link.send(confirmed)


@contextlib.contextmanager
def _abort_after(made: AbortableGroup, limit_s: float) -> Iterator[None]:
    """End whatever the group is waiting for when the time is up, and the group in any case."""
    timer = threading.Timer(limit_s, made.abort)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        made.abort()


def _connects(site: Site, other: int) -> bool:
    """Whether the sockets of this pair connected, both ways."""
    return all(_reached(site, a, b) for a, b in ((site.rank, other), (other, site.rank)))


def _reached(site: Site, rank: int, other: int) -> bool:
    facts = site.ask(f"outcome/{rank}/reach")["facts"]
    return facts is not None and facts["to"][str(other)] == ""


def _one_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def gather_gloo(site: Site) -> Facts:
    """Latency and bandwidth to every other rank over gloo, by a group of two for each pair."""
    measured: dict[str, Any] = {}
    for other in partners(site.present, site.rank):
        if other is not None and _connects(site, other):
            try:
                measured[str(other)] = _measure_gloo(site, other)
            except RuntimeError as error:
                measured[str(other)] = {"error": _one_line(error)}
    return {"to": measured}


def _measure_gloo(site: Site, other: int) -> Facts:
    low, limit_s = min(site.rank, other), min(_PAIR_LIMIT_S, site.left_s())
    store = PrefixStore(f"gloo/{low}-{max(site.rank, other)}", site.store)
    first, cpu = site.rank == low, torch.device("cpu")
    made = make_group(store, 0 if first else 1, 2, cpu, connect_limit_s=limit_s)
    with _abort_after(made, limit_s):
        link = Link(
            group=made.group,
            other=1 if first else 0,
            device=cpu,
            deadline=site.deadline,
            probe_bytes=2**18,
            block_bytes=2**20,
        )
        return measure(link, first=first)


def gather_nccl(site: Site) -> Facts:
    """Latency and bandwidth to every other rank over NCCL, in one group of all: NVLink, InfiniBand or TCP, as NCCL
    chooses."""
    for rank in site.present:
        if not all(_reached(site, rank, other) for other in site.present if other != rank):
            return {"to": {}, "skipped": f"rank {rank} does not reach all others"}
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")  # it is meant here
    index = {rank: place for place, rank in enumerate(site.present)}
    store = PrefixStore("nccl", site.store)
    made = make_group(store, index[site.rank], len(index), site.device)
    measured = {}
    with _abort_after(made, site.left_s()):
        for other in partners(site.present, site.rank):
            if other is not None:
                link = Link(
                    group=made.group,
                    other=index[other],
                    device=site.device,
                    deadline=site.deadline,
                    probe_bytes=2**24,
                    block_bytes=2**27,
                )
                measured[str(other)] = measure(link, first=site.rank < other)
    return {"to": measured}


def judge_pairs(facts: Mapping[int, Facts], cohort: Cohort) -> Iterator[Finding]:
    """Every pair could be measured, and none is far slower than others like it."""
    for pair, problems in _by_pair(facts, lambda value: value.get("error", "")):
        what = f"no messages between ranks {pair[0]} and {pair[1]}: {problems[0][2]}"
        remedy = "run with GLOO_LOG_LEVEL=INFO or NCCL_DEBUG=INFO; compare the addresses that both ranks would use"
        yield Finding(level="fail", ranks=pair, what=what, remedy=remedy)
    rates: dict[bool, dict[tuple[int, int], float]] = {True: {}, False: {}}
    for rank, found in facts.items():
        for other, value in found["to"].items():
            if "gbs" in value:
                same = cohort.networks[rank] == cohort.networks[int(other)]
                rates[same][rank, int(other)] = value["gbs"]
    for same, of_pair in rates.items():
        usual = median(of_pair.values()) if of_pair else 0.0
        for pair, gbs in of_pair.items():
            cores_decide = same and cohort.device == "cpu"
            if len(of_pair) > 2 and gbs < usual / 4 and not cores_decide:
                where = "within one host" if same else "between hosts"
                what = f"{gbs:g} GB/s from rank {pair[0]} to rank {pair[1]}; the median {where} is {usual:g}"
                remedy = "look for a bad cable or port, another load on that host, or a detour (nvidia-smi topo -m)"
                yield Finding(level="warn", ranks=pair, what=what, remedy=remedy)


# --------------------------------------------------------------------------------------------------------- the checks


def _show_clock(facts: Facts) -> str:
    return f"{facts['ahead_s']:+.4f} s, give or take {facts['error_s']:.4f}"


def _show_reach(facts: Facts) -> str:
    reached = sum(value == "" for value in facts["to"].values())
    return f"{reached} of {len(facts['to'])} ranks, from {facts['at'] or 'no address'}"


def _show_pairs(facts: Facts) -> str:
    rates = [value["gbs"] for value in facts["to"].values() if "gbs" in value]
    return f"{len(rates)} ranks" + (f", {min(rates):g} to {max(rates):g} GB/s" if rates else "")


CHECKS: Sequence[Check] = (
    Check(
        name="clock", needs="all", limit_s=10, limit_per_rank_s=0.1, gather=gather_clock, judge=judge_clock,
        show=_show_clock,
    ),
    Check(
        name="reach", needs="all", limit_s=10, limit_per_rank_s=0.2, gather=gather_reach, judge=judge_reach,
        show=_show_reach,
    ),
    Check(
        name="gloo", needs="all", limit_s=20, limit_per_rank_s=1, gather=gather_gloo, judge=judge_pairs,
        show=_show_pairs,
    ),
    Check(
        name="nccl", needs="all", limit_s=60, limit_per_rank_s=1, gather=gather_nccl, judge=judge_pairs,
        show=_show_pairs, devices=("cuda",),
    ),
)  # fmt: skip
