"""A `python -m launch` command as a Slurm job file: readable, complete, with every name checked and quoted.

Its own file because it is pure: a `SlurmJob` in, text out. `slurm_command.py` submits and follows, `grid.py` knows what
the runs of a grid are and what came of them.

    torchrun    one Slurm task a node, torchrun starts the ranks; they meet by c10d rendezvous on the first node
    srun        one Slurm task a rank; `launch.mesh` reads Slurm's own variables

How a job ends early. Slurm warns the script (`--signal=B:USR1@grace`), the script passes SIGUSR1 to the ranks, these
finish the step they are in and save; or a preemption sends SIGTERM to the ranks, which save and end. The script then
puts the job back into the queue, and the next attempt (`SLURM_RESTART_COUNT`) of `generate` runs with `--resume`. A
script that merely ended within the grace of a preemption would not be queued again: Slurm calls that a time-out.

Invariants: a job that exists is valid; nothing given by the user reaches the file unless a check allows its characters,
or `shlex.quote` has wrapped it; no text of a job holds a line break.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dbo.errors import ConfigError
from launch.grid import Point

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._,-]{0,255}")
_TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}")
_IMAGE = re.compile(r"[A-Za-z0-9/._][A-Za-z0-9/._:@#+-]{0,511}")
_PATH = re.compile(r"[A-Za-z0-9/._][A-Za-z0-9/._+=@-]{0,511}")
_MOUNT = re.compile(r"/[A-Za-z0-9/._+=@-]{0,511}(:/[A-Za-z0-9/._+=@-]{1,511})?(:r[ow])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN = re.compile(r"[^\x00-\x1f\x7f\u0085\u2028\u2029]*")  # one line, whatever reads it


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """What the job file says. Raises ConfigError for a value that has no business in one."""

    command: Sequence[str]  # of `python -m launch`, with its arguments
    nodes: int = 1
    gpus_per_node: int = 0  # 0: the ranks run on the CPU
    ranks_per_node: int = 1
    launcher: Literal["torchrun", "srun"] = "torchrun"
    cpus_per_task: int | None = None
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    job_name: str = "dbo-moe"
    container: str | None = None
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    container_mounts: Sequence[str] = ()
    env: Sequence[str] = ()  # NAME=VALUE
    requeue: bool = False
    grace_s: int = 120
    output_dir: str = "slurm"
    python: str = "python3"
    grid: Sequence[Point] = ()

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "grace_s", "cpus_per_task"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(_flag(name), value, "1 or more", "")
        if self.gpus_per_node < 0:
            raise ConfigError("--gpus-per-node", self.gpus_per_node, "0 or more", "")
        _check("--job-name", self.job_name, _NAME, "up to 64 of letters, digits, . _ -")
        _check("--partition", self.partition, _NAMES, "letters, digits, . _ - and commas")
        _check("--account", self.account, _NAME, "up to 64 of letters, digits, . _ -")
        _check("--time", self.time, _TIME, "minutes, H:MM:SS, or D-HH:MM:SS")
        _check("--container", self.container, _IMAGE, "an image name or path of letters, digits, / . _ : @ # + -")
        _check("--output-dir", self.output_dir, _PATH, "a path of letters, digits, / . _ + = @ -")
        _check("--python", self.python, _PATH, "a path of letters, digits, / . _ + = @ -")
        for mount in self.container_mounts:
            _check("--container-mount", mount, _MOUNT, "/HOST/PATH[:/CONTAINER/PATH[:ro]]")
        for setting in self.env:
            name, equals, value = setting.partition("=")
            if not equals:
                raise ConfigError("--env", setting, "NAME=VALUE", "")
            _check("--env", name, _VARIABLE, "NAME=VALUE with a name of letters, digits and _")
            _check(f"--env {name}", value, _PLAIN, "one line of text")
        for argument in self.command:
            _check("argument", argument, _PLAIN, "one line of text")

    @property
    def tasks_per_node(self) -> int:
        """Slurm's tasks on a node."""
        return self.ranks_per_node if self.launcher == "srun" else 1

    @property
    def ranks_per_task(self) -> int:
        """Ranks that share a task of Slurm, and its cores."""
        return self.ranks_per_node // self.tasks_per_node

    @property
    def num_cpus(self) -> int:
        """Cores of a task; Slurm's own default would be one, even for eight ranks."""
        return self.cpus_per_task or self.ranks_per_task

    def text(self) -> str:
        """The job file."""
        parts = [
            self._directives(),
            _HEAD,
            self._environment(),
            self._grid(),
            self._resume(),
            _TRAP if self.requeue else "",
            self._run(),
            self._end(),
        ]
        return "\n".join(part for part in parts if part)

    def _directives(self) -> str:
        names = "%x-%A_%a" if self.grid else "%x-%j"
        settings = [
            f"--job-name={self.job_name}",
            f"--nodes={self.nodes}",
            f"--ntasks-per-node={self.tasks_per_node}",
            f"--cpus-per-task={self.num_cpus}",
            f"--gpus-per-node={self.gpus_per_node}" if self.gpus_per_node else "",
            f"--partition={self.partition}" if self.partition else "",
            f"--account={self.account}" if self.account else "",
            f"--time={self.time}" if self.time else "",
            f"--array=0-{len(self.grid) - 1}" if self.grid else "",
            f"--output={self.output_dir}/{names}.log",
            "--open-mode=append",
            "--requeue" if self.requeue else "--no-requeue",
            f"--signal=B:USR1@{self.grace_s}" if self.requeue else "",
        ]
        how = f"# Submit it with: mkdir -p {shlex.quote(self.output_dir)} && sbatch FILE\n"
        return "#!/usr/bin/env bash\n" + "".join(f"#SBATCH {s}\n" for s in settings if s) + "\n" + how

    def _environment(self) -> str:
        lines = [f"export OMP_NUM_THREADS={max(1, self.num_cpus // self.ranks_per_task)}"]
        for setting in self.env:
            name, _, value = setting.partition("=")
            lines.append(f"export {name}={shlex.quote(value)}")
        return "\n".join(lines) + "\n"

    def _grid(self) -> str:
        if not self.grid:
            return ""
        output = '--output "$run/output.jsonl"' if self.command[0] == "generate" else '--report "$run"'
        cases = [
            f"    {number}) point={point.name} options=({shlex.join(point.arguments)}) ;;\n"
            for number, point in enumerate(self.grid)
        ]
        return (
            "# One run of the grid for each task of the array.\n"
            f"case $SLURM_ARRAY_TASK_ID in\n{''.join(cases)}    *) exit 2 ;;\nesac\n"
            f"grid={self.output_dir}/{self.job_name}-$SLURM_ARRAY_JOB_ID\n"
            "run=$grid/$point\n"
            'mkdir -p "$run"\n'
            f"options+=(--json {output})\n"
        )

    def _resume(self) -> str:
        if self.grid or not self.requeue or self.command[0] != "generate":
            return ""  # a grid compares whole runs: an attempt that was stopped is made again
        return (
            "options=()\n"
            'if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then\n'
            "    options+=(--resume) # an earlier attempt has answered some of the prompts\n"
            "fi\n"
        )

    def _run(self) -> str:
        flags = [
            "srun",
            "--kill-on-bad-exit=0",  # ranks notice one that failed, and save first
            f"--cpus-per-task={self.num_cpus}",  # srun does not take it from the job
            *self._container_flags(),
        ]
        torchrun = [
            "-m torch.distributed.run",
            f"--nnodes={self.nodes} --nproc-per-node={self.ranks_per_node}",
            '--rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"',
            "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        ]
        lines = [
            " ".join(filter(None, flags)),
            *self._container_prefix(),
            self._python(),
            *(torchrun if self.launcher == "torchrun" else []),
            f"-m launch {_arguments(self.command)}",
            '"${options[@]}"' if self.grid or self._resume() else "",
            '>"$run/stdout"' if self.grid else "",
        ]
        return " \\\n    ".join(filter(None, lines)) + " &\nranks=$!\n"

    def _end(self) -> str:
        end = _WAIT + (_REQUEUE if self.requeue else "")
        if self.grid:
            step = ["srun --nodes=1 --ntasks=1", *self._container_flags(), *self._container_prefix(), self._python()]
            end += (
                '\necho "$status" >"$run/exit_code"\n'
                "# What is finished so far, as one report.\n"
                f'{" ".join(step)} -m launch slurm --collect "$grid"\n'
            )
        return end + 'exit "$status"\n'

    def _python(self) -> str:
        return shlex.quote(self.python)

    def _container_flags(self) -> list[str]:
        if self.container is None or self.container_runtime != "pyxis":
            return []
        mounts = ",".join(
            ['"$PWD:$PWD"', *(mount if ":" in mount else f"{mount}:{mount}" for mount in self.container_mounts)]
        )
        return [
            f"--container-image={shlex.quote(self.container)}",
            f"--container-mounts={mounts}",
            '--container-workdir="$PWD"',
        ]

    def _container_prefix(self) -> list[str]:
        if self.container is None or self.container_runtime != "apptainer":
            return []
        nv = " --nv" if self.gpus_per_node else ""
        mounts = "".join(f" --bind {mount}" for mount in self.container_mounts)
        return [f'apptainer exec{nv} --bind "$PWD"{mounts} --pwd "$PWD" {shlex.quote(self.container)}']


_HEAD = """\
set -euo pipefail
# This script runs on the first node of the job: the ranks meet there.
MASTER_ADDR=$(hostname)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
export MASTER_ADDR MASTER_PORT
"""

_TRAP = """\
# Slurm is about to end the job: the ranks finish their step and save.
warned=0 ranks=
trap 'warned=1; [ -z "$ranks" ] || kill -USR1 "$ranks" || true' USR1
"""

_WAIT = """\
while kill -0 "$ranks" 2>/dev/null; do # a signal ends a wait early
    wait "$ranks" || true
done
status=0
wait "$ranks" || status=$?
"""

_REQUEUE = """
preempted() { [[ $(scontrol show job --oneliner "$SLURM_JOB_ID") == *" PreemptTime="[0-9]* ]]; }
if [ "$status" != 0 ] && { [ "$warned" = 1 ] || preempted; }; then
    echo "stopped before the end: back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60 # Slurm ends this script
fi
"""


def _arguments(command: Sequence[str]) -> str:
    """`generate --model DIR ...` with an option and its value on a line."""
    text = shlex.quote(command[0])
    for argument in command[1:]:
        text += (" \\\n    " if argument.startswith("--") else " ") + shlex.quote(argument)
    return text


def _check(name: str, value: str | None, allowed: re.Pattern[str], words: str) -> None:
    if value is not None and not allowed.fullmatch(value):
        raise ConfigError(name, value, words, "")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-").removesuffix("-s")
