"""Measures what a layer is made of: attention, experts for any number of local experts, messages.

Its own file because nothing here runs a step: each part is timed alone, on tensors made for it. What steps cost is
`launch.calibrate`'s to measure.

Invariants: weights are random and of the model's shape, so a part costs what it would in the model; the ranks measure
at the same time, as they would compute at the same time; only `measure_messages` is collective.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dbo.work import Comm, Work
from launch.profile import Cost, Phase
from moe.all2all.base import All2All, Capabilities, CountsTraffic, Dispatched
from moe.all2all.self_test import weigh
from moe.batch import ForwardBatch
from moe.config import ModelConfig
from moe.experts import ExpertWeights, make_experts
from moe.kv_cache import KVCache
from moe.models.decoder import Model
from moe.models.loading import load_model

REPEATS, LEAST_REPEATS = 7, 3
_DEPTHS = (1, 3)  # a layer is a third of what the two models differ by: what surrounds layers drops out
_VOCABULARY = 64  # no head is timed


def cost_of(times_ms: Sequence[float]) -> Cost:
    """A summary; a clock that saw nothing counts as 10 ns."""
    values = np.maximum(np.asarray(times_ms, dtype=np.float64), 1e-5)
    return Cost(median=float(np.median(values)), low=float(values.min()), high=float(values.max()), n=len(values))


@dataclass(frozen=True)
class Stopwatch:
    """Times calls on one device, from an idle device to an idle device."""

    device: torch.device

    def once(self, function: Callable[[], object]) -> float:
        """Milliseconds of one call."""
        self.settle()
        started = time.perf_counter()
        function()
        self.settle()
        return (time.perf_counter() - started) * 1e3

    def settle(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def repeat(self, function: Callable[[], object], until_s: float) -> list[float]:
        """Some calls after one that warms up; fewer where `until_s` (of `time.monotonic`) has passed."""
        self.once(function)
        times: list[float] = []
        while len(times) < LEAST_REPEATS or (len(times) < REPEATS and time.monotonic() < until_s):
            times.append(self.once(function))
        return times


class _Silent:
    """A transport to nobody: nothing leaves, nothing comes, and what came back is 0."""

    name = "silent"
    capabilities = Capabilities()
    group: dist.ProcessGroup | None = None

    def __init__(self, num_experts: int, device: torch.device):
        self.num_experts = num_experts
        self.ep_rank, self.ep_size = 0, num_experts  # so that one expert is loaded
        self._comm = Comm(device, own_stream=False)

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, num_tokens_per_rank: Sequence[int] | None = None
    ) -> Work[Dispatched]:
        """See `All2All.dispatch`."""
        nothing = Dispatched(
            x=x[:0], topk_idx=topk_idx[:0], topk_weights=topk_weights[:0], num_tokens_per_expert=None,
            handle=x.shape[0],
        )  # fmt: skip
        return self._comm.start(lambda _: lambda: nothing, label="dispatch")

    def combine(self, y: Tensor, sent: Dispatched) -> Work[Tensor]:
        """See `All2All.combine`."""
        return self._comm.start(lambda _: lambda: y.new_zeros(sent.handle, y.shape[1]), label="combine")

    def close(self) -> None:
        """Nothing is held."""


class AttentionBench:
    """Layers without experts: attention, router, norms."""

    def __init__(self, config: ModelConfig, device: torch.device, block_size: int, max_slots: int):
        small = replace(
            config, num_layers=_DEPTHS[1], vocab_size=_VOCABULARY, tie_embeddings=True, dense_layers=frozenset()
        )
        silent: All2All = _Silent(config.num_experts, device)
        deep = load_model(small, all2all=silent, device=device, dtype=config.dtype, load_format="dummy", progress=False)
        shallow: Model = copy.copy(deep)
        shallow.layers = deep.layers[: _DEPTHS[0]]
        self._models = (shallow, deep)
        self._kv = KVCache(small, -(-max_slots // block_size), block_size, config.dtype, device)
        self._watch = Stopwatch(device)

    def measure(self, query_lens: Sequence[int], context: int, until_s: float) -> Cost:
        """One layer over requests with so many new tokens each, after `context` earlier ones."""
        batch = self._batch(query_lens, context)
        times: list[list[float]] = [[], []]
        for _ in range(2):
            for model in self._models:
                self._watch.once(lambda m=model: m(batch, self._kv))  # type: ignore[misc]
        while len(times[0]) < LEAST_REPEATS or (len(times[0]) < REPEATS and time.monotonic() < until_s):
            for model, each in zip(self._models, times, strict=True):
                each.append(self._watch.once(lambda m=model: m(batch, self._kv)))  # type: ignore[misc]
        layers = _DEPTHS[1] - _DEPTHS[0]
        return cost_of([(deep - shallow) / layers for shallow, deep in zip(*times, strict=True)])

    def _batch(self, query_lens: Sequence[int], context: int) -> ForwardBatch:
        device, block_size = self._watch.device, self._kv.block_size
        widths = [-(-(context + n) // block_size) for n in query_lens]
        tables = np.zeros((len(query_lens), max(widths)), np.int32)
        first = 0
        for row, width in zip(tables, widths, strict=True):
            row[:width] = np.arange(first, first + width)
            first += width
        positions = np.concatenate([np.arange(context, context + n) for n in query_lens])
        rows = np.repeat(np.arange(len(query_lens)), query_lens)
        slots = tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
        return ForwardBatch(
            input_ids=torch.from_numpy(positions % _VOCABULARY).to(device),
            positions=torch.from_numpy(positions).to(device),
            slot_mapping=torch.from_numpy(slots).to(device),
            block_tables=torch.from_numpy(tables).to(device),
            query_lens=np.asarray(query_lens, np.int32),
            seq_lens=np.asarray(query_lens, np.int32) + np.int32(context),
            num_tokens=len(positions),
        )


class ExpertBench:
    """The expert path of one layer, for any number of local experts up to `most`."""

    def __init__(self, config: ModelConfig, device: torch.device, most: int, layout: str):
        self._config, self._layout, self._watch = config, layout, Stopwatch(device)
        generator = torch.Generator(device).manual_seed(0)

        def weight(*shape: int) -> Tensor:
            made = torch.empty(shape, dtype=config.dtype, device=device)
            for expert in made:  # one at a time: random numbers come in float32
                expert.copy_(torch.randn(expert.shape, generator=generator, device=device) * 0.02)
            return made

        self._up = weight(most, 2 * config.expert_width, config.hidden)
        self._down = weight(most, config.hidden, config.expert_width)

    def measure(self, num_local_experts: int, num_tokens: int, until_s: float) -> Cost:
        """What arrives when every rank of as many as hold all experts sends `num_tokens` tokens, evenly."""
        e = num_local_experts
        weights = ExpertWeights(w_gate_up=self._up[:e], w_down=self._down[:e])
        experts = make_experts(weights, batch_invariant=self._config.batch_invariant)
        received = self._received(e, num_tokens)
        return cost_of(self._watch.repeat(lambda: experts(received), until_s))

    @torch.inference_mode()
    def _received(self, num_local_experts: int, num_tokens: int) -> Dispatched:
        c, device = self._config, self._watch.device
        rows = num_tokens * c.num_topk  # of all local experts together
        if self._layout == "padded":
            counts = torch.full((num_local_experts,), -(-rows // num_local_experts), device=device)
            x = torch.randn(num_local_experts, int(counts[0]), c.hidden, device=device).to(c.dtype)
            return Dispatched(
                x=x, topk_idx=None, topk_weights=None, num_tokens_per_expert=counts.int(), handle=None,
                rows_per_expert=int(counts[0]),
            )  # fmt: skip
        # As many tokens as have an expert here if all are chosen alike; each row goes to the next token, slot by slot.
        from launch.predict import chance_of_copy

        chance = chance_of_copy(c.num_experts, num_local_experts, c.num_topk)
        num_received = max(round(num_tokens * c.num_experts / num_local_experts * chance), 1)
        num_slots = min(-(-rows // num_received), num_local_experts, c.num_topk)
        token, slot = torch.meshgrid(torch.arange(num_received), torch.arange(c.num_topk), indexing="ij")
        taken = (slot < num_slots) & (slot * num_received + token < rows)
        topk_idx = torch.where(taken, (token + slot) % num_local_experts, -1).to(device)
        return Dispatched(
            x=torch.randn(num_received, c.hidden, device=device).to(c.dtype),
            topk_idx=topk_idx,
            topk_weights=torch.full(topk_idx.shape, 1 / c.num_topk, device=device),
            num_tokens_per_expert=None,
            handle=None,
        )


@dataclass(frozen=True, kw_only=True)
class MessageTimes:
    """What this rank saw of a dispatch and a combine together, in ms and bytes; one entry a repeat."""

    total: list[float]
    waited: list[float] | None  # of it, the host standing still; None where the device waits
    sent_bytes: float | None  # in the mean; None if the transport does not know


@torch.inference_mode()
def measure_messages(
    all2all: All2All, config: ModelConfig, device: torch.device, num_tokens: int, repeats: int
) -> MessageTimes:
    """Dispatch and combine `num_tokens` tokens of random routing on every rank. Collective."""
    generator = torch.Generator().manual_seed(7 + all2all.ep_rank)
    scores = torch.rand(num_tokens, config.num_experts, generator=generator)
    topk_idx = scores.topk(config.num_topk).indices.to(device)
    topk_weights = torch.full(topk_idx.shape, 1 / config.num_topk, device=device)
    x = torch.randn(num_tokens, config.hidden, device=device).to(config.dtype)
    everyone = (num_tokens,) * all2all.ep_size
    watch = Stopwatch(device)
    total: list[float] = []
    waited: list[float] = []
    traffic = all2all.traffic if isinstance(all2all, CountsTraffic) else None
    sent_before = 0
    for repeat in range(repeats + 1):  # the first warms up
        if repeat == 1 and traffic is not None:
            sent_before = traffic.num_bytes
        before = _waited_ms(all2all)
        received: list[Dispatched] = []
        there = watch.once(lambda: received.append(all2all.dispatch(x, topk_idx, topk_weights, everyone).result()))  # noqa: B023
        y = weigh(received[0])
        back = watch.once(lambda: all2all.combine(y, received[0]).result())  # noqa: B023
        if repeat:
            total.append(there + back)
            waited.append((_waited_ms(all2all) or 0.0) - (before or 0.0))
    return MessageTimes(
        total=total,
        waited=waited if _waited_ms(all2all) is not None else None,
        sent_bytes=None if traffic is None else (traffic.num_bytes - sent_before) / repeats,
    )


def _waited_ms(all2all: All2All) -> float | None:
    waited = getattr(all2all, "host_wait_s", None)
    return None if waited is None else float(waited) * 1e3


def prefill_lens(num_tokens: int, longest: int) -> list[int]:
    """`num_tokens` as prompts of equal length, or one less, none above `longest`."""
    count = -(-num_tokens // longest)
    return [num_tokens // count + (i < num_tokens % count) for i in range(count)]


def phase_lens(phase: Phase, num_tokens: int, longest: int) -> list[int]:
    """New tokens of each request in a step."""
    return [1] * num_tokens if phase == "decode" else prefill_lens(num_tokens, longest)
