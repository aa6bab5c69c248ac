"""DeepEP's normal kernels: high throughput, for prefill. One of the two files that know `deep_ep` (V1, `Buffer`).

Its own file because V2 (`ElasticBuffer`) will be another class beside this one behind the same protocol.

Inside a node a dispatch is told the most it can receive (`num_worst_tokens`): the host waits for nothing, counts stay
on the device, unused rows come back as filler, and it is launched early. Between nodes DeepEP waits on the host for
the counts, so there the launch is late: the siblings have queued their compute before this host blocks.

Invariants:
- DeepEP runs its own stream. What it must wait for is recorded when the operation is made, before the yield (`Comm`).
- An operation holds its SM count from dispatch to combine: DeepEP's handle is laid out for it.
- Rows are padded to the kernels' unit of 512 bytes here and nowhere else.
- A rank without tokens sends one row that is routed nowhere: an empty tensor has no address to give to a kernel.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from dbo.errors import ConfigError
from dbo.work import Comm, Work
from moe.all2all.base import Capabilities, Dispatched, Setup, Transport, check_routing

MAX_SMS = 64  # buffers are laid out for so many; whole steps inside a node were still gaining a little there
_SMS_BETWEEN_NODES = 20  # DeepEP's own choice: the link is full, and more need more queue pairs
_UNIT_BYTES = 512
_RANKS_PER_NODE = 8  # DeepEP's NUM_MAX_NVL_PEERS
_DRAIN_S = 1.0  # what a device gets to end what is not stuck


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """What the way back needs."""

    handle: Any
    combine_config: Any
    num_tokens: int


class DeepEPHighThroughput(Transport):
    """bf16 both ways, or 8-bit blocks on the way there (`fp8`); rows layout."""

    name = "deepep_ht"

    def __init__(
        self, *, num_sms: int | None = None, fp8: bool = False, no_sync: bool | None = None, **setup: Unpack[Setup]
    ) -> None:
        """Collective over `group` (any backend). `num_sms`: for messages where no partition says otherwise, which is
        while whole steps run, and little else wants them (shared experts do); None = as many as help. `no_sync`: None =
        inside a node. Raises ConfigError for what DeepEP cannot do.
        """
        check_setup(self.name, setup)
        super().__init__(**setup)
        deep_ep = import_deep_ep()
        self._fp8 = fp8
        unit = _UNIT_BYTES if fp8 else _UNIT_BYTES // 2
        self._wire_hidden = -(-self.hidden // unit) * unit
        inside_a_node = self.ep_size <= _RANKS_PER_NODE
        self._no_sync = inside_a_node if no_sync is None else no_sync
        self.capabilities = Capabilities(
            order="early" if self._no_sync else "late",
            capturable=self._no_sync,
            relative_error=0.1 if fp8 else 0.02,
        )
        self._num_sms = num_sms or (MAX_SMS if inside_a_node else _SMS_BETWEEN_NODES)
        self._deep_ep, self._configs = deep_ep, dict[int, tuple[Any, Any]]()
        sizes = self._configs_of(MAX_SMS)
        row_bytes = self._wire_hidden * 2
        self._buffer = deep_ep.Buffer(
            self.group,
            max(c.get_nvl_buffer_size_hint(row_bytes, self.ep_size) for c in sizes),
            max(c.get_rdma_buffer_size_hint(row_bytes, self.ep_size) for c in sizes),
            explicitly_destroy=True,
        )
        if not self._no_sync:
            ready = deep_ep.Buffer.capture
            self.comm = Comm(self.device, order="late", own_stream=False, make_ready=ready, check=self.check)

    def set_num_sms(self, num_sms: int | None) -> int | None:
        """A `dbo.sm_partition.Setter` for the dispatches to come: even, at most MAX_SMS; gives what was in force."""
        before = self._num_sms
        if num_sms is not None:
            self._configs_of(num_sms)
            self._num_sms = num_sms
        return before

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        num_tokens_per_rank: Sequence[int] | None = None,
    ) -> Work[Dispatched]:
        """See `All2All.dispatch`."""
        check_routing(x, topk_idx, topk_weights)
        num_tokens = x.shape[0]
        if not num_tokens:
            x, topk_idx = x.new_zeros(1, self.hidden), topk_idx.new_full((1, topk_idx.shape[1]), -1)
            topk_weights = topk_weights.new_zeros(topk_idx.shape)
        padded = widened(x, self._wire_hidden)
        wire = _quantise(padded) if self._fp8 else padded
        bound = self.max_tokens_per_rank * self.ep_size if num_tokens_per_rank is None else sum(num_tokens_per_rank)
        dispatch_config, combine_config = self._configs_of(self._num_sms)
        topk_idx = topk_idx.contiguous()
        per_rank, per_expert, is_token_in_rank = _layout(topk_idx, self.num_experts, self.ep_size)
        per_node = None
        if self.ep_size > _RANKS_PER_NODE:
            per_node = is_token_in_rank.unflatten(1, (-1, _RANKS_PER_NODE)).any(-1).sum(0, dtype=torch.int32)

        def launch(ready: Any) -> Callable[[], Dispatched]:
            received, local_idx, weights, counts, handle, arrived = self._buffer.dispatch(
                wire,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=is_token_in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=topk_idx,
                topk_weights=topk_weights,
                num_worst_tokens=max(bound, 1) if self._no_sync else 0,
                config=dispatch_config,
                **self._ordering(ready),
            )
            sent = _Sent(handle=handle, combine_config=combine_config, num_tokens=num_tokens)

            def finish() -> Dispatched:
                self._wait(arrived)
                rows = _dequantise(*received) if self._fp8 else received
                return Dispatched(
                    x=narrowed(rows, self.hidden),
                    topk_idx=local_idx,
                    topk_weights=weights,
                    num_tokens_per_expert=counts or None,
                    handle=sent,
                    rows_per_expert=bound * topk_idx.shape[1] // self.num_experts,
                )

            return finish

        return self.comm.start(launch, label="dispatch")

    def combine(self, y: Tensor, sent: Dispatched) -> Work[Tensor]:
        """See `All2All.combine`."""
        back: _Sent = sent.handle
        wire = widened(y, self._wire_hidden)

        def launch(ready: Any) -> Callable[[], Tensor]:
            combined, _, arrived = self._buffer.combine(
                wire,
                back.handle,
                config=back.combine_config,
                **self._ordering(ready),
            )

            def finish() -> Tensor:
                self._wait(arrived)
                rows: Tensor = combined if combined.shape[0] == back.num_tokens else combined[: back.num_tokens]
                return narrowed(rows, self.hidden)

            return finish

        return self.comm.start(launch, label="combine")

    def outstanding(self) -> str | None:
        """See `CannotRecall`."""
        streams = [torch.cuda.current_stream(self.device), self._buffer.get_comm_stream()]
        return f"a {self.name} operation" if stay_busy(streams) else None

    def close(self) -> None:
        """Collective: gives back DeepEP's buffers. Calling it again does nothing."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.destroy()

    def _ordering(self, ready: Any) -> dict[str, Any]:
        """How DeepEP's stream is ordered after the inputs.

        Launched early, under `Comm`'s stream: by that stream, which DeepEP's own is ordered after and which is
        ordered after it, so no tensor is recorded on another stream (which costs the host more than the launch).
        Launched late: by the event, on DeepEP's stream alone, which then owns what it allocates.
        """
        if self._no_sync:
            return {}
        return {"previous_event": ready, "async_finish": True, "allocate_on_comm_stream": True}

    def _wait(self, arrived: Any) -> None:
        if not self._no_sync:
            arrived.current_stream_wait()

    def _configs_of(self, num_sms: int) -> tuple[Any, Any]:
        """(dispatch, combine) configurations of so many SMs, DeepEP's own tuning for this number of ranks."""
        if num_sms not in self._configs:
            if num_sms % 2 or not 2 <= num_sms <= MAX_SMS:
                raise ConfigError("comm_sms", num_sms, f"an even number from 2 to {MAX_SMS}", "use 20")
            buffer = self._deep_ep.Buffer
            before = buffer.num_sms
            buffer.set_num_sms(num_sms)  # the only way to DeepEP's tables; put back below
            try:
                pair = buffer.get_dispatch_config(self.ep_size), buffer.get_combine_config(self.ep_size)
                if self.ep_size == 2:  # larger messages than its table has, measured on two H200 (benchmarks/results)
                    larger = self._deep_ep.Config(num_sms, *((48, 512) if num_sms <= 16 else (24, 256)), 6, 128)
                    pair = larger, larger
            except AssertionError as error:
                allowed = "a number of ranks DeepEP has tables for (2, 4, 8, 16, 24, 32, ...)"
                raise ConfigError("ep_size", self.ep_size, allowed, "use --all2all torch") from error
            finally:
                buffer.set_num_sms(before)
            self._configs[num_sms] = pair
        return self._configs[num_sms]


def import_deep_ep() -> Any:
    """The package `deep_ep`, V1. Raises ConfigError with the remedy where it is not installed or does not load."""
    os.environ.setdefault("EP_SUPPRESS_NCCL_CHECK", "1")  # its check looks for another NCCL than torch brings
    try:
        import deep_ep
    except ImportError as error:
        raise ConfigError(
            "all2all",
            "deepep",
            f"an installed deep_ep ({error})",
            "pip install dbo-moe[deepep], or use --all2all torch",
        ) from error
    return deep_ep


def stay_busy(streams: Sequence[torch.cuda.Stream]) -> bool:
    """Whether something still runs there after a moment: a kernel that waits for another rank goes on waiting."""
    deadline = time.monotonic() + _DRAIN_S
    while not all(stream.query() for stream in streams):
        if time.monotonic() > deadline:
            return True
        time.sleep(1e-3)
    return False


def check_setup(name: str, setup: Setup) -> None:
    """Refuse what none of DeepEP's kernels can do. Raises ConfigError.

    It finds an expert's rank by division, so all ranks must have as many.
    """
    group, config = setup["group"], setup["config"]
    if group is None or setup["device"].type != "cuda":
        raise ConfigError("all2all", name, "two or more ranks with a GPU each", "use --all2all torch")
    if config.num_experts % group.size():
        allowed = f"a multiple of {group.size()} ranks for {name}"
        raise ConfigError("num_experts", config.num_experts, allowed, "use --all2all torch, or other ranks")
    if config.dtype != torch.bfloat16:
        raise ConfigError("all2all", name, f"bfloat16 tokens, not {config.dtype}", "use --dtype bfloat16")


def widened(x: Tensor, hidden: int) -> Tensor:
    """x with zeros behind its last dimension up to `hidden`, contiguous; x itself where it is both already."""
    return F.pad(x, (0, hidden - x.shape[-1])) if x.shape[-1] != hidden else x.contiguous()


def narrowed(x: Tensor, hidden: int) -> Tensor:
    """The other way round: without what was behind `hidden`; a view costs the host as much as a launch."""
    return x if x.shape[-1] == hidden else x[..., :hidden]


def _layout(topk_idx: Tensor, num_experts: int, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    from moe.kernels.layout import dispatch_layout

    return dispatch_layout(topk_idx, num_experts, num_ranks)


def _quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    from moe.kernels.fp8 import quantise

    return quantise(x)


def _dequantise(values: Tensor, scales: Tensor) -> Tensor:
    from moe.kernels.fp8 import dequantise

    return dequantise(values, scales)
