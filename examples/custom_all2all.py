"""A transport of your own in 40 lines: every rank gathers all tokens and keeps what its experts need.

Wasteful on the wire and simple to read. Try it, and see that it does what a backend must:

    torchrun --nproc-per-node 2 examples/custom_all2all.py
    pytest tests/moe/all2all --backend examples.custom_all2all:GatherAll2All
    torchrun --nproc-per-node 2 -m launch generate --all2all examples.custom_all2all:GatherAll2All ...
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from dbo.work import Comm
from moe.all2all.base import Capabilities, Dispatched, check_routing, expert_range


class GatherAll2All:
    name = "gather"
    capabilities = Capabilities()

    def __init__(self, *, group, device, config, max_tokens_per_rank, check=None):
        self.group, self.ep_rank, self.ep_size = group, group.rank(), group.size()
        self.num_experts, self.cap = config.num_experts, max_tokens_per_rank
        self.comm = Comm(device, check=check)

    def dispatch(self, x, topk_idx, topk_weights, num_tokens_per_rank=None):
        check_routing(x, topk_idx, topk_weights)
        mine = [self._padded(x), self._padded(topk_idx), self._padded(topk_weights)]

        def launch(_):
            everyone = [t.new_empty(self.ep_size * self.cap, t.shape[1]) for t in mine]
            works = [self._gather(a, t) for a, t in zip(everyone, mine, strict=True)]

            def finish():
                for work in works:
                    self.comm.wait_host(work)
                experts = expert_range(self.num_experts, self.ep_size, self.ep_rank)
                ids = everyone[1] - experts.start
                ids[(ids < 0) | (ids >= len(experts))] = -1
                return Dispatched(
                    x=everyone[0], topk_idx=ids, topk_weights=everyone[2], num_tokens_per_expert=None, handle=len(x)
                )

            return finish

        return self.comm.start(launch, label="dispatch")

    def combine(self, y, sent):
        def launch(_):
            back = torch.empty_like(y)
            work = dist.all_to_all_single(_bytes(back), _bytes(y), group=self.group, async_op=True)

            def finish():
                self.comm.wait_host(work)
                out = y.new_zeros(sent.handle, y.shape[1], dtype=torch.float32)
                for rows in back.split(self.cap):  # ascending ranks
                    out[: self.cap] += rows[: len(out)]
                return out.to(y.dtype)

            return finish

        return self.comm.start(launch, label="combine")

    def close(self):
        pass

    def _padded(self, rows):
        return torch.cat([rows[: self.cap], rows.new_full((max(0, self.cap - len(rows)), rows.shape[1]), -1)])

    def _gather(self, everyone, mine):
        return dist.all_gather(list(_bytes(everyone).split(self.cap)), _bytes(mine), group=self.group, async_op=True)


def _bytes(rows):
    return rows.view(torch.uint8)  # gloo does not know every dtype


def main() -> None:
    from moe.all2all.self_test import self_test
    from moe.config import named_shape

    dist.init_process_group("gloo")
    config, cpu = named_shape("qwen3-30b-a3b"), torch.device("cpu")
    backend = GatherAll2All(group=dist.group.WORLD, device=cpu, config=config, max_tokens_per_rank=16)
    self_test(backend, config, cpu)
    if backend.ep_rank == 0:
        print(f"every token came back, on {backend.ep_size} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
