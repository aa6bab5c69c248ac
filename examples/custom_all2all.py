"""A transport of your own in 40 lines: every rank gathers all tokens and keeps what its experts need.

Wasteful on the wire and simple to read. Try it, and see that it does what a backend must:

    torchrun --nproc-per-node 2 examples/custom_all2all.py
    pytest tests/moe/all2all --backend examples.custom_all2all:GatherAll2All
    torchrun --nproc-per-node 2 -m launch generate --all2all examples.custom_all2all:GatherAll2All ...
"""

import torch
import torch.distributed as dist

from moe.all2all.base import Dispatched, Transport, check_routing


class GatherAll2All(Transport):
    name = "gather"

    def dispatch(self, x, topk_idx, topk_weights, num_tokens_per_rank=None):
        check_routing(x, topk_idx, topk_weights)
        tensors = x, topk_idx, topk_weights
        parts = [tensor.view(torch.uint8) for tensor in tensors]  # gloo does not know every dtype
        rows = torch.cat(parts, dim=1)[: self.max_tokens_per_rank]
        mine = rows.new_full((self.max_tokens_per_rank, rows.shape[1]), 255)  # as an id that is -1, no expert
        mine[: len(rows)] = rows

        def launch(_):
            everyone = mine.new_empty(self.ep_size, *mine.shape)
            work = dist.all_gather(list(everyone), mine, group=self.group, async_op=True)

            def finish():
                self.comm.wait_host(work)
                columns = everyone.flatten(0, 1).split([part.shape[1] for part in parts], dim=1)
                there, ids, weights = (c.contiguous().view(t.dtype) for c, t in zip(columns, tensors, strict=True))
                ids -= self.experts.start
                ids[(ids < 0) | (ids >= len(self.experts))] = -1
                return Dispatched(x=there, topk_idx=ids, topk_weights=weights, handle=len(x))

            return finish

        return self.comm.start(launch, label="dispatch")

    def combine(self, y, sent):
        def launch(_):
            back = torch.empty_like(y)
            work = dist.all_to_all_single(back.view(torch.uint8), y.view(torch.uint8), group=self.group, async_op=True)

            def finish():
                self.comm.wait_host(work)
                out = y.new_zeros(sent.handle, y.shape[1], dtype=torch.float32)
                for rows in back.split(self.max_tokens_per_rank):  # ascending ranks
                    out[: len(rows)] += rows[: len(out)]
                return out.to(y.dtype)

            return finish

        return self.comm.start(launch, label="combine")


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
