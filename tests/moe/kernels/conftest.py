"""The kernels run where a test finds itself: compiled on a GPU in bfloat16, else in Triton's interpreter in float32."""

import pytest
import torch

pytest.importorskip("triton")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
