"""What the agreement costs a step.

    python benchmarks/agreement.py [--out FILE.json] [--rounds 400]

Three questions, each with its bound:
- outside: host time of a vote and its plan at 8 ranks, with a collective that returns at once (<= 30 us);
- collectives: how many a step makes on 2 ranks, counted where they are launched (exactly 1);
- wall: a whole agreement on 2 gloo ranks against a bare `all_reduce` of the same tensor, in turn (<= 1.15x).

Exit code 1 if a bound is missed.
"""

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dbo.agreement import WANTS, Agreement, Vote
from dbo.config import DBOConfig
from dbo.policy import make_policy

BOUNDS = {"outside_us": 30.0, "collectives_per_step": 1.0, "wall_ratio": 1.15}
CONFIG = DBOConfig(overlap="on")
VOTE_FIELDS = [*Vote.__dataclass_fields__, WANTS]


def vote(step: int) -> Vote:
    """Steps that split, with tokens that change from step to step."""
    return Vote(num_tokens=2000 + step % 7, num_tokens_padded=2048, num_rows=step % 2)


def agreement_on(rank: int, num_ranks: int, group: Any) -> Agreement:
    return Agreement(group, dp_rank=rank, dp_size=num_ranks, config=CONFIG, policy=make_policy(CONFIG))


def elapsed_us(function: Callable[..., object], *args: object) -> float:
    started = time.perf_counter_ns()
    function(*args)
    return (time.perf_counter_ns() - started) / 1000


def spread(samples: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(samples, n=100)
    return {"median": cuts[49], "p10": cuts[9], "p90": cuts[89], "p99": cuts[98], "samples": len(samples)}


class StubGroup:
    """All ranks vote what this one votes, at once."""

    def allreduce(self, tensors: list[torch.Tensor]) -> "StubGroup":
        tensors[0].copy_(tensors[0][:, :1].expand_as(tensors[0]))
        return self

    def wait(self, timeout: object) -> bool:
        return True


def measure_outside(num_ranks: int, samples: int) -> dict[str, Any]:
    group = StubGroup()
    agreement = agreement_on(0, num_ranks, group)
    tensor = torch.zeros(len(VOTE_FIELDS), num_ranks, dtype=torch.int32)
    step_us, stub_us = [], []
    for step in range(samples):
        step_us.append(elapsed_us(lambda s: agreement.agree(vote(s)), step))
        stub_us.append(elapsed_us(lambda t: group.allreduce([t]).wait(None), tensor))
    plan = agreement.agree(vote(0))
    if not plan.should_ubatch:
        raise RuntimeError(f"the measured steps must split: {plan.explain()}")
    outside = [step - stub for step, stub in zip(step_us, stub_us, strict=True)]
    return {"num_ranks": num_ranks, "outside_us": spread(outside), "stub_us": spread(stub_us)}


class CountingGroup:
    """Counts every collective that is launched in a group, of whatever kind."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.num_launched = group, 0

    def __getattr__(self, name: str) -> Any:
        self.num_launched += 1
        return getattr(self.group, name)


def measure_between_ranks(rank: int, num_ranks: int, store_file: str, rounds: int, results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(store_file, num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("no default group")
    counting = CountingGroup(group)
    counted = agreement_on(rank, num_ranks, counting)
    for step in range(100):
        counted.agree(vote(step))
    agreement = agreement_on(rank, num_ranks, group)
    tensor = torch.zeros(len(VOTE_FIELDS), num_ranks, dtype=torch.int32)
    arms: dict[str, Callable[[int], object]] = {
        "agreement": lambda step: agreement.agree(vote(step)),
        "all_reduce": lambda step: dist.all_reduce(tensor, group=group),
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    order = random.Random(0)  # the same on all ranks: they must enter the same arm
    for step in range(rounds + 50):
        for name in order.sample(list(arms), len(arms)):
            took_us = elapsed_us(arms[name], step)
            if step >= 50:
                times[name].append(took_us)
    if rank == 0:
        results.update(times, collectives=counting.num_launched / 100)
    dist.barrier()
    dist.destroy_process_group()


def measure_wall(num_ranks: int, rounds: int) -> dict[str, Any]:
    with mp.get_context("spawn").Manager() as manager, tempfile.TemporaryDirectory() as directory:
        shared = manager.dict()
        mp.spawn(measure_between_ranks, (num_ranks, f"{directory}/store", rounds, shared), nprocs=num_ranks)
        results = dict(shared)
    agreement, bare = results["agreement"], results["all_reduce"]
    return {
        "num_ranks": num_ranks,
        "collectives_per_step": results["collectives"],
        "agreement_us": spread(agreement),
        "all_reduce_us": spread(bare),
        "wall_ratio": ratio_interval(agreement, bare),
    }


def ratio_interval(ours: Sequence[float], bare: Sequence[float], resamples: int = 500) -> dict[str, float]:
    """The ratio of medians and its 95 % bootstrap interval over rounds."""
    rng = random.Random(1)
    rounds = list(zip(ours, bare, strict=True))

    def ratio(sample: Sequence[tuple[float, float]]) -> float:
        return statistics.median(a for a, _ in sample) / statistics.median(b for _, b in sample)

    ratios = sorted(ratio(rng.choices(rounds, k=len(rounds))) for _ in range(resamples))
    return {"median": ratio(rounds), "low": ratios[int(0.025 * resamples)], "high": ratios[int(0.975 * resamples)]}


def environment() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "nice": os.nice(0),
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "command": ("python benchmarks/agreement.py " + " ".join(sys.argv[1:])).strip(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "agreement.json")
    parser.add_argument("--rounds", type=int, default=4000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {**environment(), "bounds": BOUNDS, "outside": measure_outside(8, 5000)}
    result["wall"] = measure_wall(2, options.rounds)
    figures = {
        "outside_us": result["outside"]["outside_us"]["median"],
        "collectives_per_step": result["wall"]["collectives_per_step"],
        "wall_ratio": result["wall"]["wall_ratio"]["median"],
    }
    result["holds"] = {name: figures[name] <= bound for name, bound in BOUNDS.items()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    for name, bound in BOUNDS.items():
        print(f"{name:22} {figures[name]:8.2f}   bound {bound:g}   {'ok' if result['holds'][name] else 'MISSED'}")
    print(f"agreement {result['wall']['agreement_us']}\nall_reduce {result['wall']['all_reduce_us']}\n{options.out}")
    return 0 if all(result["holds"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
