"""Causal attention of packed prompts by cuDNN, where its Python package (`nvidia-cudnn-frontend`) is installed.

Its own file because it alone knows `cudnn`. Torch reaches the same kernels for dense batches only: for packed rows it
plans anew in every call, which takes 60 ms and cannot be captured. On an H200 these take half the time of torch's flash
attention. A plan is made for a number of prompts and their longest lengths, each rounded up to a power of 2, so there
are few of them; one takes the host some 50 ms, the first one a second.

Invariants: nothing waits but for a plan; lengths and places are read on the device, so a graph may hold a call and
replay it with others; a prompt of length 0 is none; the result does not depend on what the plan was rounded up to.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import math
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe.kernels.sizes import power_of_2

MAX_ELEMENTS = 1 << 31
"""Of q, k or v, from the first row to the last: places are 32-bit numbers."""

_OLDEST = (1, 32)  # of the package: operands in a given order
_SHORTEST = 128  # a plan for less is no faster
_lock = threading.Lock()  # a handle's stream is set and used in two calls


def takes(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether this form serves: the package is there, the device is a Hopper or later, and the heads are usual ones."""
    usual = dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 128
    return usual and device.type == "cuda" and _installed() and torch.cuda.get_device_capability(device)[0] >= 9


@dataclass(frozen=True, kw_only=True)
class PackedPrompts:
    """B prompts whose rows, and keys, follow one another. Made once a forward: all layers have the same lengths."""

    query_ends: Tensor
    """[B + 1] int32 on the device: 0, then where each prompt's rows end."""
    key_ends: Tensor
    """The same for its keys; a prompt has as many, or more where it continues: its last query sees its last key."""
    longest_query: int
    longest_keys: int
    fresh: bool
    """Every prompt has as many keys as queries."""
    prepared: dict[Any, Any] = field(default_factory=dict)
    """For `attend_packed`: by the layout of its arguments, what is the same in all layers."""


def attend_packed(q: Tensor, k: Tensor, v: Tensor, prompts: PackedPrompts, out: Tensor) -> bool:
    """Write into `out`, of q's shape and contiguous; rows of no prompt stay as they are. False, and nothing is done,
    where cuDNN has no plan for this.

    q [rows, num_heads, head_dim], k and v [keys, num_kv_heads, head_dim]: heads contiguous, rows strided.
    """
    key = q.stride(0), k.stride(0), v.stride(0)
    prepared = prompts.prepared.get(key)
    if prepared is None:
        prepared = prompts.prepared[key] = _Prepared(q, k, v, prompts, out)
    return prepared(q, k, v, out)


class _Prepared:
    """A plan with the places and lengths of these prompts."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, prompts: PackedPrompts, out: Tensor) -> None:
        query_ends, key_ends = prompts.query_ends, prompts.key_ends
        self._plan = _plan_or_none(
            device_index=q.get_device(),
            dtype=q.dtype,
            num_prompts=len(query_ends) - 1,
            heads=(q.shape[1], k.shape[1], q.shape[2]),
            longest=tuple(max(_SHORTEST, power_of_2(n)) for n in (prompts.longest_query, prompts.longest_keys)),
            row_strides=(q.stride(0), k.stride(0), v.stride(0), out.stride(0)),
            fresh=prompts.fresh,
        )
        if self._plan is None:
            return
        ends = torch.stack((query_ends, key_ends, key_ends, query_ends))
        places = ends * _row_strides(q.device, tuple(rows.stride(0) for rows in (q, k, v, out)))
        lengths = ends[:2].diff(dim=1)
        self._fixed = (*places.unbind(), *lengths.unbind())  # in the order of `_NAMES`
        self._workspace = torch.empty(self._plan.workspace_bytes, dtype=torch.uint8, device=q.device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> bool:
        if self._plan is None:
            return False
        self._plan.run((q, k, v, out, *self._fixed), self._workspace)
        return True


@functools.cache
def _row_strides(device: torch.device, strides: tuple[int, ...]) -> Tensor:
    return torch.tensor(strides, dtype=torch.int32, device=device)[:, None]


_NAMES = ("q", "k", "v", "o", "q_at", "k_at", "v_at", "o_at", "q_lengths", "k_lengths")


@dataclass(frozen=True, kw_only=True)
class _Plan:
    graph: Any
    uids: tuple[int, ...]  # of `_NAMES`
    workspace_bytes: int
    device_index: int

    def run(self, tensors: tuple[Tensor, ...], workspace: Tensor) -> None:
        """Enqueue on the current stream; `tensors` in the order of `_NAMES`."""
        handle = _handle(self.device_index)
        stream = torch._C._cuda_getCurrentRawStream(self.device_index)
        with _lock:
            if handle.stream != stream:
                _cudnn().set_stream(handle, stream)
            self.graph.execute(tensors, workspace, handle=handle, tensor_uids=self.uids)


@functools.cache
def _cudnn() -> Any:
    import cudnn

    return cudnn


@functools.cache
def _installed() -> bool:
    """Whether the package is there, is that package, is new enough, and loads."""
    try:
        version = importlib.metadata.version("nvidia-cudnn-frontend")
        return tuple(map(int, version.split(".")[:2])) >= _OLDEST and hasattr(_cudnn(), "pygraph")
    except (ImportError, OSError, ValueError):  # not installed is an ImportError too
        return False


@functools.cache
def _handle(device_index: int) -> Any:
    with torch.cuda.device(device_index):
        return _cudnn().create_handle()


@functools.cache
def _plan_or_none(**shape: Any) -> _Plan | None:
    try:
        return _plan(**shape)
    except Exception as error:  # of the package's own types
        logging.getLogger(__name__).warning(
            "cuDNN has no attention for %s, so flash attention serves: %s", shape, error
        )
        return None


def _plan(
    *,
    device_index: int,
    dtype: torch.dtype,
    num_prompts: int,
    heads: tuple[int, int, int],
    longest: tuple[int, int],
    row_strides: tuple[int, int, int, int],
    fresh: bool,
) -> _Plan:
    cudnn = _cudnn()
    num_heads, num_kv_heads, head_dim = heads
    types = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}
    real = cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=types[dtype], intermediate_data_type=real, compute_data_type=real, handle=_handle(device_index)
    )

    def shape(heads: int, rows: int, row_stride: int) -> dict[str, list[int]]:
        return {
            "dim": [num_prompts, heads, rows, head_dim],
            "stride": [rows * row_stride, head_dim, row_stride, 1],
        }

    def numbers(name: str, length: int) -> Any:
        return graph.tensor(name=name, dim=[length, 1, 1, 1], stride=[1, 1, 1, 1], data_type=cudnn.data_type.INT32)

    def rows(name: str, heads: int, length: int, row_stride: int) -> Any:
        tensor = graph.tensor(name=name, data_type=types[dtype], **shape(heads, length, row_stride))
        tensor.set_ragged_offset(names[f"{name}_at"])
        return tensor

    names = {f"{name}_at": numbers(f"{name}_at", num_prompts + 1) for name in "qkvo"}
    names |= {f"{name}_lengths": numbers(f"{name}_lengths", num_prompts) for name in "qk"}
    names["q"] = rows("q", num_heads, longest[0], row_strides[0])
    names["k"] = rows("k", num_kv_heads, longest[1], row_strides[1])
    names["v"] = rows("v", num_kv_heads, longest[1], row_strides[2])
    out, _ = graph.sdpa(
        name="attention",
        q=names["q"],
        k=names["k"],
        v=names["v"],
        is_inference=True,
        attn_scale=1 / math.sqrt(head_dim),
        use_padding_mask=True,
        seq_len_q=names["q_lengths"],
        seq_len_kv=names["k_lengths"],
        use_causal_mask=fresh,
        use_causal_mask_bottom_right=not fresh,
    )
    placed = shape(num_heads, longest[0], row_strides[3])
    out.set_output(True).set_dim(placed["dim"]).set_stride(placed["stride"]).set_data_type(types[dtype])
    out.set_ragged_offset(names["o_at"])
    names["o"] = out
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    size = max(1, graph.get_workspace_size())
    uids = tuple(names[name].get_uid() for name in _NAMES)
    return _Plan(graph=graph, uids=uids, workspace_bytes=size, device_index=device_index)
