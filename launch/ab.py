"""`ab`: does overlap pay here? The same work whole, split and overlapped, on the same loaded model.

Its own file because it is the command: from options to workloads, a loaded engine, and reports. The arms differ in
nothing but how a step is run:

    whole      one batch a step
    split      N ubatches, one after another: what smaller kernels cost
    overlap    N ubatches, interleaved: what hiding communication gains
    auto       whole or overlap, whichever the measured profile says

First the equality gate: one run of all of them with the same forced tokens, every logit compared. Then rounds, each
with every arm once, in random order (the same on all ranks), after warm-up rounds that do not count. Every answer is
exactly as long as it was asked to be, so all arms run the same steps. A workload with alternatives is a sweep: all of
this for each of them, and one report.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from dbo.errors import ConfigError
from launch.auto import use_profile
from launch.cli import FAILED, USAGE, CommandError
from launch.comm_sms import settle_comm_sms
from launch.config import ABOptions
from launch.crossover import Sweep
from launch.engine import Engine
from launch.environment import describe_environment
from launch.experiment import Experiment, arm_config, parse_arms
from launch.log import set_up_logging
from launch.mesh import Mesh
from launch.prepare import read_prompt_text, share_text, token_ids_of
from launch.report import ABReport, check_directory
from launch.sampling import SamplingParams
from launch.scheduler import Limits, Scheduler
from launch.session import (
    Resolved,
    banner,
    dbo_config,
    load_engine,
    log_failure,
    model_of,
    resolve,
    shared_options,
    together,
)
from launch.text import TextCodec
from launch.traces import read_trace, trace_format, trace_prompts
from launch.workload import BadLine, Prompt, alternatives, pace, read_prompts, synthetic_prompts
from moe.config import ModelConfig, shape_note
from moe.models.decoder import Model
from moe.router import ScriptedRouter, routing_table


def run(options: ABOptions) -> int:
    """Run the command on this rank; returns the exit code."""
    arms = parse_arms(options.arms)
    if options.profile is not None and "auto" not in arms:
        raise ConfigError("--profile", options.profile, "--arms with auto, which decides by it", "leave one out")
    if options.shape is not None:  # a shape has no weights on disk
        options = replace(options, load_format="dummy")
    with Mesh.start(device=options.device) as mesh:
        set_up_logging(options.log_level, mesh.rank)
        mesh.peers.compare_options(shared_options(options))
        model = together(mesh, "config", lambda: model_of(options))
        resolved = together(mesh, "limits", lambda: resolve(options, model))
        workloads = {name: read_workload(name, options, resolved, mesh) for name in alternatives(options.workload)}
        for prompts in workloads.values():
            check_lengths(prompts, resolved.limits)
        together(mesh, "report", lambda: check_directory(Path(options.report)) if mesh.rank == 0 else None)
        source = resolved.model if options.load_format == "dummy" else Path(str(options.model))
        engine = load_engine(options, resolved, mesh, model=source)
        script_routing(engine.model, options.routing, options.seed)
        if "auto" in arms:
            use_profile(options, engine, arm_config("auto", dbo_config(options)))
        options = settle_comm_sms(options, engine, dbo_config(options))
        if mesh.rank == 0:
            for line in [*banner(options, resolved, engine), *notes(options)]:
                logging.info(line)
        try:
            with mesh.peers.guard():
                reports = [
                    compare(engine, name, prompts, arms, options, number)
                    for number, (name, prompts) in enumerate(workloads.items(), start=1)
                ]
        except Exception as error:
            log_failure(mesh, error)
            return FAILED
        finally:
            engine.close()
        result = reports[0] if len(reports) == 1 else Sweep(reports=tuple(reports))
        if mesh.rank == 0:
            directory = result.write(Path(options.report))
            print(json.dumps(result.to_json(), allow_nan=False) if options.json else result.text(), flush=True)
            logging.info("report: %s", directory)
        return 0 if all(report.gate.passed for report in reports) else FAILED


def compare(
    engine: Engine, name: str, prompts: Sequence[Prompt], arms: Sequence[str], options: ABOptions, number: int
) -> ABReport:
    """The arms on workload `name`, the `number`-th of this run. Collective; the report is complete on every rank."""
    mesh = engine.mesh
    if mesh.rank == 0 and name != options.workload:
        logging.info("%d: %s", number, name)
    experiment = Experiment(
        engine,
        prompts,
        dbo_config(options),
        rounds=options.rounds,
        warmup=options.warmup,
        seed=options.seed,
        take_apart=not options.skip_breakdown,
        name=f"ab/{number}",
    )
    found = experiment.run(arms)
    return ABReport(
        command=" ".join(["python -m launch", *sys.argv[1:]]),
        workload=name,
        environment={**describe_environment(mesh.device), "ranks": str(mesh.world_size)},
        options=shared_options(options),
        notes=tuple(notes(options)),
        paced=experiment.paced,
        arms=found.arms,
        gate=found.gate,
        timelines=found.timelines,
        breakdowns=found.breakdowns,
        breakdown_note=found.breakdown_note,
    )


def notes(options: ABOptions) -> list[str]:
    """What a reader of the figures must know of this run."""
    said = []
    if options.shape and (note := shape_note(options.shape)):
        said.append(f"shape {options.shape}, not the model itself: {note}")
    if options.routing != "model":
        said.append(f"experts are chosen by --routing {options.routing}, not by the model")
    if options.rate:
        said.append(
            f"requests arrive by the clock (--rate {options.rate}), so steps differ between arms and rounds: compare "
            "TTFT and ITL. The gate and the steps that are traced or taken apart run without the clock"
        )
    return said


def script_routing(model: Model, rule: str, seed: int) -> None:
    """Put a scripted choice of experts into every layer, another one in each; `model` leaves the routers alone."""
    if rule == "model":
        return
    config = model.config
    for index, layer in enumerate(model.moe_layers):
        table = routing_table(
            rule, num_experts=config.num_experts, num_topk=config.num_topk, seed=seed * 1_000_003 + index
        )
        layer.router = ScriptedRouter(gate=layer.router, table=table.to(model.device))


def read_workload(name: str, options: ABOptions, resolved: Resolved, mesh: Mesh) -> list[Prompt]:
    """All prompts of a workload, with token ids and times of arrival, the same on every rank.

    Collective; raises CommandError on every rank.
    """
    prompts = _read_prompts(name, options, resolved, mesh)
    if options.rate is None:
        return [replace(prompt, arrival_s=0.0) for prompt in prompts]
    return pace(prompts, options.rate, options.seed)


def _read_prompts(name: str, options: ABOptions, resolved: Resolved, mesh: Mesh) -> list[Prompt]:
    vocab_size, longest = resolved.model.vocab_size, resolved.limits.max_request_tokens
    if name.startswith("synthetic:"):
        make = partial(synthetic_prompts, name, vocab_size, options.seed, longest)
        return together(mesh, f"workload/{name}", lambda: make()[: options.max_requests])
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
