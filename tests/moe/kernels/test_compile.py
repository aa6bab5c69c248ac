"""Every kernel compiles for a GPU, where there is none."""

import os
import subprocess
import sys
from pathlib import Path


def test_all_kernels_compile(tmp_path):
    variables = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.moe.kernels.compile_all"],
        cwd=Path(__file__).parents[3], env={**os.environ, **variables}, text=True, timeout=240,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
