"""`generate`: prompts in, answers out, on any number of ranks.

Its own file because it is the main job of the command line, from options to exit code, and because it owns the promise
that the output file holds every finished answer whatever happens: a full run, an interrupt, a rank that dies.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from dbo.agreement import BatchPlan
from launch.auto import check_profile_option, use_profile
from launch.cli import FAILED, INTERRUPTED
from launch.comm_sms import settle_comm_sms
from launch.config import GenerateOptions
from launch.engine import Engine, RunResult, StepRecord
from launch.log import set_up_logging
from launch.mesh import Mesh
from launch.metrics import Sink, open_sinks
from launch.output import Row, RowCollector, RowPoster, answer_row
from launch.prepare import Job, make_requests, read_job, start_output
from launch.scheduler import Request, fit_cache
from launch.session import (
    banner,
    dbo_config,
    load_engine,
    log_failure,
    read_shared,
    resolve,
    shared_options,
    start_graphs,
    together,
)
from launch.text import TextCodec
from moe.config import read_config


def run(options: GenerateOptions) -> int:
    """Run the command on this rank; returns the exit code, the same on every rank unless one of them dies."""
    with Mesh.start(device=options.device) as mesh, contextlib.ExitStack() as closing:
        set_up_logging(options.log_level, mesh.rank)
        mesh.peers.compare_options(shared_options(options))
        together(mesh, "profile option", lambda: check_profile_option(options))
        resolved = together(mesh, "config", lambda: resolve(options, read_config(options.model)))
        codec = together(mesh, "tokenizer", lambda: TextCodec.read(Path(options.model)))
        job = read_job(options, mesh)
        requests, refused = make_requests(job, options, resolved.model, resolved.limits, codec, mesh)
        fitted = replace(resolved, limits=fit_cache(resolved.limits, requests))
        sinks = together(mesh, "metrics", lambda: open_sinks(options, mesh.rank, resolved.limits.num_blocks))
        for sink in sinks:
            closing.callback(sink.close)
        engine = load_engine(options, fitted, mesh, model=Path(options.model))
        closing.callback(engine.close)
        options = use_profile(options, engine, resolved.dbo)
        options = settle_comm_sms(options, engine, resolved.dbo)
        start_graphs(options, engine)
        if mesh.rank == 0:
            for line in banner(options, resolved, engine):
                logging.info(line)
        together(mesh, "start", lambda: start_output(options) if mesh.rank == 0 else None)
        return Generation(options, job, engine, codec, sinks).run(requests, refused)


@dataclass
class Totals:
    """What rank 0 has seen of all ranks' rows in this run."""

    reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0

    def add(self, row: Row) -> None:
        """Count a row."""
        self.reasons[row["finish_reason"]] += 1
        self.prompt_tokens += row["prompt_tokens"]
        self.output_tokens += len(row["token_ids"])


class Generation:
    """One run on one rank, and what becomes of its rows. Observes the engine (`launch.engine.Observer`)."""

    def __init__(
        self, options: GenerateOptions, job: Job, engine: Engine, codec: TextCodec | None, sinks: Sequence[Sink] = ()
    ):
        self.options, self.job, self.engine, self.codec, self.sinks = options, job, engine, codec, sinks
        self.mesh, self.file = engine.mesh, Path(options.output)
        self.totals = Totals()
        self.started_s = time.perf_counter()
        self.num_tokens = 0
        self.bar = tqdm(
            total=len(job.prompts),
            unit="req",
            file=sys.stderr,
            disable=self.mesh.rank != 0,
            mininterval=0.2 if sys.stderr.isatty() else 5.0,
        )
        self.collector: RowCollector | None = None
        self.poster: RowPoster | None = None
        if self.mesh.rank == 0:
            self.collector = RowCollector(self.mesh.store, self.mesh.world_size, self.file, self._on_row)
            self.mesh.store.set("inode of the output", str(self.file.stat().st_ino))
        else:
            inode = int(read_shared(self.mesh, "inode of the output"))
            self.poster = RowPoster(self.mesh.store, self.mesh.rank, inode=inode)

    def run(self, requests: Sequence[Request], refused: Sequence[Row]) -> int:
        """Run, and bring the output to its end in every case. Returns the exit code."""
        if self.mesh.signals is not None:
            self.mesh.signals.on_exit(self.save)
        try:
            with self.mesh.peers.guard():
                for row in refused:
                    self._add(row)
                result = self.engine.run(
                    requests,
                    dbo_config(self.options),
                    self,
                    num_rows=len(refused),
                    num_logprobs=self.options.logprobs,
                )
                return self._end(result)
        except Exception as error:
            self.bar.close()
            log_failure(self.mesh, error)
            self.save()
            return FAILED

    # What the engine tells.

    def planned(self, plan: BatchPlan) -> None:
        """Take the rows that were announced; show progress."""
        if self.collector is not None:
            self.collector.announce(plan.num_rows_per_rank)
            self.num_tokens += sum(plan.num_tokens_per_rank)
            rate = self.num_tokens / (time.perf_counter() - self.started_s)
            self.bar.set_postfix_str(f"{rate:.0f} tok/s", refresh=False)

    def stepped(self, record: StepRecord, plan: BatchPlan) -> None:
        """Tell whoever takes metrics."""
        for sink in self.sinks:
            sink.step(record, plan)

    def finished(self, request: Request) -> None:
        """Post the row of a request that has ended."""
        self._add(answer_row(request, self.codec, self.mesh.rank, self.started_s))

    def interrupted(self) -> bool:
        """Whether somebody asked this rank to come to an end."""
        return self.mesh.signals is not None and self.mesh.signals.finish_requested

    # What becomes of rows.

    def save(self) -> None:
        """After a failure: bring everything that is finished, here or elsewhere, into the output file.

        In the order in which it finished: the file is not rewritten while another rank may add to it.
        """
        try:
            if self.collector is not None:
                self.collector.drain()
            elif self.poster is not None and self._nobody_collects():
                self.poster.rescue(self.file)
            for sink in self.sinks:
                sink.flush()
        except OSError as error:
            logging.error("%s", error)
        except RuntimeError:  # the store is lost: the other ranks add their rows themselves
            logging.debug("rows of other ranks could not be collected", exc_info=True)

    def _nobody_collects(self) -> bool:
        failure = self.mesh.peers.wait_failure(0)
        if failure is None or not self.mesh.peers.gone:
            return False
        try:
            self.mesh.store.check(["exit code"])
        except RuntimeError:
            return True
        return failure.rank == 0

    def _add(self, row: Row) -> None:
        end = self.collector or self.poster
        assert end is not None
        end.add(row)

    def _on_row(self, row: Row) -> None:
        self.totals.add(row)
        self.bar.update()

    def _end(self, result: RunResult) -> int:
        """All ranks left the loop together: rank 0 completes the file, and all get its exit code."""
        if self.collector is None:
            return int(read_shared(self.mesh, "exit code"))
        self.collector.wait(self.mesh.peers.check)
        self.collector.sort(self.job.order)
        self.bar.close()
        failed = self.totals.reasons["error"] or self.job.num_bad_lines
        code = INTERRUPTED if result.interrupted else FAILED if failed else 0
        self._report(result, code)
        self.mesh.store.set("exit code", str(code))
        return code

    def _report(self, result: RunResult, code: int) -> None:
        totals, seconds = self.totals, result.wall_s
        logging.info(
            "%d of %d requests (%s), %d prompt and %d new tokens in %.2f s: %.1f new tokens/s",
            totals.reasons.total(), len(self.job.prompts),
            ", ".join(f"{reason} {count}" for reason, count in sorted(totals.reasons.items())),
            totals.prompt_tokens, totals.output_tokens, seconds, totals.output_tokens / seconds,
        )  # fmt: skip
        for phase, steps in steps_by_phase(result).items():
            logging.info(
                "%s: %d steps, %d split, median %.2f ms", phase, steps["steps"], steps["split"], steps["median_ms"]
            )
        logging.info("%s; %d preemptions on rank 0", result.summary, result.num_preemptions)
        if self.options.json:
            print(json.dumps(self._summary(result, code)), flush=True)

    def _summary(self, result: RunResult, code: int) -> dict[str, Any]:
        totals, engine, options = self.totals, self.engine, self.options
        return {
            "exit_code": code,
            "interrupted": result.interrupted,
            "requests": len(self.job.prompts),
            "finish_reasons": dict(totals.reasons),
            "bad_lines": self.job.num_bad_lines,
            "prompt_tokens": totals.prompt_tokens,
            "output_tokens": totals.output_tokens,
            "wall_s": result.wall_s,
            "output_tokens_per_s": totals.output_tokens / result.wall_s,
            "ranks": self.mesh.world_size,
            "device": self.mesh.device.type,
            "dtype": str(engine.model.config.dtype).removeprefix("torch."),
            "all2all": engine.all2all.name,
            "overlap": options.overlap,
            "num_ubatches": options.num_ubatches,
            "phases": steps_by_phase(result),
            "reasons": dict(result.reasons),
            "preemptions": result.num_preemptions,
            "collectives": result.num_collectives,
        }


def steps_by_phase(result: RunResult) -> dict[str, dict[str, Any]]:
    """For each phase that occurred: number of steps, how many were split, and the median step in ms."""
    phases: dict[str, dict[str, Any]] = {}
    for phase in ("prefill", "mixed", "decode"):
        steps = [step for step in result.steps if step.phase == phase]
        if steps:
            split = sum(step.num_ubatches > 1 for step in steps)
            phases[phase] = {"steps": len(steps), "split": split, "median_ms": median(s.wall_ms for s in steps)}
    return phases
