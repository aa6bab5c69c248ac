"""The whole runtime on the GPUs, as a user starts it: `launch ab` with prefill and decode in one run.

    python -m benchmarks.gpu.engine --ranks 2 --out FILE

Qwen3-30B-A3B shapes, 6 layers, random weights: 8 prompts of 2048 tokens a rank and 8 tokens each, so large batches go
over DeepEP's normal kernels and small ones over its low-latency kernels. Experts are scripted, so that a random
router's near-ties (see `routing.py`) do not part the arms. `--comm-sms auto` measures in the first run
and remembers in the second. The reports, with a trace of one step of each arm, lie beside the result.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.setup import command
from launch.comm_sms import CACHE_VARIABLE

OPTIONS = [
    *("--shape", "qwen3-30b-a3b", "--num-layers", "6", "--max-num-tokens", "16384", "--max-model-len", "4096"),
    *("--workload", "synthetic:requests=16,prompt_tokens=2048,new_tokens=8", "--kv-cache-memory", "8GiB"),
    *("--rounds", "7", "--warmup", "2", "--driver", "greenlet", "--routing", "uniform"),
]
TINY = [
    *("--shape", "tiny", "--device", "cpu", "--max-num-tokens", "64", "--max-model-len", "64", "--rounds", "5"),
    *("--workload", "synthetic:requests=4,prompt_tokens=16,new_tokens=2", "--warmup", "1"),
    *("--dbo-prefill-token-threshold", "2", "--routing", "uniform"),
]


def run_ab(options: list[str], num_ranks: int, report: Path, cache: Path) -> dict[str, Any]:
    """One run: its report, and what it said of the SMs."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    done = subprocess.run(
        [*launcher, "-m", "launch", "ab", *options, "--comm-sms", "auto", "--report", str(report)],
        env={**os.environ, CACHE_VARIABLE: str(cache)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    print(done.stdout[-6000:], done.stderr[-6000:], flush=True)
    said = [re.sub(r"\S*/(?=comm_sms)", "", line) for line in re.findall(r"comm-sms auto .*", done.stderr)]
    found = json.loads((report / "ab.json").read_text()) if (report / "ab.json").exists() else None
    return {"exit_code": done.returncode, "passed": done.returncode == 0, "comm_sms": said, "report": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    options, cache = TINY if args.rehearse else OPTIONS, args.out.parent / "cache"
    runs = [run_ab(options, args.ranks, args.out.parent / f"ab-{number}", cache) for number in (1, 2)]
    args.out.write_text(json.dumps({"command": command(), "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
