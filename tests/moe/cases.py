"""Routing cases for every test of the MoE layer and its transports: one generator, the same on all ranks.

A case is small, frozen data that travels to the ranks; every rank can make every rank's inputs from it, so each can
tell what it must receive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe.all2all.base import All2All, Dispatched, expert_range
from moe.all2all.registry import make_all2all
from moe.reference import received_reference, rows_reference

POISON = -(2**40) - 7  # an id that nobody may read: its halves are no valid ids either

Pattern = Callable[["Case", int, torch.Generator], Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What the ranks hold and where it goes. Also an `ExpertShape`."""

    name: str
    num_tokens: tuple[int, ...]
    pattern: str = "random"
    hidden: int = 48
    num_experts: int = 8
    num_topk: int = 2
    dtype: torch.dtype = torch.float32
    num_padded: int = 0
    """Rows of every rank's batch; 0 = 3 more than the rank's tokens."""
    tell_counts: bool = True
    """Pass `num_tokens_per_rank` to dispatch."""

    @property
    def ep_size(self) -> int:
        return len(self.num_tokens)

    def experts(self, rank: int) -> range:
        return expert_range(self.num_experts, self.ep_size, rank)


def cases(ep_size: int) -> list[Case]:
    """The extremes of routing, sizes and shapes for `ep_size` ranks."""
    even, last = (16,) * ep_size, ep_size - 1
    one = replace(Case(name="even", num_tokens=even))
    tokens = {
        "none anywhere": (0,) * ep_size,
        "none on rank 0": (0, *even[1:]),
        "none on the last rank": (*even[:-1], 0),
        "only on the last rank": (*(0 for _ in range(last)), 9),
        "one each": (1,) * ep_size,
        "uneven": tuple(1 + 40 * r for r in range(ep_size)),
    }
    found = [
        one,
        *(replace(one, name=name, num_tokens=n) for name, n in tokens.items()),
        *(replace(one, name=f"{name}, counts not told", num_tokens=n, tell_counts=False) for name, n in tokens.items()),
        *(replace(one, name=name, pattern=name) for name in PATTERNS if name != "random"),
        replace(one, name="padded to 256", num_tokens=(1, *(256 for _ in range(last))), num_padded=256),
        replace(one, name="top 1", num_topk=1),
        replace(one, name="top 1, one expert", num_topk=1, pattern="one expert"),
        replace(one, name="top all", num_topk=8),
        replace(one, name="uneven experts", num_experts=4 * ep_size + last, num_topk=3),
        replace(one, name="bfloat16", dtype=torch.bfloat16, num_topk=8, num_experts=32),
        replace(one, name="float16", dtype=torch.float16),
    ]
    for hidden, num_topk in ((576, 2), (2048, 8), (2880, 1), (4096, 12), (7168, 8)):
        found.append(
            replace(one, name=f"hidden {hidden}, top {num_topk}", hidden=hidden, num_topk=num_topk, num_experts=24)
        )
    return found


def _random(case: Case, rank: int, random: torch.Generator) -> Tensor:
    scores = torch.rand(case.num_tokens[rank], case.num_experts, generator=random)
    return scores.topk(case.num_topk).indices


def _among(experts: Callable[[Case, int], range]) -> Pattern:
    """Choose only among the experts of one rank, as far as there are enough of them; then no expert fills the place."""

    def pattern(case: Case, rank: int, random: torch.Generator) -> Tensor:
        allowed = torch.tensor(list(experts(case, rank))[: case.num_topk])
        idx = torch.full((case.num_tokens[rank], case.num_topk), -1)
        idx[:, : len(allowed)] = allowed
        return idx

    return pattern


def _never_rank_0(case: Case, rank: int, random: torch.Generator) -> Tensor:
    allowed = [e for e in range(case.num_experts) if e not in case.experts(0) or case.ep_size == 1]
    scores = torch.rand(case.num_tokens[rank], len(allowed), generator=random)
    return torch.tensor(allowed)[scores.topk(min(case.num_topk, len(allowed))).indices]


PATTERNS: dict[str, Pattern] = {
    "random": _random,
    "one expert": _among(lambda case, rank: range(case.num_experts - 1, case.num_experts)),
    "all to rank 0": _among(lambda case, rank: case.experts(0)),
    "all to the last rank": _among(lambda case, rank: case.experts(case.ep_size - 1)),
    "all stay": _among(lambda case, rank: case.experts(rank)),
    "all leave": _among(lambda case, rank: case.experts((rank + 1) % case.ep_size)),
    "rank 0 never chosen": _never_rank_0,
}


@dataclass(frozen=True)
class Inputs:
    """One rank's arguments of a dispatch, padded rows poisoned."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    num_tokens_per_rank: tuple[int, ...] | None


def make_inputs(case: Case, rank: int, salt: int = 0) -> Inputs:
    """Inputs of `rank`; different for every rank and `salt` (the ubatch, the round)."""
    random = torch.Generator().manual_seed(1000 * salt + rank)
    real = case.num_tokens[rank]
    num_rows = case.num_padded or real + 3
    x = torch.full((num_rows, case.hidden), torch.nan, dtype=case.dtype)
    x[:real] = torch.randn(real, case.hidden, generator=random).to(case.dtype)
    topk_weights = torch.full((num_rows, case.num_topk), torch.nan)
    topk_weights[:real] = torch.rand(real, case.num_topk, generator=random) + 0.1
    topk_idx = torch.full((num_rows, case.num_topk), POISON)
    topk_idx[:real] = PATTERNS[case.pattern](case, rank, random)
    topk_idx[real:] = -1
    return Inputs(x, topk_idx, topk_weights, case.num_tokens if case.tell_counts else None)


def make_backend(ctx: Any, name: str, case: Case) -> All2All:
    """The backend for the ranks of a pool; refused if it has no room for the case."""
    return make_all2all(
        name,
        group=ctx.group if ctx.world_size > 1 or name != "local" else None,
        device=torch.device("cpu"),
        config=case,
        max_tokens_per_rank=max(case.num_padded, *case.num_tokens, 1),
    )


# Stand-ins for experts: expert e multiplies by `scale(e)`, so a row at the wrong expert or with the wrong weight shows.


def scale(expert: Tensor) -> Tensor:
    return 1 + expert.float() / 8


def stand_in(case: Case, rank: int, received: Dispatched) -> Tensor:
    """What the experts of `rank` return."""
    first = case.experts(rank).start
    if received.topk_idx is None or received.topk_weights is None:
        return (received.x * scale(first + torch.arange(received.x.shape[0]))[:, None, None]).to(case.dtype)
    here = received.topk_idx >= 0
    factor = (received.topk_weights * scale(first + received.topk_idx)).masked_fill(~here, 0).sum(-1, keepdim=True)
    return (received.x.masked_fill(~here.any(-1, keepdim=True), 0) * factor).to(case.dtype)


def expected(inputs: Inputs) -> Tensor:
    """What comes back from stand-in experts, in float32."""
    here = inputs.topk_idx >= 0
    factor = (inputs.topk_weights * scale(inputs.topk_idx)).masked_fill(~here, 0).sum(-1, keepdim=True)
    return inputs.x.float().masked_fill(~here.any(-1, keepdim=True), 0) * factor


def check_received(case: Case, rank: int, received: Dispatched, salt: int = 0) -> None:
    """Every expert got each of its tokens once, and every token came once, ids whole."""
    routing = [make_inputs(case, source, salt).topk_idx for source in range(case.ep_size)]
    experts = case.experts(rank)
    counts = received_reference(routing, case.num_experts)[experts.start : experts.stop]
    if received.num_tokens_per_expert is not None:
        assert list(received.num_tokens_per_expert) == counts
    if received.topk_idx is not None:
        assert received.topk_idx.dtype == torch.int64
        ids = received.topk_idx[received.topk_idx != -1]
        assert ((ids >= 0) & (ids < len(experts))).all(), "ids outside this rank's experts"
        assert torch.bincount(ids, minlength=len(experts)).tolist() == counts
        num_rows = sum(len(rows_reference(idx, experts)) for idx in routing)
        assert int((received.topk_idx >= 0).any(-1).sum()) == num_rows


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
