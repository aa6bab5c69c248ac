"""A toy engine with a model of its own that overlaps with `dbo`: `torchrun --nproc-per-node 2 examples/embed.py`."""

from dataclasses import dataclass
from types import SimpleNamespace as Shape

import numpy as np
import torch
import torch.distributed as dist

import dbo
from moe.all2all.registry import make_all2all

SHAPE = Shape(hidden=64, num_experts=8, num_topk=2, dtype=torch.float32)
STEPS = [96, 0, 40, 300], [128, 64, 256, 300]  # how many tokens even and odd ranks have in each step


@dataclass(frozen=True)
class TinyBatch(dbo.Batch):
    x: torch.Tensor = dbo.ruled(dbo.by_token())  # [num_tokens, hidden]
    real: torch.Tensor = dbo.ruled(dbo.by_token())  # [num_tokens] bool, False = padding


def model(batch: TinyBatch, gate: torch.Tensor, experts: torch.Tensor, all2all) -> torch.Tensor:
    """Knows nothing of ubatches: `result()` is all there is. experts: this rank's [layer, expert, hidden, hidden]."""
    x = batch.x
    for layer_gate, layer_experts in zip(gate, experts, strict=True):
        weights, topk_idx = (x @ layer_gate).softmax(-1).topk(SHAPE.num_topk)
        topk_idx[~batch.real] = -1  # padding goes nowhere
        sent = all2all.dispatch(x, topk_idx, weights).result()  # the sibling computes meanwhile
        y = torch.zeros_like(sent.x)
        for e, expert in enumerate(layer_experts):
            rows, k = (sent.topk_idx == e).nonzero(as_tuple=True)
            y[rows] += sent.topk_weights[rows, k, None] * torch.tanh(sent.x[rows] @ expert)
        x = x + all2all.combine(y, sent).result()
    return x


def main() -> None:
    dist.init_process_group("gloo")
    rank, size, cpu = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    all2all = make_all2all("torch", group=dist.group.WORLD, device=cpu, config=SHAPE, max_tokens_per_rank=512)
    torch.manual_seed(0)  # the same model of 4 layers on all ranks, each with an equal part of the 8 experts
    weights = (torch.randn(4, 64, 8), torch.randn(4, 8, 64, 64).div(8).chunk(size, dim=1)[rank], all2all)
    config, tracer = dbo.DBOConfig(overlap="on", prefill_token_threshold=64), dbo.Tracer(cpu)
    policy, group = dbo.make_policy(config), dist.new_group()
    agreement = dbo.Agreement(group, dp_rank=rank, dp_size=size, config=config, policy=policy)
    with dbo.UBatchRunner(config.num_ubatches, device=cpu, rank=rank, tracer=tracer) as runner:
        for num in STEPS[rank % 2]:
            plan = agreement.agree(dbo.Vote(num_tokens=num))
            whole = TinyBatch(x=torch.randn(num, 64), real=torch.ones(num, dtype=torch.bool))
            padded = dbo.pad_batch(whole, plan.num_tokens_padded or num)
            slices = dbo.make_slices(plan, np.array([num] if num else [], int))  # one request
            out = runner.run(lambda batch: model(batch, *weights), dbo.split_batch(padded, slices))
            torch.testing.assert_close(torch.cat(out)[:num], model(whole, *weights))
            print(f"rank {rank}: {num} tokens: {plan.explain()}\n{dbo.timeline(tracer.take())}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
