"""The router against the families' own routers, and against padding."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moe.reference import route_reference
from moe.router import Router, route


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
