"""A four-layer toy model with two collectives a layer, and ways to make it fail: shared by the tests of the turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from dbo.context import current_ubatch_id, note_layer
from dbo.runner import UBatchRunner
from dbo.work import Comm

CPU = torch.device("cpu")
NUM_LAYERS = 4
LABELS = ("dispatch", "combine")
KINDS = ("compute", "launch", "finish")  # model code before the yield, the launch, the wait after it

without_greenlet = pytest.mark.skipif(find_spec("greenlet") is None, reason="the optional package greenlet is missing")
GREENLET = pytest.param("greenlet", marks=without_greenlet)
both_drivers = pytest.mark.parametrize("driver", ["threads", GREENLET])


class Boom(Exception):
    """What an injection raises."""


@dataclass
class Toy:
    """x -> 2x + 1 for each layer, through two collectives that change nothing. Logs what happens in which ubatch."""

    comm: Comm = field(default_factory=lambda: Comm(CPU))
    inject: Callable[[int, int, str, str], None] = lambda ubatch, layer, label, kind: None
    log: list[tuple[Any, ...]] = field(default_factory=list)
    entered: set[int] = field(default_factory=set)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        ubatch = current_ubatch_id()
        self.entered.add(ubatch)
        try:
            for layer in range(NUM_LAYERS):
                note_layer(layer)
                for label in LABELS:
                    self.step(ubatch, layer, label, "compute")
                    y = self.exchange(x, ubatch, layer, label)
                x = 2 * y + 1
            return x
        finally:
            self.entered.discard(ubatch)

    def exchange(self, x: torch.Tensor, ubatch: int, layer: int, label: str) -> torch.Tensor:
        def launch(ready: Any) -> Callable[[], torch.Tensor]:
            self.step(ubatch, layer, label, "launch")
            sent = x.clone()

            def finish() -> torch.Tensor:
                self.step(ubatch, layer, label, "finish")
                return sent

            return finish

        return self.comm.start(launch, label=label).result()

    def step(self, ubatch: int, layer: int, label: str, kind: str) -> None:
        self.log.append((kind, ubatch, layer, label))
        self.inject(ubatch, layer, label, kind)


def items(num: int) -> list[torch.Tensor]:
    return [torch.arange(4.0) + 10 * k for k in range(num)]


def expected(num: int) -> list[torch.Tensor]:
    return [Toy()(x) for x in items(num)]


def assert_right(runner: UBatchRunner, num: int) -> None:
    """The runner works: a step with a fresh model gives what the model gives alone."""
    got = runner.run(Toy(), items(num))
    assert all(torch.equal(a, b) for a, b in zip(got, expected(num), strict=True))


def points() -> Iterator[tuple[int, str, str]]:
    for layer in range(NUM_LAYERS):
        for label in LABELS:
            for kind in KINDS:
                yield layer, label, kind
