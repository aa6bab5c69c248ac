"""An engine with graphs on a CPU: the emulator in the place of CUDA's, on one rank or on each of a pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dbo.config import DBOConfig
from dbo.graphs.mode import CUDAGraphMode
from launch.config import EngineOptions
from launch.engine import Engine
from launch.graphs import Graphs
from launch.mesh import Mesh
from launch.session import load_engine, resolve
from moe.batch import ForwardBatch
from moe.config import read_config
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
) -> tuple[Report, GraphReport]:
    """The same requests eagerly and from graphs."""
    chosen = EngineOptions(model=directory, **{**OPTIONS, **(options or {})})
    engine = load_engine(chosen, resolve(chosen, read_config(directory)), mesh, model=Path(directory))
    emulator = Emulator()
    watch(engine.model, emulator)
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
