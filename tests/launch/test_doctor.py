"""The doctor: judgements over facts of machines nobody has, and faults planted in real ranks."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from launch.cli import CommandError
from launch.config import DoctorOptions
from launch.doctor import host, links, run
from launch.doctor.base import Cohort, Finding, Outcome, attempt, differing, ranks_text
from launch.doctor.report import Report
from tests.hosts import CAN_RUN, Hosts, HostsCommand
from tests.ranks import RankCommand

ONE_HOST = Cohort(hosts={0: "a", 1: "a"}, networks={0: "n", 1: "n"}, device="cpu")
TWO_HOSTS = Cohort(hosts={0: "a", 1: "b"}, networks={0: "n", 1: "m"}, device="cuda")


def found(judge, facts, cohort=ONE_HOST) -> list[tuple[str, tuple[int, ...], str]]:
    findings = list(judge(facts, cohort))
    assert all(finding.remedy and "\n" not in finding.what for finding in findings)
    return [(finding.level, finding.ranks, finding.what) for finding in findings]


# --------------------------------------------------------------------------------------------- judgements, on one rank


def test_versions_that_differ_are_failures_of_the_ranks_that_are_not_like_most():
    like_most, other = {"torch": "2.13.0", "numpy": "2.1"}, {"torch": "2.13.0", "numpy": "1.9", "triton": "3"}
    assert found(host.judge_versions, {0: like_most, 1: other, 2: like_most}) == [
        ("fail", (1,), "numpy is 2.1 on ranks 0, 2; 1.9 on rank 1"),
        ("fail", (1,), "triton is absent on ranks 0, 2; 3 on rank 1"),
    ]
    assert found(host.judge_versions, {0: other, 1: other}) == []


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({"torch": "2.10.1+cu128"}, "older than 2.11"),
        ({"cuda": "13.0", "driver": "570.86.15"}, "CUDA 13 needs driver 580"),
        ({"cuda": "12.8", "driver": "515.1"}, "CUDA 12 needs driver 525"),
        ({"tokenspeed-deepep": "2.0.0.post1", "nccl": "2.28.9"}, r"DeepEP 2 needs NCCL 2.30.4 .*nccl 2.28.9"),
        ({"deep-ep": "1.2.1", "deep_ep imports": "undefined symbol: x"}, "does not import .*undefined symbol: x"),
    ],
)
def test_combinations_known_to_fail(versions, words):
    ((level, ranks, what),) = found(host.judge_versions, {0: versions, 1: versions})
    assert (level, ranks) == ("fail", (0, 1))
    assert re.search(words, what), what


def test_combinations_known_to_work():
    fine = {
        "torch": "2.11.0+cu130",
        "cuda": "13.0",
        "driver": "580.159",
        "nccl": "2.28.9",
        "tokenspeed-deepep": "1.2.1.post20251110",
        "deep_ep imports": "yes",
    }
    assert found(host.judge_versions, {0: fine}) == []
    assert found(host.judge_versions, {0: {**fine, "tokenspeed-deepep": "2.0", "nccl": "2.30.4"}}) == []


def test_variables():
    facts = {0: {"NCCL_IB_DISABLE": "1"}, 1: {"NCCL_SOCKET_IFNAME": "eth1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}}
    warned = found(host.judge_variables, facts, TWO_HOSTS)
    assert {level for level, *_ in warned} == {"warn"}
    texts = " ".join(what for *_, what in warned)
    assert "NCCL_IB_DISABLE is 1 on rank 0; absent on rank 1" in texts
    assert "one hardware queue" in texts
    assert "IFNAME" not in texts  # hosts name their interfaces as they like
    assert not [w for w in found(host.judge_variables, facts, ONE_HOST) if "queue" in w[2]]


def test_limits_and_space():
    low = {"open files": 64, "open files needed": 272, "locked memory": 2**16}
    high = {"open files": -1, "open files needed": 272, "locked memory": -1}
    assert found(host.judge_limits, {0: high, 1: low}) == [
        ("fail", (1,), "at most 64 open files are allowed; 2 ranks need 272")
    ]
    assert [f[0] for f in found(host.judge_limits, {0: high, 1: low}, TWO_HOSTS)] == ["fail", "warn"]
    space = {"free in /": 50 * 2**20, "free in /tmp": 500 * 2**20, "shared memory": 2**26, "free shared memory": 2**26}
    assert [f[0] for f in found(host.judge_space, {0: space})] == ["fail", "warn"]
    on_cuda = found(host.judge_space, {0: space}, TWO_HOSTS)
    assert ("fail", (0,), "64.0 MiB of 64.0 MiB in /dev/shm are free; NCCL exchanges messages there") in on_cuda


FOUND = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "eth1": "10.1.0.7", "docker0": "172.17.0.1", "down0": ""}


@pytest.mark.parametrize(
    ("setting", "address", "why"),
    [
        ("eth1", "10.1.0.7", "GLOO_SOCKET_IFNAME=eth1"),
        ("eth0,eth1", "10.0.0.7", "GLOO_SOCKET_IFNAME=eth0,eth1"),
        ("nosuch0", "", "nosuch0 of GLOO_SOCKET_IFNAME does not exist"),
        ("eth0,down0", "", "down0 of GLOO_SOCKET_IFNAME has no address"),
    ],
)
def test_the_address_that_gloo_uses(setting, address, why):
    assert host.gloo_address({"GLOO_SOCKET_IFNAME": setting}, FOUND, "unused")[0] == address
    assert why in host.gloo_address({"GLOO_SOCKET_IFNAME": setting}, FOUND, "unused")[1]


def test_without_a_setting_gloo_follows_the_hosts_name():
    assert host.gloo_address({}, FOUND, "127.0.0.1") == ("127.0.0.1", "what 127.0.0.1 resolves to")
    assert host.gloo_address({}, FOUND, "192.0.2.1")[1] == "192.0.2.1 resolves to no address of this host"
    with mock.patch.object(socket, "getaddrinfo", side_effect=socket.gaierror):
        assert host.gloo_address({}, FOUND, "gone") == ("127.0.0.1", "gone does not resolve")


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("", ["eth0", "eth1"]),
        ("eth", ["eth0", "eth1"]),
        ("=eth", []),
        ("=eth1", ["eth1"]),
        ("^eth0", ["lo", "eth1", "docker0"]),
        ("^=eth0,lo", ["eth1", "docker0"]),
    ],
)
def test_the_interfaces_that_nccl_may_use(setting, names):
    assert host.nccl_interfaces({"NCCL_SOCKET_IFNAME": setting}, FOUND) == names


def test_interfaces_of_this_host():
    assert host.interfaces()["lo"] == "127.0.0.1"


def address_facts(address: str, interface: str) -> dict:
    return {"gloo": address, "why": "why", "interface": interface, "nccl": ["eth0"], "interfaces": FOUND}


def test_addresses():
    local, wide = address_facts("127.0.0.1", "lo"), address_facts("10.0.0.7", "eth0")
    assert found(host.judge_address, {0: local, 1: local}) == []
    assert found(host.judge_address, {0: wide, 1: wide}, TWO_HOSTS) == []
    ((level, ranks, what),) = found(host.judge_address, {0: wide, 1: local}, TWO_HOSTS)
    assert (level, ranks, what) == ("fail", (1,), "gloo uses 127.0.0.1 (why), which other hosts cannot reach")
    ((level, ranks, what),) = found(host.judge_address, {0: wide, 1: local})
    assert (level, ranks) == ("warn", (1,))
    expecting = replace(TWO_HOSTS, expect_interface="eth1")
    assert [f[0:2] for f in found(host.judge_address, {0: wide, 1: wide}, expecting)] == [
        ("fail", (0,)),
        ("fail", (1,)),
    ]
    no_nccl = {**wide, "nccl": []}
    assert "leaves no interface" in found(host.judge_address, {0: no_nccl}, TWO_HOSTS)[0][2]


def test_gpus():
    facts = {
        0: {"name": "H200", "uuid": "x", "index": 0, "peers": {"1": False}, "nvlinks": 18},
        1: {"name": "H200", "uuid": "x", "index": 0, "peers": {"1": True}, "nvlinks": None},
        2: {"name": "A100", "uuid": "x", "index": 0, "peers": {}, "nvlinks": None},
    }
    cohort = Cohort(hosts={0: "a", 1: "a", 2: "b"}, networks={0: "n", 1: "n", 2: "m"}, device="cuda")
    assert found(host.judge_gpu, facts, cohort) == [
        ("fail", (0, 1), "these ranks share one GPU"),
        ("warn", (2,), "GPU is H200 on ranks 0, 1; A100 on rank 2"),
        ("warn", (0,), "GPU 0 cannot read GPU 1 directly: messages pass through the host"),
    ]


def test_rdma_matters_between_hosts():
    none = {"ports": {"mlx5_0:1": "DOWN"}, "peer memory": False, "ibgda": False}
    plain = {"ports": {"mlx5_0:1": "ACTIVE"}, "peer memory": True, "ibgda": False}
    assert found(host.judge_rdma, {0: none, 1: plain}) == []
    texts = [what for *_, what in found(host.judge_rdma, {0: none, 1: plain}, TWO_HOSTS)]
    assert "no active InfiniBand" in texts[0]
    assert "IBGDA is not enabled" in texts[1]
    assert found(host.judge_rdma, {1: {**plain, "ibgda": True}}, TWO_HOSTS) == []


def test_a_host_that_others_slow_down():
    even = {"least": 100.0, "median": 102.0, "p90": 130.0}
    assert found(host.judge_pace, {0: even, 1: {"least": 110.0, "median": 140.0, "p90": 150.0}}) == []
    uneven, slow = {"least": 100.0, "median": 103.0, "p90": 190.0}, {"least": 195.0, "median": 204.0, "p90": 210.0}
    assert found(host.judge_pace, {0: even, 1: uneven}) == [
        ("warn", (1,), "Python runs unevenly: up to 1.9 times as long as at best")
    ]
    assert found(host.judge_pace, {0: slow, 1: even}) == [("warn", (0,), "Python takes 2.0 times as long as on rank 1")]
    assert found(host.judge_pace, {}) == []


def test_a_pace():
    pace = host.gather_pace(mock.Mock())
    assert 0 < pace["least"] <= pace["median"] <= pace["p90"] < 1e5
    assert "us" in next(check for check in host.CHECKS if check.name == "pace").show(pace)


def test_clocks():
    facts = {0: {"ahead_s": 0.0, "error_s": 0.0}, 1: {"ahead_s": -30.0, "error_s": 0.1}}
    assert found(links.judge_clock, facts) == [("fail", (1,), "its clock is 30.0 s behind rank 0's")]
    facts[1] = {"ahead_s": 2.0, "error_s": 0.1}
    assert found(links.judge_clock, facts) == [("warn", (1,), "its clock is 2.0 s ahead of rank 0's")]
    facts[1] = {"ahead_s": 2.0, "error_s": 1.5}  # it may be the round trip
    assert found(links.judge_clock, facts) == []


def test_a_slow_pair_among_others_is_a_warning():
    hosts = Cohort(hosts=dict.fromkeys(range(4), "h"), networks={r: f"n{r}" for r in range(4)}, device="cuda")
    facts = {
        a: {"to": {str(b): {"gbs": 1.0 if (a, b) == (2, 3) else 20.0, "latency_us": 5} for b in range(4) if b != a}}
        for a in range(4)
    }
    ((level, ranks, what),) = found(links.judge_pairs, facts, hosts)
    assert (level, ranks) == ("warn", (2, 3))
    assert "1 GB/s from rank 2 to rank 3; the median between hosts is 20" in what


@pytest.mark.parametrize("present", [[0], [0, 1], [0, 2, 5], list(range(8)), list(range(9))])
def test_in_a_tournament_all_pairs_meet_once(present):
    rounds = {rank: links.partners(present, rank) for rank in present}
    met = [(rank, other) for rank in present for other in rounds[rank] if other is not None]
    assert sorted(met) == sorted(itertools.permutations(present, 2))
    for number in range(len(rounds[0])):
        assert all(rounds[other][number] == rank for rank in present if (other := rounds[rank][number]) is not None)


def test_small_helpers():
    assert [ranks_text(r) for r in ([3], [0, 2], [4, 5, 6])] == ["rank 3", "ranks 0, 2", "ranks 4-6"]
    assert differing("x", {0: 1, 1: 1}) is None
    assert attempt(lambda: {"a": 1}, 5).facts == {"a": 1}
    assert attempt(lambda: {}["gone"], 5).error == "KeyError: 'gone'"
    started = time.monotonic()
    late = attempt(lambda: time.sleep(1) or {}, 0.05)
    assert (late.late, late.error) == (True, "not done within 0.05 s")
    assert time.monotonic() - started < 0.9


def test_the_report_names_what_is_wrong_and_what_to_do():
    checks = [check for check in run.CHECKS if check.name in ("limits", "gloo")]
    limits = Outcome(facts={"open files": 64, "open files needed": 272, "locked memory": -1})
    pair = Outcome(facts={"to": {"1": {"gbs": 2.5, "latency_us": 31.0}}})
    outcomes = {0: {"limits": limits, "gloo": pair}, 1: {"limits": Outcome(error="OSError: no")}}
    findings = list(run.judge(checks, outcomes, TWO_HOSTS))
    assert [(name, finding.ranks) for name, finding in findings] == [("limits", (1,)), ("limits", (0,)), ("gloo", (1,))]
    findings.append(("gpu", Finding(level="warn", ranks=(0, 1), what="odd", remedy="look")))
    report = Report(world_size=2, cohort=TWO_HOSTS, checks=checks, outcomes=outcomes, findings=findings)
    lines = list(report.lines())
    assert lines[0] == "rank 0 on a"
    assert "  limits  fail  open files 64, locked memory unlimited" in lines
    assert "  limits  fail  OSError: no" in lines
    assert "  gloo    fail  nothing was heard" in lines
    assert "   0         -  2.5 (31)" in lines
    assert "FAIL  limits: rank 0 on a: at most 64 open files are allowed; 1 ranks need 272" in lines
    assert "WARN  gpu: ranks 0, 1 on a, b: odd" in lines
    assert lines[-1] == "2 ranks on 2 hosts, cuda: 3 failures, 1 warning"
    assert not json.loads(json.dumps(report.as_json()))["ok"]


# --------------------------------------------------------------------------------------- planted faults, on real ranks


def unanswered(address: str) -> socket.socket:
    """A port whose packets are dropped, as by a firewall: its queue of connections is full and nobody takes any."""
    server = socket.create_server((address, 0), backlog=0)
    for _ in range(4):
        waiting = socket.socket()
        waiting.setblocking(False)
        waiting.connect_ex(server.getsockname())
        fillers.append(waiting)
    return server


fillers: list[socket.socket] = []


def refused(address: str) -> socket.socket:
    """A port that refuses: bound, but nobody listens."""
    server = socket.socket()
    server.bind((address, 0))
    return server


@contextlib.contextmanager
def planted(fault: str):
    """This rank with a fault."""
    with contextlib.ExitStack() as stack:
        if fault == "package":
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            info = Path(directory) / "numpy-0.9.9.dist-info"
            info.mkdir()
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.9.9\n")
            stack.enter_context(mock.patch.object(sys, "path", [directory, *sys.path]))
        elif fault.startswith("interface"):
            stack.enter_context(mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME=fault.split()[1]))
        elif fault in ("refused", "unanswered"):
            stack.enter_context(mock.patch.object(links, "listen", globals()[fault]))
            stack.enter_context(mock.patch.object(links, "_answer", return_value=None))
        elif fault == "other host":
            stack.enter_context(mock.patch.object(run, "_network", return_value="another network"))
        yield
    for socket_ in fillers:
        socket_.close()


def hang(site):
    time.sleep(20)


def examine(ctx, fault: str = "", limit_s: float | None = None):
    """What the doctor says with a fault on the last rank, as JSON, and how long it took."""
    fault = fault if ctx.rank == ctx.world_size - 1 else ""
    checks = run.chosen_checks("cpu", limit_s)
    if fault == "absent":
        return None
    if fault == "hanging check":
        checks[2] = replace(checks[2], gather=hang)
    if fault == "dies":
        checks = checks[:5]
    started = time.monotonic()
    with planted(fault):
        report = run.examine(
            ctx.store, ctx.rank, ctx.world_size, torch.device("cpu"), checks, start_limit_s=3,
            now=(lambda: time.time() + 30) if fault == "clock" else time.time,
        )  # fmt: skip
        ctx.store.set(f"done/{ctx.rank}", "")
    return (report.as_json(), list(report.lines()), time.monotonic() - started) if report else None


def failures(report) -> list[tuple[str, list[int], str]]:
    return [(f["check"], list(f["ranks"]), f["what"]) for f in report["findings"] if f["level"] == "fail"]


def test_healthy_ranks_are_fine(ranks):
    report, lines, elapsed_s = ranks(2).run(examine, timeout=60)[0]
    assert failures(report) == []
    assert report["ok"]
    assert elapsed_s < 20
    for rank in report["ranks"]:
        checks = rank["checks"]
        assert set(checks) == {"versions", "variables", "limits", "space", "address", "clock", "reach", "gloo"}
        assert abs(checks["clock"]["facts"]["ahead_s"]) < 0.5
        measured = checks["gloo"]["facts"]["to"][str(1 - rank["rank"])]
        assert measured["gbs"] > 0
        assert 0 < measured["latency_us"] < 1e6
    assert any(line.startswith("gloo, GB/s") for line in lines)


def test_a_package_of_another_version_on_one_rank(ranks):
    report, *_ = ranks(2).run(examine, "package", timeout=60)[0]
    ((check, who, what),) = failures(report)
    assert (check, who) == ("versions", [1])
    assert "numpy is" in what
    assert "0.9.9 on rank 1" in what


@pytest.mark.parametrize(("fault", "words"), [("refused", "refused"), ("unanswered", "packets are dropped")])
def test_a_blocked_port(ranks, fault, words):
    report, _, elapsed_s = ranks(2).run(examine, fault, timeout=60)[0]
    ((check, who, what),) = failures(report)
    assert (check, who) == ("reach", [0, 1])
    assert "rank 0 cannot connect to rank 1: 127.0.0.1:" in what
    assert words in what
    assert elapsed_s < 20
    assert report["ranks"][0]["checks"]["gloo"]["facts"] == {"to": {}}  # not tried again where it would wait longer


def test_one_pair_that_is_blocked_leaves_the_others_measured(ranks):
    report, *_ = ranks(4).run(examine, "refused", timeout=60)[0]
    assert sorted(who for _, who, _ in failures(report)) == [[0, 3], [1, 3], [2, 3]]
    assert set(report["ranks"][0]["checks"]["gloo"]["facts"]["to"]) == {"1", "2"}


def test_an_interface_that_does_not_exist(ranks):
    report, *_ = ranks(2).run(examine, "interface nosuch0", timeout=60)[0]
    ((check, who, what),) = failures(report)
    assert (check, who) == ("address", [1])
    assert "nosuch0 of GLOO_SOCKET_IFNAME does not exist" in what
    (finding,) = (f for f in report["findings"] if f["level"] == "fail")
    assert "this host has lo (127.0.0.1)" in finding["remedy"]


def test_the_loopback_between_hosts(ranks):
    report, *_ = ranks(2).run(examine, "other host", timeout=60)[0]
    assert ("address", [1], "gloo uses 127.0.0.1 (GLOO_SOCKET_IFNAME=lo), which other hosts cannot reach") in failures(
        report
    )


def test_a_clock_that_is_30_s_off(ranks):
    report, *_ = ranks(2).run(examine, "clock", timeout=60)[0]
    assert failures(report) == [("clock", [1], "its clock is 30.0 s ahead of rank 0's")]


def test_a_rank_that_does_not_come(ranks):
    report, lines, elapsed_s = ranks(2).run(examine, "absent", timeout=60)[0]
    assert failures(report) == [("start", [1], "rank 1 did not come within 3 s")]
    assert "FAIL  start: rank 1 on an unknown host: rank 1 did not come within 3 s" in lines
    assert elapsed_s < 10


def test_a_check_that_hangs_is_left_behind(ranks):
    report, _, elapsed_s = ranks(2).run(examine, "hanging check", 1.5, timeout=60)[0]
    assert ("limits", [1], "not done within 2.5 s") in failures(report)
    assert elapsed_s < 20


def test_a_rank_that_dies_between_checks(ranks):
    report, _, elapsed_s = ranks(2).run(examine, "dies", 1.0, timeout=60)[0]
    assert ("clock", [1], "nothing was heard from it at or after the check clock") in failures(report)
    assert all(1 in who for _, who, _ in failures(report))
    assert elapsed_s < 25


def test_who_comes_too_late_is_told(ranks):
    ranks(2).run(come_late, timeout=60)


def come_late(ctx):
    if ctx.rank == 0:
        run._meet(ctx.store, 0, 2, 0.5)
        return
    time.sleep(1.5)
    with pytest.raises(CommandError, match=r"rank 1 came after the others had waited for 0\.5 s"):
        run._meet(ctx.store, 1, 2, 0.5)


# -------------------------------------------------------------------------------------------------- the whole command


def program(*argv: str, before: str = ":") -> list[str]:
    """The command, after some shell, for a launcher that is told `--no-python`."""
    return ["bash", "-c", f'{before}; exec "$0" -m launch doctor "$@"', sys.executable, *argv]


def doctor(num_ranks: int, *argv: str, before: str = ":"):
    """The command under torch's launcher; `before` is shell that each rank runs first."""
    with RankCommand(num_ranks, program(*argv, before=before), launcher_args=["--no-python"]) as command:
        return command.wait(100)


def test_a_low_file_limit_in_the_whole_command():
    done = doctor(2, "--json", "--device", "cpu", before='[ "$RANK" = 0 ] || ulimit -n 64')
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert failures(report) == [("limits", [1], "at most 64 open files are allowed; 2 ranks need 272")]
    assert "launch/doctor" not in done.stderr, "a traceback of ours"


def test_the_whole_command_says_that_all_is_fine():
    done = doctor(2, "--device", "cpu", "--expect-interface", "lo")
    assert (done.returncode, done.stdout.splitlines()[-1].split(", cpu: ")[0]) == (0, "2 ranks on 1 host"), done.stdout
    assert "FAIL" not in done.stdout


def on_hosts(made: Hosts, before: str = ":") -> tuple[dict, dict[str, int]]:
    """What the doctor says on several hosts, and the rank of each by name."""
    with HostsCommand(made, ["--no-python", *program("--json", "--device", "cpu", before=before)]) as command:
        ended = command.wait(150)  # most of it is the launcher's
    report = json.loads("".join(node.stdout for node in ended))
    assert {node.returncode for node in ended} == {1}
    return report, {rank["host"]: rank["rank"] for rank in report["ranks"]}


@pytest.mark.slow
@pytest.mark.hosts
@pytest.mark.skipif(not CAN_RUN, reason="needs root, ip, tc and iptables")
def test_a_firewall_between_two_of_three_hosts():
    with Hosts(3) as made:
        made.part(1, 2)
        report, ranks = on_hosts(made)
    pair = sorted((ranks["node1"], ranks["node2"]))
    ((check, who, what),) = failures(report)
    assert (check, who) == ("reach", pair)
    assert what.count("does not answer (packets are dropped)") == 2
    assert all(sum(made["elapsed_ms"] for made in rank["checks"].values()) < 30_000 for rank in report["ranks"])
    measured = {tuple(sorted((r["rank"], int(o)))) for r in report["ranks"] for o in r["checks"]["gloo"]["facts"]["to"]}
    assert measured == {(0, 1), (0, 2), (1, 2)} - {tuple(pair)}


@pytest.mark.slow
@pytest.mark.hosts
@pytest.mark.skipif(not CAN_RUN, reason="needs root, ip, tc and iptables")
def test_an_interface_that_other_hosts_cannot_reach():
    with Hosts(2) as made:
        report, ranks = on_hosts(made, '[ "$(hostname)" = node0 ] || export GLOO_SOCKET_IFNAME=lo')
    address, reach = failures(report)
    what = "gloo uses 127.0.0.1 (GLOO_SOCKET_IFNAME=lo), which other hosts cannot reach"
    assert address == ("address", [ranks["node1"]], what)
    assert reach[:2] == ("reach", [0, 1])
    assert f"rank {ranks['node0']} cannot connect to rank {ranks['node1']}: 127.0.0.1:" in reach[2]
    assert "this host has lo (127.0.0.1), eth0 (10.77.0.2)" in report["findings"][0]["remedy"]


def test_one_process_alone(capsys, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert run.run(DoctorOptions(device="cpu", expect_interface="nosuch0")) == 1
    assert "not nosuch0" in capsys.readouterr().out
