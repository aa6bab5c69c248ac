"""An engine with graphs on a CPU: the emulator in the place of CUDA's, on one rank or on each of a pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dbo.config import DBOConfig
from dbo.graphs.mode import CUDAGraphMode
from launch.config import EngineOptions
from launch.engine import Engine
from launch.graphs import Graphs
from launch.mesh import Mesh
from launch.session import load_engine, resolve
from moe.all2all.base import Dispatched
from moe.attention.base import AttentionBackend
from moe.attention.rotary import rotate
from moe.attention.torch_sdpa import TorchAttention
from moe.batch import ForwardBatch
from moe.config import ModelConfig, read_config
from moe.kv_cache import KVCache
from moe.models.decoder import Model
from tests.dbo.graphs.emulator import Emulator
from tests.launch.engine_cases import BASE, OPTIONS, Prompts, Report, run_arm


@dataclass
class GraphReport:
    """What one arm did on one rank."""

    report: Report
    steps: dict[tuple[str, int], int]  # from graphs, by mode and number of ubatches
    num_graphs: int
    num_captures_after: int  # graphs captured after the session


def watch(model: Model, emulator: Emulator) -> None:
    """Have the emulator see what `model` does, in whichever thread."""

    class Watched(Model):
        def __call__(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
            with emulator.watching():
                return super().__call__(batch, kv)

    model.__class__ = Watched


def with_graphs(engine: Engine, emulator: Emulator, dbo: DBOConfig, mode: str, sizes: Sequence[int]) -> Graphs:
    """Capture graphs for `dbo` and let the engine use them."""
    engine.graphs = Graphs(engine, dbo, CUDAGraphMode.parse(mode), emulator, sizes=sizes, debug=True,
                          offloader=engine.offloader)  # fmt: skip
    with emulator.watching():
        engine.graphs.capture()
    return engine.graphs


def run_graphs(
    mesh: Mesh,
    directory: str,
    prompts: Prompts,
    arm: Mapping[str, Any],
    mode: str = "piecewise",
    sizes: Sequence[int] = (1, 4, 9, 16, 32),
    options: Mapping[str, Any] | None = None,
    capturable: bool = False,
    attention: AttentionBackend | None = None,
) -> tuple[Report, GraphReport]:
    """The same requests eagerly and from graphs."""
    chosen = EngineOptions(model=directory, **{**OPTIONS, **(options or {})})
    engine = load_engine(chosen, resolve(chosen, read_config(directory)), mesh, model=Path(directory))
    emulator = Emulator()
    watch(engine.model, emulator)
    if attention is not None:
        engine.model.attention = attention
    if mode.startswith("full") and capturable:
        make_capturable_on_cpu(engine.model)
    eager = run_arm(engine, prompts, {**BASE, **arm})
    graphs = with_graphs(engine, emulator, DBOConfig(**{**BASE, **arm}), mode, sizes)
    captured = len(emulator.graphs)
    report = run_arm(engine, prompts, {**BASE, **arm})
    steps = {(m.name.lower(), num): count for (m, num), count in graphs.steps.items()}
    found = GraphReport(report, steps, captured, len(emulator.graphs) - captured)
    engine.close()
    assert emulator.num_live == 0
    return eager, found


def on_ranks(ctx: Any, directory: str, prompts_by_rank: Sequence[Prompts], *args: Any) -> tuple[Report, GraphReport]:
    """`run_graphs` on a rank of a pool."""
    torch.set_num_threads(1)
    with ctx.mesh() as mesh:
        return run_graphs(mesh, directory, prompts_by_rank[ctx.rank], *args)


# ----------------------------------------------------------------------- what a CPU lacks: parts that can be captured


class StoringAttention(TorchAttention):
    """A `StoringPlan`: what `CudaAttention` is on a GPU."""

    def store(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, angles: tuple[Tensor, Tensor]
    ) -> Sequence[Tensor]:
        heads = qkv.unflatten(-1, (-1, self._head_dim))
        sizes = [heads.shape[1] - 2 * self._num_kv_heads, self._num_kv_heads, self._num_kv_heads]
        q, k, v = heads.split_with_sizes(sizes, 1)
        for part, weight in ((q, q_norm), (k, k_norm)):
            part.copy_(rotate(part if weight is None else self._norm(part, weight), angles))
        return q, k, v

    def attend_stored(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> Tensor:
        out = q.new_empty(len(q), q.shape[1] * q.shape[2]) if out is None else out
        self._attend(layer, q, k, v, out.view(q.shape))
        return out


class DecodeOnDevice:
    """An `AttentionBackend` that reads lengths in tensors alone for uniform decodes, and is torch's own otherwise."""

    captures = "decode"

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def __call__(self, config: ModelConfig, batch: ForwardBatch, kv: KVCache) -> Any:
        if batch.fixed is None:
            return TorchAttention(config, batch, kv)
        assert batch.fixed.uniform_decode
        return _DecodePlan(config, batch, kv)


class _DecodePlan:
    def __init__(self, config: ModelConfig, batch: ForwardBatch, kv: KVCache) -> None:
        self._config, self._batch, self._kv = config, batch, kv

    def attend(self, layer: int, qkv: Tensor, q_norm: Any, k_norm: Any, angles: tuple[Tensor, Tensor]) -> Tensor:
        c, fixed = self._config, self._batch.fixed
        assert fixed is not None
        q, k, v = qkv.unflatten(-1, (-1, c.head_dim)).split([c.num_heads, c.num_kv_heads, c.num_kv_heads], 1)
        q, k = (
            rotate(t if w is None else F.rms_norm(t, w.shape, w, c.rms_norm_eps), angles)
            for t, w in ((q, q_norm), (k, k_norm))
        )
        self._kv.write(layer, self._batch.slot_mapping, k, v)
        tables = self._batch.block_tables.long()
        keys, values = (t.unflatten(0, (-1, self._kv.block_size))[tables].flatten(1, 2) for t in self._kv.layer(layer))
        seen = torch.arange(keys.shape[1]) < fixed.seq_lens[:, None].clamp(min=1)
        out = F.scaled_dot_product_attention(
            q.unsqueeze(2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=seen[:, None, None], enable_gqa=True
        )
        return out.flatten(1)


class DenseExperts:
    """An `Experts` that runs every row through every expert, so that nobody has to count."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __call__(self, received: Dispatched) -> Tensor:
        assert received.topk_idx is not None
        assert received.topk_weights is not None
        total = torch.zeros_like(received.x)
        for e, (gate_up, down) in enumerate(zip(self._inner._gate_up, self._inner._down, strict=True)):
            gate, up = gate_up(received.x).chunk(2, dim=-1)
            weight = received.topk_weights.masked_fill(received.topk_idx != e, 0).sum(-1, keepdim=True)
            total = total + weight * down(F.silu(gate) * up)
        return total


def make_capturable_on_cpu(model: Model) -> None:
    model.attention = DecodeOnDevice(model.config)
    for layer in model.moe_layers:
        layer.experts = DenseExperts(layer.experts)
