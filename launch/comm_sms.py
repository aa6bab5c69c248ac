"""From `--comm-sms auto` to a number, the same on all ranks: measured once for a shape, a host, its GPUs and ranks.

Its own file because it joins three things that know nothing of each other: the engine that can run a step with any
number, the ranks that must agree on one, and a file that remembers it. A step is what the run will do, an overlapped
prefill of the loaded model, so whatever decides (link, shapes, turns) is in the measurement.

Invariants: a step takes as long as on its slowest rank; rank 0 alone reads and writes the file and says the number; of
numbers that are as good the smallest wins, since compute at other times gains from it.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from dbo.config import DBOConfig
from launch.config import EngineOptions
from launch.engine import Engine
from launch.files import replace_file
from launch.mesh import Mesh
from launch.prepare import share_text
from launch.sampling import SamplingParams
from launch.scheduler import Request
from launch.session import gather, together
from moe.sms import make_partition, takes_sms

CANDIDATES = (8, 16, 24, 32)
CACHE_VARIABLE = "DBO_MOE_CACHE"  # a directory; else dbo-moe in XDG_CACHE_HOME, else in ~/.cache
AS_GOOD = 1.01  # times the best
_MOST_TOKENS, _PROMPT = 8192, 2048
PARTITION = 2  # counts the changes to what shares SMs how: numbers from before one are no longer true
_WARMUP, _ROUNDS = 2, 5

Measure = Callable[[int], float]
"""A number of SMs -> ms of a step on this rank. Collective."""

OptionsT = TypeVar("OptionsT", bound=EngineOptions)


def settle_comm_sms(options: OptionsT, engine: Engine, dbo: DBOConfig) -> OptionsT:
    """The options with a number in place of `auto`, which rank 0 explains in a line of its log.

    Collective. Raises CommandError on every rank for a number that the transport cannot take.
    """
    mesh, transport = engine.mesh, engine.all2all.name
    if options.comm_sms != "auto":
        together(mesh, "comm sms", lambda: make_partition(engine.all2all, dbo.comm_sms, mesh.device))
        return options
    if not takes_sms(engine.all2all, mesh.device):
        why = f"{transport} on {mesh.device.type} takes no fixed number of SMs"
    elif dbo.overlap == "off":
        why = "overlap is off"
    else:
        sweep = Sweep(engine, dbo)
        with mesh.peers.guard():
            chosen, why = decide(mesh, sweep.key, cache_file(os.environ), sweep.measure)
        if mesh.rank == 0:
            logging.info("comm-sms auto -> %d (%s)", chosen, why)
        return replace(options, comm_sms=str(chosen))
    if mesh.rank == 0:
        logging.info("--comm-sms auto has no effect: %s", why)
    return replace(options, comm_sms=str(dbo.comm_sms))


def decide(
    mesh: Mesh, key: str, file: Path, measure: Measure, candidates: Sequence[int] = CANDIDATES
) -> tuple[int, str]:
    """The number for `key`, from `file` or else from measurement, and how it was found, in words. Collective, once a
    run."""
    known = together(mesh, "comm sms known", lambda: read_choice(file, key) if mesh.rank == 0 else None)
    found = share_text(mesh, "comm sms known", "" if known is None else str(known))
    if found:
        return int(found), f"measured before, {file}"
    everyone = gather(mesh, "comm sms times", list(_measure(measure, candidates).values()))
    times = dict(zip(candidates, map(max, zip(*everyone, strict=True)), strict=True))  # of the slowest rank
    best = min(times.values())
    chosen = min(num_sms for num_sms, ms in times.items() if ms <= AS_GOOD * best)
    said = ", ".join(f"{num_sms}: {ms:.2f} ms" for num_sms, ms in times.items())
    if mesh.rank == 0:
        said += keep_choice(file, key, chosen, times)
    return int(share_text(mesh, "comm sms chosen", str(chosen))), f"a step took {said}"


def _measure(measure: Measure, candidates: Sequence[int]) -> dict[int, float]:
    """Medians over rounds in which every candidate has its turn."""
    times: dict[int, list[float]] = {num_sms: [] for num_sms in candidates}
    for attempt in range(_WARMUP + _ROUNDS):
        for num_sms in candidates:
            ms = measure(num_sms)
            if attempt >= _WARMUP:
                times[num_sms].append(ms)
    return {num_sms: median(each) for num_sms, each in times.items()}


class Sweep:
    """Overlapped prefill steps of a loaded engine, as large as it takes them, up to 8192 tokens a rank."""

    def __init__(self, engine: Engine, dbo: DBOConfig):
        limits = engine.limits
        self._engine = engine
        self._dbo = replace(dbo, overlap="on", prefill_token_threshold=0, decode_token_threshold=0)
        self._length = max(1, min(_PROMPT, limits.max_request_tokens - 1, limits.max_num_tokens))
        blocks = -(-(self._length + 1) // limits.block_size)
        tokens = min(_MOST_TOKENS, limits.max_num_tokens)
        self._count = max(1, min(tokens // self._length, limits.max_num_seqs, limits.num_blocks // blocks))

    @property
    def key(self) -> str:
        """What the number depends on, in words: a key of the file."""
        mesh, c, dbo = self._engine.mesh, self._engine.model.config, self._dbo
        device = mesh.device.type if mesh.device.type == "cpu" else torch.cuda.get_device_name(mesh.device)
        parts = {
            "hosts": "+".join(sorted(set(mesh.peers.hosts))),
            "device": device,
            "ranks": mesh.world_size,
            "all2all": self._engine.all2all.name,
            "layer": f"{c.hidden}x{c.num_experts}x{c.num_topk}x{c.expert_width}+{c.shared_expert_width}",
            "attention": f"{c.num_heads}/{c.num_kv_heads}x{c.head_dim}",
            "dtype": str(c.dtype).removeprefix("torch."),
            "step": f"{self._count}x{self._length}",
            "ubatches": f"{dbo.num_ubatches} {dbo.driver} {dbo.cut}",
            "partition": PARTITION,
        }
        if c.batch_invariant:
            parts["products"] = "batch-invariant"
        return "; ".join(f"{name} {value}" for name, value in parts.items())

    def measure(self, num_sms: int) -> float:
        """ms of one step with `num_sms` for messages, without the wait for votes. Collective."""
        vocabulary = self._engine.model.config.vocab_size
        requests = [
            Request(
                id=f"comm-sms-{index}",
                index=index,
                prompt_ids=[(7 * at + index) % vocabulary for at in range(self._length)],
                params=SamplingParams(max_new_tokens=1, ignore_eos=True),
                eos_token_ids=frozenset(),
            )
            for index in range(self._count)
        ]
        result = self._engine.run(requests, replace(self._dbo, comm_sms=num_sms), early_votes=False)
        return sum(step.wall_ms - step.agree_ms for step in result.steps)


# ------------------------------------------------------------------------------------------------ the file


def cache_file(environment: Mapping[str, str]) -> Path:
    """Where numbers are kept."""
    if CACHE_VARIABLE in environment:
        return Path(environment[CACHE_VARIABLE]) / "comm_sms.json"
    home = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "~")).expanduser() / ".cache"
    return Path(home) / "dbo-moe" / "comm_sms.json"


def _read(file: Path) -> dict[str, Any]:
    """All entries; none where the file is missing or damaged, since it can be measured again."""
    try:
        kept = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def read_choice(file: Path, key: str) -> int | None:
    """The number kept for `key`; None if there is none."""
    entry = _read(file).get(key)
    chosen = entry.get("comm_sms") if isinstance(entry, dict) else None
    return chosen if type(chosen) is int and chosen > 0 else None


def keep_choice(file: Path, key: str, chosen: int, times: Mapping[int, float]) -> str:
    """Keep a number for `key`; returns what to say of it. A file that cannot be written is no reason to stop."""
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    entry = {"comm_sms": chosen, "ms": {str(n): round(ms, 3) for n, ms in times.items()}, "date": date}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps({**_read(file), key: entry}, indent=1))
    except OSError as error:
        return f"; not kept: {error}"
    return f"; kept in {file}"
