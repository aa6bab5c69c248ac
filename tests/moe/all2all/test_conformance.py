"""What every backend must do, between real ranks: `pytest tests/moe/all2all --backend module:Class` for another one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dbo.runner import UBatchRunner
from moe.all2all.base import All2All
from moe.all2all.self_test import self_test
from tests.moe.cases import (
    Case,
    cases,
    check_received,
    expected,
    make_backend,
    make_inputs,
    stand_in,
    tolerance,
)

CPU = torch.device("cpu")
MIXED = ("random", "all leave", "one expert", "all to rank 0", "rank 0 never chosen", "all stay")


def there_and_back(all2all: All2All, case: Case, salt: int = 0) -> Tensor:
    inputs = make_inputs(case, all2all.ep_rank, salt)
    sent = all2all.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, inputs.num_tokens_per_rank).result()
    check_received(case, all2all.ep_rank, sent, salt)
    return all2all.combine(stand_in(case, all2all.ep_rank, sent), sent).result()


def check_back(case: Case, rank: int, back: Tensor, salt: int = 0) -> None:
    assert back.dtype == case.dtype
    torch.testing.assert_close(back.float(), expected(make_inputs(case, rank, salt)), **tolerance(case.dtype))


# ------------------------------------------------------------------ on every rank


def run_all(ctx: Any, backend: str, todo: list[Case]) -> None:
    for case in todo:
        all2all = make_backend(ctx, backend, case)
        try:
            first = there_and_back(all2all, case)
            check_back(case, ctx.rank, first)
            assert torch.equal(first, there_and_back(all2all, case)), "the same call gave other bits"
        except BaseException as error:
            error.add_note(f"case {case.name!r} on rank {ctx.rank} of {ctx.world_size}")
            raise
        finally:
            all2all.close()


def run_in_flight(ctx: Any, backend: str, num_rounds: int, num_ubatches: int) -> None:
    """Ubatches with their own patterns and sizes, interleaved and one after another: right, and bitwise equal."""
    case = Case(name="in flight", num_tokens=(40,) * ctx.world_size, hidden=96, num_experts=9, num_topk=3)
    all2all = make_backend(ctx, backend, case)
    limit = all2all.capabilities.max_in_flight or num_ubatches
    with UBatchRunner(min(num_ubatches, limit), device=CPU) as runner:
        for n in range(num_rounds):
            todo = [_mixed(case, n, k) for k in range(runner.num_ubatches)]

            def layers(work: tuple[Case, int]) -> list[Tensor]:
                return [there_and_back(all2all, work[0], work[1] + layer) for layer in range(2)]

            overlapped = runner.run(layers, todo)
            sequential = runner.run(layers, todo, interleave=False)
            for (own, salt), got, other in zip(todo, overlapped, sequential, strict=True):
                for layer in range(2):
                    assert torch.equal(got[layer], other[layer])
                    check_back(own, ctx.rank, got[layer], salt + layer)
    all2all.close()


def _mixed(case: Case, n: int, k: int) -> tuple[Case, int]:
    """The case of ubatch k in round n, and its salt; the same on all ranks."""
    random = torch.Generator().manual_seed(100 * n + k)
    sizes = tuple(int(s) for s in torch.randint(0, 41, (case.ep_size,), generator=random))
    pattern = MIXED[(n + k) % len(MIXED)]
    own = Case(
        name=f"round {n}, ubatch {k}",
        num_tokens=sizes,
        pattern=pattern,
        hidden=case.hidden,
        num_experts=case.num_experts,
        num_topk=case.num_topk,
        tell_counts=n % 3 != 0,
    )
    return own, 10 * n + 2 * k


def run_many_outstanding(ctx: Any, backend: str) -> None:
    """All dispatches first, then all combines, newest first: handles travel in values."""
    case = Case(name="outstanding", num_tokens=(12,) * ctx.world_size)
    all2all = make_backend(ctx, backend, case)
    works = []
    for salt in range(all2all.capabilities.max_in_flight or 8):
        inputs = make_inputs(case, ctx.rank, salt)
        works.append(all2all.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, case.num_tokens))
    received = [work.result() for work in works]
    for salt in reversed(range(len(received))):
        check_received(case, ctx.rank, received[salt], salt)
        back = all2all.combine(stand_in(case, ctx.rank, received[salt]), received[salt]).result()
        check_back(case, ctx.rank, back, salt)
    all2all.close()


def run_sizes_at_the_cap(ctx: Any, backend: str) -> None:
    cap = 32
    all2all = make_backend(ctx, backend, Case(name="cap", num_tokens=(cap,) * ctx.world_size))
    for n, size in enumerate((cap, 1, cap - 1, 0, cap, 2, 8, cap - 1)):
        for told in (True, False):
            case = Case(name=f"{size} of {cap}", num_tokens=(size,) * ctx.world_size, tell_counts=told)
            check_back(case, ctx.rank, there_and_back(all2all, case, n), n)
    all2all.close()


def run_self_test(ctx: Any, backend: str) -> None:
    for case in (Case(name="small", num_tokens=(16,) * ctx.world_size), cases(ctx.world_size)[-1]):
        all2all = make_backend(ctx, backend, case)
        self_test(all2all, case, CPU)
        all2all.close()


def run_refusals(ctx: Any, backend: str) -> None:
    case = Case(name="refused", num_tokens=(4,) * ctx.world_size)
    all2all = make_backend(ctx, backend, case)
    inputs = make_inputs(case, ctx.rank)
    for x, idx, weights in (
        (inputs.x, inputs.topk_idx.int(), inputs.topk_weights),
        (inputs.x, inputs.topk_idx, inputs.topk_weights.double()),
        (inputs.x, inputs.topk_idx[:-1], inputs.topk_weights),
        (inputs.x[0], inputs.topk_idx, inputs.topk_weights),
    ):
        with pytest.raises(ValueError, match=r"topk_idx|topk_weights|x has shape"):
            all2all.dispatch(x, idx, weights, case.num_tokens)
    there_and_back(all2all, case)  # a refusal leaves nothing behind
    all2all.close()


# ------------------------------------------------------------------ in the test process


def test_every_case(ranks: Any, backend: str, ep_size: int) -> None:
    ranks(ep_size).run(run_all, backend, cases(ep_size), timeout=60)


@pytest.mark.parametrize("num_ubatches", [2, 4])
def test_in_flight(ranks: Any, backend: str, ep_size: int, num_ubatches: int) -> None:
    ranks(ep_size).run(run_in_flight, backend, 6, num_ubatches, timeout=60)


@pytest.mark.slow
def test_in_flight_200_rounds(ranks: Any, backend: str, ep_size: int) -> None:
    ranks(ep_size).run(run_in_flight, backend, 200, 2, timeout=300)


@pytest.mark.parametrize("case", [run_many_outstanding, run_sizes_at_the_cap, run_self_test, run_refusals])
def test_in_use(ranks: Any, backend: str, ep_size: int, case: Any) -> None:
    ranks(ep_size).run(case, backend, timeout=60)
