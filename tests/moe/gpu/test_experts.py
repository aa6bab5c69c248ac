"""The expert path on a GPU against the plain one, in both layouts, with counts at the edges of its tiles; and products
whose rows do not depend on how many there are."""

import pytest
import torch
import torch.nn.functional as F

from moe.all2all.base import Dispatched
from moe.experts import ExpertWeights, _ExpertByExpert, make_experts
from moe.linear import make_head, make_linear

pytestmark = pytest.mark.gpu


def weights(num_experts=16, hidden=576, width=1536):
    shapes = {"w_gate_up": (num_experts, 2 * width, hidden), "w_down": (num_experts, hidden, width)}
    return ExpertWeights(**{k: torch.randn(s, device="cuda", dtype=torch.bfloat16) * 0.03 for k, s in shapes.items()})


@pytest.mark.parametrize("num_rows", [0, 1, 7, 127, 129, 3000])
@pytest.mark.parametrize("hint", [None, 1, 1000])
def test_rows(num_rows, hint):
    torch.manual_seed(0)
    w = weights()
    ids = torch.rand(num_rows, 16, device="cuda").topk(4).indices
    ids = ids.masked_fill(torch.rand(ids.shape, device="cuda") < 0.4, -1)
    received = Dispatched(
        x=torch.randn(num_rows, 576, device="cuda", dtype=torch.bfloat16),
        topk_idx=ids,
        topk_weights=torch.rand(ids.shape, device="cuda"),
        num_tokens_per_expert=None,
        handle=None,
        rows_per_expert=hint,
    )
    torch.testing.assert_close(make_experts(w)(received), _ExpertByExpert(w)(received), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("hint", [None, 5, 40, 100])
def test_padded(hint):
    torch.manual_seed(0)
    w = weights()
    counts = torch.tensor(
        [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 2, 0], device="cuda", dtype=torch.int32
    )
    x = torch.full((16, 128, 576), torch.nan, device="cuda", dtype=torch.bfloat16)
    for expert, count in enumerate(counts.tolist()):
        x[expert, :count].normal_()
    received = Dispatched(
        x=x, topk_idx=None, topk_weights=None, num_tokens_per_expert=counts, handle=None, rows_per_expert=hint
    )
    got, expected = make_experts(w)(received), _ExpertByExpert(w)(received)
    for expert, count in enumerate(counts.tolist()):
        torch.testing.assert_close(got[expert, :count], expected[expert, :count], rtol=2e-2, atol=2e-2)


def test_a_captured_graph_follows_other_counts():
    torch.manual_seed(0)
    experts = make_experts(weights())
    ids = torch.full((64, 4), -1, device="cuda")
    received = Dispatched(
        x=torch.randn(64, 576, device="cuda", dtype=torch.bfloat16),
        topk_idx=ids,
        topk_weights=torch.rand(64, 4, device="cuda"),
        num_tokens_per_expert=None,
        handle=None,
    )
    experts(received)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = experts(received)
    for _ in range(3):
        ids.copy_(
            torch.rand(64, 16, device="cuda").topk(4).indices.masked_fill(torch.rand(64, 4, device="cuda") < 0.5, -1)
        )
        graph.replay()
        assert torch.equal(y, experts(received))


@pytest.mark.parametrize(("depth", "width"), [(576, 200), (2048, 5120), (72, 8)])
def test_a_row_of_a_product_does_not_depend_on_how_many_there_are(depth, width):
    torch.manual_seed(0)
    weight = torch.randn(width, depth, device="cuda", dtype=torch.bfloat16) / depth**0.5
    bias = torch.randn(width, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(300, depth, device="cuda", dtype=torch.bfloat16)
    for product in (make_linear(weight, bias, batch_invariant=True), make_head(weight, batch_invariant=True)):
        whole = product(x)
        for rows in range(1, 301):
            assert torch.equal(product(x[:rows]), whole[:rows])
            assert torch.equal(product(x[-rows:]), whole[-rows:])
    torch.testing.assert_close(make_linear(weight, batch_invariant=True)(x), F.linear(x, weight), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(whole, make_head(weight)(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("hint", [None, 1000])
def test_a_row_of_experts_does_not_depend_on_how_many_there_are(hint):
    torch.manual_seed(0)
    w = weights()
    ids = torch.rand(300, 16, device="cuda").topk(4).indices
    ids = ids.masked_fill(torch.rand(ids.shape, device="cuda") < 0.4, -1)
    x, shares = torch.randn(300, 576, device="cuda", dtype=torch.bfloat16), torch.rand(ids.shape, device="cuda")
    experts = make_experts(w, batch_invariant=True)

    def run(rows):
        return experts(
            Dispatched(x=x[rows], topk_idx=ids[rows], topk_weights=shares[rows], handle=None, rows_per_expert=hint)
        )

    whole = run(slice(0, 300))
    for count in (1, 2, 3, 15, 16, 17, 64, 65, 150, 299):
        for rows in (slice(0, count), slice(300 - count, 300)):
            assert torch.equal(run(rows), whole[rows]), rows
