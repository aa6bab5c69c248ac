"""Groups that are left behind with work outstanding: at once, on both sides, and without touching anything else."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

from dbo import groups
from dbo.groups import _shut_down, make_group, open_connections


@pytest.fixture
def connect():
    """`connect()`: both ends of a TCP connection."""
    opened = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def make():
            opened.append(socket.create_connection(server.getsockname()))
            opened.append(server.accept()[0])
            return opened[-2:]

        yield make
    for end in opened:
        end.close()


def test_only_new_connections_are_shut_down_even_under_a_number_used_before(connect):
    stranger, _ = connect()
    old, old_end = connect()
    before = open_connections()
    number = old.fileno()
    old.close()
    old_end.close()
    new, new_end = connect()
    assert number in (new.fileno(), new_end.fileno())
    made = open_connections() - before
    assert {descriptor for descriptor, _ in made} == {new.fileno(), new_end.fileno()}
    _shut_down(made)
    assert new_end.recv(1) == b""
    stranger.send(b"still open")


def test_a_connection_that_is_gone_is_not_mistaken_for_its_successor(connect):
    old, old_end = connect()
    old_ones = {(end.fileno(), os.fstat(end.fileno()).st_ino) for end in (old, old_end)}
    old.close()
    old_end.close()
    new, new_end = connect()
    _shut_down(old_ones)
    new.send(b"x")
    assert new_end.recv(1) == b"x"


def abandon(ctx):
    """Rank 0 leaves with five messages outstanding; rank 1, which sent none yet, finds the group broken."""
    made = make_group(dist.PrefixStore("abandoned", ctx.store), ctx.rank, ctx.world_size, torch.device("cpu"))
    x = torch.ones(2 * ctx.world_size)
    dist.all_reduce(x, group=made.group)
    if ctx.rank == 1:
        ctx.store.wait(["aborted"])
    works = [dist.all_to_all_single(torch.empty_like(x), x, group=made.group, async_op=True) for _ in range(5)]
    started = time.monotonic()
    if ctx.rank == 0:
        made.abort()
        ctx.store.set("aborted", "")
    for work in works:
        with pytest.raises(RuntimeError, match=r"[Cc]onnection"):
            work.wait()
    del works, work, made
    return time.monotonic() - started


def test_a_group_with_messages_outstanding_is_dropped_at_once(ranks):
    assert max(ranks(2).run(abandon)) < 2


def test_what_is_dropped_never_waits_in_the_thread_that_abandons_it(monkeypatch):
    """Even if the dropping thread has ended before `abandon` goes on."""
    dropped_in = []

    class Group:
        def __del__(self):
            dropped_in.append(threading.current_thread().name)

    class Fast(threading.Thread):
        def start(self):
            super().start()
            self.join()

    monkeypatch.setattr(groups.threading, "Thread", Fast)
    given = [groups.AbortableGroup(group=Group(), abort=lambda: None) for _ in range(2)]
    groups.abandon(given, threading.Event())
    assert given == []
    assert dropped_in == [groups.DROPPING] * 2
