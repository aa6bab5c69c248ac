"""`generate` on three hosts, of which one dies, is cut off, is slow, or can take no more.

Whatever happens, every host that is left says in one line who failed and why, within the time that `docs/cluster.md`
promises; no process stays; what was finished is in the file; and `--resume` ends with the tokens of a run to which
nothing happened.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch import cli
from launch.__main__ import main
from launch.output import read_rows
from tests.hosts import CAN_RUN, Hosts, HostsCommand
from tests.launch import tiny

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.usefixtures("fresh_logging"),
    pytest.mark.skipif(not CAN_RUN, reason="needs root, ip, tc and iptables"),
]

NUM_PROMPTS = 60
LONG = ["--max-new-tokens", "100", "--ignore-eos"]
ONE_AT_A_TIME = ["--max-num-seqs", "1", "--max-num-tokens", "32"]

# What is promised, and what a busy machine gets on top: ending a Python process alone may take it seconds.
DEATH_S, ERROR_S, SILENCE_S, BUSY_S = 10.0, 5.0, 12.0, 10.0
SLACK_S = 8.0
START_S = 300.0  # six processes that import torch, on a machine that does something else too

# The command as a user starts it, but one rank does a deed at one of its steps.
PROGRAM = """
import os, sys, time
import torch
import launch.engine
from launch import cli
from launch.__main__ import main

rank, at, deed, amount = int(sys.argv.pop(1)), int(sys.argv.pop(1)), sys.argv.pop(1), float(sys.argv.pop(1))
deeds = {"sleep": lambda: time.sleep(amount), "allocate": lambda: torch.empty(int(amount))}
forward, steps = launch.engine.Engine.forward, iter(range(10**9))

def forward_and_more(*args):
    if next(steps) == at:
        deeds[deed]()
    return forward(*args)

launch.engine.WARN_S = 2.0
if int(os.environ["RANK"]) == rank:
    launch.engine.Engine.forward = forward_and_more
sys.exit(cli.run(main))
"""


class Job:
    """A run over three hosts, in a directory of its own."""

    def __init__(self, model: str, directory: Path, num_prompts: int = NUM_PROMPTS):
        self.prompts, self.out = directory / "prompts.jsonl", directory / "out.jsonl"
        self.program = directory / "program.py"
        self.program.write_text(PROGRAM)
        tiny.write_prompts(self.prompts, tiny.prompts(NUM_PROMPTS)[:num_prompts])
        self.generate = ["generate", "--model", model, "--prompts", str(self.prompts), "--device", "cpu"]

    @contextmanager
    def run(self, hosts: Hosts, *options: str, deed: str = "") -> Iterator[HostsCommand]:
        """`deed`: "RANK STEP NAME AMOUNT" of `PROGRAM`."""
        program = [str(self.program), *deed.split()] if deed else ["-m", "launch"]
        with HostsCommand(hosts, [*program, *self.generate, "--output", str(self.out), *options]) as command:
            yield command

    def wait_for_rows(self, command: HostsCommand, num_rows: int) -> dict:
        """The rows of the output file once there are so many."""
        deadline = time.monotonic() + START_S
        while len(rows := read_rows(self.out)) < num_rows:
            assert not any(node.poll() for node in command.nodes), command.errors(0)
            assert time.monotonic() < deadline, command.errors(0)
            time.sleep(0.05)
        return rows

    def resume(self, *options: str) -> list[list[int]]:
        """Do the rest, on one rank in this process; returns the tokens of all answers."""
        assert cli.run(main, [*self.generate, "--output", str(self.out), "--resume", *options]) == 0
        rows = read_rows(self.out)
        assert list(rows) == [f"p{i}" for i in range(len(rows))]
        return [row["token_ids"] for row in rows.values()]


@pytest.fixture
def hosts():
    with Hosts(3) as made:
        yield made


@pytest.fixture
def job(tiny_models, tmp_path):
    return Job(tiny_models("mixtral").directory, tmp_path)


@pytest.fixture(scope="session")
def expected(tiny_models, tmp_path_factory) -> list[list[int]]:
    """The answers of a run to which nothing happens, on one rank."""
    return Job(tiny_models("mixtral").directory, tmp_path_factory.mktemp("expected")).resume(*LONG)


def messages(command: HostsCommand, host: int) -> list[str]:
    """What the rank of a host said of a failure: torchrun's lines look different."""
    return [
        line for line in command.errors(host).splitlines() if re.match(r"(\[rank \d\]|error:|rank \d:) .*fail", line)
    ]


def wait_for_the_end(hosts: Hosts, command: HostsCommand, of: list[int], limit_s: float) -> None:
    """Wait until the ranks of these hosts have ended, at most `limit_s`, and torchrun after them."""
    deadline = time.monotonic() + limit_s + SLACK_S
    ranks = {host: _rank(command, host) for host in of}
    while alive := [host for host, pid in ranks.items() if pid in hosts.pids(host)]:
        assert time.monotonic() < deadline, (alive, *(command.errors(host)[-2000:] for host in alive))
        time.sleep(0.05)
    command.wait(30, of)
    assert [hosts.pids(host) for host in of] == [[]] * len(of)


def _rank(command: HostsCommand, host: int) -> int | None:
    try:
        return command.rank_pid(host)[1]
    except RuntimeError:
        return None


# ------------------------------------------------------------------------------------------- somebody is gone


def kill_rank(hosts: Hosts, command: HostsCommand, host: int) -> None:
    subprocess.run(["kill", "-9", str(command.rank_pid(host)[1])], check=True)


def cut(hosts: Hosts, command: HostsCommand, host: int) -> None:
    hosts.cut(host)


@pytest.mark.parametrize(
    ("strike", "victim", "limit_s", "cause"),
    [
        pytest.param(kill_rank, 1, DEATH_S, "nothing was heard from its host|ended without", id="rank"),
        pytest.param(lambda h, c, i: h.kill(i), 0, DEATH_S, "store .* is lost", id="host-of-the-store"),
        pytest.param(cut, 2, SILENCE_S, "nothing was heard from its host for", id="cut"),
        pytest.param(
            lambda h, c, i: h.kill(i), 2, DEATH_S, "nothing was heard", id="host", marks=pytest.mark.slow
        ),
        pytest.param(cut, 0, SILENCE_S, "store .* (is lost|has not)", id="cut-store", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_others_name_who_is_gone_and_keep_what_is_finished(
    hosts: Hosts, job: Job, expected, strike: Callable, victim: int, limit_s: float, cause: str
):
    with job.run(hosts, *LONG, *ONE_AT_A_TIME) as command:
        before = job.wait_for_rows(command, 4)
        assert "3 ranks on 3 hosts (1 on node" in "".join(command.errors(host) for host in range(3))
        rank, _ = command.rank_pid(victim)
        strike(hosts, command, victim)
        others = [host for host in range(3) if host != victim]
        wait_for_the_end(hosts, command, others, limit_s)
        for host in others:
            (line,) = messages(command, host)
            assert re.search(rf"rank {rank} on node{victim} failed: .*({cause})", line), line
    after = read_rows(job.out)
    assert before.items() <= after.items()
    assert len(after) < NUM_PROMPTS
    assert job.resume(*LONG) == expected


def test_a_host_that_is_cut_off_ends_too(hosts: Hosts, job: Job):
    """... and until then every rank listens on the told interface only."""
    with job.run(hosts, *LONG, *ONE_AT_A_TIME) as command:
        job.wait_for_rows(command, 1)
        for host in range(3):
            listening = subprocess.run(
                ["ip", "netns", "exec", hosts.namespace(host), "ss", "-Hltnp"], capture_output=True, text=True
            ).stdout
            pid = command.rank_pid(host)[1]
            addresses = [line.split()[3] for line in listening.splitlines() if f"pid={pid}," in line]
            assert addresses
            assert all(a.rpartition(":")[0].endswith(hosts.address(host)) for a in addresses), addresses
        hosts.cut(2)
        deadline = time.monotonic() + SILENCE_S + SLACK_S
        while hosts.pids(2):
            assert time.monotonic() < deadline, command.errors(2)
            time.sleep(0.05)
        (line,) = messages(command, 2)
        assert re.search(r"rank \d on node0 failed: the store .* (is lost|has not answered)", line)


@pytest.mark.slow
def test_two_hosts_that_do_not_hear_each_other_end_after_the_step_limit(hosts: Hosts, job: Job):
    """Both reach the third, and the store: nobody is gone, and no rank is late."""
    with job.run(hosts, *LONG, *ONE_AT_A_TIME, "--step-timeout", "8") as command:
        job.wait_for_rows(command, 1)
        hosts.part(1, 2)
        wait_for_the_end(hosts, command, [0, 1, 2], 8 + ERROR_S)
        assert re.search("StepTimeout: .* 8 s .* one is under way or lost", "".join(messages(command, 0)))


# ------------------------------------------------------------------------------------------- the network is bad


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda h: (h.lose(1, 0.05), h.limit(2, "2mbit")), id="loss-and-rate"),
        pytest.param(lambda h: h.delay(1, 0.2), id="delay", marks=pytest.mark.slow),
    ],
)
def test_a_bad_network_makes_it_slower_and_nothing_else(hosts: Hosts, tmp_path, tiny_models, expected, spoil: Callable):
    job = Job(tiny_models("mixtral").directory, tmp_path, num_prompts=9)
    with job.run(hosts, "--max-new-tokens", "8", "--ignore-eos", "--max-num-seqs", "1") as command:
        job.wait_for_rows(command, 1)
        spoil(hosts)
        assert {done.returncode for done in command.wait(START_S)} == {0}
    assert [row["token_ids"] for row in read_rows(job.out).values()] == [answer[:8] for answer in expected[:9]]


# ------------------------------------------------------------------------------------------- a rank is slow


@pytest.mark.parametrize(
    ("late_s", "limit_s"),
    [pytest.param(7, 30, id="7s"), pytest.param(120, 180, id="120s", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("late", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_late_first_step_is_waited_for_and_named(hosts: Hosts, job: Job, expected, late: int, late_s, limit_s):
    with job.run(hosts, *LONG, "--step-timeout", str(limit_s), deed=f"{late} 0 sleep {late_s}") as command:
        slow, speaker = command_hosts(command, late, 0 if late else 1)
        assert {done.returncode for done in command.wait(late_s + START_S)} == {0}
        said = re.search(r"this step has waited \d+ s for (.*)", command.errors(speaker))
        assert said, command.errors(speaker)
        assert re.fullmatch(rf"rank {late} on node{slow} \(busy for \d+ s\)", said[1])
    assert [row["token_ids"] for row in read_rows(job.out).values()] == expected


def command_hosts(command: HostsCommand, *ranks: int) -> list[int]:
    """The hosts of some ranks, once all have started."""
    deadline = time.monotonic() + START_S
    while None in [_rank(command, host) for host in range(3)]:
        assert time.monotonic() < deadline, command.errors(0)
        time.sleep(0.2)
    return [command.host_of_rank(rank) for rank in ranks]


def test_a_rank_later_than_the_limit_is_named_and_ended(hosts: Hosts, job: Job, expected):
    with job.run(hosts, *LONG, *ONE_AT_A_TIME, "--step-timeout", "3", deed="1 500 sleep 600") as command:
        before = job.wait_for_rows(command, 4)
        (late,) = command_hosts(command, 1)
        wait_for_the_end(hosts, command, [0, 1, 2], 30 + 3 + BUSY_S)
        for host in range(3):
            (line,) = messages(command, host)
            assert re.search(rf"StepTimeout: .* more than 3 s .* for rank 1 on node{late} \(busy for \d+ s\)", line), (
                line
            )
        # torchrun stops the late rank when the store is gone with the first host; else it ends itself after a while.
        assert re.search("stopped by SIGTERM because|this rank was busy and is ended", command.errors(late))
    assert before.items() <= read_rows(job.out).items()
    assert job.resume(*LONG) == expected


# ------------------------------------------------------------------------------------------- something is full


def test_a_full_disk_is_one_line_that_names_the_file(hosts: Hosts, tmp_path, tiny_models, expected):
    job = Job(tiny_models("mixtral").directory, tmp_path)
    (disk := tmp_path / "disk").mkdir()
    job.out = disk / "out.jsonl"
    mount = ["mount", "-t", "tmpfs", "-o"]
    subprocess.run([*mount, "size=8k", "tmpfs", str(disk)], check=True)
    try:
        with job.run(hosts, *LONG, *ONE_AT_A_TIME) as command:
            job.wait_for_rows(command, 4)
            wait_for_the_end(hosts, command, [0, 1, 2], 60 + ERROR_S)
            for host in range(3):
                (line,) = messages(command, host)
                assert re.search(rf"rank 0 on node\d failed: OSError: .*No space left.*'{job.out}'", line), line
        text = job.out.read_text()
        assert text.endswith("\n")
        assert len(read_rows(job.out)) == text.count("\n") > 5
        assert [file.name for file in disk.iterdir()] == ["out.jsonl"]
        subprocess.run([*mount, "remount,size=1m", str(disk)], check=True)
        assert job.resume(*LONG) == expected
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_rank_without_memory_says_so_everywhere(hosts: Hosts, job: Job, expected):
    with job.run(hosts, *LONG, *ONE_AT_A_TIME, deed=f"2 300 allocate {2**46}") as command:
        before = job.wait_for_rows(command, 4)
        (poor,) = command_hosts(command, 2)
        wait_for_the_end(hosts, command, [0, 1, 2], 30 + ERROR_S)
        for host in range(3):
            (line,) = messages(command, host)
            assert re.search(rf"rank 2 on node{poor} failed: RuntimeError: .*allocate memory", line), line
    assert before.items() <= read_rows(job.out).items()
    assert job.resume(*LONG) == expected
