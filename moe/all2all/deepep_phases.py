"""DeepEP by phase: large batches over the normal kernels, small ones over the low-latency kernels, in one run.

Its own file because it is only the choice. Invariant: which kernels carry a batch follows from numbers that all ranks
share, so they choose alike; what was sent one way comes back the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from torch import Tensor

from dbo.work import Work
from moe.all2all.base import Capabilities, Dispatched, Setup, Transport
from moe.all2all.deepep_ht import DeepEPHighThroughput
from moe.all2all.deepep_ll import DeepEPLowLatency

SMALL = 256  # tokens of a rank, at most, that go over the low-latency kernels


class DeepEPByPhase(Transport):
    """Both of DeepEP's transports behind one; see them for what they refuse."""

    name = "deepep"

    def __init__(self, **setup: Unpack[Setup]) -> None:
        super().__init__(**setup)
        self._small = min(SMALL, self.max_tokens_per_rank)
        small: Setup = {**setup, "max_tokens_per_rank": self._small}
        self._low_latency, self._normal = DeepEPLowLatency(**small), DeepEPHighThroughput(**setup)
        self.capabilities = Capabilities(
            max_in_flight=self._low_latency.capabilities.max_in_flight,
            order=self._normal.capabilities.order,
            capturable=self._normal.capabilities.capturable,
        )
        self.set_num_sms = self._normal.set_num_sms

    def uses_sms(self, num_tokens: int) -> bool:
        """Whether batches of so many tokens on the fullest rank go over kernels that run on a number of SMs."""
        return num_tokens > self._small

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        num_tokens_per_rank: Sequence[int] | None = None,
    ) -> Work[Dispatched]:
        """See `All2All.dispatch`. Without `num_tokens_per_rank` the normal kernels carry the batch."""
        # x has more rows than its rank has tokens only where all ranks are padded to one size: the choice is shared.
        small = num_tokens_per_rank is not None and not self.uses_sms(max(*num_tokens_per_rank, x.shape[0]))
        chosen = self._low_latency if small else self._normal
        return chosen.dispatch(x, topk_idx, topk_weights, num_tokens_per_rank)

    def combine(self, y: Tensor, sent: Dispatched) -> Work[Tensor]:
        """See `All2All.combine`."""
        return (self._low_latency if sent.topk_idx is None else self._normal).combine(y, sent)

    def outstanding(self) -> str | None:
        """See `CannotRecall`."""
        return self._normal.outstanding() or self._low_latency.outstanding()

    def close(self) -> None:
        """Collective: gives back both buffers."""
        self._normal.close()
        self._low_latency.close()
