"""Runs that are killed, and run again with `--resume` until they are through: every prompt is answered once, and as
in a run that nobody disturbed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

import pytest

from launch.output import read_rows
from tests.launch import tiny
from tests.ranks import RankCommand, kill_tree

NUM_PROMPTS = 60
LIMIT_S = 120  # of one start, on a crowded machine


def _all_at_once(command: RankCommand, _: random.Random) -> None:
    kill_tree(command.process)


def _one_rank(command: RankCommand, chance: random.Random) -> None:
    os.kill(chance.choice(command.rank_pids()), signal.SIGKILL)


def _launcher_told(command: RankCommand, _: random.Random) -> None:
    command.process.send_signal(signal.SIGTERM)


ENDS: tuple[Callable[[RankCommand, random.Random], None], ...] = (_all_at_once, _one_rank, _launcher_told)


@pytest.mark.parametrize("num_kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments_every_prompt_is_answered_once_and_the_same(tiny_models, tmp_path, num_kills):
    tiny.write_prompts(tmp_path / "prompts.jsonl", tiny.prompts(NUM_PROMPTS))
    argv = ["-m", "launch", "generate", "--model", tiny_models("mixtral").directory, "--device", "cpu"]
    argv += ["--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "12", "--max-num-seqs", "4"]
    argv += ["--overlap", "on", "--dbo-decode-token-threshold", "1", "--dbo-prefill-token-threshold", "1"]
    plain, output = tmp_path / "plain.jsonl", tmp_path / "out.jsonl"
    with RankCommand(2, [*argv, "--output", str(plain)]) as command:
        assert command.wait(LIMIT_S).returncode == 0
    expected = {name: row["token_ids"] for name, row in read_rows(plain).items()}
    assert len(expected) == NUM_PROMPTS

    chance = random.Random(num_kills)
    argv += ["--output", str(output), "--resume"]
    for kill in range(num_kills):
        with RankCommand(2, argv) as command:
            wanted = len(read_rows(output)) + chance.randint(0, NUM_PROMPTS // num_kills)
            while command.process.poll() is None and not (command.rank_pids() and len(read_rows(output)) >= wanted):
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 0.3))
            ENDS[kill % len(ENDS)](command, chance)
            command.wait(LIMIT_S)
        so_far = {name: row["token_ids"] for name, row in read_rows(output).items()}
        assert so_far.items() <= expected.items()

    with RankCommand(2, argv) as command:
        assert (finished := command.wait(LIMIT_S)).returncode == 0, finished.stderr
    assert f"{NUM_PROMPTS - len(so_far)} of {NUM_PROMPTS - len(so_far)} requests" in finished.stderr
    rows = list(read_rows(output).values())
    assert [row["id"] for row in rows] == [f"p{i}" for i in range(NUM_PROMPTS)]
    assert output.read_text().count("\n") == NUM_PROMPTS
    assert {row["id"]: row["token_ids"] for row in rows} == expected
