"""From options to an engine that is ready to run, on all ranks or on none.

Its own file because every command that runs steps begins the same way, and because starting is where ranks differ: a
directory that one host lacks, memory that one rank has not got. `together` makes each such thing one message on rank 0
and the end of all ranks, instead of a rank that waits for ever.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from dbo.config import DBOConfig
from dbo.errors import ConfigError, PeerFailed
from dbo.graphs.cuda import CudaGraphs
from dbo.graphs.mode import CUDAGraphMode
from launch.cli import FAILED, USAGE, CommandError
from launch.config import EngineOptions, GenerateOptions, StudyOptions
from launch.engine import Engine, StepClock
from launch.graphs import Graphs
from launch.mesh import Mesh
from launch.scheduler import Limits
from moe.all2all.base import check_in_flight
from moe.all2all.registry import make_all2all
from moe.all2all.self_test import self_test
from moe.config import DTYPES, ModelConfig, named_shape, read_config
from moe.kv_cache import KVCache
from moe.models.loading import load_model
from moe.sms import set_whole_comm_sms
from moe.weights import WeightError

T = TypeVar("T")

_POLL_S = 0.02
_OF_THE_HOST = frozenset({"model", "prompts", "output", "device", "log_level", "json", "config"})


def together(mesh: Mesh, stage: str, action: Callable[[], T]) -> T:
    """Do `action` on this rank and wait until every rank has done it.

    Collective; `stage` is unique within a run. Raises CommandError on every rank, with the first failing rank's one
    line, if it failed on any; PeerFailed if a rank disappeared.
    """
    outcome, result = "", None
    try:
        result = action()
    except Exception as error:
        usage = isinstance(error, ConfigError | WeightError | OSError)
        if not usage and not isinstance(error, CommandError):
            logging.debug("%s failed", stage, exc_info=True)
        code = error.exit_code if isinstance(error, CommandError) else USAGE if usage else FAILED
        text = str(error) if usage or isinstance(error, CommandError) else f"{type(error).__name__}: {error}"
        outcome = f"{code} {text}"
    mesh.store.set(f"stage/{stage}/{mesh.rank}", outcome)
    failed = [(rank, text) for rank in range(mesh.world_size) if (text := _outcome(mesh, stage, rank))]
    if failed:
        rank, first = failed[0]
        exit_code, _, line = first.partition(" ")
        raise CommandError(line if len(failed) == mesh.world_size else f"rank {rank}: {line}", int(exit_code))
    return result  # type: ignore[return-value]


def _outcome(mesh: Mesh, stage: str, rank: int) -> str:
    return read_shared(mesh, f"stage/{stage}/{rank}").decode()


def gather(mesh: Mesh, key: str, value: Any) -> list[Any]:
    """What every rank says, in order of ranks: plain data, through the store. Collective; `key` is used once."""
    mesh.store.set(f"{key}/{mesh.rank}", json.dumps(value))
    return [json.loads(read_shared(mesh, f"{key}/{rank}")) for rank in range(mesh.world_size)]


def read_shared(mesh: Mesh, key: str) -> bytes:
    """A value that another rank puts into the store; waits for it, or raises PeerFailed."""
    while not mesh.store.check([key]):
        mesh.peers.check()
        time.sleep(_POLL_S)
    return bytes(mesh.store.get(key))


def model_of(options: StudyOptions) -> ModelConfig:
    """The model that the options name. Raises ConfigError if they name none, or two."""
    if (options.model is None) == (options.shape is None):
        raise ConfigError("--model", options.model, "either --model DIR or --shape NAME", "give one of the two")
    config = named_shape(options.shape) if options.shape else read_config(str(options.model))
    if options.num_layers is None:
        return config
    if options.load_format != "dummy":
        raise ConfigError("--num-layers", options.num_layers, "with --shape or --load-format dummy", "")
    return replace(config, num_layers=options.num_layers, dense_layers=frozenset())


def dbo_config(options: EngineOptions) -> DBOConfig:
    """The settings of the overlap that the options ask for."""
    return DBOConfig(
        overlap=options.overlap,
        num_ubatches=options.num_ubatches,
        decode_token_threshold=options.dbo_decode_token_threshold,
        prefill_token_threshold=options.dbo_prefill_token_threshold,
        cut=options.cut,
        cut_alignment=options.cut_alignment,
        allow_single_rank=options.allow_single_rank,
        driver=options.driver,
        step_timeout_s=options.step_timeout,
        comm_sms=int(options.comm_sms) if options.comm_sms.isdecimal() else DBOConfig.comm_sms,
    )


def shared_options(options: EngineOptions) -> dict[str, str]:
    """What every rank must have been started with alike."""
    return {f.name: str(getattr(options, f.name)) for f in fields(options) if f.name not in _OF_THE_HOST}


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The effective configuration, where options said `auto`, were bounded, or say nothing."""

    model: ModelConfig  # with the effective dtype, and as batch-invariant as asked for
    limits: Limits
    dbo: DBOConfig


def resolve(options: EngineOptions, model: ModelConfig) -> Resolved:
    """What the options come to for this model. Raises ConfigError, also for a KV cache of less than two blocks."""
    dtype = model.dtype if options.dtype == "auto" else DTYPES[options.dtype]
    model = replace(model, dtype=dtype, batch_invariant=options.batch_invariant)
    max_model_len = options.max_model_len or model.max_position
    if max_model_len > model.max_position:
        raise ConfigError("--max-model-len", max_model_len, f"up to the model's own {model.max_position}", "")
    block_bytes = KVCache.bytes_per_block(model, options.block_size, dtype)
    wanted = options.max_num_seqs * -(-max_model_len // options.block_size)
    num_blocks = min(options.kv_cache_memory // block_bytes - 1, wanted)  # the cache has one block more, for padding
    if num_blocks < 1:
        raise ConfigError(
            "--kv-cache-memory",
            options.kv_cache_memory,
            f"at least {2 * block_bytes} bytes, two blocks of this model",
            "",
        )
    limits = Limits(
        max_num_tokens=min(options.max_num_tokens, options.max_num_seqs * max_model_len),  # no step can hold more
        max_num_seqs=options.max_num_seqs,
        max_model_len=max_model_len,
        block_size=options.block_size,
        num_blocks=num_blocks,
    )
    return Resolved(model=model, limits=limits, dbo=dbo_config(options))


def load_engine(options: EngineOptions, resolved: Resolved, mesh: Mesh, *, model: Path | ModelConfig) -> Engine:
    """Load this rank's part of `model` (a directory, or a shape for random weights) and make its engine.

    Collective. Raises CommandError on every rank if it fails on any, PeerFailed if a rank disappeared.
    """

    def load() -> Engine:
        clock = StepClock(mesh.peers.check, options.step_timeout, mesh.rank, mesh.peers.late)
        multiple = resolved.dbo.part_multiple
        all2all = make_all2all(
            options.all2all,
            group=mesh.device_group,
            device=mesh.device,
            config=resolved.model,
            max_tokens_per_rank=-(-resolved.limits.max_num_tokens // multiple) * multiple,
            check=clock.check,
            batch_invariant=resolved.model.batch_invariant,
        )
        if options.whole_comm_sms is not None:
            set_whole_comm_sms(all2all, mesh.device, options.whole_comm_sms)
        check_in_flight(all2all, resolved.dbo.num_ubatches if resolved.dbo.overlap != "off" else 1)
        loaded = load_model(
            model,
            all2all=all2all,
            device=mesh.device,
            dtype=resolved.model.dtype,
            load_format=options.load_format,
            seed=options.seed,
            offload_layers=options.offload_layers,
            batch_invariant=resolved.model.batch_invariant,
        )
        limits = resolved.limits
        kv = KVCache(resolved.model, limits.num_blocks, limits.block_size, resolved.model.dtype, mesh.device)
        engine = Engine(mesh, loaded, all2all, kv, limits, clock)
        engine.offloader = loaded.offloader
        return engine

    engine = together(mesh, "load", load)
    together(mesh, "all2all", lambda: self_test(engine.all2all, resolved.model, mesh.device))
    return engine


def start_graphs(options: GenerateOptions, engine: Engine) -> None:
    """Capture the graphs that the options ask for, and have `engine` use them; rank 0 logs what they took.

    Collective; raises CommandError on every rank if it fails on any.
    """
    mode = CUDAGraphMode.parse(options.cudagraph_mode)
    if mode is CUDAGraphMode.NONE:
        return
    sizes = options.cudagraph_capture_sizes

    def make() -> Graphs:
        if engine.mesh.device.type != "cuda":
            raise ConfigError("--cudagraph-mode", options.cudagraph_mode, "a CUDA device", "leave it out on a CPU")
        return Graphs(
            engine,
            dbo_config(options),
            mode,
            CudaGraphs(engine.mesh.device, _streams(engine)),
            sizes=None if sizes is None else [int(size) for size in sizes.split(",")],
            memory_limit=options.cudagraph_memory_limit,
            offloader=engine.offloader,
        )

    graphs = together(engine.mesh, "graphs", make)
    report = together(engine.mesh, "capture", graphs.capture)
    engine.graphs = graphs
    if engine.mesh.rank == 0:
        for line in report.lines():
            logging.info("CUDA graphs, %s: %s", options.cudagraph_mode, line)
        for graph in report.captured:
            logging.debug(
                "%s graph of %s: %.1f MiB, %.2f s",
                graph.mode.name, graph.descriptor, graph.num_bytes / 2**20, graph.seconds,
            )  # fmt: skip


def _streams(engine: Engine) -> dict[str, torch.cuda.Stream]:
    """Those that take part in captures, for messages."""
    comm = getattr(getattr(engine.all2all, "comm", None), "stream", None)
    copies = None if engine.offloader is None else engine.offloader.stream
    return {name: stream for name, stream in (("comm", comm), ("copies", copies)) if stream is not None}


def banner(options: EngineOptions, resolved: Resolved, engine: Engine) -> list[str]:
    """What runs, for rank 0 to print: ranks, backends, effective against requested, whether overlap can engage."""
    mesh, limits, dtype = engine.mesh, resolved.limits, str(resolved.model.dtype).removeprefix("torch.")
    effective = {
        "device": (options.device, mesh.device.type),
        "dtype": (options.dtype, dtype),
        "all2all": (options.all2all, engine.all2all.name),
        "max-model-len": (options.max_model_len or "auto", limits.max_model_len),
    }
    changed = [f"{name} {asked} -> {got}" for name, (asked, got) in effective.items() if asked != got]
    room = limits.max_request_tokens
    return [
        f"{_ranks_line(mesh)}, {resolved.model.family} {dtype}{', batch-invariant' * resolved.model.batch_invariant}, "
        f"all2all {engine.all2all.name}, torch {torch.__version__}",
        f"KV cache of up to {limits.num_blocks} blocks of {limits.block_size} tokens, here {engine.limits.num_blocks}; "
        f"at most {limits.max_num_seqs} requests and {limits.max_num_tokens} tokens a step, {room} tokens a request",
        *([f"requested -> effective: {', '.join(changed)}"] if changed else []),
        _overlap_line(resolved.dbo, mesh.world_size, by_profile=engine.costs is not None),
    ]


def _ranks_line(mesh: Mesh) -> str:
    hosts = Counter(mesh.peers.hosts)
    ranks = f"{mesh.world_size} rank{'s'[: mesh.world_size > 1]}"
    if len(hosts) > 1:
        each = [f"{count} on {host}" for host, count in hosts.items()]
        ranks += f" on {len(hosts)} hosts ({', '.join(each[:8])}{', ...' if len(each) > 8 else ''})"
    device = mesh.device.type if mesh.device.type == "cpu" else torch.cuda.get_device_name(mesh.device)
    return f"{ranks}, {device}"


def _overlap_line(dbo: DBOConfig, world_size: int, *, by_profile: bool = False) -> str:
    if dbo.overlap == "off":
        return "overlap off: every step runs whole (--overlap on to change that)"
    if world_size == 1 and not dbo.allow_single_rank:
        why = "one rank alone has nothing to hide (--allow-single-rank for study)"
        return f"overlap {dbo.overlap}, but cannot engage: {why}"
    if dbo.overlap == "auto" and by_profile:
        return f"overlap auto: {dbo.num_ubatches} ubatches ({dbo.driver}) where the profile says that it pays"
    return (
        f"overlap {dbo.overlap}: {dbo.num_ubatches} ubatches ({dbo.driver}) where every rank has "
        f"{dbo.prefill_token_threshold} tokens of prefill or {dbo.decode_token_threshold} of decode"
    )


def log_failure(mesh: Mesh, error: Exception) -> None:
    """One line on every host for a run that failed: who failed, where, of what, with the notes that say how far it was.

    The other ranks of a host say it too at the level `debug`, with the traceback.
    """
    if isinstance(error, PeerFailed):
        failure, speaks = error, mesh.peers.speaks_of(error)
    else:
        failure, speaks = PeerFailed(mesh.rank, mesh.node, f"{type(error).__name__}: {error}"), True
    level = logging.ERROR if speaks else logging.DEBUG
    line = "; ".join([str(failure), *getattr(error, "__notes__", [])])
    logging.log(level, " ".join(line.split()), exc_info=logging.root.isEnabledFor(logging.DEBUG))
