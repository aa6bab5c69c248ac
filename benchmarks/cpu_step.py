"""Tokens per second of prefill and decode on CPU, ours on 1 and 2 ranks against transformers' `generate`.

    python benchmarks/cpu_step.py MODEL_DIR [--out RESULT.json]

16 prompts of fixed lengths from 20 to 200 tokens and 64 new tokens each, as one batch, greedy, float32, all threads
of this machine in every arm. Every arm runs in processes of its own, in both orders (A B, then B A). transformers
takes its fastest experts implementation, found by trying them all. Prefill is the time to the first token of all
prompts; decode is the other 63 steps. Peak memory is the kernel's high-water mark of each rank's process.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from moe.all2all.registry import make_all2all  # noqa: E402
from moe.batch import ForwardBatch  # noqa: E402
from moe.config import read_config  # noqa: E402
from moe.kv_cache import KVCache  # noqa: E402
from moe.models import load_model  # noqa: E402

NUM_NEW, BLOCK = 64, 16
LENGTHS = [int(n) for n in np.linspace(20, 200, 16).round()]
ARMS = ("ours-1", "transformers", "ours-2")


def prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


# ------------------------------------------------------------------------------------------------------------ ours


def run_ours(path: Path) -> dict[str, Any]:
    """One rank; several meet in torchrun's environment."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        dist.init_process_group("gloo")
    group = dist.group.WORLD if size > 1 else None
    config = read_config(path)
    mine = prompts(config.vocab_size)[rank::size]
    counts = tuple(sum(LENGTHS[r::size]) for r in range(size))
    all2all = make_all2all(
        "auto", group=group, device=torch.device("cpu"), config=config, max_tokens_per_rank=max(counts)
    )
    model = load_model(path, all2all=all2all, dtype="float32", progress=False)
    num_blocks = -(-(max(LENGTHS) + NUM_NEW) // BLOCK)
    kv = KVCache(model.config, num_blocks * len(mine), BLOCK, torch.float32)
    tables = torch.arange(num_blocks * len(mine), dtype=torch.int32).view(len(mine), num_blocks)

    def step(new: list[list[int]], computed: np.ndarray, counts: tuple[int, ...]) -> list[int]:
        lens = np.array([len(ids) for ids in new], np.int32)
        positions = [torch.arange(c, c + n) for c, n in zip(computed, lens, strict=True)]
        batch = ForwardBatch(
            input_ids=torch.tensor([token for ids in new for token in ids]),
            positions=torch.cat(positions),
            slot_mapping=torch.cat([r * num_blocks * BLOCK + p for r, p in enumerate(positions)]),
            block_tables=tables,
            query_lens=lens,
            seq_lens=computed + lens,
            num_tokens=int(lens.sum()),
            num_tokens_per_rank=counts,
        )
        rows = model(batch, kv)[torch.as_tensor(np.cumsum(lens) - 1)]
        return model.compute_logits(rows).argmax(-1).tolist()

    def generate(num_new: int) -> tuple[float, float, list[list[int]]]:
        if group is not None:
            dist.barrier(group)
        start = time.perf_counter()
        computed = np.array([len(ids) for ids in mine], np.int32)
        out = [[token] for token in step(mine, np.zeros_like(computed), counts)]
        first = time.perf_counter()
        for _ in range(num_new - 1):
            fed = [ids[-1:] for ids in out]
            per_rank = tuple(len(LENGTHS[r::size]) for r in range(size))
            for ids, token in zip(out, step(fed, computed, per_rank), strict=True):
                ids.append(token)
            computed = computed + 1
        return first - start, time.perf_counter() - first, out

    generate(4)
    prefill_s, decode_s, tokens = generate(NUM_NEW)
    expert_share = len(range(rank, config.num_experts, size)) / config.num_experts
    weights = sum(f.stat().st_size for f in path.glob("*.safetensors"))
    experts = 3 * 4 * config.num_layers * config.num_experts * config.hidden * config.expert_width
    held = weights - experts * (1 - expert_share) + kv.num_blocks * kv.bytes_per_block(config, BLOCK, torch.float32)
    result = {
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "tokens": {rank + size * i: ids for i, ids in enumerate(tokens)},
        "peak_bytes": peak_bytes(),
        "allowed_bytes": int(held * 1.3) + 500 * 2**20,
    }
    results: list[Any] = [None] * size
    if group is not None:
        dist.all_gather_object(results, result)
        dist.destroy_process_group()
    else:
        results = [result]
    return {
        "rank": rank,
        "prefill_s": max(r["prefill_s"] for r in results),
        "decode_s": max(r["decode_s"] for r in results),
        "tokens": [ids for _, ids in sorted(item for r in results for item in r["tokens"].items())],
        "peak_bytes": [r["peak_bytes"] for r in results],
        "allowed_bytes": [r["allowed_bytes"] for r in results],
    }


# ---------------------------------------------------------------------------------------------------- transformers


def run_transformers(path: Path, tried: dict[str, dict[str, float]] | None = None) -> dict[str, Any]:
    """`tried`: what an earlier run measured of the experts implementations; None tries them all."""
    import transformers
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = prompts(model.config.vocab_size)

    def generate(prompts: list[list[int]], num_new: int) -> tuple[float, list[list[int]]]:
        width = max(map(len, prompts))
        padded = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        start = time.perf_counter()
        out = model.generate(
            padded,
            attention_mask=mask,
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        return time.perf_counter() - start, out[:, width:].tolist()

    decode, prefill = ({}, {}) if tried is None else (tried["decode_8_steps_s"], tried["prefill_s"])
    for name in () if tried else ("eager", *ALL_EXPERTS_FUNCTIONS.valid_keys()):
        with contextlib.suppress(Exception):  # most of them need a GPU
            model.set_experts_implementation(name)
            short = [p[:4] for p in ids]  # one of them copies the weights of every chosen expert for every token
            generate(short, 2)
            decode[name] = generate(short, 9)[0] - generate(short, 1)[0]
            if name != "batched_mm":
                prefill[name] = generate(ids, 1)[0]
    best_prefill, best_decode = min(prefill, key=prefill.__getitem__), min(decode, key=decode.__getitem__)
    model.set_experts_implementation(best_prefill)
    prefill_s = min(generate(ids, 1)[0] for _ in range(2))
    first_s = prefill_s
    if best_decode != best_prefill and best_decode != "batched_mm":
        model.set_experts_implementation(best_decode)
        first_s = generate(ids, 1)[0]
    total_s, tokens = generate(ids, NUM_NEW)
    return {
        "prefill_s": prefill_s,
        "decode_s": total_s - first_s,
        "tokens": tokens,
        "peak_bytes": [peak_bytes()],
        "tried": {"decode_8_steps_s": decode, "prefill_s": prefill},
    }


# ------------------------------------------------------------------------------------------------------- comparison


def run_arm(arm: str, path: Path, threads: int, tried: str) -> dict[str, Any]:
    ranks = 2 if arm == "ours-2" else 1
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if ranks == 2 else []
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, threads // ranks)), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, *launcher, __file__, str(path), "--arm", arm, "--tried", tried],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=1200,
    )
    return json.loads(done.stdout.splitlines()[-1])


def report(results: dict[str, list[dict[str, Any]]]) -> None:
    num_prompt, num_decode = sum(LENGTHS), len(LENGTHS) * (NUM_NEW - 1)
    print(f"{'arm':14} {'prefill tok/s':>22} {'decode tok/s':>22}   peak memory per rank (allowed)")
    for arm, runs in results.items():
        prefill = [num_prompt / run["prefill_s"] for run in runs]
        decode = [num_decode / run["decode_s"] for run in runs]
        allowed = runs[0].get("allowed_bytes", [None])
        peaks = ", ".join(
            f"{p / 2**20:.0f}" + (f" ({a / 2**20:.0f}) MiB" if a else " MiB")
            for p, a in zip(runs[0]["peak_bytes"], allowed, strict=True)
        )
        print(f"{arm:14} {spread(prefill):>22} {spread(decode):>22}   {peaks}")
    ours, theirs = results["ours-1"], results["transformers"]
    for what in ("prefill_s", "decode_s"):
        ratios = [t[what] / o[what] for t, o in zip(theirs, ours, strict=True)]
        print(f"{what.removesuffix('_s')}: ours on one rank is {spread(ratios, 2)} times transformers")
    for arm in ("ours-1", "ours-2"):
        equal = sum(a == b for a, b in zip(results[arm][0]["tokens"], theirs[0]["tokens"], strict=True))
        print(f"{arm}: {equal} of {len(LENGTHS)} answers equal transformers' token for token")
    print("transformers' experts implementations, s:", theirs[0]["tried"])


def spread(values: list[float], digits: int = 1) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--arm", choices=ARMS, help="run this arm alone and print JSON (used by the comparison)")
    parser.add_argument("--tried", default="null", help="with --arm transformers: what was tried already, as JSON")
    parser.add_argument("--rounds", type=int, default=2, help="each in the opposite order of the one before")
    parser.add_argument("--out", type=Path, help="also write everything measured to this JSON file")
    options = parser.parse_args()
    if options.arm:
        tried = json.loads(options.tried)
        result = run_transformers(options.model, tried) if options.arm == "transformers" else run_ours(options.model)
        if result.get("rank", 0) == 0:
            print(json.dumps(result))
        return
    threads = len(os.sched_getaffinity(0))
    host = f"{platform.processor() or platform.machine()}, {threads} cores, torch {torch.__version__}"
    print(f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, {host}, load {os.getloadavg()[0]:.1f}")
    results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for number in range(options.rounds):
        for arm in ARMS if number % 2 == 0 else ARMS[::-1]:
            print(f"round {number + 1}: {arm} ...", file=sys.stderr, flush=True)
            tried = json.dumps(results["transformers"][0]["tried"] if results["transformers"] else None)
            results[arm].append(run_arm(arm, options.model, threads, tried))
            run = results[arm][-1]
            print(f"  prefill {run['prefill_s']:.2f} s, decode {run['decode_s']:.2f} s", file=sys.stderr, flush=True)
    report(results)
    if options.out:
        about = {
            "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
            "command": f"python benchmarks/cpu_step.py MODEL_DIR --rounds {options.rounds}",
            "host": host,
        }
        options.out.write_text(json.dumps({**about, "lengths": LENGTHS, "results": results}))


if __name__ == "__main__":
    main()
