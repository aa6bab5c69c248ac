"""Tiny random models, written and answered by transformers: what the engine is compared with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SIZES = dict(
    vocab_size=260,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    eos_token_id=None,
    bos_token_id=None,
    initializer_range=0.4,  # far from uniform: greedy choices are clear
)


def build(family: str) -> Any:
    """A transformers model with seeded random weights, float32."""
    import transformers

    torch.manual_seed(0)
    if family == "mixtral":
        config = transformers.MixtralConfig(**SIZES, num_local_experts=6, num_experts_per_tok=2)
        return transformers.MixtralForCausalLM(config).eval()
    config = transformers.Qwen3MoeConfig(
        **SIZES, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, head_dim=16, norm_topk_prob=True
    )
    return transformers.Qwen3MoeForCausalLM(config).eval()


def byte_level() -> Tokenizer:
    """A tokenizer with one token a byte: every character beyond ASCII spans several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def prompts(count: int, *, seed: int = 0) -> list[list[int]]:
    """Token ids of `count` prompts of 1 to 24 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 25, (count,), generator=generator).tolist()
    return [torch.randint(0, SIZES["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


def greedy(model: Any, prompt: list[int], num_new: int) -> list[int]:
    """What transformers answers."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False,
        pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def write_prompts(file: Path, prompts: list[list[int]], **extra: Any) -> None:
    """A prompt file of token ids."""
    file.write_text("".join(json.dumps({"id": f"p{i}", "token_ids": p, **extra}) + "\n" for i, p in enumerate(prompts)))
