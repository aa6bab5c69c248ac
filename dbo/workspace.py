"""Scratch memory with a slot for each ubatch, which can be locked once graphs know its addresses.

A file of its own because two sides must agree on one rule: code that needs scratch memory (it asks), and captured
graphs (they remember addresses). Invariants:

- all slots grow together: none is ever too small for what another one already held, so the first step that splits
  after the lock finds its memory, whichever ubatch ran before it;
- what one ubatch takes stays its own until it asks again, also while its siblings run;
- once locked, an address never changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from dbo.context import current_ubatch_id
from dbo.errors import DBOError

_ALIGN = 256  # bytes: what the caching allocator gives, and more than any load needs

Spec = tuple[Sequence[int], torch.dtype]
"""Shape and dtype of one tensor."""


class WorkspaceLocked(DBOError):
    """The workspace would have to grow, but graphs hold its addresses."""


class Workspace:
    """`num_ubatches` slots of equal size on `device`, empty at first."""

    def __init__(self, device: torch.device, num_ubatches: int) -> None:
        self._device, self._locked = device, False
        self._slots = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(num_ubatches)]

    @property
    def num_bytes(self) -> int:
        """Size of a slot."""
        return self._slots[0].numel()

    def take(self, *specs: Spec) -> list[Tensor]:
        """Tensors of these shapes and dtypes in the slot of the ubatch that runs, one behind the other, undefined.

        Valid until the same ubatch takes again. Raises `WorkspaceLocked` if it is too small and locked.
        """
        ends = _ends(specs)
        self.reserve(ends[-1] if ends else 0)
        slot, taken = self._slots[current_ubatch_id()], []
        for (shape, dtype), start in zip(specs, [0, *ends], strict=False):
            taken.append(slot[start : start + prod(shape) * dtype.itemsize].view(dtype).view(*shape))
        return taken

    def reserve(self, num_bytes: int) -> None:
        """Make every slot at least so large. Old memory goes back when its last tensor does."""
        if num_bytes <= self.num_bytes:
            return
        if self._locked:
            raise WorkspaceLocked(
                f"ubatch {current_ubatch_id()} needs {num_bytes} bytes of workspace, {self.num_bytes} are locked: "
                "graphs hold its addresses; run the largest step before the capture session ends"
            )
        for k in range(len(self._slots)):
            self._slots[k] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def lock(self) -> None:
        """No slot grows from now on."""
        self._locked = True

    def unlock(self) -> None:
        """Slots may grow again: every graph that used them was given up."""
        self._locked = False


def _ends(specs: Sequence[Spec]) -> list[int]:
    ends, end = [], 0
    for shape, dtype in specs:
        end += -(-prod(shape) * dtype.itemsize // _ALIGN) * _ALIGN
        ends.append(end)
    return ends
