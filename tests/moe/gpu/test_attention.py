"""The fused attention against torch's plain one, on batches of every kind."""

import numpy as np
import pytest
import torch

from moe.attention.rotary import Rotary
from moe.attention.torch_sdpa import TorchAttention
from moe.batch import ForwardBatch
from moe.config import named_shape
from moe.kv_cache import KVCache

pytestmark = pytest.mark.gpu

BATCHES = {  # (new tokens, tokens after them) of each request
    "decodes": [(1, 1), (1, 7), (1, 300), (1, 1000)],
    "long decode": [(1, 3000)],
    "prompts of one length": [(256, 256)] * 3,
    "prompts of several lengths": [(5, 5), (200, 200), (130, 130)],
    "continued prompts": [(100, 180), (37, 37), (64, 300)],
    "decodes before prompts": [(1, 50), (1, 9), (64, 64), (30, 90)],
    "prompts before decodes": [(64, 64), (1, 50), (30, 90), (1, 1)],
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


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("num_padded", [0, 5])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_matches_the_plain_form(name, num_padded, qk_norm):
    from moe.attention.cuda import CudaAttention

    torch.manual_seed(0)
    device, config = torch.device("cuda"), named_shape("qwen3-30b-a3b")
    batch = make_batch(BATCHES[name], 16, device, num_padded)
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    qkv = torch.randn(len(batch.input_ids), width, device=device, dtype=torch.bfloat16)
    norms = torch.rand(2, config.head_dim, device=device, dtype=torch.bfloat16) if qk_norm else (None, None)
    angles = Rotary(config, device).angles(batch.positions, torch.bfloat16)
    num_blocks = max(1, batch.block_tables.numel())
    seen, caches = [], []
    for form in (TorchAttention, CudaAttention):
        kv = KVCache(config, num_blocks, 16, torch.bfloat16, device)
        for cache in kv.layer(0):
            cache.normal_(generator=torch.Generator(device).manual_seed(3))
        seen.append(form(config, batch, kv).attend(0, qkv.clone(), *norms, angles).float())
        caches.append(torch.stack(kv.layer(0))[:, : num_blocks * 16].float())
    torch.testing.assert_close(seen[1], seen[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(caches[1], caches[0], rtol=2e-2, atol=2e-2)
    assert not seen[1][batch.num_tokens :].any()
