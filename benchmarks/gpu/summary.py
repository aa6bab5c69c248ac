"""What the GPU suite found, in one place: reads the parts' files in a directory and writes `summary.json` and
`figures.md`.

    python -m benchmarks.gpu.summary DIRECTORY

`summary.json` maps the name of a figure to {value, low, high, unit, command}; low and high are the 10th and 90th
percentile of the rounds where the figure is a time, and follow from those of its parts where it is a ratio. A file
that is not there leaves its figures out, and so does a size whose gate failed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moe.all2all.deepep_ht import MAX_SMS

Figure = dict[str, Any]
Found = dict[str, Any]

NIC_SMS = "8"


def single(value: float, unit: str, low: float | None = None, high: float | None = None) -> Figure:
    return {
        "value": value, "low": value if low is None else low, "high": value if high is None else high, "unit": unit,
    }  # fmt: skip


def ratio(over: Figure, under: Figure) -> Figure:
    return single(over["value"] / under["value"], "1", over["low"] / under["high"], over["high"] / under["low"])


def plain(measured: Found) -> Figure:
    return {key: measured[key] for key in ("value", "low", "high", "unit")}


def best_overlap(arms: dict[str, Figure], driver: str = "") -> Figure:
    """The fastest form of overlap, of one driver or of all."""
    return min((arm for name, arm in arms.items() if name.startswith(f"overlap_{driver}")), key=lambda a: a["value"])


def passed(sizes: list[Found]) -> Iterator[Found]:
    """Sizes that may be quoted."""
    return (size for size in sizes if size["gates"].get("passed", True))


def of_prefill(found: Found) -> dict[str, Figure]:
    prefix = "" if found.get("shape", "qwen3-30b-a3b") == "qwen3-30b-a3b" else found["shape"].replace("-", "_") + "_"
    figures: dict[str, Figure] = {}
    for size in passed(found["sizes"]):
        n, by_sms, path = size["num_tokens"], size["sms"], size["expert_path"]
        figures[f"expert_path_ratio_{n}"] = single(path["ratio"], "1", path.get("low"), path.get("high"))
        if NIC_SMS in by_sms:
            figures |= of_slow_link(n, by_sms[NIC_SMS], size["compute_whole"])
        figures |= of_fast_link(n, by_sms)
        figures |= of_sustained(n, size.get("sustained", {}))
    return {prefix + name: figure for name, figure in figures.items()}


def of_slow_link(n: int, arms: dict[str, Figure], compute_whole: Figure) -> dict[str, Figure]:
    """At so few SMs for messages that they are as slow as a network card."""
    whole, overlap = arms["whole"], best_overlap(arms)
    figures = {
        f"nic_class_ms_per_layer_whole_{n}": plain(whole),
        f"nic_class_ms_per_layer_overlap_{n}": plain(overlap),
        f"nic_class_speedup_{n}": ratio(whole, overlap),
    }
    for name, compute in (("efficiency", compute_whole), ("split_efficiency", arms["compute_split"])):
        limit = max(compute["value"], arms["comm"]["value"])
        if whole["value"] < 1.1 * limit:
            continue  # hardly anything to gain: the quotient would be noise
        gain = [(whole["value"] - overlap[k]) / (whole["value"] - limit) for k in ("value", "high", "low")]
        figures[f"nic_class_{name}_{n}"] = single(gain[0], "1", gain[1], gain[2])
    if "apart" in arms:
        figures[f"nic_class_speedup_apart_{n}"] = ratio(whole, arms["apart"])
    if any(arm.startswith("overlap_four") for arm in arms):
        figures[f"nic_class_speedup_two_ubatches_{n}"] = ratio(whole, best_overlap(arms, "greenlet"))
        figures[f"nic_class_speedup_four_ubatches_{n}"] = ratio(whole, best_overlap(arms, "four"))
    if "bare" in arms:
        figures["off_overhead" if n == 16384 else f"off_overhead_{n}"] = ratio(whole, arms["bare"])
    for driver, name in (("greenlet", ""), ("threads", "_threads"), ("free", "_threads_free")):
        if any(arm.startswith(f"overlap_{driver}") for arm in arms):
            arm = best_overlap(arms, driver)
            for host, which in (("host", ""), ("host_quiet", "_quiet")):  # quiet: no other program disturbed the call
                if host in arm:
                    figures[f"host_ms_per_layer_overlap_{n}{name}{which}"] = single(
                        arm[host], "ms", arm.get(f"{host}_low"), arm.get(f"{host}_high")
                    )
    return figures


def of_fast_link(n: int, by_sms: dict[str, dict[str, Figure]]) -> dict[str, Figure]:
    """Each arm at its best number of SMs, and the ceiling: whole / max(split compute, messages) where overlap ran."""
    best = min(by_sms, key=lambda num_sms: by_sms[num_sms]["whole"]["value"])
    whole = by_sms[best]["whole"]
    at = min(by_sms, key=lambda num_sms: best_overlap(by_sms[num_sms])["value"])
    overlap, alone = best_overlap(by_sms[at]), by_sms[at]
    figures = {f"ms_per_layer_whole_{n}": plain(whole), f"ms_per_layer_overlap_{n}": plain(overlap)}
    if best == max(by_sms, key=int) and len(by_sms) > 1 and int(best) < MAX_SMS:
        return figures  # more SMs might be better still for whole, and the comparison unfair
    ceiling = whole["value"] / max(alone["compute_split"]["value"], alone["comm"]["value"])
    speedup = ratio(whole, overlap)
    share = single(speedup["value"] / ceiling, "1", speedup["low"] / ceiling, speedup["high"] / ceiling)
    apart = [arms["apart"] for arms in by_sms.values() if "apart" in arms]
    if apart:
        figures[f"nvlink_speedup_apart_{n}"] = ratio(whole, min(apart, key=lambda arm: arm["value"]))
    return figures | {
        f"nvlink_speedup_{n}": speedup,
        f"nvlink_ceiling_{n}": single(ceiling, "1"),
        f"nvlink_share_of_ceiling_{n}": share,
    }


def of_sustained(n: int, by_sms: dict[str, dict[str, dict[str, float]]]) -> dict[str, Figure]:
    """Without pauses between steps: speed-ups on a slow link and at the best numbers of SMs, and what was drawn."""
    figures: dict[str, Figure] = {}
    by_sms = {sms: arms for sms, arms in by_sms.items() if arms}
    for name, chosen in (("nic_class", {NIC_SMS: by_sms[NIC_SMS]} if NIC_SMS in by_sms else {}), ("best", by_sms)):
        if not chosen:
            continue
        whole, overlap = (
            min((arms[k] for arms in chosen.values()), key=lambda a: a["ms"]) for k in ("whole", "overlap")
        )
        figures[f"{name}_sustained_speedup_{n}"] = single(whole["ms"] / overlap["ms"], "1")
        for arm, found in (("whole", whole), ("overlap", overlap)):
            for key, unit in (("ms", "ms/layer"), ("watts", "W"), ("mhz", "MHz"), ("joules", "J/layer")):
                if key in found:
                    figures[f"{name}_sustained_{key}_{arm}_{n}"] = single(found[key], unit)
        figures[f"{name}_sustained_limit_watts_{n}"] = single(whole["limit_watts"], "W")
    return figures


def of_steps(found: Found) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for size in passed(found["sizes"]):
        n, length = size["num_tokens"], size["prompt_length"]
        name = str(n) if length == 1024 else f"{n // length}x{length}"
        for arm in ("whole", "overlap"):
            figures[f"prefill_tokens_per_s_gpu_{arm}_{name}"] = {**size[arm]["tokens_per_s"], "unit": "tokens/s"}
            figures[f"prefill_step_ms_{arm}_{name}"] = plain(size[arm]["step"])
    return figures


def of_decode(found: Found) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for size in passed(found["sizes"]):
        arms = {"whole": "whole", "split": "split", "overlap": "overlap_greenlet", "overlap_threads": "overlap_threads"}
        for name, arm in arms.items():
            measured, at = size["arms"][arm], f"{name}_{size['num_tokens']}"
            figures[f"decode_eager_ms_{at}"] = plain(measured)
            if measured["device_ms"] is not None:
                figures[f"decode_device_ms_{at}"] = single(measured["device_ms"], "ms")
            if "busy_ms" in measured:
                figures[f"decode_busy_share_{at}"] = single(measured["busy"], "1")
            figures[f"decode_launches_{at}"] = single(measured["launches"], "launches")
    return figures


def of_routing(found: Found) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for run in found["runs"]:
        scores = "float32" if run["float32_scores"] else "bf16"
        name = f"{run['phase']}_{run['num_tokens']}_{scores}" + ("" if run["bf16_reductions"] else "_full_reductions")
        figures[f"whole_vs_split_same_rows_error_{name}"] = single(run["worst"]["same_error"], "1")
        figures[f"whole_vs_split_other_rows_{name}"] = single(run["worst"]["other_rows"], "1")
    return figures


def of_soak(found: Found) -> dict[str, Figure]:
    return {
        "soak_turns": single(found["turns"], "turns"),
        "soak_worst_relative_error": single(found["worst_relative_error"], "1"),
        "soak_memory_growth_mib": single(found["memory_mib"]["growth"], "MiB"),
    }


def of_demo(found: Found) -> dict[str, Figure]:
    figures = {}
    if found["against_cpu"] is not None:
        figures["demo_answers_that_part_from_cpu"] = single(found["against_cpu"]["part"], "of 20")
    for arm, compared in found["against_off"].items():
        name = arm.replace(", ", "_")
        figures[f"demo_answers_that_part_{name}_from_off"] = single(compared["part"], "of 20")
    if "invariant" in found:  # the arm in which most do
        figures["demo_answers_that_part_invariant"] = single(
            max(c["part"] for c in found["invariant"].values()), "of 20"
        )
    return figures


READERS: dict[str, Callable[[Found], dict[str, Figure]]] = {
    "prefill": of_prefill,
    "steps": of_steps,
    "decode": of_decode,
    "routing": of_routing,
    "soak": of_soak,
    "demo": of_demo,
}
"""By the first word of a file's name; files of other names may hold figures themselves, under "figures"."""


def read(path: Path) -> dict[str, Figure]:
    found = json.loads(path.read_text())
    reader = READERS.get(path.stem.partition("-")[0], lambda found: found.get("figures", {}))
    return {name: {**figure, "command": found.get("command", "")} for name, figure in reader(found).items()}


def write(directory: Path) -> dict[str, Figure]:
    """Write both files; what is not one of our parts is passed over."""
    summary: dict[str, Figure] = {}
    for path in sorted(directory.glob("*.json")):
        if path.name not in ("summary.json", "status.json"):
            summary |= read(path)
    (directory / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    rows = [
        f"| {name} | {f['value']:.4g} | {f['low']:.4g} to {f['high']:.4g} | {f['unit']} |"
        for name, f in summary.items()
    ]
    table = ["| figure | value | p10 to p90 | unit |", "|---|---|---|---|", *rows]
    environment = directory / "environment.txt"
    head = environment.read_text().strip().splitlines() if environment.exists() else []
    (directory / "figures.md").write_text(
        "\n".join(["# Figures", "", *(f"- {line}" for line in head), "", *table]) + "\n"
    )
    return summary


if __name__ == "__main__":
    for figure_name, figure in write(Path(sys.argv[1])).items():
        print(f"{figure_name:60} {figure['value']:.4g} {figure['unit']}")
