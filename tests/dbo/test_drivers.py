"""Where ubatch threads run. What drivers have in common is tested through the runner."""

import os
import threading

import pytest
import torch

from dbo.drivers.threads import ThreadDriver
from dbo.runner import UBatchRunner
from dbo.torch_state import TorchState

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be given a core here")


def cores_in(driver: ThreadDriver) -> list[set[int]]:
    """Run a step of two ubatches that do nothing else but look."""
    seen: list[set[int]] = []

    def body(k: int) -> int | None:
        seen.append(os.sched_getaffinity(0))
        return None if k else 1

    assert driver.run(body, TorchState.capture(torch.device("cpu")), 10.0)
    return seen


def test_one_core_is_the_callers() -> None:
    everywhere = os.sched_getaffinity(0)
    core = max(everywhere)
    driver = ThreadDriver(2, one_core=True)
    found: list[list[set[int]]] = []

    def caller() -> None:
        os.sched_setaffinity(0, {core})
        found.append(cores_in(driver))
        os.sched_setaffinity(0, {min(everywhere)})
        found.append(cores_in(driver))

    thread = threading.Thread(target=caller)
    thread.start()
    thread.join(20)
    driver.close()
    assert found == [[{core}, {core}], [{min(everywhere)}] * 2]
    assert os.sched_getaffinity(0) == everywhere


def test_without_it_ubatches_run_anywhere() -> None:
    driver = ThreadDriver(2)
    assert cores_in(driver) == [os.sched_getaffinity(0)] * 2
    driver.close()


def test_on_the_cpu_ubatches_keep_their_cores() -> None:
    with UBatchRunner(2, device=torch.device("cpu")) as runner:
        assert runner.run(lambda _: os.sched_getaffinity(0), [0, 1]) == [os.sched_getaffinity(0)] * 2
