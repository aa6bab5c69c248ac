"""Slots for ubatches that grow together and, once locked, never move (known fault 38)."""

import pytest
import torch

from dbo.runner import UBatchRunner
from dbo.workspace import Workspace, WorkspaceLocked

CPU = torch.device("cpu")


def test_tensors_lie_one_behind_the_other() -> None:
    a, b, c = Workspace(CPU, 2).take(((3, 5), torch.bfloat16), ((0, 7), torch.int64), ((4,), torch.float32))
    assert [(t.shape, t.dtype) for t in (a, b, c)] == [
        ((3, 5), torch.bfloat16),
        ((0, 7), torch.int64),
        ((4,), torch.float32),
    ]
    a.fill_(1), c.fill_(2)
    assert bool((a == 1).all())
    assert a.data_ptr() != c.data_ptr()


def test_the_slots_of_ubatches_are_apart() -> None:
    workspace = Workspace(CPU, 3)

    def body(k: int) -> int:
        (mine,) = workspace.take(((8,), torch.int64))
        return mine.data_ptr()

    with UBatchRunner(3, device=CPU) as runner:
        addresses = runner.run(body, range(3))
        assert len(set(addresses)) == 3
        assert runner.run(body, range(3)) == addresses


@pytest.mark.parametrize("split_first", [True, False])
def test_all_slots_grow_together(split_first: bool) -> None:
    """Whoever ran before the lock, whole or split: every slot then has room for the largest of them."""
    workspace = Workspace(CPU, 2)
    with UBatchRunner(2, device=CPU) as runner:

        def step(ubatches: int) -> None:
            runner.run(lambda _: workspace.take(((1000,), torch.float32)), range(ubatches))

        step(2 if split_first else 1)
        workspace.lock()
        step(2)
        step(1)
        assert workspace.num_bytes >= 4000
        with pytest.raises(WorkspaceLocked, match="ubatch 0 needs 8192 bytes of workspace, 4096 are locked"):
            workspace.take(((2048,), torch.float32))
        workspace.unlock()
        workspace.take(((2048,), torch.float32))
