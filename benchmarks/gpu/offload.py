"""A model with the experts of some layers in host memory against the same model on the device; a program for torchrun.

    torchrun --nproc-per-node 2 -m benchmarks.gpu.offload --layers 3 --tokens 4096 --out FILE

Six layers of Qwen3-30B-A3B shapes, the same random weights in both models. Prefill: prompts of random lengths, the
normal kernels of DeepEP; whole, split and overlapped; eager, FULL and PIECEWISE. Decode: the low-latency kernels; whole
and overlapped; eager and FULL.

The gate: in 10 steps of other tokens and lengths every arm leaves the same bits in both models, and the offloaded model
leaves them within a memory limit that is too small for the experts of the other one.

The time: no step is faster than the resident one, nor than its copies: bytes over the measured bandwidth ("bound").
`explained` is the share that follows from these two and from when each copy may start (`Timeline`).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.graphs import Steps, modes, random_prompts, schedule_of, watching
from benchmarks.gpu.setup import LONGEST, SHORTEST, Bench, Times, make_parser, random_params
from benchmarks.gpu.summary import Figure, passed, plain, single
from dbo.graphs.mode import CUDAGraphMode
from dbo.offload import Offloader
from dbo.workspace import Workspace
from launch.scheduler import Schedule
from moe.config import ModelConfig
from moe.graphs import make_capturable
from moe.models.decoder import Model, Params
from moe.offload import EXPERTS, attach, offload, offloaded_layers, parameters_on_host

NUM_SMS = 24
DRAWS = 10
FORMS = {"whole": (1, True), "split": (2, False), "overlap": (2, True)}
"""Ubatches, and whether they take turns."""


class Timeline(Offloader):
    """The rules of an `Offloader` on a clock, as if nothing but computing and copies took time."""

    def __init__(self, num_layers: int, copy_ms: float) -> None:
        super().__init__([{}] * num_layers, torch.device("cpu"))
        self._copy_ms, self._now, self._link = copy_ms, 0.0, 0.0
        self._there: dict[int, float] = {}

    def step(self, uses: Sequence[int | None], resident_ms: float) -> float:
        """A step after others. uses: for each layer of each ubatch, in order, which of the offloaded ones it is."""
        started, half = 0.0, resident_ms / len(uses) / 2
        for _ in range(2):
            started = self._now
            self.sync_prev_onload()
            for use in uses:
                self._now += half
                if use is not None:
                    self.using(use, lambda: None)()
                self._now += half
            self.join_after_forward()
        return self._now - started

    def _copy(self, layer: int, slot: int) -> None:
        self._link = self._there[slot] = max(self._link, self._now) + self._copy_ms

    def _wait(self, slot: int) -> None:
        if slot in self._pending:
            self._pending.discard(slot)
            self._now = max(self._now, self._there[slot])


def make_pair(
    config: ModelConfig, all2all: Any, device: torch.device, layers: list[int]
) -> tuple[list[Any], list[int]]:
    """The resident and the offloaded model, and the bytes of experts that the device holds for each."""
    params = random_params(config, all2all, device)
    models, held = [Model(config, dict(params), all2all)], [bytes_of_experts(params)]
    for name in parameters_on_host(layers):
        params[name] = params[name].cpu()
    offloader = offload(params, layers, device)
    assert offloader is not None
    held.append(bytes_of_experts(params))
    models.append(Model(config, params, all2all))
    attach(models[1], layers, offloader)
    for model in models:
        make_capturable(model, Workspace(device, 2))
    return models, held


def bytes_of_experts(params: Params) -> int:
    """Layers that share memory count once."""
    return sum({p.data_ptr(): p.nbytes for name, p in params.items() if name.endswith(EXPERTS)}.values())


def draw(phase: str, num_tokens: int, seed: int) -> list[tuple[int, int]]:
    if phase == "prefill":
        return random_prompts(num_tokens, seed)
    return [(int(n) - 1, 1) for n in np.random.default_rng(seed).integers(SHORTEST, LONGEST + 1, num_tokens)]


class Pair:
    """Every arm of both models: `arms[0]` the resident one's, by name."""

    def __init__(self, phase: str, num_tokens: int, bench: Bench, all2all: Any, models: Sequence[Any]) -> None:
        self.phase, self.num_tokens, self.bench, self.all2all = phase, num_tokens, bench, all2all
        self.offloader: Offloader = models[1].offloader
        seeds = [bench.mesh.rank + bench.mesh.world_size * k for k in range(2 if bench.args.rehearse else DRAWS)]
        draws = [draw(phase, num_tokens, seed) for seed in seeds]
        self.schedules = [schedule_of(lengths, seed) for lengths, seed in zip(draws, seeds, strict=True)]
        most = max(map(len, draws))  # and the most blocks that so many requests can take
        room = [(0, num_tokens - most + 1), *[(0, 1)] * (most - 1)]
        self.room = room if phase == "prefill" else [(LONGEST - 1, 1)] * num_tokens
        self.forms = [form for form in FORMS if phase == "prefill" or form != "split"]
        self.modes = modes(bench)[: 2 if phase == "prefill" else 1]
        turns = {FORMS[form][1] for form in self.forms}
        self.steps = [{t: Steps(bench, model, self.room, interleave=t) for t in turns} for model in models]
        for layer in range(models[0].config.num_layers):
            for one, other in zip(*(steps[True].kv.layer(layer) for steps in self.steps), strict=True):
                other.copy_(one.normal_())
        self.arms: tuple[dict[str, Callable[[], Tensor]], ...] = ({}, {})
        self.as_eager = True  # every graph of both
        self.copied: dict[str, int] = {}  # bytes a step, by form

    def hold(self, form: str) -> Callable[[], AbstractContextManager[object]]:
        if self.phase == "decode":
            return nullcontext
        return lambda: self.bench.partition(self.all2all, NUM_SMS, "shared" if form == "overlap" else None)

    def capture(self) -> None:
        for form in self.forms:
            num, turns = FORMS[form]
            for steps, arms in zip(self.steps, self.arms, strict=True):
                arms[f"eager_{form}"] = steps[turns].eager(num, self.hold(form))
                for mode in self.modes:
                    with watching(steps[turns]):
                        arm = arms[f"{mode.name.lower()}_{form}"] = steps[turns].capture(mode, num, self.hold(form))
                    self.as_eager &= arm.equal
            before = self.offloader.num_copied_bytes
            self.arms[1][f"eager_{form}"]()
            self.copied[form] = self.offloader.num_copied_bytes - before

    def compare(self) -> dict[str, int]:
        """In how many steps, each of other requests, both models gave the same on all ranks, by arm: another result
        than in the step before, as a graph that read old inputs would not."""
        equal, before = dict.fromkeys(self.arms[0], 0), dict[str, Tensor]()
        for schedule in self.schedules:
            for steps in self.all_steps():
                for mode in (CUDAGraphMode.PIECEWISE, *self.modes):  # eager steps have the inputs of the first
                    for num in (1, 2):
                        steps.parts(mode, num, schedule)
            for name in equal:
                one, other = (arms[name]()[: self.num_tokens] for arms in self.arms)
                new = name not in before or not torch.equal(one, before[name])
                equal[name] += self.bench.all_agree(new and torch.equal(one, other))
                before[name] = one.clone()
        return equal

    def times(self, layer_bytes: int) -> dict[str, Times]:
        """`resident_*`, `offloaded_*`, and `link`, one layer's copy."""
        device = self.bench.mesh.device
        host = torch.ones(layer_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        there = torch.empty_like(host, device=device)
        arms: dict[str, Callable[[], object]] = {"link": lambda: there.copy_(host, non_blocking=True)}
        for model, of_model in zip(("resident", "offloaded"), self.arms, strict=True):
            arms |= {f"{model}_{name}": arm for name, arm in of_model.items()}
        return self.bench.time_arms(arms)

    def all_steps(self) -> list[Steps]:
        return [steps for of_model in self.steps for steps in of_model.values()]


def uses(form: str, layers: list[int], num_layers: int) -> list[int | None]:
    """See `Timeline.step`."""
    num, turns = FORMS[form]
    order = np.repeat(range(num_layers), num) if turns else np.tile(range(num_layers), num)
    return [layers.index(layer) if layer in layers else None for layer in order.tolist()]


def measure(pair: Pair, layers: list[int], num_layers: int, layer_bytes: int) -> tuple[dict[str, Any], Tensor]:
    """What was found, and the resident model's result of the last schedule."""
    say = pair.bench.say
    pair.capture()
    with pair.steps[0][True].pool.stream():  # as the engine runs
        equal = pair.compare()
        wanted = pair.arms[0]["eager_whole"]()[: pair.num_tokens].clone()
        times = pair.times(layer_bytes)
    say(f"{pair.phase}: of {len(pair.schedules)} steps equal: {equal}; graphs as eager steps: {pair.as_eager}")
    link, arms = times["link"].median, {}
    for name in equal:
        form = name.partition("_")[2]
        resident, offloaded, num_bytes = times[f"resident_{name}"], times[f"offloaded_{name}"], pair.copied[form]
        copies = num_bytes / layer_bytes * link
        bound = max(resident.median, copies)
        predicted = Timeline(len(layers), link).step(uses(form, layers, num_layers), resident.median)
        arms[name] = {
            "resident": resident.figure(), "offloaded": offloaded.figure(), "bytes": num_bytes, "copies_ms": copies,
            "bound_ms": bound, "predicted_ms": predicted,
        }  # fmt: skip
        say(
            f"{pair.phase} {name}: resident {resident.median:.1f} ms, offloaded {offloaded.median:.1f} ms; "
            f"{num_bytes / 1e6:.4g} MB at {layer_bytes / link / 1e6:.1f} GB/s = {copies:.1f} ms of copies, so at least "
            f"{bound:.1f}, by their order {predicted:.1f}; explained {predicted / offloaded.median:.2f}"
        )
    found = {"phase": pair.phase, "num_tokens": pair.num_tokens, "equal": equal, "graphs_as_eager": pair.as_eager}
    found |= {"arms": arms, "link": times["link"].figure(), "layer_bytes": layer_bytes}
    return found | {"gates": {"passed": pair.as_eager and set(equal.values()) == {len(pair.schedules)}}}, wanted


def under_limit(bench: Bench, steps: Steps, schedule: Schedule, wanted: Tensor, missing: int) -> dict[str, Any]:
    """A step of the offloaded model where, of the bytes that resident experts take more, only half are free."""
    device, cuda = bench.mesh.device, bench.mesh.device.type == "cuda"

    def step() -> bool:
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
        return bench.all_agree(torch.equal(run()[: len(wanted)], wanted))

    run = steps.eager(1, nullcontext)
    steps.parts(CUDAGraphMode.PIECEWISE, 1, schedule)
    equal = step()
    needed = torch.cuda.memory_reserved() if cuda else 0
    limit = needed + missing // 2
    if cuda:
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(device).total_memory)
    equal &= step()
    if cuda:
        torch.cuda.set_per_process_memory_fraction(1.0)
    bench.say(
        f"within {limit / 1e6:.0f} MB, where resident experts would need {(needed + missing) / 1e6:.0f}: "
        f"{'equal' if equal else 'NOT EQUAL'}"
    )
    return {"needed": needed, "limit": limit, "resident_would_need": needed + missing, "passed": equal}


def figures_of(phases: Sequence[dict[str, Any]]) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for found in passed(list(phases)):
        suffix = "" if found["phase"] == "prefill" else "_decode"
        for name, arm in found["arms"].items():
            for model in ("resident", "offloaded"):
                figures[f"offload_ms_{model}_{name}{suffix}"] = plain(arm[model])
            for figure, key in (("explained", "predicted_ms"), ("bound_share", "bound_ms")):
                shares = [arm[key] / arm["offloaded"][end] for end in ("value", "high", "low")]
                figures[f"offload_{figure}_{name}{suffix}"] = single(shares[0], "1", shares[1], shares[2])
        rates = [found["layer_bytes"] / found["link"][end] / 1e6 for end in ("value", "high", "low")]
        figures[f"offload_host_link_gb_s{suffix}"] = single(rates[0], "GB/s", rates[1], rates[2])
        for model, held in zip(("resident", "offloaded"), found["expert_bytes"], strict=True):
            figures[f"offload_expert_mb_{model}"] = single(held / 1e6, "MB")
    return figures


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--num-layers", type=int, default=6)
    parser.add_argument("--layers", type=int, default=3, help="of them on the host")
    parser.add_argument("--tokens", type=int, default=4096, help="of a prefill")
    parser.add_argument("--requests", type=int, default=64, help="of a decode")
    parser.add_argument("--driver", choices=("threads", "greenlet"), default="greenlet")
    args = parser.parse_args()
    num_layers = min(args.num_layers, 4) if args.rehearse else args.num_layers
    phases: list[dict[str, Any]] = []
    with Bench.start(args) as bench:
        shape = bench.shape("qwen3-30b-a3b", num_layers)
        config = replace(shape, num_layers=num_layers, dtype=torch.bfloat16)  # a CPU packs float32: it rounds otherwise
        layers = offloaded_layers(config, args.layers)
        for phase, rows in (("prefill", bench.rows(args.tokens)), ("decode", bench.rows(args.requests))):
            make = bench.high_throughput if phase == "prefill" else bench.low_latency
            all2all = make(config, rows)
            models, held = make_pair(config, all2all, bench.mesh.device, layers)
            bench.say(f"{phase}: experts on the device: {held[0] / 1e6:.4g} MB, with offload {held[1] / 1e6:.4g}")
            pair = Pair(phase, rows, bench, all2all, models)
            found, wanted = measure(pair, layers, config.num_layers, held[0] // config.num_layers)
            phases.append({**found, "layers_on_host": layers, "expert_bytes": held})
            room, schedule, resident = pair.room, pair.schedules[-1], weakref.ref(models[0])
            for steps in pair.all_steps():
                steps.close()
            del pair, steps, models[0]
            if phase == "prefill":
                alone = Steps(bench, models[0], room)
                limit = under_limit(bench, alone, schedule, wanted, held[0] - held[1])
                phases[0]["limit"] = {**limit, "passed": limit["passed"] and resident() is None}
                alone.close()
                del alone
            models.clear()
            all2all.close()
            bench.write({"phases": phases, "figures": figures_of(phases)})


if __name__ == "__main__":
    main()
