"""Where the C stack of this thread stands, which Python does not tell.

A file of its own because it is a trick: C's `_setjmp` writes the registers into a buffer, the stack pointer among them,
and does nothing else as long as nobody jumps back. (glibc disguises the pointer, by a secret that stays the same while
the process runs; the marks here are only compared.)
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable

_STACK_POINTER = {"x86_64": 6, "aarch64": 13}
"""Which word of the buffer, by machine."""

Mark = Callable[[], int | None]


def make_mark() -> Mark:
    """A function whose results are equal where the stack stands at the same place, in the same thread.

    It gives None where that cannot be found out: then assume that the stack stands somewhere else.
    """
    word = _STACK_POINTER.get(platform.machine())
    save = getattr(ctypes.CDLL(None), "_setjmp", None) if platform.system() == "Linux" else None
    if word is None or save is None:
        return lambda: None
    registers = (ctypes.c_uint64 * 64)()  # more than any `jmp_buf`
    save.argtypes, save.restype = [ctypes.c_void_p], None
    address = ctypes.addressof(registers)

    def mark() -> int:
        save(address)
        return registers[word]

    return mark
