"""Where the keys of packed requests lie in the paged cache, in one launch.

Its own file because it is ten small launches otherwise, which the host makes before the first layer of every prefill
that continues a prompt. A key's request is found by counting the requests that end before it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe.kernels.launch import Launcher
from moe.kernels.sizes import ceil_div

_KEYS = 128
_REQUESTS = 32


@triton.jit
def _key_slots_kernel(
    key_ends,
    block_tables,
    slots,
    num_keys,
    num_requests,
    first,
    table_stride,
    num_columns,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    request = tl.zeros([KEYS], tl.int32)
    for start in range(0, num_requests, REQUESTS):
        each = start + tl.arange(0, REQUESTS)
        end = tl.load(key_ends + 1 + each, mask=each < num_requests, other=0x7FFFFFFF)
        request += tl.sum((key[:, None] >= end[None, :]).to(tl.int32), 1)
    request = tl.minimum(request, num_requests - 1)  # keys after the last one: any slot will do
    position = key - tl.load(key_ends + request)
    column = tl.minimum(position // PAGE, num_columns - 1)
    live = key < num_keys
    row = (first + request).to(tl.int64) * table_stride
    block = tl.load(block_tables + row + column, mask=live, other=0).to(tl.int64)
    tl.store(slots + key, block * PAGE + position % PAGE, mask=live)


_key_slots = Launcher(_key_slots_kernel)


def key_slots(key_ends: Tensor, block_tables: Tensor, first: int, num_keys: int, page: int) -> Tensor:
    """Cache slots of the keys of B requests, one request after another: [num_keys] int64; any slot after the last key.

    key_ends [B + 1] int32: 0, then where each request's keys end. block_tables [requests, columns] int32, of which
    these are from row `first` on; `page`: tokens of a block.
    """
    slots = torch.empty(num_keys, dtype=torch.int64, device=key_ends.device)
    if num_keys:
        _key_slots(
            (ceil_div(num_keys, _KEYS), 1, 1),
            key_ends,
            block_tables,
            slots,
            num_keys,
            len(key_ends) - 1,
            first,
            block_tables.stride(0),
            block_tables.shape[1],
            PAGE=page,
            KEYS=_KEYS,
            REQUESTS=_REQUESTS,
        )
    return slots
