"""From `launch.config` to click and back: commands, one-line errors, exit codes.

Its own file so that `config.py` knows nothing of the command-line library, and a command knows nothing of parsing:
it gets a checked options object and returns an exit code.

Exit codes: 0 everything succeeded; 1 something failed; 2 the user asked for what cannot be; 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from dbo.errors import ConfigError, DBOError
from launch import config

OptionsT = TypeVar("OptionsT", bound=config.Options)

FAILED, USAGE, INTERRUPTED = 1, 2, 130
LINGER_S = 5.0


class CommandError(DBOError):
    """A command cannot go on: one line for the user, and the exit code of all ranks. Raised on every rank alike."""

    def __init__(self, message: str, exit_code: int = USAGE):
        super().__init__(message)
        self.exit_code = exit_code


if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # generic since click 8.2 only


class _Parsed(_ParamType):
    """A click type around a `parse` function of `launch.config`."""

    def __init__(self, parse: Callable[[str], Any], name: str):
        self.parse, self.name = parse, name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self.parse(value)
        except ValueError as error:
            self.fail(f"{value!r} is not {error}", param, ctx)


def _parameter(options: type[config.Options], name: str, spec: config.OptionSpec) -> click.Option:
    default = config.defaults(options)[name]
    kind = config.value_type(options, name)
    choices = config.choices_of(options, name)
    required = default is dataclasses.MISSING
    shown: dict[str, Any] = {} if required else {"default": default, "show_default": default is not None}
    if spec.parse:
        kind = _Parsed(spec.parse, name)
    return click.Option(
        [config.flag(name)],
        type=click.Choice(choices) if choices else kind,
        required=required,
        is_flag=kind is bool,
        help=spec.help if spec.check is None else f"{spec.help} ({spec.check.allowed})",
        metavar=spec.metavar,
        **shown,
    )


def command(name: str, options: type[OptionsT], run: Callable[[OptionsT], int], *, help: str) -> click.Command:
    """A click command that builds `options` from its arguments (and `--config FILE`) and returns `run(options)`."""

    def use_file(ctx: click.Context, _: click.Parameter, file: str | None) -> None:
        if file is not None:
            ctx.default_map = {**config.read_options_file(Path(file), options)}

    config_file = click.Option(
        ["--config"],
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=use_file,
        help="TOML or JSON file with these same options; the command line has the last word.",
    )
    return click.Command(
        name,
        params=[*(_parameter(options, n, s) for n, s in config.specs(options).items()), config_file],
        callback=lambda **values: run(options(**values)),
        help=help,
    )


class LazyGroup(click.Group):
    """Commands that are made only when one of them runs: `{name: (maker, short help)}`."""

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[Callable[[], click.Command], str]], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in order of declaration."""
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Make and return a command, or None for an unknown name."""
        return self.lazy[cmd_name][0]() if cmd_name in self.lazy else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without making any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, short) for name, (_, short) in self.lazy.items()])


def imported(path: str) -> Any:
    """The object at `module:attribute`, imported now."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def run(group: click.Command, argv: Sequence[str] | None = None) -> int:
    """Run a command line; a mistake of the user or the environment becomes one line from rank 0 and an exit code."""
    try:
        code = group.main(args=argv, prog_name="launch", standalone_mode=False)
    except click.Abort:
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        return _refuse(error.format_message(), USAGE)
    except click.ClickException as error:
        return _refuse(_one_line(error.format_message()), USAGE)
    except ConfigError as error:
        return _refuse(_one_line(str(error)), USAGE)
    except CommandError as error:
        return _refuse(_one_line(str(error)), error.exit_code)
    except DBOError as error:  # a rank that is gone, say: whoever is left says so
        print(_one_line(str(error)), file=sys.stderr, flush=True)
        return FAILED
    return code if isinstance(code, int) else 0


def _one_line(text: str) -> str:
    return f"error: {' '.join(text.split())}"


def _refuse(text: str, code: int) -> int:
    """Print on rank 0. The other ranks wait a moment: the launcher ends all ranks when the first one exits."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(text, file=sys.stderr, flush=True)
    else:
        linger(code)
    return code


def linger(code: int) -> None:
    """Wait up to LINGER_S for the launcher's signal, and leave with `code` when it comes."""

    def leave(*_: Any) -> NoReturn:
        os._exit(code)

    signal.signal(signal.SIGTERM, leave)
    time.sleep(LINGER_S)
