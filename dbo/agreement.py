"""This rank's vote -> one all-reduce -> a plan for the step, the same on every rank, with a reason.

A file of its own because this is where ranks meet: whatever they must do alike (split or not, how far to pad, which
graph mode, whether to stop) is decided here and nowhere else. Invariants:

- a step is one all-reduce, on every rank, with or without work. Never two, never none;
- `decide` is a pure function of what was reduced and of the configuration, so that equal inputs give equal plans;
- fields have names. A `Vote` subclass with more integer fields adds rows; nothing else changes.
"""

import math
import operator
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from enum import StrEnum
from typing import Protocol, SupportsIndex

import numpy as np
import torch
import torch.distributed as dist

from dbo.config import DBOConfig
from dbo.errors import AgreementError, StepTimeout
from dbo.work import done_within

_WAIT_SLICE = timedelta(milliseconds=50)  # how late a failed peer is noticed; the end of the collective is seen at once

Votes = Mapping[str, tuple[int, ...]]
"""What all ranks voted: for each field of `Vote`, and for `WANTS`, one integer a rank. Flags are 0 or 1."""

WANTS = "wants_ubatch"
"""The row that holds what each rank's policy said."""


class Reason(StrEnum):
    """Why a step was split, or why not."""

    SPLIT = "split"
    FINISHED = "finished"
    OVERLAP_OFF = "overlap off"
    SINGLE_RANK = "single rank"
    IDLE_RANK = "idle rank"
    BELOW_THRESHOLD = "below threshold"
    GRAPH_MODE = "graph mode"
    CANNOT_CUT = "cannot cut"
    LAST_UBATCH_EMPTY = "last ubatch empty"
    NOT_PROFITABLE = "policy: not profitable"
    PROBE = "policy: a look at whole"


@dataclass(frozen=True, kw_only=True, slots=True)
class Vote:
    """What one rank says before a step. Subclasses may add fields; every field is an int32 or a flag."""

    num_tokens: int
    """Tokens that this rank has scheduled; 0 = no work."""
    num_tokens_padded: int = 0
    """Tokens after padding to a captured size; less than `num_tokens` = no padding wished."""
    uniform_decode: bool = False
    """Every request of this rank has exactly one new token."""
    can_cut: bool = True
    """This rank's own cut gives enough ubatches, none of them empty (`slices.can_cut`)."""
    graph_mode: int = 0
    """Highest graph mode that this rank can run its step in, 0 = none. A rank without work gives the highest."""
    finished: bool = False
    """This rank has no request left, and none will come."""
    num_rows: int = 0
    """Finished output rows that this rank has posted since its last vote."""
    prefill_drift: int = 0
    """By how much this rank's clock found overlap dearer against whole than the profile said, other steps than decode;
    see `policy.DRIFT_UNIT`."""
    decode_drift: int = 0
    """The same for uniform decodes."""
    probe: int = 0
    """The arm that this rank asks to see in this step, whatever pays; see `policy.PROBE_WHOLE`. 0 = none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """What all ranks do in this step."""

    config: DBOConfig
    votes: Votes
    reason: Reason
    reason_rank: int | None
    """The first rank that caused `reason`, where one did."""
    num_ubatches: int
    """1 = not split."""
    num_tokens_padded: int | None
    """Tokens to which every rank pads its batch, a multiple of `config.part_multiple` if split; None = no padding."""

    @property
    def should_ubatch(self) -> bool:
        """Whether the step is split."""
        return self.num_ubatches > 1

    @property
    def num_tokens_per_rank(self) -> tuple[int, ...]:
        """True tokens of every rank."""
        return self.votes["num_tokens"]

    @property
    def num_rows_per_rank(self) -> tuple[int, ...]:
        """Output rows that every rank has posted since the last step."""
        return self.votes["num_rows"]

    @property
    def uniform_decode(self) -> bool:
        """Every rank that has work has a uniform decode."""
        flags = zip(self.votes["num_tokens"], self.votes["uniform_decode"], strict=True)
        return all(uniform or not num_tokens for num_tokens, uniform in flags)

    @property
    def graph_mode(self) -> int:
        """The lowest of all votes."""
        return min(self.votes["graph_mode"])

    @property
    def finished(self) -> bool:
        """All ranks are finished: no step follows."""
        return 0 not in self.votes["finished"]

    def explain(self) -> str:
        """One line for people: the decision, the rank that caused it, and the counts behind it."""
        rank = "" if self.reason_rank is None else f" on rank {self.reason_rank}"
        said = f"no split: {self.reason}{rank}{self._detail()}"
        if self.should_ubatch:
            said = f"split in {self.num_ubatches} by {self.config.cut}"
        counts = f"tokens per rank {', '.join(map(str, self.num_tokens_per_rank))}"
        if self.num_tokens_padded is not None:
            counts += f"; {_padding(self.num_tokens_per_rank, self.num_tokens_padded)}"
        return f"{said}; {counts}"

    def _detail(self) -> str:
        config, rank = self.config, self.reason_rank
        if self.reason is Reason.BELOW_THRESHOLD and rank is not None:
            kind = "decode" if self.votes["uniform_decode"][rank] else "prefill"
            threshold = config.decode_token_threshold if kind == "decode" else config.prefill_token_threshold
            return f" ({self.num_tokens_per_rank[rank]} tokens, {kind} threshold {threshold})"
        if self.reason is Reason.LAST_UBATCH_EMPTY:
            padded = _padded_to_parts(self.votes, config)
            last = padded - padded // config.num_ubatches
            return f" (the last ubatch would start at token {last}; {_padding(self.num_tokens_per_rank, padded)})"
        if self.reason is Reason.GRAPH_MODE:
            return f" (a graph needs ubatches of identical shape, which cut={config.cut} does not give; use cut=tokens)"
        return ""


class Policy(Protocol):
    """Whether splitting is worth it. Equal on all ranks, and pure: no clock, no randomness, no state."""

    def vote(self, vote: Vote) -> bool:
        """Whether this rank, for its own part, wants to split."""
        ...

    def approve(self, plan: BatchPlan) -> Reason | None:
        """None to go ahead with a split plan, or why not. Sees only what all ranks see."""
        ...

    def describe(self) -> str:
        """The policy in effect, for people."""
        ...


def decide(votes: Votes, config: DBOConfig, policy: Policy) -> BatchPlan:
    """The plan that follows from what all ranks voted. Pure."""
    padded = _padded_to_parts(votes, config)
    reason, rank = _objection(votes, config, padded)
    if reason is Reason.SPLIT:
        plan = BatchPlan(
            config=config,
            votes=votes,
            reason=reason,
            reason_rank=None,
            num_ubatches=config.num_ubatches,
            num_tokens_padded=padded if config.cut == "tokens" else None,
        )
        objection = policy.approve(plan)
        if objection is None:
            return plan
        reason = objection
    return BatchPlan(
        config=config,
        votes=votes,
        reason=reason,
        reason_rank=rank,
        num_ubatches=1,
        num_tokens_padded=_largest(votes) if 0 not in votes["graph_mode"] else None,
    )


def _objection(votes: Votes, config: DBOConfig, padded: int) -> tuple[Reason, int | None]:
    """What speaks against a split before the policy is asked, and the first rank it comes from."""
    num_tokens, wants, can_cut = votes["num_tokens"], votes[WANTS], votes["can_cut"]
    if 0 not in votes["finished"]:
        return Reason.FINISHED, None
    if config.overlap == "off":
        return Reason.OVERLAP_OFF, None
    if len(num_tokens) == 1 and not config.allow_single_rank:
        return Reason.SINGLE_RANK, None
    if 0 in num_tokens:
        return Reason.IDLE_RANK, num_tokens.index(0)
    if 0 in wants:
        return Reason.BELOW_THRESHOLD, wants.index(0)
    if config.cut != "tokens" and 0 not in votes["graph_mode"]:
        return Reason.GRAPH_MODE, None
    if 0 in can_cut:
        return Reason.CANNOT_CUT, can_cut.index(0)
    fewest = min(num_tokens)
    if config.cut == "tokens" and padded - padded // config.num_ubatches >= fewest:
        return Reason.LAST_UBATCH_EMPTY, num_tokens.index(fewest)
    return Reason.SPLIT, None


def _int32(name: str, value: SupportsIndex | np.bool_) -> int:
    plain = bool(value) if isinstance(value, np.bool_) else value
    try:
        number = operator.index(plain)
    except TypeError:
        raise TypeError(f"{name}={value!r}: a vote holds whole numbers and flags") from None
    if not -(2**31) <= number < 2**31:
        raise TypeError(f"{name}={value!r}: a vote holds 32-bit integers")
    return number


def _largest(votes: Votes) -> int:
    return max(*votes["num_tokens"], *votes["num_tokens_padded"])


def _padded_to_parts(votes: Votes, config: DBOConfig) -> int:
    """The largest batch, padded so that it falls into equal, aligned parts."""
    multiple = config.part_multiple
    return -(-_largest(votes) // multiple) * multiple


def _padding(num_tokens_per_rank: Sequence[int], padded: int) -> str:
    rows = padded * len(num_tokens_per_rank)
    return f"padding every rank to {padded} makes {rows - sum(num_tokens_per_rank)} of {rows} rows padding"


class PendingPlan:
    """A vote that has been cast; the plan follows once all ranks have voted."""

    __slots__ = ("_agreement", "_number", "_plan", "_work")

    def __init__(self, agreement: "Agreement", number: int, work: dist.Work | None):
        self._agreement, self._number, self._work = agreement, number, work
        self._plan: BatchPlan | None = None

    def result(self) -> BatchPlan:
        """Block the host until every rank has voted. Raises what `Agreement.issue` lists."""
        if self._plan is None:
            self._plan = self._agreement._finish(self._number, self._work)
        return self._plan


class Agreement:
    """One all-reduce(SUM) a step of an int32 tensor [fields of the vote, dp_size], of which each rank fills its column.

    `group` moves CPU tensors (gloo) and serves nothing else, so that its order of collectives is the order of steps;
    None for a single rank, which asks nobody. `check` is called while a wait goes on and raises to abandon it. No
    device is touched or waited for. Not for use from several threads at once.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        dp_rank: int,
        dp_size: int,
        config: DBOConfig,
        policy: Policy,
        check: Callable[[], None] | None = None,
        vote_type: type[Vote] = Vote,
    ):
        self.reasons: Counter[Reason] = Counter()
        self.reason_ranks: Counter[tuple[Reason, int]] = Counter()
        self.num_collectives = 0
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._config, self._policy, self._check = config, policy, check or (lambda: None)
        self._num_votes = 0
        names = [field.name for field in fields(vote_type)]
        self._fields = (*names, WANTS)
        self._values_of = operator.attrgetter(*names)
        self.renew(group)

    def renew(self, group: dist.ProcessGroup | None) -> None:
        """Go on with a new group after a failed step. A vote that was pending is lost; counts go on."""
        if group is None and self._dp_size > 1:
            raise AgreementError(f"{self._dp_size} ranks need a process group to agree")
        self._group = group
        # New memory: an abandoned collective may still write to the old one. The tensor is a view of a plain array,
        # [fields, ranks] row by row, because so few numbers are read and written faster without numpy.
        self._cells = array("i", bytes(4 * len(self._fields) * self._dp_size))
        self._blank = self._cells[:]
        self._tensor = torch.frombuffer(self._cells, dtype=torch.int32).view(-1, self._dp_size)
        self._pending: int | None = None

    def agree(self, vote: Vote) -> BatchPlan:
        """`issue(vote).result()`."""
        return self.issue(vote).result()

    def issue(self, vote: Vote) -> PendingPlan:
        """Cast this rank's vote without waiting for the others.

        Raises `AgreementError` if an earlier vote is still pending and `TypeError` for a field that is no int32: then
        nothing was cast. `result()` raises `AgreementError` if the collective fails, `StepTimeout` if a rank does not
        vote within `config.step_timeout_s`, and whatever `check` raises. After any of these the ranks need `renew`.
        """
        if self._pending is not None:
            raise AgreementError("the previous vote is still pending: one step, one vote")
        column = self._column(vote)
        self._cells[:] = self._blank
        self._cells[self._dp_rank :: self._dp_size] = column
        work = None
        if self._group is not None:
            work = self._group.allreduce([self._tensor])
            self.num_collectives += 1
        self._num_votes += 1
        self._pending = self._num_votes
        return PendingPlan(self, self._pending, work)

    def summary(self) -> str:
        """How often each reason held and on which ranks, most frequent first: for the end of a run."""
        counts = []
        for reason, count in self.reasons.most_common():
            ranks = [f"rank {rank}: {n}" for (why, rank), n in sorted(self.reason_ranks.items()) if why is reason]
            counts.append(f"{reason}: {count}" + (f" ({', '.join(ranks)})" if ranks else ""))
        return f"{self._policy.describe()}; steps: {', '.join(counts) or 'none'}"

    def _column(self, vote: Vote) -> "array[int]":
        values = (*self._values_of(vote), self._policy.vote(vote))
        try:
            return array("i", values)
        except (TypeError, OverflowError):  # of one of them; or a flag is numpy's, which is no integer to Python
            return array("i", map(_int32, self._fields, values))

    def _finish(self, number: int, work: dist.Work | None) -> BatchPlan:
        if self._pending != number:
            raise AgreementError("this vote was abandoned when the group was renewed")
        if work is not None:
            self._wait(work)
        rows = zip(*[iter(self._cells)] * self._dp_size, strict=True)  # one iterator, so many cells at a time
        votes = dict(zip(self._fields, rows, strict=True))
        plan = decide(votes, self._config, self._policy)
        self._pending = None
        self.reasons[plan.reason] += 1
        if plan.reason_rank is not None:
            self.reason_ranks[plan.reason, plan.reason_rank] += 1
        return plan

    def _wait(self, work: dist.Work) -> None:
        limit_s = self._config.step_timeout_s
        deadline = time.monotonic() + limit_s if limit_s else math.inf
        try:
            while not done_within(work, _WAIT_SLICE):
                self._check()
                if time.monotonic() > deadline:
                    raise StepTimeout(f"rank {self._dp_rank}: not all ranks voted within {limit_s:g} s")
        except RuntimeError as error:
            self._check()  # knows better than a closed connection which rank failed, and why
            raise AgreementError(f"rank {self._dp_rank} lost the other ranks: {error}") from error
