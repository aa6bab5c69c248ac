"""Weights of some layers in host memory, copied to the device ahead of their use.

A file of its own because it is memory and streams only; which weights, is up to the model. Layer by layer::

    compute | use 0 | ...     | use 1 | ...     | use 2 |        a use waits for its copy
    copies  | copy 1          | copy 2          | copy 3         starts when the layer before is used

`num_slots` sets of device memory take turns: layer k always lies in slot k mod num_slots, so graphs know its address.

Invariants:
- A slot is overwritten only after everything queued on the compute stream so far, and not while a ubatch is in the
  middle of using it (it yielded there): so after every use of what it held.
- Every forward begins and ends with the same layers on the device, and no copy under way: `sync_prev_onload` before it,
  `join_after_forward` as its last act. So a graph of it can be replayed after any other, holds no stream that is not
  joined, and waits for nothing that was recorded before it.
- A layer that is not where it should be (ubatches far apart) is copied again, or refused while a sibling is inside the
  layer that is there: never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from dbo.errors import ConfigError, DBOError
from dbo.graphs.active import between_segments

P = ParamSpec("P")
T = TypeVar("T")


class Offloader:
    """`layers`: the weights of each layer by name, on the host, alike in names, shapes and dtypes.

    They are pinned here where `device` is a GPU; drop other references. `weights(k)` are the tensors to compute with,
    of layer k while a function made by `using(k, ...)` runs.
    """

    def __init__(self, layers: Sequence[Mapping[str, Tensor]], device: torch.device, *, num_slots: int = 2) -> None:
        if num_slots < 2:
            raise ConfigError("num_slots", num_slots, "2 or more: one in use, one on its way")
        cuda = device.type == "cuda"
        self._host = [{name: t.pin_memory() if cuda else t for name, t in layer.items()} for layer in layers]
        self._slots = [
            {name: torch.empty_like(t, device=device) for name, t in layer.items()} for layer in self._host[:num_slots]
        ]
        self._stream = torch.cuda.Stream(device) if cuda else None
        self._copied = [torch.cuda.Event() if cuda else None for _ in self._slots]
        self._used = torch.cuda.Event() if cuda else None
        self._device = device
        self._held: dict[int, int] = {}  # slot -> the layer in it, once all that is queued has run
        self._pending: set[int] = set()  # slots with a copy that the compute stream has not waited for
        self._users = [0] * len(self._slots)  # calls under way, by slot
        self._in_forward = False
        self.num_copied_bytes = 0  # by every eager forward and every capture; a replay copies as much again

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The copy stream, None on the CPU."""
        return self._stream

    def weights(self, layer: int) -> dict[str, Tensor]:
        """The device tensors of a layer."""
        return self._slots[layer % len(self._slots)]

    def using(self, layer: int, fn: Callable[P, T]) -> Callable[P, T]:
        """`fn`, which reads `weights(layer)`, with that layer in place; meanwhile the next one is copied. If `fn`
        yields, the next one may have to wait for the siblings. Raises DBOError when they are further apart than slots.
        """
        slot = layer % len(self._slots)

        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            self._in_forward = True  # until it is joined; a replay neither comes here nor there
            if self._held.get(slot) != layer and self._users[slot]:
                raise DBOError(
                    f"offloaded layer {layer} is needed in slot {slot}, where another one is still in use by a ubatch "
                    f"that yielded inside it: more than {len(self._slots)} slots are needed"
                )
            self._onload(layer)
            self._wait(slot)
            for ahead in range(layer + 1, layer + len(self._slots)):
                following = ahead % len(self._host)
                if following % len(self._slots) != slot and not self._users[following % len(self._slots)]:
                    self._onload(following)
            self._users[slot] += 1
            try:
                return fn(*args, **kwargs)
            finally:
                self._users[slot] -= 1

        return call

    def sync_prev_onload(self) -> None:
        """Before a forward, outside a capture: the current stream waits for what is under way; the first layers are
        there. What a failed forward or capture left is not trusted."""
        if self._in_forward:
            self._held.clear()
        self._in_forward = False
        self._rest()

    def join_after_forward(self) -> None:
        """The last act of a forward, inside a capture of it."""
        self._rest()
        self._in_forward = False

    def _rest(self) -> None:
        """The state between forwards."""
        for layer in range(len(self._slots) - 1):
            self._onload(layer)
        for slot in sorted(self._pending):
            self._wait(slot)

    def _onload(self, layer: int) -> None:
        slot = layer % len(self._slots)
        if self._held.get(slot) == layer:
            return
        self._held[slot] = layer
        self._pending.add(slot)
        self.num_copied_bytes += sum(t.nbytes for t in self._host[layer].values())
        between_segments(self._copy, layer, slot)

    def _wait(self, slot: int) -> None:
        if slot in self._pending:
            self._pending.discard(slot)
            if self._stream is not None:
                between_segments(self._order, slot)

    def _copy(self, layer: int, slot: int) -> None:
        if self._stream is not None and self._used is not None:
            self._used.record(torch.cuda.current_stream(self._device))
            self._stream.wait_event(self._used)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for name, tensor in self._host[layer].items():
                self._slots[slot][name].copy_(tensor, non_blocking=True)
        copied = self._copied[slot]
        if copied is not None:
            copied.record(self._stream)

    def _order(self, slot: int) -> None:
        copied = self._copied[slot]
        assert copied is not None
        torch.cuda.current_stream(self._device).wait_event(copied)
