"""Rows on their way: nothing is lost, nothing twice, whoever dies."""

from __future__ import annotations

import json

import pytest
from torch._C._distributed_c10d import HashStore

from dbo.errors import PeerFailed
from launch.output import RowCollector, RowPoster, append_row, read_rows, write_rows


def row(name: str) -> dict:
    return {"id": name, "text": "ü\u2028\n"}


@pytest.fixture
def ends(tmp_path):
    """Rank 0's end, the others' ends, the file, and the ids in the order in which rank 0 saw them."""
    store, file, seen = HashStore(), tmp_path / "out.jsonl", []
    write_rows(file, [])
    collector = RowCollector(store, 3, file, lambda r: seen.append(r["id"]))
    return collector, [RowPoster(store, r, inode=file.stat().st_ino) for r in (1, 2)], file, seen


def test_rows_are_in_the_file_as_soon_as_they_are_announced(ends):
    collector, (one, two), file, seen = ends
    collector.add(row("a"))
    one.add(row("b"))
    two.add(row("c"))
    assert list(read_rows(file)) == ["a"]
    collector.announce((1, 1, 0))
    assert list(read_rows(file)) == seen == ["a", "b"]
    collector.announce((0, 0, 1))
    assert seen == ["a", "b", "c"]
    assert read_rows(file)["b"] == row("b")


def test_a_row_may_be_announced_before_it_is_posted(ends):
    collector, (one, _), _, seen = ends
    collector.announce((0, 1, 0))
    assert seen == []
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 3:
            one.add(row("late"))

    collector.wait(check)
    assert seen == ["late"]

    def gone() -> None:
        raise PeerFailed(1, "here", "gone")

    collector.announce((0, 1, 0))
    with pytest.raises(PeerFailed):
        collector.wait(gone)


def test_a_drain_takes_what_nobody_announced(ends):
    collector, (one, two), file, _ = ends
    for poster, names in ((one, "ab"), (two, "c")):
        for name in names:
            poster.add(row(name))
    collector.drain()
    collector.drain()
    assert sorted(read_rows(file)) == ["a", "b", "c"]
    assert file.read_text().count("\n") == 3


def test_the_file_ends_in_the_order_of_the_prompts(ends):
    collector, _, file, _ = ends
    for name in "cxab":
        collector.add(row(name))
    collector.sort({"a": 0, "b": 1, "c": 2})
    assert list(read_rows(file)) == ["a", "b", "c", "x"]
    assert [p.name for p in file.parent.iterdir()] == ["out.jsonl"]


def test_survivors_add_their_rows_after_rank_0_died_within_a_line(ends):
    collector, (one, two), file, _ = ends
    for poster, names in ((one, "ab"), (two, "c")):
        for name in names:
            poster.add(row(name))
    collector.announce((0, 1, 0))
    with file.open("a") as cut_short:
        cut_short.write(json.dumps(row("zero"))[:9])
    for poster in (one, two):
        poster.rescue(file)
    assert sorted(read_rows(file)) == ["a", "b", "c"]
    assert file.read_text().count('"id": "a"') == 1


def test_a_missing_file_has_no_rows(tmp_path):
    assert read_rows(tmp_path / "none") == {}
    append_row(tmp_path / "new", row("a"))
    assert list(read_rows(tmp_path / "new")) == ["a"]
