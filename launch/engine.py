"""One rank's engine: the loop of steps over a loaded model, together with all the other ranks.

Its own file because this is where scheduler, agreement, ubatches, model and sampling meet, and nothing else does. A
step, in the order of the code:

    plan      what all ranks agreed to do, from the vote that each cast for its schedule
    forward   the batch is built, padded and cut as planned, runs whole or as ubatches, and is merged
    sample    logits of the rows that need them, one token each
    commit    the tokens go to their requests; those that end are handed out

The vote for the next step is cast before `forward` when its schedule cannot depend on this step's tokens, and after
`commit` otherwise; the schedule is the same either way.

Invariants: every rank takes part in every step, with nothing to do too, and all leave after the same one; an engine
is loaded once and runs any number of times, with any settings of the overlap.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from dbo.agreement import Agreement, BatchPlan, PendingPlan, Vote
from dbo.config import DBOConfig
from dbo.errors import DBOError, StepTimeout
from dbo.graphs.mode import CUDAGraphMode
from dbo.offload import Offloader
from dbo.policy import Auto, Correction, Policy, StepCosts, Tuner, make_policy
from dbo.runner import UBatchRunner
from dbo.slices import can_cut, make_slices, pad_batch, split_batch
from dbo.trace import Tracer
from launch.graphs import Graphs
from launch.inputs import Inputs
from launch.inputs import wait_event as wait_event
from launch.mesh import Mesh
from launch.sampling import sample, top_logprobs
from launch.scheduler import Chunk, Limits, Request, Schedule, Scheduler
from moe.all2all.base import All2All, CannotRecall
from moe.kv_cache import KVCache
from moe.models.decoder import Model
from moe.sms import make_partition

EXIT_LIMIT_S = 10  # what a process gets to end whose device holds kernels that do not
WARN_S = 10.0  # a step that waits for so long says for whom, and again after twice as long

Phase = Literal["prefill", "decode", "mixed"]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineVote(Vote):
    """The vote of an engine: what `Vote` says, and what else all ranks must know alike or watch."""

    num_decode_tokens: int = 0
    interrupted: bool = False  # this rank was asked to stop: all leave after the step before
    num_running: int = 0  # requests under way; these three are for whoever watches
    num_waiting: int = 0
    num_kv_blocks: int = 0  # in use


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """What one step did on this rank, and how long it took."""

    phase: Phase  # of all ranks together
    num_tokens: int
    num_tokens_padded: int
    num_tokens_of_all: int  # of all ranks together
    num_rows_of_all: int  # what they compute, real or padding
    num_ubatches: int
    reason: str
    agree_ms: float  # waiting for the votes of the others
    wait_ms: float | None  # the host standing still for messages; None where it does not wait for them, or does not say
    wall_ms: float  # the whole step, from asking for the plan to the last commit


@dataclass(kw_only=True)
class RunResult:
    """What one run did on this rank."""

    steps: list[StepRecord] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    interrupted: bool = False
    num_collectives: int = 0
    num_preemptions: int = 0
    summary: str = ""
    wall_s: float = 0.0


@runtime_checkable
class WaitsOnHost(Protocol):
    """A transport that may say how long the host has waited for its messages."""

    @property
    def host_wait_s(self) -> float | None:
        """Seconds so far; None where the device waits, not the host."""


class Observer(Protocol):
    """Who watches a run. All calls come from the engine's thread, between steps."""

    def planned(self, plan: BatchPlan) -> None:
        """Called with every plan, the last one (nobody has work left) too."""

    def stepped(self, record: StepRecord, plan: BatchPlan) -> None:
        """Called after every step."""

    def finished(self, request: Request) -> None:
        """Called when a request has ended; its row counts in this rank's next vote."""

    def interrupted(self) -> bool:
        """Whether this rank was asked to stop."""


class Unobserved:
    """An observer for runs whose requests are looked at afterwards."""

    def planned(self, plan: BatchPlan) -> None:
        """Ignore."""

    def stepped(self, record: StepRecord, plan: BatchPlan) -> None:
        """Ignore."""

    def finished(self, request: Request) -> None:
        """Ignore."""

    def interrupted(self) -> bool:
        """Never."""
        return False


Sampler = Callable[[Sequence[Chunk], Tensor], Tensor]
"""Chunks that need a token and their logits [n, vocab] float32 -> [n] int64, on the logits' device, without waiting.

-1 stands for a row with NaN."""


Forward = Callable[[Schedule, BatchPlan, DBOConfig], Tensor]
"""A schedule, its plan and the settings -> hidden states [num_tokens, hidden], as `Engine.forward`."""

IDLE_S = 1e-3  # between two looks for requests that have arrived, while no rank has any


def sample_chunks(chunks: Sequence[Chunk], logits: Tensor) -> Tensor:
    """Each request samples as its parameters say."""
    return sample(logits, [c.request.params for c in chunks], [c.start + c.num_tokens for c in chunks])


class StepClock:
    """How long the current step has run. `check` is what every wait of a step calls: it gives up when a peer has failed
    or the step has taken too long, split or not. `late`: the ranks that others wait for, with words for each."""

    def __init__(
        self,
        check_peers: Callable[[], None],
        limit_s: float,
        rank: int,
        late: Callable[[], Mapping[int, str]] = dict,
    ):
        self._check_peers, self._limit_s, self._rank, self._late = check_peers, limit_s, rank, late
        self._started: float | None = None
        self._waiting_since = self._last_check = 0.0
        self._next_warning_s = WARN_S

    def start(self) -> None:
        """A step begins."""
        self._started = time.monotonic()
        self._next_warning_s = WARN_S

    def stop(self) -> None:
        """No step is under way."""
        self._started = None

    def check(self) -> None:
        """Raise PeerFailed or StepTimeout. Safe from any thread."""
        self._check_peers()
        if (started := self._started) is None:
            return
        now = time.monotonic()
        if now - max(self._last_check, started) > WARN_S / 10:  # what came before was no wait
            self._waiting_since = now
        self._last_check = now
        if 0 < self._limit_s < now - started:
            raise StepTimeout(
                f"rank {self._rank}: a step waits for more than {self._limit_s:g} s (--step-timeout) "
                f"for {_whom(self._late())}"
            )
        if now - max(self._waiting_since, started) > self._next_warning_s:
            self._next_warning_s *= 2
            late = self._late()
            if not any(rank not in late for rank in range(self._rank)):  # the first rank that waits speaks for all
                logging.warning("this step has waited %.0f s for %s", now - started, _whom(late))


def _whom(late: Mapping[int, str]) -> str:
    return ", ".join(late.values()) or "a message: all ranks wait, so one is under way or lost"


class Engine:
    """A loaded model, its KV cache and the ranks around it.

    `clock` must be the one whose `check` the model's all2all calls while it waits.
    """

    def __init__(self, mesh: Mesh, model: Model, all2all: All2All, kv: KVCache, limits: Limits, clock: StepClock):
        self.mesh, self.model, self.all2all, self.kv = mesh, model, all2all, kv
        self.limits, self.clock = limits, clock
        self.costs: StepCosts | None = None  # of this model on these ranks: what overlap="auto" decides by
        self.tracer: Tracer | None = None  # changed between runs only; with one, every step records who ran when
        self.outstanding: str | None = None  # what a failed step left on the device and nobody can recall
        self._closes_transport = True
        self.graphs: Graphs | None = None  # steps run from them where they can
        self.offloader: Offloader | None = None
        self._inputs = Inputs(limits, mesh.device, clock.check)
        self._runners: dict[tuple[str, int, Tracer | None], UBatchRunner] = {}

    @torch.inference_mode()
    def run(
        self,
        requests: Sequence[Request],
        dbo: DBOConfig,
        observer: Observer | None = None,
        *,
        num_rows: int = 0,
        num_logprobs: int | None = None,
        early_votes: bool = True,
        sampler: Sampler = sample_chunks,
        policy: Policy | None = None,
        tuner: Tuner | None = None,
        forward: Forward | None = None,
    ) -> RunResult:
        """Compute this rank's requests (maybe none) together with the other ranks, until all are done.

        Collective, with the same `dbo` on every rank. Requests come in order of `index` and of `arrival_s`, before
        which none of them starts, and have passed `Scheduler.check`. `num_rows`: output rows that this rank posted
        before the run. `early_votes=False` casts every vote after the step before it, for tests. `sampler`: chooses the
        tokens, for experiments that watch logits or force tokens. `forward`: runs instead of `Engine.forward`, for
        experiments that look into steps. `policy` and `tuner`: decide instead of what `dbo` names, for measurements.
        Raises PeerFailed, StepTimeout and what a step raises; after that the groups
        of the mesh need renewal.
        """
        forward = forward or self.forward
        run = _Run(self, dbo, observer or Unobserved(), num_logprobs, early_votes, sampler, forward, policy, tuner)
        with nullcontext() if self.graphs is None else self.graphs.stream():
            return run.run(requests, num_rows)

    def runner(self, dbo: DBOConfig) -> UBatchRunner:
        """The kept runner for these settings."""
        key = (dbo.driver, dbo.num_ubatches, self.tracer)
        if key not in self._runners:
            self._runners[key] = UBatchRunner(
                dbo.num_ubatches,
                device=self.mesh.device,
                driver=dbo.driver,
                rank=self.mesh.rank,
                step_timeout_s=dbo.step_timeout_s,
                tracer=self.tracer,
            )
        return self._runners[key]

    def forward(self, schedule: Schedule, plan: BatchPlan, dbo: DBOConfig) -> Tensor:
        """Hidden states [num_tokens, hidden] of a step's tokens, run as planned; does not wait for the device."""
        if self.graphs is not None:
            plan, mode, descriptor = self.graphs.settle(plan, dbo)
            if mode is not CUDAGraphMode.NONE and self.tracer is None:
                return self.graphs.run(schedule, plan, mode, descriptor)
        if self.offloader is not None:
            self.offloader.sync_prev_onload()
        hidden = self._forward_eagerly(schedule, plan, dbo)
        if self.offloader is not None:
            self.offloader.join_after_forward()
        return hidden

    def check(self) -> None:
        """What waits of a step call; raises to abandon them."""
        self.clock.check()

    def _forward_eagerly(self, schedule: Schedule, plan: BatchPlan, dbo: DBOConfig) -> Tensor:
        batch = self._inputs.build(schedule, plan)
        if plan.num_tokens_padded is not None:
            batch = pad_batch(batch, plan.num_tokens_padded)
        if not plan.should_ubatch:
            if self.tracer is None:
                return self.model(batch, self.kv)[: schedule.num_tokens]
            (hidden,) = self.runner(dbo).run(lambda part: self.model(part, self.kv), [batch])
            return hidden[: schedule.num_tokens]
        slices = make_slices(plan, schedule.query_lens, seq_lens=schedule.seq_lens)
        parts = split_batch(batch, slices)
        largest = max(n for part in parts for n in (len(part.input_ids), *(part.num_tokens_per_rank or ())))
        with make_partition(self.all2all, dbo.comm_sms, self.mesh.device, largest):
            ends = self.runner(dbo).run(lambda part: self.model(part, self.kv), parts, interleave=dbo.interleave)
        return torch.cat([end[: s.num_tokens] for end, s in zip(ends, slices, strict=True)])

    def read(self, tensor: Tensor) -> list[int]:
        """The values of a device tensor: the one wait for the device in a step, given up when a peer has failed."""
        if tensor.is_cuda:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
            wait_event(done, self.clock.check)
            tensor = host
        return list(tensor.tolist())

    def note_failure(self, error: BaseException) -> None:
        """A step has failed: see what it left behind, and say so with its error."""
        if not isinstance(self.all2all, CannotRecall):
            return
        self._closes_transport = False
        self.outstanding = self.all2all.outstanding()
        if self.outstanding is not None:
            error.add_note(f"{self.outstanding} is left, which ends this process")

    def close(self) -> None:
        """End the ubatch threads and the transport.

        After a step that left an operation on the device this ends the process instead (SystemExit): to close the
        transport would wait for that operation, and so might the end of the process, which is forced then. On a rank
        where nothing is left the transport stays as it is: to close it would wait for the others.
        """
        if self.outstanding is not None:
            signal.alarm(EXIT_LIMIT_S)
            self.mesh.renew(must_exit=self.outstanding)
        if self.graphs is not None:
            self.graphs.close()
        if self._closes_transport:
            self.all2all.close()
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()


class _Run:
    """The state of one `Engine.run`."""

    def __init__(
        self,
        engine: Engine,
        dbo: DBOConfig,
        observer: Observer,
        num_logprobs: int | None,
        early_votes: bool,
        sampler: Sampler,
        forward: Forward,
        policy: Policy | None,
        tuner: Tuner | None,
    ):
        mesh = engine.mesh
        self.engine, self.dbo, self.observer = engine, dbo, observer
        self.num_logprobs, self.early_votes, self.sampler, self.forward = num_logprobs, early_votes, sampler, forward
        self._arriving: deque[Request] = deque()
        self._started_s = 0.0
        self._waiting = engine.all2all if isinstance(engine.all2all, WaitsOnHost) else None
        self.scheduler = Scheduler(engine.limits)
        self.policy = policy or make_policy(dbo, engine.costs)
        if isinstance(self.policy, Auto) and self.policy.costs.comm_sms is not None:
            self.dbo = replace(dbo, comm_sms=self.policy.costs.comm_sms)
        if tuner is None and isinstance(self.policy, Auto):
            tuner = Correction(self.policy, speaks=mesh.rank == 0)
        self.tuner = tuner
        self.agreement = Agreement(
            mesh.agreement_group if mesh.world_size > 1 else None,
            dp_rank=mesh.rank,
            dp_size=mesh.world_size,
            config=dbo,
            policy=self.policy,
            check=engine.clock.check,
            vote_type=EngineVote,
        )

    def run(self, requests: Sequence[Request], num_rows: int) -> RunResult:
        result, self._started_s = RunResult(), time.perf_counter()
        self._arriving.extend(requests)
        try:
            self._steps(result, num_rows)
        except BaseException as error:
            self.engine.note_failure(error)
            raise
        finally:
            self.engine.clock.stop()
        result.reasons = Counter({str(reason): count for reason, count in self.agreement.reasons.items()})
        result.num_collectives = self.agreement.num_collectives
        result.num_preemptions = self.scheduler.num_preemptions
        result.summary = self.agreement.summary()
        result.wall_s = time.perf_counter() - self._started_s
        return result

    def _steps(self, result: RunResult, num_rows: int) -> None:
        schedule, pending = self._vote(num_rows)
        on_host = waited = self.engine.mesh.device.type == "cpu"
        while True:
            self.engine.clock.start()
            began, waited_s = time.perf_counter(), self._host_wait_s()
            plan = pending.result()
            agreed = time.perf_counter()
            self.observer.planned(plan)
            if _log.isEnabledFor(logging.DEBUG):
                _log.debug("%s%s", plan.explain(), self._costs_of(plan))
            result.interrupted = 1 in plan.votes["interrupted"]
            if plan.finished or result.interrupted:
                return
            if not any(plan.num_tokens_per_rank):  # on every rank alike: all of them wait for requests to arrive
                time.sleep(IDLE_S)
                schedule, pending = self._vote(0)
                continue
            early = self.early_votes and schedule.foreseeable
            following = self._vote(schedule.num_ended) if early else None
            ended = self._compute(schedule, plan)
            wait_ms = None if waited_s is None else ((self._host_wait_s() or 0.0) - waited_s) * 1e3
            record = _record(schedule, plan, began, agreed, wait_ms)
            result.steps.append(record)
            self.observer.stepped(record, plan)
            waited, began_idle = on_host or bool(schedule.sampling), waited
            if self.tuner is not None and waited and began_idle:  # else the device did some in another step's time
                self.tuner.observe(plan, record.wall_ms - record.agree_ms)
            schedule, pending = following or self._vote(ended)

    def _costs_of(self, plan: BatchPlan) -> str:
        if not isinstance(self.policy, Auto) or not any(plan.num_tokens_per_rank):
            return ""
        return f"; {self.policy.costs.estimate(plan)}"

    def _host_wait_s(self) -> float | None:
        return None if self._waiting is None else self._waiting.host_wait_s

    def _vote(self, num_rows: int) -> tuple[Schedule, PendingPlan]:
        """Schedule the next step, with the requests that have arrived, and cast this rank's vote for it."""
        elapsed_s = time.perf_counter() - self._started_s
        while self._arriving and self._arriving[0].arrival_s <= elapsed_s:
            self.scheduler.add(self._arriving.popleft())
        schedule = self.scheduler.schedule()
        graphs = self.engine.graphs
        graph_mode, num_tokens_padded = (0, 0) if graphs is None else graphs.vote(schedule)
        vote = EngineVote(
            num_tokens=schedule.num_tokens,
            num_tokens_padded=num_tokens_padded,
            graph_mode=graph_mode,
            uniform_decode=schedule.uniform_decode,
            can_cut=can_cut(schedule.query_lens, self.dbo, seq_lens=schedule.seq_lens),
            finished=not (schedule.chunks or self.scheduler.has_work or self._arriving),
            num_rows=num_rows,
            num_decode_tokens=sum(chunk.is_decode for chunk in schedule.chunks),
            interrupted=self.observer.interrupted(),
            num_running=schedule.num_running,
            num_waiting=len(self.scheduler.waiting),
            num_kv_blocks=schedule.num_kv_blocks,
            **(self.tuner.fields(schedule.uniform_decode) if self.tuner else {}),
        )
        return schedule, self.agreement.issue(vote)

    def _compute(self, schedule: Schedule, plan: BatchPlan) -> int:
        """Forward, sample, commit; returns how many requests ended."""
        hidden = self.forward(schedule, plan, self.dbo)
        tokens = self._sample(schedule, hidden)
        now = time.perf_counter()
        for chunk in schedule.sampling:
            chunk.request.first_token_s = chunk.request.first_token_s or now
            chunk.request.last_token_s = now
        ended = self.scheduler.commit(schedule, tokens)
        for request in ended:
            self.observer.finished(request)
        return len(ended)

    def _sample(self, schedule: Schedule, hidden: Tensor) -> list[int]:
        chunks = schedule.sampling
        if not chunks:
            return []
        last = np.cumsum(schedule.query_lens, dtype=np.int64) - 1
        rows = torch.from_numpy(last[[chunk.samples for chunk in schedule.chunks]]).to(hidden.device)
        logits = self.engine.model.compute_logits(hidden[rows])
        chosen = self.sampler(chunks, logits)
        tokens = self.engine.read(chosen)
        if -1 in tokens:
            raise DBOError(
                f"request {chunks[tokens.index(-1)].request.id!r}: the model's logits are not numbers (NaN): its "
                "weights are damaged, or --dtype is too narrow for its activations"
            )
        if self.num_logprobs is not None:
            for chunk, row in zip(chunks, top_logprobs(logits, chosen, self.num_logprobs), strict=True):
                chunk.request.logprobs.append(row)
        return tokens


def _record(schedule: Schedule, plan: BatchPlan, began: float, agreed: float, wait_ms: float | None) -> StepRecord:
    phase: Phase = "mixed" if any(plan.votes["num_decode_tokens"]) else "prefill"
    padded = plan.num_tokens_padded
    return StepRecord(
        phase="decode" if plan.uniform_decode else phase,
        num_tokens=schedule.num_tokens,
        num_tokens_padded=schedule.num_tokens if padded is None else padded,
        num_tokens_of_all=sum(plan.num_tokens_per_rank),
        num_rows_of_all=sum(plan.num_tokens_per_rank) if padded is None else padded * len(plan.num_tokens_per_rank),
        num_ubatches=plan.num_ubatches,
        reason=str(plan.reason),
        agree_ms=(agreed - began) * 1e3,
        wait_ms=wait_ms,
        wall_ms=(time.perf_counter() - began) * 1e3,
    )
