"""All GPU tests and benchmarks, part by part, within limits: `scripts/gpu_suite --help`.

Rented GPUs come for minutes, so: correctness on the smallest shape first, then the figures most in doubt; a part that
fails or hangs costs its own time only (stacks of all its processes go into its log, then they are killed by their
ids); after each part everything found so far is summed up and, where $OUT names a directory, packed into it. Parts can
be run in several calls, on several machines, and merged.

    scripts/gpu_suite --plan                     what there is, and how long it takes
    scripts/gpu_suite --call 1                   what fits into one lease; 2, 3 and 4 are the others
    scripts/gpu_suite steps decode               these parts
    scripts/gpu_suite --rehearse                 every line on the CPU, with tiny shapes
    scripts/gpu_suite --merge a.tar.gz b.tar.gz --into benchmarks/results/2026-11-30-h200x2
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import environment, summary
from tests.ranks import kill_tree, process_tree

ROOT = Path(__file__).resolve().parents[2]
STACKS_S = 3.0  # what processes get to write their stacks
REHEARSAL_LIMIT_S = 600.0
PACK = "results.tar.gz"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One command. `module` runs on all ranks, `ranks=0`: without torchrun."""

    name: str
    call: int
    seconds: int  # expected
    module: str
    arguments: str = ""
    ranks: int | None = None  # None = as many as there are GPUs

    @property
    def limit_s(self) -> float:
        """When it counts as hung."""
        return 1.5 * self.seconds + 30

    def argv(self, num_ranks: int, out: Path, *, rehearse: bool) -> list[str]:
        """The command line."""
        ranks = num_ranks if self.ranks is None else self.ranks
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
        arguments = self.arguments.format(ranks=num_ranks).split()
        arguments = [part.replace("_", " ") if "+" in part else part for part in arguments]
        if self.module == "pytest":
            return [sys.executable, "-m", "pytest", *arguments, *(["--collect-only"] if rehearse else [])]
        arguments += ["--out", str(out / f"{self.name}.json"), *(["--rehearse"] if rehearse else [])]
        return [sys.executable, *launcher, "-m", self.module, *arguments]


CONFORMANCE = "tests.moe.gpu.conformance"
PARTS = (
    Part(
        name="first", call=1, seconds=20, module=CONFORMANCE,
        arguments="deepep_ht deepep_ll torch --checks self-test+smallest_case",
    ),
    Part(
        name="kernels", call=1, seconds=45, module="pytest", arguments="-q -m gpu tests --ignore=tests/dbo/graphs",
        ranks=0,
    ),
    Part(name="graphs-one", call=1, seconds=40, module="pytest", arguments="-q -m gpu tests/dbo/graphs", ranks=0),
    Part(
        name="prefill", call=1, seconds=95, module="benchmarks.gpu.prefill",
        arguments="--tokens 16384,8192 --sms 8,12,16,24,48,64 --sustain",
    ),
    Part(name="graphs-decode", call=1, seconds=40, module="benchmarks.gpu.graphs", arguments="decode"),
    Part(
        name="graphs-prefill", call=1, seconds=140, module="benchmarks.gpu.graphs",
        arguments="prefill --sms 8,12,16,24,48,64 --sustain",
    ),
    Part(name="steps", call=1, seconds=80, module="benchmarks.gpu.steps"),
    Part(name="decode", call=1, seconds=40, module="benchmarks.gpu.decode"),
    Part(name="graphs-steps", call=2, seconds=90, module="benchmarks.gpu.graphs", arguments="steps --sms 16,24,64"),
    Part(name="replays", call=2, seconds=75, module="benchmarks.gpu.replays"),
    Part(name="offload", call=2, seconds=50, module="benchmarks.gpu.offload"),
    Part(name="engine", call=2, seconds=65, module="benchmarks.gpu.engine", arguments="--ranks {ranks}", ranks=0),
    Part(name="routing", call=2, seconds=25, module="benchmarks.gpu.routing"),
    Part(
        name="failures", call=2, seconds=100, module="pytest",
        arguments="-q -m multigpu tests/launch/test_gpu_failures.py", ranks=0,
    ),
    Part(
        name="prefill-sizes", call=3, seconds=80, module="benchmarks.gpu.prefill",
        arguments="--tokens 4096,2048,32768 --sms 8,16,24,32,48",
    ),
    Part(
        name="prefill-deepseek", call=3, seconds=110, module="benchmarks.gpu.prefill",
        arguments="--shape deepseek-v3 --num-layers 2 --tokens 8192,16384,4096,2048,32768 --sms 8,16,24 --rounds 5",
    ),
    Part(name="soak", call=3, seconds=200, module="benchmarks.gpu.soak", arguments="--seconds 180"),
    Part(
        name="conformance-options", call=3, seconds=60, module=CONFORMANCE,
        arguments="deepep_ht:fp8 deepep_ht:sync deepep_ll:fp8 --rounds 200 --seconds 10",
    ),
    Part(
        name="conformance-local", call=3, seconds=25, module=CONFORMANCE,
        arguments="local --rounds 200 --seconds 10", ranks=1,
    ),
    Part(name="auto", call=4, seconds=190, module="benchmarks.gpu.auto", arguments="--ranks {ranks}", ranks=0),
    Part(
        name="conformance", call=4, seconds=110, module=CONFORMANCE,
        arguments="deepep_ht deepep_ll torch deepep --rounds 200 --seconds 10",
    ),
    Part(name="demo", call=4, seconds=210, module="benchmarks.gpu.demo", arguments="--ranks {ranks}", ranks=0),
)  # fmt: skip


class Suite:
    """One call: some parts, one after another, and what comes of them in `out`."""

    def __init__(self, out: Path, num_ranks: int, *, rehearse: bool, budget_s: float):
        self._out, self._num_ranks, self._rehearse, self._budget_s = out, num_ranks, rehearse, budget_s
        self._started = time.monotonic()
        (out / "log").mkdir(parents=True, exist_ok=True)
        (out / "environment.txt").write_text("\n".join(environment.describe()) + "\n")

    def run(self, parts: Sequence[Part]) -> bool:
        """Whether all of them were run and passed."""
        left_out = []
        good = True
        for part in parts:
            if time.monotonic() - self._started + part.seconds > self._budget_s and not self._rehearse:
                left_out.append(part.name)
                continue
            status, seconds = self._run_part(part)
            good &= status == "passed"
            print(f"=== {part.name}: {status} ({seconds:.0f} s, expected {part.seconds})", flush=True)
            note_status(self._out, {part.name: {"status": status, "seconds": round(seconds, 1)}})
            summary.write(self._out)
            pack(self._out)
        if left_out:
            print(f"no time was left for these: scripts/gpu_suite {' '.join(left_out)}")
        return good and not left_out

    def _run_part(self, part: Part) -> tuple[str, float]:
        argv = part.argv(self._num_ranks, self._out, rehearse=self._rehearse)
        print(f"=== {part.name}: {' '.join(argv[1:])}", flush=True)
        result = self._out / f"{part.name}.json"
        result.unlink(missing_ok=True)
        variables = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
        if self._rehearse:
            variables |= {"TRITON_INTERPRET": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
        start = time.monotonic()
        process = subprocess.Popen(
            argv, cwd=ROOT, env={**os.environ, **variables}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        reader = threading.Thread(target=_copy, args=(process.stdout, self._out / "log" / f"{part.name}.txt"))
        reader.start()
        limit_s = REHEARSAL_LIMIT_S if self._rehearse else part.limit_s
        try:
            process.wait(limit_s)
            status = "passed" if process.returncode == 0 else f"failed, exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            _write_stacks(process)
            status = f"hung, killed after {limit_s:.0f} s"
        kill_tree(process)
        reader.join(STACKS_S)
        if status == "passed" and result.exists() and _gate_failed(json.loads(result.read_text())):
            status = "a gate failed"
        return status, time.monotonic() - start


def _copy(lines: Any, log: Path) -> None:
    """What a part says goes to the terminal and into its log."""
    with lines, log.open("wb") as kept:
        for line in lines:
            kept.write(line)
            sys.stdout.buffer.write(line)
            sys.stdout.flush()


def _write_stacks(process: subprocess.Popen[bytes]) -> None:
    """Have the ranks, children first, say what each of their threads is doing; they end by it."""
    for pid in reversed(process_tree(process.pid)[1:]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGABRT)
    time.sleep(STACKS_S)


def _gate_failed(found: Any) -> bool:
    """Whether anything in a result says that it did not pass."""
    if isinstance(found, dict):
        return found.get("passed") is False or any(map(_gate_failed, found.values()))
    return isinstance(found, list) and any(map(_gate_failed, found))


def note_status(out: Path, news: dict[str, Any]) -> None:
    """Add to what is known of the parts."""
    file = out / "status.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**known, **news}, indent=1) + "\n")


def pack(out: Path) -> None:
    """A few small files in $OUT, if that is set."""
    if not (target := os.environ.get("OUT")):
        return
    directory = Path(target)
    directory.mkdir(parents=True, exist_ok=True)
    with tarfile.open(directory / PACK, "w:gz") as packed:
        packed.add(out, arcname=out.name)
    for name in ("summary.json", "figures.md", "status.json"):
        shutil.copyfile(out / name, directory / name)


def merge(sources: Sequence[Path], out: Path) -> None:
    """Results of several calls, packed or not, into one directory; of a part that is in several the last one counts."""
    out.mkdir(parents=True, exist_ok=True)
    for source in sources:
        with tempfile.TemporaryDirectory() as unpacked:
            if source.is_file():
                with tarfile.open(source) as packed:
                    if hasattr(tarfile, "data_filter"):  # Python 3.11.4 and later
                        packed.extraction_filter = tarfile.data_filter
                    packed.extractall(unpacked)
                (directory,) = Path(unpacked).iterdir()
            else:
                directory = source
            status = directory / "status.json"
            note_status(out, json.loads(status.read_text()) if status.exists() else {})
            for file in sorted(directory.iterdir()):
                if file.is_file() and file.name not in ("status.json", "summary.json", "figures.md"):
                    shutil.copyfile(file, out / file.name)
    summary.write(out)


def describe_plan(parts: Sequence[Part]) -> str:
    """The parts, in order, with the seconds that each is expected to take."""
    lines = [f"{part.call}  {part.name:20} {part.seconds:4} s  {part.module} {part.arguments}" for part in parts]
    calls = sorted({part.call for part in parts})
    sums = [f"call {call}: {sum(part.seconds for part in parts if part.call == call)} s" for call in calls]
    return "\n".join([*lines, ", ".join(sums)])


def default_out(num_ranks: int, *, rehearse: bool) -> Path:
    """A directory of today."""
    if rehearse:
        return ROOT / ".cache" / "gpu_rehearsal"
    gpu = torch.cuda.get_device_name().split()[-1].lower()
    return ROOT / "benchmarks" / "results" / f"{datetime.date.today()}-{gpu}x{num_ranks}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_suite", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(names)}; all if none is named")
    parser.add_argument("--call", type=int, choices=sorted({part.call for part in PARTS}))
    parser.add_argument("--ranks", type=int, help="GPUs to use; all there are if not given")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no part that would end later")
    parser.add_argument("--into", type=Path, help="where results go")
    parser.add_argument("--plan", action="store_true", help="only say what would run")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="RESULTS")
    args = parser.parse_args()
    for name in args.parts:
        if name not in names:
            parser.error(f"{name} is none of {', '.join(names)}")
    if args.merge:
        merge(args.merge, args.into or parser.error("--merge needs --into"))
        return 0
    parts = [part for part in PARTS if args.call in (None, part.call) and (not args.parts or part.name in args.parts)]
    print(describe_plan(parts), flush=True)
    if args.plan:
        return 0
    num_ranks = args.ranks or (2 if args.rehearse else torch.cuda.device_count())
    out = args.into or default_out(num_ranks, rehearse=args.rehearse)
    suite = Suite(out, num_ranks, rehearse=args.rehearse, budget_s=args.seconds)
    return 0 if suite.run(parts) else 1


if __name__ == "__main__":
    sys.exit(main())
