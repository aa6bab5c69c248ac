"""The router against the families' own routers, and against padding."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from moe.reference import route_reference
from moe.router import Router, ScriptedRouter, route, routing_table


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("num_topk", [1, 2, 8])
def test_equals_the_reference(num_topk: int, norm_topk_prob: bool) -> None:
    x, gate = torch.randn(33, 48), torch.randn(8, 48)
    weights, idx = Router(gate=gate, num_topk=num_topk, norm_topk_prob=norm_topk_prob)(x, 33)
    expected_weights, expected_idx = route_reference(x, gate, num_topk, norm_topk_prob)
    assert torch.equal(idx, expected_idx)
    torch.testing.assert_close(weights, expected_weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_equals_transformers(dtype: torch.dtype, norm_topk_prob: bool) -> None:
    qwen3 = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    config = SimpleNamespace(
        num_experts=16, num_local_experts=16, num_experts_per_tok=4, hidden_size=32, norm_topk_prob=norm_topk_prob
    )
    theirs = [qwen3.Qwen3MoeTopKRouter(config)]
    if norm_topk_prob:
        theirs.append(mixtral.MixtralTopKRouter(config))
    x = torch.randn(64, 32, dtype=dtype)
    for router in theirs:
        gate = torch.randn(16, 32, dtype=dtype)
        router.weight.data = gate
        with torch.no_grad():
            _, expected, expected_idx = router(x)
        weights, idx = Router(gate=gate, num_topk=4, norm_topk_prob=norm_topk_prob)(x, 64)
        assert torch.equal(idx, expected_idx)
        assert weights.dtype == torch.float32
        torch.testing.assert_close(weights.to(expected.dtype), expected)


@pytest.mark.parametrize("num_tokens", [0, 1, 5, torch.tensor(5)])
def test_padding_is_not_routed_whatever_it_holds(num_tokens: int | torch.Tensor) -> None:
    logits = torch.randn(8, 6)
    logits[int(num_tokens) :] = torch.nan
    weights, idx = route(logits, 3, norm_topk_prob=True, num_tokens=num_tokens)
    n = int(num_tokens)
    assert weights.dtype == torch.float32
    assert idx.dtype == torch.int64
    assert (idx[n:] == -1).all()
    assert (weights[n:] == 0).all()
    assert ((idx[:n] >= 0) & (idx[:n] < 6)).all()
    torch.testing.assert_close(weights[:n].sum(-1), torch.ones(n))


def test_no_tokens() -> None:
    weights, idx = route(torch.empty(0, 4), 2, norm_topk_prob=True, num_tokens=0)
    assert weights.shape == idx.shape == (0, 2)


def script(rule: str, *, num_experts: int = 16, num_topk: int = 3, seed: int = 0) -> Tensor:
    return routing_table(rule, num_experts=num_experts, num_topk=num_topk, seed=seed)


@pytest.mark.parametrize("rule", ["uniform", "zipf:1.2", "zipf:0", "one-expert"])
def test_a_scripted_row_names_each_expert_once_and_is_the_same_everywhere(rule: str) -> None:
    table = script(rule, num_topk=16)
    assert (table.sort(dim=-1).values == torch.arange(16)).all()
    assert torch.equal(table, script(rule, num_topk=16))


def test_scripted_loads_are_what_they_are_called() -> None:
    assert (script("one-expert") == torch.arange(3)).all()
    first = script("zipf:1.2")[:, 0].bincount(minlength=16).sort(descending=True).values / len(script("zipf:1.2"))
    expected = torch.arange(1, 17).pow(-1.2)
    torch.testing.assert_close(first, expected / expected.sum(), atol=0.02, rtol=0.1)
    assert script("zipf:1.2").flatten().bincount().argmax() != script("zipf:1.2", seed=1).flatten().bincount().argmax()
    counts = script("uniform").flatten().bincount(minlength=16)
    assert counts.max() < 1.15 * counts.min()


@pytest.mark.parametrize("rule", ["model", "zipf", "uniform:2", "one-expert:3"])
def test_other_rules_are_refused(rule: str) -> None:
    with pytest.raises(ValueError, match="is not uniform, zipf:A or one-expert"):
        script(rule)


def test_a_scripted_choice_follows_the_slot_and_keeps_padding_and_weights() -> None:
    gate = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    plain = Router(gate=gate, num_topk=3, norm_topk_prob=True)
    scripted = ScriptedRouter(gate=plain, table=script("uniform"))
    x, slots = torch.randn(6, 8), torch.tensor([900, 5, 77, 4093 + 5, -1, -1])
    weights, idx = scripted(x, 4, slots)
    assert torch.equal(weights, plain(x, 4)[0])
    assert torch.equal(idx[1], idx[3])
    assert (idx[4:] == -1).all()
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(scripted(x[order], 4, slots[order])[1], idx[order])
    with pytest.raises(ValueError, match="slots"):
        scripted(x, 4)
