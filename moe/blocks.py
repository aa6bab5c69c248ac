"""Functions of rows, given the same number of rows in every call: how a row's result is kept from depending on others.

Its own file because everything without a kernel of its own is made batch-invariant (`ModelConfig.batch_invariant`) in
this one way. A library chooses its algorithm, and where it divides the work among threads, by the shape of what it is
given; a vectorised function treats the last elements of its input by other instructions than the rest. With one shape
in every call the choice is the same every time. Products of matrices then give a row the same bits at any place of its
block; functions of elements need not, so on a CPU they get one row a call. A GPU treats all elements alike.

Invariant: every block lies in memory of its own, so alignment is the same too; rows that fill the last one are zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

PRODUCT_ROWS = 16  # of a block: weights are read once for so many rows

RowFunction = Callable[[Tensor], Tensor]


def product_in_blocks(product: RowFunction) -> RowFunction:
    """`product` of x [n, k] with a fixed matrix, `PRODUCT_ROWS` rows a call; n may be 0."""
    return lambda x: _in_blocks(product, x, PRODUCT_ROWS)


def row_by_row(function: RowFunction, x: Tensor) -> Tensor:
    """`function(x)` for x [n, ...] and a function of rows; on a CPU with one row a call. n may be 0."""
    return function(x) if x.is_cuda else _in_blocks(function, x, 1)


def _in_blocks(function: RowFunction, x: Tensor, num_rows: int) -> Tensor:
    if not x.shape[0]:
        return function(x)
    results = [function(_block(x, first, num_rows)) for first in range(0, x.shape[0], num_rows)]
    return torch.cat(results)[: x.shape[0]]


def _block(x: Tensor, first: int, num_rows: int) -> Tensor:
    """Rows of x from `first` on, in memory of their own."""
    rows = x[first : first + num_rows]
    block = x.new_zeros(num_rows, *x.shape[1:])
    block[: rows.shape[0]] = rows
    return block
