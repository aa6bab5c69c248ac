"""What a turn costs, and what a step costs beyond its turns.

    python benchmarks/handover.py [--out FILE.json] [--rounds 200]

All in one process, every arm once a round in random order, each sample short enough to fit between two interruptions:
- event: one hand-over of a plain `threading.Event` ping-pong, the yardstick;
- threads, greenlet: one hand-over of a driver, `Driver.switch` as the runner uses it, the torch state of the two sides
  kept apart (bounds: 1.1x and 0.1x the yardstick);
- yield: the same through `yield_turn` in model code, with current ubatch, progress and cancellation;
- barrier: one meeting of three threads at a `threading.Barrier`, the yardstick of machines;
- step: a step of two ubatches that do nothing, less its hand-overs (bounds: 90 us and 15 us where a barrier takes 50,
  in proportion elsewhere). Threads make three: to ubatch 0, to ubatch 1, back to the caller; greenlets the same.

Ratios are medians of each round's ratio. Exit code 1 if a bound is missed.
"""

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch

from dbo.context import yield_turn
from dbo.runner import UBatchRunner

HAND_OVERS = 100  # of each side, in one sample
STEPS = 40  # in one sample, about as long as one of hand-overs
BOUNDS = {"threads_ratio": 1.1, "greenlet_ratio": 0.1, "threads_step_us": 90.0, "greenlet_step_us": 15.0}


BARRIER_US = 50.0  # of the machine that the bounds of a step are for


class Meeting:
    """Three threads, this one among them, that meet at a `threading.Barrier`."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(3)
        for _ in range(2):
            threading.Thread(target=self._meet, daemon=True).start()

    def __call__(self) -> float:
        started = time.perf_counter_ns()
        for _ in range(STEPS):
            self._barrier.wait()
        return (time.perf_counter_ns() - started) / 1e3 / STEPS

    def _meet(self) -> None:
        while True:
            self._barrier.wait()


class EventPingPong:
    """Two threads, one `threading.Event` each."""

    def __init__(self) -> None:
        self._there, self._back = threading.Event(), threading.Event()
        threading.Thread(target=self._answer, daemon=True).start()

    def __call__(self) -> float:
        there, back = self._there, self._back
        started = time.perf_counter_ns()
        for _ in range(HAND_OVERS):
            there.set()
            back.wait()
            back.clear()
        return (time.perf_counter_ns() - started) / 1e3 / (2 * HAND_OVERS)

    def _answer(self) -> None:
        while True:
            self._there.wait()
            self._there.clear()
            self._back.set()


def hand_over(runner: UBatchRunner) -> float:
    """Microseconds of one hand-over, timed inside the step by ubatch 0."""
    switch = runner._driver.switch

    def fn(ubatch: int) -> float:
        sibling = 1 - ubatch
        switch(ubatch, sibling)
        started = time.perf_counter_ns()
        for _ in range(HAND_OVERS):
            switch(ubatch, sibling)
        return (time.perf_counter_ns() - started) / 1e3 / (2 * HAND_OVERS)

    return runner.run(fn, [0, 1])[0]


def yield_point(runner: UBatchRunner) -> float:
    """Microseconds of one yield point, timed inside the step by ubatch 0."""

    def fn(ubatch: int) -> float:
        yield_turn("here")
        started = time.perf_counter_ns()
        for _ in range(HAND_OVERS):
            yield_turn("here")
        return (time.perf_counter_ns() - started) / 1e3 / (2 * HAND_OVERS)

    return runner.run(fn, [0, 1])[0]


def empty_step(runner: UBatchRunner) -> float:
    """Microseconds of one step whose model does nothing."""
    started = time.perf_counter_ns()
    for _ in range(STEPS):
        runner.run(float, (0, 1))
    return (time.perf_counter_ns() - started) / 1e3 / STEPS


def arms() -> dict[str, Callable[[], float]]:
    found: dict[str, Callable[[], float]] = {"event": EventPingPong(), "barrier": Meeting()}
    for name in ("threads", "greenlet"):
        runner = UBatchRunner(2, device=torch.device("cpu"), driver=name)  # type: ignore[arg-type]
        found[name] = partial(hand_over, runner)
        found[f"{name}_yield"] = partial(yield_point, runner)
        found[f"{name}_step"] = partial(empty_step, runner)
    return found


def spread(samples: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(samples, n=20)
    return {"median": statistics.median(samples), "p10": cuts[1], "p90": cuts[17], "samples": len(samples)}


def measure(rounds: int) -> dict[str, dict[str, float]]:
    functions, order = arms(), random.Random(0)
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 20):
        for name in order.sample(list(functions), len(functions)):
            took_us = functions[name]()
            if number >= 20:
                samples[name].append(took_us)
    result = {f"{name}_us": spread(values) for name, values in samples.items()}
    for name in ("threads", "greenlet"):
        pairs = list(zip(samples[name], samples["event"], strict=True))
        result[f"{name}_ratio"] = spread([own / event for own, event in pairs])
        yields = list(zip(samples[f"{name}_yield"], samples["event"], strict=True))
        result[f"{name}_yield_ratio"] = spread([own / event for own, event in yields])
        steps = list(zip(samples[f"{name}_step"], samples[name], strict=True))
        result[f"{name}_step_us"] = spread([step - 3 * own for step, own in steps])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    result = measure(arguments.rounds)
    slower = min(2.0, result["barrier_us"]["median"] / BARRIER_US)  # beyond that the machine is loaded, not slow
    bounds = {name: bound * (slower if name.endswith("_us") else 1.0) for name, bound in BOUNDS.items()}
    missed = [name for name, bound in bounds.items() if result[name]["median"] > bound]
    report = {
        "benchmark": "handover",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"python benchmarks/handover.py --rounds {arguments.rounds}",
        "host": {"cpu": _cpu(), "cores": os.cpu_count(), "load_before": load, "system": platform.platform()},
        "versions": {name: version(name) for name in ("torch", "greenlet")} | {"python": platform.python_version()},
        "bounds": bounds,
        "missed": missed,
        "result": result,
    }
    for name, values in result.items():
        bound = f"   bound {bounds[name]:.1f}" if name in bounds else ""
        print(f"{name:<22} {values['median']:9.3f}   p10 {values['p10']:9.3f}   p90 {values['p90']:9.3f}{bound}")
    print(f"missed: {', '.join(missed) or 'none'}")
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if missed else 0


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    sys.exit(main())
