"""Minutes of random batches: no hang, no growth of memory, no difference from the reference; a program for torchrun.

    torchrun --nproc-per-node 2 -m benchmarks.gpu.soak --seconds 180 --out FILE

Every turn draws (alike on all ranks) a transport, a driver, one ubatch or two, overlapped or not, a number of SMs, and
for each rank and ubatch a number of tokens: few, many, or none. Two layers of experts run on them, and every row is
compared with the same experts computed on this rank alone. The largest turns come first. Memory in use and memory kept
by the allocator, which goes on cutting its blocks to the sizes that come, are noted half way and at the end.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.setup import Bench, make_parser
from dbo.runner import UBatchRunner
from moe.all2all.base import expert_range
from moe.config import ModelConfig
from moe.experts import Experts, ExpertWeights, make_experts

LIMIT = 2e-2
SETTLED = 0.5  # of the time: then memory must not grow
GROWTH_MIB, KEPT_GROWTH = 8.0, 0.1  # of memory in use; of memory kept, in proportion
LAYERS = 2


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one turn does, the same on every rank."""

    transport: str
    driver: str
    interleave: bool
    num_sms: int
    sizes: Sequence[Sequence[int]]  # tokens, by ubatch and rank
    seed: int


def draw(number: int, transports: Sequence[str], most: dict[str, int], num_ranks: int) -> Turn:
    """The `number`-th turn."""
    rng = random.Random(number)
    transport = rng.choice(transports)
    kind = rng.random()

    def size() -> int:
        if kind < 0.1 or rng.random() < 0.2:
            return 0
        return rng.randint(1, 16) if rng.random() < 0.3 else rng.randint(1, most[transport])

    return Turn(
        transport=transport,
        driver=rng.choice(("threads", "greenlet")),
        interleave=rng.random() < 0.7,
        num_sms=rng.choice((8, 16, 20, 24, 32)),
        sizes=[[size() for _ in range(num_ranks)] for _ in range(rng.choice((1, 2, 2)))],
        seed=number,
    )


def largest(transports: Sequence[str], most: dict[str, int], num_ranks: int) -> Iterator[Turn]:
    """A turn of every kind with as many tokens as there may be."""
    kinds = itertools.product(transports, ("threads", "greenlet"), (True, False), (1, 2))
    for seed, (transport, driver, interleave, num_ubatches) in enumerate(kinds):
        sizes = [[most[transport]] * num_ranks] * num_ubatches
        yield Turn(
            transport=transport, driver=driver, interleave=interleave, num_sms=20, sizes=sizes, seed=100_000 + seed
        )


class Soak:
    """The experts of all ranks, and of this one, on every transport."""

    def __init__(self, bench: Bench, config: ModelConfig, most: dict[str, int]):
        self._bench, self._config = bench, config
        device = bench.mesh.device
        generator = torch.Generator(device).manual_seed(5)  # the same on every rank
        shapes = {
            "w_gate_up": (config.num_experts, 2 * config.expert_width, config.hidden),
            "w_down": (config.num_experts, config.hidden, config.expert_width),
        }
        weights = {
            name: torch.randn(shape, generator=generator, device=device).mul_(0.03).to(config.dtype)
            for name, shape in shapes.items()
        }
        self._all = ExpertWeights(**weights)
        mine = expert_range(config.num_experts, bench.mesh.world_size, bench.mesh.rank)
        self._experts: Experts = make_experts(
            ExpertWeights(**{name: each[mine.start : mine.stop].contiguous() for name, each in weights.items()})
        )
        self.transports: dict[str, Any] = {
            "deepep_ht": bench.high_throughput(config, most["deepep_ht"]),
            "deepep_ll": bench.low_latency(config, most["deepep_ll"]),
        }
        self._runners = {name: UBatchRunner(2, device=device, driver=name) for name in ("threads", "greenlet")}

    def run(self, turn: Turn) -> float:
        """The largest relative error of any row on this rank."""
        all2all = self.transports[turn.transport]
        inputs = [self._inputs(turn, k) for k in range(len(turn.sizes))]

        def layers(k: int) -> list[tuple[Tensor, Tensor]]:
            x, idx, weights = inputs[k]
            found = []
            for _ in range(LAYERS):
                sent = all2all.dispatch(x, idx, weights, tuple(turn.sizes[k])).result()
                y = all2all.combine(self._experts(sent), sent).result()
                found.append((x, y))
                x = (x + y).contiguous()
            return found

        held = self._bench.partition(all2all, turn.num_sms, "shared") if hasattr(all2all, "set_num_sms") else None
        with held or nullcontext():
            ends = self._runners[turn.driver].run(layers, list(range(len(turn.sizes))), interleave=turn.interleave)
        errors = [0.0]
        for (_, idx, weights), pairs in zip(inputs, ends, strict=True):
            errors += [self._error(x, y, idx, weights) for x, y in pairs if len(x)]
        return max(errors)

    def close(self) -> None:
        for runner in self._runners.values():
            runner.close()
        self._bench.clock.synchronize()
        for all2all in self.transports.values():
            all2all.close()

    def _inputs(self, turn: Turn, k: int) -> tuple[Tensor, Tensor, Tensor]:
        c, device, rank = self._config, self._bench.mesh.device, self._bench.mesh.rank
        generator = torch.Generator(device).manual_seed(1000 * turn.seed + 10 * k + rank)
        num_tokens = turn.sizes[k][rank]
        x = torch.randn(num_tokens, c.hidden, generator=generator, device=device).to(c.dtype)
        scores = torch.rand(num_tokens, c.num_experts, generator=generator, device=device)
        if turn.seed % 5 == 0:  # all to a few experts, so all to one rank
            scores[:, c.num_topk :] -= 1
        weights, idx = scores.topk(c.num_topk)
        return x, idx, weights.float().softmax(-1)

    def _error(self, x: Tensor, y: Tensor, idx: Tensor, weights: Tensor) -> float:
        expected = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert, (gate_up, down) in enumerate(zip(self._all.w_gate_up, self._all.w_down, strict=True)):
            gate, up = F.linear(x, gate_up).chunk(2, -1)
            weight = (weights * (idx == expert)).sum(-1, keepdim=True)
            expected += F.linear(F.silu(gate) * up, down).float() * weight
        return float(((y.float() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-6)).max())


def soak(bench: Bench, config: ModelConfig, most: dict[str, int], seconds: float) -> dict[str, Any]:
    made = Soak(bench, config, most)
    names, num_ranks = list(made.transports), bench.mesh.world_size
    counts: Counter[str] = Counter()
    worst = max(made.run(turn) for turn in largest(names, most, num_ranks))
    begun, number, slowest = time.monotonic(), 0, 0.0
    settled: tuple[float, float] | None = None
    while bench.all_agree(time.monotonic() - begun < seconds):
        for _ in range(10):
            turn = draw(number, names, most, num_ranks)
            start = time.monotonic()
            worst = max(worst, made.run(turn))
            if settled is not None:
                slowest = max(slowest, time.monotonic() - start)
            counts[f"{turn.transport} {turn.driver} {len(turn.sizes)}{'' if turn.interleave else ' in turn'}"] += 1
            number += 1
        if settled is None and bench.all_agree(time.monotonic() - begun > SETTLED * seconds):
            settled = bench.clock.memory_mib()
    ended = bench.clock.memory_mib()
    made.close()
    (used, kept), (used_before, kept_before) = ended, settled or ended
    steady = used - used_before <= GROWTH_MIB and kept - kept_before <= max(GROWTH_MIB, KEPT_GROWTH * kept_before)
    return {
        "seconds": time.monotonic() - begun,
        "turns": number,
        "kinds": dict(sorted(counts.items())),
        "worst_relative_error": worst,
        "slowest_turn_s": slowest,
        "memory_mib": {"settled": settled, "end": ended, "growth": used - used_before},
        "passed": bench.all_agree(worst <= LIMIT and steady),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=180.0)
    with Bench.start(parser.parse_args()) as bench:
        seconds = 2.0 if bench.args.rehearse else bench.args.seconds
        config = bench.shape("qwen3-30b-a3b", 1)
        if not bench.args.rehearse:  # small enough for every rank to hold all experts and compute with all of them
            config = replace(config, num_experts=16, num_topk=4, expert_width=512)
        found = soak(bench, config, {"deepep_ht": bench.rows(4096), "deepep_ll": bench.rows(256)}, seconds)
        bench.say(found)
        bench.write(found)


if __name__ == "__main__":
    main()
