"""The start-up proof that a transport works between the ranks that will use it.

Its own file because it is written against the protocol alone and runs for every backend, also those not of this
project.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dbo.errors import ConfigError
from moe.all2all.base import All2All, Dispatched, ExpertShape


def self_test(all2all: All2All, config: ExpertShape, device: torch.device, *, num_tokens: int = 16) -> None:
    """Dispatch and combine with weights 1 / num_topk between the actual ranks; the input must come back.

    Collective: all ranks of the backend call it, outside a ubatch, with at most their `max_tokens_per_rank`
    tokens. Takes milliseconds. The experts are stood in for by their weights, so a difference is the
    transport's fault. Raises ConfigError, on the ranks whose tokens came back different.
    """
    tokens = torch.arange(num_tokens, device=device)[:, None]
    x = (1 + tokens + 31 * all2all.ep_rank + torch.arange(config.hidden, device=device) % 7).to(config.dtype)
    slots = torch.arange(config.num_topk, device=device)
    topk_idx = (tokens * config.num_topk + slots + all2all.ep_rank) % config.num_experts
    topk_weights = torch.full(topk_idx.shape, 1 / config.num_topk, device=device)
    received = all2all.dispatch(x, topk_idx, topk_weights, (num_tokens,) * all2all.ep_size).result()
    back = all2all.combine(weigh(received), received).result()
    num_wrong = int(((back - x).abs() > all2all.capabilities.relative_error * x).any(-1).sum())
    if num_wrong:
        raise ConfigError(
            "all2all",
            all2all.name,
            f"{num_wrong} of {num_tokens} tokens came back to rank {all2all.ep_rank} different from what was sent",
            "choose another --all2all, or ask `launch doctor` what works between these ranks",
        )


def weigh(received: Dispatched) -> Tensor:
    """What experts that return their input would give for `received`: each row times the sum of its local
    weights."""
    if received.topk_idx is None or received.topk_weights is None:
        return received.x  # padded layout: the source weighs
    here = received.topk_idx >= 0
    weight = received.topk_weights.masked_fill(~here, 0).sum(-1, keepdim=True)
    rows = received.x.masked_fill(~here.any(-1, keepdim=True), 0)  # filler may be NaN
    return (rows * weight).to(received.x.dtype)
