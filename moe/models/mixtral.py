"""Mixtral: every layer routed, chosen weights always renormalised, optionally a sliding window."""

from __future__ import annotations

from moe.config import HFConfig, ModelConfig
from moe.models.family import Family


def parse(raw: HFConfig) -> ModelConfig:
    """The ModelConfig of a Mixtral `config.json`."""
    return ModelConfig(
        family="mixtral",
        **raw.common(default_theta=1e6),
        rms_norm_eps=raw.number("rms_norm_eps", default=1e-5),
        num_experts=raw.integer("num_local_experts", "num_experts"),
        num_topk=raw.integer("num_experts_per_tok"),
        expert_width=raw.integer("intermediate_size"),
        sliding_window=raw.optional_integer("sliding_window"),
    )


FAMILY = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    parse=parse,
    moe_module="block_sparse_moe",
    expert_names=("w1", "w3", "w2"),
)
