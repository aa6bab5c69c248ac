"""Job files: what they say, that a shell reads them as meant, and that hostile names get nowhere. Grids and their
report. What Slurm makes of it all is in `test_slurm_cluster.py`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dbo.errors import ConfigError
from launch import cli
from launch.__main__ import main
from launch.grid import collect, parse_grid
from launch.slurm import SlurmJob
from launch.slurm_command import check_command
from tests.ranks import REPOSITORY

GOLDEN = Path(__file__).with_name("golden")
GENERATE = ["generate", "--model", "/models/a mixture", "--prompts", "in.jsonl"]
CASES = {
    "one_node": ["--gpus-per-node", "8", "--", *GENERATE, "--output", "out.jsonl", "--overlap", "on"],
    "four_nodes_requeue": [
        *("--nodes", "4", "--gpus-per-node", "8", "--cpus-per-task", "96", "--partition", "gpu,spot"),
        *("--account", "team", "--time", "1-02:00:00", "--job-name", "night", "--requeue"),
        *("--env", "NCCL_SOCKET_IFNAME=eth0"),
        *("--env", "NOTE=it's \"text\"", "--", *GENERATE, "--output", "out.jsonl"),
    ],
    "srun_pyxis": [
        *("--nodes", "2", "--gpus-per-node", "4", "--launcher", "srun", "--cpus-per-task", "12", "--requeue"),
        *("--container", "nvcr.io#nvidia/pytorch:25.01-py3", "--container-mount", "/models", "--container-mount"),
        *("/data:/mnt:ro", "--", *GENERATE, "--output", "out.jsonl"),
    ],
    "grid_apptainer": [
        *("--nodes", "2", "--gpus-per-node", "4", "--container", "images/torch.sif"),
        *("--container-runtime", "apptainer", "--container-mount", "/models"),
        *("--grid", "overlap=off,on;num-ubatches=2,4", "--", *GENERATE),
    ],
    "grid_ab_cpu": [
        *("--ranks-per-node", "2", "--requeue", "--grid", "max-num-tokens=64,128", "--"),
        *("ab", "--shape", "tiny", "--workload", "synthetic:requests=8"),
    ],
}  # fmt: skip
HOSTILE = [
    "a b",
    "a'b",
    'a"b',
    "$(touch pwned)",
    "`touch pwned`",
    "a;touch pwned",
    "a\nb",
    "a\n#SBATCH --uid=0",
    "a\\",
    "",
    "é",
]


@pytest.fixture
def launch(capsys):
    """Run a command line; gives (exit code, standard output, standard error)."""

    def launch(*argv: str) -> tuple[int, str, str]:
        code = cli.run(main, list(argv))
        return code, *capsys.readouterr()

    return launch


@pytest.mark.parametrize("name", CASES)
def test_job_files_are_as_they_were_read_by_people(launch, name):
    """A changed file is written anew under `WRITE_GOLDEN=1`, to be read before it is committed."""
    code, text, err = launch("slurm", "--python", "python3", *CASES[name])
    assert (code, err) == (0, "")
    file = GOLDEN / f"{name}.sbatch"
    if os.environ.get("WRITE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_job_files_and_scripts_are_clean():
    files = [*sorted(GOLDEN.glob("*.sbatch")), REPOSITORY / "scripts/slurm_sandbox"]
    assert len(files) == len(CASES) + 1
    done = subprocess.run(["shellcheck", *files], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def _run_job(tmp_path: Path, text: str, **env: str) -> list[list[str]]:
    """What the job's commands get when a shell runs the file, with `srun` and the like replaced by recorders."""
    recorder = '#!/bin/bash\nprintf "%s\\0" "$(basename "$0")" "$@" >>"$CALLS"; printf "\\n\\0" >>"$CALLS"\n'
    (binaries := tmp_path / "bin").mkdir()
    for name in ("srun", "scontrol", "sleep"):
        (binaries / name).write_text(recorder)
        (binaries / name).chmod(0o755)
    (job := tmp_path / "job").write_text(text)
    settings = {
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "SLURM_JOB_ID": "7",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "1",
        **env,
    }
    subprocess.run(["bash", str(job)], env=settings, cwd=tmp_path, check=True, capture_output=True, timeout=30)
    calls = (tmp_path / "calls").read_text().split("\n\0")
    return [call.rstrip("\0").split("\0") for call in calls if call]


def test_a_shell_hands_hostile_arguments_on_unchanged(tmp_path):
    hostile = [value for value in HOSTILE if "\n" not in value]
    command = ["generate", "--model", *hostile]
    job = SlurmJob(command=command, env=[f"V{i}={value}" for i, value in enumerate(hostile)], nodes=2)
    ((_, *srun),) = _run_job(tmp_path, job.text())
    assert srun[-len(hostile) - 4 :] == ["-m", "launch", *command]
    assert not list(tmp_path.rglob("pwned"))


def test_only_a_requeued_attempt_resumes(tmp_path):
    text = SlurmJob(command=["generate"], requeue=True, launcher="srun").text()
    first, again = tmp_path / "first", tmp_path / "again"
    for directory in (first, again):
        directory.mkdir()
    assert _run_job(first, text)[0][-3:] == ["-m", "launch", "generate"]
    assert _run_job(again, text, SLURM_RESTART_COUNT="1")[0][-2:] == ["generate", "--resume"]


def test_a_task_of_an_array_runs_its_point_and_reports(tmp_path):
    job = SlurmJob(command=["generate"], launcher="srun", grid=parse_grid("overlap=off,on;ignore-eos=true,false"))
    run, report = _run_job(tmp_path, job.text())
    directory = "slurm/dbo-moe-7/overlap=off,ignore-eos=false"
    assert run[-5:] == ["generate", "--overlap=off", "--json", "--output", f"{directory}/output.jsonl"]
    assert report[-3:] == ["slurm", "--collect", "slurm/dbo-moe-7"]
    assert (tmp_path / directory / "exit_code").read_text() == "0\n"


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize(
    "option",
    [
        "--job-name",
        "--partition",
        "--account",
        "--time",
        "--container",
        "--container-mount",
        "--output-dir",
        "--python",
    ],
)
def test_hostile_names_are_refused(launch, option, value):
    if (option, value) == ("--python", ""):
        return  # as if it were not given
    code, out, err = launch("slurm", option, value, "--", *GENERATE, "--output", "o")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"error: {option}={value!r} is not allowed".split(r"\n")[0] in err


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["--env", "NAME"], "NAME=VALUE"),
        (["--env", "A B=1"], "--env='A B'"),
        (["--env", "A=1\n2"], "one line of text"),
        (["--nodes", "0"], "--nodes=0"),
        (["--gpus-per-node", "-1"], "--gpus-per-node=-1"),
        (["--cpus-per-task", "0"], "--cpus-per-task=0"),
        (["--time", "soon"], "D-HH:MM:SS"),
        (["--launcher", "mpirun"], "torchrun"),
        (["--wait"], "--submit"),
        (["--grid", "overlap=off,onn"], "onn"),
        (["--grid", "overlap=off;overlap=on"], "every option once"),
        (["--grid", "tokens=1"], "--max-num-tokens"),
        (["--grid", "overlap"], "OPTION=VALUE"),
        (["--grid", "seed=$(id)"], "values of letters"),
        (["--grid", "seed=" + ",".join(map(str, range(300)))], "300"),
    ],
)
def test_settings_that_cannot_be_are_one_line(launch, settings, words):
    output = [] if "--grid" in settings else ["--output", "o"]
    code, out, err = launch("slurm", *settings, "--", *GENERATE, *output)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


@pytest.mark.parametrize(
    ("command", "grid", "words"),
    [
        ([], "", "after --, a command"),
        (["generat"], "", "did you mean generate?"),
        (["generate", "--model", "m", "--prompts", "p", "--output", "o\nn"], "", "one line"),
        (["generate", "--model", "m", "--prompts", "-", "--output", "o"], "", "no standard input"),
        (["generate", "--model", "m", "--prompts", "p", "--output", "o", "--top-p", "2"], "", "--top-p=2"),
        (["generate", "--model", "m", "--prompts", "p", "--output=o"], "seed=1,2", "left out with --grid"),
        (["doctor"], "seed=1,2", "for one of generate, ab"),
    ],
)
def test_a_command_that_would_fail_is_not_submitted(command, grid, words):
    def check() -> None:
        SlurmJob(command=command)
        check_command(command, parse_grid(grid) if grid else ())

    with pytest.raises(ConfigError) as caught:
        check()
    assert words in str(caught.value)


def test_submitting_without_slurm_is_one_line(launch, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, out, err = launch("slurm", "--submit", "--", *GENERATE, "--output", "o")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "no sbatch on this host" in err


def _leave(run: Path, code: str | None, stdout: str, tokens: list[int] | None = None) -> None:
    run.mkdir()
    (run / "stdout").write_text(stdout)
    if code is not None:
        (run / "exit_code").write_text(code)
    if tokens is not None:
        (run / "output.jsonl").write_text(json.dumps({"id": "a", "token_ids": tokens}) + "\n")


def test_the_report_of_a_grid_says_what_came_of_every_run(launch, tmp_path):
    summary = {
        "output_tokens_per_s": 12.34,
        "phases": {"prefill": {"steps": 2, "split": 1}, "decode": {"steps": 5, "split": 5}},
    }
    _leave(tmp_path / "overlap=off", "0\n", "noise\n" + json.dumps(summary) + "\n", [1, 2])
    _leave(tmp_path / "overlap=on", "0\n", json.dumps(summary) + "\n{noise\n", [1, 3])
    _leave(tmp_path / "rounds=3", "1\n", json.dumps({"verdict": {"prefill": "no speed-up is stated"}}))
    _leave(tmp_path / "rounds=4", None, "")
    code, text, _ = launch("slurm", "--collect", str(tmp_path))
    assert code == 0
    assert text.splitlines() == [
        "run          exit       result",
        "overlap=off  0          12.3 new tokens/s, 6 of 7 steps split, same answers",
        "overlap=on   0          12.3 new tokens/s, 6 of 7 steps split, 1 answers differ from the first run",
        "rounds=3     1          no speed-up is stated",
        "rounds=4     not ended  no summary",
    ]
    assert (tmp_path / "report.txt").read_text() == text == collect(tmp_path)
    runs = json.loads((tmp_path / "report.json").read_text())
    assert [(run["point"], run["exit_code"]) for run in runs] == [
        ("overlap=off", 0), ("overlap=on", 0), ("rounds=3", 1), ("rounds=4", None)
    ]  # fmt: skip
    assert runs[0]["summary"] == summary


def test_there_is_no_report_of_nothing(launch, tmp_path):
    code, _, err = launch("slurm", "--collect", str(tmp_path / "none"))
    assert (code, err.count("\n")) == (2, 1)
