"""What the GPU benchmarks share: random models made on the device, batches of equal prompts, arms, and timing.

A rehearsal (`--rehearse`) runs every line of a program that is not the device's own: on the CPU, over gloo, with tiny
shapes and one round, under the same names. Its figures mean nothing.

Timing: every round runs every arm once, in an order that is random and the same on all ranks; a time is the largest
over the ranks, from a barrier to the end of the device's work; figures are medians with the 10th and 90th percentile.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.clock import Clock
from dbo.agreement import Agreement, Vote
from dbo.config import DBOConfig
from dbo.policy import make_policy
from dbo.runner import UBatchRunner
from dbo.slices import make_slices, split_batch
from dbo.sm_partition import SMPartition
from dbo.work import Comm, Work
from launch.doctor.host import yardstick_us
from launch.mesh import Mesh
from launch.power import PowerMeter
from moe.all2all.base import All2All, Capabilities, Dispatched, expert_range
from moe.all2all.deepep_ht import DeepEPHighThroughput
from moe.all2all.deepep_ll import DeepEPLowLatency
from moe.all2all.torch_dist import TorchAll2All
from moe.batch import ForwardBatch
from moe.config import ModelConfig, named_shape
from moe.kv_cache import KVCache
from moe.models.decoder import Model, Params, declare_params
from moe.models.registry import family_named
from moe.sms import Form, compute_setters, total_sms

BLOCK = 16
SHORTEST, LONGEST = 64, 264  # contexts of decodes
GREEN_BELOW = 16  # SMs of the all2all: with more a green context has never been the best form


def command(package: str = "benchmarks.gpu") -> str:
    """How this program was called, as one would type it, with the name alone of what comes after `--out`."""
    program, *words = sys.argv
    shown = [Path(word).name if before == "--out" else word for before, word in pairwise([program, *words])]
    return " ".join([f"python -m {package}.{Path(program).stem}", *shown])


def numbers(text: str) -> list[int]:
    """`8,16` -> [8, 16], for argparse."""
    return [int(part) for part in text.split(",")]


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with what every program takes."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny shapes and one round")
    parser.add_argument("--sustain", action="store_true", help="also run whole and overlap without pauses, with power")
    return parser


class StandIn(TorchAll2All):
    """gloo in DeepEP's place, for a rehearsal: it takes a number of SMs, and does nothing with it."""

    _num_sms = 20

    def set_num_sms(self, num_sms: int | None) -> int | None:
        """A `dbo.sm_partition.Setter`."""
        before, self._num_sms = self._num_sms, self._num_sms if num_sms is None else num_sms
        return before


class StandInMeter(PowerMeter):
    """A GPU's meter in a rehearsal: one watt."""

    def __init__(self) -> None:
        self.limit_watts = 1.0

    def joules(self) -> float:
        return time.monotonic()

    def clock_mhz(self) -> int:
        return 0


@dataclass(frozen=True)
class Bench:
    """The ranks of one program, and how large and how often things are here."""

    mesh: Mesh
    args: argparse.Namespace

    @classmethod
    @contextmanager
    def start(cls, args: argparse.Namespace) -> Iterator[Bench]:
        """Between all ranks, on their GPUs or, in a rehearsal, on the CPU."""
        with Mesh.start(device="cpu" if args.rehearse else "cuda") as mesh, torch.inference_mode():
            torch.manual_seed(1 + mesh.rank)
            yield cls(mesh, args)

    @cached_property
    def clock(self) -> Clock:
        """Of this rank's device."""
        return Clock(self.mesh.device)

    @property
    def rounds(self) -> int:
        """Measured rounds."""
        return 1 if self.args.rehearse else int(self.args.rounds)

    @property
    def warmup(self) -> int:
        """Rounds before those."""
        return 1 if self.args.rehearse else 3

    def rows(self, num_tokens: int) -> int:
        """So many tokens; a 256th of them, 16 at least, in a rehearsal."""
        return max(16, num_tokens // 256) if self.args.rehearse else num_tokens

    def length(self, num_tokens: int) -> int:
        """A prompt's tokens, in the same proportion, 8 at least."""
        return max(8, num_tokens // 256) if self.args.rehearse else num_tokens

    def shape(self, name: str, num_layers: int) -> ModelConfig:
        """A named shape with so many layers, all with experts."""
        config = named_shape(name)
        if self.args.rehearse:
            width = 32 if config.shared_expert_width else 0
            config, num_layers = replace(named_shape("tiny"), shared_expert_width=width), min(num_layers, 2)
        return replace(config, num_layers=num_layers, dense_layers=frozenset())

    def high_throughput(self, config: ModelConfig, max_tokens: int) -> Any:
        """DeepEP's normal kernels between these ranks."""
        return self._make(DeepEPHighThroughput, config, max_tokens)

    def low_latency(self, config: ModelConfig, max_tokens: int) -> Any:
        """DeepEP's low-latency kernels between these ranks."""
        return self._make(DeepEPLowLatency, config, max_tokens)

    def over_torch(self, config: ModelConfig, max_tokens: int) -> Any:
        """`torch.distributed`, so NCCL, between these ranks."""
        return self._make(TorchAll2All, config, max_tokens)

    def bare(self, all2all: Any) -> Any:
        """The normal kernels without `Work` and `Comm`."""
        return all2all if self.args.rehearse else Bare(all2all)

    def say(self, *words: object) -> None:
        """Print on rank 0."""
        if self.mesh.rank == 0:
            print(*words, flush=True)

    def write(self, found: Mapping[str, Any]) -> None:
        """What was found so far goes to `--out`, whole or not at all."""
        if self.mesh.rank == 0:
            new = self.args.out.with_suffix(".new")
            new.write_text(json.dumps({"command": command(), **found}, indent=1) + "\n")
            new.replace(self.args.out)

    def meet(self) -> None:
        """Wait on the host until all ranks are here."""
        meet(self.mesh)

    def all_agree(self, yes: bool) -> bool:
        """Whether every rank says yes. Collective."""
        flag = torch.tensor([int(yes)])
        if self.mesh.world_size > 1:
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN, group=self.mesh.agreement_group)
        return bool(flag)

    def time_arms(self, arms: Mapping[str, Callable[[], object]]) -> dict[str, Times]:
        """See `time_arms`."""
        return time_arms(arms, self.mesh, rounds=self.rounds, warmup=self.warmup)

    @cached_property
    def meter(self) -> PowerMeter | None:
        """Of this rank's device; None without `nvidia-ml-py`."""
        return StandInMeter() if self.args.rehearse else PowerMeter.of(self.mesh.device)

    @cached_property
    def _all_have_meters(self) -> bool:
        return self.all_agree(self.meter is not None)

    def sustain(
        self, arms: Mapping[str, Callable[[], object]], times: Mapping[str, Times], num_layers: int
    ) -> dict[str, dict[str, float]]:
        """Each arm again and again without a pause, for 0.4 s and then for 0.8 s that count, if asked for: ms and
        joules a layer, watts and MHz of rank 0's GPU, and the most it may draw. Between rounds a GPU rests, and what it
        saves it may spend in the next; here it cannot."""
        if not self.args.sustain or not self._all_have_meters:
            return {}
        meter = self.meter
        assert meter is not None
        return {k: self._sustain(meter, arms[k], times[k].median, num_layers) for k in arms}

    def _sustain(
        self, meter: PowerMeter, arm: Callable[[], object], once_ms: float, num_layers: int
    ) -> dict[str, float]:
        calls = 2 if self.args.rehearse else max(2, round(800 / once_ms))  # the same on all ranks, as `once_ms` is
        for _ in range(calls // 2):
            arm()
        self.clock.synchronize()
        self.meet()
        started = time.perf_counter()
        with meter.watch() as log:
            for _ in range(calls):
                arm()
            self.clock.synchronize()
        ms = (time.perf_counter() - started) * 1e3 / calls / num_layers
        found = {"ms": ms, "mhz": log.mhz, "limit_watts": meter.limit_watts}
        return found if log.watts is None else {**found, "watts": log.watts, "joules": log.watts * ms / 1e3}

    def partition(self, all2all: Any, num_sms: int, form: Form | None = None) -> AbstractContextManager[object]:
        """`num_sms` for the all2all; for compute the rest, in one of the forms of `moe/sms.py`, None = all SMs."""
        if form is None:
            all2all.set_num_sms(num_sms)
            return nullcontext()
        return SMPartition(
            comm_sms=num_sms,
            total_sms=132 if self.args.rehearse else total_sms(torch.cuda.current_device()),
            set_comm_sms=all2all.set_num_sms,
            set_compute_sms=() if self.args.rehearse else compute_setters(form, num_sms),
            multiple_of=2,
        )

    def _make(self, backend: Any, config: ModelConfig, max_tokens: int) -> Any:
        return (StandIn if self.args.rehearse else backend)(
            group=self.mesh.device_group,
            device=self.mesh.device,
            config=config,
            max_tokens_per_rank=max_tokens,
            check=self.mesh.peers.check,
        )


def random_params(config: ModelConfig, all2all: All2All, device: torch.device) -> Params:
    """This rank's random weights, made on the device: on a CPU it would take minutes."""
    experts = expert_range(config.num_experts, all2all.ep_size, all2all.ep_rank)
    params = {}
    for name, param in declare_params(config, family_named(config.family), experts).items():
        values = torch.empty(param.shape, dtype=config.dtype, device=device)
        params[name] = values.fill_(1.0) if param.ones else values.normal_(std=0.02)
    return params


def random_model(config: ModelConfig, all2all: All2All, device: torch.device) -> Model:
    """A model of them."""
    return Model(config, random_params(config, all2all, device), all2all)


def prompts(config: ModelConfig, num_tokens: int, length: int, mesh: Mesh) -> tuple[ForwardBatch, KVCache]:
    """A prefill of num_tokens // length whole prompts a rank, and a cache with room for it."""
    num_requests, blocks = num_tokens // length, -(-length // BLOCK)
    table = torch.arange(num_requests * blocks, dtype=torch.int32, device=mesh.device).view(num_requests, blocks)
    positions = torch.arange(num_tokens, device=mesh.device) % length
    request = torch.arange(num_tokens, device=mesh.device) // length
    lens = np.full(num_requests, length, np.int32)
    batch = ForwardBatch(
        input_ids=torch.randint(config.vocab_size, (num_tokens,), device=mesh.device),
        positions=positions,
        slot_mapping=table[request, positions // BLOCK].long() * BLOCK + positions % BLOCK,
        block_tables=table,
        query_lens=lens,
        seq_lens=lens,
        num_tokens=num_tokens,
        num_tokens_per_rank=(num_tokens,) * mesh.world_size,
    )
    return batch, KVCache(config, num_requests * blocks, BLOCK, config.dtype, mesh.device)


def decodes(config: ModelConfig, num_requests: int, mesh: Mesh) -> tuple[ForwardBatch, KVCache]:
    """One new token for each of `num_requests` requests with contexts of 64 to 264 tokens."""
    blocks = -(-LONGEST // BLOCK)
    lens = np.random.default_rng(mesh.rank).integers(SHORTEST, LONGEST + 1, num_requests).astype(np.int32)
    table = torch.randperm(num_requests * blocks, device=mesh.device).int().view(num_requests, blocks)
    positions = torch.from_numpy(lens.astype(np.int64) - 1).to(mesh.device)
    rows = torch.arange(num_requests, device=mesh.device)
    batch = ForwardBatch(
        input_ids=torch.randint(config.vocab_size, (num_requests,), device=mesh.device),
        positions=positions,
        slot_mapping=table[rows, positions // BLOCK].long() * BLOCK + positions % BLOCK,
        block_tables=table,
        query_lens=np.ones(num_requests, np.int32),
        seq_lens=lens,
        num_tokens=num_requests,
        num_tokens_per_rank=(num_requests,) * mesh.world_size,
    )
    kv = KVCache(config, num_requests * blocks, BLOCK, config.dtype, mesh.device)
    for layer in range(config.num_layers):
        for cache in kv.layer(layer):
            cache.normal_()
    return batch, kv


def cut(batch: ForwardBatch, mesh: Mesh, num_ubatches: int) -> list[ForwardBatch]:
    """The ubatches that the runtime would make of the batch."""
    config = DBOConfig(overlap="on", num_ubatches=num_ubatches, decode_token_threshold=0, prefill_token_threshold=0)
    agreement = Agreement(
        mesh.agreement_group,
        dp_rank=mesh.rank,
        dp_size=mesh.world_size,
        config=config,
        policy=make_policy(config),
        check=mesh.peers.check,
    )
    plan = agreement.agree(Vote(num_tokens=batch.num_tokens, num_tokens_padded=batch.num_tokens))
    assert plan.should_ubatch, plan.explain()
    return split_batch(batch, make_slices(plan, batch.query_lens, seq_lens=batch.seq_lens))


# ------------------------------------------------------------------ compute alone, communication alone


class Recorded:
    """An `All2All` that once records what a transport delivers, layer after layer, and then delivers it without one."""

    name, capabilities = "recorded", Capabilities()

    def __init__(self, real: All2All, device: torch.device):
        self.real, self.ep_rank, self.ep_size, self.num_experts = real, real.ep_rank, real.ep_size, real.num_experts
        self._comm = Comm(device, own_stream=False)
        self.messages: list[tuple[tuple[Any, ...], Dispatched, Tensor, Tensor]] = []
        self._arguments: tuple[Any, ...] = ()
        self.at, self.recording = 0, True

    def dispatch(self, *arguments: Any) -> Work[Dispatched]:
        if self.recording:
            self._arguments = arguments
            return self.real.dispatch(*arguments)
        sent = self.messages[self.at][1]
        return self._comm.start(lambda _: lambda: sent, label="dispatch")

    def combine(self, y: Tensor, sent: Dispatched) -> Work[Tensor]:
        if self.recording:
            back = self.real.combine(y, sent).wait()
            self.messages.append((self._arguments, sent, y, back))
        else:
            back = self.messages[self.at][3]
            self.at = (self.at + 1) % len(self.messages)
        return self._comm.start(lambda _: lambda: back, label="combine")

    def close(self) -> None:
        self.messages.clear()

    def replay_messages(self) -> None:
        """Every recorded message again, with nothing between."""
        for arguments, _, y, _ in self.messages:
            sent = self.real.dispatch(*arguments).wait()
            self.real.combine(y, sent).wait()


class Apart:
    """Delivers what was recorded at once, and sends it as well, on a stream of its own: compute and messages at the
    same time, neither of them ever waiting for the other. What this takes longer than compute alone, they take from
    each other: SMs, memory, power."""

    name, capabilities = "apart", Capabilities()

    def __init__(self, recorded: Recorded, device: torch.device):
        self.recorded, self.real = recorded, recorded.real
        self.ep_rank, self.ep_size, self.num_experts = recorded.ep_rank, recorded.ep_size, recorded.num_experts
        self._lane = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._sent: Any = None

    def dispatch(self, *arguments: Any) -> Work[Dispatched]:
        with torch.cuda.stream(self._lane):
            self._sent = self.real.dispatch(*self.recorded.messages[self.recorded.at][0]).wait()
        return self.recorded.dispatch(*arguments)

    def combine(self, y: Tensor, sent: Dispatched) -> Work[Tensor]:
        with torch.cuda.stream(self._lane):
            self.real.combine(self.recorded.messages[self.recorded.at][2], self._sent).wait()
        return self.recorded.combine(y, sent)

    def close(self) -> None:
        pass


class Bare:
    """DeepEP called as plainly as it can be, on the compute stream: what a step without any overlap machinery does."""

    name, capabilities = "bare", Capabilities()

    def __init__(self, real: DeepEPHighThroughput):
        self.real, self.ep_rank, self.ep_size, self.num_experts = real, real.ep_rank, real.ep_size, real.num_experts

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, num_tokens_per_rank: Any = None) -> Any:
        buffer, (config, combine_config) = self.real._buffer, self.real._configs_of(self.real._num_sms)
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, self.num_experts)
        bound = sum(num_tokens_per_rank)
        received, idx, weights, _, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_worst_tokens=bound,
            config=config,
        )
        return Done(
            Dispatched(
                x=received,
                topk_idx=idx,
                topk_weights=weights,
                num_tokens_per_expert=None,
                handle=(handle, combine_config),
                rows_per_expert=bound * topk_idx.shape[1] // self.num_experts,
            )
        )

    def combine(self, y: Tensor, sent: Dispatched) -> Any:
        return Done(self.real._buffer.combine(y, sent.handle[0], config=sent.handle[1])[0])

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Done:
    """A result that is there, in the shape of a `Work`."""

    value: Any

    def result(self) -> Any:
        return self.value

    wait = result

    def pass_turn(self) -> None:
        """There is nobody else."""


class Switch:
    """An `All2All` that hands each call to the one in force: a model's transport, exchanged between arms."""

    name = "switch"

    def __init__(self, current: Any):
        self.current = current
        self.capabilities = current.capabilities
        self.ep_rank, self.ep_size, self.num_experts = current.ep_rank, current.ep_size, current.num_experts

    def dispatch(self, *arguments: Any) -> Any:
        return self.current.dispatch(*arguments)

    def combine(self, y: Tensor, sent: Dispatched) -> Any:
        return self.current.combine(y, sent)

    def close(self) -> None:
        self.current.close()

    @contextmanager
    def using(self, other: Any) -> Iterator[None]:
        before, self.current = self.current, other
        try:
            yield
        finally:
            self.current = before


# ------------------------------------------------------------------ arms and timing


QUIET = 1.25
"""A call was undisturbed if `yardstick_us`, before and after it, was at most so many times the least."""


@dataclass(frozen=True)
class Times:
    """Milliseconds over the rounds: of the call on the host, and until the device was done (largest over ranks).

    quiet_ms: of the calls, in rounds in which nobody disturbed any rank. On a rented machine other programs use the
    other half of a core, and all Python then takes twice as long, for a second or for minutes.
    """

    host_ms: list[float]
    total_ms: list[float]
    quiet_ms: list[float]

    @property
    def median(self) -> float:
        return float(np.median(self.total_ms))

    @property
    def host(self) -> float:
        return float(np.median(self.host_ms))

    def figure(self, unit: str = "ms", scale: float = 1.0) -> dict[str, Any]:
        low, middle, high = np.percentile(self.total_ms, (10, 50, 90)) * scale
        return {"value": float(middle), "low": float(low), "high": float(high), "unit": unit}


def time_arms(
    arms: Mapping[str, Callable[[], object]], mesh: Mesh, *, rounds: int, warmup: int = 3
) -> dict[str, Times]:
    """Run every arm `warmup` times, then all of them in each of `rounds` rounds."""
    clock = Clock(mesh.device)
    for arm in arms.values():
        for _ in range(warmup):
            arm()
    own: dict[str, list[tuple[float, float, float]]] = {name: [] for name in arms}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(arms), len(arms)):
            clock.synchronize()
            before = yardstick_us()
            meet(mesh)
            start = time.perf_counter()
            arms[name]()
            called = time.perf_counter()
            clock.synchronize()
            total = time.perf_counter() - start
            own[name].append(((called - start) * 1e3, total * 1e3, max(before, yardstick_us())))
    times = torch.tensor([own[name] for name in arms], dtype=torch.float64)
    everyone = [times]
    if mesh.world_size > 1:
        everyone = [torch.empty_like(times) for _ in range(mesh.world_size)]
        torch.distributed.all_gather(everyone, times, group=mesh.agreement_group)
    host, total_ms, sticks = torch.stack(everyone).unbind(-1)  # each [ranks, arms, rounds]
    quiet = (sticks <= QUIET * sticks.min()).all(0)
    host, total_ms = host.amax(0), total_ms.amax(0)
    return {
        name: Times(host[k].tolist(), total_ms[k].tolist(), host[k][quiet[k]].tolist()) for k, name in enumerate(arms)
    }


def meet(mesh: Mesh) -> None:
    """Wait on the host until all ranks are here."""
    if mesh.world_size > 1:
        torch.distributed.all_reduce(torch.zeros(1), group=mesh.agreement_group)


class Arms:
    """The ways to run one batch: `whole`, and with ubatches `split` and `overlap` by either driver.

    Two ubatches; with the driver "four" so many, in greenlets: finer turns leave shorter gaps and cost the host more.
    """

    def __init__(self, model: Model, batch: ForwardBatch, kv: KVCache, mesh: Mesh, *, last_only: Tensor | None = None):
        self.model, self.batch, self.kv, self._last = model, batch, kv, last_only
        self._parts = {n: cut(batch, mesh, n) for n in (2, 4)}
        self.runners = {name: UBatchRunner(2, device=mesh.device, driver=name) for name in ("threads", "greenlet")}
        self.runners["free"] = UBatchRunner(2, device=mesh.device)
        self.runners["four"] = UBatchRunner(4, device=mesh.device, driver="greenlet")
        self.runners["free"]._driver.one_core = False  # threads that the system puts where it likes

    def whole(self) -> Tensor:
        return self._finish(self.model(self.batch, self.kv))

    @property
    def parts(self) -> list[ForwardBatch]:
        return self._parts[2]

    def split(self, driver: str = "greenlet") -> Tensor:
        return self._run(driver, interleave=False)

    def overlap(self, driver: str) -> Tensor:
        return self._run(driver, interleave=True)

    def _run(self, driver: str, *, interleave: bool) -> Tensor:
        runner = self.runners[driver]
        parts = self._parts[runner.num_ubatches]
        return self._finish(torch.cat(runner.run(lambda part: self.model(part, self.kv), parts, interleave=interleave)))

    def _finish(self, hidden: Tensor) -> Tensor:
        return hidden if self._last is None else self.model.compute_logits(hidden[self._last])

    def close(self) -> None:
        for runner in self.runners.values():
            runner.close()
