"""The expert path on a GPU against the plain one, in both layouts, with counts at the edges of its tiles."""

import pytest
import torch

from moe.all2all.base import Dispatched
from moe.experts import ExpertWeights, _ExpertByExpert, make_experts

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
