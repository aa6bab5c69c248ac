"""All checks in order, on every rank, and one report.

Its own file because it owns the promise that the command ends, whatever a rank or a link does: every check has a
limit, rank 0 waits for each rank's outcome no longer than that, a rank that stays silent is a finding, and a timer ends
the process if even the store no longer answers. It connects to the store alone: the process groups of a `Mesh` are
what is examined here.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from launch.cli import FAILED, CommandError
from launch.config import DoctorOptions
from launch.doctor import host, links
from launch.doctor.base import Check, Cohort, Facts, Finding, Outcome, Site, ask, attempt, ranks_text
from launch.doctor.report import Report
from launch.mesh import choose_device, connect_store, read_place

CHECKS: Sequence[Check] = (*host.CHECKS, *links.CHECKS)
START_LIMIT_S = 60.0
GRACE_S = 5.0


def run(options: DoctorOptions) -> int:
    """Run the command on this rank; returns the exit code, the same on every rank that is heard to the end."""
    place = read_place(os.environ)
    rank, world_size = (place.rank, place.world_size) if place else (0, 1)
    device = choose_device(options.device, place)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    checks = chosen_checks(device.type, options.timeout_per_check)
    total_s = START_LIMIT_S + sum(limit_of(check, world_size) + GRACE_S for check in checks)
    timer = threading.Timer(total_s + GRACE_S, _give_up, (rank, total_s + GRACE_S))
    timer.daemon = True
    timer.start()
    keeps = place is not None and rank == 0 and not place.launcher_keeps_store
    root: Store = HashStore() if place is None else connect_store(place, START_LIMIT_S, keeps=keeps)
    store = PrefixStore(f"doctor/attempt{place.attempt if place else 0}", root)
    try:
        report = examine(store, rank, world_size, device, checks, expect_interface=options.expect_interface)
        code = _conclude(store, rank, report, as_json=options.json, limit_s=total_s)
        _part(store, rank, world_size, keeps)
    except RuntimeError as error:  # from the store
        line = (str(error).splitlines() or [""])[0]
        raise CommandError(f"rank {rank} on {socket.gethostname()}: rank 0's store is lost ({line})", FAILED) from error
    timer.cancel()
    sys.stdout.flush()
    if any(thread.name == "doctor" for thread in threading.enumerate()):
        os._exit(code)  # a check that ran out of time sits in C++, and an orderly end would wait for it
    return code


def chosen_checks(device: str, limit_s: float | None) -> list[Check]:
    """The checks for a kind of device, all with `limit_s` if that is given."""
    fitting = [check for check in CHECKS if device in check.devices]
    return [c if limit_s is None else replace(c, limit_s=limit_s, limit_per_rank_s=0.0) for c in fitting]


def limit_of(check: Check, num_ranks: int) -> float:
    """Seconds that a check may take."""
    return check.limit_s + check.limit_per_rank_s * num_ranks


def examine(
    store: Store,
    rank: int,
    world_size: int,
    device: torch.device,
    checks: Sequence[Check],
    *,
    expect_interface: str | None = None,
    start_limit_s: float = START_LIMIT_S,
    now: Callable[[], float] = time.time,
) -> Report | None:
    """Make all checks on this rank; rank 0 gets the report, the others None. Collective, but ends without the others.

    store: fresh, the same on all ranks. now: the clock that is compared between ranks. Raises RuntimeError when the
    store is lost, CommandError on a rank that came too late to be examined.
    """
    people = _meet(store, rank, world_size, start_limit_s)
    site = Site(
        rank=rank,
        present=sorted(people),
        networks={r: person["network"] for r, person in people.items()},
        device=device,
        store=store,
        now=now,
    )
    own = dict(_perform(site, checks))
    if rank != 0:
        return None
    cohort = Cohort(
        hosts={r: person["host"] for r, person in people.items()},
        networks=site.networks,
        device=device.type,
        expect_interface=expect_interface,
    )
    outcomes = {0: own, **{other: dict(_collect(site, other, checks)) for other in site.others}}
    missing = [r for r in range(world_size) if r not in people]
    findings = [*_absences(missing, start_limit_s), *judge(checks, outcomes, cohort)]
    return Report(world_size=world_size, cohort=cohort, checks=checks, outcomes=outcomes, findings=findings)


def judge(
    checks: Sequence[Check], outcomes: Mapping[int, Mapping[str, Outcome]], cohort: Cohort
) -> Iterator[tuple[str, Finding]]:
    """The findings of all checks, with the check's name. Pure."""
    for check in checks:
        made = {rank: found[check.name] for rank, found in outcomes.items() if check.name in found}
        for rank, outcome in made.items():
            if outcome.facts is None:
                remedy = "look at this rank's log and at the checks above; a longer --timeout-per-check may help"
                yield check.name, Finding(level="fail", ranks=(rank,), what=outcome.error, remedy=remedy)
        facts = {rank: outcome.facts for rank, outcome in made.items() if outcome.facts is not None}
        for finding in check.judge(facts, cohort) if facts else ():
            yield check.name, finding
    for rank, found in outcomes.items():
        unheard = [check.name for check in checks if check.name not in found]
        if unheard:
            what = f"nothing was heard from it at or after the check {unheard[0]}"
            remedy = "see whether its process still runs, and whether it reaches rank 0's host"
            yield unheard[0], Finding(level="fail", ranks=(rank,), what=what, remedy=remedy)


def _meet(store: Store, rank: int, world_size: int, limit_s: float) -> dict[int, dict[str, str]]:
    """Who is there: host and network by rank. Rank 0 decides when it has waited for long enough."""
    store.set(f"here/{rank}", json.dumps({"host": socket.gethostname(), "network": _network()}))
    if rank == 0:
        deadline, people = time.monotonic() + limit_s, {}
        for other in range(world_size):
            with contextlib.suppress(RuntimeError):
                people[other] = ask(store, f"here/{other}", max(0.05, deadline - time.monotonic()))
        store.set("present", json.dumps(people))
    people = {int(r): person for r, person in ask(store, "present", limit_s + GRACE_S).items()}
    if rank not in people:
        raise CommandError(f"rank {rank} came after the others had waited for {limit_s:g} s", FAILED)
    return people


def _perform(site: Site, checks: Sequence[Check]) -> Iterator[tuple[str, Outcome]]:
    for check in checks:
        limit_s = limit_of(check, len(site.present))
        here = replace(site, deadline=time.monotonic() + limit_s)
        outcome = attempt(partial(_gather, check, here), limit_s + 1)
        site.tell(f"outcome/{site.rank}/{check.name}", asdict(outcome))
        yield check.name, outcome


def _gather(check: Check, site: Site) -> Facts:
    if site.device.type == "cuda":
        torch.cuda.set_device(site.device)  # every thread has a current device of its own
    return check.gather(site)


def _collect(site: Site, rank: int, checks: Sequence[Check]) -> Iterator[tuple[str, Outcome]]:
    """The outcomes of another rank; after one that does not come, nothing more is waited for."""
    for check in checks:
        try:
            limit_s = limit_of(check, len(site.present)) + GRACE_S
            yield check.name, Outcome(**ask(site.store, f"outcome/{rank}/{check.name}", limit_s))
        except RuntimeError:
            return


def _absences(missing: Sequence[int], limit_s: float) -> Iterator[tuple[str, Finding]]:
    if missing:
        what = f"{ranks_text(missing)} did not come within {limit_s:g} s"
        remedy = "see whether these processes were started, and whether their hosts reach MASTER_ADDR:MASTER_PORT"
        yield "start", Finding(level="fail", ranks=tuple(missing), what=what, remedy=remedy)


def _conclude(store: Store, rank: int, report: Report | None, *, as_json: bool, limit_s: float) -> int:
    """Print on rank 0; all ranks get the exit code."""
    if report is None:
        return int(ask(store, "exit code", limit_s))
    code = FAILED if report.num_failures else 0
    print(json.dumps(report.as_json()) if as_json else "\n".join(report.lines()), flush=True)
    store.set("exit code", str(code))
    return code


def _part(store: Store, rank: int, world_size: int, keeps: bool) -> None:
    """Where the store ends with rank 0, that one goes last."""
    store.set(f"left/{rank}", "")
    if keeps:
        deadline = time.monotonic() + GRACE_S
        keys = [f"left/{other}" for other in range(world_size)]
        while not store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.02)


def _network() -> str:
    """Equal for processes that share a loopback: the running kernel and the network namespace."""
    kernel: Any = socket.gethostname()
    with contextlib.suppress(OSError):
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/net")
    return str(kernel)


def _give_up(rank: int, limit_s: float) -> None:
    sys.stderr.write(f"error: rank {rank}: not done within {limit_s:.0f} s, the store of rank 0 does not answer\n")
    sys.stderr.flush()
    os._exit(FAILED)
