"""Compiles every kernel for a GPU, on any machine: `python -m tests.moe.kernels.compile_all [CAPABILITY]`.

A program, not a test: Triton must not have been told to interpret when the kernels are imported. What the interpreter
lets pass, such as a name with two types in two branches or more shared memory than there is, ends here. The public
functions are called with the shapes of several models between two ranks; what they would launch is recorded and
compiled instead, so nothing runs and uninitialised tensors of any size will do. Prints a line for each form; exits with
1 if one fails.
"""

from __future__ import annotations

import importlib
import multiprocessing
import pkgutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from moe import kernels
from moe.kernels.dense import dense_product
from moe.kernels.fp8 import dequantise, quantise
from moe.kernels.grouped import GroupedWeight, grouped_product, grouped_swiglu
from moe.kernels.key_slots import key_slots
from moe.kernels.launch import Launcher
from moe.kernels.layout import dispatch_layout
from moe.kernels.norm import add_rms_norm
from moe.kernels.paged_decode import paged_decode
from moe.kernels.permute import make_permutation, padded_tiles
from moe.kernels.rope import rotate_and_cache
from moe.kernels.topk import softmax_topk
from moe.kernels.weighted_sum import weighted_sum

BF16: Any = {"dtype": torch.bfloat16}
LARGEST_SHARED = 227 << 10  # bytes of a block, of capabilities 9.0 and 10.0

Form = tuple[Any, dict[str, str], dict[str, Any], dict[tuple[int, ...], Any], dict[str, int]]


def record(forms: dict[str, Form]) -> None:
    """From now on launches put what they would compile into `forms`."""

    def note(
        self: Launcher, form: Any, grid: Any, arguments: Any, num_warps: int, num_stages: int, constants: Any
    ) -> None:
        kernel = self._kernel
        names = kernel.arg_names
        signature, fixed, attributes = {}, dict(constants), {}
        for place, (name, argument) in enumerate(zip(names, arguments, strict=False)):
            signature[name] = mangle_type(argument)
            if type(argument) is int and argument == 1:
                signature[name], fixed[name] = "constexpr", 1
            elif isinstance(argument, Tensor | int) and not address_or_number(argument) & 15:
                attributes[(place,)] = [["tt.divisibility", 16]]
        signature |= dict.fromkeys(constants, "constexpr")
        assert list(signature) == names, f"{kernel.__name__} takes {names}"
        options = {"num_warps": num_warps, "num_stages": num_stages}
        name = f"{kernel.__name__} {list(signature.values())} {fixed} {attributes} {options}"
        forms[name] = kernel, signature, fixed, attributes, options

    Launcher._compile = note  # type: ignore[method-assign]


def address_or_number(argument: Tensor | int) -> int:
    return argument.data_ptr() if isinstance(argument, Tensor) else argument


@dataclass(frozen=True)
class Shape:
    """Of a model's layer. `local`: experts of a rank, between two."""

    hidden: int
    width: int
    experts: int
    topk: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def local(self) -> int:
        return self.experts // 2


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8, 32, 4, 128),
    "demo": Shape(576, 1536, 8, 2, 9, 3, 64),
    "mixtral-8x7b": Shape(4096, 14336, 8, 2, 32, 8, 128),
    "gpt-oss-120b": Shape(2880, 2880, 128, 4, 64, 8, 64),
    "deepseek-v3": Shape(7168, 2048, 256, 8, 128, 8, 128),
    "tiny": Shape(64, 96, 2, 1, 4, 2, 16),
}


def call_all() -> None:
    """Every kernel, in the forms that models take: one in prefill and decode, with all tiles, the others in prefill."""
    for name, shape in SHAPES.items():
        first = name == "qwen3-30b-a3b"
        for rows in (1, 17, 8192) if first else (8192,):
            call(shape, rows, (16, 32, 64, 128) if first else (16, 64, 128))
    for experts, ranks in ((16, 2), (32, 4), (64, 8), (160, 8), (256, 64), (512, 8)):
        dispatch_layout(torch.empty(8192, 8, dtype=torch.int64), experts, ranks)


def call(s: Shape, rows: int, blocks: Sequence[int]) -> None:
    """With so many tokens, and experts' tiles of so many rows."""
    up = GroupedWeight(torch.empty(s.local, 2 * s.width, s.hidden, **BF16))
    down = GroupedWeight(torch.empty(s.local, s.hidden, s.width, **BF16))
    projection = GroupedWeight(torch.empty(1, (s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden, **BF16))
    x = torch.empty(rows, s.hidden, **BF16)
    ids, weights = torch.empty(rows, s.topk, dtype=torch.int64), torch.empty(rows, s.topk)
    for num_tokens in (rows, torch.empty((), dtype=torch.int64)):
        softmax_topk(torch.empty(rows, s.experts, **BF16), s.topk, norm_topk_prob=True, num_tokens=num_tokens)
    for residual in (None, torch.empty_like(x)):
        add_rms_norm(x, residual, torch.empty(s.hidden, **BF16), 1e-6)
    dispatch_layout(ids, s.experts, 2)
    cache, gain = torch.empty(1024, s.kv_heads, s.head_dim, **BF16), torch.empty(s.head_dim, **BF16)
    qkv = torch.empty(rows, (s.heads + 2 * s.kv_heads) * s.head_dim, **BF16)
    angles, slots = torch.empty(rows, s.head_dim // 2, **BF16), torch.empty(rows, dtype=torch.int64)
    for norm in (None, gain):
        rotate_and_cache(
            qkv, norm, norm, angles, angles, slots, cache, cache,
            num_heads=s.heads, num_kv_heads=s.kv_heads, eps=1e-6,
        )  # fmt: skip
    pages, tables = cache.unflatten(0, (-1, 16)), torch.empty(rows, 17, dtype=torch.int32)
    lens = torch.empty(rows, dtype=torch.int32)
    queries = qkv[:, : s.heads * s.head_dim].unflatten(1, (s.heads, s.head_dim))
    for splits, block in ((1, None), (4, None), (1, 32)):
        paged_decode(queries, pages, pages, tables, lens, num_splits=splits, block=block)
    for dtype in (torch.bfloat16, torch.float32):
        dense_product(x, projection, dtype)
    key_slots(torch.empty(9, dtype=torch.int32), tables, 0, 4096, 16)
    for block in blocks:
        made = make_permutation(ids, s.local, block)
        h = grouped_swiglu(x, made.source, up, made.tiles, ids.numel())
        weighted_sum(grouped_product(h, down, made.tiles), made.position, weights)
        tiles = padded_tiles(torch.empty(s.local, dtype=torch.int32), 256, block)
        padded = torch.empty(s.local * 256, s.hidden, **BF16)
        grouped_product(grouped_swiglu(padded, None, up, tiles, len(padded)), down, tiles)
    if s.hidden % 128 == 0:
        dequantise(*quantise(x))
        values = torch.empty(s.local, 256, s.hidden, dtype=torch.float8_e4m3fn)
        counts = lens[:1].expand(s.local).contiguous()
        dequantise(values, torch.empty(s.local, s.hidden // 128, 256).transpose(1, 2), counts)


def all_kernels() -> set[str]:
    """The names of all kernels that are launched."""
    modules = [
        importlib.import_module(f"moe.kernels.{module.name}") for module in pkgutil.iter_modules(kernels.__path__)
    ]
    made = [value for module in modules for value in vars(module).values() if isinstance(value, Launcher)]
    return {launcher._kernel.__name__ for launcher in made}


def compiled(capability: int, form: Form) -> tuple[bool, str]:
    """Whether it can be, and what it takes or why not."""
    kernel, signature, fixed, attributes, options = form
    start = time.perf_counter()
    try:
        source = ASTSource(kernel, signature, fixed, attributes)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    except Exception as error:
        return False, str(error)
    shared = made.metadata.shared
    return shared <= LARGEST_SHARED, f"{time.perf_counter() - start:5.2f} s {shared:7} bytes of shared memory"


FORMS: dict[str, Form] = {}


def compiled_by_name(task: tuple[int, str]) -> tuple[bool, str]:
    """In another process, which has the forms: they cannot be sent."""
    capability, name = task
    return compiled(capability, FORMS[name])


def main() -> int:
    capability = int(sys.argv[1]) if len(sys.argv) > 1 else 90
    record(FORMS)
    call_all()
    recorded = {kernel.__name__ for kernel, *_ in FORMS.values()}
    failed = 0
    for name in sorted(all_kernels() - recorded):
        failed += 1
        print(f"FAILED {name}: nothing here calls it")
    with multiprocessing.get_context("fork").Pool() as pool:
        results = pool.imap(compiled_by_name, [(capability, name) for name in FORMS])
        for name, (good, said) in zip(FORMS, results, strict=True):
            failed += not good
            print(f"{said}  {name}" if good else f"FAILED {name}\n{said}")
    print(f"{len(FORMS)} forms for capability {capability}, {failed} failures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
