import pytest
import torch

from moe.kernels.layout import dispatch_layout
from moe.kernels.permute import make_permutation, padded_tiles


def routing(num_rows, num_topk, num_experts, device, filler=0.3):
    """Distinct ids in each row, some of them -1, the last rows nothing but filler."""
    ids = torch.rand(num_rows, max(num_experts, num_topk), device=device).argsort(-1)[:, :num_topk]
    ids = ids.masked_fill(torch.rand(ids.shape, device=device) < filler, -1)
    ids[num_rows - num_rows // 4 :] = -1
    return ids


def spans_of(tiles):
    return tiles.spans[: int(tiles.count)].tolist()


@pytest.mark.parametrize(
    ("num_rows", "num_topk", "num_experts"), [(1, 1, 1), (7, 2, 3), (40, 8, 16), (300, 3, 20), (600, 8, 64)]
)
def test_places_are_those_of_a_stable_sort(num_rows, num_topk, num_experts, device):
    ids = routing(num_rows, num_topk, num_experts, device)
    made = make_permutation(ids, num_experts, block=16)
    flat = ids.flatten()
    chosen = flat[flat >= 0]
    order = torch.argsort(torch.where(flat >= 0, flat, num_experts), stable=True)[: len(chosen)]
    expected = torch.full_like(flat, -1)
    expected[order] = torch.arange(len(chosen), device=device)
    assert torch.equal(made.position.flatten().long(), expected)
    assert torch.equal(made.source[: len(chosen)].long(), order // num_topk)
    counts = torch.bincount(chosen, minlength=num_experts)
    assert torch.equal(made.ends.long(), counts.cumsum(0))


def test_tiles_cover_each_experts_rows_once(device):
    ids = routing(200, 4, 8, device)
    ids[ids == 3] = -1  # an expert that nobody chose
    made = make_permutation(ids, 8, block=16)
    ends = [0, *made.ends.tolist()]
    expected = [
        [expert, row, ends[expert + 1]] for expert in range(8) for row in range(ends[expert], ends[expert + 1], 16)
    ]
    assert spans_of(made.tiles) == expected


@pytest.mark.parametrize("ids", [[[-1, -1]] * 5, [[2, -1]] * 70], ids=["nothing", "one expert"])
def test_extremes(ids, device):
    ids = torch.tensor(ids, device=device)
    made = make_permutation(ids, 4, block=16)
    num_chosen = int((ids >= 0).sum())
    assert int(made.ends[-1]) == num_chosen
    assert sum(min(end - row, 16) for _, row, end in spans_of(made.tiles)) == num_chosen


def test_no_rows(device):
    made = make_permutation(torch.empty(0, 2, dtype=torch.int64, device=device), 4, block=16)
    assert made.ends.tolist() == [0] * 4
    assert spans_of(made.tiles) == []


def test_padded_tiles(device):
    counts = torch.tensor([0, 5, 32, 17, 1], dtype=torch.int32, device=device)
    expected = [[1, 32, 37], [2, 64, 96], [2, 80, 96], [3, 96, 113], [3, 112, 113], [4, 128, 129]]
    assert spans_of(padded_tiles(counts, 32, block=16)) == expected


@pytest.mark.parametrize(
    ("num_rows", "num_topk", "num_experts", "num_ranks"),
    [(0, 8, 64, 4), (1, 1, 2, 2), (150, 8, 64, 4), (70, 3, 6, 3), (3500, 8, 64, 4), (1025, 6, 10, 5), (9000, 1, 4, 2)],
)
def test_layout_counts_tokens_once_a_rank(num_rows, num_topk, num_experts, num_ranks, device):
    ids = routing(num_rows, num_topk, num_experts, device)
    per_rank, per_expert, in_rank = dispatch_layout(ids, num_experts, num_ranks)
    share = num_experts // num_ranks
    expected = torch.stack([((ids >= share * r) & (ids < share * (r + 1))).any(-1) for r in range(num_ranks)], -1)
    assert torch.equal(in_rank, expected)
    assert torch.equal(per_rank.long(), expected.sum(0))
    assert torch.equal(per_expert.long(), torch.bincount(ids[ids >= 0], minlength=num_experts))
