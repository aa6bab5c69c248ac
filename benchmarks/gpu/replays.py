"""Replays in random order, each against the eager run of the same parts, bit for bit; a program for torchrun.

    torchrun --nproc-per-node 2 -m benchmarks.gpu.replays --replays 500 --out FILE

Qwen3-30B-A3B shapes with 2 layers, random weights. For each transport and driver all graphs are captured once, into one
pool, from batches that are nothing but padding: FULL and PIECEWISE, a few sizes, and three arms: the whole batch, two
ubatches one after another (split), two that take turns (overlap).

Then every turn draws one of these graphs, alike on all ranks, and for each rank a batch of its own: one that fills the
size, one of any length, a few tokens; now and then a rank has none. The graph is replayed before the same parts run
without it, so that it finds no result, and no key in the cache, that the eager run left there. Real rows are compared.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from benchmarks.gpu.graphs import Steps, modes, schedule_of, watching
from benchmarks.gpu.setup import LONGEST, SHORTEST, Bench, make_parser, random_model
from dbo.graphs.descriptor import step_context
from dbo.graphs.mode import CUDAGraphMode
from dbo.graphs.ubatches import UBatchStep
from dbo.graphs.wrapper import CUDAGraphWrapper, set_cudagraph_capturing_enabled
from dbo.workspace import Workspace
from launch.scheduler import Schedule
from moe.config import ModelConfig
from moe.graphs import make_capturable

ARMS = {"whole": 1, "split": 2, "overlap": 2}  # ubatches
COMM_SMS = 8
FEW = 4  # tokens
MOST_PROMPTS = 8  # in one step
TURNS_A_LINE = 100
REHEARSED = 20  # turns

Key = tuple[CUDAGraphMode, str, int]
"""A graph: its mode, its arm, and its tokens (of a decode: requests) before they are rounded up to whole ubatches."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A transport, and the steps that it is for."""

    make: Callable[[Bench, ModelConfig, int], Any]
    sizes: Sequence[int]
    decode: bool = False


KINDS = {
    "deepep_ht": Kind(make=Bench.high_throughput, sizes=(2048, 1024, 512, 256)),
    "deepep_ll": Kind(make=Bench.low_latency, sizes=(64, 32, 8, 1), decode=True),
    "torch": Kind(make=Bench.over_torch, sizes=(1024, 512, 256)),
}


def names(text: str) -> list[str]:
    """`threads,greenlet` -> two names, for argparse."""
    return text.split(",")


def prompts(num_tokens: int, size: int, rng: random.Random) -> list[tuple[int, int]]:
    """(Tokens in its cache, new tokens) of each of a few prompts, some begun in earlier steps: of all together there
    are `num_tokens` new ones, and at most `size` keys, for which a FULL graph has room."""
    if not num_tokens:
        return []
    cuts = sorted(rng.sample(range(1, num_tokens), rng.randrange(min(MOST_PROMPTS, num_tokens))))
    found, room = [], size - num_tokens
    for start, end in pairwise([0, *cuts, num_tokens]):
        computed = rng.choice((0, rng.randint(0, room)))
        room -= computed
        found.append((computed, end - start))
    return found


def draw(keys: Sequence[Key], num_ranks: int, rng: random.Random) -> tuple[Key, list[int]]:
    """One turn: the graph, and how many tokens each rank has."""
    key = rng.choice(keys)
    size = key[2]
    tokens = [rng.choice((size, rng.randint(1, size), rng.randint(1, min(FEW, size)))) for _ in range(num_ranks)]
    if rng.random() < 0.25:
        tokens[rng.randrange(num_ranks)] = 0
    return key, tokens


class AllGraphs:
    """Those of one transport and driver, in one pool."""

    def __init__(self, bench: Bench, model: Any, all2all: Any, kind: Kind, sizes: Sequence[int], driver: str) -> None:
        self.bench, self.all2all, self.kind = bench, all2all, kind
        most = max(sizes)  # and below, for so many tokens, the most blocks that they can take
        prefill = [(0, most - MOST_PROMPTS + 1), *[(0, 1)] * (MOST_PROMPTS - 1)]
        self.steps = Steps(bench, model, [(LONGEST - 1, 1)] * most if kind.decode else prefill, driver=driver)
        for layer in range(model.config.num_layers):
            for cache in self.steps.kv.layer(layer):
                cache.normal_()
        self.wrapped = {
            arm: CUDAGraphWrapper(
                UBatchStep(self.steps._model, self.steps.runner, interleave=arm != "split"), self.steps.pool
            )
            for arm in ARMS
        }
        every = modes(bench) if all2all.capabilities.capturable else [CUDAGraphMode.PIECEWISE]
        self.keys = [(mode, arm, size) for size in sorted(sizes, reverse=True) for arm in ARMS for mode in every]

    def capture(self) -> None:
        """Largest first, from batches without a request, as the engine does it."""
        with self.steps.pool.stream():
            for mode, arm, size in self.keys:
                shape = self.steps.descriptor(mode, ARMS[arm], size)
                parts = self.steps.inputs[ARMS[arm]].empty(shape)
                with self.hold(arm):
                    self.wrapped[arm].unwrap()(parts)
                    with set_cudagraph_capturing_enabled(), step_context(mode, shape):
                        self.wrapped[arm](parts)

    def difference(self, key: Key, schedule: Schedule) -> float | None:
        """The largest one between the replay and the eager run of a batch; None if they are equal."""
        (mode, arm, size), steps, n = key, self.steps, schedule.num_tokens
        parts = steps.parts(mode, ARMS[arm], schedule, size)
        with steps.pool.stream():
            held = self.hold(arm) if mode is CUDAGraphMode.PIECEWISE else nullcontext()  # a FULL graph holds its own
            with held, step_context(mode, steps.descriptor(mode, ARMS[arm], size)):
                replayed = self.wrapped[arm](parts)[:n].clone()
            with self.hold(arm):
                eager = self.wrapped[arm].unwrap()(parts)[:n]
            return None if torch.equal(replayed, eager) else float((replayed.float() - eager.float()).abs().max())

    def schedule(self, num_tokens: int, size: int, rng: random.Random) -> Schedule:
        """A batch of so many tokens for a graph of `size`."""
        if self.kind.decode:
            lengths = [(rng.randint(SHORTEST, LONGEST) - 1, 1) for _ in range(num_tokens)]
        else:
            lengths = prompts(num_tokens, size, rng)
        return schedule_of(lengths, rng.getrandbits(32))

    def hold(self, arm: str) -> AbstractContextManager[object]:
        """The SMs of an arm, where the transport has a number of them."""
        if not hasattr(self.all2all, "set_num_sms"):
            return nullcontext()
        return self.bench.partition(self.all2all, COMM_SMS, "shared" if ARMS[arm] > 1 else None)


def replay(bench: Bench, graphs: AllGraphs, name: str, turns: int) -> list[dict[str, Any]]:
    """What came of so many turns, by mode and arm."""
    rank, ranks = bench.mesh.rank, bench.mesh.world_size
    alike, own = random.Random(name), random.Random(f"{name} {rank}")
    replays, idle, unequal = (Counter[tuple[CUDAGraphMode, str]]() for _ in range(3))
    for turn in range(1, turns + 1):
        (mode, arm, size), num_tokens = draw(graphs.keys, ranks, alike)
        schedule = graphs.schedule(num_tokens[rank], size, own)
        off = graphs.difference((mode, arm, size), schedule)
        if off is not None and not unequal[mode, arm]:
            lengths = list(zip(schedule.seq_lens.tolist(), schedule.query_lens.tolist(), strict=True))
            where = f"{name} {mode.name} {arm}, {size} tokens, turn {turn}, rank {rank} of {num_tokens}"
            print(f"NOT EQUAL: {where}, (keys, queries) {lengths}: off by {off:.3g}", flush=True)
        replays[mode, arm] += 1
        idle[mode, arm] += 0 in num_tokens
        unequal[mode, arm] += not bench.all_agree(off is None)
        if turn % TURNS_A_LINE == 0 or turn == turns:
            bench.say(f"{name}: {turn} replays, {unequal.total()} not equal")
    return [
        {
            "mode": mode.name,
            "arm": arm,
            "replays": replays[mode, arm],
            "with_an_idle_rank": idle[mode, arm],
            "unequal": unequal[mode, arm],
            "passed": unequal[mode, arm] == 0 < replays[mode, arm],
        }
        for mode, arm in dict.fromkeys(key[:2] for key in graphs.keys)
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--replays", type=int, default=500, help="for each transport and driver")
    parser.add_argument("--drivers", type=names, default=["greenlet", "threads"])
    parser.add_argument("--transports", type=names, default=list(KINDS))
    args = parser.parse_args()
    turns, found, start = min(args.replays, REHEARSED) if args.rehearse else args.replays, [], time.monotonic()
    with Bench.start(args) as bench:
        config = bench.shape("qwen3-30b-a3b", 2)
        for transport in args.transports:
            kind = KINDS[transport]
            sizes = [size // 64 if args.rehearse and not kind.decode else size for size in kind.sizes]
            all2all = kind.make(bench, config, max(sizes))
            model = random_model(config, all2all, bench.mesh.device)
            make_capturable(model, workspace := Workspace(bench.mesh.device, 2))
            for driver in args.drivers:
                graphs = AllGraphs(bench, model, all2all, kind, sizes, driver)
                with watching(graphs.steps):
                    graphs.capture()
                    workspace.lock()
                    bench.say(f"{transport} {driver}: {len(graphs.keys)} graphs at {time.monotonic() - start:.0f} s")
                    runs = replay(bench, graphs, f"{transport} {driver}", turns)
                graphs.steps.close()
                found += [{"transport": transport, "driver": driver, **run} for run in runs]
                bench.write({"runs": found, "passed": all(run["passed"] for run in found)})
            all2all.close()
        bench.say(f"done at {time.monotonic() - start:.0f} s: {sum(run['unequal'] for run in found)} not equal")


if __name__ == "__main__":
    main()
