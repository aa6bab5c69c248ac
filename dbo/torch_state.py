"""The part of torch's state that belongs to a thread: captured in the caller, applied in its ubatches.

A file of its own because torch keeps this state in a dozen places and both drivers need all of them: device and current
stream, grad and inference mode, autocast, and the stacks of function modes (which holds the default device) and of
dispatch modes (`FlopCounterMode`, `FakeTensorMode`). The default dtype belongs to the process. Context variables travel
with `contextvars.copy_context()` (see `runner.py`), and in newer versions of torch the compiler's configuration with
them; in 2.11 that belongs to the process. A mode is carried as the one object that it is, without a lock, since one
ubatch runs at a time. Not carried are hooks for saved tensors, which nothing without gradients has, and pre-dispatch
modes, which only `torch.export` enters.

Invariant: `applied()` leaves everything as it found it, also after an error. Each part is set to absolute values, never
relative to a stack, so that greenlets may enter and leave in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import (
    _get_dispatch_stack_at,
    _get_function_stack_at,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    _pop_torch_dispatch_stack,
    _pop_torch_function_stack,
    _push_on_torch_dispatch_stack,
    _push_on_torch_function_stack,
    is_grad_enabled,
    is_inference_mode_enabled,
)

Autocast = tuple[bool, tuple[tuple[str, bool, torch.dtype], ...]]
Modes = tuple[tuple[Any, ...], tuple[Any, ...]]  # function modes, dispatch modes; innermost last


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchState:
    """One thread's torch state. `stream` is None on the CPU; `plain` means nothing is on but grad or inference mode."""

    grad: bool
    inference: bool
    autocast: Autocast
    any_autocast: bool
    modes: Modes
    num_function_modes: int
    num_dispatch_modes: int
    plain: bool
    device: torch.device
    device_index: int | None
    stream: torch.cuda.Stream | None

    @classmethod
    def capture(cls, device: torch.device) -> TorchState:
        """Return the state of this thread, as far as it matters for `device`."""
        cuda = device.type == "cuda"
        any_autocast, modes = _is_any_autocast_enabled(), _modes()
        return cls(
            grad=is_grad_enabled(),
            inference=is_inference_mode_enabled(),
            autocast=_autocast(device),
            any_autocast=any_autocast,
            modes=modes,
            num_function_modes=len(modes[0]),
            num_dispatch_modes=len(modes[1]),
            plain=not (any_autocast or any(modes) or cuda),
            device=device,
            device_index=torch.cuda.current_device() if cuda else None,
            stream=torch.cuda.current_stream(device) if cuda else None,
        )

    def in_force(self) -> bool:
        """Say whether this thread is in this state: whether anything that a `with` changes is changed.

        For every turn of a greenlet, so it asks no more than it must.
        """
        return (
            is_grad_enabled() is self.grad
            and is_inference_mode_enabled() is self.inference
            and _is_any_autocast_enabled() is self.any_autocast
            and _len_torch_function_stack() == self.num_function_modes
            and _len_torch_dispatch_stack() == self.num_dispatch_modes
            and (self.plain or self._rest_in_force())
        )

    def exact(self) -> bool:
        """Say the same, and also look at what has no effect yet, such as the dtype of an autocast that is off."""
        return self.in_force() and _autocast(self.device) == self.autocast

    def _rest_in_force(self) -> bool:
        return (
            (not self.any_autocast or _autocast(self.device) == self.autocast)
            and (self.num_function_modes + self.num_dispatch_modes == 0 or _modes() == self.modes)
            and (self.stream is None or self._device_in_force())
        )

    def _device_in_force(self) -> bool:
        # What `torch.cuda.current_device` and `current_stream` ask, without their Python: this runs in every turn.
        stream = self.stream
        return (
            stream is not None
            and torch._C._cuda_getDevice() == self.device_index
            and torch._C._cuda_getCurrentRawStream(stream.device_index) == stream.cuda_stream
        )

    def __enter__(self) -> None:
        """For a thread that is in this state: whatever happens in the block, it is in this state afterwards."""

    def __exit__(self, *_: object) -> None:
        if not self.in_force():  # model code set something outright, or failed on the comm stream
            torch.set_grad_enabled(self.grad)
            _set_autocast(self.autocast)
            _set_modes(self.modes)
            if self.stream is not None:
                torch.cuda.set_device(self.device_index)
                torch.cuda.set_stream(self.stream)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """For a thread in any state: put it into this one for the block, and back."""
        inference, autocast, modes = torch.is_inference_mode_enabled(), _autocast(self.device), _modes()
        with (
            nullcontext() if self.stream is None else torch.cuda.stream(self.stream),
            nullcontext() if self.device_index is None else torch.cuda.device(self.device_index),
            nullcontext() if inference is self.inference else torch.inference_mode(self.inference),
            torch.set_grad_enabled(self.grad),
        ):
            _set_autocast(self.autocast)
            _set_modes(self.modes)
            try:
                yield
            finally:
                _set_modes(modes)
                _set_autocast(autocast)


def _modes() -> Modes:
    functions = tuple(_get_function_stack_at(k) for k in range(_len_torch_function_stack()))
    return functions, tuple(_get_dispatch_stack_at(k) for k in range(_len_torch_dispatch_stack()))


def _set_modes(modes: Modes) -> None:
    if modes == _modes():
        return
    functions, dispatches = modes
    for _ in range(_len_torch_function_stack()):
        _pop_torch_function_stack()
    for mode in functions:
        _push_on_torch_function_stack(mode)
    for _ in range(_len_torch_dispatch_stack()):
        _pop_torch_dispatch_stack(None)
    for mode in dispatches:
        _push_on_torch_dispatch_stack(mode)


def _autocast(device: torch.device) -> Autocast:
    cpu = ("cpu", torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
    if device.type == "cpu":
        return torch.is_autocast_cache_enabled(), (cpu,)
    own = (device.type, torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))
    return torch.is_autocast_cache_enabled(), (own, cpu)


def _set_autocast(autocast: Autocast) -> None:
    # Not through `torch.autocast`: leaving that clears the cache of casts, which is the caller's as well.
    cache, per_kind = autocast
    torch.set_autocast_cache_enabled(cache)
    for kind, enabled, dtype in per_kind:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
