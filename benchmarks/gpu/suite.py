"""What the GPU suite found, in one place: reads the benchmarks' files in a directory and writes `summary.json` and
`figures.md`.

    python -m benchmarks.gpu.suite DIRECTORY

`summary.json` maps the name of a figure to {value, low, high, unit, command}; low and high are the 10th and 90th
percentile of the rounds where the figure is a time, and follow from those of its parts where it is a ratio. A file
that is not there leaves its figures out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Figure = dict[str, Any]


def ratio(over: Figure, under: Figure) -> Figure:
    return {
        "value": over["value"] / under["value"],
        "low": over["low"] / under["high"],
        "high": over["high"] / under["low"],
        "unit": "1",
    }


def best_overlap(arms: dict[str, Figure], driver: str = "greenlet") -> tuple[str, Figure]:
    """The fastest form of the partition for one driver."""
    names = [name for name in arms if name.startswith(f"overlap_{driver}")]
    best = min(names, key=lambda name: arms[name]["value"])
    return best, arms[best]


def of_prefill(found: dict[str, Any]) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for size in found["sizes"]:
        n, by_sms = size["num_tokens"], size["sms"]
        path = size["expert_path"]["ratio"]
        figures[f"expert_path_ratio_{n}"] = {"value": path, "low": path, "high": path, "unit": "1"}
        if "8" in by_sms:
            arms = by_sms["8"]
            whole, (_, overlap) = arms["whole"], best_overlap(arms)
            figures[f"nic_class_speedup_{n}"] = ratio(whole, overlap)
            for name, compute in (("efficiency", size["compute_whole"]), ("split_efficiency", arms["compute_split"])):
                limit = max(compute["value"], arms["comm"]["value"])
                if whole["value"] < 1.1 * limit:
                    continue  # hardly anything to gain: the quotient would be noise
                gain = [(whole["value"] - overlap[k]) / (whole["value"] - limit) for k in ("value", "high", "low")]
                figures[f"nic_class_{name}_{n}"] = dict(zip(("value", "low", "high"), gain, strict=True)) | {
                    "unit": "1"
                }
            if "bare" in arms:
                figures["off_overhead" if n == 16384 else f"off_overhead_{n}"] = ratio(whole, arms["bare"])
            for driver in ("greenlet", "threads"):
                _, arm = best_overlap(arms, driver)
                name = f"host_ms_per_layer_overlap_{n}" + ("" if driver == "greenlet" else "_threads")
                figures[name] = {"value": arm["host"], "low": arm["host"], "high": arm["host"], "unit": "ms"}
        best = min(by_sms, key=lambda num_sms: by_sms[num_sms]["whole"]["value"])
        if best != max(by_sms, key=int):  # else more SMs might be better still, and the comparison unfair
            overlap = min((best_overlap(arms)[1] for arms in by_sms.values()), key=lambda arm: arm["value"])
            figures[f"nvlink_speedup_{n}"] = ratio(by_sms[best]["whole"], overlap)
    return figures


def of_steps(found: dict[str, Any]) -> dict[str, Figure]:
    return {
        f"prefill_tokens_per_s_gpu_{arm}_{size['num_tokens']}": {**size[arm]["tokens_per_s"], "unit": "tokens/s"}
        for size in found["sizes"]
        for arm in ("whole", "overlap")
    }


def of_decode(found: dict[str, Any]) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for size in found["sizes"]:
        for arm, name in (("whole", "whole"), ("overlap_greenlet", "overlap")):
            measured = size["arms"][arm]
            figures[f"decode_eager_ms_{name}_{size['num_tokens']}"] = {
                k: measured[k] for k in ("value", "low", "high", "unit")
            }
            device = measured["device_ms"]
            figures[f"decode_device_ms_{name}_{size['num_tokens']}"] = {
                "value": device, "low": device, "high": device, "unit": "ms",
            }  # fmt: skip
    return figures


def main(directory: Path) -> None:
    summary: dict[str, Figure] = {}
    for file, read in (("prefill.json", of_prefill), ("steps.json", of_steps), ("decode.json", of_decode)):
        for path in sorted(directory.glob(f"*{file}")):
            found = json.loads(path.read_text())
            for name, figure in read(found).items():
                summary[name] = {**figure, "command": found["command"]}
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
    print("\n".join(table))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
