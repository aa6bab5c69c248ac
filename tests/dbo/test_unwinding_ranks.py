"""An exception anywhere in one ubatch of one rank ends the step on every rank, and the next step is right.

A four-layer model with two all-to-alls a layer, on gloo. Each case fails at one place; the failing rank must raise that
very error with a note of where it was, the others `PeerFailed` with its text; then the groups are renewed and a step
must give the right numbers. All cases of a number of ranks run one after another in one mesh and one runner each.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import resource
import threading
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from dbo import groups
from dbo.context import note_layer
from dbo.errors import PeerFailed
from dbo.runner import UBatchRunner
from dbo.work import Comm
from tests.ranks import RankPool

NUM_LAYERS, HIDDEN, ROWS_PER_RANK = 4, 8, 3
LABELS = ("dispatch", "combine")
PLACES = ("model", "launch", "finish")
LIMIT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Case:
    num_ubatches: int
    driver: str
    rank: int
    ubatch: int
    layer: int
    label: str
    place: str
    error: type[BaseException] = ValueError


def all_cases(num_ranks: int) -> list[Case]:
    """Every (ubatch, yield point, place); ranks and kinds of errors take turns."""
    errors = (ValueError, RuntimeError, KeyboardInterrupt, SystemExit)
    cases = []
    for num_ubatches, driver in itertools.product((2, 3, 4), ("threads", "greenlet")):
        points = itertools.product(range(num_ubatches), range(NUM_LAYERS), LABELS, PLACES)
        for ubatch, layer, label, place in points:
            number = len(cases)
            cases.append(
                Case(
                    num_ubatches=num_ubatches, driver=driver, rank=number % num_ranks, ubatch=ubatch, layer=layer,
                    label=label, place=place, error=errors[number // 5 % 4],
                )
            )  # fmt: skip
    return cases


def sample(num_ranks: int, size: int, seed: int = 0) -> list[Case]:
    return random.Random(seed).sample(all_cases(num_ranks), size)


class Toy:
    """x = h + scale * h for every layer, with h = tanh(x W); the scaling is done by the rank that a row is sent to."""

    def __init__(self, mesh):
        self.mesh = mesh
        self.comm = Comm(torch.device("cpu"), check=mesh.peers.check)
        self.weights = torch.randn(NUM_LAYERS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(1))
        self.case: Case | None = None

    def __call__(self, item):
        ubatch, x = item
        for layer in range(NUM_LAYERS):
            note_layer(layer)
            h = torch.tanh(x @ self.weights[layer])
            there = self.exchange(h, ubatch, layer, "dispatch")
            back = self.exchange(there * (self.mesh.rank + 1), ubatch, layer, "combine")
            x = h + back
        return x

    def exchange(self, x, ubatch, layer, label):
        self.maybe_fail(ubatch, layer, label, "model")

        def launch(ready):
            self.maybe_fail(ubatch, layer, label, "launch")
            received = torch.empty_like(x)
            work = dist.all_to_all_single(received, x, group=self.mesh.device_group, async_op=True)

            def finish():
                self.comm.wait_host(work)
                self.maybe_fail(ubatch, layer, label, "finish")
                return received

            return finish

        return self.comm.start(launch, label=label).result()

    def maybe_fail(self, ubatch, layer, label, place):
        case = self.case
        here = (self.mesh.rank, ubatch, layer, label, place)
        if case is not None and here == (case.rank, case.ubatch, case.layer, case.label, case.place):
            raise case.error(f"injected at {case}")

    def inputs(self, num_ubatches, seed):
        generator = torch.Generator().manual_seed(100 * seed + self.mesh.rank)
        rows = ROWS_PER_RANK * self.mesh.world_size
        return list(enumerate(torch.randn(num_ubatches, rows, HIDDEN, generator=generator)))

    def reference(self, x):
        scale = torch.arange(1.0, self.mesh.world_size + 1).repeat_interleave(ROWS_PER_RANK)[:, None]
        for weight in self.weights:
            h = torch.tanh(x @ weight)
            x = h + scale * h
        return x


def run_cases(ctx, cases: list[Case]):
    """The longest time that a failed step took; threads, descriptors and memory half way and at the end."""
    longest_s, left = 0.0, []
    groups.COLLECTIVE_LIMIT_S = LIMIT_S  # what gloo misses of an abandoned group ends within this limit
    with ctx.mesh() as mesh, contextlib.ExitStack() as stack:
        toy = Toy(mesh)
        runners = {
            (num_ubatches, driver): stack.enter_context(
                UBatchRunner(num_ubatches, device=mesh.device, driver=driver, rank=mesh.rank, step_timeout_s=LIMIT_S)
            )
            for num_ubatches, driver in itertools.product((2, 3, 4), ("threads", "greenlet"))
        }
        for number, case in enumerate(cases):
            key = case.num_ubatches, case.driver
            longest_s = max(longest_s, fail_once(toy, runners[key], case))
            mesh.renew()
            inputs = toy.inputs(case.num_ubatches, seed=number)
            outputs = runners[key].run(toy, inputs)
            for (_, x), y in zip(inputs, outputs, strict=True):
                torch.testing.assert_close(y, toy.reference(x))
            if number in (len(cases) // 2, len(cases) - 1):
                gc.collect()  # a traceback holds its step's tensors and group in a cycle
                for thread in threading.enumerate():
                    if thread.name == groups.DROPPING:
                        thread.join(2 * LIMIT_S)
                memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                left.append((*threads_and_descriptors(left[0][:2] if left else None), memory))
    return longest_s, left


def threads_and_descriptors(before: tuple[int, int] | None) -> tuple[int, int]:
    """Now; if there are more than `before`, after a moment: peers close their ends of a group when they come to it."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        now = threading.active_count(), len(os.listdir("/dev/fd"))
        if before is None or (now[0] <= before[0] and now[1] <= before[1]) or time.monotonic() > deadline:
            return now
        time.sleep(0.05)


def fail_once(toy: Toy, runner: UBatchRunner, case: Case) -> float:
    started = time.monotonic()
    toy.case = case
    try:
        with toy.mesh.peers.guard():
            runner.run(toy, toy.inputs(case.num_ubatches, seed=0))
            # Who failed in its last wait kept nobody from ending the step: the others learn of it when they next meet.
            toy.comm.wait_host(dist.all_reduce(torch.ones(1), group=toy.mesh.agreement_group, async_op=True))
    except BaseException as error:
        check_error(error, case, toy.mesh.rank)
    else:
        raise AssertionError(f"nothing was raised in {case}")
    finally:
        toy.case = None
    return time.monotonic() - started


def check_error(error: BaseException, case: Case, rank: int) -> None:
    if type(error) is not (case.error if rank == case.rank else PeerFailed) or f"injected at {case}" not in str(error):
        raise AssertionError(f"wrong error in {case}") from error
    if rank != case.rank:
        if error.rank != case.rank:
            raise AssertionError(f"wrong rank in {case}") from error
        return
    notes = "\n".join(error.__notes__)
    for part in (f"rank {rank}", f"ubatch {case.ubatch} of {case.num_ubatches}", f"layer {case.layer}"):
        if part not in notes:
            raise AssertionError(f"{part!r} is not in {notes!r}")


def check(results) -> None:
    for longest_s, left in results:
        assert longest_s < LIMIT_S
        (threads, descriptors, memory_kib), (last_threads, last_descriptors, last_memory_kib) = left
        assert last_threads <= threads
        assert last_descriptors <= descriptors
        assert last_memory_kib - memory_kib < 5 * 1024


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_sample_of_failures(ranks, num_ranks):
    check(ranks(num_ranks).run(run_cases, sample(num_ranks, 24), timeout=100))


def test_failures_without_assertions():
    """Nothing that ends a failed step may be an `assert`: they are gone under `python -O`."""
    pool = RankPool(2, env={"PYTHONOPTIMIZE": "1"})
    try:
        check(pool.run(run_cases, sample(2, 8, seed=1), timeout=60))
    finally:
        pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_failure(ranks, num_ranks):
    check(ranks(num_ranks).run(run_cases, all_cases(num_ranks), timeout=600))


@pytest.mark.slow
def test_a_thousand_failures_leave_nothing(ranks):
    cases = [case for seed in range(4) for case in sample(2, 250, seed)]
    check(ranks(2).run(run_cases, cases, timeout=900))
