"""`python -m launch`: the commands, each imported only when it runs."""

from __future__ import annotations

import os
import sys
from importlib import metadata

if __name__ == "__main__":
    # c10d prints a C++ stack for every connection that breaks; what failed is said once, by the command. torch looks at
    # this when it is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import click

from launch import cli
from launch.config import ABOptions, CalibrateOptions, DoctorOptions, GenerateOptions, PlanOptions


def _generate() -> click.Command:
    def run(options: GenerateOptions) -> int:
        return int(cli.imported("launch.generate:run")(options))  # torch is imported once the options are fine

    return cli.command("generate", GenerateOptions, run, help="Answer the prompts of a file. Start it under torchrun.")


def _doctor() -> click.Command:
    def run(options: DoctorOptions) -> int:
        return int(cli.imported("launch.doctor.run:run")(options))

    return cli.command("doctor", DoctorOptions, run, help="Examine the ranks and what connects them, under torchrun.")


def _ab() -> click.Command:
    def run(options: ABOptions) -> int:
        return int(cli.imported("launch.ab:run")(options))

    return cli.command("ab", ABOptions, run, help="Does overlap pay here? Start it under torchrun.")


def _calibrate() -> click.Command:
    def run(options: CalibrateOptions) -> int:
        return int(cli.imported("launch.calibrate:run")(options))

    return cli.command("calibrate", CalibrateOptions, run, help="Measure what steps cost here, under torchrun.")


def _plan() -> click.Command:
    def run(options: PlanOptions) -> int:
        return int(cli.imported("launch.plan:run")(options))

    return cli.command("plan", PlanOptions, run, help="Predict step times on other ranks and links.")


COMMANDS = {
    "upcycle": (
        lambda: cli.imported("launch.upcycle_command:upcycle_command"),
        "Turn a dense checkpoint into a mixture of experts.",
    ),
    "generate": (_generate, "Answer the prompts of a file."),
    "doctor": (_doctor, "Find what does not work between these ranks."),
    "ab": (_ab, "Compare overlap off and on, with statistics."),
    "calibrate": (_calibrate, "Measure what steps cost here, for --overlap auto and plan."),
    "plan": (_plan, "Predict where overlap pays on other ranks and links."),
    "slurm": (lambda: cli.imported("launch.slurm_command:slurm_command"), "Run a command as a Slurm job."),
}


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        try:
            version = metadata.version("dbo-moe")
        except metadata.PackageNotFoundError:
            version = "unknown (not installed)"
        click.echo(f"dbo-moe {version}")
        ctx.exit()


main = cli.LazyGroup(
    "launch",
    lazy=COMMANDS,
    help="Mixture-of-experts inference with dual-batch overlap. Start `generate` and `ab` under torchrun.",
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_print_version,
            help="Print the version and leave.",
        )
    ],
)

if __name__ == "__main__":
    sys.exit(cli.run(main))
