"""A rank that fails between two GPUs, while the other one's DeepEP kernels wait for it on the device."""

import json
import re

import pytest

from tests.ranks import RankCommand

pytestmark = pytest.mark.multigpu

# The command as a user starts it, but rank 1 fails before it sends: in a layer of prefill, or of decode.
PROGRAM = """
import os, sys
from launch import cli
from launch.__main__ import main
from moe.layer import MoELayer

least, calls = int(sys.argv.pop(1)), 0
run = MoELayer.__call__

def fail_late(self, x, *args):
    global calls
    calls += x.shape[0] <= least
    if calls == 9:
        raise ArithmeticError("planted")
    return run(self, x, *args)

if os.environ["RANK"] == "1":
    MoELayer.__call__ = fail_late
sys.exit(cli.run(main))
"""

CONFIG = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 512, "hidden_size": 2048,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
    "intermediate_size": 256, "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 2048,
    "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip


@pytest.mark.parametrize(("phase", "largest"), [("prefill", 100_000), ("decode", 64)])
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_both_ranks_end_and_name_the_cause(tmp_path, phase, largest, overlap):
    pytest.importorskip("deep_ep")
    (script := tmp_path / "rank.py").write_text(PROGRAM)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    lines = (json.dumps({"id": str(k), "token_ids": list(range(1, 400))}) for k in range(16))
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    options = [
        *("--model", str(tmp_path), "--load-format", "dummy", "--ignore-eos", "--max-new-tokens", "32"),
        *("--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "out.jsonl")),
        *("--overlap", overlap, "--dbo-decode-token-threshold", "2", "--max-num-tokens", "4096"),
    ]
    with RankCommand(2, [str(script), str(largest), "generate", *options]) as command:
        finished = command.wait(120)
    assert finished.returncode == 1
    assert re.search(r"rank 1.*ArithmeticError: planted", finished.stderr), finished.stderr
    ends = r"rank 0: (a deepep_\w+ operation.* cannot be recalled|stopped by SIGTERM because rank 1)"
    assert re.search(ends, finished.stderr), finished.stderr  # whichever comes first: rank 0 itself, or torchrun
    assert finished.elapsed_s < 90, finished.stderr  # most of it to start
