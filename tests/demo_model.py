"""The demo model as session fixtures: SmolLM2-135M-Instruct, dense and upcycled.

Fetched and converted once into `.cache/`, where `scripts/demo` looks too. For tests marked `slow`.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from moe.upcycle import UpcycleOptions, upcycle

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The dense source, one GGUF file."""
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    done = subprocess.run(
        [ROOT / "scripts/fetch_model"], env={"PATH": path}, stdout=subprocess.PIPE, text=True, check=True, timeout=600
    )
    return Path(done.stdout.strip())


@pytest.fixture(scope="session")
def demo_moe(demo_gguf: Path) -> Path:
    """8 experts, top-2, the same function as `demo_gguf`."""
    return _upcycled(demo_gguf, "smollm2-8x135m", noise=0.0)


@pytest.fixture(scope="session")
def demo_moe_noisy(demo_gguf: Path) -> Path:
    """8 different experts, top-2: misrouting shows."""
    return _upcycled(demo_gguf, "smollm2-8x135m-noise0.2", noise=0.2)


def _upcycled(source: Path, name: str, *, noise: float) -> Path:
    out = ROOT / ".cache" / name
    upcycle(source, out, UpcycleOptions(noise=noise), progress=False)
    return out
