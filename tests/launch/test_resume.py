"""Runs that are killed, and run again with `--resume` until they are through: every prompt is answered once, and as
in a run that nobody disturbed."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.output import read_rows
from tests.launch import tiny
from tests.ranks import RankCommand, kill_tree

NUM_PROMPTS = 60
LIMIT_S = 120  # of one start, on a crowded machine


def _all_at_once(command: RankCommand, _: random.Random) -> None:
    kill_tree(command.process)


def _one_rank(command: RankCommand, chance: random.Random) -> None:
    for pid in command.rank_pids()[chance.randint(0, 1) :][:1]:
        os.kill(pid, signal.SIGKILL)


def _launcher_told(command: RankCommand, _: random.Random) -> None:
    command.process.send_signal(signal.SIGTERM)


ENDS: tuple[Callable[[RankCommand, random.Random], None], ...] = (_all_at_once, _one_rank, _launcher_told)


@pytest.mark.parametrize("num_kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments_every_prompt_is_answered_once_and_the_same(tiny_models, tmp_path, num_kills):
    prompts = [
        {"id": f"p{i}", "token_ids": prompt, "max_new_tokens": 3 + 7 * i % 19}  # of all lengths: they end one by one
        for i, prompt in enumerate(tiny.prompts(NUM_PROMPTS))
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    argv = ["-m", "launch", "generate", "--model", tiny_models("mixtral").directory, "--device", "cpu"]
    argv += ["--prompts", str(tmp_path / "prompts.jsonl"), "--max-num-seqs", "4"]
    argv += ["--overlap", "on", "--dbo-decode-token-threshold", "1", "--dbo-prefill-token-threshold", "1"]
    plain, output = tmp_path / "plain.jsonl", tmp_path / "out.jsonl"
    with RankCommand(2, [*argv, "--output", str(plain)]) as command:
        assert command.wait(LIMIT_S).returncode == 0
    expected = _tokens(plain)
    argv += ["--output", str(output), "--resume"]

    def run_to_the_end() -> None:
        missing = NUM_PROMPTS - len(_tokens(output))
        with RankCommand(2, argv) as command:
            assert (finished := command.wait(LIMIT_S)).returncode == 0, finished.stderr
        assert f"{missing} of {missing} requests" in finished.stderr
        assert list(_tokens(output)) == [f"p{i}" for i in range(NUM_PROMPTS)]
        assert output.read_text().count("\n") == NUM_PROMPTS
        assert _tokens(output) == expected

    chance = random.Random(num_kills)
    for kill in range(num_kills):
        with RankCommand(2, argv) as command:
            wanted = len(_tokens(output)) + chance.randint(0, 15)
            while command.process.poll() is None and not (command.rank_pids() and len(_tokens(output)) >= wanted):
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 0.05))
            ENDS[kill % len(ENDS)](command, chance)
            command.wait(LIMIT_S)
        assert _tokens(output).items() <= expected.items()
        if len(_tokens(output)) > NUM_PROMPTS - 15:
            run_to_the_end()
            output.unlink()
    run_to_the_end()


def _tokens(file: Path) -> dict[str, list[int]]:
    return {name: row["token_ids"] for name, row in read_rows(file).items()}
