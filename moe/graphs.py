"""What of a model must not be captured in a graph, and how it is called instead.

Its own file because models and transports know nothing of graphs: `make_capturable` puts these stand-ins into a loaded
model. Outside a capture in segments they are plain calls.

    attention                            lengths vary: its plan is made anew in every replay, its result has a buffer;
                                         what is the same for all lengths is captured (`StoringPlan`)
    a transport that reads the host      launched and waited for between segments; what arrives goes into the workspace,
                                         with filler up to the most that can arrive
    experts that count on the host       the same, for devices without kernels for them

A transport whose capabilities say `capturable` is captured as it is: its messages are segments on the comm stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from dbo.context import yield_turn
from dbo.errors import ConfigError
from dbo.graphs.active import between_segments, current_capture
from dbo.graphs.breakable import eager_break_during_capture
from dbo.graphs.mode import CUDAGraphMode
from dbo.work import Work
from dbo.workspace import Workspace
from moe.all2all.base import All2All, Dispatched
from moe.attention.base import AttentionBackend, AttentionPlan, StoringPlan
from moe.batch import ForwardBatch
from moe.config import ModelConfig
from moe.experts import Experts
from moe.kv_cache import KVCache
from moe.models.decoder import Model
from moe.offload import OffloadedExperts


def make_capturable(model: Model, workspace: Workspace) -> None:
    """Let forwards of `model` be captured in segments. Once; `workspace` has a slot for each ubatch."""
    model.attention = BreakableAttention(model.attention)
    for layer in model.moe_layers:
        if not layer.all2all.capabilities.capturable:
            layer.all2all = BreakableAll2All(layer.all2all, workspace)
        if isinstance(layer.experts, OffloadedExperts):
            layer.experts.inner = _breakable(layer.experts.inner)
        else:
            layer.experts = _breakable(layer.experts)


def check_mode(mode: CUDAGraphMode, model: Model) -> None:
    """Refuse a mode in which something would be captured that cannot be. Before `make_capturable`.

    Raises ConfigError.
    """
    if not mode.has_full_cudagraphs:
        return
    name, remedy = mode.name.lower(), "use piecewise"
    captures = getattr(model.attention, "captures", "nothing")
    if captures == "nothing" or (mode.mixed_mode is CUDAGraphMode.FULL and captures != "all"):
        raise ConfigError("cudagraph_mode", name, "an attention that can be captured", remedy)
    for layer in model.moe_layers:
        if not layer.all2all.capabilities.capturable:
            raise ConfigError(
                "cudagraph_mode", name, f"a transport that can be captured, not {layer.all2all.name}", remedy
            )
        if _reads_host(getattr(layer.experts, "inner", layer.experts)):
            raise ConfigError("cudagraph_mode", name, "experts that need no counts on the host", remedy)


def _breakable(experts: Experts) -> Experts:
    return BreakableExperts(experts) if _reads_host(experts) else experts


def _reads_host(experts: Experts) -> bool:
    return bool(getattr(experts, "reads_host", False))


# ------------------------------------------------------------------------------------------------------ attention


class BreakableAttention:
    """An `AttentionBackend`."""

    def __init__(self, inner: AttentionBackend) -> None:
        self._inner = inner

    def __call__(self, config: ModelConfig, batch: ForwardBatch, kv: KVCache) -> AttentionPlan:
        """See `AttentionBackend`."""
        if batch.fixed is None or batch.fixed.whole:
            return self._inner(config, batch, kv)
        plan = _Replanned(self._inner, config, batch, kv)
        between_segments(plan.renew)
        return plan


class _Replanned:
    """An `AttentionPlan` for all replays: made anew for the lengths of each."""

    def __init__(self, inner: AttentionBackend, config: ModelConfig, batch: ForwardBatch, kv: KVCache) -> None:
        self._inner, self._config, self._batch, self._kv = inner, config, batch, kv
        self._plan: AttentionPlan | None = None

    def renew(self) -> None:
        fixed = self._batch.fixed
        assert fixed is not None
        batch = replace(
            self._batch,
            query_lens=fixed.host_query_lens,
            seq_lens=fixed.host_seq_lens,
            num_tokens=fixed.host_num_tokens,
            fixed=None,
        )
        self._plan = self._inner(self._config, batch, self._kv)

    def attend(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, angles: tuple[Tensor, Tensor]
    ) -> Tensor:
        """See `AttentionPlan.attend`."""
        out = qkv.new_empty(qkv.shape[0], self._config.num_heads * self._config.head_dim)
        if isinstance(self._plan, StoringPlan):
            q, k, v = self._plan.store(layer, qkv, q_norm, k_norm, angles)
            self._attend_stored(layer, q, k, v, out)
        else:
            self._attend(layer, qkv, q_norm, k_norm, angles, out)
        return out

    @eager_break_during_capture
    def _attend_stored(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        cast(StoringPlan, self._plan).attend_stored(layer, q, k, v, out)

    @eager_break_during_capture
    def _attend(self, layer: int, qkv: Tensor, q: Any, k: Any, angles: tuple[Tensor, Tensor], out: Tensor) -> None:
        assert self._plan is not None
        out.copy_(self._plan.attend(layer, qkv, q, k, angles))


# -------------------------------------------------------------------------------------------------------- experts


class BreakableExperts:
    """An `Experts`."""

    def __init__(self, inner: Experts) -> None:
        self._inner = inner

    def __call__(self, received: Dispatched) -> Tensor:
        """See `moe.experts.make_experts`."""
        if current_capture() is None:
            return self._inner(received)
        y = torch.empty_like(received.x, memory_format=torch.contiguous_format)
        self._run(received, y)
        return y

    @eager_break_during_capture
    def _run(self, received: Dispatched, y: Tensor) -> None:
        y.copy_(self._inner(received))


# ------------------------------------------------------------------------------------------------------ transport


class BreakableAll2All:
    """An `All2All` of the rows layout. In a capture it tells `num_tokens_per_rank` of the capture in every replay: say
    the padded number there, which is true of them all."""

    def __init__(self, inner: All2All, workspace: Workspace) -> None:
        if inner.capabilities.layout != "rows":
            raise ConfigError("all2all", inner.name, "a transport of the rows layout, or one that can be captured")
        self._inner, self._workspace = inner, workspace
        self.name, self.capabilities = inner.name, inner.capabilities
        self.ep_rank, self.ep_size, self.num_experts = inner.ep_rank, inner.ep_size, inner.num_experts

    @property
    def group(self) -> dist.ProcessGroup | None:
        """See `All2All.group`."""
        return self._inner.group

    @group.setter
    def group(self, group: dist.ProcessGroup | None) -> None:
        self._inner.group = group

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        num_tokens_per_rank: Sequence[int] | None = None,
    ) -> Work[Dispatched]:
        """See `All2All.dispatch`; in a capture `num_tokens_per_rank` is needed, as the bound of what arrives."""
        if current_capture() is None:
            return self._inner.dispatch(x, topk_idx, topk_weights, num_tokens_per_rank)
        if num_tokens_per_rank is None:
            raise ValueError("a capture needs num_tokens_per_rank, to know the most that can arrive")
        rows, num_topk = sum(num_tokens_per_rank), topk_idx.shape[1]
        arrived = self._workspace.take(
            ((rows, x.shape[1]), x.dtype), ((rows, num_topk), topk_idx.dtype), ((rows, num_topk), topk_weights.dtype)
        )
        exchange = _Exchange(self._inner)
        between_segments(exchange.dispatch, x, topk_idx, topk_weights, num_tokens_per_rank)
        static = Dispatched(x=arrived[0], topk_idx=arrived[1], topk_weights=arrived[2], handle=(exchange, len(x)))
        return cast(Work[Dispatched], _EagerWork(exchange, "dispatch", exchange.receive, static))

    def combine(self, y: Tensor, sent: Dispatched) -> Work[Tensor]:
        """See `All2All.combine`."""
        if not isinstance(sent.handle, tuple) or not isinstance(sent.handle[0], _Exchange):
            return self._inner.combine(y, sent)
        exchange, num_tokens = sent.handle
        between_segments(exchange.combine, y)
        return cast(Work[Tensor], _EagerWork(exchange, "combine", exchange.gather, y.new_empty(num_tokens, y.shape[1])))

    def close(self) -> None:
        """See `All2All.close`."""
        self._inner.close()


class _Exchange:
    """One dispatch and its combine, in this replay: everything here is an eager part."""

    def __init__(self, inner: All2All) -> None:
        self.inner = inner
        self._work: Work[Any] | None = None
        self._received: Dispatched | None = None

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, num_tokens_per_rank: Sequence[int]) -> None:
        self._work = self.inner.dispatch(x, topk_idx, topk_weights, num_tokens_per_rank)

    def launch(self) -> None:
        """After the yield, for transports that launch late."""
        assert self._work is not None
        self._work.pass_turn()

    def receive(self, static: Dispatched) -> None:
        assert self._work is not None
        received: Dispatched = self._work.wait()
        self._received, self._work = received, None
        n = received.x.shape[0]
        for into, what in zip(_tensors(static), _tensors(received), strict=True):
            into[:n] = what
        _tensors(static)[1][n:] = -1

    def combine(self, y: Tensor) -> None:
        assert self._received is not None
        self._work = self.inner.combine(y[: self._received.x.shape[0]], self._received)

    def gather(self, out: Tensor) -> None:
        assert self._work is not None
        out.copy_(self._work.wait())
        self._work = self._received = None


def _tensors(received: Dispatched) -> tuple[Tensor, Tensor, Tensor]:
    assert received.topk_idx is not None
    assert received.topk_weights is not None
    return received.x, received.topk_idx, received.topk_weights


@dataclass(frozen=True)
class _EagerWork:
    """What `dbo.work.Work` is to a model, in a capture: launch and wait are eager parts, the result has a place."""

    exchange: _Exchange
    label: str
    finish: Any
    static: Any

    def result(self) -> Any:
        """See `Work.result`."""
        self.pass_turn()
        return self.wait()

    def pass_turn(self) -> None:
        """See `Work.pass_turn`."""
        yield_turn(self.label)
        if self.exchange.inner.capabilities.order == "late":
            between_segments(self.exchange.launch)

    def wait(self) -> Any:
        """See `Work.wait`."""
        between_segments(self.finish, self.static)
        return self.static
