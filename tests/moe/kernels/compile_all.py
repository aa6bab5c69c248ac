"""Compiles every kernel for a GPU, on any machine: `python -m tests.moe.kernels.compile_all [CAPABILITY]`.

A program, not a test: Triton must not have been told to interpret when the kernels are imported. What the interpreter
lets pass, such as a name with two types in two branches, ends here. The public functions are called with the shapes of
Qwen3-30B-A3B between two ranks; what they would launch is recorded and compiled instead, so nothing runs and
uninitialised tensors of any size will do. Prints a line for each form; exits with 1 if one fails.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import time
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


def call_all() -> None:
    """Every kernel, in the forms that a model takes in prefill and in decode."""
    hidden, width, experts, topk, heads, kv_heads, head_dim = 2048, 768, 128, 8, 32, 4, 128
    bf16: Any = {"dtype": torch.bfloat16}
    local = experts // 2
    up = GroupedWeight(torch.empty(local, 2 * width, hidden, **bf16))
    down = GroupedWeight(torch.empty(local, hidden, width, **bf16))
    projection = GroupedWeight(torch.empty(1, (heads + 2 * kv_heads) * head_dim, hidden, **bf16))
    for rows in (1, 17, 8192):
        x = torch.empty(rows, hidden, **bf16)
        ids, weights = torch.empty(rows, topk, dtype=torch.int64), torch.empty(rows, topk)
        for num_tokens in (rows, torch.empty((), dtype=torch.int64)):
            softmax_topk(torch.empty(rows, experts, **bf16), topk, norm_topk_prob=True, num_tokens=num_tokens)
        for residual in (None, torch.empty_like(x)):
            add_rms_norm(x, residual, torch.empty(hidden, **bf16), 1e-6)
        dispatch_layout(ids, experts, 2)
        dispatch_layout(ids, 2 * experts, 64)
        cache, gain = torch.empty(1024, kv_heads, head_dim, **bf16), torch.empty(head_dim, **bf16)
        qkv = torch.empty(rows, (heads + 2 * kv_heads) * head_dim, **bf16)
        angles, slots = torch.empty(rows, head_dim // 2, **bf16), torch.empty(rows, dtype=torch.int64)
        for norm in (None, gain):
            rotate_and_cache(
                qkv, norm, norm, angles, angles, slots, cache, cache,
                num_heads=heads, num_kv_heads=kv_heads, eps=1e-6,
            )  # fmt: skip
        pages, tables = cache.unflatten(0, (-1, 16)), torch.empty(rows, 17, dtype=torch.int32)
        lens = torch.empty(rows, dtype=torch.int32)
        for splits, block in ((1, None), (4, None), (1, 32)):
            paged_decode(qkv[:, : heads * head_dim].unflatten(1, (heads, head_dim)), pages, pages, tables, lens,
                         num_splits=splits, block=block)  # fmt: skip
        for dtype in (torch.bfloat16, torch.float32):
            dense_product(x, projection, dtype)
        key_slots(torch.empty(9, dtype=torch.int32), tables, 0, 4096, 16)
        for block in (16, 32, 64, 128):
            made = make_permutation(ids, local, block)
            h = grouped_swiglu(x, made.source, up, made.tiles, ids.numel())
            weighted_sum(grouped_product(h, down, made.tiles), made.position, weights)
            tiles = padded_tiles(torch.empty(local, dtype=torch.int32), 256, block)
            padded = torch.empty(local * 256, hidden, **bf16)
            grouped_product(grouped_swiglu(padded, None, up, tiles, len(padded)), down, tiles)
        dequantise(*quantise(x))
        padded = torch.empty(local, 256, hidden, dtype=torch.float8_e4m3fn)
        dequantise(padded, torch.empty(local, hidden // 128, 256).transpose(1, 2), lens[:1].expand(local).contiguous())


def all_kernels() -> set[str]:
    """The names of all kernels that are launched."""
    modules = [
        importlib.import_module(f"moe.kernels.{module.name}") for module in pkgutil.iter_modules(kernels.__path__)
    ]
    made = [value for module in modules for value in vars(module).values() if isinstance(value, Launcher)]
    return {launcher._kernel.__name__ for launcher in made}


def main() -> int:
    capability = int(sys.argv[1]) if len(sys.argv) > 1 else 90
    forms: dict[str, Form] = {}
    record(forms)
    call_all()
    recorded = {kernel.__name__ for kernel, *_ in forms.values()}
    failed = 0
    for name in sorted(all_kernels() - recorded):
        failed += 1
        print(f"FAILED {name}: nothing here calls it")
    for name, (kernel, signature, fixed, attributes, options) in forms.items():
        start = time.perf_counter()
        source = ASTSource(kernel, signature, fixed, attributes)
        try:
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            shared = made.metadata.shared
            if shared > LARGEST_SHARED:
                raise ValueError(f"{shared} bytes of shared memory")
        except Exception as error:
            failed += 1
            print(f"FAILED {name}\n{error}")
        else:
            print(f"{time.perf_counter() - start:5.2f} s {shared:7} bytes shared  {name}")
    print(f"{len(forms)} forms for capability {capability}, {failed} failures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
