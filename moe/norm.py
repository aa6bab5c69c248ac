"""RMS norm of a residual stream: add what the last part gave, then norm.

Its own file because it has two forms: torch's two operations on any device, one launch on a GPU. Same bits either way
on the sum, which is rounded to the stream's dtype before the norm sees it.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from moe.blocks import row_by_row


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, batch_invariant: bool = False
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual) * weight, x + residual) for x, residual [T, hidden]; residual None is zero.

    The caller gives `residual` away, which is contiguous: the sum may be written into it. Without one the second result
    is x itself, so x is given away to the next call. `batch_invariant`: see `ModelConfig`.
    """
    if x.is_cuda and batch_invariant:
        x = x.contiguous()  # a single row always is, so it must not decide on the form
    if x.is_cuda and x.is_contiguous():
        from moe.kernels.norm import add_rms_norm as fused

        return fused(x, residual, weight, eps)
    total = x if residual is None else x + residual

    def norm(rows: Tensor) -> Tensor:
        return F.rms_norm(rows, weight.shape, weight, eps)

    return (row_by_row(norm, total) if batch_invariant else norm(total)), total
