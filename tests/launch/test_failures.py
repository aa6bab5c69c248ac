"""Ranks that fail in a whole `generate`: what each way to fail looks like from outside.

Killed and interrupted ranks are in `test_generate.py`; here one rank differs, raises, or just ends.
"""

from __future__ import annotations

import re

import pytest

from tests.launch import tiny
from tests.ranks import REPOSITORY, RankCommand

# The command as a user starts it, but rank 1 does `DEED` as well.
PROGRAM = """
import os, sys
import launch.engine
from launch import cli
from launch.__main__ import main

def differ():
    sys.argv += ["--num-ubatches", "3"]

def at_step_3(act):
    forward, steps = launch.engine.Engine.forward, iter(range(9999))
    launch.engine.Engine.forward = lambda *args: act() if next(steps) == 3 else forward(*args)

def fail():
    at_step_3(lambda: 1 // 0)

def end():
    at_step_3(lambda: os._exit(0))

def stick():
    from moe.all2all.torch_dist import TorchAll2All
    TorchAll2All.outstanding = lambda self: "a fake dispatch"
    TorchAll2All.close = lambda self: print("the transport was closed", flush=True)
    fail()

deed = {"differ": differ, "fail": fail, "end": end, "stick": stick}[sys.argv.pop(1)]
if os.environ["RANK"] == "1":
    deed()
sys.exit(cli.run(main))
"""


@pytest.mark.parametrize(
    ("deed", "message"),
    [
        ("differ", r"num.ubatches.*2'? on rank 0; '?3'? on rank 1"),
        ("fail", "rank 1.*ZeroDivisionError: integer division"),
        ("stick", "rank 1: a fake dispatch cannot be recalled, so this process cannot go on"),
        ("end", "rank 1 on .* failed: its process .* ended without a word"),
    ],
)
def test_one_rank_is_different(tiny_models, tmp_path, deed, message):
    (script := tmp_path / "rank.py").write_text(PROGRAM)
    tiny.write_prompts(tmp_path / "prompts.jsonl", tiny.prompts(8))
    files = ["--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "out.jsonl"), "--device", "cpu"]
    with RankCommand(
        2, [str(script), deed, "generate", "--model", tiny_models("mixtral").directory, *files]
    ) as command:
        finished = command.wait(60)
    assert finished.returncode == 1
    assert re.search(message, finished.stderr), finished.stderr
    ours = rf'File "{REPOSITORY}/(dbo|moe|launch)/'  # a virtual environment, torchrun's too, may lie in the repository
    assert not re.search(ours, finished.stderr), finished.stderr
