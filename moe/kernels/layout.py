"""Where a batch's tokens go, as DeepEP's dispatch wants to know it: one pass over the ids.

Its own file because only that transport asks. DeepEP has a kernel for it that reads every id once for each four experts
(110 us for 16384 tokens on an H200); this one takes a tenth of that, and it runs before the dispatch is made, so it is
not on the comm stream's way. Counts are added by integer atomics: their order does not show.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe.kernels.launch import Launcher
from moe.kernels.sizes import ceil_div, power_of_2

_ROWS = 64


@triton.jit
def _layout_kernel(
    topk_idx,
    counts,
    in_rank,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    NUM_TOPK: tl.constexpr,
    ROWS: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    experts = tl.arange(0, E)
    ranks = tl.arange(0, R)
    live = rows < num_tokens
    per_expert = tl.zeros([E], tl.int32)
    sent = tl.zeros([ROWS, R], tl.int32)
    for k in tl.static_range(NUM_TOPK):
        chosen = tl.load(topk_idx + rows.to(tl.int64) * NUM_TOPK + k, mask=live, other=-1).to(tl.int32)
        per_expert += tl.sum((chosen[:, None] == experts[None, :]).to(tl.int32), 0)
        # -1 is no expert; integer division would send it to rank 0
        rank = tl.where(chosen >= 0, chosen // (NUM_EXPERTS // NUM_RANKS), -1)
        sent = tl.maximum(sent, (rank[:, None] == ranks[None, :]).to(tl.int32))
    tl.atomic_add(counts + ranks, tl.sum(sent, 0), mask=ranks < NUM_RANKS)
    tl.atomic_add(counts + NUM_RANKS + experts, per_expert, mask=experts < NUM_EXPERTS)
    at = rows.to(tl.int64)[:, None] * NUM_RANKS + ranks[None, :]
    tl.store(in_rank + at, sent.to(tl.int8), mask=live[:, None] & (ranks < NUM_RANKS)[None, :])


_layout = Launcher(_layout_kernel)


def dispatch_layout(topk_idx: Tensor, num_experts: int, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens for each rank [num_ranks], choices of each expert [num_experts], int32; who goes where, [n, num_ranks].

    topk_idx [n, num_topk] int64, contiguous, -1 = not routed; num_experts a multiple of num_ranks; two launches.
    """
    num_tokens, num_topk = topk_idx.shape
    counts = torch.zeros(num_ranks + num_experts, dtype=torch.int32, device=topk_idx.device)
    in_rank = torch.empty(num_tokens, num_ranks, dtype=torch.int8, device=topk_idx.device)
    _layout(
        (ceil_div(num_tokens, _ROWS), 1, 1),
        topk_idx,
        counts,
        in_rank,
        num_tokens,
        NUM_EXPERTS=num_experts,
        NUM_RANKS=num_ranks,
        NUM_TOPK=num_topk,
        ROWS=_ROWS,
        E=power_of_2(num_experts),
        R=power_of_2(num_ranks),
    )
    per_rank, per_expert = counts.split_with_sizes([num_ranks, num_experts])
    return per_rank, per_expert, in_rank.view(torch.bool)
