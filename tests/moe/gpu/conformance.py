"""What every transport must do between GPUs; a program for torchrun: `torchrun ... -m tests.moe.gpu.conformance
BACKEND...`, a backend being a name, or a name with an option as in `deepep_ht:fp8`.

A program, not a case of the CPU suite's pool: a rank that hangs in a GPU kernel can only be ended with its process.
The cases, the stand-in experts and what must come back are the CPU suite's. Prints one line a check; a check that
fails ends the program with exit code 1. With `--rehearse` on the CPU, over gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.clock import Clock
from benchmarks.gpu.setup import command
from dbo.errors import ConfigError
from dbo.runner import UBatchRunner
from launch.mesh import Mesh
from moe.all2all.base import All2All, Dispatched
from moe.all2all.deepep_ht import DeepEPHighThroughput
from moe.all2all.deepep_ll import DeepEPLowLatency
from moe.all2all.deepep_phases import DeepEPByPhase
from moe.all2all.local import LocalAll2All
from moe.all2all.self_test import self_test
from moe.all2all.torch_dist import TorchAll2All
from tests.moe.cases import Case, Inputs, cases, check_received, expected, make_inputs, scale, tolerance

OPTIONS: dict[str, dict[str, Any]] = {"fp8": {"fp8": True}, "sync": {"no_sync": False}}
BACKENDS: dict[str, Callable[..., All2All]] = {
    "local": LocalAll2All,
    "torch": TorchAll2All,
    "deepep_ht": DeepEPHighThroughput,
    "deepep_ll": DeepEPLowLatency,
    "deepep": DeepEPByPhase,
}


def on(device: torch.device, inputs: Inputs) -> Inputs:
    return Inputs(*(t.to(device) for t in (inputs.x, inputs.topk_idx, inputs.topk_weights)), inputs.num_tokens_per_rank)


def stand_in(case: Case, rank: int, received: Dispatched) -> Tensor:
    """Experts that multiply by `scale`: what the CPU suite's stand-in does, on the device of what was received."""
    first = case.experts(rank).start
    x = received.x
    if received.topk_idx is None or received.topk_weights is None:
        factor = scale(first + torch.arange(x.shape[0], device=x.device))[:, None, None]
        return (x * factor).to(case.dtype)
    here = received.topk_idx >= 0
    factor = (received.topk_weights * scale(first + received.topk_idx)).masked_fill(~here, 0).sum(-1, keepdim=True)
    return (x.float().masked_fill(~here.any(-1, keepdim=True), 0) * factor).to(case.dtype)


class Bench:
    """One backend between these ranks, remade for each shape it must be made for."""

    def __init__(self, mesh: Mesh, name: str, options: dict[str, Any], *, rehearsal: bool = False):
        self.mesh, self.clock = mesh, Clock(mesh.device)
        self.make, self.options = (TorchAll2All, {}) if rehearsal and name != "local" else (BACKENDS[name], options)

    @contextlib.contextmanager
    def backend(self, case: Case, cap: int) -> Iterator[All2All]:
        made = self.make(
            group=self.mesh.device_group,
            device=self.mesh.device,
            config=case,
            max_tokens_per_rank=cap,
            check=self.mesh.peers.check,
            **self.options,
        )
        try:
            yield made
        finally:
            self.clock.synchronize()
            made.close()

    def there_and_back(self, all2all: All2All, case: Case, salt: int = 0, delay: bool = False) -> Tensor:
        inputs = on(self.mesh.device, make_inputs(case, self.mesh.rank, salt))
        sent = all2all.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, inputs.num_tokens_per_rank)
        del inputs
        torch.full((1 << 20,), torch.nan, device=self.mesh.device)  # overwrites what was freed too early
        if delay:
            self.clock.sleep(1)
        received = sent.result()
        y = stand_in(case, self.mesh.rank, received)
        back = all2all.combine(y, received)
        del y
        torch.full((1 << 20,), torch.nan, device=self.mesh.device)
        return back.result()

    def check(self, case: Case, back: Tensor, salt: int = 0) -> None:
        limits = {"rtol": 0.1, "atol": 0.1} if self.options.get("fp8") else tolerance(case.dtype)
        torch.testing.assert_close(back.float().cpu(), expected(make_inputs(case, self.mesh.rank, salt)), **limits)


def suited(case: Case, world_size: int) -> Case:
    """The case as a GPU transport takes it: bf16, hidden sizes that exist, experts that divide."""
    num_experts = -(-max(case.num_experts, case.num_topk) // world_size) * world_size
    return replace(case, dtype=torch.bfloat16, hidden=max(case.hidden, 256), num_experts=num_experts)


def run_cases(bench: Bench, most: int | None = None) -> None:
    """All cases, or only the first `most`."""
    shapes: dict[tuple[int, int, int], list[Case]] = {}
    for case in cases(bench.mesh.world_size)[:most]:
        case = suited(case, bench.mesh.world_size)
        shapes.setdefault((case.hidden, case.num_experts, case.num_topk), []).append(case)
    for group in shapes.values():
        cap = max(max(case.num_padded, *case.num_tokens) + 3 for case in group)
        try:
            with bench.backend(group[0], cap) as all2all:
                for case in group:
                    first = bench.there_and_back(all2all, case)
                    try:
                        bench.check(case, first)
                        inputs = on(bench.mesh.device, make_inputs(case, bench.mesh.rank))
                        args = (inputs.x, inputs.topk_idx, inputs.topk_weights, inputs.num_tokens_per_rank)
                        received = all2all.dispatch(*args).result()
                        check_received(case, bench.mesh.rank, received)
                        again = all2all.combine(stand_in(case, bench.mesh.rank, received), received).result()
                        assert torch.equal(first, again), "the same call gave other bits"
                    except BaseException as error:
                        error.add_note(f"case {case.name!r}, hidden {case.hidden}, top {case.num_topk}")
                        raise
        except ConfigError as refused:
            say(bench.mesh, f"refused: {refused}")


def run_in_flight(bench: Bench, driver: str, num_ubatches: int, num_rounds: int, seconds: float) -> int:
    """Ubatches with their own patterns and sizes, dispatch delayed, freed memory poisoned: overlap == split, bit for
    bit. Gives the number of rounds: as many as asked for, or as `seconds` allow.
    """
    begun = time.monotonic()
    base = Case(name="in flight", num_tokens=(40,) * bench.mesh.world_size, hidden=512, num_experts=8, num_topk=3)
    base = replace(base, dtype=torch.bfloat16)
    with bench.backend(base, 64) as all2all:
        limit = all2all.capabilities.max_in_flight or num_ubatches
        with UBatchRunner(min(limit, num_ubatches), device=bench.mesh.device, driver=driver) as runner:
            for n in range(num_rounds):
                if not all_agree(bench.mesh, time.monotonic() - begun < seconds):
                    return n
                random = torch.Generator().manual_seed(n)
                sizes = torch.randint(0, 41, (runner.num_ubatches, base.ep_size), generator=random).tolist()
                todo = [
                    (replace(base, num_tokens=tuple(s), tell_counts=n % 3 != 0), 10 * n + k)
                    for k, s in enumerate(sizes)
                ]

                def layers(work: tuple[Case, int]) -> list[Tensor]:
                    return [bench.there_and_back(all2all, work[0], work[1] + 1000 * i, delay=True) for i in range(2)]

                overlapped, sequential = runner.run(layers, todo), runner.run(layers, todo, interleave=False)
                for (case, salt), got, other in zip(todo, overlapped, sequential, strict=True):
                    for layer in range(2):
                        assert torch.equal(got[layer], other[layer]), f"round {n}: overlap differs from split"
                        bench.check(case, got[layer], salt + 1000 * layer)
    return num_rounds


def all_agree(mesh: Mesh, yes: bool) -> bool:
    """Whether every rank says yes. Collective."""
    flag = torch.tensor([int(yes)])
    if mesh.world_size > 1:
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN, group=mesh.agreement_group)
    return bool(flag)


def run_self_test(bench: Bench) -> None:
    case = suited(cases(bench.mesh.world_size)[-1], bench.mesh.world_size)
    start = time.monotonic()
    with bench.backend(case, 64) as all2all:
        made = time.monotonic()
        self_test(all2all, case, bench.mesh.device)
        say(bench.mesh, f"made in {made - start:.2f} s, self-test in {time.monotonic() - made:.3f} s")


def say(mesh: Mesh, text: str) -> None:
    if mesh.rank == 0:
        print(text, flush=True)


def run_backend(mesh: Mesh, named: str, args: argparse.Namespace) -> dict[str, Any]:
    """All checks of one backend; stops at the first that fails."""
    name, _, option = named.partition(":")
    bench = Bench(mesh, name, OPTIONS[option] if option else {}, rehearsal=args.rehearse)
    in_flight = (args.rounds, args.seconds)
    checks: dict[str, Callable[[], int | None]] = {
        "self-test": lambda: run_self_test(bench),
        "smallest case": lambda: run_cases(bench, 1),
        "cases": lambda: run_cases(bench),
        "two ubatches, threads": lambda: run_in_flight(bench, "threads", 2, *in_flight),
        "four ubatches, greenlets": lambda: run_in_flight(bench, "greenlet", 4, *in_flight),
    }
    found: dict[str, Any] = {"passed": True, "checks": {}}
    for check in args.checks or checks:
        start = time.monotonic()
        try:
            rounds = checks[check]()
        except Exception:
            traceback.print_exc()
            found["passed"] = False
        seconds = time.monotonic() - start
        found["checks"][check] = {"seconds": seconds} | ({"rounds": rounds} if found["passed"] and rounds else {})
        if not found["passed"]:
            say(mesh, f"FAILED: {named} {check}")
            break
        say(mesh, f"ok: {named} {check} ({seconds:.1f} s{f', {rounds} rounds' if rounds else ''})")
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("backends", nargs="+")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each check with rounds")
    parser.add_argument("--checks", type=lambda text: text.split("+"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    args.rounds = 2 if args.rehearse else args.rounds
    with Mesh.start(device="cpu" if args.rehearse else "cuda") as mesh:
        found = {}
        for named in args.backends:
            found[named] = run_backend(mesh, named, args)
            if args.out is not None and mesh.rank == 0:
                args.out.write_text(
                    json.dumps({"command": command("tests.moe.gpu"), "backends": found}, indent=1) + "\n"
                )
            if not found[named]["passed"]:
                sys.exit(1)  # what it left on the device would be in the way of the others


if __name__ == "__main__":
    main()
