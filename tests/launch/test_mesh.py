"""The mesh: launchers' variables, devices, groups that can be left behind, and ranks that fail, die or leave early."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dbo import groups
from dbo.errors import ConfigError, PeerFailed
from launch.mesh import (
    Mesh,
    Place,
    RendezvousError,
    choose_device,
    connect_store,
    first_node,
    is_torchrun,
    read_place,
)
from tests.ranks import REPOSITORY, kill_tree

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_ID": "77",
}


# --------------------------------------------------------------------------- what the launcher says


def test_the_place_is_read_from_torchrun_and_from_slurm():
    place = read_place(TORCHRUN)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (5, 8, 1, 4)
    assert (place.address, place.port, place.launcher_keeps_store, place.attempt) == ("node0", 29500, True, "2")
    place = read_place(SLURM)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (5, 8, 1, 4)
    assert (place.address, place.launcher_keeps_store) == ("gpu03", False)
    assert read_place({**SLURM, **TORCHRUN}).address == "node0"  # torchrun within a Slurm job
    assert read_place({}) is None
    assert read_place({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named_with_the_remedy(name):
    environment = {k: v for k, v in TORCHRUN.items() if k != name}
    with pytest.raises(ConfigError, match=f"{name}=None.*torchrun"):
        read_place(environment)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("gpu[03-07,9]", "gpu03"), ("rack[1-2]n[4-5],x", "rack1n4"), ("n[7]", "n7")],
)
def test_the_first_of_a_node_list(nodes, first):
    assert first_node(nodes) == first


@pytest.mark.parametrize(
    ("device", "num_visible", "expected"),
    [("auto", 0, "cpu"), ("cpu", 8, "cpu"), ("auto", 8, "cuda:1"), ("cuda", 1, "cuda:0"), ("cuda", 4, "cuda:1")],
)
def test_the_device_follows_the_local_rank(monkeypatch, device, num_visible, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    assert choose_device(device, read_place(TORCHRUN)) == torch.device(expected)


@pytest.mark.parametrize(
    ("device", "num_visible", "message"),
    [("cuda", 0, "sees no CUDA device"), ("auto", 3, "4 processes of this host share 3 GPUs"), ("tpu", 1, "auto, cpu")],
)
def test_a_device_that_cannot_be_is_refused(monkeypatch, device, num_visible, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    with pytest.raises(ConfigError, match=message):
        choose_device(device, read_place(TORCHRUN))


def test_a_process_alone_is_a_mesh_of_one():
    threads, descriptors = threading.active_count(), len(os.listdir("/dev/fd"))
    with Mesh.start(device="cpu", environment={}) as mesh:
        assert (mesh.rank, mesh.world_size, mesh.device.type) == (0, 1, "cpu")
        check_groups(mesh)
        mesh.renew()
        check_groups(mesh)
        mesh.peers.compare_options({"a": "b"})
        mesh.barrier("end")
    assert (threading.active_count(), len(os.listdir("/dev/fd"))) == (threads, descriptors)
    assert not dist.is_initialized()


def test_nobody_to_meet_is_an_error_with_the_remedy():
    environment = {**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with pytest.raises(RendezvousError, match=r"127\.0\.0\.1.*MASTER_ADDR"):
        Mesh.start(device="cpu", environment=environment, limit_s=1)


# --------------------------------------------------------------------------- ranks of a pool


def check_groups(mesh) -> None:
    for group in (mesh.agreement_group, mesh.device_group):
        x = torch.full((2,), float(group.rank() + 1))
        dist.all_reduce(x, group=group)
        assert x.tolist() == [sum(range(1, mesh.world_size + 1))] * 2


def all_to_all(mesh):
    x = torch.arange(4.0 * mesh.world_size)
    return dist.all_to_all_single(torch.empty_like(x), x, group=mesh.device_group, async_op=True)


def differ_in_an_option(ctx):
    with ctx.mesh() as mesh:
        check_groups(mesh)
        with pytest.raises(ConfigError, match=r"--num-ubatches.*'2' on rank 0; '3' on rank 1") as error:
            mesh.peers.compare_options({"--cut": "tokens", "--num-ubatches": str(2 + ctx.rank)})
        return error.value.field


def raise_error(text: str) -> None:
    raise ValueError(text)


def fail_and_renew(ctx, times):
    """Every time, one rank fails while the others wait in C++ for its message; then the groups are renewed."""
    counts, noticed_s = [], []
    with ctx.mesh() as mesh:
        for attempt in range(times):
            failing = attempt % mesh.world_size
            works = [all_to_all(mesh) for _ in range(3)] if mesh.rank != failing else []
            started = time.monotonic()
            with pytest.raises(Exception, match=f"this is attempt {attempt}") as error, mesh.peers.guard():
                works[0].wait() if works else raise_error(f"this is attempt {attempt}")
            noticed_s.append(time.monotonic() - started)
            assert type(error.value) is (ValueError if mesh.rank == failing else PeerFailed)
            del works, error
            mesh.renew()
            check_groups(mesh)
            for thread in threading.enumerate():
                if thread.name == groups.DROPPING:  # abandoned groups end in a thread of their own
                    thread.join(10)
            mesh.barrier(f"dropped {attempt}")  # and each end of a connection when its rank comes to it
            counts.append((threading.active_count(), len(os.listdir("/proc/self/task")), len(os.listdir("/dev/fd"))))
    return counts, max(noticed_s)


def leave_early(ctx):
    mesh = ctx.mesh()
    mesh.barrier("connected")
    if mesh.rank == 1:
        mesh._leave()  # as after an error of its own, without a word to the others
        return ""
    started = time.monotonic()
    with pytest.raises(PeerFailed) as error, mesh.peers.guard():
        all_to_all(mesh).wait()
    mesh.close()
    assert time.monotonic() - started < 5
    return str(error.value)


def finish_at_different_times(ctx):
    with ctx.mesh() as mesh:
        time.sleep(0.5 * mesh.rank)
        left = time.monotonic()
    return left, time.monotonic() - left


def refuse_to_go_on(ctx):
    mesh = ctx.mesh()
    if mesh.rank == 0:
        with pytest.raises(SystemExit, match="rank 0: a low-latency dispatch cannot be recalled"):
            mesh.renew(must_exit="a low-latency dispatch")
        mesh._leave()
        return ""
    failure = mesh.peers.wait_failure(5)
    mesh.close()
    return failure.reason


def test_options_are_compared(ranks):
    assert ranks(2).run(differ_in_an_option) == ["--num-ubatches"] * 2


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_failed_step_is_left_behind(ranks, num_ranks):
    for counts, noticed_s in ranks(num_ranks).run(fail_and_renew, 12, timeout=60):
        assert noticed_s < 5
        assert counts[3] == counts[-1], counts


@pytest.mark.slow
def test_fifty_failed_steps_leave_nothing(ranks):
    for counts, _ in ranks(4).run(fail_and_renew, 50, timeout=200):
        assert counts[3] == counts[-1], counts


def test_a_rank_that_leaves_early_is_named(ranks):
    assert "rank 1 on" in (text := ranks(2).run(leave_early)[0])
    assert "it left before the others were done" in text


def test_ranks_wait_for_each_other_at_the_end(ranks):
    (_, waited_s), (_, last_waited_s) = ranks(2).run(finish_at_different_times)
    assert 0.3 < waited_s < 5
    assert last_waited_s < 1


def test_what_cannot_be_recalled_ends_the_process(ranks):
    assert "a low-latency dispatch cannot be recalled" in ranks(2).run(refuse_to_go_on)[1]


# --------------------------------------------------------------------------- ranks that are killed, without torchrun


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def say(line: str) -> None:
    """One write, so that lines of several ranks do not mix (`print` makes two where Python does not buffer)."""
    os.write(1, f"{line}\n".encode())


def step_for_ever(rank: int) -> None:
    """The program of a rank: one all-to-all after the other, waited for inside C++."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    with Mesh.start(device="cpu") as mesh:
        mesh.signals.on_exit(lambda: say(f"rank {rank} flushed"))
        say(f"rank {rank} ready as {os.getpid()}")
        try:
            with mesh.peers.guard():
                while True:
                    all_to_all(mesh).wait()
        except PeerFailed as failure:
            say(f"rank {rank} says: {failure}")


def fork_ranks(num_ranks: int) -> None:
    """Several ranks for the price of one start, with no launcher that would end them all when one dies."""
    children = [multiprocessing.get_context("fork").Process(target=step_for_ever, args=(r,)) for r in range(num_ranks)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    say(f"ended with {[child.exitcode for child in children]}")


@contextmanager
def job(num_ranks: int):
    """The job's process and the process id of each rank, once all are connected."""
    program = f"from tests.launch.test_mesh import fork_ranks; fork_ranks({num_ranks})"
    own = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            pids = {}
            for line in process.stdout:
                if found := re.match(r"rank (\d) ready as (\d+)", line):
                    pids[int(found[1])] = int(found[2])
                if len(pids) == num_ranks:
                    break
            yield process, pids
        finally:
            kill_tree(process)


@pytest.mark.parametrize("killed", [2, 0])  # rank 0 keeps the store
def test_a_killed_rank_is_named_within_seconds(killed):
    with job(3) as (process, pids):
        started = time.monotonic()
        os.kill(pids[killed], signal.SIGKILL)
        output, _ = process.communicate(timeout=20)
        assert time.monotonic() - started < 10
    for rank in {0, 1, 2} - {killed}:
        said = re.search(rf"rank {rank} says: rank {killed} on (.*)", output)
        assert said, output
        assert "ended without a word" in said[0] or (killed == 0 and "is lost" in said[0])
    assert f"ended with {[-9 if rank == killed else 0 for rank in range(3)]}" in output


def listening_addresses(port: int) -> list[str]:
    """Of sockets in state LISTEN (0A) of the kernel's tables, as hexadecimal."""
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")]


def test_a_store_kept_by_rank_0_listens_at_its_address_alone():
    place = Place(
        rank=0, world_size=1, local_rank=0, local_world_size=1,
        address="127.0.0.1", port=free_port(), launcher_keeps_store=False,
    )  # fmt: skip
    store = connect_store(place, 5, keeps=True)
    assert listening_addresses(place.port) == ["0100007F"]
    with pytest.raises(RendezvousError, match=r"could not be opened .*in use"):
        connect_store(place, 5, keeps=True)
    del store


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python -m torch.distributed.run --nproc-per-node 2 -m launch generate", True),
        ("/env/bin/python /env/bin/torchrun --nproc-per-node 2 -m launch generate", True),
        ("python -u -X dev -m torch.distributed.launch -m launch generate", True),
        ("bash wrapper.sh --started-by torchrun", False),
        ("python -m launch slurm -- /env/bin/torchrun", False),
        ("", False),
    ],
)
def test_only_torchrun_is_ended_with_its_ranks(command, expected):
    assert is_torchrun(b"\0".join(command.encode().split())) == expected


def test_sigterm_on_one_rank_reaches_the_others_with_its_cause():
    with job(2) as (process, pids):
        os.kill(pids[1], signal.SIGTERM)
        output, _ = process.communicate(timeout=20)
    assert "rank 1: stopped by SIGTERM" in output
    assert "rank 1 flushed" in output
    assert re.search(r"rank 0 says: rank 1 on .* failed: stopped by SIGTERM", output)
    assert f"ended with [0, {128 + signal.SIGTERM}]" in output
