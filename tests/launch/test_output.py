"""Rows on their way: nothing is lost, nothing twice, whoever dies."""

from __future__ import annotations

import errno
import json
import os

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


def test_a_file_of_the_same_name_on_another_disk_is_left_alone(ends, tmp_path):
    _, (one, _), file, _ = ends
    append_row(other := tmp_path / "another.jsonl", row("old"))
    one.rescue(other)  # nothing to save
    one.add(row("a"))
    with pytest.raises(OSError, match=r"1 finished rows are lost.*another"):
        one.rescue(other)
    assert list(read_rows(other)) == ["old"]
    one.rescue(file)
    assert list(read_rows(file)) == ["a"]


def test_a_file_that_takes_no_more_ends_with_a_whole_row(ends, monkeypatch):
    """A full disk takes a part of a row, and then nothing."""
    collector, (one, _), file, _ = ends
    collector.add(row("a"))
    one.add(row("c"))
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr("os.write", lambda descriptor, data: write(descriptor, data[:5]))
        with pytest.raises(OSError, match=r"No space left on device: '.*out.jsonl'"):
            collector.add(row("b"))
    assert file.read_text().endswith("\n")
    collector.drain()  # the file has failed: nothing more is tried
    assert list(read_rows(file)) == ["a"]


def test_a_file_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    write_rows(file := tmp_path / "out.jsonl", [row("a")])
    monkeypatch.setattr("pathlib.Path.write_text", _write_a_part)
    with pytest.raises(OSError, match=r"out.jsonl"):
        write_rows(file, [row("b")])
    assert list(read_rows(file)) == ["a"]
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_stays_a_link_to_the_file_that_it_names(tmp_path, monkeypatch):
    (elsewhere := tmp_path / "elsewhere").mkdir()
    link, file = tmp_path / "out.jsonl", elsewhere / "rows.jsonl"
    link.symlink_to(file)
    for name in ("a", "b"):  # first to where nothing is yet
        write_rows(link, [row(name)])
        assert link.is_symlink()
        assert list(read_rows(file)) == list(read_rows(link)) == [name]
        assert list(elsewhere.iterdir()) == [file]
    monkeypatch.setattr("pathlib.Path.write_text", _write_a_part)
    with pytest.raises(OSError, match=r"out.jsonl"):
        write_rows(link, [row("c")])
    assert link.is_symlink()
    assert list(read_rows(link)) == ["b"]


def _write_a_part(file, text: str) -> None:
    file.write_bytes(text.encode()[:5])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_missing_file_has_no_rows(tmp_path):
    assert read_rows(tmp_path / "none") == {}
    append_row(tmp_path / "new", row("a"))
    assert list(read_rows(tmp_path / "new")) == ["a"]
