"""The product of a fixed tile: right, and a row the same for any number of rows."""

import pytest
import torch
import torch.nn.functional as F

from moe.experts_cuda import CudaExperts
from moe.kernels import dense
from moe.kernels.dense import dense_product
from moe.kernels.grouped import GroupedWeight
from tests.moe.kernels.test_grouped import close, weights


def make(width, depth, device, dtype):
    return torch.randn(width, depth, device=device).to(dtype) / depth**0.5


@pytest.mark.parametrize(("depth", "width"), [(8, 5), (72, 64), (128, 65), (576, 200)])
@pytest.mark.parametrize("rows", [1, 63, 64, 130])
def test_matches_the_plain_product(depth, width, rows, device, dtype):
    weight, x = make(width, depth, device, dtype), torch.randn(rows, depth, device=device).to(dtype)
    expected = F.linear(x.double(), weight.double())
    for out_dtype in (dtype, torch.float32):
        y = dense_product(x, GroupedWeight(weight[None]), out_dtype)
        assert y.dtype == out_dtype
        assert close(y, expected)
    strided = torch.cat([x, x], -1)[:, depth:]
    assert torch.equal(dense_product(strided, GroupedWeight(weight[None]), torch.float32), y)


def test_no_rows(device, dtype):
    weight = GroupedWeight(make(24, 16, device, dtype)[None])
    assert dense_product(torch.empty(0, 16, device=device, dtype=dtype), weight, dtype).shape == (0, 24)


def test_a_row_does_not_depend_on_how_many_there_are(device, dtype):
    weight = GroupedWeight(make(72, 136, device, dtype)[None])
    x = torch.randn(200, 136, device=device).to(dtype)
    whole = dense_product(x, weight, torch.float32)
    for rows in (1, 2, 15, 16, 17, 63, 64, 65, 128, 150):
        # From the start, so that a row keeps its place in its tile: the interpreter multiplies with numpy, to whose
        # result that may matter. It does not on a GPU.
        assert torch.equal(dense_product(x[:rows], weight, torch.float32), whole[:rows]), rows
        if device.type == "cuda":
            assert torch.equal(dense_product(x[-rows:], weight, torch.float32), whole[-rows:]), rows


def test_every_number_of_rows_is_launched_alike(device, dtype, monkeypatch):
    forms = set()
    monkeypatch.setattr(dense, "_dense", lambda grid, *_, **constants: forms.add(tuple(constants.items())))
    weight = GroupedWeight(make(72, 136, device, dtype)[None])
    for rows in (1, 16, 64, 500):
        dense_product(torch.empty(rows, 136, device=device, dtype=dtype), weight, dtype)
    assert len(forms) == 1


def test_experts_have_one_tile(device, dtype):
    usual = CudaExperts(*weights(4, 64, 32, device, dtype))
    fixed = CudaExperts(*weights(4, 64, 32, device, dtype), batch_invariant=True)
    sizes = [(0, 512), (8, 512), (64, 64), (1000, 10_000), (5, 16)]
    assert {fixed._tile(*size) for size in sizes} == {64}
    assert len({usual._tile(*size) for size in sizes}) > 2
