"""Does `whole` compute what `split` computes, though its tokens part? A program for torchrun, and a gate for others.

    torchrun --nproc-per-node 2 -m benchmarks.gpu.routing --decode 32,128 --prefill 4096 --out FILE

A matrix product of another size adds in another order, so `whole` differs from `split` by roundings. Random weights
give a router whose scores lie close together; a rounding then chooses another expert for a few rows in each layer, and
from there on those rows are different ones. So arms are not compared at the end but layer by layer, each layer of
`whole` fed with what `split` had before it:

    rows that chose the same experts    the stream after the layer differs by 2e-2 at most
    rows that did not                   the two scores at the border were near-ties, four steps of bfloat16 at most, and
                                        such rows are few

Settings: scores rounded to bfloat16 as transformers' Qwen3-MoE and Mixtral do, or kept in float32; with and without
cuBLAS's reductions in bfloat16.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.setup import Arms, Bench, decodes, make_parser, numbers, prompts, random_model
from moe.batch import ForwardBatch
from moe.kv_cache import KVCache
from moe.models.decoder import Model
from moe.router import Router, route

SAME_LIMIT = 2e-2  # relative error of a row whose experts are the same
NEAR_TIE = 2.0**-6  # of the score at the border
FEW = 0.25  # of the rows, in any layer


@dataclass(frozen=True)
class Choice:
    """Of each row: its experts in ascending order, and how near the first one left out came, relative to the last one
    taken."""

    experts: Tensor
    gap: Tensor


class Spy:
    """A router that remembers what it chose, and how narrowly."""

    def __init__(self, router: Router, *, float32: bool):
        self._router, self._float32 = router, float32
        self.seen: list[Choice] = []

    def __call__(self, x: Tensor, num_tokens: int | Tensor, slots: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `moe.router.Route`."""
        router = self._router
        weights, ids = self._route(x, num_tokens) if self._float32 else router(x, num_tokens, slots)
        exact = F.linear(x.float(), router.gate.float()).topk(router.num_topk + 1).values
        last, left_out = exact[:, -2], exact[:, -1]
        self.seen.append(Choice(ids.sort(-1).values, (last - left_out) / last.abs()))
        return weights, ids

    def _route(self, x: Tensor, num_tokens: int | Tensor) -> tuple[Tensor, Tensor]:
        router = self._router
        gate = router.gate.t()
        logits = torch.mm(x, gate, out_dtype=torch.float32) if x.is_cuda else x.float() @ gate.float()
        return route(logits, router.num_topk, norm_topk_prob=router.norm_topk_prob, num_tokens=num_tokens)


@contextmanager
def spying(model: Model, *, float32: bool) -> Iterator[list[Spy]]:
    """Every router of the model remembers."""
    layers = model.moe_layers
    routers: list[Any] = [layer.router for layer in layers]
    spies = [Spy(router, float32=float32) for router in routers]
    for layer, spy in zip(layers, spies, strict=True):
        layer.router = spy
    try:
        yield spies
    finally:
        for layer, router in zip(layers, routers, strict=True):
            layer.router = router


class Stream:
    """One batch on its way through the layers, one at a time."""

    def __init__(self, model: Model, batch: ForwardBatch, kv: KVCache):
        self._batch = batch
        self._plan = model.attention(model.config, batch, kv)
        self._angles = model._rotary.angles(batch.positions, model.dtype)
        self.x, self.residual = F.embedding(batch.input_ids, model.embedding), None

    def step(self, layer: Any, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """What the layer makes of a stream in this batch's place."""
        out: tuple[Tensor, Tensor] = layer(x, residual, self._angles, self._plan, self._batch)
        return out


def compare_layers(
    model: Model, batch: ForwardBatch, parts: Sequence[ForwardBatch], kv: KVCache, *, float32: bool = False
) -> list[dict[str, float]]:
    """One entry a layer, on this rank: see the top of this file. Collective."""
    found: list[dict[str, float]] = []
    whole, split = Stream(model, batch, kv), [Stream(model, part, kv) for part in parts]
    ends = [(stream.x, stream.residual) for stream in split]
    with spying(model, float32=float32) as spies:
        for layer, spy in zip(model.layers, spies, strict=True):
            before = [torch.cat(each) if each[0] is not None else None for each in zip(*ends, strict=True)]
            ends = [stream.step(layer, *end) for stream, end in zip(split, ends, strict=True)]
            x, residual = whole.step(layer, *before)
            *of_parts, of_whole = spy.seen
            same = (torch.cat([choice.experts for choice in of_parts]) == of_whole.experts).all(-1)
            after = torch.cat([x_part + r_part for x_part, r_part in ends]).float()
            error = ((x + residual).float() - after).norm(dim=-1) / after.norm(dim=-1)
            gap = torch.cat([choice.gap for choice in of_parts])
            found.append(
                {
                    "same_error": float(error[same].max()) if same.any() else 0.0,
                    "other_rows": float((~same).float().mean()),
                    "other_gap": float(gap[~same].max()) if not same.all() else 0.0,
                    "other_error": float(error[~same].max()) if not same.all() else 0.0,
                }
            )
    return found


def passes(layers: Sequence[dict[str, float]]) -> bool:
    """The gate on this rank."""
    return all(
        layer["same_error"] <= SAME_LIMIT and layer["other_gap"] <= NEAR_TIE and layer["other_rows"] <= FEW
        for layer in layers
    )


def worst(layers: Sequence[dict[str, float]]) -> dict[str, float]:
    """The largest of each over the layers."""
    return {name: max(layer[name] for layer in layers) for name in layers[0]}


def rows_apart(a: Tensor, b: Tensor) -> float:
    """Share of rows that differ by more than `SAME_LIMIT`."""
    return float(((a.float() - b.float()).norm(dim=-1) > SAME_LIMIT * b.float().norm(dim=-1)).float().mean())


def run(phase: str, num_tokens: int, bench: Bench, model: Model) -> Iterator[dict[str, Any]]:
    rows = bench.rows(num_tokens)
    make = decodes(model.config, rows, bench.mesh) if phase == "decode" else None
    batch, kv = make or prompts(model.config, rows, min(rows, bench.length(1024)), bench.mesh)
    arms = Arms(model, batch, kv, bench.mesh)
    for float32, reduced in itertools.product((False, True), (True, False)):
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduced
        layers = compare_layers(model, batch, arms.parts, kv, float32=float32)
        with spying(model, float32=float32):
            apart = rows_apart(arms.whole(), arms.split())
        passed = bench.all_agree(passes(layers))
        setting = {"phase": phase, "num_tokens": num_tokens, "float32_scores": float32, "bf16_reductions": reduced}
        bench.say(setting, {k: round(v, 5) for k, v in worst(layers).items()}, f"apart {apart:.1%}", passed)
        yield {**setting, "passed": passed, "rows_apart_at_the_end": apart, "worst": worst(layers), "layers": layers}
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    arms.close()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--decode", type=numbers, default=[32, 128, 256])
    parser.add_argument("--prefill", type=numbers, default=[4096])
    with Bench.start(parser.parse_args()) as bench:
        config = bench.shape("qwen3-30b-a3b", bench.args.num_layers)
        found = []
        for phase, sizes in (("decode", bench.args.decode), ("prefill", bench.args.prefill)):
            make = bench.low_latency if phase == "decode" else bench.high_throughput
            all2all = make(config, bench.rows(max(sizes)))
            model = random_model(config, all2all, bench.mesh.device)
            for num_tokens in sizes:
                found += run(phase, num_tokens, bench, model)
                bench.write({"runs": found})
            bench.clock.synchronize()
            all2all.close()
            del model


if __name__ == "__main__":
    main()
