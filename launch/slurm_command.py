"""The `slurm` command: print a job file, or submit it and follow it to its end.

Its own file because it is the part that talks to Slurm (`sbatch`, `scontrol`) and to the user; the text of the job is
`launch.slurm`'s. Nothing here imports torch: it runs on login nodes.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from dbo.errors import ConfigError
from launch import cli
from launch.cli import FAILED, USAGE, CommandError
from launch.config import ABOptions, CalibrateOptions, DoctorOptions, GenerateOptions, Options, closest
from launch.grid import Point, collect, parse_grid
from launch.slurm import SlurmJob

RANKED: dict[str, type[Options]] = {
    "generate": GenerateOptions,
    "ab": ABOptions,
    "calibrate": CalibrateOptions,
    "doctor": DoctorOptions,
}
"""The commands that run on many ranks, with their options."""
RESULT = {"generate": "--output", "ab": "--report"}
"""Where those that a grid can run put their result."""

POLL_S = 2.0
SILENCE_LIMIT_S = 300.0  # how long a controller may not answer (it restarts, say) before we stop following
_OVER = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL", "DEADLINE"}
)


@click.command("slurm")
@click.option("--nodes", default=1, show_default=True, help="Nodes of the job.")
@click.option("--gpus-per-node", default=0, show_default=True, help="GPUs of each node; 0 runs on the CPU.")
@click.option("--ranks-per-node", type=int, help="Ranks on each node; one for each GPU unless given, on the CPU one.")
@click.option("--launcher", type=click.Choice(["torchrun", "srun"]), default="torchrun", show_default=True,
              help="torchrun on each node, or one task for each rank.")  # fmt: skip
@click.option("--cpus-per-task", type=int,
              help="Cores of a task: a rank under srun, a node under torchrun. [default: one a rank]")  # fmt: skip
@click.option("--partition", help="Partition, or several with commas.")
@click.option("--account", help="Account to charge.")
@click.option("--time", help="Time limit: minutes, H:MM:SS or D-HH:MM:SS.")
@click.option("--job-name", default="dbo-moe", show_default=True, help="Name of the job, its log and its directory.")
@click.option("--container", metavar="IMAGE", help="Image to run in.")
@click.option("--container-runtime", type=click.Choice(["pyxis", "apptainer"]), default="pyxis", show_default=True,
              help="What starts the container.")  # fmt: skip
@click.option("--container-mount", "container_mounts", multiple=True, metavar="PATH[:PATH]",
              help="Directory to mount besides the current one; repeatable.")  # fmt: skip
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="Variable to set in the job; repeatable.")
@click.option("--requeue", is_flag=True, help="Back into the queue when preempted or out of time; generate resumes.")
@click.option("--grace", "grace_s", default=120, show_default=True,
              help="Seconds before the end at which Slurm warns a job that can be requeued.")  # fmt: skip
@click.option("--output-dir", default="slurm", show_default=True, help="Directory of job files, logs and grids.")
@click.option("--python", help="Interpreter of the ranks; this one unless given, in a container python3.")
@click.option("--grid", metavar="OPTION=VALUE,...;...", help="Run every combination, as an array of jobs.")
@click.option("--submit", is_flag=True, help="Submit the job file instead of printing it.")
@click.option("--wait", is_flag=True, help="With --submit: show the log, and end with the exit code of the job.")
@click.option("--collect", "collect_dir", metavar="DIR", help="Do nothing but report on the runs of a grid.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def slurm_command(
    command: tuple[str, ...],
    gpus_per_node: int,
    ranks_per_node: int | None,
    python: str | None,
    grid: str | None,
    submit: bool,
    wait: bool,
    collect_dir: str | None,
    **settings: Any,
) -> int:
    """Write a Slurm job file for a command: `python -m launch slurm --nodes 4 --gpus-per-node 8 -- generate ...`."""
    if collect_dir is not None:
        click.echo(collect(Path(collect_dir)), nl=False)
        return 0
    if wait and not submit:
        raise ConfigError("--wait", True, "together with --submit", "")
    job = SlurmJob(
        command=command,
        gpus_per_node=gpus_per_node,
        ranks_per_node=ranks_per_node if ranks_per_node is not None else max(1, gpus_per_node),
        python=python or ("python3" if settings["container"] else sys.executable),
        grid=parse_grid(grid) if grid is not None else (),
        **settings,
    )
    check_command(job.command, job.grid)
    if not submit:
        click.echo(job.text(), nl=False)
        return 0
    job_id = submit_job(job)
    return follow(job, job_id) if wait else 0


def check_command(command: Sequence[str], grid: Sequence[Point] = ()) -> None:
    """Parse the command of a job as its ranks will. Raises ConfigError or click's own errors."""
    if not command:
        raise ConfigError("command", "", "after --, a command and its options", "e.g. -- generate --model DIR ...")
    name, *arguments = command
    if name not in RANKED:
        raise ConfigError("command", name, f"one of {', '.join(RANKED)}", closest(name, RANKED))
    if grid:
        if name not in RESULT:
            raise ConfigError("--grid", name, f"for one of {', '.join(RESULT)}", "")
        output = RESULT[name]
        if any(argument.partition("=")[0] == output for argument in arguments):
            raise ConfigError(output, "", "left out with --grid", "every run has a directory of its own")
        arguments += ["--json", output, "-"]
    for point in grid or [Point(())]:
        options = _parse(name, [*arguments, *point.arguments])
        if getattr(options, "prompts", None) == "-":
            raise ConfigError("--prompts", "-", "a file", "a job has no standard input")


def _parse(name: str, arguments: list[str]) -> Options:
    with cli.command(name, RANKED[name], lambda _: 0, help="").make_context(name, arguments) as context:
        return RANKED[name](**context.params)


def submit_job(job: SlurmJob) -> str:
    """Write the job file into the output directory and submit it. Returns Slurm's id of the job."""
    if shutil.which("sbatch") is None:
        raise CommandError("--submit: no sbatch on this host; run this on a login node of the cluster", USAGE)
    directory = Path(job.output_dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (file := directory / f"{job.job_name}.sbatch").write_text(job.text())
    except OSError as error:
        raise ConfigError(
            "--output-dir", job.output_dir, "a directory that can be written", str(error.strerror)
        ) from None
    done = subprocess.run(["sbatch", "--parsable", str(file)], capture_output=True, text=True)
    if done.returncode:
        raise CommandError(f"sbatch refused {file}: {done.stderr}", FAILED)
    job_id = done.stdout.strip().partition(";")[0]  # id;cluster
    click.echo(f"job {job_id}: {file}, log {_log(job, job_id)}", err=True)
    click.echo(job_id)
    return job_id


def follow(job: SlurmJob, job_id: str) -> int:
    """Show the progress of a submitted job until it is over. Returns its exit code; of a grid, the highest."""
    follower = _Follower(job, job_id)
    try:
        while not follower.look():
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        click.echo(f"\njob {job_id} goes on; `scancel {job_id}` ends it", err=True)
        raise
    if job.grid:
        click.echo(collect(Path(job.output_dir) / f"{job.job_name}-{job_id}"), nl=False)
    return follower.exit_code()


class _Follower:
    """What is known of a submitted job; shows what is new with every look."""

    def __init__(self, job: SlurmJob, job_id: str):
        self.job, self.job_id = job, job_id
        self.states: list[tuple[str, int, int]] = []
        self._shown: Counter[str] = Counter()
        self._offset = 0
        self._answered_s = time.monotonic()

    def look(self) -> bool:
        """Ask, show, and say whether the job is over. Raises CommandError when Slurm does not know any more."""
        asked = subprocess.run(["scontrol", "show", "job", "--oneliner", self.job_id], capture_output=True, text=True)
        found = re.findall(r"\bJobState=(\w+).*?\bExitCode=(\d+):(\d+)", asked.stdout)
        if found:
            self.states = [(state, int(code), int(signal)) for state, code, signal in found]
            self._answered_s = time.monotonic()
        elif time.monotonic() - self._answered_s > SILENCE_LIMIT_S:
            raise CommandError(f"job {self.job_id}: Slurm says nothing of it: {asked.stderr}", FAILED)
        over = bool(found) and all(state in _OVER for state, _, _ in self.states)
        self._show_log()
        counts = Counter(state for state, _, _ in self.states)
        if counts != self._shown:
            self._shown = counts
            runs = ", ".join(
                f"{count} {state.lower()}" if self.job.grid else state.lower() for state, count in counts.items()
            )
            click.echo(f"job {self.job_id}: {runs}", err=True)
        return over

    def exit_code(self) -> int:
        """0 if all of the job was completed, else what it ended with, 128 + n for signal n, or 1."""
        return max(
            0 if state == "COMPLETED" else code or (128 + signal if signal else FAILED)
            for state, code, signal in self.states
        )

    def _show_log(self) -> None:
        if self.job.grid:
            return  # many logs at once tell nothing
        with contextlib.suppress(FileNotFoundError), _log(self.job, self.job_id).open("rb") as log:
            log.seek(self._offset)
            sys.stderr.buffer.write(log.read())
            sys.stderr.flush()
            self._offset = log.tell()


def _log(job: SlurmJob, job_id: str) -> Path:
    return Path(job.output_dir) / f"{job.job_name}-{job_id}{'_*' if job.grid else ''}.log"
