"""How many multiprocessors compute kernels may use: one setting, read by everything that computes.

Its own file because the setting is torch's (its carve-out for cuBLASLt and grouped products), and both the partition that sets it
and the Triton kernels that size their grids by it must mean the same number. Nothing is stored here.
"""

from __future__ import annotations

import functools

import torch


@functools.cache
def total_sms(device_index: int) -> int:
    """Multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def compute_sms(device: torch.device) -> int:
    """Multiprocessors that a compute kernel may fill now; programs of a small grid on the CPU (Triton's interpreter)."""
    if device.type != "cuda":
        return 4
    index = torch.cuda.current_device() if device.index is None else device.index
    return total_sms(index) - (torch._C._get_sm_carveout_experimental() or 0)


def set_compute_sms(num_sms: int | None) -> int | None:
    """A `dbo.sm_partition.Setter`: leave `num_sms` of the current device to compute (None = all); returns what was in force."""
    total = total_sms(torch.cuda.current_device())
    carved = torch._C._get_sm_carveout_experimental()
    torch._C._set_sm_carveout_experimental(None if num_sms is None or num_sms >= total else total - num_sms)
    return None if carved is None else total - carved
