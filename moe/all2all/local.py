"""The transport of one rank: nothing travels.

Its own file because a model on one rank must run without a process group, through the same yield points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dbo.errors import ConfigError
from dbo.work import Comm, Work
from moe.all2all.base import Capabilities, Dispatched, ExpertShape, Traffic, check_routing


class LocalAll2All:
    """All experts are here: what is dispatched is what is received. Any device; never blocks the host."""

    name = "local"
    capabilities = Capabilities(capturable=True)
    ep_rank, ep_size = 0, 1

    def __init__(
        self,
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
        config: ExpertShape,
        max_tokens_per_rank: int,
        check: Callable[[], None] | None = None,
    ):
        """`group` is None or has one rank, else ConfigError."""
        if group is not None and group.size() > 1:
            raise ConfigError("all2all", self.name, f"one rank, not {group.size()}", "use --all2all torch")
        self.group = group
        self.num_experts = config.num_experts
        self.traffic = Traffic()  # stays at nothing
        self._comm = Comm(device, own_stream=False, check=check)

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        num_tokens_per_rank: Sequence[int] | None = None,
    ) -> Work[Dispatched]:
        """See `All2All.dispatch`. Padded rows stay in place as filler."""
        check_routing(x, topk_idx, topk_weights)
        received = Dispatched(
            x=x, topk_idx=topk_idx, topk_weights=topk_weights, num_tokens_per_expert=None, handle=None
        )
        return self._comm.start(lambda _: lambda: received, label="dispatch")

    def combine(self, y: Tensor, sent: Dispatched) -> Work[Tensor]:
        """See `All2All.combine`."""
        return self._comm.start(lambda _: lambda: y, label="combine")

    def close(self) -> None:
        """Nothing is held."""
