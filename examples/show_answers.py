"""Print the answers of one `generate` output beside its prompts, and check that a second output has the same tokens.

python examples/show_answers.py off.jsonl on.jsonl
"""

import json
import sys
from pathlib import Path
from typing import Any


def rows(path: str) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in map(json.loads, Path(path).read_text(encoding="utf-8").splitlines())}


def main(first: str, second: str) -> int:
    ours, theirs = rows(first), rows(second)
    for name, row in ours.items():
        print(f"{name:>15} | " + row["text"].strip().replace("\n", f"\n{'':>15} | "))
    differing = [name for name in ours if ours[name]["token_ids"] != theirs.get(name, {}).get("token_ids")]
    if differing or ours.keys() != theirs.keys():
        print(f"\nDIFFERENT tokens in {first} and {second}: {', '.join(differing) or 'other prompts'}")
        return 1
    num_tokens = sum(len(row["token_ids"]) for row in ours.values())
    print(f"\n{first} and {second} agree in all {num_tokens} tokens of {len(ours)} answers")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
