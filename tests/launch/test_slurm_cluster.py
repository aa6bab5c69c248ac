"""Job files on a real Slurm of two nodes, which the tests start and stop: both launchers, grids, and coming back after
a warning or a preemption."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch import tiny
from tests.ranks import REPOSITORY

pytestmark = pytest.mark.slurm

SANDBOX = str(REPOSITORY / "scripts/slurm_sandbox")
SPLIT_ALWAYS = ["--dbo-prefill-token-threshold", "1", "--dbo-decode-token-threshold", "1"]
NUM_PROMPTS = 60
LIMIT_S = 240  # of anything a job does, on a crowded machine


@dataclass(frozen=True)
class Cluster:
    """A running sandbox. Commands run in `directory`, which holds the tiny model and its prompts."""

    directory: Path
    env: dict[str, str]

    def run(self, *argv: str, timeout: float = 60) -> str:
        """Run a command of Slurm to its end; returns its standard output."""
        done = subprocess.run(argv, env=self.env, cwd=self.directory, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def submit(self, name: str, *settings: str, generate: list[str]) -> subprocess.Popen[str]:
        """`launch slurm --submit --wait` for `generate` on 2 nodes x 2 tasks."""
        files = ["--model", "model", "--prompts", "prompts.jsonl", "--device", "cpu"]
        layout = ["--nodes", "2", "--ranks-per-node", "2", "--job-name", name, "--env", "GLOO_SOCKET_IFNAME=lo"]
        return subprocess.Popen(
            [sys.executable, "-m", "launch", "slurm", *layout, *settings, "--submit", "--wait", "--",
             "generate", *files, *generate],
            env=self.env, cwd=self.directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def job_id(self, name: str) -> str:
        """The id of a submitted job, once Slurm knows it."""
        return _wait_for(lambda: self.run("squeue", "--noheader", "--name", name, "--format=%A").strip())

    def rows(self, file: str) -> list[dict]:
        """The complete rows of an output file."""
        path = self.directory / file
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]


def _wait_for(look: Callable[[], object]):
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.1)
    raise TimeoutError("it did not come to pass")


def _end_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    with process:
        try:
            return process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()


def _processes_of(directory: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if str(directory).encode() in command and int(process.name) != os.getpid():
            found.append(f"{process.name}: {(process / 'cmdline').read_text()}")
    return found


@pytest.fixture(scope="module")
def cluster(tiny_models, tmp_path_factory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("slurm")
    (directory / "model").symlink_to(tiny_models("mixtral").directory)
    tiny.write_prompts(directory / "prompts.jsonl", tiny.prompts(NUM_PROMPTS))
    sandbox = directory / "sandbox"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PYTEST_"))}
    env = {**inherited, "SLURM_CONF": str(sandbox / "slurm.conf"), "PYTHONPATH": str(REPOSITORY)}
    started = subprocess.run([SANDBOX, "start", str(sandbox)], env=env, capture_output=True, text=True, timeout=60)
    try:
        assert started.returncode == 0, started.stderr
        yield Cluster(directory, env)
    finally:
        subprocess.run([SANDBOX, "stop", str(sandbox)], env=env, check=True, timeout=60)
    assert _processes_of(directory) == []


@pytest.fixture(scope="module")
def answers(cluster) -> dict[str, list[int]]:
    """What an uninterrupted run answers, by id: one rank for each task, overlap off."""
    process = cluster.submit(
        "plain", "--launcher", "srun", generate=["--output", "plain.jsonl", "--max-new-tokens", "24"]
    )
    out, err = _end_of(process)
    assert process.returncode == 0, err
    rows = cluster.rows("plain.jsonl")
    assert [row["id"] for row in rows] == [f"p{i}" for i in range(NUM_PROMPTS)]
    assert {row["dp_rank"] for row in rows} == {0, 1, 2, 3}
    assert out.strip().isdigit()
    return {row["id"]: row["token_ids"] for row in rows}


def test_overlap_under_torchrun_answers_the_same(cluster, answers):
    generate = ["--output", "overlap.jsonl", "--max-new-tokens", "24", "--overlap", "on", *SPLIT_ALWAYS]
    process = cluster.submit("overlap", "--launcher", "torchrun", generate=generate)
    _, err = _end_of(process)
    assert process.returncode == 0, err
    assert "overlap on: 2 ubatches" in err  # the log was followed
    assert "60/60" in err
    assert {row["id"]: row["token_ids"] for row in cluster.rows("overlap.jsonl")} == answers


def test_a_grid_is_an_array_with_one_report(cluster):
    generate = ["--max-new-tokens", "4", *SPLIT_ALWAYS]
    process = cluster.submit("grid", "--grid", "overlap=off,on", "--launcher", "srun", generate=generate)
    out, err = _end_of(process)
    assert process.returncode == 0, err
    job_id, header, *lines = out.splitlines()
    assert header.split() == ["run", "exit", "result"]
    assert [line.split()[:2] for line in lines] == [["overlap=off", "0"], ["overlap=on", "0"]]
    assert all("same answers" in line for line in lines), out
    runs = json.loads((cluster.directory / f"slurm/grid-{job_id}/report.json").read_text())
    split = [sum(phase["split"] for phase in run["summary"]["phases"].values()) for run in runs]
    assert split[0] == 0 < split[1]


def test_a_job_that_fails_ends_wait_with_its_exit_code(cluster):
    one = ["--nodes", "1", "--ranks-per-node", "1"]
    process = cluster.submit(
        "wrong", *one, "--launcher", "srun", generate=["--output", "w.jsonl", "--max-model-len", "4096"]
    )
    _, err = _end_of(process)
    assert process.returncode == 2, err
    assert "--max-model-len=4096" in err
    assert "failed" in err


@pytest.mark.parametrize("ending", ["warned", "preempted"])
def test_a_job_that_was_stopped_comes_back_and_does_the_rest(cluster, answers, ending):
    output = f"{ending}.jsonl"
    launcher = {"warned": "torchrun", "preempted": "srun"}[ending]
    generate = ["--output", output, "--max-new-tokens", "24", "--max-num-seqs", "2"]
    process = cluster.submit(ending, "--requeue", "--launcher", launcher, generate=generate)
    try:
        job_id = cluster.job_id(ending)
        _wait_for(lambda: len(cluster.rows(output)) >= 4)
        if ending == "warned":  # what Slurm does before the time limit
            cluster.run("scancel", "--batch", "--signal=USR1", job_id)
        else:
            cluster.run(
                "sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"
            )
        _wait_for(lambda: "Restarts=1" in cluster.run("scontrol", "show", "job", job_id))
        kept = {row["id"]: row["token_ids"] for row in cluster.rows(output)}
        assert 4 <= len(kept) < NUM_PROMPTS
        _, err = _end_of(process)
    finally:
        process.kill()
    assert process.returncode == 0, err
    rows = cluster.rows(output)
    assert [row["id"] for row in rows] == [f"p{i}" for i in range(NUM_PROMPTS)]
    assert {row["id"]: row["token_ids"] for row in rows} == answers
    assert f"{NUM_PROMPTS - len(kept)} of {NUM_PROMPTS - len(kept)} requests" in err  # nothing was done twice
