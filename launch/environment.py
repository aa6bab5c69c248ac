"""Where a result was measured: host, versions, devices, and the variables that change timings.

Its own file because every result file needs it, and a figure without it cannot be compared with another.
"""

from __future__ import annotations

import datetime
import os
import platform
import socket

import torch

_VARIABLES = (
    "OMP_NUM_THREADS",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "GLOO_SOCKET_IFNAME",
)


def describe_environment(device: torch.device) -> dict[str, str]:
    """Date, host, versions, processor or GPU, threads, and the variables that are set."""
    described = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "host": socket.gethostname(),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        described["gpu"] = torch.cuda.get_device_name(device)
        described["cuda"] = str(torch.version.cuda)
        described["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return described | {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        return names[0] if names else platform.machine()
    except OSError:
        return platform.machine()
