"""Tiny random Mixtral and Qwen3-MoE checkpoints, written and answered by transformers, and batches to feed to ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe.batch import ForwardBatch
from moe.kv_cache import KVCache

LENGTHS = (23, 1, 40, 7)  # tokens of each test request
VOCAB = 160
BLOCK = 4
BLOCKS_PER_REQUEST = 12  # room for 48 tokens

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "head_dim": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # far from uniform, so that a wrong mask, angle or expert shows
    "num_experts_per_tok": 2,
}
_MIXTRAL = {**_SIZES, "intermediate_size": 40, "num_local_experts": 5}
_QWEN = {**_SIZES, "intermediate_size": 56, "moe_intermediate_size": 24, "num_experts": 6, "head_dim": 16}


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
VARIANTS: dict[str, dict[str, Any]] = {
    "mixtral": _MIXTRAL,
    "mixtral-tied": {**_MIXTRAL, "tie_word_embeddings": True, "num_local_experts": 8},
    "mixtral-window": {**_MIXTRAL, "sliding_window": 9},
    "mixtral-one-kv-head": {**_MIXTRAL, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8},
    "mixtral-linear": {**_MIXTRAL, **_rope("linear", factor=4.0)},
    "mixtral-dynamic": {**_MIXTRAL, **_rope("dynamic", factor=4.0)},
    "mixtral-llama3": {**_MIXTRAL, **_LLAMA3},
    "qwen3": {**_QWEN, "norm_topk_prob": True},
    "qwen3-not-renormalised": {**_QWEN, "norm_topk_prob": False, "num_experts_per_tok": 3},
    "qwen3-tied-dense-biased": {
        **_QWEN,
        "tie_word_embeddings": True,
        "mlp_only_layers": [1],
        "attention_bias": True,
    },
    "qwen3-yarn": {**_QWEN, **_rope("yarn", factor=4.0, original_max_position_embeddings=16)},
    "qwen3-yarn-mscale": {
        **_QWEN,
        **_rope("yarn", factor=8.0, original_max_position_embeddings=8, mscale=0.7, mscale_all_dim=1.0, truncate=False),
    },
}


def build(name: str, *, seed: int = 0) -> Any:
    """The transformers model of a variant, float32, with random biases and norms too."""
    import transformers

    family = "Mixtral" if name.startswith("mixtral") else "Qwen3Moe"
    config = getattr(transformers, f"{family}Config")(**VARIANTS[name], eos_token_id=2, bos_token_id=1)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias") or "norm" in parameter_name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk and what transformers answers: `logits[i]` [LENGTHS[i], VOCAB] for `ids[i]` [LENGTHS[i]]."""

    path: Path
    ids: tuple[Tensor, ...]
    logits: tuple[Tensor, ...]


Checkpoints = Callable[[str], Checkpoint]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Checkpoints by the name of their variant, made once a session."""
    made: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in made:
            model, path = build(name), tmp_path_factory.mktemp(name)
            model.save_pretrained(path, max_shard_size="100KB" if name.startswith("qwen3") else "1GB")
            ids = make_ids()
            with torch.inference_mode():
                logits = tuple(model(one[None]).logits[0] for one in ids)
            made[name] = Checkpoint(path, ids, logits)
        return made[name]

    return get


def make_ids() -> tuple[Tensor, ...]:
    """The tokens of the test requests."""
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(0, VOCAB, (n,), generator=generator) for n in LENGTHS)


def make_kv(config: Any) -> KVCache:
    """A cache with room for the test requests."""
    return KVCache(config, BLOCKS_PER_REQUEST * len(LENGTHS), BLOCK, torch.float32)


Chunk = tuple[int, int, int]  # request, first new token, end


def make_batch(ids: Sequence[Tensor], chunks: Sequence[Chunk]) -> ForwardBatch:
    """The batch that runs tokens [first, end) of each request; blocks of a request are scattered over the cache."""
    order = torch.randperm(BLOCKS_PER_REQUEST * len(ids), generator=torch.Generator().manual_seed(5))
    tables = order.view(len(ids), BLOCKS_PER_REQUEST).int()
    if not chunks:
        return ForwardBatch.empty()
    positions = [torch.arange(first, end) for _, first, end in chunks]
    slots = [tables[r].long()[p // BLOCK] * BLOCK + p % BLOCK for (r, _, _), p in zip(chunks, positions, strict=True)]
    return ForwardBatch(
        input_ids=torch.cat([ids[r][first:end] for r, first, end in chunks]),
        positions=torch.cat(positions),
        slot_mapping=torch.cat(slots),
        block_tables=tables[[r for r, _, _ in chunks]],
        query_lens=np.array([end - first for _, first, end in chunks], np.int32),
        seq_lens=np.array([end for _, _, end in chunks], np.int32),
        num_tokens=sum(end - first for _, first, end in chunks),
    )


def expected_rows(logits: Sequence[Tensor], chunks: Sequence[Chunk]) -> Tensor:
    """The rows of transformers' answer that belong to a batch."""
    return torch.cat([logits[r][first:end] for r, first, end in chunks])


WHOLE: list[list[Chunk]] = [[(r, 0, n) for r, n in enumerate(LENGTHS)]]
ONE_BY_ONE: list[list[Chunk]] = [[(2, 0, 1)], *([(2, i, i + 1)] for i in range(1, LENGTHS[2]))]
CHUNKED: list[list[Chunk]] = [[(0, 0, 9), (2, 0, 5)], [(2, 5, 6), (0, 9, 23)], [(2, 6, 40)]]
MIXED: list[list[Chunk]] = [
    [(0, 0, 20), (1, 0, 1)],
    [(0, 20, 21), (2, 0, 30), (3, 0, 6)],
    [(2, 30, 38), (0, 21, 22), (3, 6, 7)],
    [(2, 38, 39), (0, 22, 23)],
    [(2, 39, 40)],
]
SCHEDULES = {"prefill": WHOLE, "chunked": CHUNKED, "decode": ONE_BY_ONE, "mixed": MIXED}
