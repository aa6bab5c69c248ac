"""When a launch may reuse a compiled form: what Triton specialises on must tell forms apart; a stand-in compiles."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from triton.compiler import CompiledKernel

from moe.kernels.launch import Launcher


class Compiled(CompiledKernel):
    """What a compiler would give; notes with what it is launched."""

    function, packed_metadata, module = "function", "metadata", None

    def __init__(self, launched: list[tuple[Any, ...]]) -> None:
        self._launched = launched

    @property
    def run(self) -> Any:
        return lambda *arguments: self._launched.append(arguments)


class Kernel:
    """A stand-in for `triton.jit`: each `kernel[grid](...)` is a compilation."""

    arg_names: ClassVar = ["x", "number", "scale", "BLOCK"]
    __name__ = "kernel"

    def __init__(self) -> None:
        self.num_compiled = 0
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        def compile_and_launch(*_: Any, **__: Any) -> Compiled:
            self.num_compiled += 1
            return Compiled(self.launched)

        return compile_and_launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100 + device, raising=False)
    return Kernel()


BASE = torch.empty(64)


def test_the_same_kinds_share_a_form_and_addresses_are_passed(kernel):
    launch = Launcher(kernel)
    for number in (48, 32, 160):
        launch((7, 1, 1), BASE, number, 0.5, BLOCK=8)
    assert kernel.num_compiled == 1
    none = (None, None, None)
    assert kernel.launched == [
        (7, 1, 1, 100, "function", "metadata", *none, BASE.data_ptr(), number, 0.5, 8) for number in (32, 160)
    ]


@pytest.mark.parametrize(
    ("tensor", "number", "block"),
    [
        (BASE[1:], 16, 8),  # another alignment
        (BASE.double(), 16, 8),
        (BASE, 1, 8),
        (BASE, 17, 8),
        (BASE, 1 << 32, 8),  # 64 bits
        (BASE, BASE, 8),
        (BASE, True, 8),
        (BASE, 16, 16),
    ],
)
def test_other_kinds_do_not(tensor, number, block, kernel):
    launch = Launcher(kernel)
    for _ in range(2):
        launch((1, 1, 1), BASE, 16, 0.5, BLOCK=8)
        launch((1, 1, 1), tensor, number, 0.5, BLOCK=block)
    assert kernel.num_compiled == 2
    assert len(kernel.launched) == 2


def test_one_is_not_any_other_odd_number(kernel):
    """Triton puts it into the code."""
    launch = Launcher(kernel)
    for number in (17, 1, 3, 1):
        launch((1, 1, 1), BASE, number, 0.5, BLOCK=8)
    assert kernel.num_compiled == 2


def test_another_device_has_forms_of_its_own(kernel, monkeypatch):
    launch = Launcher(kernel)
    for device in (0, 1, 0, 1):
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda device=device: device)
        launch((1, 1, 1), BASE, 16, 0.5, BLOCK=8)
    assert kernel.num_compiled == 2
    assert [arguments[3] for arguments in kernel.launched] == [100, 101]


def test_constants_in_another_order_are_refused(kernel):
    with pytest.raises(TypeError, match="in this order"):
        Launcher(kernel)((1, 1, 1), BASE, 16, BLOCK=8, scale=0.5)


class Width(int):
    """A kind of number whose value a compiler may look at."""


@pytest.mark.parametrize("argument", [Width(5), (1, 2), "text"])
def test_kinds_that_nobody_has_thought_of_are_refused(argument, kernel):
    with pytest.raises(TypeError, match="is given a"):
        Launcher(kernel)((1, 1, 1), BASE, argument, 0.5, BLOCK=8)
