"""What a check is: facts gathered on every rank, and a judgement over the facts of all.

Its own file because every check and the report share these few types and nothing else. Gathering touches the machine
and returns plain JSON values; judging is pure, so that it can be tested with facts of machines that nobody has.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch._C._distributed_c10d import Store

Facts = Mapping[str, Any]
"""What one rank found out: JSON values by name."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong (`fail`) or may be (`warn`), with the ranks it is about and what to do."""

    level: Literal["fail", "warn"]
    ranks: tuple[int, ...]
    what: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """What a judgement must know besides the facts. `networks`: ranks with equal values share a loopback."""

    hosts: Mapping[int, str]
    networks: Mapping[int, str]
    device: str
    expect_interface: str | None = None

    @property
    def spans_hosts(self) -> bool:
        """Whether some ranks reach each other only over a network."""
        return len(set(self.networks.values())) > 1


@dataclass(frozen=True, kw_only=True)
class Site:
    """The rank that a check runs on. `present`: all ranks that answered at the start, in order; `now`: its clock, in
    seconds since the epoch; `deadline`: when the check must be done, by `time.monotonic`."""

    rank: int
    present: Sequence[int]
    networks: Mapping[int, str]
    device: torch.device
    store: Store
    now: Callable[[], float] = time.time
    deadline: float = 0.0

    @property
    def others(self) -> list[int]:
        """The present ranks but this one."""
        return [rank for rank in self.present if rank != self.rank]

    def left_s(self) -> float:
        """Seconds until the deadline; raises TimeoutError when there are none."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("out of time")
        return left

    def tell(self, key: str, value: Any) -> None:
        """Put a JSON value into the store."""
        self.store.set(key, json.dumps(value))

    def ask(self, key: str, share: float = 1.0) -> Any:
        """The JSON value that some rank tells; waits for at most a share of what is left until the deadline.

        Raises RuntimeError or TimeoutError when it does not come.
        """
        return ask(self.store, key, share * self.left_s())


def ask(store: Store, key: str, limit_s: float) -> Any:
    """A JSON value from the store, once it is there. Raises RuntimeError when it is not within `limit_s`."""
    store.wait([key], timedelta(seconds=limit_s))
    return json.loads(store.get(key))


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing to look at.

    needs: "rank", what a rank finds out alone; "all", what the present ranks do together, each at about the same time.
    devices: where it makes sense. `gather` runs on every rank, at most `limit_s + limit_per_rank_s * ranks`; what it
    raises is a finding. `judge` sees the facts of the ranks that have any, by rank. `show` is for people.
    """

    name: str
    needs: Literal["rank", "all"]
    gather: Callable[[Site], Facts]
    judge: Callable[[Mapping[int, Facts], Cohort], Iterator[Finding]]
    show: Callable[[Facts], str]
    limit_s: float
    limit_per_rank_s: float = 0.0
    devices: tuple[str, ...] = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a check on one rank: facts, or an error."""

    facts: Facts | None = None
    error: str = ""
    late: bool = False
    elapsed_ms: float = 0.0


def attempt(gather: Callable[[], Facts], limit_s: float) -> Outcome:
    """Run `gather` for at most `limit_s`. One that takes longer is left behind in its thread."""
    done: list[Outcome] = []
    started = time.monotonic()

    def elapsed_ms() -> float:
        return round((time.monotonic() - started) * 1e3, 1)

    def work() -> None:
        try:
            facts = gather()
            done.append(Outcome(facts=facts, elapsed_ms=elapsed_ms()))
        except Exception as error:
            text = (str(error).splitlines() or [""])[0]
            done.append(Outcome(error=f"{type(error).__name__}: {text}", elapsed_ms=elapsed_ms()))

    thread = threading.Thread(target=work, name="doctor", daemon=True)
    thread.start()
    thread.join(limit_s)
    return done[0] if done else Outcome(error=f"not done within {limit_s:g} s", late=True, elapsed_ms=elapsed_ms())


def groups_of(facts: Mapping[int, Any]) -> dict[Any, list[int]]:
    """Ranks by equal value, the most common value first."""
    groups: dict[Any, list[int]] = {}
    for rank in sorted(facts):
        groups.setdefault(facts[rank], []).append(rank)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 2`, `ranks 0-7`."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def differing(name: str, facts: Mapping[int, Any]) -> tuple[tuple[int, ...], str] | None:
    """The ranks that are not like most, and a text with all values; None where all are alike."""
    groups = groups_of(facts)
    if len(groups) < 2:
        return None
    odd = sorted(rank for ranks in list(groups.values())[1:] for rank in ranks)
    values = "; ".join(f"{value or 'absent'} on {ranks_text(ranks)}" for value, ranks in groups.items())
    return tuple(odd), f"{name} is {values}"
