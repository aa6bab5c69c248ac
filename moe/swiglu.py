"""The gate between the two products of an MLP.

Its own file because experts and ordinary MLPs share it where no kernel has it built in.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from moe.blocks import row_by_row


def swiglu(x: Tensor, *, batch_invariant: bool = False) -> Tensor:
    """silu(gate) * up for x [n, 2 * width], gate first: [n, width]. `batch_invariant`: see `ModelConfig`."""
    return row_by_row(_swiglu, x) if batch_invariant else _swiglu(x)


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
