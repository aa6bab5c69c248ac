"""What several tests of `dbo` start from."""

from collections.abc import Iterator

import pytest
import torch

from tests.dbo.graphs.emulator import Emulator


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    """A device whose work can be captured, watched from the start of the test to its end."""
    made = Emulator()
    with torch.inference_mode(), made.watching():
        yield made
