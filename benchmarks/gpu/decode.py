"""Decode steps over DeepEP's low-latency kernels, eager; a program for torchrun.

    torchrun --nproc-per-node 2 -m benchmarks.gpu.decode --tokens 32,128,256 --out FILE

Qwen3-30B-A3B shapes, 12 layers without head, random weights, contexts of 64 to 264 tokens. For each number of tokens
a rank: step time of the three arms, kernels a step, the time in which the device ran any of them, and the device's
time of the forward with the host out of its way. Busy time over step time is the share in which the GPU is busy, and
its inverse is the most that graphs could gain. The gates are those of `routing.py`, and `split` == `overlap`.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.routing import compare_layers, passes, worst
from benchmarks.gpu.setup import Arms, Bench, decodes, make_parser, numbers, random_model

AHEAD_MS = 80  # longer than any of these calls takes the host


def run_size(num_tokens: int, bench: Bench, model: Any) -> dict[str, Any]:
    batch, kv = decodes(model.config, bench.rows(num_tokens), bench.mesh)
    arms = Arms(model, batch, kv, bench.mesh)
    split = arms.split()
    equal = all(torch.equal(split, arms.overlap(driver)) for driver in ("threads", "greenlet"))
    layers = compare_layers(model, batch, arms.parts, kv)
    gates = {"overlap_equal": equal, **worst(layers), "passed": bench.all_agree(equal and passes(layers))}
    if not gates["passed"]:
        bench.say("GATE FAILED", gates)
    runs = {"whole": arms.whole, "split": arms.split}
    runs |= {f"overlap_{d}": lambda d=d: arms.overlap(d) for d in ("threads", "greenlet")}
    found: dict[str, Any] = {"num_tokens": num_tokens, "gates": gates, "arms": {}}
    for name, times in bench.time_arms(runs).items():
        kernels = bench.clock.kernels(runs[name], bench.meet)
        ahead = bench.clock.device_ms(runs[name], rounds=min(5, bench.rounds), ahead_ms=AHEAD_MS, meet=bench.meet)
        found["arms"][name] = {
            **times.figure(),
            "host_ms": times.host,
            "device_ms": ahead,
            "busy_ms": kernels.busy_ms,
            "busy": kernels.busy_ms / kernels.span_ms,
            "launches": kernels.launches,
        }
    arms.close()
    shown = {
        n: f"{a['value']:.2f} ms, device {a['device_ms']:.2f}, busy {a['busy']:.0%}, {a['launches']} launches"
        for n, a in found["arms"].items()
    }
    bench.say(num_tokens, shown, gates)
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--tokens", type=numbers, default=[128, 32, 256, 64])
    with Bench.start(parser.parse_args()) as bench:
        config = bench.shape("qwen3-30b-a3b", bench.args.num_layers)
        all2all = bench.low_latency(config, bench.rows(max(bench.args.tokens)))
        model = random_model(config, all2all, bench.mesh.device)
        found = []
        for num_tokens in bench.args.tokens:
            found.append(run_size(num_tokens, bench, model))
            bench.write({"sizes": found})
        bench.clock.synchronize()
        all2all.close()


if __name__ == "__main__":
    main()
