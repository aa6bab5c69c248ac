"""What the README says is there, and the API reference builds."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from launch.__main__ import COMMANDS, main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TORCHRUN_OPTIONS = {"--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port"}
TORCHRUN_OPTIONS |= {"--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_the_file_tree_is_the_file_tree() -> None:
    block = (ROOT / "README.md").read_text().split("## What is where")[1].split("```")[1]
    package, missing = ROOT, []
    for line in block.strip().splitlines():
        names = re.findall(r"[a-z_0-9]+(?:\.py|/)", line.split(" -> ")[0])
        if not line.startswith(" "):
            package = ROOT / names[0]
        base = package if line.startswith(" ") else ROOT
        missing += [f"{base.name}/{name}" for name in names if not (base / name).exists()]
    assert missing == []


def test_every_option_named_exists() -> None:
    named = set().union(*(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", page.read_text()) for page in PAGES))
    context = click.Context(main)
    commands = [main.get_command(context, name) for name in COMMANDS]
    known = {option for command in commands if command for param in command.params for option in param.opts}
    assert named - TORCHRUN_OPTIONS - {"--help", "--backend", "--ulimit"} <= known


def test_the_api_reference_builds_without_a_warning(tmp_path: Path) -> None:
    line = next(line for line in (ROOT / "scripts/docs").read_text().splitlines() if line.startswith("python "))
    command = [sys.executable, *shlex.split(line.replace("docs/api", str(tmp_path)))[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "UBatchRunner" in (tmp_path / "dbo.html").read_text()
    assert (tmp_path / "moe/upcycle.html").is_file()
