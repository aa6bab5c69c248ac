"""The router's last step in one launch: softmax, the top k, renormalisation, and -1 for padded rows.

Its own file, as each fused kernel is; the plain form (`moe.router.route`) is six launches. Invariant: of equal
probabilities the lower expert id wins, and a row of NaN gives distinct ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe.kernels.launch import Launcher
from moe.kernels.sizes import ceil_div, power_of_2


@triton.jit
def _topk_kernel(
    logits,
    weights,
    ids,
    num_rows,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    NUM_TOPK: tl.constexpr,
    NORMALISE: tl.constexpr,
    COUNT_ON_DEVICE: tl.constexpr,
    ROWS: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    experts = tl.arange(0, E)
    choice = tl.arange(0, K)
    is_expert = experts[None, :] < NUM_EXPERTS
    at = rows.to(tl.int64)[:, None]
    logit = tl.load(
        logits + at * NUM_EXPERTS + experts[None, :], mask=(rows[:, None] < num_rows) & is_expert, other=0.0
    ).to(tl.float32)
    # NaN stands only in padded rows, whose ids are dropped below.
    logit = tl.where(is_expert & (logit == logit), logit, -1.0e30)
    shifted = tl.where(is_expert, tl.exp(logit - tl.max(logit, 1)[:, None]), 0.0)
    left = tl.where(is_expert, shifted / tl.sum(shifted, 1)[:, None], -1.0)
    chosen_ids = tl.zeros([ROWS, K], tl.int64)
    chosen = tl.zeros([ROWS, K], tl.float32)
    for k in tl.static_range(NUM_TOPK):
        best, where = tl.max(left, 1, return_indices=True, return_indices_tie_break_left=True)
        chosen = tl.where(choice[None, :] == k, best[:, None], chosen)
        chosen_ids = tl.where(choice[None, :] == k, where[:, None].to(tl.int64), chosen_ids)
        left = tl.where(experts[None, :] == where[:, None], -1.0, left)
    if NORMALISE:
        chosen = chosen / tl.sum(chosen, 1)[:, None]
    if COUNT_ON_DEVICE:
        num_tokens = tl.load(num_tokens)
    real = (rows < num_tokens)[:, None]
    store = (rows[:, None] < num_rows) & (choice[None, :] < NUM_TOPK)
    tl.store(weights + at * NUM_TOPK + choice[None, :], tl.where(real, chosen, 0.0), mask=store)
    tl.store(ids + at * NUM_TOPK + choice[None, :], tl.where(real, chosen_ids, -1), mask=store)


_topk = Launcher(_topk_kernel)


def softmax_topk(
    logits: Tensor, num_topk: int, *, norm_topk_prob: bool, num_tokens: int | Tensor
) -> tuple[Tensor, Tensor]:
    """`moe.router.route` in one launch: logits [T, num_experts] -> weights [T, num_topk] float32, ids [T, num_topk]
    int64.
    """
    num_rows, num_experts = logits.shape
    weights = torch.empty(num_rows, num_topk, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, num_topk, dtype=torch.int64, device=logits.device)
    if num_rows:
        rows = 8
        _topk(
            (ceil_div(num_rows, rows), 1, 1),
            logits.contiguous(),
            weights,
            ids,
            num_rows,
            num_tokens,
            NUM_EXPERTS=num_experts,
            NUM_TOPK=num_topk,
            NORMALISE=norm_topk_prob,
            COUNT_ON_DEVICE=isinstance(num_tokens, Tensor),
            ROWS=rows,
            E=power_of_2(num_experts),
            K=power_of_2(num_topk),
        )
    return weights, ids
