"""The fused attention against torch's plain one, on batches of every kind."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from moe.attention import cudnn_packed
from moe.attention.rotary import Rotary
from moe.attention.torch_sdpa import TorchAttention
from moe.batch import ForwardBatch
from moe.config import named_shape
from moe.kv_cache import KVCache
from tests.moe.kernels import conftest  # noqa: F401  # has the kernels interpreted where there is no GPU
from tests.moe.test_attention_by_token import fixed

BATCHES = {  # (new tokens, tokens after them) of each request
    "decodes": [(1, 1), (1, 7), (1, 300), (1, 1000)],
    "long decode": [(1, 3000)],
    "prompts of one length": [(256, 256)] * 3,
    "prompts of several lengths": [(5, 5), (200, 200), (130, 130)],
    "continued prompts": [(100, 180), (37, 37), (64, 300)],
    "decodes before prompts": [(1, 50), (1, 9), (64, 64), (30, 90)],
    "prompts before decodes": [(64, 64), (1, 50), (30, 90), (1, 1)],
    "prompts beside halves that cuts left": [(40, 90), (1024, 1024), (9, 9)],
    "decodes, a half, whole prompts": [(1, 30), (24, 152), (512, 512), (512, 512)],
    "nothing": [],
}


SMALL = {  # the same for the interpreter, where 8 tokens are a dense length and 16 worth a call
    "decodes": [(1, 1), (1, 7), (1, 40)],
    "prompts of one length": [(16, 16)] * 2,
    "prompts of several lengths": [(5, 5), (20, 20)],
    "continued prompts": [(10, 18), (7, 7)],
    "decodes before prompts": [(1, 5), (1, 19), (8, 8), (3, 9)],
    "prompts before decodes": [(6, 6), (1, 5), (3, 9), (1, 1)],
    "prompts beside halves that cuts left": [(4, 9), (8, 8), (8, 8), (3, 3)],
    "decodes, a half, whole prompts": [(1, 30), (4, 15), (16, 16), (16, 16)],
    "nothing": [],
}


def make_batch(lengths, block_size, device, num_padded):
    rng = np.random.default_rng(0)
    max_blocks = max([-(-total // block_size) for _, total in lengths], default=1)
    tables = torch.from_numpy(rng.permutation(max(1, len(lengths)) * max_blocks).astype(np.int32))
    tables = tables.view(max(1, len(lengths)), max_blocks)[: len(lengths)]
    positions = [p for new, total in lengths for p in range(total - new, total)]
    rows = [r for r, (new, _) in enumerate(lengths) for _ in range(new)]
    slots = [
        int(tables[r, p // block_size]) * block_size + p % block_size for r, p in zip(rows, positions, strict=True)
    ]
    pad = [0] * num_padded
    return ForwardBatch(
        input_ids=torch.zeros(len(rows) + num_padded, dtype=torch.int64, device=device),
        positions=torch.tensor(positions + pad, dtype=torch.int64, device=device),
        slot_mapping=torch.tensor(slots + [-1] * num_padded, dtype=torch.int64, device=device),
        block_tables=tables.to(device),
        query_lens=np.array([new for new, _ in lengths], np.int32),
        seq_lens=np.array([total for _, total in lengths], np.int32),
        num_tokens=len(rows),
    )


def flash(q, k, v, prompts, window):
    """What `_flash` computes, in plain torch: it has no kernel on the CPU."""
    outs = []
    ends = (itertools.pairwise(ends.tolist()) for ends in (prompts.query_ends, prompts.key_ends))
    for (a, b), (c, d) in zip(*ends, strict=True):
        assert b - a <= prompts.longest_query
        assert d - c <= prompts.longest_keys
        assert not prompts.fresh or (a, b) == (c, d)
        mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        heads = (t.transpose(0, 1)[None] for t in (q[a:b], k[c:d], v[c:d]))
        outs.append(F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(outs)


def no_plan(**_):
    raise RuntimeError("[cudnn_frontend] Error: no valid engine configs")


class PlainPlan:
    """What a plan of cuDNN computes, from the same tensors: places in elements and lengths."""

    def __init__(self, *, num_prompts, heads, longest, row_strides, fresh, **_):
        assert num_prompts & (num_prompts - 1) == 0
        self.heads, self.longest, self.row_strides, self.fresh = heads, longest, row_strides, fresh

    device_index, workspace_bytes = -1, 1

    def run(self, tensors, workspace):
        t = dict(zip(cudnn_packed._NAMES, tensors, strict=True))
        num_heads, num_kv_heads, head_dim = self.heads
        strides = dict(zip("qkvo", self.row_strides, strict=True))
        for i, lengths in enumerate(zip(t["q_lengths"].tolist(), t["k_lengths"].tolist(), strict=True)):
            assert all(n <= most for n, most in zip(lengths, self.longest, strict=True))

            def rows(name, heads, length, i=i):
                shape, stride = (length, heads, head_dim), (strides[name], head_dim, 1)
                at = int(t[f"{name}_at"][i]) + t[name].storage_offset()
                return torch.as_strided(t[name], shape, stride, at)

            queries, keys = lengths
            q, k, v = rows("q", num_heads, queries), rows("k", num_kv_heads, keys), rows("v", num_kv_heads, keys)
            mask = torch.ones(queries, keys, dtype=torch.bool).tril(0 if self.fresh else keys - queries)
            heads = (x.transpose(0, 1)[None] for x in (q, k, v))
            out = F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
            rows("o", num_heads, queries).copy_(out)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("num_padded", [0, 3])
@pytest.mark.parametrize("cudnn", [False, True, "without a plan"])
def test_plans_hold_in_the_interpreter(name, num_padded, cudnn, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("the kernels are compiled here")
    monkeypatch.setattr("moe.attention.cuda._flash", None if cudnn is True else flash)
    monkeypatch.setattr("moe.attention.cudnn_packed.takes", lambda *_: bool(cudnn))
    monkeypatch.setattr("moe.attention.cudnn_packed._plan", PlainPlan if cudnn is True else no_plan)
    cudnn_packed._plan_or_none.cache_clear()
    monkeypatch.setattr("moe.attention.segments.DENSE_UNIT", 8)
    monkeypatch.setattr("moe.attention.segments.DENSE_ROWS", 16)
    config = replace(named_shape("tiny"), num_heads=4, num_kv_heads=2, head_dim=16)
    check(SMALL[name], num_padded, config, torch.device("cpu"), torch.float32, (None, None), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("num_padded", [0, 5])
@pytest.mark.parametrize(("qk_norm", "cudnn"), [(False, False), (True, False), (True, True)])
def test_matches_the_plain_form(name, num_padded, qk_norm, cudnn, monkeypatch):
    device, config = torch.device("cuda"), named_shape("qwen3-30b-a3b")
    if not cudnn:
        monkeypatch.setattr("moe.attention.cudnn_packed.takes", lambda *_: False)
    elif not cudnn_packed.takes(device, torch.bfloat16, config.head_dim):
        pytest.skip("needs nvidia-cudnn-frontend")
    norms = torch.rand(2, config.head_dim, device=device, dtype=torch.bfloat16) if qk_norm else (None, None)
    check(BATCHES[name], num_padded, config, device, torch.bfloat16, norms, 2e-2)


def check(requests, num_padded, config, device, dtype, norms, tolerance, fast=None):
    from moe.attention.cuda import CudaAttention

    fast = fast or CudaAttention
    torch.manual_seed(0)
    batch = make_batch(requests, 16, device, num_padded)
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    qkv = torch.randn(len(batch.input_ids), width, device=device, dtype=dtype)
    angles = Rotary(config, device).angles(batch.positions, dtype)
    num_blocks = max(1, batch.block_tables.numel())
    seen, caches = [], []
    for form in (TorchAttention, fast):
        kv = KVCache(config, num_blocks, 16, dtype, device)
        for cache in kv.layer(0):
            cache.normal_(generator=torch.Generator(device).manual_seed(3))
        plan = form(config, batch, kv)
        seen.append(plan.attend(0, qkv.clone(), *norms, angles).float())
        if form is fast:
            out = torch.full_like(seen[-1], torch.nan).to(dtype)
            assert plan.attend_stored(0, *plan.store(0, qkv.clone(), *norms, angles), out) is out
            torch.testing.assert_close(out.float(), seen[-1], rtol=0, atol=0)
        caches.append(torch.stack(kv.layer(0))[:, : num_blocks * 16].float())
    torch.testing.assert_close(seen[1], seen[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(caches[1], caches[0], rtol=tolerance, atol=tolerance)
    assert not seen[1][batch.num_tokens :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_token_by_token_matches_the_plain_form(name, qk_norm):
    from moe.attention.cuda_by_token import CudaAttentionByToken

    device, config = torch.device("cuda"), named_shape("qwen3-30b-a3b")
    norms = torch.rand(2, config.head_dim, device=device, dtype=torch.bfloat16) if qk_norm else (None, None)
    check(BATCHES[name], 5, config, device, torch.bfloat16, norms, 2e-2, CudaAttentionByToken)


def by_token(config, batch, qkv, kv, rotary):
    from moe.attention.cuda_by_token import CudaAttentionByToken

    angles = rotary.angles(batch.positions, torch.bfloat16)
    return CudaAttentionByToken(config, batch, kv).attend(0, qkv.clone(), None, None, angles)


def filled_cache(config, num_blocks):
    kv = KVCache(config, num_blocks, 16, torch.bfloat16, "cuda")
    for cache in kv.layer(0):
        cache.normal_(generator=torch.Generator("cuda").manual_seed(3))
    return kv


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
def test_a_token_does_not_depend_on_its_batch(window):
    device = torch.device("cuda")
    config = replace(named_shape("qwen3-30b-a3b"), sliding_window=window, batch_invariant=True)
    requests = [(300, 300), (1, 1000), (200, 290), (7, 7)]
    batch = make_batch(requests, 16, device, 4)
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    qkv = torch.randn(len(batch.input_ids), width, device=device, dtype=torch.bfloat16)
    kv, rotary = filled_cache(config, batch.block_tables.numel()), Rotary(config, device)
    whole = by_token(config, batch, qkv, kv, rotary)
    ends = np.cumsum(batch.query_lens)
    for request, (new, total) in enumerate(requests):
        for count in {1, min(new, 33), new}:
            rows = slice(int(ends[request]) - count, int(ends[request]))
            part = ForwardBatch(
                input_ids=batch.input_ids[rows],
                positions=batch.positions[rows],
                slot_mapping=batch.slot_mapping[rows],
                block_tables=batch.block_tables[request : request + 1],
                query_lens=np.array([count], np.int32),
                seq_lens=np.array([total], np.int32),
                num_tokens=count,
            )
            assert torch.equal(by_token(config, part, qkv[rows], kv, rotary), whole[rows]), (request, count)


@pytest.mark.gpu
def test_a_graph_of_it_follows_other_requests():
    """Captured with decodes, replayed with a prompt, a decode and padding."""
    device, config = torch.device("cuda"), replace(named_shape("qwen3-30b-a3b"), batch_invariant=True)
    decodes = make_batch([(1, n) for n in (1, 30, 200, 7, 90, 16, 17, 400)], 16, device, 0)
    other = make_batch([(5, 300), (1, 33)], 16, device, 2)
    kv, rotary = filled_cache(config, 1024), Rotary(config, device)
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    qkv = torch.randn(8, width, device=device, dtype=torch.bfloat16)
    captured, refill = (fixed(batch, 8, columns=32, uniform_decode=False) for batch in (decodes, other))
    by_token(config, captured, qkv, kv, rotary)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = by_token(config, captured, qkv, kv, rotary)
    for name in ("input_ids", "positions", "slot_mapping", "block_tables"):
        getattr(captured, name).copy_(getattr(refill, name))
    for name in ("seq_lens", "query_ends", "key_ends"):
        getattr(captured.fixed, name).copy_(getattr(refill.fixed, name))
    graph.replay()
    assert torch.equal(out, by_token(config, other, qkv, kv, rotary))
    assert not out[6:].any()
