"""`ab`: does overlap pay here? The same work whole, split and overlapped, on the same loaded model.

Its own file because it is an experiment around the engine, not a part of it. Three arms differ in nothing but how a
step is run:

    whole      one batch a step
    split      N ubatches, one after another: what smaller kernels cost
    overlap    N ubatches, interleaved: what hiding communication gains

First the equality gate: one run of all three with the same forced tokens, every logit compared. Then rounds, each with
every arm once, in random order (the same on all ranks), after warm-up rounds that do not count. Every answer is
exactly as long as it was asked to be, so all arms run the same steps.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from dbo.config import DBOConfig
from dbo.errors import ConfigError
from dbo.trace import Tracer
from launch.cli import FAILED, USAGE, CommandError
from launch.config import ABOptions
from launch.engine import Engine, RunResult, sample_chunks
from launch.environment import describe_environment
from launch.log import set_up_logging
from launch.mesh import Mesh
from launch.prepare import read_prompt_text, share_text, token_ids_of
from launch.report import ABReport, ArmResult, Gate, Latencies, RoundTimes, check_directory
from launch.sampling import SamplingParams
from launch.scheduler import Chunk, Limits, Request, Scheduler
from launch.session import (
    Resolved,
    banner,
    dbo_config,
    load_engine,
    log_failure,
    read_shared,
    resolve,
    shared_options,
    together,
)
from launch.text import TextCodec
from launch.timeline import StepTimeline, StepTracer, join_ranks, step_to_trace
from launch.traces import read_trace, trace_format, trace_prompts
from launch.workload import BadLine, Prompt, read_prompts, synthetic_prompts
from moe.config import ModelConfig, named_shape, read_config

Arm = Literal["whole", "split", "overlap"]

NEAR_TIE = 1e-3
"""Two logits closer than this (times the tolerance's scale in lower precision) may swap places between arms."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Largest difference between whole and overlap, over the largest logit, by the type of weights and activations."""
GATE_TOKENS = 8
"""Tokens of each answer that the gate compares; later ones add time, not coverage."""


def run(options: ABOptions) -> int:
    """Run the command on this rank; returns the exit code."""
    arms = parse_arms(options.arms)
    if options.shape is not None:  # a shape has no weights on disk
        options = replace(options, load_format="dummy")
    with Mesh.start(device=options.device) as mesh:
        set_up_logging(options.log_level, mesh.rank)
        mesh.peers.compare_options(shared_options(options))
        model = together(mesh, "config", lambda: model_of(options))
        resolved = together(mesh, "limits", lambda: resolve(options, model))
        prompts = read_workload(options, resolved, mesh)
        check_lengths(prompts, resolved.limits)
        together(mesh, "report", lambda: check_directory(Path(options.report)) if mesh.rank == 0 else None)
        source = resolved.model if options.load_format == "dummy" else Path(str(options.model))
        engine = load_engine(options, resolved, mesh, model=source)
        if mesh.rank == 0:
            for line in banner(options, resolved, engine):
                logging.info(line)
        try:
            with mesh.peers.guard():
                experiment = Experiment(
                    engine, prompts, dbo_config(options), options.rounds, options.warmup, options.seed
                )
                report = experiment.run(arms, options)
        except Exception as error:
            log_failure(mesh, error)
            return FAILED
        finally:
            engine.close()
        if mesh.rank == 0:
            directory = report.write(Path(options.report))
            print(json.dumps(report.to_json()) if options.json else report.text(), flush=True)
            logging.info("report: %s", directory)
        return 0 if report.gate.passed else FAILED


def parse_arms(text: str) -> tuple[Arm, ...]:
    """`whole,overlap` -> names of arms. Raises ConfigError; `whole` and `overlap` are needed for the gate."""
    known: tuple[Arm, ...] = ("whole", "split", "overlap")
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [name for name in names if name not in known]:
        raise ConfigError("--arms", unknown[0], ", ".join(known), "")
    if not {"whole", "overlap"} <= set(names):
        raise ConfigError(
            "--arms", text, "at least whole and overlap", "add the missing one: a single arm compares nothing"
        )
    return tuple(arm for arm in known if arm in names)


def arm_config(arm: Arm, base: DBOConfig) -> DBOConfig:
    """The settings of one arm."""
    if arm == "whole":
        return replace(base, overlap="off")
    return replace(base, overlap="on", interleave=arm == "overlap")


def model_of(options: ABOptions) -> ModelConfig:
    """The model that the options name. Raises ConfigError if they name none, or two."""
    if (options.model is None) == (options.shape is None):
        raise ConfigError("--model", options.model, "either --model DIR or --shape NAME", "give one of the two")
    config = named_shape(options.shape) if options.shape else read_config(str(options.model))
    if options.num_layers is None:
        return config
    if options.load_format != "dummy":
        raise ConfigError("--num-layers", options.num_layers, "with --shape or --load-format dummy", "")
    return replace(config, num_layers=options.num_layers)


def read_workload(options: ABOptions, resolved: Resolved, mesh: Mesh) -> list[Prompt]:
    """All prompts, with token ids, the same on every rank. Collective; raises CommandError on every rank."""
    name, vocab_size = options.workload, resolved.model.vocab_size
    longest = resolved.limits.max_request_tokens
    if name.startswith("synthetic:"):
        make = partial(synthetic_prompts, name, vocab_size, options.seed, longest)
        return together(mesh, "workload", lambda: make()[: options.max_requests])
    text = together(mesh, "workload", lambda: read_prompt_text("--workload", name) if mesh.rank == 0 else "")
    text = share_text(mesh, "workload", text)
    if kind := trace_format(text):
        rows, bad = read_trace(text, name, kind, max_requests=options.max_requests)
        refuse_bad_lines(bad)
        prompts, shortened = trace_prompts(rows, vocab_size=vocab_size, longest=longest, seed=options.seed)
        if shortened and mesh.rank == 0:
            logging.info("%d of %d requests shortened to %d tokens (--max-model-len)", shortened, len(rows), longest)
    else:
        prompts, bad = read_prompts(text, name, SamplingParams(max_new_tokens=options.max_new_tokens))
        refuse_bad_lines(bad)
        prompts = prompts[: options.max_requests]
    if not prompts:
        raise ConfigError("--workload", name, "a file with at least one prompt")
    codec = together(mesh, "tokenizer", lambda: TextCodec.read(Path(options.model)) if options.model else None)
    return together(mesh, "encode", lambda: [_encoded(prompt, codec, resolved.model) for prompt in prompts])


def refuse_bad_lines(bad: Sequence[BadLine]) -> None:
    """Raises CommandError, which names the first one and counts the others."""
    if bad:
        others = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise CommandError(f"{bad[0]}{others}", USAGE)


def check_lengths(prompts: Sequence[Prompt], limits: Limits) -> None:
    """Raises CommandError for a prompt that the engine could not run, or whose answer would be cut short."""
    check = Scheduler(limits).check
    for prompt in prompts:
        length, new = len(prompt.content), prompt.params.max_new_tokens
        why = check(length)
        if why is None and length + new > limits.max_request_tokens:
            why = f"{length} + {new} new tokens are more than the {limits.max_request_tokens} that fit"
        if why:
            raise CommandError(f"prompt {prompt.id!r}: {why}", USAGE)


def _encoded(prompt: Prompt, codec: TextCodec | None, model: ModelConfig) -> Prompt:
    try:
        return replace(prompt, kind="token_ids", content=token_ids_of(prompt, codec, model.vocab_size))
    except ValueError as error:
        raise CommandError(f"prompt {prompt.id!r}: {error}", USAGE) from None


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
    ttft_ms: list[float]  # of each request, from the start of the run to its first token
    itl_ms: list[float]  # of each request with two tokens or more: the mean time between them

    @classmethod
    def of(cls, position: int, result: RunResult, requests: Sequence[Request], started_s: float) -> Round:
        """What a run says that started at `started_s`, of `requests` that have ended."""
        return cls(
            position=position,
            result=result,
            ttft_ms=[round((each.first_token_s - started_s) * 1e3, 3) for each in requests],
            itl_ms=[
                round((each.last_token_s - each.first_token_s) / (len(each.output_ids) - 1) * 1e3, 3)
                for each in requests
                if len(each.output_ids) > 1
            ],
        )


class Experiment:
    """The runs of one A/B on one rank."""

    def __init__(
        self, engine: Engine, prompts: Sequence[Prompt], base: DBOConfig, rounds: int, warmup: int, seed: int
    ) -> None:
        self.engine, self.mesh, self.base = engine, engine.mesh, base
        self.rounds, self.warmup, self.seed = rounds, warmup, seed
        self.prompts = prompts

    def run(self, arms: Sequence[Arm], options: ABOptions) -> ABReport:
        """The gate, then all rounds. Collective; the report is complete on every rank."""
        gate = self._gate()
        results = self._measure(arms)
        return ABReport(
            command=" ".join(["python -m launch", *sys.argv[1:]]),
            workload=options.workload,
            environment={**describe_environment(self.mesh.device), "ranks": str(self.mesh.world_size)},
            options=shared_options(options),
            arms={arm: self._summarise(arm, results[arm]) for arm in arms},
            gate=gate,
            timelines=self._trace(arms, step_to_trace(results["overlap"][0].result.steps)),
        )

    def _requests(self, max_new_tokens: int | None = None) -> list[Request]:
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
            )
            for prompt in mine
        ]

    def _gate(self) -> Gate:
        """One run of each of the three arms, compared row by row on every rank."""
        dtype = self.engine.model.config.dtype
        tolerance = TOLERANCE[dtype]
        whole, requests = Watch(), self._requests(GATE_TOKENS)
        self.engine.run(requests, arm_config("whole", self.base), sampler=whole)
        tokens = {request.id: list(request.output_ids) for request in requests}
        seen: dict[Arm, Comparison] = {}
        arms: tuple[Arm, ...] = ("split", "overlap")  # also when only one of them is measured
        for arm in arms:
            seen[arm] = Comparison(whole, tokens, NEAR_TIE * tolerance / TOLERANCE[torch.float32])
            self.engine.run(self._requests(GATE_TOKENS), arm_config(arm, self.base), sampler=seen[arm])
        overlap = seen["overlap"]
        mine = {
            "bitwise": seen["split"].digests == overlap.digests,
            "difference": overlap.difference,
            "tokens": overlap.tokens_equal,
        }
        everyone = self._gather("gate", mine)
        differences = [float(other["difference"]) for other in everyone]
        return Gate(
            split_equals_overlap=all(other["bitwise"] for other in everyone),
            max_relative_difference=max(differences, key=lambda d: float("inf") if d != d else d),
            tolerance=tolerance,
            tokens_equal=all(other["tokens"] for other in everyone),
        )

    def _measure(self, arms: Sequence[Arm]) -> dict[Arm, list[Round]]:
        results: dict[Arm, list[Round]] = {arm: [] for arm in arms}
        with tqdm(
            total=(self.warmup + self.rounds) * len(arms), unit="run", disable=self.mesh.rank != 0, file=sys.stderr
        ) as bar:
            for number in range(self.warmup + self.rounds):
                order = list(arms)
                random.Random(self.seed * 1_000_003 + number).shuffle(order)
                for position, arm in enumerate(order):
                    bar.set_postfix_str(arm, refresh=False)
                    requests, started_s = self._requests(), time.perf_counter()
                    result = self.engine.run(requests, arm_config(arm, self.base))
                    if number >= self.warmup:
                        results[arm].append(Round.of(position, result, requests, started_s))
                    bar.update()
        return results

    def _summarise(self, arm: Arm, rounds: Sequence[Round]) -> ArmResult:
        steps = rounds[0].result.steps  # the same steps in every round
        decode = [step for step in steps if step.phase == "decode"]
        prefill = [step for step in steps if step.phase != "decode"]
        every_step = [step for each in rounds for step in each.result.steps]
        waits = [step.wait_ms for step in every_step]
        mine = {
            "ttft": [ms for each in rounds for ms in each.ttft_ms],
            "itl": [ms for each in rounds for ms in each.itl_ms],
            "wait": None if None in waits else sum(ms or 0.0 for ms in waits),
            "wall": sum(step.wall_ms for step in every_step),
        }
        everyone = self._gather(f"rounds/{arm}", mine)
        waited = [other["wait"] for other in everyone]
        return ArmResult(
            name=arm,
            rounds=tuple(_times(each.result) for each in rounds),
            prefill_steps=len(prefill),
            decode_steps=len(decode),
            split_prefill_steps=sum(step.num_ubatches > 1 for step in prefill),
            split_decode_steps=sum(step.num_ubatches > 1 for step in decode),
            num_tokens=sum(step.num_tokens_of_all for step in steps),
            num_rows=sum(step.num_rows_of_all for step in steps),
            new_tokens=sum(prompt.params.max_new_tokens for prompt in self.prompts),
            reasons=Counter(step.reason for step in steps),
            positions=tuple(each.position for each in rounds),
            latencies=Latencies(
                prefill_step=tuple(step.wall_ms for step in every_step if step.phase != "decode"),
                decode_step=tuple(step.wall_ms for step in every_step if step.phase == "decode"),
                ttft=tuple(ms for other in everyone for ms in other["ttft"]),
                itl=tuple(ms for other in everyone for ms in other["itl"]),
            ),
            wait_share=None if None in waited else sum(waited) / sum(other["wall"] for other in everyone),
        )

    def _trace(self, arms: Sequence[Arm], number: int) -> dict[str, StepTimeline]:
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

    def _gather(self, name: str, value: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What every rank says under `name`. Collective."""
        self.mesh.store.set(f"ab/{name}/{self.mesh.rank}", json.dumps(value))
        return [json.loads(read_shared(self.mesh, f"ab/{name}/{rank}")) for rank in range(self.mesh.world_size)]


def _times(run: RunResult) -> RoundTimes:
    decode = sum(step.wall_ms for step in run.steps if step.phase == "decode")
    return RoundTimes(prefill=sum(step.wall_ms for step in run.steps) - decode, decode=decode)
