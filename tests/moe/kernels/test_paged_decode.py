import pytest
import torch

from moe.kernels.paged_decode import paged_decode
from tests.moe.kernels.test_grouped import close


def plain(q, k_cache, v_cache, table, length, window):
    keys, values = (c[table.long()].flatten(0, 1)[:length].double() for c in (k_cache, v_cache))
    first = 0 if window is None else max(0, length - window)
    group = q.shape[0] // keys.shape[1]
    keys, values = (t[first:].repeat_interleave(group, 1) for t in (keys, values))
    scores = torch.einsum("hd,thd->ht", q.double(), keys) / q.shape[-1] ** 0.5
    return torch.einsum("ht,thd->hd", scores.softmax(-1), values)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (9, 3, 64), (8, 1, 32)])
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("window", [None, 70])
def test_matches_plain_attention(heads, kv_heads, head_dim, num_splits, window, device, dtype):
    lengths = torch.tensor([1, 5, 16, 200, 63], device=device)
    page, max_blocks = 8, 25
    k_cache, v_cache = torch.randn(2, 5 * max_blocks, page, kv_heads, head_dim, device=device).to(dtype)
    tables = torch.randperm(5 * max_blocks, device=device).view(5, max_blocks).int()
    rows = torch.randn(5, (heads + 2) * head_dim, device=device).to(dtype)
    q = rows[:, : heads * head_dim].view(5, heads, head_dim)
    for b, length in enumerate(lengths.tolist()):  # nothing past the length may be read
        used = -(-length // page)
        k_cache[tables[b, used:].long()] = float("nan")
        v_cache[tables[b, used:].long()] = float("nan")
    got = paged_decode(q, k_cache, v_cache, tables, lengths, window=window, num_splits=num_splits)
    expected = torch.stack(
        [plain(q[b], k_cache, v_cache, tables[b], n, window) for b, n in enumerate(lengths.tolist())]
    )
    assert close(got, expected)


def test_a_padded_request_gives_zeros(device, dtype):
    cache = torch.randn(2, 8, 1, 16, device=device).to(dtype)
    tables = torch.zeros(2, 2, dtype=torch.int32, device=device)
    for num_splits in (1, 2):
        got = paged_decode(
            torch.ones(2, 2, 16, device=device, dtype=dtype), cache, cache, tables,
            torch.tensor([0, 3], device=device), num_splits=num_splits,
        )  # fmt: skip
        assert not got[0].any()
        assert got[1].all()
