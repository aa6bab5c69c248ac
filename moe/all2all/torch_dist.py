"""The transport over `torch.distributed`: gloo on CPU, NCCL on GPUs.

Its own file because it is the one backend that runs everywhere, and the one that others are compared with.

One exchange carries everything about a token, packed in one row of bytes:

    | x: hidden values | ids: num_topk int32, global, -1 = none | weights: num_topk float32 | count: int32 | (filler) |

`count` is the number of rows in the message; the receiver turns ids into its own, or -1. NCCL must know on both sides
how long a message is; gloo only that it fits (the start-up self-test sends short ones). So a dispatch takes one of
three forms, the same on all ranks because it is chosen from what all ranks know:

- "bounded" (gloo): room for the most that each source may send, and the count is read from what came. One exchange,
  nothing travels that need not, nobody waits for counts.
- "dense" (NCCL, where it wastes little): every rank sends all its rows to every rank. One exchange, all sizes known
  beforehand: no host synchronisation.
- "counted" (NCCL otherwise): a tiny exchange of counts, the one thing that the host waits for, then the rows.

Invariants: a rank's own rows never enter an exchange; received rows are this rank's own, then the other ranks'
in ascending order, each in token order; a combine's sizes are its dispatch's, reversed; the source sums over
ascending ranks in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from dbo.errors import ConfigError
from dbo.work import Work
from moe.all2all.base import Capabilities, Dispatched, Setup, Traffic, Transport, check_routing, expert_range

Form = Literal["bounded", "dense", "counted"]

_ALIGN = 16  # bytes: the widest load of an expert kernel
_WASTE_BYTES = 8 << 20  # what NVLink moves while counts travel and the host waits for them (some 60 us)


@dataclass(frozen=True, kw_only=True)
class _Routed:
    """A batch and where its tokens go. A slot is a rank as seen from here: 0 is this one, then the others ascending."""

    x: Tensor
    ids: Tensor
    """[num_tokens, num_topk] int32 global expert ids."""
    weights: Tensor
    chosen: Tensor
    """[num_slots, num_tokens] bool: has the token an expert there?"""


@dataclass(frozen=True)
class _Rows:
    """Rows of the wire, [..., bytes] uint8, and views of their fields."""

    wire: Tensor
    x: Tensor
    ids: Tensor
    weights: Tensor
    count: Tensor

    @classmethod
    def empty(cls, shape: tuple[int, ...], like: _Routed) -> _Rows:
        num_bytes = _aligned(_aligned(like.x.shape[1] * like.x.element_size()) + 8 * like.ids.shape[1] + 4)
        return cls.of(torch.empty(*shape, num_bytes, dtype=torch.uint8, device=like.x.device), like)

    @classmethod
    def of(cls, wire: Tensor, like: _Routed) -> _Rows:
        num_bytes, num_topk = like.x.shape[1] * like.x.element_size(), like.ids.shape[1]
        x = wire[..., :num_bytes].view(like.x.dtype)
        words = wire[..., _aligned(num_bytes) :].view(torch.int32)
        weights = words[..., num_topk : 2 * num_topk].view(torch.float32)
        return cls(wire, x, words[..., :num_topk], weights, words[..., 2 * num_topk])

    def gather(self, routed: _Routed, tokens: Tensor) -> None:
        """Fill the first rows with the tokens [n] of a batch, without a copy in between."""
        torch.index_select(routed.x, 0, tokens, out=self.x[: len(tokens)])
        torch.index_select(routed.ids, 0, tokens, out=self.ids[: len(tokens)])
        torch.index_select(routed.weights, 0, tokens, out=self.weights[: len(tokens)])

    def copy(self, routed: _Routed, num_tokens: int) -> None:
        """Fill the first rows (of each block) with the first tokens of a batch."""
        self.x[..., :num_tokens, :] = routed.x[:num_tokens]
        self.ids[..., :num_tokens, :] = routed.ids[:num_tokens]
        self.weights[..., :num_tokens, :] = routed.weights[:num_tokens]


@dataclass(frozen=True, kw_only=True)
class _Way:
    """How the rows of a dispatch went, which is how they come back: its handle."""

    routed: _Routed
    sent: list[int]
    """Rows to each slot."""
    received: list[int]
    """Rows from each slot."""
    tokens: Sequence[Tensor] | None
    """The tokens sent to each slot, ascending; None = the first `sent[slot]` of the batch, chosen there or not."""


class TorchAll2All(Transport):
    """Tokens between the ranks of a gloo group (CPU) or an NCCL group (CUDA), any number of operations in flight.

    `group` may be replaced between steps, by an equal group on all ranks.
    """

    name = "torch"

    def __init__(self, *, form: Form | None = None, **setup: Unpack[Setup]) -> None:
        """`form`: see the module; None chooses. Only gloo can do "bounded", and "dense" without counts is "counted"."""
        super().__init__(**setup)
        if self.group is None:
            raise ConfigError("all2all", self.name, "a process group", "use --all2all local for one rank")
        device = self.device
        self._form, self._on_host = form, device.type == "cpu"
        self.capabilities = Capabilities(capturable=form == "dense" and not self._on_host)
        self.traffic = Traffic()
        self._ranks = [self.ep_rank, *(rank for rank in range(self.ep_size) if rank != self.ep_rank)]
        self._slots = torch.arange(self.ep_size, device=device)[:, None, None]
        # By global expert id, with one more entry for what -1 finds: the slot it lives in, and its id if it lives here.
        slot_of = torch.full((self.num_experts + 1,), -1)
        local_of = slot_of.clone()
        for slot, rank in enumerate(self._ranks):
            experts = expert_range(self.num_experts, self.ep_size, rank)
            slot_of[experts.start : experts.stop] = slot
            if slot == 0:
                local_of[experts.start : experts.stop] = torch.arange(len(experts))
        self._slot_of, self._local_of = slot_of.to(device), local_of.to(device)

    @property
    def host_wait_s(self) -> float | None:
        """How long the host has stood still for messages since the start; None on CUDA, where the device waits."""
        return self.comm.waited_s if self._on_host else None

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        num_tokens_per_rank: Sequence[int] | None = None,
    ) -> Work[Dispatched]:
        """See `All2All.dispatch`. Launched at once; the host waits only in the "counted" form."""
        check_routing(x, topk_idx, topk_weights)
        chosen = (self._slot_of[topk_idx] == self._slots).any(-1)
        routed = _Routed(x=x, ids=topk_idx.int(), weights=topk_weights, chosen=chosen)
        form = self._form or self._choose_form(routed, num_tokens_per_rank)
        if form == "dense" and num_tokens_per_rank is not None:
            real = [num_tokens_per_rank[rank] for rank in self._ranks]
            return self.comm.start(lambda _: self._dense(routed, real), label="dispatch")
        if form == "bounded":
            bounds = num_tokens_per_rank or (self.max_tokens_per_rank,) * self.ep_size
            return self.comm.start(lambda _: self._bounded(routed, bounds), label="dispatch")
        return self.comm.start(lambda _: self._counted(routed), label="dispatch")

    def combine(self, y: Tensor, sent: Dispatched) -> Work[Tensor]:
        """See `All2All.combine`. Launched at once; never blocks the host on CUDA."""
        way: _Way = sent.handle
        own = way.sent[0]

        def launch(_: Any) -> Callable[[], Tensor]:
            back = y.new_empty(sum(way.sent[1:]), y.shape[1])
            wait = self._exchange(back, y[own:].contiguous(), way.sent, way.received)

            def finish() -> Tensor:
                wait()
                return self._sum([y[:own], *torch.split(back, way.sent[1:])], way)

            return finish

        return self.comm.start(launch, label="combine")

    def _choose_form(self, routed: _Routed, num_tokens_per_rank: Sequence[int] | None) -> Form:
        """Dense if the rows that nobody at their destination chose are cheaper than asking for counts."""
        if self._on_host:
            return "bounded"
        if num_tokens_per_rank is None:
            return "counted"
        unchosen = (1 - 1 / self.ep_size) ** routed.weights.shape[1]  # of rows, if experts are chosen alike
        num_bytes = max(num_tokens_per_rank) * (self.ep_size - 1) * routed.x.shape[1] * routed.x.element_size()
        return "dense" if unchosen * num_bytes <= _WASTE_BYTES else "counted"

    def _bounded(self, routed: _Routed, bounds: Sequence[int]) -> Callable[[], Dispatched]:
        counts = routed.chosen.sum(1)
        sent = counts.tolist()
        if max(sent) > bounds[self.ep_rank]:
            raise ValueError(f"{max(sent)} tokens to one rank; the others expect {bounds[self.ep_rank]} at most")
        room = [sent[0], *(max(bounds[rank], 1) for rank in self._ranks[1:])]
        starts = [0, *accumulate(room[:-1])]
        rows = _Rows.empty((sum(room),), routed)
        rows.count[starts[1:]] = 0  # what an empty message leaves
        outgoing, tokens = self._pack(routed, counts, sent, rows)
        wait = self._exchange(rows.wire[sent[0] :], outgoing, room, sent)

        def finish() -> Dispatched:
            wait()
            received = [sent[0], *rows.count[starts[1:]].tolist()]
            wire = rows.wire[: sum(received)]
            if len(received) > 2:  # there are gaps
                wire = torch.cat([rows.wire[start : start + n] for start, n in zip(starts, received, strict=True)])
            return self._dispatched(wire, _Way(routed=routed, sent=sent, received=received, tokens=tokens))

        return finish

    def _counted(self, routed: _Routed) -> Callable[[], Dispatched]:
        counts = routed.chosen.sum(1, keepdim=True)
        others, one_each = torch.empty_like(counts[1:]), [1] * self.ep_size
        self._exchange(others, counts[1:], one_each, one_each)()
        sent, received = torch.stack([counts, torch.cat([counts[:1], others])]).flatten(1).tolist()  # the host waits
        rows = _Rows.empty((sum(received),), routed)
        outgoing, tokens = self._pack(routed, counts.flatten(), sent, rows)
        wait = self._exchange(rows.wire[sent[0] :], outgoing, received, sent)

        def finish() -> Dispatched:
            wait()
            return self._dispatched(rows.wire, _Way(routed=routed, sent=sent, received=received, tokens=tokens))

        return finish

    def _dense(self, routed: _Routed, real: list[int]) -> Callable[[], Dispatched]:
        """`real`: the leading rows of every slot that may be routed."""
        rows, outgoing = _Rows.empty((sum(real),), routed), _Rows.empty((self.ep_size - 1, real[0]), routed)
        rows.copy(routed, real[0])
        outgoing.copy(routed, real[0])
        sent = [real[0]] * self.ep_size
        wait = self._exchange(rows.wire[real[0] :], outgoing.wire.flatten(0, 1), real, sent)

        def finish() -> Dispatched:
            wait()
            return self._dispatched(rows.wire, _Way(routed=routed, sent=sent, received=real, tokens=None))

        return finish

    def _pack(self, routed: _Routed, counts: Tensor, sent: list[int], rows: _Rows) -> tuple[Tensor, Sequence[Tensor]]:
        """Put this rank's own rows at the head of `rows`; give the wire to the others, and the tokens of each slot."""
        slots, tokens = torch.nonzero_static(routed.chosen, size=sum(sent)).unbind(1)
        own, outgoing = sent[0], _Rows.empty((sum(sent[1:]),), routed)
        rows.gather(routed, tokens[:own])
        outgoing.gather(routed, tokens[own:])
        outgoing.count.copy_(counts[slots[own:]])
        return outgoing.wire, torch.split(tokens, sent)

    def _exchange(
        self, incoming: Tensor, outgoing: Tensor, num_in: Sequence[int], num_out: Sequence[int]
    ) -> Callable[[], None]:
        """Start moving rows between ranks, as many as each slot has but slot 0's; gives the wait for their arrival."""
        # As bytes: gloo does not know every dtype.
        outgoing = outgoing.view(torch.uint8)
        self.traffic.add(num_out[1:], outgoing.shape[1])
        work = dist.all_to_all_single(
            incoming.view(torch.uint8),
            outgoing,
            self._by_rank(num_in),
            self._by_rank(num_out),
            group=self.group,
            async_op=True,
        )
        if self._on_host:
            return lambda: self.comm.wait_host(work)
        work.wait()  # the comm stream waits, the host does not
        return lambda: None

    def _by_rank(self, by_slot: Sequence[int]) -> list[int]:
        others = list(by_slot[1:])
        return [*others[: self.ep_rank], 0, *others[self.ep_rank :]]

    def _dispatched(self, wire: Tensor, way: _Way) -> Dispatched:
        rows = _Rows.of(wire, way.routed)
        return Dispatched(
            x=rows.x,
            topk_idx=self._local_of[rows.ids],
            topk_weights=rows.weights,
            handle=way,
        )

    def _sum(self, parts: Sequence[Tensor], way: _Way) -> Tensor:
        """Add each slot's rows to their tokens, in the order of the ranks."""
        chosen = way.routed.chosen
        total = parts[0].new_zeros(chosen.shape[1], parts[0].shape[1], dtype=torch.float32)
        for rank in range(self.ep_size):
            slot = self._ranks.index(rank)
            rows = parts[slot]
            if way.tokens is not None:
                total.index_add_(0, way.tokens[slot], rows.float())
            else:
                total[: rows.shape[0]] += rows.where(chosen[slot, : rows.shape[0], None], 0)
        return total.to(parts[0].dtype)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
