"""The multi-rank helper itself: results by rank, errors, hangs, deaths, and no process left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankCommand, RankError, RankPool, launch_ranks


def sum_of_ranks(ctx, offset):
    x = torch.full((1,), float(ctx.rank + offset))
    dist.all_reduce(x, group=ctx.group)
    return ctx.rank, x.item(), os.getpid()


def fail_on_one(ctx, rank):
    if ctx.rank == rank:
        raise ValueError(f"only rank {rank}")
    return ctx.rank


def abandon_a_collective(ctx):
    group = ctx.group
    if ctx.rank == 0:
        dist.all_reduce(torch.ones(1), group=group, async_op=True)


def hang_on_one(ctx):
    if ctx.rank == 1:
        time.sleep(600)


def die(ctx):
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def alive(pid: int) -> bool:
    """Whether the process runs: one that is dead but not yet reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_cases_share_ranks_but_no_collective(ranks):
    pool = ranks(2)
    first = pool.run(sum_of_ranks, 1)
    assert [r[:2] for r in first] == [(0, 3.0), (1, 3.0)]
    pool.run(abandon_a_collective)
    second = pool.run("tests.test_ranks:sum_of_ranks", 2)
    assert [r[1] for r in second] == [5.0, 5.0]
    assert [r[2] for r in first] == [r[2] for r in second]


def test_a_failing_rank_is_named_with_its_traceback(ranks):
    with pytest.raises(RankError, match="failed on rank 1") as failure:
        ranks(2).run(fail_on_one, 1)
    assert 'raise ValueError(f"only rank {rank}")' in str(failure.value)
    assert len(ranks(2).run(sum_of_ranks, 0)) == 2


def test_a_hang_and_a_death_cost_the_pool_and_nothing_else():
    pool = RankPool(2)
    pids = [r[2] for r in pool.run(sum_of_ranks, 0)]
    with pytest.raises(RankError, match="hang_on_one") as failure:
        pool.run(hang_on_one, timeout=1)
    assert "ranks [1] did not end" in str(failure.value)
    assert "in hang_on_one" in str(failure.value)
    assert not any(alive(pid) for pid in pids)
    with pytest.raises(RankError, match="die: rank"):
        pool.run(die, timeout=20)
    pool.close()


def test_a_command_gives_its_output_and_is_killed_at_its_limit(tmp_path):
    script = tmp_path / "script.py"
    said = "os.write(1, b'rank ' + os.environ['RANK'].encode() + b'\\n')"  # one write: two ranks share the pipe
    script.write_text(f"import os, sys, time; {said}; time.sleep(float(sys.argv[1]))")
    finished = launch_ranks(2, [str(script), "0"], timeout=30)
    assert finished.returncode == 0
    assert sorted(finished.stdout.split()) == ["0", "1", "rank", "rank"]
    with RankCommand(2, [str(script), "600"]) as command:
        while not (pids := command.rank_pids()):
            time.sleep(0.05)
        with pytest.raises(TimeoutError, match="not finished"):
            command.wait(1)
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)
