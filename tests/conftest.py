"""What every test may use."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the first kernel module is imported, by whichever test

LONG, LONG_LIMIT_S = ("slow", "slurm", "hosts", "browser"), 1800

pytest_plugins = ["tests.demo_model", "tests.ranks"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need GPUs are skipped where there are too few; tests that are long get a limit to match."""
    num_gpus = torch.cuda.device_count()
    for item in items:
        for marker, needed in (("gpu", 1), ("multigpu", 2)):
            if item.get_closest_marker(marker) and num_gpus < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), there are {num_gpus}"))
        if any(item.get_closest_marker(marker) for marker in LONG):
            item.add_marker(pytest.mark.timeout(LONG_LIMIT_S))
