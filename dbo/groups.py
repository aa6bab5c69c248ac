"""Process groups that stand alone and can be abandoned: made without a default group, ended while work is outstanding.

A file of its own because this is all that the runtime knows about how torch builds a group. `torch.distributed`'s
functions take such a group (`group=`), except those that look up the default group: use `group.rank()`, `group.size()`.

Why `abort` exists: dropping a gloo group waits for its outstanding collectives, which wait for ranks that will never
come, up to the collective's own time limit; gloo's `abort()` and `shutdown()` do not change that (torch 2.13). Closed
connections do: every outstanding collective then fails at once, here and on the other side, and the group can be
dropped in a millisecond without leaving a thread or a descriptor. Nearly every one, that is: gloo can miss a collective
that is launched at the very moment when its connection breaks, and that one stays until its own limit. So a group that
failed is dropped by `abandon`, where nobody waits. NCCL's communicators have an abort of their own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import Store

COLLECTIVE_LIMIT_S = 600.0  # beyond any step: failures are found by `Peers`, not by a collective that waits
CONNECT_LIMIT_S = 30.0
KEEP_LIMIT_S = 60.0
DROPPING = "dropping groups"
"""Name of the threads that drop abandoned groups."""


@dataclass(frozen=True, kw_only=True)
class AbortableGroup:
    """A process group, and how to end it. `abort` never blocks, may be called from any thread and more than once."""

    group: dist.ProcessGroup
    abort: Callable[[], None]


def make_group(
    store: Store, rank: int, world_size: int, device: torch.device, *, connect_limit_s: float = CONNECT_LIMIT_S
) -> AbortableGroup:
    """A group over all ranks: gloo for a CPU device, NCCL for a CUDA device. Blocks until every rank is connected.

    `store` must be fresh (a prefix that no group used before) and the same on every rank. Raises what torch raises
    when a rank does not come within `connect_limit_s` (of gloo; NCCL has limits of its own).
    """
    if device.type == "cuda":
        return _make_nccl(store, rank, world_size, device)
    return _make_gloo(store, rank, world_size, connect_limit_s)


def _make_gloo(store: Store, rank: int, world_size: int, connect_limit_s: float) -> AbortableGroup:
    before = open_connections()
    gloo = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=connect_limit_s))
    connections = open_connections() - before
    gloo._set_default_timeout(timedelta(seconds=COLLECTIVE_LIMIT_S))
    group = dist.ProcessGroup(store, rank, world_size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return AbortableGroup(group=group, abort=lambda: _shut_down(connections))


def _make_nccl(store: Store, rank: int, world_size: int, device: torch.device) -> AbortableGroup:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=COLLECTIVE_LIMIT_S)
    nccl = dist.ProcessGroupNCCL(store, rank, world_size, options)
    nccl.eager_connect_single_device(device)
    group = dist.ProcessGroup(store, rank, world_size)
    group._register_backend(device, dist.ProcessGroup.BackendType.NCCL, nccl)
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    return AbortableGroup(group=group, abort=nccl.abort)


def abandon(groups: list[AbortableGroup], until: threading.Event) -> threading.Thread:
    """Abort `groups`, empty the list, and drop them without waiting.

    The thread that is returned does so, once nobody else has a reference: whoever drops the last reference waits for
    what is outstanding. It gives up waiting for the others after `KEEP_LIMIT_S`, or when `until` is set, which must
    happen before the process ends.
    """
    _abort(groups)  # a loop in here would keep the last one, and wait for it where the thread is faster
    thread = threading.Thread(target=_drop, args=(list(groups), until), name=DROPPING, daemon=True)
    groups.clear()
    thread.start()
    return thread


def _abort(groups: list[AbortableGroup]) -> None:
    for made in groups:
        made.abort()


def _drop(groups: list[AbortableGroup], until: threading.Event) -> None:
    limit = time.monotonic() + KEEP_LIMIT_S
    while any(sys.getrefcount(made.group) > 2 for made in groups) and time.monotonic() < limit:
        if until.wait(0.02):
            return


def give_up_silence(connections: set[tuple[int, int]], limit_s: float) -> None:
    """Have the kernel break these connections when the other host has not answered for `limit_s`, also when idle.

    For connections that the other side always reads, like a store's. A rank may well be too busy to read its group's.
    """
    settings = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    if sys.platform == "linux":
        probes = [(socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 2), (socket.TCP_USER_TIMEOUT, int(1000 * limit_s))]
        settings += [(socket.IPPROTO_TCP, name, value) for name, value in probes]
    for descriptor, _ in connections:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            for setting in settings:
                connection.setsockopt(*setting)


def open_connections() -> set[tuple[int, int]]:
    """The connected TCP sockets of this process, as (descriptor, inode): numbers alone are used again.

    Listening sockets are not among them, and must not be shut down.
    """
    found = set()
    for descriptor in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):
            info = os.fstat(descriptor)
            if stat.S_ISSOCK(info.st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as duplicate:
                    if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                        duplicate.getpeername()
                        found.add((descriptor, info.st_ino))
    return found


def _shut_down(connections: set[tuple[int, int]]) -> None:
    for descriptor, inode in connections:
        with contextlib.suppress(OSError):
            duplicate = os.dup(descriptor)  # first: the number may be closed, and used again, at any moment
            if os.fstat(duplicate).st_ino != inode:
                os.close(duplicate)
                continue
            with socket.socket(fileno=duplicate) as connection:
                connection.shutdown(socket.SHUT_RDWR)
