from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dbo.work
from dbo.context import current_ubatch_id
from dbo.errors import ConfigError, PeerFailed
from dbo.runner import UBatchRunner
from dbo.work import Comm, Finish
from tests.dbo.toy import CPU, GREENLET, both_drivers


def logged(comm: Comm, log: list[str], value: int, label: str = "x") -> Any:
    def launch(ready: Any) -> Finish[int]:
        log.append(f"launch {ready}" if ready is not None else "launch")

        def finish() -> int:
            log.append("finish")
            return value

        return finish

    return comm.start(launch, label=label)


def test_the_current_stream_is_that_of_now_on_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept by what it is, so a stream that somebody else made current is not taken for the one before."""
    now = {0: (7, 0, 1), 1: (7, 1, 1)}  # of each device, as torch names it: id, device, kind of device
    here = [0]
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: here[0], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", now.__getitem__, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream {now[device.index or here[0]]}")
    monkeypatch.setattr(dbo.work, "_streams", {})
    any_cuda, first, second = (torch.device(name) for name in ("cuda", "cuda:0", "cuda:1"))
    for _ in range(2):
        assert dbo.work._current_stream(first) == dbo.work._current_stream(any_cuda) == "stream (7, 0, 1)"
        assert dbo.work._current_stream(second) == "stream (7, 1, 1)"
        now[0] = (9, 0, 1)
        assert dbo.work._current_stream(first) == "stream (9, 0, 1)"
        now[0] = (7, 0, 1)
    here[0] = 1
    assert dbo.work._current_stream(any_cuda) == "stream (7, 1, 1)"


def test_early_order_launches_at_the_start() -> None:
    log: list[str] = []
    work = logged(Comm(CPU), log, 7)
    assert log == ["launch"]
    assert work.result() == 7
    assert work.wait() == work.result() == 7
    assert log == ["launch", "finish"]


def test_late_order_launches_after_the_yield() -> None:
    log: list[str] = []
    comm = Comm(CPU, order="late", make_ready=lambda: log.append("ready") or "then")  # type: ignore[func-returns-value]
    work = logged(comm, log, 7)
    assert log == ["ready"]
    work.pass_turn()
    assert log == ["ready", "launch then"]  # so that compute before wait() still hides it
    work.pass_turn()
    assert work.wait() == 7
    assert log == ["ready", "launch then", "finish"]


def test_wait_without_a_turn_launches_too() -> None:
    log: list[str] = []
    assert logged(Comm(CPU, order="late"), log, 3).wait() == 3
    assert log == ["launch", "finish"]


def test_a_result_of_none_is_a_result() -> None:
    calls: list[int] = []
    work = Comm(CPU).start(lambda ready: lambda: calls.append(1), label="x")
    assert work.result() is None
    assert work.wait() is None
    assert calls == [1]


def test_closures_live_until_the_wait_and_no_longer() -> None:
    x = torch.ones(3)
    alive = weakref.ref(x)
    work = Comm(CPU).start(lambda ready, x=x: lambda: x.sum().item(), label="x")
    del x
    assert alive() is not None
    assert work.wait() == 3
    assert alive() is None


def test_refuses_a_wrong_order() -> None:
    with pytest.raises(ConfigError, match="order='soon'"):
        Comm(CPU, order="soon")  # type: ignore[arg-type]


@both_drivers
@pytest.mark.parametrize("order", ["early", "late"])
def test_order_of_ready_launch_and_turns(driver: Any, order: Any) -> None:
    log: list[str] = []

    def say(what: str) -> None:
        log.append(f"{what}{current_ubatch_id()}")

    comm = Comm(CPU, order=order, make_ready=lambda: say("ready"))

    def launch(ready: Any) -> Callable[[], None]:
        say("launch")
        return lambda: say("finish")

    def fn(k: int) -> None:
        say("compute")
        work = comm.start(launch, label="dispatch")
        work.pass_turn()
        say("shared")
        work.wait()

    with UBatchRunner(2, device=CPU, driver=driver) as runner:
        runner.run(fn, [0, 1])
        overlap, log[:] = list(log), []
        runner.run(fn, [0, 1], interleave=False)
    first = ["compute{}", "ready{}"] + ["launch{}"] * (order == "early")
    second = ["launch{}"] * (order == "late") + ["shared{}", "finish{}"]
    assert overlap == [line.format(k) for part in (first, second) for k in (0, 1) for line in part]
    assert log == [line.format(k) for k in (0, 1) for line in first + second]


class StuckWork:
    """A gloo collective whose peer never comes."""

    def is_completed(self) -> bool:
        return False

    def wait(self, limit: timedelta) -> None:
        time.sleep(limit.total_seconds())
        raise RuntimeError("Operation timed out!")


@pytest.mark.parametrize("driver", ["threads", GREENLET, None])
def test_a_failed_peer_ends_the_wait(driver: Any) -> None:
    def check() -> None:
        if time.monotonic() > failed_at:
            raise PeerFailed(3, "host", "out of memory")

    def wait() -> None:
        comm = Comm(CPU, check=check)
        if driver is None:
            comm.wait_host(StuckWork())  # type: ignore[arg-type]
        else:
            with UBatchRunner(2, device=CPU, driver=driver) as runner:
                runner.run(comm.wait_host, [StuckWork()] * 2)  # type: ignore[list-item]

    start = time.monotonic()
    failed_at = start + 0.1
    with pytest.raises(PeerFailed, match="rank 3 on host failed: out of memory"):
        wait()
    assert time.monotonic() - start < 1


def test_a_failed_collective_raises_what_happened() -> None:
    class Failed(StuckWork):
        def is_completed(self) -> bool:
            return True

        def wait(self, limit: timedelta | None = None) -> None:
            raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        Comm(CPU).wait_host(Failed())  # type: ignore[arg-type]


def exchange_late(ctx: Any) -> list[float]:
    """On every rank: a peer that comes late costs polls, and neither the collective nor its group suffers."""
    comm = Comm(CPU)
    x = torch.ones(4)
    if ctx.rank == 1:
        time.sleep(0.3)
    comm.wait_host(dist.all_reduce(x, group=ctx.group, async_op=True))
    y = torch.empty(4)
    comm.wait_host(dist.all_to_all_single(y, x * (ctx.rank + 1), group=ctx.group, async_op=True))
    return [x.sum().item(), y.sum().item()]


def test_gloo_survives_the_polled_wait(ranks: Any) -> None:
    assert ranks(2).run(exchange_late, timeout=20) == [[8.0, 12.0]] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["early", "late"])
def test_streams_are_ordered_and_memory_lives_long_enough(order: Any) -> None:
    """Freed blocks are filled with NaN and the comm stream is held up: any wrong order or early free shows."""
    device = torch.device("cuda")
    comm = Comm(device, order=order)
    with UBatchRunner(2, device=device) as runner:
        rng = torch.Generator().manual_seed(0)
        for _ in range(200):
            size = int(torch.randint(1000, 3000, (), generator=rng))

            def fn(x: torch.Tensor) -> torch.Tensor:
                for _ in range(4):
                    x = _round_trip(comm, x)
                return x

            got = runner.run(fn, [torch.full((size, 64), float(k), device=device) for k in (1, 2)])
            assert [y.min().item() for y in got] == [y.max().item() for y in got] == [5.0, 6.0]


def _round_trip(comm: Comm, x: torch.Tensor) -> torch.Tensor:
    sent = x + 1
    received = torch.empty_like(sent)  # before start(), on the compute stream, as late order asks for

    def launch(ready: Any, sent: torch.Tensor = sent, received: torch.Tensor = received) -> Finish[torch.Tensor]:
        torch.cuda._sleep(20_000)
        received.copy_(sent)
        return lambda: received.clone()

    work = comm.start(launch, label="dispatch")
    del sent, received, launch
    torch.full_like(x, float("nan"))  # would land in a block that was freed too early
    work.pass_turn()
    torch.full_like(x, float("nan"))
    return work.wait()


@pytest.mark.gpu
def test_a_dropped_work_is_ordered_before_its_memory_is_used_again() -> None:
    device = torch.device("cuda")
    comm = Comm(device)
    for _ in range(50):
        x = torch.ones(1 << 20, device=device)
        seen = torch.empty_like(x)

        def launch(ready: Any, x: torch.Tensor = x, seen: torch.Tensor = seen) -> Finish[None]:
            torch.cuda._sleep(200_000)
            seen.copy_(x)
            return lambda: None

        work = comm.start(launch, label="dispatch")
        del x, launch
        del work
        torch.full((1 << 20,), float("nan"), device=device)
        torch.cuda.synchronize()
        assert seen.min().item() == 1
