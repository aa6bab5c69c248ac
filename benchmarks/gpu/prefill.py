"""Prefill over DeepEP's normal kernels: what overlap gains, layer by layer; a program for torchrun.

    torchrun --nproc-per-node 2 -m benchmarks.gpu.prefill --tokens 8192,16384 --out FILE

Layer shapes of a named model, random weights, prompts of 2048 tokens. First the gates: `split` and `overlap` (both
drivers, with and without the SM partition) bitwise equal, `whole` within 2e-2; a size whose gate failed has no figures
in the summary. Then for each SM count every arm, interleaved. `comm SMs` 8 stand for a NIC-class link: DeepEP moves
about 30 GB/s each way with them.

    overlap efficiency = (whole - overlap) / (whole - max(compute alone, messages alone)), 1.0 being the limit

`sustained`: arms without pauses between their calls, and what they draw.
`four`: with so many ubatches.
`apart`: the compute of two ubatches and their messages at the same time, neither waiting for the other: what they take
from each other.
`host_quiet`: the host's time in calls that no other program disturbed (`Times.quiet_ms`), of so many (`num_quiet`).
`host_profile`: where the host's time goes in overlap, by function, under Python's profiler (which adds to short ones).
`bare` is whole without any overlap machinery. `threads` take their turns on the caller's core, `threads_free` wherever
the system puts them.
"""

from __future__ import annotations

import cProfile
import itertools
import pstats
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.setup import (
    Apart,
    Arms,
    Bench,
    Recorded,
    Switch,
    Times,
    make_parser,
    numbers,
    prompts,
    random_model,
)
from moe.all2all.self_test import self_test
from moe.config import shape_note
from moe.experts import ExpertWeights, make_experts
from moe.kernels.permute import make_permutation
from moe.sms import Form

NIC_SMS = 8
DRIVERS = ("threads", "greenlet")
FORMS: dict[str, Form | None] = {"none": None, "carve": "carve", "green": "green", "shared": "shared"}
WHOLE_LIMIT = 2e-2

Gates = dict[str, Any]


def relative_error(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def check_gates(arms: Arms, all2all: Any, bench: Bench) -> Gates:
    """Equality of the arms on this rank, the largest difference of `whole`, and whether all ranks pass."""
    all2all.set_num_sms(20)
    whole, split = arms.whole(), arms.split()
    gates: Gates = {"whole_relative_error": relative_error(whole, split)}
    for num_sms, (name, form) in itertools.product((NIC_SMS, 20), FORMS.items()):
        with bench.partition(all2all, num_sms, form):
            split = arms.split()  # a library may choose other kernels where it has other SMs
            gates["whole_relative_error"] = max(gates["whole_relative_error"], relative_error(whole, split))
            for driver in DRIVERS:
                gates[f"overlap_{driver}_{name}_{num_sms}_equal"] = all(
                    torch.equal(arms.overlap(driver), split) for _ in range(2)
                )
    all2all.set_num_sms(20)
    four = arms.split("four")
    gates["overlap_four_equal"] = torch.equal(arms.overlap("four"), four)
    gates["whole_relative_error_of_four"] = relative_error(whole, four)
    equal = all(v for k, v in gates.items() if k.endswith("_equal"))
    gates["passed"] = bench.all_agree(equal and gates["whole_relative_error"] < WHOLE_LIMIT)
    if not gates["passed"]:
        bench.say("GATE FAILED", gates)
    return gates


def within(context: Callable[[], Any], arm: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        with context():
            arm()

    return run


def expert_path(recorded: Recorded, weights: ExpertWeights, bench: Bench) -> dict[str, float]:
    """The whole expert path of layer 0 over its two grouped products alone, on the same received tokens (device ms)."""
    received = recorded.messages[0][1]
    assert received.topk_idx is not None
    experts = make_experts(weights)
    made = make_permutation(received.topk_idx, weights.w_gate_up.shape[0], 128)
    num_rows = int(made.ends[-1])
    x = received.x[made.source[:num_rows].long()].contiguous()
    up, down = weights.w_gate_up.transpose(1, 2), weights.w_down.transpose(1, 2)
    h = torch.randn(num_rows, down.shape[1], dtype=x.dtype, device=x.device)

    def products() -> None:
        torch._grouped_mm(x, up, offs=made.ends)
        torch._grouped_mm(h, down, offs=made.ends)

    found: dict[str, list[float]] = {"path": [], "products": []}
    for _ in range(3):  # together, so that clocks and heat are the same
        for name, function in (("path", lambda: experts(received)), ("products", products)):
            function()
            found[name].append(bench.clock.device_ms(function, rounds=bench.rounds, ahead_ms=3))
    ratios = sorted(path / alone for path, alone in zip(found["path"], found["products"], strict=True))
    return {
        "path_ms": sorted(found["path"])[1], "products_ms": sorted(found["products"])[1],
        "ratio": ratios[1], "low": ratios[0], "high": ratios[2],
    }  # fmt: skip


def arms_of(num_sms: int, arms: Arms, bench: Bench, all2all: Any, recorded: dict[str, Any]) -> dict[str, Any]:
    """What is measured with so many SMs for messages. `recorded`: runs on recorded messages."""
    nic = num_sms == NIC_SMS

    def on(form: str, arm: Callable[[], object]) -> Callable[[], None]:
        return within(lambda: bench.partition(all2all, num_sms, FORMS[form]), arm)

    runs: dict[str, Callable[[], object]] = {
        "whole": on("none", arms.whole),
        "compute_split": on("shared", recorded["compute_split"]),
        "comm": on("none", recorded["comm"]),
        "apart": on("shared", recorded["apart"]),
        "overlap_threads_shared": on("shared", lambda: arms.overlap("threads")),
    }
    for form in ("carve", "green", "shared") if nic else ("none", "carve", "shared"):
        runs[f"overlap_greenlet_{form}"] = on(form, lambda: arms.overlap("greenlet"))
    if nic:
        runs["overlap_four_shared"] = on("shared", lambda: arms.overlap("four"))
        runs["split"] = on("none", arms.split)
        runs["bare"] = on("none", recorded["bare"])
        runs["overlap_free_shared"] = on("shared", lambda: arms.overlap("free"))
    return runs


def host_profile(arms: Arms, bench: Bench, num_layers: int, calls: int = 10, top: int = 40) -> list[dict[str, Any]]:
    """The functions with most time of their own, per layer of both ubatches."""
    profiler = cProfile.Profile()
    for _ in range(calls):
        bench.clock.synchronize()
        bench.meet()
        profiler.enable()
        arms.overlap("greenlet")
        profiler.disable()
    stats: Any = pstats.Stats(profiler)
    scale = calls * num_layers
    rows = [
        {
            "function": f"{Path(file).name}:{line} {name}",
            "calls": count / scale, "own_us": own / scale * 1e6, "all_us": total / scale * 1e6,
        }
        for (file, line, name), (_, count, own, total, _) in stats.stats.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -float(row["own_us"]))[:top]


def run_size(num_tokens: int, bench: Bench) -> dict[str, Any]:
    args, mesh, rows = bench.args, bench.mesh, bench.rows(num_tokens)
    config = bench.shape(args.shape, args.num_layers)
    all2all = bench.high_throughput(config, rows)
    self_test(all2all, config, mesh.device)
    switch = Switch(all2all)
    model = random_model(config, switch, mesh.device)
    batch, kv = prompts(config, rows, min(rows, bench.length(args.prompt_length)), mesh)
    arms = Arms(model, batch, kv, mesh)
    found: dict[str, Any] = {
        "num_tokens": num_tokens,
        "gates": check_gates(arms, all2all, bench),
        "sms": {},
        "sustained": {},
    }

    recorded = Recorded(all2all, mesh.device)
    with switch.using(recorded):
        arms.whole()
        recorded.recording = False
        compute_whole = bench.time_arms({"whole": arms.whole})["whole"]
    found["compute_whole"] = per_layer(compute_whole, config.num_layers)
    shape = (config.num_experts // mesh.world_size, config.expert_width, config.hidden)
    w_gate_up = torch.empty(shape[0], 2 * shape[1], shape[2], dtype=config.dtype, device=mesh.device).normal_(std=0.02)
    w_down = torch.empty(shape[0], shape[2], shape[1], dtype=config.dtype, device=mesh.device).normal_(std=0.02)
    found["expert_path"] = expert_path(recorded, ExpertWeights(w_gate_up=w_gate_up, w_down=w_down), bench)
    del w_gate_up, w_down
    # The split compute on recorded tokens, by ubatch: recorded in the order in which `split` runs them.
    split_recorded = Recorded(all2all, mesh.device)
    with switch.using(split_recorded):
        arms.split()
        split_recorded.recording = False

    def using(other: Any, arm: Callable[[], object]) -> Callable[[], None]:
        return within(lambda: switch.using(other), arm)

    alone = {
        "compute_split": using(split_recorded, arms.split),
        "comm": recorded.replay_messages,
        "apart": using(Apart(split_recorded, mesh.device), arms.split),
        "bare": using(bench.bare(all2all), arms.whole),
    }
    for num_sms in args.sms:
        runs = arms_of(num_sms, arms, bench, all2all, alone)
        times = bench.time_arms(runs)
        found["sms"][str(num_sms)] = {name: per_layer(t, config.num_layers) for name, t in times.items()}
        fastest = min((name for name in runs if name.startswith("overlap_greenlet")), key=lambda k: times[k].median)
        lasting = {"whole": "whole", "overlap": fastest}
        if num_sms == NIC_SMS:
            lasting |= {"compute_split": "compute_split", "comm": "comm"}
        found["sustained"][str(num_sms)] = bench.sustain(
            {name: runs[arm] for name, arm in lasting.items()},
            {name: times[arm] for name, arm in lasting.items()},
            config.num_layers,
        )
        shown = {n: f"{t.host / config.num_layers:.2f}/{t.median / config.num_layers:.2f}" for n, t in times.items()}
        bench.say(num_tokens, num_sms, shown, found["sustained"][str(num_sms)])
    found["host_profile"] = host_profile(arms, bench, config.num_layers)
    for row in found["host_profile"][:15]:
        bench.say(f"  {row['own_us']:7.1f} us {row['calls']:5.1f} x {row['function']}")
    arms.close()
    recorded.close()
    split_recorded.close()
    bench.clock.synchronize()
    all2all.close()
    return found


def per_layer(times: Times, num_layers: int) -> dict[str, Any]:
    found = {**times.figure("ms/layer", 1 / num_layers), "num_quiet": len(times.quiet_ms)}
    for name, values in (("host", times.host_ms), ("host_quiet", times.quiet_ms)):
        if values:
            low, middle, high = np.percentile(values, (10, 50, 90)) / num_layers
            found |= {name: float(middle), f"{name}_low": float(low), f"{name}_high": float(high)}
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--num-layers", type=int, default=6)
    parser.add_argument("--tokens", type=numbers, default=[16384, 8192, 4096, 2048, 32768])
    parser.add_argument("--sms", type=numbers, default=[8, 16, 24, 32, 48])
    parser.add_argument("--prompt-length", type=int, default=2048)
    with Bench.start(parser.parse_args()) as bench:
        sizes: list[dict[str, Any]] = []
        for num_tokens in bench.args.tokens:
            sizes.append(run_size(num_tokens, bench))
            bench.write({"shape": bench.args.shape, "note": shape_note(bench.args.shape), "sizes": sizes})
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
