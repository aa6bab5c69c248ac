"""Qwen3-MoE: q/k norms, a head width of its own, some layers possibly dense, renormalisation as configured."""

from __future__ import annotations

from moe.config import HFConfig, ModelConfig
from moe.models.family import Family


def parse(raw: HFConfig) -> ModelConfig:
    """The ModelConfig of a Qwen3-MoE `config.json`."""
    num_layers, step = raw.integer("num_hidden_layers"), raw.integer("decoder_sparse_step", default=1)
    listed = set(raw.get("mlp_only_layers", default=[]))
    dense = {i for i in range(num_layers) if (i + 1) % step or i in listed}
    return ModelConfig(
        family="qwen3_moe",
        **raw.common(default_theta=1e4),
        rms_norm_eps=raw.number("rms_norm_eps", default=1e-6),
        qk_norm=True,
        attention_bias=bool(raw.get("attention_bias", default=False)),
        num_experts=raw.integer("num_experts", "num_local_experts"),
        num_topk=raw.integer("num_experts_per_tok"),
        expert_width=raw.integer("moe_intermediate_size"),
        norm_topk_prob=bool(raw.get("norm_topk_prob", default=False)),
        dense_layers=frozenset(dense),
        dense_width=raw.integer("intermediate_size") if dense else 0,
        sliding_window=raw.optional_integer("sliding_window") if raw.get("use_sliding_window", default=False) else None,
    )


FAMILY = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    parse=parse,
    moe_module="mlp",
    expert_names=("gate_proj", "up_proj", "down_proj"),
)
