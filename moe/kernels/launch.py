"""Launching a Triton kernel at a third of the host's time.

Its own file because it is the one place that knows what Triton specialises a kernel on. `kernel[grid](...)` finds its
compiled form by inspecting every argument in Python, which takes longer than the launch; a layer has ten launches and
the host's time decides below some ten thousand tokens. `Launcher` looks the compiled form up by what the form depends
on, no more: types, the alignment of pointers, and whether a number is 1 or a multiple of 16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

_NO_HOOKS = (None, None, None)  # launch metadata, and what Triton's own profiler would call before and after


class Launcher:
    """A Triton kernel (`triton.jit`), compiled or interpreted. Compile-time parameters come last in its signature."""

    def __init__(self, kernel: Any):
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        *arguments: Tensor | int | float | Any,
        num_warps: int = 4,
        num_stages: int = 3,
        **constants: float,
    ) -> None:
        """Enqueue the kernel on the current stream; `constants` in the order of the signature."""
        key = (*[_KINDS[type(a)](a) for a in arguments], *constants.values(), num_warps, num_stages)
        compiled = self._compiled.get(key)
        if compiled is not None:
            run, function, metadata = compiled
            stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
            run(*grid, stream, function, metadata, *_NO_HOOKS, *arguments, *constants.values())
            return
        if list(constants) != self._kernel.arg_names[len(arguments) :]:
            raise TypeError(f"{self._kernel.__name__} takes {self._kernel.arg_names}, in this order")
        made = self._kernel[grid](*arguments, num_warps=num_warps, num_stages=num_stages, **constants)
        if isinstance(made, CompiledKernel):
            self._compiled[key] = made.run, made.function, made.packed_metadata


def _kind_of_tensor(tensor: Tensor) -> Any:
    return tensor.dtype, tensor.get_device(), tensor.data_ptr() & 15 == 0


def _kind_of_int(number: int) -> Any:
    return number == 1, number & 15 == 0, -(1 << 31) <= number < 1 << 31


_KINDS: dict[type, Callable[[Any], Any]] = {
    Tensor: _kind_of_tensor,
    Parameter: _kind_of_tensor,
    int: _kind_of_int,
    bool: _kind_of_int,
    float: lambda _: float,
    TensorDescriptor: lambda descriptor: (descriptor.base.dtype, *descriptor.block_shape),
}
"""What of an argument a compiled form depends on, by the argument's type."""
