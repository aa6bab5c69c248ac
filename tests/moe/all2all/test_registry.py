"""Choosing a backend, and being refused one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dbo.errors import ConfigError
from moe.all2all import registry
from moe.all2all.base import Capabilities, check_in_flight, expert_range
from moe.all2all.local import LocalAll2All
from moe.all2all.registry import make_all2all
from moe.all2all.self_test import self_test
from tests.moe.cases import Case, make_backend

CPU = torch.device("cpu")
ONE = Case(name="one rank", num_tokens=(16,))


def make(name: str, group: Any = None) -> Any:
    return make_all2all(name, group=group, device=CPU, config=ONE, max_tokens_per_rank=16)


@pytest.mark.parametrize(("num_experts", "ep_size"), [(8, 2), (8, 3), (7, 4), (2, 3), (128, 7)])
def test_expert_ranges_partition_the_experts(num_experts: int, ep_size: int) -> None:
    ranges = [expert_range(num_experts, ep_size, rank) for rank in range(ep_size)]
    assert [expert for experts in ranges for expert in experts] == list(range(num_experts))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    assert sorted(map(len, ranges), reverse=True) == [len(experts) for experts in ranges]


def test_auto_on_one_rank_is_local() -> None:
    assert make("auto").name == "local"


def auto_and_local(ctx: Any) -> str:
    with pytest.raises(ConfigError, match="one rank, not 2"):
        make("local", ctx.group)
    return make("auto", ctx.group).name


def test_auto_on_two_ranks_is_torch(ranks: Any) -> None:
    assert ranks(2).run(auto_and_local) == ["torch", "torch"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("trch", r"all2all='trch' .*local, torch.*did you mean torch\?"),
        ("deep space", "module:Class"),
        ("no.such.module:Class", "No module named 'no'"),
        ("moe.all2all.local:Remote", "Remote"),
        ("torch", "use --all2all local"),  # without a group
    ],
)
def test_a_name_that_does_not_work_is_explained(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(name)


def test_more_ubatches_than_operations_in_flight_are_refused() -> None:
    backend: Any = SimpleNamespace(name="deepep_ll", capabilities=Capabilities(max_in_flight=2))
    check_in_flight(backend, 2)
    with pytest.raises(ConfigError, match=r"num_ubatches=3.*exceeds deepep_ll's 2 operations in flight; use 2 or"):
        check_in_flight(backend, 3)
    check_in_flight(make("local"), 8)


def test_batch_invariant_runs_take_one_set_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorded:
        def __init__(self, **setup: Any) -> None:
            pass

    loaded: list[str] = []
    monkeypatch.setattr(registry, "_load", lambda path: loaded.append(path) or Recorded)
    monkeypatch.setattr(registry, "_choose", lambda *_: ("deepep", "deep_ep is installed"))
    setup: Any = {"group": None, "device": CPU, "config": ONE, "max_tokens_per_rank": 16}
    for batch_invariant in (False, True):
        make_all2all("auto", **setup, batch_invariant=batch_invariant)
    make_all2all("deepep", **setup)
    make_all2all("deepep_ll", **setup, batch_invariant=True)
    assert loaded == [registry.BACKENDS[name] for name in ("deepep", "deepep_ht", "deepep", "deepep_ll")]
    with pytest.raises(ConfigError, match=r"\(--batch-invariant\); use deepep_ht, or deepep_ll"):
        make_all2all("deepep", **setup, batch_invariant=True)


class Swapping(LocalAll2All):
    """A transport that gives two tokens each other's rows."""

    def combine(self, y: torch.Tensor, sent: Any) -> Any:
        return super().combine(y[[1, 0, *range(2, len(y))]], sent)


def test_the_self_test_refuses_a_broken_transport() -> None:
    made = Swapping(group=None, device=CPU, config=ONE, max_tokens_per_rank=16)
    with pytest.raises(ConfigError, match="2 of 16 tokens came back to rank 0 different"):
        self_test(made, ONE, CPU)


def lose_rows_on_rank_1(ctx: Any) -> None:
    case = Case(name="two", num_tokens=(16, 16))
    made: Any = make_backend(ctx, "torch", case)
    if ctx.rank == 1:
        made._local_of[:] = -1
    with pytest.raises(ConfigError, match=f"of 16 tokens came back to rank {ctx.rank} different"):
        self_test(made, case, CPU)


def test_the_self_test_runs_between_ranks(ranks: Any) -> None:
    ranks(2).run(lose_rows_on_rank_1)
