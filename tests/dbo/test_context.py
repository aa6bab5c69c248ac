from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dbo import context
from dbo.context import (
    current_ubatch,
    current_ubatch_id,
    dbo_enabled,
    maybe_run_recv_hook,
    note_layer,
    register_recv_hook,
    yield_turn,
)
from dbo.runner import UBatchRunner
from tests.dbo.toy import CPU, Boom, both_drivers

SWITCHES: list[Callable[[], None]] = [
    context.switch_to_comm,
    context.switch_to_compute,
    context.switch_to_comm_sync,
    context.switch_to_compute_sync,
    context.yield_and_switch_from_compute_to_comm,
    context.yield_and_switch_from_comm_to_compute,
    maybe_run_recv_hook,
]


def test_outside_a_ubatch_nothing_happens() -> None:
    for switch in SWITCHES:
        switch()
    note_layer(3)
    yield_turn("here")
    assert current_ubatch() is None
    assert current_ubatch_id() == 0
    assert not dbo_enabled()
    ran: list[int] = []
    assert not register_recv_hook(lambda: ran.append(1))
    assert not ran


@both_drivers
def test_inside_a_ubatch_everybody_knows_who_runs(driver: Any) -> None:
    def fn(k: int) -> None:
        for switch in SWITCHES:
            switch()
            ubatch = current_ubatch()
            assert ubatch is not None
            assert (ubatch.index, ubatch.num_ubatches, current_ubatch_id()) == (k, num, k)
            assert dbo_enabled() is (num > 1)

    with UBatchRunner(3, device=CPU, driver=driver) as runner:
        for num in (3, 1, 2):
            runner.run(fn, range(num))
    assert current_ubatch() is None


@both_drivers
def test_the_yields_of_the_low_level_functions_pass_the_turn(driver: Any) -> None:
    log: list[tuple[str, int]] = []

    def fn(k: int) -> None:
        log.append(("attention", k))
        context.yield_and_switch_from_compute_to_comm()
        log.append(("dispatch", k))
        context.yield_and_switch_from_comm_to_compute()
        log.append(("experts", k))

    with UBatchRunner(2, device=CPU, driver=driver) as runner:
        runner.run(fn, [0, 1])
    assert log == [(what, k) for what in ("attention", "dispatch", "experts") for k in (0, 1)]


@both_drivers
@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize("asks", [True, False])
def test_a_receive_hook_is_run_by_the_sibling_once_and_in_time(driver: Any, num: int, asks: bool) -> None:
    """A sibling that asks runs it before its own send; one that does not, when it passes the turn at the latest."""
    log: list[tuple[str, int, int]] = []

    def fn(k: int) -> None:
        for _ in range(2):
            if asks:
                maybe_run_recv_hook()
            log.append(("send", k, current_ubatch_id()))
            assert register_recv_hook(lambda: log.append(("receive", k, current_ubatch_id())))
            yield_turn("dispatch")
            log.append(("use", k, current_ubatch_id()))

    with UBatchRunner(num, device=CPU, driver=driver) as runner:
        runner.run(fn, range(num))
    for k in range(num):
        mine = [what for what, owner, _ in log if owner == k]
        assert mine == ["send", "receive", "use"] * 2
    runners = {(k, by) for what, k, by in log if what == "receive"}
    assert {(k, (k + 1) % num) for k in range(num)} <= runners
    if asks and num > 1:  # receive before the next send
        order = [what for what, _, _ in log if what != "use"]
        assert "send send" not in " ".join(order)


@both_drivers
def test_a_hook_for_a_sibling_that_ends_is_run(driver: Any) -> None:
    log: list[int] = []

    def fn(k: int) -> None:
        if k == 0:
            register_recv_hook(lambda: log.append(current_ubatch_id()))
            yield_turn("dispatch")
            assert log == [1]

    with UBatchRunner(2, device=CPU, driver=driver) as runner:
        runner.run(fn, [0, 1])


@both_drivers
def test_a_second_hook_for_the_same_sibling_does_not_replace_the_first(driver: Any) -> None:
    log: list[str] = []

    def fn(k: int) -> None:
        if k == 0:
            register_recv_hook(lambda: log.append("first"))
            register_recv_hook(lambda: log.append("second"))
        yield_turn("dispatch")
        assert log == ["first", "second"]

    with UBatchRunner(2, device=CPU, driver=driver) as runner:
        runner.run(fn, [0, 1])


@both_drivers
def test_no_hook_survives_a_failed_step(driver: Any) -> None:
    log: list[int] = []

    def fail(k: int) -> None:
        register_recv_hook(lambda: log.append(k))
        raise Boom

    with UBatchRunner(2, device=CPU, driver=driver) as runner:
        with pytest.raises(Boom):
            runner.run(fail, [0, 1])
        runner.run(lambda k: yield_turn("x"), [0, 1])
    assert log == []


@both_drivers
def test_report_says_where_everybody_is(driver: Any) -> None:
    told: list[str] = []

    def fn(k: int) -> None:
        note_layer(k)
        yield_turn("dispatch")
        if k == 1:
            told.append(runner.report())

    with UBatchRunner(2, device=CPU, driver=driver, rank=5) as runner:
        runner.run(fn, [0, 1])
    assert told == [
        "rank 5: ubatch 0 of 2, layer 0, last yield point 'dispatch', ended; "
        "ubatch 1 of 2, layer 1, last yield point 'dispatch'"
    ]


@pytest.mark.gpu
@both_drivers
def test_low_level_functions_order_the_streams(driver: Any) -> None:
    device = torch.device("cuda")
    here = torch.cuda.current_stream(device)

    def fn(x: torch.Tensor) -> float:
        assert torch.cuda.current_stream(device) == here
        torch.cuda._sleep(2_000_000)
        x += 1
        context.yield_and_switch_from_compute_to_comm()
        assert torch.cuda.current_stream(device) != here
        y = x * 2
        torch.cuda._sleep(2_000_000)
        y += 1
        context.yield_and_switch_from_comm_to_compute()
        assert torch.cuda.current_stream(device) == here
        return (y * 10).sum().item()

    with UBatchRunner(2, device=device, driver=driver) as runner:
        assert runner.run(fn, [torch.ones(1, device=device), torch.zeros(1, device=device)]) == [50.0, 30.0]
    assert torch.cuda.current_stream(device) == here
