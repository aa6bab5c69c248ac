"""Our models against transformers' on the same checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe.all2all.registry import make_all2all
from moe.config import read_config
from moe.models import Model, load_model
from tests.moe.checkpoints import (
    LENGTHS,
    SCHEDULES,
    VARIANTS,
    Checkpoint,
    Checkpoints,
    expected_rows,
    make_batch,
    make_kv,
)

TOLERANCE = {"rtol": 0.0, "atol": 1e-4}


def load(checkpoint: Checkpoint, group: Any = None, **options: Any) -> Model:
    config = read_config(checkpoint.path)
    all2all = make_all2all(
        "auto", group=group, device=torch.device("cpu"), config=config, max_tokens_per_rank=sum(LENGTHS)
    )
    return load_model(checkpoint.path, all2all=all2all, progress=False, **options)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", VARIANTS)
def test_logits(checkpoints: Checkpoints, name: str, schedule: str) -> None:
    checkpoint = checkpoints(name)
    model = load(checkpoint)
    kv = make_kv(model.config)
    for chunks in SCHEDULES[schedule]:
        logits = model.compute_logits(model(make_batch(checkpoint.ids, chunks), kv))
        torch.testing.assert_close(logits, expected_rows(checkpoint.logits, chunks), **TOLERANCE)
