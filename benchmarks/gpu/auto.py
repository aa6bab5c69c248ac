"""Does `auto` pick the faster arm on these GPUs?

    python -m benchmarks.gpu.auto --ranks 2 --out FILE

Qwen3-30B-A3B shapes, 6 layers, prefill over DeepEP's normal kernels and decode over its low-latency ones. Messages get
8 SMs in both arms, so that they take as long as over a network card: with all that NVLink can use, whole steps win at
every size, and nothing is to be decided. `calibrate` makes a profile at its own sizes; `calibrate` again, at sizes
between those, measures both arms: the truth, by another run. `auto`'s policy decides each of these from the profile
alone. Regret: the time of its arm over that of the better one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.auto import points
from benchmarks.gpu.setup import command
from benchmarks.gpu.summary import single
from launch.profile import Profile, read_profile

MODEL = [
    *("--shape", "qwen3-30b-a3b", "--num-layers", "6", "--max-num-tokens", "16384", "--max-num-seqs", "256"),
    *("--max-model-len", "4096", "--kv-cache-memory", "8GiB", "--prompt-tokens", "1024", "--driver", "greenlet"),
    *("--comm-sms", "8", "--whole-comm-sms", "8"),
]
SIZES = {"prefill": "384,768,1536,3072,6144,12288", "decode": "6,24,48,96,192"}
TINY = [
    *("--shape", "tiny", "--device", "cpu", "--max-num-tokens", "64", "--max-num-seqs", "16", "--prompt-tokens", "16"),
    *("--context", "4", "--max-rounds", "3"),
]
TINY_SIZES = {"prefill": "24,48", "decode": "3,6"}


def calibrate(num_ranks: int, model: list[str], budget: float, file: Path, *argv: str) -> Profile:
    """Run the command on all ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    options = [*model, "--out", str(file), "--budget", str(budget), *argv]
    print("+ launch calibrate", " ".join(options), flush=True)
    subprocess.run([*launcher, "-m", "launch", "calibrate", *options], check=True, timeout=4 * budget + 120)
    return read_profile(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--budget", type=float, default=75.0, help="seconds of each calibration")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    model, sizes, budget = (TINY, TINY_SIZES, 4.0) if args.rehearse else (MODEL, SIZES, args.budget)
    with tempfile.TemporaryDirectory() as directory:
        profile = calibrate(args.ranks, model, budget, Path(directory) / "profile.json")
        asked = [f"--{phase}-tokens={each}" for phase, each in sizes.items()]
        truth = calibrate(args.ranks, model, budget, Path(directory) / "truth.json", *asked, "--seed", "1")
    found = [{name: value for name, value in row.items() if name != "rate_mbit"} for row in points(0, profile, truth)]
    over_whole = [row[f"{row['choice']}_ms"][1] / row["whole_ms"][1] for row in found]
    for row in found:
        times = f"whole {row['whole_ms'][1]:8.2f} overlap {row['overlap_ms'][1]:8.2f}"
        print(f"{row['phase']:>8} {row['tokens']:>6} {times} {row['choice']:>8} {row['regret']:7.1%}", flush=True)
    regrets = [row["regret"] for row in found]
    figures = {
        "auto_regret_median": single(median(regrets), "1"),
        "auto_regret_max": single(max(regrets), "1"),
        "auto_over_whole_max": single(max(over_whole), "1"),
    }
    print({name: round(figure["value"], 4) for name, figure in figures.items()}, flush=True)
    told = {"command": command(), "points": found, "figures": figures}
    args.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
