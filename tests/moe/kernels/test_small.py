"""Norm, top k, rotary embedding with cache write, 8-bit blocks, slots of keys: each against the plain form."""

import numpy as np
import pytest
import torch

from moe.kernels.fp8 import dequantise, quantise
from moe.kernels.key_slots import key_slots
from moe.kernels.norm import add_rms_norm
from moe.kernels.rope import rotate_and_cache
from moe.kernels.topk import softmax_topk
from moe.linear import make_head
from moe.router import route
from tests.moe.kernels.test_grouped import close


def rms(x, gain, eps):
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * gain.double()


@pytest.mark.parametrize("hidden", [96, 576, 2048])
@pytest.mark.parametrize("with_residual", [False, True])
def test_add_rms_norm(hidden, with_residual, device, dtype):
    x, residual = torch.randn(2, 9, hidden, device=device).to(dtype).unbind()
    gain = torch.rand(hidden, device=device).to(dtype)
    total = x + residual if with_residual else x
    normed, summed = add_rms_norm(x, residual if with_residual else None, gain, 1e-6)
    assert torch.equal(summed, total)
    assert summed is (residual if with_residual else x)
    assert close(normed, rms(summed, gain, 1e-6))


@pytest.mark.parametrize(("num_experts", "num_topk"), [(8, 2), (60, 6), (128, 8), (4, 4), (3, 1)])
@pytest.mark.parametrize("normalise", [False, True])
def test_topk_matches_the_plain_router(num_experts, num_topk, normalise, device):
    logits = torch.randn(21, num_experts, device=device)
    logits[17:] = float("nan")
    for num_tokens in (17, torch.tensor(17, device=device)):
        weights, ids = softmax_topk(logits, num_topk, norm_topk_prob=normalise, num_tokens=num_tokens)
        expected_weights, expected_ids = route(logits, num_topk, norm_topk_prob=normalise, num_tokens=17)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected_weights)


def test_topk_breaks_ties_by_the_lower_id(device):
    _, ids = softmax_topk(torch.zeros(5, 16, device=device), 4, norm_topk_prob=True, num_tokens=5)
    assert ids.tolist() == [[0, 1, 2, 3]] * 5


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (9, 3, 64), (32, 4, 128)])
@pytest.mark.parametrize("norm", [False, True])
def test_rotate_and_cache(heads, kv_heads, head_dim, norm, device, dtype):
    tokens, half = 5, head_dim // 2
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device=device).to(dtype)
    gains = torch.rand(2, head_dim, device=device).to(dtype) if norm else (None, None)
    angles = torch.arange(50, device=device)[:, None] * torch.rand(half, device=device)
    positions = torch.tensor([0, 3, 49, 7, 0], device=device)
    slots = torch.tensor([2, 11, 0, 7, -1], device=device)
    k_cache, v_cache = torch.zeros(2, 3, 4, kv_heads, head_dim, device=device, dtype=dtype)

    q, k, v = qkv.clone().view(tokens, -1, head_dim).split([heads, kv_heads, kv_heads], 1)
    expected = []
    for part, gain in ((q, gains[0]), (k, gains[1])):
        part = part.double() if gain is None else rms(part, gain, 1e-6)
        low, high = part.chunk(2, -1)
        cos, sin = (f(angles.double()[positions])[:, None] for f in (torch.cos, torch.sin))
        expected.append(torch.cat([low * cos - high * sin, high * cos + low * sin], -1))

    rotate_and_cache(
        qkv, *gains, angles[positions].cos(), angles[positions].sin(), slots, k_cache, v_cache,
        num_heads=heads, num_kv_heads=kv_heads, eps=1e-6,
    )  # fmt: skip
    got_q, got_k, got_v = qkv.view(tokens, -1, head_dim).split([heads, kv_heads, kv_heads], 1)
    assert close(got_q, expected[0])
    assert close(got_k, expected[1])
    assert torch.equal(got_v, v)
    assert torch.equal(k_cache.view(12, kv_heads, head_dim)[slots[:4]], got_k[:4])
    assert torch.equal(v_cache.view(12, kv_heads, head_dim)[slots[:4]], v[:4])
    untouched = [slot for slot in range(12) if slot not in slots.tolist()]
    assert not k_cache.view(12, -1)[untouched].any()
    assert not v_cache.view(12, -1)[untouched].any()


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_a_head_does_not_round_its_logits(num_rows, device, dtype):
    x, weight = torch.randn(num_rows, 64, device=device).to(dtype), 4 * torch.randn(96, 64, device=device).to(dtype)
    logits = make_head(weight)(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), x.double() @ weight.double().T, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu  # the interpreter rounds 8-bit floats wrongly
def test_fp8_blocks_come_back_within_their_precision(device):
    x = (torch.randn(7, 384, device=device) * 10 ** torch.randn(7, 1, device=device)).bfloat16()
    values, scales = quantise(x)
    assert scales.shape == (7, 3)
    back = dequantise(values, scales)
    block_max = x.view(7, 3, 128).abs().amax(-1, keepdim=True).float()
    assert ((back - x).view(7, 3, 128).abs() <= block_max * 2**-4).all()


def test_fp8_dequantises_counted_rows_with_strided_scales(device):
    values = torch.randn(2, 4, 256, device=device).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2, 4, device=device).transpose(1, 2)
    counts = torch.tensor([1, 4], dtype=torch.int32, device=device)
    back = dequantise(values, scales, counts)
    expected = (values.float() * scales.repeat_interleave(128, -1)).bfloat16()
    assert close(back[0, :1], expected[0, :1])
    assert close(back[1], expected[1])
    assert close(dequantise(values[1], scales[1]), expected[1])


@pytest.mark.parametrize(("lengths", "first"), [([5, 1, 30, 16], 0), ([3, 200, 7], 2), ([40] * 37, 1)])
def test_keys_lie_where_the_block_tables_say(lengths, first, device):
    page, spare = 16, 9
    columns = -(-max(lengths) // page)
    rng = np.random.default_rng(0)
    tables = rng.permutation((first + len(lengths) + 1) * columns).astype(np.int32).reshape(-1, columns)
    ends = np.cumsum([0, *lengths, 0], dtype=np.int32)  # with a request without keys
    slots = key_slots(*(torch.from_numpy(t).to(device) for t in (ends, tables)), first, int(ends[-1]) + spare, page)
    expected = [tables[first + r, p // page] * page + p % page for r, n in enumerate(lengths) for p in range(n)]
    assert slots[: ends[-1]].tolist() == expected
    assert ((slots[ends[-1] :] >= 0) & (slots[ends[-1] :] < tables.size * page)).all()
