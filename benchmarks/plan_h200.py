"""Does `plan`'s model put recorded parts of H200 steps together to the recorded steps?

    python benchmarks/plan_h200.py [--figures results/2026-11-30-h200x2/prefill.json] [--out FILE.json]

Needs no GPU: it reads what `benchmarks.gpu.prefill` recorded on 2 x H200 (Qwen3-30B-A3B layers, DeepEP's normal kernels
at 8 to 64 SMs, eager). Parts: compute of a whole batch, compute of two halves under the SM partition, messages
alone. Steps: whole, and overlapped with greenlets and carve-out. What the recordings do not say is taken from traces of
the same transport: dispatch is 0.6 of the messages, attention 0.36 of the compute.

The tax (compute beside messages) is fitted to the overlapped steps of the largest size, which are not counted, as
`calibrate` would. Below 8192 tokens the host, which launches everything twice, is the longest lane; the model does not
know the host, so these sizes are listed and not counted. Goal: 10% in the median. Exit code 1 if it is missed.
"""

import argparse
import datetime
import json
import math
import sys
from pathlib import Path
from statistics import median
from typing import Any

from launch.predict import LayerTimes, overlapped_us

ARMS = ("whole", "overlap")
RESULTS = Path(__file__).parent / "results"
GOAL = 0.10
LEAST_TOKENS = 8192
DISPATCH_SHARE, ATTENTION_SHARE = 0.6, 0.36
NUM_LAYERS, NUM_UBATCHES = 8, 2


def predict(compute_whole: float, compute_split: float, comm: float, tax: float) -> dict[str, float]:
    """Milliseconds a layer, from the same unit."""
    half = LayerTimes(
        attention=compute_split * 1e3 / NUM_UBATCHES * ATTENTION_SHARE,
        experts=compute_split * 1e3 / NUM_UBATCHES * (1 - ATTENTION_SHARE),
        dispatch=comm * 1e3 / NUM_UBATCHES * DISPATCH_SHARE,
        combine=comm * 1e3 / NUM_UBATCHES * (1 - DISPATCH_SHARE),
        latency=0.0,
    )
    overlap = overlapped_us(half, NUM_LAYERS, NUM_UBATCHES, tax) / 1e3 / NUM_LAYERS
    return {"whole": compute_whole + comm, "overlap": overlap}


def parts_of(size: dict[str, Any], sms: str) -> tuple[float, float, float]:
    arms = size["sms"][sms]
    return size["compute_whole"]["value"], arms["compute_split"]["value"], arms["comm"]["value"]


def recorded_of(size: dict[str, Any], sms: str) -> dict[str, float]:
    arms = size["sms"][sms]
    return {"whole": arms["whole"]["value"], "overlap": arms["overlap_greenlet_carve"]["value"]}


def fit_tax(size: dict[str, Any]) -> float:
    def error(tax: float) -> float:
        pairs = [(predict(*parts_of(size, n), tax)["overlap"], recorded_of(size, n)["overlap"]) for n in size["sms"]]
        return sum(math.log(predicted / recorded) ** 2 for predicted, recorded in pairs)

    return min((i / 100 for i in range(101)), key=error)


def rows(figures: dict[str, Any]) -> tuple[list[dict[str, Any]], float]:
    largest = max(figures["sizes"], key=lambda size: size["num_tokens"])
    tax, found = fit_tax(largest), []
    for size in figures["sizes"]:
        for sms in size["sms"]:
            for arm, ms in predict(*parts_of(size, sms), tax).items():
                recorded, tokens = recorded_of(size, sms)[arm], size["num_tokens"]
                why = "host-bound" if tokens < LEAST_TOKENS else ""
                if size is largest and arm == "overlap":
                    why = "the tax was fitted to it"
                found.append(
                    {"tokens": tokens, "sms": int(sms), "arm": arm, "predicted_ms": ms, "recorded_ms": recorded,
                     "error": ms / recorded - 1, "not_counted": why}
                )  # fmt: skip
    return found, tax


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=Path, default=RESULTS / "2026-11-30-h200x2/prefill.json")
    parser.add_argument("--out", type=Path, default=RESULTS / "plan_h200.json")
    options = parser.parse_args()
    found, tax = rows(json.loads(options.figures.read_text()))
    errors = {arm: [abs(r["error"]) for r in found if r["arm"] == arm and not r["not_counted"]] for arm in ARMS}
    every = [error for arm in ARMS for error in errors[arm]]
    pairs = [p for p in zip(found[::2], found[1::2], strict=True) if p[0]["tokens"] >= LEAST_TOKENS]
    agree = sum((w["predicted_ms"] > o["predicted_ms"]) == (w["recorded_ms"] > o["recorded_ms"]) for w, o in pairs)
    figures = {
        "error_median": median(every),
        "error_worst": max(every),
        **{f"{arm}_error_median": median(errors[arm]) for arm in ARMS},
        "tax": tax,
        "same_winner": f"{agree} of {len(pairs)}",
    }
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": ("python benchmarks/plan_h200.py " + " ".join(sys.argv[1:])).strip(),
        "recorded": f"{options.figures.parent.name}/{options.figures.name}",
        "goal": GOAL,
        "figures": figures,
        "rows": found,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{'tokens':>6} {'SMs':>4} {'arm':>8} {'predicted':>10} {'recorded':>9} {'error':>6}   ms a layer")
    for row in found:
        note = f"   not counted: {row['not_counted']}" if row["not_counted"] else ""
        print(
            f"{row['tokens']:>6} {row['sms']:>4} {row['arm']:>8} {row['predicted_ms']:>10.2f} "
            f"{row['recorded_ms']:>9.2f} {row['error']:>6.0%}{note}"
        )
    print(", ".join(f"{name} {value if isinstance(value, str) else f'{value:.1%}'}" for name, value in figures.items()))
    return 0 if figures["error_median"] <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
