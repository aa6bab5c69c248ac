"""Whole prefill steps, as an engine runs them: embedding, 12 layers, and the head for the last token of each prompt.

    torchrun --nproc-per-node 2 -m benchmarks.gpu.steps --tokens 2048,8192 --out FILE

Qwen3-30B-A3B shapes, random weights, prompts of 1024 tokens; eager; the normal kernels of DeepEP at their best of a
few SM counts for each arm. Throughput is tokens a second and GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.prefill import MODES, check_gates, within
from benchmarks.gpu.setup import Arms, command, partition, prompts, random_model, time_arms
from launch.mesh import Mesh
from moe.all2all.deepep_ht import DeepEPHighThroughput
from moe.config import named_shape


def run_size(
    num_tokens: int, length: int, args: argparse.Namespace, mesh: Mesh, model: Any, all2all: Any
) -> dict[str, Any]:
    config = model.config
    batch, kv = prompts(config, num_tokens, length, mesh)
    last = torch.arange(length - 1, num_tokens, length, device=mesh.device)
    arms = Arms(model, batch, kv, mesh, last_only=last)
    gates = check_gates(arms, all2all)
    runs: dict[str, Callable[[], object]] = {}
    for num_sms in args.sms:
        runs[f"whole {num_sms}"] = within(lambda n=num_sms: partition(all2all, n), arms.whole)
        for mode in MODES[:2]:
            runs[f"overlap {num_sms} {mode}"] = within(
                lambda n=num_sms, m=mode: partition(all2all, n, m), lambda: arms.overlap("greenlet")
            )
    times = time_arms(runs, mesh, rounds=args.rounds)
    arms.close()
    found: dict[str, Any] = {"num_tokens": num_tokens, "prompt_length": length, "gates": gates}
    for arm in ("whole", "overlap"):
        best = min((name for name in times if name.startswith(arm)), key=lambda name: times[name].median)
        rate = {k: num_tokens * 1e3 / v for k, v in times[best].figure().items() if k != "unit"}
        rate = {"value": rate["value"], "low": rate["high"], "high": rate["low"]}  # a long time is a low rate
        found[arm] = {"setting": best, "step": times[best].figure(), "host_ms": times[best].host, "tokens_per_s": rate}
    if mesh.rank == 0:
        print(
            num_tokens,
            length,
            {a: (found[a]["setting"], round(found[a]["step"]["value"], 2)) for a in ("whole", "overlap")},
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument(
        "--tokens", type=lambda s: [int(n) for n in s.split(",")], default=[2048, 4096, 8192, 16384, 32768]
    )
    parser.add_argument("--sms", type=lambda s: [int(n) for n in s.split(",")], default=[16, 24, 32])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with Mesh.start(device="cuda") as mesh, torch.inference_mode():
        config = replace(named_shape("qwen3-30b-a3b"), num_layers=args.num_layers)
        all2all = DeepEPHighThroughput(
            group=mesh.device_group, device=mesh.device, config=config, max_tokens_per_rank=max(args.tokens)
        )
        torch.manual_seed(1 + mesh.rank)
        model = random_model(config, all2all, mesh.device)
        sizes = [(n, 1024) for n in args.tokens]
        found = []
        for num_tokens, length in sizes:
            found.append(run_size(num_tokens, length, args, mesh, model, all2all))
            if mesh.rank == 0:
                args.out.write_text(json.dumps({"command": command(), "sizes": found}, indent=1))
            torch.cuda.empty_cache()
        all2all.close()


if __name__ == "__main__":
    main()
