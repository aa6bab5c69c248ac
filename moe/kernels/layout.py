"""Where a batch's tokens go, as DeepEP's dispatch wants to know it: one launch.

Its own file because only that transport asks. DeepEP has a kernel for it that takes 110 us for 16384 tokens on an
H200; this one takes 16, and it runs before the dispatch is made, so it is not on the comm stream's way. A program
counts a few experts, or the tokens of one rank, over all ids; others note who goes where, a block of tokens each. So
there are no atomics and nothing to set to zero before, which would be another launch; the price is a time that grows
with the tokens, by 0.9 us for 1024.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe.kernels.launch import Launcher
from moe.kernels.sizes import ceil_div, power_of_2

_ROWS = 64  # of `in_rank`, a program
_PROGRAMS = 64  # that count experts, at most
_COUNTERS = 16384  # of a program: ids that it reads at once, for each of its experts
_CHUNK = 8192  # ids that it reads at once, at most: two lots lie in shared memory


@triton.jit
def _layout_kernel(
    topk_idx,
    per_expert,
    per_rank,
    in_rank,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    NUM_TOPK: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    program = tl.program_id(0)
    counting: tl.constexpr = (NUM_EXPERTS + EXPERTS - 1) // EXPERTS
    each: tl.constexpr = NUM_EXPERTS // NUM_RANKS
    if program < counting:
        slots = tl.arange(0, CHUNK)
        num_slots = num_tokens * NUM_TOPK
        hits = tl.zeros([EXPERTS, CHUNK], tl.int32)
        experts = program * EXPERTS + tl.arange(0, EXPERTS)
        for start in tl.range(0, num_slots, CHUNK, num_stages=3):
            chosen = tl.load(topk_idx + start + slots, mask=start + slots < num_slots, other=-1).to(tl.int32)
            hits += (chosen[None, :] == experts[:, None]).to(tl.int32)
        tl.store(per_expert + experts, tl.sum(hits, 1), mask=experts < NUM_EXPERTS)
    elif program < counting + NUM_RANKS:
        rank = program - counting
        choice = tl.arange(0, K)
        rows = tl.arange(0, CHUNK // K)
        sent = tl.zeros([CHUNK // K], tl.int32)
        for start in tl.range(0, num_tokens, CHUNK // K, num_stages=3):
            at = (start + rows)[:, None] * NUM_TOPK + choice[None, :]
            live = ((start + rows) < num_tokens)[:, None] & (choice < NUM_TOPK)[None, :]
            chosen = tl.load(topk_idx + at, mask=live, other=-1).to(tl.int32)
            here = (chosen >= rank * each) & (chosen < (rank + 1) * each)
            sent += tl.max(here.to(tl.int32), 1)
        tl.store(per_rank + rank, tl.sum(sent, 0))
    else:
        own_rows = (program - counting - NUM_RANKS) * ROWS + tl.arange(0, ROWS)
        ranks = tl.arange(0, R)
        inside = own_rows < num_tokens
        goes = tl.zeros([ROWS, R], tl.int32)
        for k in tl.static_range(NUM_TOPK):
            chosen = tl.load(topk_idx + own_rows * NUM_TOPK + k, mask=inside, other=-1).to(tl.int32)
            # -1 is no expert; integer division would send it to rank 0
            target = tl.where(chosen >= 0, chosen // each, -1)
            goes = tl.maximum(goes, (target[:, None] == ranks[None, :]).to(tl.int32))
        place = own_rows[:, None] * NUM_RANKS + ranks[None, :]
        tl.store(in_rank + place, goes.to(tl.int8), mask=inside[:, None] & (ranks < NUM_RANKS)[None, :])


_layout = Launcher(_layout_kernel)


def dispatch_layout(topk_idx: Tensor, num_experts: int, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens for each rank [num_ranks], choices of each expert [num_experts], int32; who goes where, [n, num_ranks].

    topk_idx [n, num_topk] int64, contiguous, -1 = not routed; num_experts a multiple of num_ranks; one launch.
    """
    num_tokens, num_topk = topk_idx.shape
    experts = power_of_2(ceil_div(num_experts, _PROGRAMS))
    per_expert = torch.empty(num_experts, dtype=torch.int32, device=topk_idx.device)
    per_rank = torch.empty(num_ranks, dtype=torch.int32, device=topk_idx.device)
    in_rank = torch.empty(num_tokens, num_ranks, dtype=torch.bool, device=topk_idx.device)
    _layout(
        (ceil_div(num_experts, experts) + num_ranks + ceil_div(num_tokens, _ROWS), 1, 1),
        topk_idx,
        per_expert,
        per_rank,
        in_rank,
        num_tokens,
        NUM_EXPERTS=num_experts,
        NUM_RANKS=num_ranks,
        NUM_TOPK=num_topk,
        K=power_of_2(num_topk),
        R=power_of_2(num_ranks),
        ROWS=_ROWS,
        EXPERTS=experts,
        CHUNK=min(_CHUNK, _COUNTERS // experts),
        num_warps=16,
    )
    return per_rank, per_expert, in_rank
