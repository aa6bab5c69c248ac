"""What ranks learn of each other: failures, deaths, silence, differing options, renewal. Ranks are threads here, with a
store in memory; `tests/launch/test_mesh.py` has them as processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from dbo.errors import ConfigError, PeerFailed
from dbo.peers import Peers


@pytest.fixture
def start():
    """`start(n, hosts=..., **options)`: `n` connected `Peers`, closed at the end."""
    started: list[Peers] = []

    def make(num_ranks: int, hosts: str = "aaaaaaaa", **options) -> list[Peers]:
        store = dist.HashStore()

        def one(rank: int) -> Peers:
            return Peers(store, rank=rank, world_size=num_ranks, host=hosts[rank], **{"start_limit_s": 5.0, **options})

        with ThreadPoolExecutor(num_ranks) as pool:
            started.extend(pool.map(one, range(num_ranks)))
        return started[-num_ranks:]

    yield make
    for peers in started:
        peers.close()


def on_all(peers: list[Peers], call) -> list:
    """What `call(peer)` returned or raised on every rank, all at once."""

    def one(peer: Peers):
        try:
            return call(peer)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(peers)) as pool:
        return list(pool.map(one, peers))


def test_a_failure_reaches_every_other_rank_with_its_reason(start):
    peers = start(3)
    noticed = threading.Event()
    peers[2].on_failure(noticed.set)
    with pytest.raises(ZeroDivisionError), peers[1].guard():
        _ = 1 // 0
    assert noticed.wait(5)
    for rank in (0, 2):
        assert peers[rank].wait_failure(5) is not None
        with pytest.raises(PeerFailed, match=r"rank 1 on a failed: ZeroDivisionError: integer") as failure:
            peers[rank].check()
        assert (failure.value.rank, failure.value.host) == (1, "a")
    peers[1].check()  # it knows


def test_the_first_failure_is_kept(start):
    peers = start(4)
    peers[1].fail("first")
    peers[2].fail("second")
    assert [str(peers[rank].wait_failure(5)) for rank in (0, 3)] == ["rank 1 on a failed: first"] * 2


def test_a_broken_connection_is_explained_by_who_died(start):
    peers = start(2)
    peers[1].fail("ran out of memory")
    broken = RuntimeError("[pair.cc:553] Connection closed by peer [10.0.0.1]:5000")
    broken.add_note("ubatch 1 of 2")
    with pytest.raises(PeerFailed, match="rank 1 on a failed: ran out of memory") as failure, peers[0].guard():
        raise broken
    assert failure.value.__cause__ is broken
    assert failure.value.__notes__ == ["ubatch 1 of 2"]
    other = RuntimeError("shape mismatch")
    assert peers[0].explain(other) is other


def test_a_rank_that_leaves_early_is_named(start):
    peers = start(2)
    peers[1].close()
    explained = peers[0].explain(RuntimeError("Connection reset by peer"))
    assert str(explained) == "rank 1 on a failed: it left before the others were done"
    peers[0].check()  # to leave is no failure
    with pytest.raises(PeerFailed, match="rank 1 did not reach the end but left"):
        peers[0].barrier("the end", 5)


def test_renewal_forgets_a_failure_but_waits_for_all(start):
    peers = start(3)
    for generation in range(1, 4):
        peers[generation % 3].fail("again")
        for peer in peers:
            if peer is not peers[generation % 3]:
                assert peer.wait_failure(5) is not None
        assert on_all(peers, Peers.renew) == [generation] * 3
        for peer in peers:
            peer.check()


def test_renewal_without_a_rank_names_it(start):
    peers = start(3, start_limit_s=0.5)
    outcome = on_all(peers[:2], Peers.renew)
    assert [str(o) for o in outcome] == ["rank 2 on a failed: rank 2 did not give up the failed step within 0.5 s"] * 2


def test_options_that_differ_are_named_on_every_rank(start):
    peers = start(3)
    assert on_all(peers, lambda p: p.barrier("x", 5)) == [None] * 3
    errors = on_all(peers, lambda p: p.compare_options({"cut": "tokens", "thr": "32" if p.rank < 2 else "64"}))
    assert all(isinstance(error, ConfigError) and error.field == "thr" for error in errors)
    assert "'32' on ranks 0, 1; '64' on rank 2" in str(errors[0])
    assert [error.value for error in errors] == ["32", "32", "64"]


def test_equal_options_pass_and_a_missing_one_differs(start):
    assert on_all(start(2), lambda p: p.compare_options({"a": "1"})) == [None, None]
    errors = on_all(start(2), lambda p: p.compare_options({"a": "1"} if p.rank else {}))
    assert "None on rank 0; '1' on rank 1" in str(errors[0])


def test_a_rank_that_never_starts_is_named():
    with pytest.raises(PeerFailed, match=r"ranks 1, 2 did not start within 0\.3 s"):
        Peers(dist.HashStore(), rank=0, world_size=3, start_limit_s=0.3)


def test_a_silent_host_is_given_up_but_not_a_silent_rank(start):
    limit_s = 1.5
    peers = start(4, hosts="aabb", silence_limit_s=limit_s)
    # Its thread does nothing more, like that of a rank which holds the interpreter.
    peers[3]._listen = lambda: peers[3]._closing.wait(60)
    time.sleep(2 * limit_s)
    peers[0].check()
    peers[2]._listen = lambda: peers[2]._closing.wait(60)
    failure = peers[0].wait_failure(limit_s + 4)
    assert failure is not None
    assert failure.host == "b"
    assert "nothing was heard from its host" in failure.reason


def test_a_broken_connection_halves_the_patience_with_a_silent_host(start):
    limit_s = 4.0
    peers = start(3, hosts="abc", silence_limit_s=limit_s)
    peers[2]._listen = lambda: peers[2]._closing.wait(60)  # its last beat is one second old at most
    silent = time.monotonic()
    explained = on_all(peers[:2], lambda p: p.explain(RuntimeError("Connection reset by peer")))
    assert [error.rank for error in explained] == [2, 2]
    assert time.monotonic() - silent < limit_s


def test_late_is_who_does_not_wait(start, monkeypatch):
    monkeypatch.setattr("dbo.peers.BUSY_S", 1.0)
    peers = start(3, hosts="abc")
    assert peers[0].late() == {}
    until = time.monotonic() + 3.2
    while time.monotonic() < until:
        peers[0].check()
        peers[1].check()
        time.sleep(0.05)
    late = peers[0].late()
    assert list(late) == [2]
    assert "rank 2 on c (busy for" in late[2]
    assert list(peers[1].late()) == [2]
    peers[1]._listen = peers[2]._listen = lambda: peers[2]._closing.wait(60)
    time.sleep(1.5)
    peers[0].late()
    assert sorted(peers[0].late()) == [1, 2]  # neither is heard any more


def test_one_rank_of_every_host_speaks_of_a_failure(start):
    def speakers(failure: PeerFailed) -> list[int]:
        return [peer.rank for peer in peers if peer.rank != failure.rank and peer.speaks_of(failure)]

    peers = start(4, hosts="aabb")
    assert speakers(PeerFailed(0, "a", "killed")) == [1, 2]
    assert speakers(PeerFailed(3, "b", "killed")) == [0, 2]
    peers[3].fail("out of memory")
    for peer in peers[:3]:
        assert peer.wait_failure(5)
    assert speakers(PeerFailed(3, "b", "out of memory")) == [0]  # it has said so itself on b


def test_a_process_that_ends_is_missed_at_once():
    """Rank 1 is a process that introduces itself and is killed; the others see it through its descriptor."""
    import json

    from dbo.peers import _place

    store = dist.HashStore()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        peer = {"rank": 1, "host": "a", "pid": process.pid, "place": _place()}
        store.set("peer/1", json.dumps(peer))
        peers = Peers(store, rank=0, world_size=2, host="a")
        try:
            time.sleep(0.3)
            peers.check()
            process.kill()
            killed = time.monotonic()
            failure = peers.wait_failure(5)
            assert failure is not None
            assert failure.rank == 1
            assert "ended without a word" in failure.reason
            assert time.monotonic() - killed < 1
            with pytest.raises(PeerFailed, match="ended without a word"):
                peers.renew()
        finally:
            peers.close()


class LostStore:
    """A store that answers until it is lost."""

    def __init__(self) -> None:
        self._store, self.lost = dist.HashStore(), False

    def __getattr__(self, name: str):
        if self.lost:
            raise dist.DistNetworkError("failed to recv, got 0 bytes\nmore")
        return getattr(self._store, name)


def test_a_lost_store_is_a_message_and_a_hanging_one_too():
    store = LostStore()
    with ThreadPoolExecutor(2) as pool:
        peers = list(pool.map(lambda r: Peers(store, rank=r, world_size=2, host="a", silence_limit_s=0.6), range(2)))
    peers[1]._look_at_store = lambda: time.sleep(3)
    time.sleep(1)
    with pytest.raises(PeerFailed, match="has not answered for"):
        peers[1].check()
    store.lost = True
    failure = peers[0].wait_failure(5)
    assert "is lost (failed to recv, got 0 bytes)" in str(failure)
    for peer in peers:
        peer.fail("nobody can be told")
        peer.close()


def test_a_failure_is_not_forgotten_when_the_store_is_lost_after_it():
    store = LostStore()
    with ThreadPoolExecutor(2) as pool:
        peers = list(pool.map(lambda r: Peers(store, rank=r, world_size=2, host="a"), range(2)))
    peers[1].fail("out of memory")
    assert peers[0].wait_failure(5) is not None
    store.lost = True
    until = time.monotonic() + 5
    while not peers[0].gone and time.monotonic() < until:
        time.sleep(0.05)
    assert peers[0].gone
    assert str(peers[0].wait_failure(0)) == "rank 1 on a failed: out of memory"
    for peer in peers:
        peer.close()


def test_close_leaves_no_thread_and_no_descriptor(start):
    threads, descriptors = threading.active_count(), len(os.listdir("/dev/fd"))
    for _ in range(3):
        for peers in start(4):
            peers.close()
    assert threading.active_count() == threads
    assert len(os.listdir("/dev/fd")) == descriptors
