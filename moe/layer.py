"""The MoE layer: router, dispatch, experts, combine.

Its own file so that the order of a layer can be read in one place. It knows nothing of ranks, streams, turns or
graphs: the two yield points are inside `Work`, and with one ubatch they are plain calls.

```
compute | router    | experts    | shared experts | + residual (the model's)
comm    |  dispatch |   combine              |
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from moe.all2all.base import All2All
from moe.experts import ExpertWeights, make_experts
from moe.router import Route


class MoELayer:
    """One layer's routed experts over all ranks of `all2all`, with shared experts, if any, computed while the
    rows come back."""

    def __init__(
        self,
        router: Route,
        experts: ExpertWeights,
        all2all: All2All,
        shared: Callable[[Tensor], Tensor] | None = None,
        *,
        batch_invariant: bool = False,
    ):
        self.router, self.all2all, self.shared = router, all2all, shared
        self.experts = make_experts(experts, batch_invariant=batch_invariant)

    def __call__(
        self,
        x: Tensor,
        num_tokens: int | Tensor,
        num_tokens_per_rank: Sequence[int] | None = None,
        slots: Tensor | None = None,
    ) -> Tensor:
        """Run x [T, hidden], the first `num_tokens` rows real; gives [T, hidden], without the residual.

        `num_tokens_per_rank`: real rows of every rank in this ubatch where known (see `All2All.dispatch`). `slots`
        [T]: what the tokens are called (see `Route`). Two yield points. Padded rows of the result are undefined where
        there are shared experts, else 0.
        """
        topk_weights, topk_idx = self.router(x, num_tokens, slots)
        received = self.all2all.dispatch(x, topk_idx, topk_weights, num_tokens_per_rank).result()
        returning = self.all2all.combine(self.experts(received), received)
        if self.shared is None:
            return returning.result()
        returning.pass_turn()
        shared = self.shared(x)
        return returning.wait() + shared
