"""Our models against transformers' on the same checkpoints: whole, in chunks, by token, cut, padded, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dbo.slices import make_slices, pad_batch, split_batch
from moe.all2all.registry import make_all2all
from moe.batch import ForwardBatch
from moe.config import named_shape, read_config
from moe.models import Model, count_parameters, load_model
from moe.models.decoder import declare_params
from moe.models.registry import family_named
from moe.reference import moe_reference
from moe.weights import DummyWeights, load_params
from tests.dbo.votes import config_on, plan_of
from tests.moe.checkpoints import (
    LENGTHS,
    SCHEDULES,
    VARIANTS,
    Checkpoint,
    Checkpoints,
    Chunk,
    expected_rows,
    make_batch,
    make_ids,
    make_kv,
)

TOLERANCE = {"rtol": 0.0, "atol": 1e-4}
FAMILIES = ("mixtral", "qwen3")


def load(path: Path, group: Any = None, **options: Any) -> Model:
    config = read_config(path)
    all2all = make_all2all(
        "auto", group=group, device=torch.device("cpu"), config=config, max_tokens_per_rank=sum(LENGTHS)
    )
    return load_model(path, all2all=all2all, progress=False, **options)


def check(checkpoint: Checkpoint, hidden: Tensor, model: Model, chunks: list[Chunk]) -> None:
    torch.testing.assert_close(model.compute_logits(hidden), expected_rows(checkpoint.logits, chunks), **TOLERANCE)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", VARIANTS)
def test_logits(checkpoints: Checkpoints, name: str, schedule: str) -> None:
    checkpoint = checkpoints(name)
    model = load(checkpoint.path)
    kv = make_kv(model.config)
    for chunks in SCHEDULES[schedule]:
        check(checkpoint, model(make_batch(checkpoint.ids, chunks), kv), model, chunks)


# ------------------------------------------------------------------------------------------ padding and ubatches


def poison(model: Model) -> None:
    """Make rows of padding NaN before every norm, attention and MLP."""

    def poisoned(part: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Tensor, *rest: Any) -> Any:
            x = x.clone()
            x[poisoned.num_tokens :] = torch.nan  # type: ignore[attr-defined]
            return part(x, *rest)

        return call

    class Layer:
        def __init__(self, layer: Any) -> None:
            layer.attention, layer.mlp = poisoned(layer.attention), poisoned(layer.mlp)
            self._layer = layer

        def __call__(self, x: Tensor, *rest: Any) -> Any:
            poisoned.num_tokens = rest[-1].num_tokens  # type: ignore[attr-defined]
            return poisoned(self._layer)(x, *rest)

    model.layers = [Layer(layer) for layer in model.layers]  # type: ignore[misc]


@pytest.mark.parametrize("name", FAMILIES)
def test_nan_in_padding_reaches_no_row(checkpoints: Checkpoints, name: str) -> None:
    checkpoint = checkpoints(name)
    model = load(checkpoint.path)
    poison(model)
    kv = make_kv(model.config)
    for chunks in SCHEDULES["mixed"]:
        batch = make_batch(checkpoint.ids, chunks)
        hidden = model(pad_batch(batch, batch.num_tokens + 5), kv)
        assert hidden[batch.num_tokens :].isnan().all()
        check(checkpoint, hidden[: batch.num_tokens], model, chunks)
    for stored in kv.layer(0):
        assert stored[:-1].isfinite().all(), "padding was written to a slot"


def run_split(model: Model, batch: ForwardBatch, kv: Any, num_ubatches: int, order: Callable[..., Any]) -> Tensor:
    """All ubatches are built before the first runs; they run in `order`."""
    config = config_on(
        num_ubatches=num_ubatches, allow_single_rank=True, prefill_token_threshold=0, decode_token_threshold=0
    )
    plan = plan_of([batch.num_tokens], config)
    if not plan.should_ubatch:
        return model(batch, kv)
    ubatches = split_batch(pad_batch(batch, plan.num_tokens_padded or 0), make_slices(plan, batch.query_lens))
    hidden = {k: model(ubatches[k], kv) for k in order(range(num_ubatches))}
    return torch.cat([hidden[k] for k in range(num_ubatches)])[: batch.num_tokens]


@pytest.mark.parametrize("num_ubatches", [2, 3, 5])
@pytest.mark.parametrize("schedule", ["prefill", "mixed"])
@pytest.mark.parametrize("name", FAMILIES)
def test_cut_requests(checkpoints: Checkpoints, name: str, schedule: str, num_ubatches: int) -> None:
    checkpoint = checkpoints(name)
    model = load(checkpoint.path)
    kv = make_kv(model.config)
    for chunks in SCHEDULES[schedule]:
        hidden = run_split(model, make_batch(checkpoint.ids, chunks), kv, num_ubatches, list)
        check(checkpoint, hidden, model, chunks)


@pytest.mark.parametrize("name", FAMILIES)
def test_whole_requests_in_any_order(checkpoints: Checkpoints, name: str) -> None:
    """Nothing of a ubatch is kept where a sibling could find it."""
    checkpoint = checkpoints(name)
    model = load(checkpoint.path)
    kv = make_kv(model.config)
    requests = [0, 2]
    first = [(r, 0, 15) for r in requests]
    model(make_batch(checkpoint.ids, first), kv)
    for position in range(15, 20):
        chunks = [(r, position, position + 1) for r in requests]
        hidden = run_split(model, make_batch(checkpoint.ids, chunks), kv, 2, lambda ks: list(ks)[::-1])
        check(checkpoint, hidden, model, chunks)


def test_many_lengths_in_one_decode(checkpoints: Checkpoints) -> None:
    """Groups of similar lengths put their rows back where they belong."""
    checkpoint = checkpoints("qwen3")
    model = load(checkpoint.path)
    kv = make_kv(model.config)
    ends = [22, 0, 39, 6]  # 40 tokens and 1 do not share a call
    model(make_batch(checkpoint.ids, [(r, 0, end) for r, end in enumerate(ends) if end]), kv)
    chunks = [(r, end, end + 1) for r, end in enumerate(ends)]
    check(checkpoint, model(make_batch(checkpoint.ids, chunks), kv), model, chunks)


def test_no_tokens(checkpoints: Checkpoints) -> None:
    model = load(checkpoints("mixtral").path)
    hidden = model(make_batch((), ()), make_kv(model.config))
    assert hidden.shape == (0, model.config.hidden)
    assert model.compute_logits(hidden).shape == (0, model.config.vocab_size)


# ----------------------------------------------------------------------------------------------------- two ranks


def logits_of_rank(ctx: Any, path: Path, schedule: str) -> list[Any]:
    """Rank r runs every other request; it joins every step, with or without tokens."""
    model = load(path, ctx.group)
    kv = make_kv(model.config)
    ids = make_ids()
    rows = []
    for chunks in SCHEDULES[schedule]:
        counts = tuple(
            sum(end - first for r, first, end in chunks if r // 2 % 2 == rank) for rank in range(ctx.world_size)
        )
        batch = make_batch(ids, [chunk for chunk in chunks if chunk[0] // 2 % 2 == ctx.rank])
        batch = pad_batch(batch, max(counts))
        batch = replace(batch, num_tokens_per_rank=counts)
        rows.append(model.compute_logits(model(batch, kv)[: batch.num_tokens]).numpy())
    return rows


@pytest.mark.parametrize("name", ["mixtral", "qwen3", "qwen3-tied-dense-biased"])
@pytest.mark.parametrize("schedule", ["prefill", "mixed"])
def test_two_ranks(checkpoints: Checkpoints, ranks: Any, name: str, schedule: str) -> None:
    """5 experts over 2 ranks is uneven, and in some steps one rank is idle."""
    checkpoint = checkpoints(name)
    rows = ranks(2).run(logits_of_rank, checkpoint.path, schedule, timeout=60)
    for step, chunks in enumerate(SCHEDULES[schedule]):
        for rank in range(2):
            mine = [chunk for chunk in chunks if chunk[0] // 2 % 2 == rank]
            if mine:
                expected = expected_rows(checkpoint.logits, mine)
                torch.testing.assert_close(torch.from_numpy(rows[rank][step]), expected, **TOLERANCE)


# ------------------------------------------------------------------------------------------------- random weights


def test_random_weights_are_the_same_for_any_layout() -> None:
    config = replace(
        named_shape("qwen3-30b-a3b"), vocab_size=64, hidden=32, num_layers=2, num_heads=2, num_kv_heads=1,
        head_dim=16, num_experts=5, num_topk=2, expert_width=8,
    )  # fmt: skip
    family = family_named(config.family)

    def params(experts: range, seed: int = 0) -> dict[str, Tensor]:
        declared = declare_params(config, family, experts)
        return load_params(
            DummyWeights(seed), declared, dtype=torch.float32, device=torch.device("cpu"), progress=False
        )

    whole, first, last = params(range(5)), params(range(3)), params(range(3, 5))
    for name, tensor in whole.items():
        if name.endswith(("w_gate_up", "w_down")):
            assert torch.equal(tensor, torch.cat([first[name], last[name]])), name
            assert tensor.flatten(1).unique(dim=0).shape[0] == 5, "experts differ"
        else:
            assert torch.equal(tensor, last[name]), name
    assert not torch.equal(whole["embedding"], params(range(5), seed=1)["embedding"])


@pytest.mark.parametrize(
    ("shape", "billions", "within"),
    [
        ("qwen3-30b-a3b", 30.53, 0.005),
        ("qwen3-235b-a22b", 235.09, 0.005),
        ("mixtral-8x7b", 46.70, 0.005),
        ("olmoe", 6.92, 0.005),
        ("gpt-oss-120b", 116.83, 0.05),  # less the experts' biases
        ("deepseek-v3", 671.03 + 61 * 0.0515, 0.01),  # plus what grouped-query attention has more than latent attention
    ],
)
def test_parameter_counts(shape: str, billions: float, within: float) -> None:
    assert count_parameters(named_shape(shape)) / 1e9 == pytest.approx(billions, abs=within)


# ------------------------------------------------------------------------------------------------- shared experts


def run_shared(ctx: Any, num_tokens: int) -> None:
    """The layer with experts as the decoder builds it, against the reference and the shared expert beside it."""
    config = replace(
        named_shape("deepseek-v3"), vocab_size=64, hidden=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
        num_experts=6, num_topk=2, expert_width=8, shared_expert_width=12, dense_layers=frozenset({0}), dense_width=24,
        dtype=torch.float32,
    )  # fmt: skip
    all2all = make_all2all(
        "auto", group=ctx.group if ctx.world_size > 1 else None, device=torch.device("cpu"), config=config,
        max_tokens_per_rank=16,
    )  # fmt: skip
    model = load_model(config, all2all=all2all, load_format="dummy", progress=False)
    params = load_params(
        DummyWeights(0), declare_params(config, family_named(config.family), range(6)), dtype=torch.float32,
        device=torch.device("cpu"), progress=False,
    )  # fmt: skip
    w = {name.removeprefix("layers.1."): tensor for name, tensor in params.items() if name.startswith("layers.1.")}
    (moe,) = model.moe_layers
    x = 40 * torch.randn(num_tokens, 32, generator=torch.Generator().manual_seed(ctx.rank))
    y = moe(x, num_tokens)
    gate, up = F.linear(x, w["shared_gate_up"]).chunk(2, dim=-1)
    shared = F.linear(F.silu(gate) * up, w["shared_down"])
    routed = moe_reference(x, w["router"], w["w_gate_up"], w["w_down"], 2, True)
    assert shared.abs().max() > 1e-2
    torch.testing.assert_close(y, routed + shared, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(y, routed, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_shared_experts_of_the_decoder(ranks: Any, num_ranks: int) -> None:
    ranks(num_ranks).run(run_shared, 9, timeout=60)
