"""Segments and eager parts, on the emulator: what is captured, what runs again, what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dbo.errors import DBOError
from dbo.graphs.breakable import BreakableCapture, EagerPart, Segment, eager_break_during_capture
from tests.dbo.graphs.emulator import Emulator


@eager_break_during_capture
def scale_by_sum(x: Tensor, out: Tensor) -> Tensor:
    return out.copy_(x * x.sum().item())  # reads a value on the host: cannot be captured


def model(x: Tensor) -> Tensor:
    for _ in range(2):
        x = torch.add(x, 1).mul_(0.5)
        x = scale_by_sum(x, torch.empty_like(x))
    return x.softmax(-1)


def test_segments_and_breaks_in_order(emulator: Emulator) -> None:
    x = torch.randn(3, 4)
    with BreakableCapture(emulator, emulator.new_pool()) as capture:
        out = model(x)
    kinds = [type(part) for part in capture.parts]
    assert kinds == [Segment, EagerPart, Segment, EagerPart, Segment]
    assert (capture.num_graphs, capture.num_breaks) == (3, 2)
    assert {part.name for part in capture.parts if isinstance(part, EagerPart)} == {"scale_by_sum"}
    assert torch.equal(out, model(x))  # each segment ran as it was closed


def test_replay_reads_what_inputs_hold_now(emulator: Emulator) -> None:
    x = torch.randn(3, 4)
    with BreakableCapture(emulator, emulator.new_pool()) as capture:
        out = model(x)
    for _ in range(5):
        x.normal_()
        capture.replay()
        assert torch.equal(out, model(x))


def test_full_is_one_graph_and_a_host_read_is_an_error(emulator: Emulator) -> None:
    x = torch.ones(2)
    with BreakableCapture(emulator, emulator.new_pool(), breaks=False) as capture:
        out = x * 2 + 1
    assert (capture.num_graphs, capture.num_breaks) == (1, 0)
    x.fill_(5)
    capture.replay()
    assert out.tolist() == [11, 11]
    with (
        pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
        BreakableCapture(emulator, emulator.new_pool(), breaks=False),
    ):
        model(x)  # in FULL a break is a plain call


def test_every_segment_eager_gives_the_same(emulator: Emulator) -> None:
    x = torch.randn(3, 4)
    with BreakableCapture(emulator, emulator.new_pool(), eager=True) as capture:
        out = model(x)
    assert (capture.num_graphs, capture.num_breaks, "begin" in emulator.calls) == (0, 2, False)
    assert torch.equal(out, model(x))


def test_a_break_inside_an_eager_part_is_a_plain_call(emulator: Emulator) -> None:
    @eager_break_during_capture
    def outer(x: Tensor, out: Tensor) -> None:
        scale_by_sum(x, out)
        out += x.max().item()

    x, out = torch.randn(4), torch.empty(4)
    with BreakableCapture(emulator, emulator.new_pool()) as capture:
        y = x * 2
        outer(y, out)
    assert capture.num_breaks == 1
    x.normal_()
    capture.replay()
    assert torch.equal(out, scale_by_sum(x * 2, torch.empty(4)) + (x * 2).max())


def test_host_side_effects_under_a_break_happen_again(emulator: Emulator) -> None:
    above: list[int] = []
    under: list[int] = []

    def noting(log: list[int]) -> Callable[[Any], Any]:
        def decorate(fn: Any) -> Any:
            @functools.wraps(fn)
            def call(*args: Any) -> Any:
                log.append(len(log))
                return fn(*args)

            return call

        return decorate

    @noting(above)
    @eager_break_during_capture
    @noting(under)
    def op(x: Tensor, out: Tensor) -> None:
        out.copy_(x)

    with BreakableCapture(emulator, emulator.new_pool()) as capture:
        op(torch.ones(1), torch.empty(1))
    capture.replay()
    capture.replay()
    assert (len(above), len(under)) == (1, 3)


def test_outside_a_capture_a_break_is_a_plain_call(emulator: Emulator) -> None:
    x = torch.arange(3.0)
    assert scale_by_sum(x, torch.empty(3)).tolist() == [0, 3, 6]
    assert scale_by_sum.__name__ == "scale_by_sum"


def test_a_new_tensor_from_an_eager_part_is_refused(emulator: Emulator) -> None:
    @eager_break_during_capture
    def grow(x: Tensor) -> dict[str, Tensor]:
        return {"larger": x + 1}

    with (
        pytest.raises(DBOError, match=r"grow returned a new tensor \(result\['larger'\], \(2,\)\)"),
        BreakableCapture(emulator, emulator.new_pool()),
    ):
        grow(torch.ones(2))
    assert emulator.num_live == 0


def test_nested_use_is_refused(emulator: Emulator) -> None:
    def nested() -> None:
        with BreakableCapture(emulator, emulator.new_pool()):
            pass

    for inside in (nested, eager_break_during_capture(nested)):  # in a segment, in an eager part
        with (
            pytest.raises(DBOError, match="a capture inside a capture"),
            BreakableCapture(emulator, emulator.new_pool()),
        ):
            inside()
    nested()


def test_an_error_gives_everything_up(emulator: Emulator) -> None:
    def fails() -> None:
        scale_by_sum(torch.ones(2) + 1, torch.empty(2))
        torch.ones(1)
        raise KeyError

    with pytest.raises(KeyError), BreakableCapture(emulator, emulator.new_pool()) as capture:
        fails()
    assert (emulator.num_live, emulator.open, capture.parts) == (0, None, [])


def test_graphs_that_hold_nothing_are_dropped(emulator: Emulator) -> None:
    x, out = torch.ones(2), torch.empty(2)
    with BreakableCapture(emulator, emulator.new_pool()) as capture:
        scale_by_sum(x, out)
        scale_by_sum(out, x)
    assert (capture.num_graphs, capture.num_breaks) == (0, 2)


def test_reset_releases_the_graphs(emulator: Emulator) -> None:
    with BreakableCapture(emulator, emulator.new_pool()) as capture:
        model(torch.ones(2))
    assert emulator.num_live == 3
    capture.reset()
    assert emulator.num_live == 0
