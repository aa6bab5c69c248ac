"""Answers on their way to one file: appended as requests finish, put into input order at the end.

Its own file because "nothing finished is lost" lives here. Every rank posts its rows in the store under (rank, number)
and keeps them; each vote announces how many; rank 0 takes them out and appends each one with a single write. So the
file holds every finished row at any time, a failed run only has to drain the store, and when rank 0 or the store is
gone every rank that can reach the file appends its own rows.

The file is JSON lines. A line cut short by a crash is ignored when the file is read again.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store

from launch.files import replace_file
from launch.scheduler import Request
from launch.text import TextCodec, cut_at_stop

Row = Mapping[str, Any]

_POLL_S = 0.01


def answer_row(request: Request, codec: TextCodec | None, rank: int, started_s: float) -> Row:
    """The row of a request that has ended; times count from `started_s` on the engine's clock."""
    num_gaps = len(request.output_ids) - 1
    row: dict[str, Any] = {
        "id": request.id,
        "text": cut_at_stop(codec.decode(request.output_ids), request.params.stop) if codec else None,
        "token_ids": request.output_ids,
        "prompt_tokens": len(request.prompt_ids),
        "finish_reason": request.finish_reason,
        "dp_rank": rank,
        "ttft_ms": round((request.first_token_s - started_s) * 1e3, 3),
        "itl_ms": round((request.last_token_s - request.first_token_s) * 1e3 / num_gaps, 3) if num_gaps else None,
    }
    if request.logprobs:
        row["logprobs"] = [{"token_id": p.token_id, "logprob": p.logprob, "top": p.top} for p in request.logprobs]
    return row


def error_row(request_id: str, num_prompt_tokens: int, error: str, rank: int) -> Row:
    """The row of a prompt that cannot run."""
    return {
        "id": request_id,
        "text": "",
        "token_ids": [],
        "prompt_tokens": num_prompt_tokens,
        "finish_reason": "error",
        "error": error,
        "dp_rank": rank,
        "ttft_ms": None,
        "itl_ms": None,
    }


def read_rows(file: Path) -> dict[str, Row]:
    """The complete rows of an output file, by id, in file order; a missing file has none."""
    rows: dict[str, Row] = {}
    if not file.exists():
        return rows
    for line in file.read_text(errors="replace").split("\n"):
        try:
            row = json.loads(line)
            rows[row["id"]] = row
        except (ValueError, TypeError, KeyError):
            continue
    return rows


def write_rows(file: Path, rows: Sequence[Row]) -> None:
    """Replace `file` in one step by `rows`; see `replace_file`."""
    replace_file(file, "".join(map(_line, rows)))


def append_row(file: Path, row: Row) -> None:
    """Add one row with one write, so that rows of several processes do not mix. Raises OSError naming the file."""
    line = _line(row).encode()
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        written = os.write(descriptor, line)
        if written < len(line):  # the disk is full: leave no part of a row
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None
    finally:
        os.close(descriptor)


def _line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


class RowPoster:
    """The sending end, on every rank but 0. `inode` is that of the output file as rank 0 sees it."""

    def __init__(self, store: Store, rank: int, *, inode: int):
        self.rows: list[Row] = []
        self._store, self._rank, self._inode = store, rank, inode

    def add(self, row: Row) -> None:
        """Post a finished row; one round trip to the store."""
        self._store.set(_key(self._rank, len(self.rows)), _line(row))
        self.rows.append(row)

    def rescue(self, file: Path) -> None:
        """When rank 0 or the store is gone: append the rows that rank 0 did not write.

        Another file of this name, on a host that does not share rank 0's file system, is left alone. Raises OSError
        naming the file if there are rows that cannot be saved.
        """
        shared = file.exists() and file.stat().st_ino == self._inode
        written = read_rows(file) if shared else {}
        missing = [row for row in self.rows if row["id"] not in written]
        if missing and not shared:
            raise OSError(errno.ENOENT, f"{len(missing)} finished rows are lost: this host does not see", str(file))
        if missing and not file.read_bytes().endswith(b"\n"):
            with file.open("ab") as tail:  # rank 0 died within a line
                tail.write(b"\n")
        for row in missing:
            append_row(file, row)


class RowCollector:
    """The receiving end, on rank 0: `file` holds every row that was added or collected, at any time."""

    def __init__(self, store: Store, world_size: int, file: Path, on_row: Callable[[Row], None]):
        self._store, self._file, self._on_row = store, file, on_row
        self._is_broken = False
        self._announced = [0] * world_size
        self._taken = [0] * world_size

    def add(self, row: Row) -> None:
        """Append a finished row. Raises OSError naming the file, which then gets no more."""
        try:
            append_row(self._file, row)
        except OSError:
            self._is_broken = True
            raise
        self._on_row(row)

    def announce(self, num_rows_per_rank: Sequence[int]) -> None:
        """Learn from a plan how many further rows each rank posts, and take those that are there already."""
        for rank, count in enumerate(num_rows_per_rank):
            self._announced[rank] += count if rank else 0
        self._take(lambda rank: self._taken[rank] < self._announced[rank])

    def wait(self, check: Callable[[], None]) -> None:
        """Take every announced row, waiting for those on their way; `check` may raise to give up."""
        while self._taken != self._announced:
            check()
            self._take(lambda rank: self._taken[rank] < self._announced[rank])
            time.sleep(_POLL_S)

    def drain(self) -> None:
        """Take whatever is posted, announced or not: for a run that failed or was interrupted."""
        self._take(lambda rank: rank > 0 and not self._is_broken)

    def sort(self, order: Mapping[str, int]) -> None:
        """Put the file into the order of the prompts; rows of other prompts stay behind them."""
        rows = read_rows(self._file)
        write_rows(self._file, sorted(rows.values(), key=lambda row: order.get(row["id"], len(order))))

    def _take(self, wanted: Callable[[int], bool]) -> None:
        for rank in range(len(self._taken)):
            while wanted(rank) and self._store.check([key := _key(rank, self._taken[rank])]):
                row = json.loads(self._store.get(key))
                self.add(row)
                self._taken[rank] += 1
                self._store.delete_key(key)


def _key(rank: int, number: int) -> str:
    return f"rows/{rank}/{number}"
