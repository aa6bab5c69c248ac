"""DeepEP's low-latency kernels, for decode. One of the two files that know `deep_ep` (V1, `Buffer`).

Its own file because nothing here is like the normal kernels: tokens arrive in the padded layout, one block of rows an
expert; the source applies the weights; sending and receiving are two launches, and between them a message is on its
way with no SM at work.

```
compute | A0 send0 | A1 | recv0 send1 | E0 | recv1 ...      the receive of one operation is queued before the next send
```

Invariants: - DeepEP has two buffers and each send clears the other one, so an operation is received before the next
is sent, and two are in flight at most. - `max_tokens_per_rank` fixes the layout of those buffers: one number for the
whole group and for every graph.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from dbo.errors import ConfigError
from dbo.work import Comm, Work
from moe.all2all.base import Capabilities, Dispatched, ExpertShape, Setup, Transport, check_routing
from moe.all2all.deepep_ht import check_setup, import_deep_ep, narrowed, stay_busy, widened

HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
MAX_TOPK = 11
MAX_TOKENS = 1024  # a rank; beyond it the buffers take gigabytes and the normal kernels are faster


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """What the way back needs: DeepEP's handle and the routing, because the source applies the weights."""

    handle: Any
    topk_idx: Tensor
    topk_weights: Tensor


class DeepEPLowLatency(Transport):
    """bf16 both ways, or 8-bit blocks on the way there (`fp8`); padded layout."""

    name = "deepep_ll"

    def __init__(self, *, fp8: bool = False, **setup: Unpack[Setup]) -> None:
        """Collective over `group` (any backend). Raises ConfigError for what DeepEP cannot do."""
        check_setup(self.name, setup)
        super().__init__(**setup)
        self.capabilities = Capabilities(
            max_in_flight=2, order="early", layout="padded", capturable=True, relative_error=0.1 if fp8 else 0.02
        )
        self._fp8 = fp8
        self._max_tokens = -(-self.max_tokens_per_rank // 4) * 4  # DeepEP's unit of rows
        self._wire_hidden = self._check(setup["config"])
        deep_ep = import_deep_ep()
        depth = max(2 * (self._max_tokens + 1), int(os.environ.get("NVSHMEM_QP_DEPTH", "1024")))
        os.environ["NVSHMEM_QP_DEPTH"] = str(depth)  # read by DeepEP as it starts NVSHMEM
        hint = deep_ep.Buffer.get_low_latency_rdma_size_hint
        self._buffer = deep_ep.Buffer(
            self.group,
            num_rdma_bytes=hint(self._max_tokens, self._wire_hidden, self.ep_size, self.num_experts),
            low_latency_mode=True,
            num_qps_per_rank=self.num_experts // self.ep_size,
            explicitly_destroy=True,
        )
        self.comm = Comm(self.device, own_stream=False, check=self.check)
        self._receive: Callable[[], None] | None = None  # of the operation sent last, until it is queued

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        num_tokens_per_rank: Sequence[int] | None = None,
    ) -> Work[Dispatched]:
        """See `All2All.dispatch`; at most `max_tokens_per_rank` rows."""
        check_routing(x, topk_idx, topk_weights)
        if x.shape[0] > self._max_tokens:
            raise ValueError(f"{x.shape[0]} tokens exceed the {self._max_tokens} that {self.name} was made for")
        wire = widened(x, self._wire_hidden)

        def launch(_: Any) -> Callable[[], Dispatched]:
            self._receive_last()
            received, counts, handle, _event, hook = self._buffer.low_latency_dispatch(
                wire, topk_idx, self._max_tokens, self.num_experts, use_fp8=self._fp8, return_recv_hook=True
            )
            receive = self._remember(hook)
            sent = _Sent(handle=handle, topk_idx=topk_idx, topk_weights=topk_weights)

            def finish() -> Dispatched:
                receive()
                rows = _dequantise(received[0], received[1], counts) if self._fp8 else received
                return Dispatched(
                    x=narrowed(rows, self.hidden),
                    topk_idx=None,
                    topk_weights=None,
                    num_tokens_per_expert=counts,
                    handle=sent,
                    rows_per_expert=topk_idx.numel() * self.ep_size // self.num_experts,
                )

            return finish

        return self.comm.start(launch, label="dispatch")

    def combine(self, y: Tensor, sent: Dispatched) -> Work[Tensor]:
        """See `All2All.combine`."""
        back: _Sent = sent.handle
        wire = widened(y, self._wire_hidden)

        def launch(_: Any) -> Callable[[], Tensor]:
            self._receive_last()
            combined, _event, hook = self._buffer.low_latency_combine(
                wire, back.topk_idx, back.topk_weights, back.handle, return_recv_hook=True
            )
            receive = self._remember(hook)

            def finish() -> Tensor:
                receive()
                return narrowed(combined, self.hidden)

            return finish

        return self.comm.start(launch, label="combine")

    def outstanding(self) -> str | None:
        """See `CannotRecall`; also what was sent and not received: the buffers cannot be used in order any more."""
        if self._receive is not None:
            return f"a {self.name} operation that was sent and not received"
        return f"a {self.name} operation" if stay_busy([torch.cuda.current_stream(self.device)]) else None

    def close(self) -> None:
        """Collective: gives back DeepEP's buffers. Calling it again does nothing."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.destroy()

    def _remember(self, hook: Callable[[], None]) -> Callable[[], None]:
        """`hook` as something that runs once: by its own operation, or by the next send, whichever comes first."""
        pending = [hook]

        def receive() -> None:
            if pending:
                self._receive = None  # it was the last one: each is received before the next is sent
                pending.pop()()

        self._receive = receive
        return receive

    def _receive_last(self) -> None:
        if self._receive is not None:
            self._receive()

    def _check(self, config: ExpertShape) -> int:
        """Refuse what the kernels refuse, and give the width on the wire: the next one they accept."""
        remedy = "use --all2all deepep_ht"
        if config.num_topk > MAX_TOPK:
            raise ConfigError("num_topk", config.num_topk, f"at most {MAX_TOPK} for {self.name}", remedy)
        if config.hidden > HIDDEN_SIZES[-1]:
            raise ConfigError("hidden", config.hidden, f"at most {HIDDEN_SIZES[-1]} for {self.name}", remedy)
        if not 1 <= self._max_tokens <= MAX_TOKENS:
            raise ConfigError("max_tokens_per_rank", self._max_tokens, f"1 to {MAX_TOKENS} for {self.name}", remedy)
        return next(size for size in HIDDEN_SIZES if size >= config.hidden)


def _dequantise(values: Tensor, scales: Tensor, counts: Tensor) -> Tensor:
    from moe.kernels.fp8 import dequantise

    return dequantise(values, scales, counts)
