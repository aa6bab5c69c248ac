"""The transport of one rank: nothing travels.

Its own file because a model on one rank must run without a process group, through the same yield points.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from torch import Tensor

from dbo.errors import ConfigError
from dbo.work import Comm, Work
from moe.all2all.base import Capabilities, Dispatched, Setup, Traffic, Transport, check_routing


class LocalAll2All(Transport):
    """All experts are here: what is dispatched is what is received. Any device; never blocks the host."""

    name = "local"
    capabilities = Capabilities(capturable=True)

    def __init__(self, **setup: Unpack[Setup]) -> None:
        """`group` is None or has one rank, else ConfigError."""
        super().__init__(**setup)
        if self.ep_size > 1:
            raise ConfigError("all2all", self.name, f"one rank, not {self.ep_size}", "use --all2all torch")
        self.traffic = Traffic()  # stays at nothing
        self.comm = Comm(self.device, own_stream=False, check=self.check)

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        num_tokens_per_rank: Sequence[int] | None = None,
    ) -> Work[Dispatched]:
        """See `All2All.dispatch`. Padded rows stay in place as filler."""
        check_routing(x, topk_idx, topk_weights)
        received = Dispatched(x=x, topk_idx=topk_idx, topk_weights=topk_weights, handle=None)
        return self.comm.start(lambda _: lambda: received, label="dispatch")

    def combine(self, y: Tensor, sent: Dispatched) -> Work[Tensor]:
        """See `All2All.combine`."""
        return self.comm.start(lambda _: lambda: y, label="combine")
