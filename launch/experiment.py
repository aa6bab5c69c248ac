"""The runs of one A/B: which arms there are, the equality gate, the rounds, and what one step is made of.

Its own file because it is the experiment itself, on an engine that is ready: `ab.py` is the command around it, and
`report.py` says what came out. Arms come from one table, and differ in nothing but the settings in it.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from dbo.config import DBOConfig
from dbo.errors import ConfigError
from dbo.trace import Tracer
from launch.ceiling import StepBreakdown, StepMeter, join_breakdowns, steps_to_measure, why_too_large
from launch.engine import Engine, RunResult, StepRecord, sample_chunks
from launch.power import SHORTEST_S, PowerMeter
from launch.report import ArmResult, Gate, Latencies, RoundTimes
from launch.sampling import SamplingParams
from launch.scheduler import Chunk, Request
from launch.session import gather
from launch.timeline import StepTimeline, StepTracer, join_ranks, step_to_trace
from launch.workload import Prompt
from moe.all2all.base import CountsTraffic

ARMS: Mapping[str, Mapping[str, Any]] = {
    "whole": {"overlap": "off"},
    "split": {"overlap": "on", "interleave": False},
    "overlap": {"overlap": "on", "interleave": True},
    "auto": {"overlap": "auto", "interleave": True},
}
"""What each arm changes in the settings of the overlap."""
NEEDED = ("whole", "overlap")
"""Arms without which nothing is compared."""

NEAR_TIE = 1e-3
"""Two logits closer than this (times the tolerance's scale in lower precision) may swap places between arms."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Largest difference between whole and overlap, over the largest logit, by the type of weights and activations."""
GATE_TOKENS = 8
"""Tokens of each answer that the gate compares; later ones add time, not coverage."""
REPEATS = 9
"""How often each form of a step runs that is taken apart: as often as there are rounds, from 5 up to this;
less often where that takes long."""


def parse_arms(text: str) -> tuple[str, ...]:
    """`whole,overlap` -> names of arms, in the order of `ARMS`. Raises ConfigError."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [name for name in names if name not in ARMS]:
        raise ConfigError("--arms", unknown[0], ", ".join(ARMS), "")
    if not set(NEEDED) <= set(names):
        raise ConfigError(
            "--arms",
            text,
            f"at least {' and '.join(NEEDED)}",
            "add the missing one: a single arm compares nothing",
        )
    return tuple(arm for arm in ARMS if arm in names)


def arm_config(arm: str, base: DBOConfig) -> DBOConfig:
    """The settings of one arm."""
    return replace(base, **ARMS[arm])


@dataclass
class Watch:
    """A sampler that keeps what the gate compares: for each sampled row, its logits or their digest.

    `force`: the tokens to continue with, by request; None lets each request sample greedily.
    """

    force: Mapping[str, Sequence[int]] | None = None
    logits: dict[tuple[str, int], Tensor] | None = None

    def __post_init__(self) -> None:
        self.digests: dict[tuple[str, int], bytes] = {}
        self.logits = {} if self.force is None else None
        self.difference = 0.0
        self.tokens_equal = True

    def __call__(self, chunks: Sequence[Chunk], logits: Tensor) -> Tensor:
        """Note every row, and choose its token."""
        rows = logits.float().cpu()
        for chunk, row in zip(chunks, rows, strict=True):
            key = (chunk.request.id, len(chunk.request.output_ids))
            self.digests[key] = hashlib.blake2b(row.numpy().tobytes(), digest_size=16).digest()
            if self.logits is not None:
                self.logits[key] = row.clone()
        if self.force is None:
            return sample_chunks(chunks, logits)
        forced = [self.force[chunk.request.id][len(chunk.request.output_ids)] for chunk in chunks]
        return torch.tensor(forced, device=logits.device)


class Comparison(Watch):
    """A forced run that is compared, row by row, with the logits of a free one."""

    def __init__(self, reference: Watch, tokens: Mapping[str, Sequence[int]], near_tie: float) -> None:
        super().__init__(force=tokens)
        self._reference, self._near_tie = reference.logits or {}, near_tie

    def __call__(self, chunks: Sequence[Chunk], logits: Tensor) -> Tensor:
        """Note every row, compare it, and choose the forced token."""
        for chunk, row in zip(chunks, logits.float().cpu(), strict=True):
            expected = self._reference[chunk.request.id, len(chunk.request.output_ids)]
            difference = float((row - expected).abs().max() / expected.abs().max())
            self.difference = difference if difference != difference else max(self.difference, difference)
            ours, theirs = int(row.argmax()), int(expected.argmax())
            self.tokens_equal &= float(expected[theirs] - expected[ours]) <= self._near_tie
        return super().__call__(chunks, logits)


@dataclass(frozen=True, kw_only=True)
class Round:
    """One arm's run in one measured round, on this rank."""

    position: int  # the arm's place in the order of the round
    result: RunResult
    ttft_ms: list[float]  # of each request, from its arrival to its first token
    itl_ms: list[float]  # of each request with two tokens or more: the mean time between them
    sent: tuple[int, int] | None  # messages and bytes; None where the transport does not know
    joules: float | None  # that this rank's GPU took; None where nobody counts
    seconds: float

    @classmethod
    def of(
        cls,
        position: int,
        result: RunResult,
        requests: Sequence[Request],
        started_s: float,
        sent: tuple[int, int] | None,
        joules: float | None,
    ) -> Round:
        """What a run says that started at `started_s` and ends now, of `requests` that have ended."""
        return cls(
            position=position,
            result=result,
            ttft_ms=[round((each.first_token_s - started_s - each.arrival_s) * 1e3, 3) for each in requests],
            itl_ms=[
                round((each.last_token_s - each.first_token_s) / (len(each.output_ids) - 1) * 1e3, 3)
                for each in requests
                if len(each.output_ids) > 1
            ],
            sent=sent,
            joules=joules,
            seconds=time.perf_counter() - started_s,
        )


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What the runs of one workload say; the same on every rank."""

    arms: dict[str, ArmResult]
    gate: Gate
    timelines: dict[str, StepTimeline]
    breakdowns: tuple[StepBreakdown, ...]
    breakdown_note: str


class Experiment:
    """The runs of one A/B on one rank. `name` is unique within the process's life, the same on every rank."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        base: DBOConfig,
        *,
        rounds: int,
        warmup: int,
        seed: int,
        take_apart: bool = True,
        name: str = "ab",
    ) -> None:
        self.engine, self.mesh, self.base, self.take_apart = engine, engine.mesh, base, take_apart
        self.rounds, self.warmup, self.seed, self.name = rounds, warmup, seed, name
        self.prompts = prompts
        self._meter = PowerMeter.of(engine.mesh.device)

    def run(self, arms: Sequence[str]) -> Findings:
        """The gate, all rounds, then one step under a lens. Collective."""
        gate = self._gate(arms)
        results = self._measure(arms)
        steps = self._steps_without_pace(results)
        breakdowns, note = self._break_down(steps) if self.take_apart else ((), "left out (--skip-breakdown)")
        return Findings(
            arms={arm: self._summarise(arm, results[arm]) for arm in arms},
            gate=gate,
            timelines=self._trace(arms, step_to_trace(steps)),
            breakdowns=breakdowns,
            breakdown_note=note,
        )

    @property
    def paced(self) -> bool:
        """Whether requests arrive by the clock: then no two runs have the same steps."""
        return any(prompt.arrival_s > 0 for prompt in self.prompts)

    def _requests(self, max_new_tokens: int | None = None, *, paced: bool = False) -> list[Request]:
        """This rank's share of the prompts, as requests that always run to their full length."""
        mine = self.prompts[self.mesh.rank :: self.mesh.world_size]
        return [
            Request(
                id=prompt.id,
                index=prompt.index,
                prompt_ids=prompt.content,
                params=SamplingParams(
                    max_new_tokens=min(prompt.params.max_new_tokens, max_new_tokens or prompt.params.max_new_tokens),
                    ignore_eos=True,
                ),
                arrival_s=prompt.arrival_s if paced else 0.0,
            )
            for prompt in mine
        ]

    def _gate(self, arms: Sequence[str]) -> Gate:
        """One run of each arm, compared row by row on every rank; also of arms that are not measured."""
        dtype = self.engine.model.config.dtype
        tolerance = TOLERANCE[dtype]
        whole, requests = Watch(), self._requests(GATE_TOKENS)
        self.engine.run(requests, arm_config("whole", self.base), sampler=whole)
        tokens = {request.id: list(request.output_ids) for request in requests}
        seen: dict[str, Comparison] = {}
        for arm in dict.fromkeys(["split", "overlap", *(arm for arm in arms if arm != "whole")]):
            seen[arm] = Comparison(whole, tokens, NEAR_TIE * tolerance / TOLERANCE[torch.float32])
            self.engine.run(self._requests(GATE_TOKENS), arm_config(arm, self.base), sampler=seen[arm])
        mine = {
            "bitwise": seen["split"].digests == seen["overlap"].digests,
            "difference": largest(comparison.difference for comparison in seen.values()),
            "tokens": all(comparison.tokens_equal for comparison in seen.values()),
        }
        everyone = self._gather("gate", mine)
        return Gate(
            split_equals_overlap=all(other["bitwise"] for other in everyone),
            max_relative_difference=largest(float(other["difference"]) for other in everyone),
            tolerance=tolerance,
            tokens_equal=all(other["tokens"] for other in everyone),
        )

    def _measure(self, arms: Sequence[str]) -> dict[str, list[Round]]:
        results: dict[str, list[Round]] = {arm: [] for arm in arms}
        with tqdm(
            total=(self.warmup + self.rounds) * len(arms), unit="run", disable=self.mesh.rank != 0, file=sys.stderr
        ) as bar:
            for number in range(self.warmup + self.rounds):
                order = list(arms)
                random.Random(self.seed * 1_000_003 + number).shuffle(order)
                for position, arm in enumerate(order):
                    bar.set_postfix_str(arm, refresh=False)
                    requests, before = self._requests(paced=True), self._sent()
                    joules, started_s = self._joules(), time.perf_counter()
                    result = self.engine.run(requests, arm_config(arm, self.base))
                    after, taken = self._sent(), None if self._meter is None else self._joules() - joules
                    if number >= self.warmup:
                        sent = None if before is None or after is None else (after[0] - before[0], after[1] - before[1])
                        results[arm].append(Round.of(position, result, requests, started_s, sent, taken))
                    bar.update()
        return results

    def _sent(self) -> tuple[int, int] | None:
        """Messages and bytes that this rank has sent so far."""
        all2all = self.engine.all2all
        return (all2all.traffic.messages, all2all.traffic.num_bytes) if isinstance(all2all, CountsTraffic) else None

    def _joules(self) -> float:
        return 0.0 if self._meter is None else self._meter.joules()

    def _steps_without_pace(self, results: Mapping[str, Sequence[Round]]) -> list[StepRecord]:
        """The steps of the overlap arm where requests do not wait for a clock: the same in every run."""
        if not self.paced:
            return results["overlap"][0].result.steps
        return self.engine.run(self._requests(), arm_config("overlap", self.base)).steps

    def _summarise(self, arm: str, rounds: Sequence[Round]) -> ArmResult:
        every_step = [step for each in rounds for step in each.result.steps]
        decode = [step for step in every_step if step.phase == "decode"]
        prefill = [step for step in every_step if step.phase != "decode"]
        waits = [step.wait_ms for step in every_step]
        mine = {
            "ttft": [each.ttft_ms for each in rounds],
            "itl": [each.itl_ms for each in rounds],
            "wait": None if None in waits else sum(ms or 0.0 for ms in waits),
            "wall": sum(step.wall_ms for step in every_step),
            "sent": [each.sent for each in rounds],
            "joules": [each.joules for each in rounds],
            "seconds": sum(each.seconds for each in rounds),
            "limit": None if self._meter is None else self._meter.limit_watts,
        }
        everyone = self._gather(f"rounds/{arm}", mine)
        waited = [other["wait"] for other in everyone]
        sent = [pair for other in everyone for pair in other["sent"]]
        joules = [of_round for other in everyone for of_round in other["joules"]]
        seconds = sum(other["seconds"] for other in everyone)
        power_known = None not in joules and seconds >= SHORTEST_S * len(joules)
        ttft, itl = (_by_round([other[name] for other in everyone]) for name in ("ttft", "itl"))
        ranks = self.mesh.world_size

        def in_a_round(count: int) -> int:
            """The mean; the same number in every round, unless requests arrive by the clock. Never rounded to none."""
            return -(-count // len(rounds))

        return ArmResult(
            name=arm,
            rounds=tuple(_times(each.result, *times) for each, *times in zip(rounds, ttft, itl, strict=True)),
            prefill_steps=in_a_round(len(prefill)),
            decode_steps=in_a_round(len(decode)),
            split_prefill_steps=in_a_round(sum(step.num_ubatches > 1 for step in prefill)),
            split_decode_steps=in_a_round(sum(step.num_ubatches > 1 for step in decode)),
            prefill_step_tokens=median(step.num_tokens_of_all / ranks for step in prefill) if prefill else 0.0,
            decode_step_tokens=median(step.num_tokens_of_all / ranks for step in decode) if decode else 0.0,
            num_tokens=in_a_round(sum(step.num_tokens_of_all for step in every_step)),
            num_rows=in_a_round(sum(step.num_rows_of_all for step in every_step)),
            new_tokens=sum(prompt.params.max_new_tokens for prompt in self.prompts),
            reasons=Counter(
                {why: in_a_round(n) for why, n in Counter(step.reason for step in every_step).most_common()}
            ),
            positions=tuple(each.position for each in rounds),
            latencies=Latencies(
                prefill_step=tuple(step.wall_ms for step in prefill),
                decode_step=tuple(step.wall_ms for step in decode),
                ttft=tuple(ms for of_round in ttft for ms in of_round),
                itl=tuple(ms for of_round in itl for ms in of_round),
            ),
            wait_share=None if None in waited else sum(waited) / sum(other["wall"] for other in everyone),
            messages=None if None in sent else sum(pair[0] for pair in sent) / len(rounds),
            sent_bytes=None if None in sent else sum(pair[1] for pair in sent) / len(rounds),
            joules=sum(joules) / len(rounds) if power_known else None,
            watts=sum(joules) / seconds if power_known else None,
            limit_watts=min(other["limit"] for other in everyone) if power_known else None,
        )

    def _trace(self, arms: Sequence[str], number: int) -> dict[str, StepTimeline]:
        """The timeline of step `number` of each arm, from one more run that is not timed. Collective."""
        self.engine.tracer = tracer = Tracer(self.mesh.device)
        timelines: dict[str, StepTimeline] = {}
        try:
            for arm in arms:
                watch = StepTracer(tracer, number)
                self.engine.run(self._requests(), arm_config(arm, self.base), watch)
                timelines[arm] = join_ranks(self._gather(f"trace/{arm}", watch.to_json()))
        finally:
            self.engine.tracer = None
        return timelines

    def _break_down(self, steps: Sequence[StepRecord]) -> tuple[tuple[StepBreakdown, ...], str]:
        """One step of each phase taken apart in one more run, or why not. Collective."""
        wanted = steps_to_measure(steps)
        why = why_too_large(self.engine, steps, list(wanted))
        found = [other["why"] for other in self._gather("breakdown/memory", {"why": why}) if other["why"]]
        if found:
            return (), str(found[0])
        meter = StepMeter(self.engine, self.base, wanted, max(5, min(self.rounds, REPEATS)), self.seed)
        self.engine.run(self._requests(), arm_config("overlap", self.base), forward=meter, early_votes=False)
        parts = [other["steps"] for other in self._gather("breakdown", {"steps": meter.found})]
        return tuple(join_breakdowns(of_step) for of_step in zip(*parts, strict=True)), ""

    def _gather(self, name: str, value: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What every rank says under `name`. Collective."""
        return gather(self.mesh, f"{self.name}/{name}", value)


def largest(differences: Iterable[float]) -> float:
    """The largest of some differences; NaN is larger than any."""
    return max(differences, key=lambda difference: float("inf") if difference != difference else difference)


def _by_round(of_ranks: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """[rank][round][request] -> [round][request of any rank]."""
    return [[ms for of_rank in parts for ms in of_rank] for parts in zip(*of_ranks, strict=True)]


def _times(run: RunResult, ttft: Sequence[float], itl: Sequence[float]) -> RoundTimes:
    decode = sum(step.wall_ms for step in run.steps if step.phase == "decode")
    return RoundTimes(
        prefill=sum(step.wall_ms for step in run.steps) - decode,
        decode=decode,
        ttft=median(ttft) if ttft else 0.0,
        itl=median(itl) if itl else 0.0,
    )
