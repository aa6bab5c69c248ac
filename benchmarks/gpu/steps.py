"""Whole prefill steps, as an engine runs them: embedding, 12 layers, and the head for the last token of each prompt.

    torchrun --nproc-per-node 2 -m benchmarks.gpu.steps --steps 2048x1024,32768x2048 --out FILE

Qwen3-30B-A3B shapes, random weights; a step is its tokens a rank and the length of its prompts (32768x2048 is 16
prompts of 2048); eager; the normal kernels of DeepEP at their best of a few SM counts for each arm. Throughput is
tokens a second and GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.prefill import check_gates, within
from benchmarks.gpu.setup import Arms, Bench, make_parser, numbers, prompts, random_model

STEPS = "16384x1024,32768x1024,8192x1024,4096x1024,2048x1024,32768x2048"


def steps(text: str) -> list[tuple[int, int]]:
    """`2048x1024,8192x1024` -> [(2048, 1024), (8192, 1024)]."""
    return [(int(tokens), int(length)) for tokens, _, length in (part.partition("x") for part in text.split(","))]


def run_step(num_tokens: int, length: int, bench: Bench, model: Any, all2all: Any) -> dict[str, Any]:
    rows, row_length = bench.rows(num_tokens), bench.length(length)
    batch, kv = prompts(model.config, rows, row_length, bench.mesh)
    last = torch.arange(row_length - 1, rows, row_length, device=bench.mesh.device)
    arms = Arms(model, batch, kv, bench.mesh, last_only=last)
    gates = check_gates(arms, all2all, bench)
    runs: dict[str, Callable[[], object]] = {}
    for num_sms in bench.args.sms:
        runs[f"whole {num_sms}"] = within(lambda n=num_sms: bench.partition(all2all, n), arms.whole)
        for mode, form in (("none", None), ("shared", "shared")):
            runs[f"overlap {num_sms} {mode}"] = within(
                lambda n=num_sms, f=form: bench.partition(all2all, n, f), lambda: arms.overlap("greenlet")
            )
    times = bench.time_arms(runs)
    arms.close()
    found: dict[str, Any] = {"num_tokens": num_tokens, "prompt_length": length, "gates": gates}
    for arm in ("whole", "overlap"):
        best = min((name for name in times if name.startswith(arm)), key=lambda name: times[name].median)
        rate = {k: num_tokens * 1e3 / v for k, v in times[best].figure().items() if k != "unit"}
        rate = {"value": rate["value"], "low": rate["high"], "high": rate["low"]}  # a long time is a low rate
        found[arm] = {"setting": best, "step": times[best].figure(), "host_ms": times[best].host, "tokens_per_s": rate}
    shown = {a: (found[a]["setting"], round(found[a]["step"]["value"], 2)) for a in ("whole", "overlap")}
    bench.say(num_tokens, length, shown)
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--steps", type=steps, default=STEPS)
    parser.add_argument("--sms", type=numbers, default=[16, 24, 64])
    with Bench.start(parser.parse_args()) as bench:
        config = bench.shape("qwen3-30b-a3b", bench.args.num_layers)
        all2all = bench.high_throughput(config, bench.rows(max(tokens for tokens, _ in bench.args.steps)))
        model = random_model(config, all2all, bench.mesh.device)
        found = []
        for num_tokens, length in bench.args.steps:
            found.append(run_step(num_tokens, length, bench, model, all2all))
            bench.write({"sizes": found})
            torch.cuda.empty_cache()
        all2all.close()


if __name__ == "__main__":
    main()
