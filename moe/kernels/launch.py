"""Launching a Triton kernel at a fourth of the host's time.

Its own file because it is the one place that knows what Triton specialises a kernel on. `kernel[grid](...)` finds its
compiled form by inspecting every argument in Python, which takes longer than the launch; a layer has ten launches and
the host's time decides below some ten thousand tokens. `Launcher` looks the compiled form up by what the form depends
on, no more: types, the alignment of pointers, and whether a number is 1 or a multiple of 16. It hands over addresses:
given a tensor, Triton asks for its address again and has the driver check it. So a tensor on the CPU is refused in the
first launch of a form only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
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
        device = torch._C._cuda_getDevice() if self._compiled else -1
        form: list[Any] = [device, num_warps, num_stages, *constants.values()]
        passed: list[Any] = []
        for argument in arguments:  # written out here: a call for each would take as long as the rest
            if isinstance(argument, Tensor):
                address = argument.data_ptr()
                form += argument.dtype, not address & 15
                passed.append(address)
                continue
            if type(argument) is int:
                form += argument == 1, not argument & 15, -(1 << 31) <= argument < 1 << 31
            elif isinstance(argument, TensorDescriptor):
                form += argument.base.dtype, *argument.block_shape
            elif argument is None or type(argument) in (float, bool):
                form.append(type(argument))
            else:  # Triton may know values of it apart
                raise TypeError(f"{self._kernel.__name__} is given a {type(argument).__name__}")
            passed.append(argument)
        compiled = self._compiled.get(tuple(form))
        if compiled is None:
            self._compile(form, grid, arguments, num_warps, num_stages, constants)
            return
        run, function, metadata = compiled
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(*grid, stream, function, metadata, *_NO_HOOKS, *passed, *constants.values())

    def _compile(
        self,
        form: list[Any],
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        num_warps: int,
        num_stages: int,
        constants: dict[str, float],
    ) -> None:
        """Launch as Triton does, and keep what it has found or compiled."""
        if list(constants) != self._kernel.arg_names[len(arguments) :]:
            raise TypeError(f"{self._kernel.__name__} takes {self._kernel.arg_names}, in this order")
        made = self._kernel[grid](*arguments, num_warps=num_warps, num_stages=num_stages, **constants)
        if isinstance(made, CompiledKernel):
            form[0] = torch._C._cuda_getDevice()
            self._compiled[tuple(form)] = made.run, made.function, made.packed_metadata
