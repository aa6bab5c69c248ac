"""The command line: options declared once, files, errors of one line, exit codes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import click
import pytest

from dbo.errors import ConfigError
from launch import cli
from launch.__main__ import main
from launch.config import EngineOptions, GenerateOptions, flag, parse_bytes, specs

NEEDED = ["--model", "m", "--prompts", "p", "--output", "o"]


@pytest.fixture
def seen():
    return []


@pytest.fixture
def run(seen, capsys):
    """Run a command with the options of `generate`; gives (exit code, standard error)."""

    def run(*argv: str) -> tuple[int, str]:
        command = cli.command("generate", GenerateOptions, lambda options: seen.append(options) or 0, help="Help.")
        code = cli.run(command, list(argv))
        return code, capsys.readouterr().err

    return run


def test_defaults_and_values(run, seen):
    assert run(*NEEDED, "--max-num-tokens", "64", "--overlap", "on", "--resume", "--kv-cache-memory", "2MiB") == (0, "")
    (options,) = seen
    expected = GenerateOptions(
        model="m", prompts="p", output="o", max_num_tokens=64, overlap="on", resume=True, kv_cache_memory=2 * 2**20
    )
    assert options == expected


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max-num-tokens", "0"], ["--max-num-tokens=0", "1 or more"]),
        (["--max-num-tokens", "many"], ["--max-num-tokens", "many", "integer"]),
        (["--overlap", "maybe"], ["--overlap", "maybe", "off", "on"]),
        (["--overlapp", "on"], ["--overlapp", "--overlap"]),
        (["--top-p", "1.5"], ["--top-p=1.5", "above 0, up to 1"]),
        (["--step-timeout", "inf"], ["--step-timeout=inf", "0 or more, finite"]),
        (["--step-timeout", "nan"], ["--step-timeout=nan", "0 or more, finite"]),
        (["--seed", "-1"], ["--seed=-1", "0 or more"]),
        (["--kv-cache-memory", "4 lots"], ["--kv-cache-memory", "4 lots", "GiB"]),
        (["--num-ubatches", "1"], ["--num-ubatches=1", "2 or more"]),
        (["stray"], ["stray"]),
    ],
)
def test_a_wrong_option_is_one_line_with_option_value_and_what_is_allowed(run, seen, argv, words):
    code, err = run(*NEEDED, *argv)
    assert code == 2
    assert err.count("\n") == 1
    assert all(word in err for word in words), err
    assert not seen


def test_a_missing_required_option_is_named(run):
    code, err = run("--model", "m", "--output", "o")
    assert (code, err.count("\n")) == (2, 1)
    assert "--prompts" in err


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_file_gives_the_same_options_and_the_command_line_wins(run, seen, tmp_path, suffix):
    values = {
        "model": "m",
        "prompts": "p",
        "output": "o",
        "max-num-tokens": 99,
        "top_p": 0.5,
        "resume": True,
        "seed": 4,
    }
    file = tmp_path / f"options{suffix}"
    toml = "\n".join(f"{k} = {json.dumps(v)}" for k, v in values.items())
    file.write_text(toml if suffix == ".toml" else json.dumps(values))
    assert run("--config", str(file), "--seed", "5") == (0, "")
    (options,) = seen
    assert options == GenerateOptions(
        model="m", prompts="p", output="o", max_num_tokens=99, top_p=0.5, resume=True, seed=5
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_num_token = 3", ["max_num_token", "did you mean max_num_tokens?"]),
        ("max_num_tokens = 3.5", ["--max-num-tokens", "3.5"]),
        ("max_num_tokens = true", ["--max-num-tokens", "True", "integer"]),
        ("step_timeout = true", ["--step-timeout", "True", "float"]),
        ("kv_cache_memory = true", ["--kv-cache-memory", "True", "GiB"]),
        ("seed = [1]", ["seed", "one plain value"]),
        ("seed = ", ["--config", "options.toml"]),
    ],
)
def test_a_wrong_file_is_one_line(run, tmp_path, text, words):
    file = tmp_path / "options.toml"
    file.write_text(text)
    code, err = run(*NEEDED, "--config", str(file))
    assert (code, err.count("\n")) == (2, 1)
    assert all(word in err for word in words), err


def test_a_missing_file_is_one_line(run):
    code, err = run(*NEEDED, "--config", "no-such-file.toml")
    assert code == 2
    assert "no-such-file.toml" in err


def test_every_option_has_help_and_a_field_of_its_own_name():
    for options in (EngineOptions, GenerateOptions):
        declared = specs(options)
        assert set(declared) == {f.name for f in dataclasses.fields(options)}
        assert all(spec.help for spec in declared.values())


def test_help_shows_every_option(capsys):
    assert cli.run(main, ["generate", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(flag(name) in out for name in specs(GenerateOptions))


@pytest.mark.parametrize(
    "argv", [["--help"], ["--version"], ["generate", "--help"], ["generate", "--overlap", "maybe"]]
)
def test_what_needs_no_model_is_answered_at_once(argv):
    code = "import sys; from launch.__main__ import main; from launch import cli; cli.run(main, sys.argv[1:])\n"
    code += "assert not {'torch', 'numpy', 'launch.generate', 'moe', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    if argv == ["--help"]:
        assert all(name in done.stdout for name in ("generate", "ab", "upcycle", "--version"))


def test_unknown_commands_and_version(capsys):
    assert cli.run(main, ["generat"]) == 2
    assert "generat" in capsys.readouterr().err
    assert cli.run(main, ["--version"]) == 0
    assert "dbo-moe" in capsys.readouterr().out


def test_an_interrupt_is_130(capsys):
    @click.command()
    def command() -> None:
        raise KeyboardInterrupt

    assert cli.run(command, []) == 130


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("4GiB", 4 * 2**30), ("1.5 MiB", 3 * 2**19), ("7kib", 7 * 1024)])
def test_sizes(text, value):
    assert parse_bytes(text) == value


def test_options_cannot_be_wrong():
    with pytest.raises(ConfigError, match=r"--overlap='onn'.*did you mean on\?"):
        EngineOptions(model="m", overlap="onn")
