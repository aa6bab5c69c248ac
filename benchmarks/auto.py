"""Does `auto` pick the faster arm, and does `plan` predict links it has not seen? On a throttled real network, no GPU.

    python benchmarks/auto.py [--rates 200,400,800] [--budget 75] [--short] [--out FILE.json]

Two ranks, each in a network namespace with a core of its own (`scripts/slow_link`; needs root, iproute2 and an idle
machine). For each rate of the link, in Mbit/s:

- `calibrate` makes a profile, at its own sizes (powers of 2);
- `calibrate` again, at other sizes between and beyond those, measures both arms: the truth, by another run;
- `auto`'s policy decides each of these from the profile alone. Regret: the time of its arm over that of the better one.

Then `plan`: parts measured at one rate (the middle one) predict the truth at the others, whole and overlap. The links'
payload bandwidths are the nominal ones, times the share of its own that the calibrated link reached.

Goals: regret <= 3% in the median and <= 10% at worst; predictions within 15% in the median. Exit code 1 if one is
missed; the figures are written either way.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dbo.agreement import WANTS, Reason, Vote, decide
from dbo.config import DBOConfig
from dbo.policy import Auto
from launch.fit import measured_link
from launch.predict import Cluster, Link, Predictor, Shape
from launch.profile import PHASES, Phase, Profile, read_profile

ROOT = Path(__file__).parent.parent
GOALS = {"regret_median": 0.03, "regret_worst": 0.10, "plan_error_median": 0.15}
MODEL = ["--shape", "link", "--num-layers", "2", "--max-num-tokens", "1024", "--max-num-seqs", "64"]
CONTEXT = ["--context", "16", "--prompt-tokens", "256"]
# A bucket of 128 KB, the script's default, would let messages of 60 tokens through as if there were no limit.
ENVIRONMENT = {"PYTHON": sys.executable, "LINK_BURST": "32kb"}
TRUTH: dict[Phase, tuple[int, ...]] = {"prefill": (48, 96, 192, 384, 640, 896), "decode": (6, 12, 24, 48)}
SHORT: dict[Phase, tuple[int, ...]] = {"prefill": (48, 192), "decode": (6, 24)}


def calibrate(rate: int, budget: float, file: Path, *argv: str) -> Profile:
    """Run the command over a link of so many Mbit/s."""
    command = [str(ROOT / "scripts/slow_link"), f"{rate}mbit", "calibrate", *MODEL, *CONTEXT, "--out", str(file),
               "--budget", str(budget), "--device", "cpu", *argv]  # fmt: skip
    print("+", " ".join(command[1:]), flush=True)
    subprocess.run(command, check=True, env=os.environ | ENVIRONMENT, stdout=subprocess.DEVNULL)
    return read_profile(file)


def picks_overlap(profile: Profile, phase: Phase, num_tokens: int) -> bool:
    """What `auto` does with so many tokens on both ranks."""
    config = DBOConfig(overlap="auto")
    policy = Auto(config, profile.step_costs())
    vote = Vote(num_tokens=num_tokens, uniform_decode=phase == "decode")
    votes = {name: (int(getattr(vote, name)),) * 2 for name in Vote.__dataclass_fields__}
    plan = decide({**votes, WANTS: (int(policy.vote(vote)),) * 2}, config, policy)
    if plan.reason not in (Reason.SPLIT, Reason.NOT_PROFITABLE):
        raise RuntimeError(plan.explain())
    return plan.should_ubatch


def points(rate: int, profile: Profile, truth: Profile) -> list[dict[str, Any]]:
    """Every measured size: both arms, the choice, its regret."""
    found = []
    for phase in PHASES:
        measured = (truth.steps or {})[phase]
        for n, whole, overlap in zip(measured.whole.tokens, measured.whole.costs, measured.overlap.costs, strict=True):
            choice = "overlap" if picks_overlap(profile, phase, n) else "whole"
            times = {"whole": whole.median, "overlap": overlap.median}
            found.append(
                {
                    "rate_mbit": rate,
                    "phase": phase,
                    "tokens": n,
                    "whole_ms": [whole.low, whole.median, whole.high],
                    "overlap_ms": [overlap.low, overlap.median, overlap.high],
                    "rounds": min(whole.n, overlap.n),
                    "choice": choice,
                    "regret": times[choice] / min(times.values()) - 1,
                }
            )
    return found


def plan_errors(base_rate: int, base: Profile, found: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], Link]:
    """Predictions for the other rates, from parts measured at one."""
    shape = Shape.of(base.setup.model)
    link = measured_link(base.layer, shape, 2)
    if link is None:
        raise RuntimeError("two ranks measured no messages")
    errors = []
    for point in found:
        if point["rate_mbit"] == base_rate:
            continue
        other = Link(
            name=f"{point['rate_mbit']} Mbit/s",
            bandwidth_gbs=link.bandwidth_gbs * point["rate_mbit"] / base_rate,
            latency_us=link.latency_us,
        )
        cluster = Cluster(ep=2, gpus_per_node=1, link=other, node_link=other)
        predictor = Predictor(shape=shape, costs=base.layer, measured_ranks=2, cluster=cluster)
        predicted = {
            "whole": predictor.whole_ms(point["phase"], point["tokens"]),
            "overlap": predictor.overlap_ms(point["phase"], point["tokens"]),
        }
        for arm, ms in predicted.items():
            measured = point[f"{arm}_ms"][1]
            errors.append(
                {**{k: point[k] for k in ("rate_mbit", "phase", "tokens")}, "arm": arm, "predicted_ms": ms,
                 "measured_ms": measured, "error": ms / measured - 1}
            )  # fmt: skip
    return errors, link


def environment() -> dict[str, Any]:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": {"cores": os.cpu_count(), "processor": names[0] if names else "", "load_before": os.getloadavg()[0]},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "kernel": platform.release()},
        "command": ("python benchmarks/auto.py " + " ".join(sys.argv[1:])).strip(),
    }


def table(found: list[dict[str, Any]]) -> str:
    lines = [f"{'Mbit/s':>7} {'phase':>8} {'tokens':>6} {'whole ms':>9} {'overlap ms':>10} {'choice':>8} {'regret':>7}"]
    lines += [
        f"{p['rate_mbit']:>7} {p['phase']:>8} {p['tokens']:>6} {p['whole_ms'][1]:>9.1f} {p['overlap_ms'][1]:>10.1f} "
        f"{p['choice']:>8} {p['regret']:>7.1%}"
        for p in found
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="200,400,800")
    parser.add_argument("--budget", type=float, default=85.0, help="seconds of a calibration; the truth takes as long")
    parser.add_argument("--short", action="store_true", help="few sizes, quickly: to see that it runs")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/auto_slow_link.json")
    options = parser.parse_args()
    rates = [int(rate) for rate in options.rates.split(",")]
    budget, sizes = (15.0, SHORT) if options.short else (options.budget, TRUTH)
    result: dict[str, Any] = {**environment(), "goals": GOALS}
    found: list[dict[str, Any]] = []
    profiles: dict[int, Profile] = {}
    with tempfile.TemporaryDirectory() as directory:
        for rate in rates:
            file = Path(directory) / f"{rate}.json"
            limits = ["--prefill-tokens", "32,256"] if options.short else []
            profiles[rate] = calibrate(rate, budget, file, *limits)
            asked = [f"--{phase}-tokens={','.join(map(str, sizes[phase]))}" for phase in PHASES]
            truth = calibrate(rate, budget, Path(directory) / f"{rate}-truth.json", *asked, "--seed", "1")
            found += points(rate, profiles[rate], truth)
    base = rates[len(rates) // 2]
    errors, link = plan_errors(base, profiles[base], found)
    figures = {
        "regret_median": median(p["regret"] for p in found),
        "regret_worst": max(p["regret"] for p in found),
    }
    if errors:
        figures["plan_error_median"] = median(abs(e["error"]) for e in errors)
        figures["plan_error_worst"] = max(abs(e["error"]) for e in errors)
    result |= {
        "figures": figures,
        "holds": {name: figures[name] <= goal for name, goal in GOALS.items() if name in figures},
        "num_points": len(found),
        "calibrated_sizes": {
            str(rate): {phase: list((made.steps or {})[phase].whole.tokens) for phase in PHASES}
            for rate, made in profiles.items()
        },
        "link": {"rate_mbit": base, "payload_gbs": link.bandwidth_gbs, "latency_us": link.latency_us},
        "sm_tax": {str(rate): made.layer.sm_tax for rate, made in profiles.items()},
        "points": found,
        "predictions": errors,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(found))
    for name, value in figures.items():
        goal = f"   goal {GOALS[name]:.0%}   {'ok' if value <= GOALS[name] else 'MISSED'}" if name in GOALS else ""
        print(f"{name:18} {value:7.1%}{goal}")
    print(options.out)
    return 0 if all(result["holds"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
