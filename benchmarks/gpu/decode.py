"""Decode steps over DeepEP's low-latency kernels, eager; a program for torchrun.

    torchrun --nproc-per-node 2 -m benchmarks.gpu.decode --tokens 32,128,256 --out FILE

Qwen3-30B-A3B shapes, 12 layers without head, random weights, contexts of 64 to 264 tokens. For each number of tokens
a rank: step time of the three arms, launches a step, and the device's time of the forward with the host out of its
way; device time over step time is the share in which the GPU is busy, and its inverse is the most that graphs could
gain.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.setup import BLOCK, Arms, command, meet, random_model, time_arms
from launch.mesh import Mesh
from moe.all2all.deepep_ll import DeepEPLowLatency
from moe.batch import ForwardBatch
from moe.config import ModelConfig, named_shape
from moe.kv_cache import KVCache

SHORTEST, LONGEST = 64, 264


def decodes(config: ModelConfig, num_requests: int, mesh: Mesh) -> tuple[ForwardBatch, KVCache]:
    """One new token for each of `num_requests` requests with contexts of 64 to 264 tokens."""
    blocks = -(-LONGEST // BLOCK)
    lens = np.random.default_rng(mesh.rank).integers(SHORTEST, LONGEST + 1, num_requests).astype(np.int32)
    table = torch.randperm(num_requests * blocks, device=mesh.device).int().view(num_requests, blocks)
    positions = torch.from_numpy(lens.astype(np.int64) - 1).to(mesh.device)
    rows = torch.arange(num_requests, device=mesh.device)
    batch = ForwardBatch(
        input_ids=torch.randint(config.vocab_size, (num_requests,), device=mesh.device),
        positions=positions,
        slot_mapping=table[rows, positions // BLOCK].long() * BLOCK + positions % BLOCK,
        block_tables=table,
        query_lens=np.ones(num_requests, np.int32),
        seq_lens=lens,
        num_tokens=num_requests,
        num_tokens_per_rank=(num_requests,) * mesh.world_size,
    )
    kv = KVCache(config, num_requests * blocks, BLOCK, config.dtype, mesh.device)
    for layer in range(config.num_layers):
        for cache in kv.layer(layer):
            cache.normal_()
    return batch, kv


def rows_apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Share of rows that differ by more than 2%. Another batch size multiplies in another order, and then a random
    router, whose scores lie close together, chooses another expert for a few rows in each layer.
    """
    return float(((a.float() - b.float()).norm(dim=-1) > 2e-2 * b.float().norm(dim=-1)).float().mean())


def forward_ms(function: Callable[[], object], mesh: Mesh, rounds: int = 7) -> float:
    """The device's time of one call, with the host so far ahead that the device never waits for it."""
    found = []
    for _ in range(rounds):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        meet(mesh)
        torch.cuda._sleep(150_000_000)  # some 80 ms, longer than any of these calls takes the host
        first.record()
        function()
        last.record()
        torch.cuda.synchronize()
        found.append(first.elapsed_time(last))
    return sorted(found)[rounds // 2]


def num_launches(function: Callable[[], object]) -> int:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        function()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiled.events())


def run_size(num_tokens: int, args: argparse.Namespace, mesh: Mesh, model: Any) -> dict[str, Any]:
    batch, kv = decodes(model.config, num_tokens, mesh)
    arms = Arms(model, batch, kv, mesh)
    split, overlap = arms.split(), arms.overlap("greenlet")
    assert torch.equal(split, overlap), "overlap differs from split"
    rows_off = rows_apart(arms.whole(), split)
    layers, model.layers = model.layers, model.layers[:1]
    rows_off_after_one_layer = rows_apart(arms.whole(), arms.split())
    model.layers = layers
    assert rows_off_after_one_layer < 0.25, f"{rows_off_after_one_layer:.0%} of whole's rows are off after one layer"
    runs = {"whole": arms.whole, "split": arms.split}
    runs |= {f"overlap_{d}": lambda d=d: arms.overlap(d) for d in ("threads", "greenlet")}
    times = time_arms(runs, mesh, rounds=args.rounds)
    found: dict[str, Any] = {
        "num_tokens": num_tokens,
        "rows_off": rows_off,
        "rows_off_after_one_layer": rows_off_after_one_layer,
        "arms": {},
    }
    for name, t in times.items():
        device = forward_ms(runs[name], mesh) if name != "overlap_threads" else None
        found["arms"][name] = {
            **t.figure(),
            "host_ms": t.host,
            "device_ms": device,
            "busy": device and device / t.median,
            "launches": num_launches(runs[name]),
        }
    arms.close()
    if mesh.rank == 0:
        shown = {
            n: (round(a["value"], 2), a["device_ms"] and round(a["device_ms"], 2), a["launches"])
            for n, a in found["arms"].items()
        }
        print(
            num_tokens,
            shown,
            f"rows off: {rows_off_after_one_layer:.1%} after a layer, {rows_off:.1%} in all",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--tokens", type=lambda s: [int(n) for n in s.split(",")], default=[32, 64, 128, 256])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with Mesh.start(device="cuda") as mesh, torch.inference_mode():
        config = replace(named_shape("qwen3-30b-a3b"), num_layers=args.num_layers)
        all2all = DeepEPLowLatency(
            group=mesh.device_group, device=mesh.device, config=config, max_tokens_per_rank=max(args.tokens)
        )
        torch.manual_seed(1 + mesh.rank)
        model = random_model(config, all2all, mesh.device)
        found = [run_size(num_tokens, args, mesh, model) for num_tokens in args.tokens]
        if mesh.rank == 0:
            args.out.write_text(json.dumps({"command": command(), "sizes": found}, indent=1))
        all2all.close()


if __name__ == "__main__":
    main()
