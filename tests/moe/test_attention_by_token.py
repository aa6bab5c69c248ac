"""Attention in which every token is a request of its own: right, and the same bits however requests are cut, mixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dbo.slices import pad_batch
from moe.attention.base import AttentionPlan, StoringPlan
from moe.attention.choice import choose_attention
from moe.attention.rotary import Rotary
from moe.attention.sdpa_by_token import TorchAttentionByToken
from moe.attention.torch_sdpa import TorchAttention
from moe.batch import FixedInputs, ForwardBatch
from moe.config import ModelConfig, named_shape
from moe.kv_cache import KVCache
from tests.moe.checkpoints import Chunk, make_batch, make_ids, make_kv

TINY = replace(named_shape("tiny"), num_heads=6, num_kv_heads=2, head_dim=16, batch_invariant=True)
LENGTHS = (9, 1, 36, 5)  # one beyond the keys that a program reads at once
WHOLE: list[Chunk] = [(r, 0, n) for r, n in enumerate(LENGTHS)]
CUTS = {
    "alone": [[chunk] for chunk in WHOLE],
    "in another order": [WHOLE[::-1]],
    "every token a step": [
        [(r, at, at + 1) for r, n in enumerate(LENGTHS) if at < n] for at in range(max(LENGTHS))
    ],
    "decodes beside prompts": [[(0, 0, 8), (1, 0, 1)], [(0, 8, 9), (2, 0, 33), (3, 0, 4)], [(3, 4, 5), (2, 33, 36)]],
}  # fmt: skip

Rows = dict[tuple[int, int], Tensor]  # by request and position


def by_token_on_cpu() -> list[Any]:
    """Both forms; the one of the GPU runs in Triton's interpreter, unless there is a GPU, for which it is compiled."""
    if torch.cuda.is_available():
        return [TorchAttentionByToken]
    pytest.importorskip("triton")
    from moe.attention.cuda_by_token import CudaAttentionByToken

    return [TorchAttentionByToken, CudaAttentionByToken]


@cache
def qkv_of(width: int) -> tuple[Tensor, ...]:
    """Of each token of each request: [LENGTHS[r], width]."""
    random = torch.Generator().manual_seed(0)
    return tuple(torch.randn(n, width, generator=random) for n in LENGTHS)


def norms_of(config: ModelConfig, normed: bool) -> tuple[Tensor | None, Tensor | None]:
    if not normed:
        return None, None
    return tuple(torch.rand(2, config.head_dim, generator=torch.Generator().manual_seed(1)))  # type: ignore[return-value]


def fixed(batch: ForwardBatch, num_requests: int, *, columns: int, uniform_decode: bool) -> ForwardBatch:
    """The batch as a graph knows it: room for more requests and longer ones, lengths on the device alone."""
    count = len(batch.query_lens)
    lens = [np.pad(lens, (0, num_requests - count)) for lens in (batch.query_lens, batch.seq_lens)]
    ends = [torch.from_numpy(np.cumsum([0, *each])).int().to(batch.input_ids.device) for each in lens]
    tables = batch.block_tables.new_zeros(num_requests, columns)
    tables[:count, : batch.block_tables.shape[1]] = batch.block_tables
    nothing = np.empty(0, np.int32)
    return replace(
        batch, block_tables=tables, query_lens=nothing, seq_lens=nothing, num_tokens=0,
        fixed=FixedInputs(
            num_tokens=torch.tensor(batch.num_tokens), seq_lens=torch.from_numpy(lens[1]).to(tables.device),
            query_ends=ends[0], key_ends=ends[1], whole=True, max_num_keys=500, max_seq_len=64,
            uniform_decode=uniform_decode, host_query_lens=nothing, host_seq_lens=nothing, host_num_tokens=0,
        ),
    )  # fmt: skip


def run(form: Any, config: ModelConfig, steps: Sequence[Sequence[Chunk]], normed: bool, how: str = "eager") -> Rows:
    """All steps over one cache; `how`: eager, padded, fixed."""
    width, norms = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim, norms_of(config, normed)
    kv, rows, ids = make_kv(config), dict[tuple[int, int], Tensor](), make_ids()
    for chunks in steps:
        batch = make_batch(ids, chunks)
        count = batch.num_tokens
        qkv = torch.cat([qkv_of(width)[r][first:end] for r, first, end in chunks])
        if how != "eager":
            batch = pad_batch(batch, count + 3)
            qkv = torch.cat([qkv, torch.full((3, width), torch.nan)])
        if how == "fixed":
            uniform = all(end - first == 1 for _, first, end in chunks)
            batch = fixed(batch, 9, columns=15, uniform_decode=uniform)
        plan: AttentionPlan = form(config, batch, kv)
        out = plan.attend(0, qkv.clone(), *norms, Rotary(config).angles(batch.positions, torch.float32))
        assert not out[count:].any()
        rows |= zip(((r, at) for r, first, end in chunks for at in range(first, end)), out, strict=False)
    for stored in kv.layer(0):
        assert stored[:-1].isfinite().all(), "padding was written to a slot"
    return rows


@cache
def whole(form: Any, window: int | None) -> Rows:
    return run(form, replace(TINY, sliding_window=window), [WHOLE], normed=window is None)


@pytest.mark.parametrize("window", [None, 6])
def test_matches_the_plain_form(window: int | None) -> None:
    expected = whole(TorchAttention, window)
    for form in by_token_on_cpu():
        got = whole(form, window)
        assert got.keys() == expected.keys() == {(r, at) for r, n in enumerate(LENGTHS) for at in range(n)}
        for place, row in got.items():
            torch.testing.assert_close(row, expected[place], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("window", "how"), [(None, "padded"), (6, "eager")])
@pytest.mark.parametrize("name", CUTS)
def test_every_cut_gives_the_same_bits(name: str, window: int | None, how: str) -> None:
    for form in by_token_on_cpu():
        rows = run(form, replace(TINY, sliding_window=window), CUTS[name], window is None, how)
        assert rows.keys() == whole(form, window).keys()
        for place, row in rows.items():
            assert torch.equal(row, whole(form, window)[place]), (form.__name__, place)


@pytest.mark.parametrize("name", ["every token a step", "decodes beside prompts"])
def test_inputs_of_a_graph_give_the_same_bits(name: str) -> None:
    """Lengths, requests and padding come from the device; decodes and mixtures alike."""
    for form in by_token_on_cpu()[1:]:
        for place, row in run(form, TINY, CUTS[name], True, "fixed").items():
            assert torch.equal(row, whole(form, None)[place]), place


def test_the_kernel_has_one_form_for_every_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    forms: set[Any] = set()

    def launch(grid: Any, *arguments: Any, **constants: Any) -> None:
        forms.add(tuple(constants.items()))

    for form in by_token_on_cpu()[1:]:
        monkeypatch.setattr("moe.kernels.paged_decode._decode", launch)
        for num_rows in (1, 200, 1000):
            batch, kv = pad_batch(ForwardBatch.empty(), num_rows), KVCache(TINY, 4, 4, torch.float32)
            q, k, v = torch.zeros(num_rows, 10, 16).split([6, 2, 2], 1)
            form(TINY, batch, kv).attend_stored(0, q, k, v)
        assert len(forms) == 1


def test_what_is_stored_can_be_captured_apart() -> None:
    for form in by_token_on_cpu()[1:]:
        assert form.captures == "all"
        assert issubclass(form, StoringPlan)
        batch, kv = make_batch(make_ids(), WHOLE), make_kv(TINY)
        qkv = torch.cat(qkv_of(10 * 16))
        plan, angles = form(TINY, batch, kv), Rotary(TINY).angles(batch.positions, torch.float32)
        expected = plan.attend(0, qkv.clone(), None, None, angles)
        out = torch.full_like(expected, torch.nan)
        assert plan.attend_stored(0, *plan.store(0, qkv.clone(), None, None, angles), out) is out
        assert torch.equal(out, expected)


@pytest.mark.parametrize("num_rows", [0, 3])
def test_a_rank_without_requests(num_rows: int) -> None:
    for form in by_token_on_cpu():
        batch = pad_batch(ForwardBatch.empty(), num_rows)
        plan = form(TINY, batch, KVCache(TINY, 4, 4, torch.float32))
        angles = Rotary(TINY).angles(batch.positions, torch.float32)
        out = plan.attend(0, torch.ones(num_rows, 10 * 16), None, None, angles)
        assert out.shape == (num_rows, 6 * 16)
        assert not out.any()


def test_who_gets_it() -> None:
    cpu = torch.device("cpu")
    assert choose_attention(cpu, torch.float32, batch_invariant=True) is TorchAttentionByToken
    assert choose_attention(cpu, torch.float32) is TorchAttention
    if by_token_on_cpu()[1:]:
        (form,) = by_token_on_cpu()[1:]
        assert choose_attention(torch.device("cuda"), torch.bfloat16, batch_invariant=True) is form
