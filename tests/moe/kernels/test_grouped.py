import pytest
import torch
import torch.nn.functional as F

from moe.experts_cuda import _tile
from moe.kernels.grouped import GroupedWeight, grouped_product, grouped_swiglu
from moe.kernels.permute import make_permutation, padded_tiles
from moe.kernels.weighted_sum import weighted_sum
from tests.moe.kernels.test_permute import routing

# Rows outside all tiles are never written nor used, but a tile may read them: what they hold may be infinite.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in matmul")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def close(got, expected):
    error = (got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-9)
    return error.item() < TOLERANCE[got.dtype]


def weights(num_experts, hidden, width, device, dtype):
    w_gate_up = torch.randn(num_experts, 2 * width, hidden, device=device).to(dtype) / hidden**0.5
    w_down = torch.randn(num_experts, hidden, width, device=device).to(dtype) / width**0.5
    return w_gate_up, w_down


def expert(x, w_gate_up, w_down):
    gate, up = F.linear(x.double(), w_gate_up.double()).chunk(2, -1)
    return F.linear(F.silu(gate) * up, w_down.double())


@pytest.mark.parametrize(("hidden", "width", "block"), [(64, 64, 16), (192, 96, 64), (128, 72, 128)])
def test_rows_layout_matches_one_expert_at_a_time(hidden, width, block, device, dtype):
    num_rows, num_topk, num_experts = 90, 3, 5
    ids = routing(num_rows, num_topk, num_experts, device)
    x = torch.randn(num_rows, hidden, device=device).to(dtype)
    x[(ids < 0).all(-1)] = float("nan")  # filler is undefined
    w = torch.rand(num_rows, num_topk, device=device).masked_fill(ids < 0, float("nan"))
    w_gate_up, w_down = weights(num_experts, hidden, width, device, dtype)

    made = make_permutation(ids, num_experts, block)
    h = grouped_swiglu(x, made.source, GroupedWeight(w_gate_up), made.tiles, ids.numel())
    y = weighted_sum(grouped_product(h, GroupedWeight(w_down), made.tiles), made.position, w)

    expected = torch.zeros(num_rows, hidden, dtype=torch.float64, device=device)
    for row, k in (ids >= 0).nonzero().tolist():
        e = ids[row, k]
        expected[row] += w[row, k].double() * expert(x[row], w_gate_up[e], w_down[e])
    assert close(y, expected)
    assert (y[(ids < 0).all(-1)] == 0).all()


def test_padded_layout_reads_only_the_counted_rows(device, dtype):
    num_experts, capacity, hidden, width = 4, 40, 64, 32
    counts = torch.tensor([3, 0, 40, 17], dtype=torch.int32, device=device)
    x = torch.full((num_experts, capacity, hidden), float("nan"), device=device, dtype=dtype)
    for e, count in enumerate(counts.tolist()):
        x[e, :count] = torch.randn(count, hidden, device=device).to(dtype)
    w_gate_up, w_down = weights(num_experts, hidden, width, device, dtype)
    tiles = padded_tiles(counts, capacity, block=16)
    h = grouped_swiglu(x.view(-1, hidden), None, GroupedWeight(w_gate_up), tiles, num_experts * capacity)
    y = grouped_product(h, GroupedWeight(w_down), tiles).view_as(x)
    for e, count in enumerate(counts.tolist()):
        assert count == 0 or close(y[e, :count], expert(x[e, :count], w_gate_up[e], w_down[e]))


def test_a_row_does_not_depend_on_its_neighbours(device, dtype):
    w_gate_up, w_down = weights(3, 64, 32, device, dtype)
    x = torch.randn(50, 64, device=device).to(dtype)
    ids = routing(50, 2, 3, device, filler=0.0)

    def run(rows):
        made = make_permutation(ids[rows], 3, 16)
        h = grouped_swiglu(x[rows], made.source, GroupedWeight(w_gate_up), made.tiles, ids[rows].numel())
        return weighted_sum(
            grouped_product(h, GroupedWeight(w_down), made.tiles),
            made.position,
            torch.ones(ids[rows].shape, device=device),
        )

    whole = run(slice(0, 50))
    parts = torch.cat([run(slice(0, 21)), run(slice(21, 50))])
    # The interpreter multiplies with numpy, whose result may depend on a row's place in its block.
    torch.testing.assert_close(parts, whole, rtol=0, atol=0 if device.type == "cuda" else 1e-6)


def test_weighted_sum_of_no_rows(device, dtype):
    empty = torch.empty(0, 2, device=device)
    assert weighted_sum(torch.empty(0, 64, device=device, dtype=dtype), empty.int(), empty).shape == (0, 64)


@pytest.mark.parametrize(
    ("expected", "at_most", "tile"),
    [
        (0, 512, 16),
        (8, 512, 16),
        (16, 512, 32),
        (32, 512, 64),
        (50, 512, 128),
        (1000, 10_000, 128),
        (64, 64, 64),
        (16, 16, 16),
    ],
)
def test_a_tile_holds_nearly_every_experts_rows(expected, at_most, tile):
    assert _tile(expected, at_most) == tile
