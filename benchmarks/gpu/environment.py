"""One line for each thing that a figure depends on: date, host, card, versions, and the variables that change what
runs.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess

import torch

VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_NVLS_ENABLE", "NVSHMEM_DISABLE_NVLS", "PYTORCH_CUDA_ALLOC_CONF")
PACKAGES = ("triton", "tokenspeed-deepep", "nvidia-cudnn-frontend", "greenlet", "numpy")


def describe() -> list[str]:
    if not torch.cuda.is_available():
        return [f"a rehearsal on the CPU, Python {platform.python_version()}, torch {torch.__version__}"]
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    lines = [
        f"date {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, driver {driver[0] if driver else 'unknown'}",
        f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}",
    ]
    for package in PACKAGES:
        try:
            lines.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{package} not installed")
    return lines + [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]


if __name__ == "__main__":
    print("\n".join(describe()))
