"""A fixed set of SMs for the all2all, the rest for compute, for as long as a `with` lasts.

A file of its own because it knows nothing but numbers: the backend and the compute side bring functions that put a
number into force (DeepEP's count for each call, torch's carve-out, a Triton grid, ...).

Invariants: what was in force before is put back in reverse order, also after an error and when a setter fails half way.
Such settings belong to the process, so one thread at a time holds a partition; it may nest, another thread is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType

from dbo.errors import ConfigError, DBOError

# Puts a number of SMs into force (None = no limit) and returns what was in force before.
Setter = Callable[[int | None], int | None]

# The settings themselves are the process's: the one lock in this package that has to be, too.
_HELD = threading.RLock()


class SMPartition:
    """`with SMPartition(comm_sms=20, total_sms=132, ...)`: around each run and each capture, by the thread that calls.

    comm_sms: for the all2all; 0 = nothing is set apart. total_sms: what the device has. multiple_of: what the backend's
    counts must divide by (DeepEP: 2). set_comm_sms, set_compute_sms: called with `comm_sms` and `total_sms - comm_sms`;
    each returns what it replaced. Can be entered again, also inside itself. Raises `ConfigError` on creation, and
    `DBOError` on entry when another thread holds a partition.
    """

    def __init__(
        self,
        *,
        comm_sms: int,
        total_sms: int,
        set_comm_sms: Setter,
        set_compute_sms: Setter | Sequence[Setter] = (),
        multiple_of: int = 1,
    ) -> None:
        if not 0 <= comm_sms < total_sms:
            raise ConfigError("comm_sms", comm_sms, f"0 to {total_sms - 1}", "compute needs at least one SM")
        if comm_sms % multiple_of:
            near = comm_sms - comm_sms % multiple_of
            raise ConfigError(
                "comm_sms", comm_sms, f"a multiple of {multiple_of}", f"use {near} or {near + multiple_of}"
            )
        compute = [set_compute_sms] if callable(set_compute_sms) else list(set_compute_sms)
        self.comm_sms, self.compute_sms = comm_sms, total_sms - comm_sms
        self._settings = [(set_comm_sms, self.comm_sms), *((setter, self.compute_sms) for setter in compute)]
        self._restore: list[ExitStack] = []

    def __enter__(self) -> SMPartition:
        if not _HELD.acquire(blocking=False):
            raise DBOError("another thread holds an SM partition, and its settings are the whole process's")
        with ExitStack() as restore:  # undoes a half-made partition when a setter raises
            restore.callback(_HELD.release)
            for setter, num_sms in self._settings if self.comm_sms else ():
                restore.callback(setter, setter(num_sms))
            self._restore.append(restore.pop_all())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._restore.pop().close()
