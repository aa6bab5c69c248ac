"""Prefill over DeepEP's normal kernels: what overlap gains, layer by layer; a program for torchrun.

    torchrun --nproc-per-node 2 -m benchmarks.gpu.prefill --tokens 8192,16384 --out FILE

Qwen3-30B-A3B layer shapes, random weights, prompts of 2048 tokens. First the gates: `split` and `overlap` (both
drivers, with and without the SM partition) bitwise equal, `whole` within 2e-2; no figure is printed for a size whose
gate failed. Then for each SM count every arm, interleaved. `comm SMs` 8 stand for a NIC-class link: DeepEP moves
about 30 GB/s each way with them.

    overlap efficiency = (whole - overlap) / (whole - max(compute alone, messages alone)), 1.0 being the limit
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.setup import (
    Arms,
    Bare,
    Recorded,
    Switch,
    Times,
    command,
    partition,
    prompts,
    random_model,
    time_arms,
)
from launch.mesh import Mesh
from moe.all2all.deepep_ht import DeepEPHighThroughput
from moe.all2all.self_test import self_test
from moe.config import named_shape
from moe.experts import ExpertWeights, make_experts
from moe.kernels.permute import make_permutation

NIC_SMS = 8
DRIVERS = ("threads", "greenlet")
MODES = ("none", "carve", "green")


def relative_error(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def check_gates(arms: Arms, all2all: DeepEPHighThroughput) -> dict[str, Any]:
    """Equality of the arms on this rank; the largest difference of `whole`."""
    all2all.set_num_sms(20)
    whole, split = arms.whole(), arms.split()
    gates: dict[str, Any] = {"whole_relative_error": relative_error(whole, split)}
    for driver in DRIVERS:
        for mode in MODES:
            with partition(all2all, 20, mode):
                gates[f"overlap_{driver}_{mode}_equal"] = all(
                    torch.equal(arms.overlap(driver), split) for _ in range(2)
                )
    assert gates["whole_relative_error"] < 2e-2, gates
    assert all(v for k, v in gates.items() if k.endswith("_equal")), gates
    return gates


def within(context: Callable[[], Any], arm: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        with context():
            arm()

    return run


def expert_path(recorded: Recorded, weights: ExpertWeights) -> dict[str, float]:
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

    path, alone = device_ms(lambda: experts(received)), device_ms(products)
    return {"path_ms": path, "products_ms": alone, "ratio": path / alone}


def device_ms(function: Callable[[], object], rounds: int = 15) -> float:
    for _ in range(3):
        function()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    torch.cuda._sleep(5_000_000)  # the host is ahead, so that only the device is timed
    for first, last in events:
        first.record()
        function()
        last.record()
    torch.cuda.synchronize()
    return sorted(first.elapsed_time(last) for first, last in events)[rounds // 2]


def run_size(num_tokens: int, args: argparse.Namespace, mesh: Mesh) -> dict[str, Any]:
    config = replace(named_shape(args.shape), num_layers=args.num_layers)
    all2all = DeepEPHighThroughput(
        group=mesh.device_group,
        device=mesh.device,
        config=config,
        max_tokens_per_rank=num_tokens,
        check=mesh.peers.check,
    )
    self_test(all2all, config, mesh.device)
    switch = Switch(all2all)
    torch.manual_seed(1 + mesh.rank)
    model = random_model(config, switch, mesh.device)
    batch, kv = prompts(config, num_tokens, args.prompt_length, mesh)
    arms = Arms(model, batch, kv, mesh)
    found: dict[str, Any] = {"num_tokens": num_tokens, "gates": check_gates(arms, all2all), "sms": {}}

    recorded = Recorded(all2all, mesh.device)
    with switch.using(recorded):
        arms.whole()
        recorded.recording = False
        compute_whole = time_arms({"whole": arms.whole}, mesh, rounds=args.rounds)["whole"]
    shape = (config.num_experts // mesh.world_size, config.expert_width, config.hidden)
    w_gate_up = torch.empty(shape[0], 2 * shape[1], shape[2], dtype=config.dtype, device=mesh.device).normal_(std=0.02)
    w_down = torch.empty(shape[0], shape[2], shape[1], dtype=config.dtype, device=mesh.device).normal_(std=0.02)
    found["expert_path"] = expert_path(recorded, ExpertWeights(w_gate_up=w_gate_up, w_down=w_down))
    found["compute_whole"] = per_layer(compute_whole, config.num_layers)
    # The split compute on recorded tokens, by ubatch: recorded in the order in which `split` runs them.
    split_recorded = Recorded(all2all, mesh.device)
    with switch.using(split_recorded):
        arms.split()
        split_recorded.recording = False

    def recorded_split() -> None:
        with switch.using(split_recorded):
            arms.split()

    for num_sms in args.sms:

        def on(mode: str, arm: Callable[[], object], num_sms: int = num_sms) -> Callable[[], None]:
            return within(lambda: partition(all2all, num_sms, mode), arm)

        runs: dict[str, Callable[[], object]] = {
            "whole": on("none", arms.whole),
            "split": on("none", arms.split),
            "compute_split": on("carve", recorded_split),
            "comm": on("none", recorded.replay_messages),
        }
        for driver in DRIVERS:
            for mode in MODES if driver == "greenlet" else MODES[1:]:
                runs[f"overlap_{driver}_{mode}"] = on(mode, lambda d=driver: arms.overlap(d))
        if num_sms == NIC_SMS:
            bare = Bare(all2all)

            def plain(bare: Bare = bare) -> None:
                with switch.using(bare):
                    arms.whole()

            runs["bare"] = on("none", plain)
        times = time_arms(runs, mesh, rounds=args.rounds)
        found["sms"][num_sms] = {name: per_layer(t, config.num_layers) for name, t in times.items()}
        if mesh.rank == 0:
            print(
                num_tokens,
                num_sms,
                {n: f"{t.host / config.num_layers:.2f}/{t.median / config.num_layers:.2f}" for n, t in times.items()},
                flush=True,
            )
    arms.close()
    recorded.close()
    split_recorded.close()
    torch.cuda.synchronize()
    all2all.close()
    return found


def per_layer(times: Times, num_layers: int) -> dict[str, Any]:
    return {**times.figure("ms/layer", 1 / num_layers), "host": times.host / num_layers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--num-layers", type=int, default=6)
    parser.add_argument("--tokens", type=lambda s: [int(n) for n in s.split(",")], default=[8192, 16384])
    parser.add_argument("--sms", type=lambda s: [int(n) for n in s.split(",")], default=[8, 16, 24])
    parser.add_argument("--prompt-length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with Mesh.start(device="cuda") as mesh, torch.inference_mode():
        found = []
        for num_tokens in args.tokens:
            found.append(run_size(num_tokens, args, mesh))
            if mesh.rank == 0:
                args.out.write_text(json.dumps({"command": command(), "sizes": found}, indent=1))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
