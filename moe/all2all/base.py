"""What the MoE layer asks of a transport, and nothing about any transport.

Its own file because three parties meet here: the layer (calls `dispatch` and `combine`), the expert path (reads
`Dispatched`) and the backends. A backend is one class that satisfies `All2All`, made with a `Setup`; it may start from
`Transport`, which has what does not differ. `pytest tests/moe/all2all --backend module:Class` shows whether it does.

Invariants every backend keeps:

- a token crosses to a destination rank once, however many of that rank's experts it chose, and a row with ids
  -1 does not cross;
- the experts return one row per received token, already weighted and summed over that rank's experts; the
  source adds the rows of the ranks in ascending rank order, so a result depends on neither timing nor the other
  tokens of the batch;
- the handle of an operation travels in the value (`Dispatched.handle`), never in the backend: the number of
  operations in flight is limited only by `Capabilities.max_in_flight`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NotRequired, Protocol, TypedDict, Unpack, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from dbo.errors import ConfigError
from dbo.work import Comm, Work


class ExpertShape(Protocol):
    """What a transport must know of a model; `moe.config.ModelConfig` has it."""

    @property
    def hidden(self) -> int:
        """Width of a token's row."""

    @property
    def num_experts(self) -> int:
        """Experts of one layer, over all ranks."""

    @property
    def num_topk(self) -> int:
        """Experts a token chooses."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of a token's row."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend can do, declared so that a configuration it cannot run is refused before anything runs."""

    max_in_flight: int | None = None
    """Dispatches whose combine has not finished, at most, over all ubatches; None = any number."""
    order: Literal["early", "late"] = "early"
    """When its `Comm` launches: before the yield, or after it (a launch that blocks the host)."""
    layout: Literal["rows", "padded"] = "rows"
    """Shape of what dispatch gives: see `Dispatched`."""
    relative_error: float = 0.02
    """How far, at most, a value that went there and back may be from what it was (half-precision sums; 8-bit wires)."""
    capturable: bool = False
    """Dispatch and combine may be captured in a CUDA graph (no host read, no varying sizes)."""


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """The tokens a rank received, in one of two layouts, with what the way back needs.

    rows: `x` [n, hidden], `topk_idx` [n, num_topk] int64 local expert ids in any order, -1 = not on this rank;
    a row of nothing but -1 is filler, its `x` is undefined and may be NaN. `topk_weights` [n, num_topk]
    float32, undefined where the id is -1. Strides are free except that the last dimension is contiguous.

    padded: `x` [num_local_experts, capacity, hidden]; expert e owns the first `num_tokens_per_expert[e]` rows
    of `x[e]`, the rest are undefined; `topk_idx` and `topk_weights` are None, because the source applies the
    weights.
    """

    x: Tensor
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    num_tokens_per_expert: Sequence[int] | Tensor | None = None
    """[num_local_experts] received tokens of each expert: host list, device tensor, or None = count the ids."""
    handle: Any
    """What the backend's combine needs; nobody else looks at it."""
    rows_per_expert: int | None = None
    """About how many rows an expert got, if that is known without asking: a hint for the shape of tiles."""


@dataclass
class Traffic:
    """What a rank has sent to others, all in all, as far as the host knows it without asking a device."""

    messages: int = 0
    """To one rank each; one without bytes is none."""
    num_bytes: int = 0

    def add(self, num_rows: Sequence[int], row_bytes: int) -> None:
        """Count one exchange: the rows that go to each other rank."""
        self.messages += sum(rows > 0 for rows in num_rows)
        self.num_bytes += sum(num_rows) * row_bytes


@runtime_checkable
class CountsTraffic(Protocol):
    """A transport that knows what it sends; those whose counts stay on the device do not have this."""

    traffic: Traffic


@runtime_checkable
class CannotRecall(Protocol):
    """A transport whose operations, once launched, wait on the device for the other ranks and cannot be given up."""

    def outstanding(self) -> str | None:
        """What a failed step has left there, in words; None = nothing. Waits a moment for what is about to end."""


class All2All(Protocol):
    """A transport of tokens to the ranks that hold their experts, and back.

    Both operations return at once with a `Work`, whose `result()` is a yield point. Every rank of the group
    makes the same calls in the same order, with no tokens too.
    """

    name: str
    capabilities: Capabilities
    ep_rank: int
    ep_size: int
    num_experts: int
    group: dist.ProcessGroup | None
    """The ranks. Whoever abandons a group after a failed step puts the new one here, on all ranks, before the
    next step."""

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        num_tokens_per_rank: Sequence[int] | None = None,
    ) -> Work[Dispatched]:
        """Send each token to the ranks that hold its experts.

        x [num_tokens, hidden]; topk_idx [num_tokens, num_topk] int64 global expert ids, each at most once a
        row, -1 = not routed; topk_weights [num_tokens, num_topk] float32. `num_tokens_per_rank`: how many
        leading rows of every rank's `x` may be routed, the same tuple on all ranks; with it a backend need not
        ask how much it will receive. Raises ValueError for a wrong shape or dtype.
        """

    def combine(self, y: Tensor, sent: Dispatched) -> Work[Tensor]:
        """Bring the experts' rows back: y has the shape of `sent.x`; gives [num_tokens, hidden], 0 for rows not
        routed."""

    def close(self) -> None:
        """Give back what the backend holds; the group is the caller's."""


class Setup(TypedDict):
    """What every backend is made with, by keyword: `registry.make_all2all` passes exactly this."""

    group: dist.ProcessGroup | None
    """The ranks; None for one rank alone."""
    device: torch.device
    config: ExpertShape
    max_tokens_per_rank: int
    """Rows of the largest batch of any rank, the same on all."""
    check: NotRequired[Callable[[], None] | None]
    """Called while the host waits; raises to abandon the wait."""


class Transport:
    """What a backend may start from: its place among the ranks, its experts, a lane for its messages.

    A backend adds `name`, `dispatch` and `combine`, and `capabilities` and `close` where these do not fit.
    """

    name: str
    capabilities = Capabilities()

    def __init__(self, **setup: Unpack[Setup]) -> None:
        group, config = setup["group"], setup["config"]
        self.group, self.device, self.check = group, setup["device"], setup.get("check")
        self.ep_rank, self.ep_size = (0, 1) if group is None else (group.rank(), group.size())
        self.num_experts, self.hidden = config.num_experts, config.hidden
        self.max_tokens_per_rank = setup["max_tokens_per_rank"]

    @property
    def experts(self) -> range:
        """The experts of this rank, by their global ids."""
        return expert_range(self.num_experts, self.ep_size, self.ep_rank)

    @cached_property
    def comm(self) -> Comm:
        """The lane, with a stream of its own on CUDA; a backend that needs another kind puts it here.

        Made when it is first asked for, so that a device that will not do is refused in words before.
        """
        return Comm(self.device, order=self.capabilities.order, check=self.check)

    def close(self) -> None:
        """Nothing is held."""


def expert_range(num_experts: int, ep_size: int, ep_rank: int) -> range:
    """Experts of a rank: consecutive, the first `num_experts % ep_size` ranks hold one more."""
    base, extra = divmod(num_experts, ep_size)
    start = ep_rank * base + min(ep_rank, extra)
    return range(start, start + base + (ep_rank < extra))


def check_routing(x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> None:
    """Refuse what would be misread on the wire: ids of another width leave half of each id unset.

    Raises ValueError.
    """
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; dispatch takes [num_tokens, hidden]")
    for name, tensor, dtype in (("topk_idx", topk_idx, torch.int64), ("topk_weights", topk_weights, torch.float32)):
        if tensor.dtype != dtype:
            raise ValueError(f"{name} is {tensor.dtype}; dispatch takes {dtype}")
        if tensor.dim() != 2 or tensor.shape[0] != x.shape[0] or tensor.shape != topk_idx.shape:
            shapes = ", ".join(str(tuple(t.shape)) for t in (x, topk_idx, topk_weights))
            raise ValueError(f"x, topk_idx and topk_weights have shapes {shapes}; their rows are not the same tokens")


def check_in_flight(all2all: All2All, num_ubatches: int) -> None:
    """Refuse more ubatches than the backend has room for: each has one operation in flight.

    Raises ConfigError.
    """
    limit = all2all.capabilities.max_in_flight
    if limit is not None and num_ubatches > limit:
        raise ConfigError(
            "num_ubatches",
            num_ubatches,
            f"it exceeds {all2all.name}'s {limit} operations in flight",
            f"use {limit} or --all2all torch",
        )
