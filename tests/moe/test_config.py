"""Reading `config.json`: published shapes, both spellings, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dbo.errors import ConfigError
from moe.config import named_shape, read_config

QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
    "sliding_window": None,
    "use_sliding_window": False,
    "hidden_act": "silu",
}


def read(tmp_path: Path, **changes: Any) -> Any:
    keys = {name: value for name, value in {**QWEN3_30B, **changes}.items() if value != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    return read_config(tmp_path)


def test_published_shape(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [151645, 151643]}')
    assert read(tmp_path) == named_shape("qwen3-30b-a3b")


def test_the_newer_spelling(tmp_path: Path) -> None:
    changes = {
        "rope_theta": "absent",
        "rope_scaling": "absent",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "torch_dtype": "absent",
        "dtype": "float16",
        "num_experts": "absent",
        "num_local_experts": 128,
    }
    config = read(tmp_path, **changes)
    assert (config.rope_theta, config.rope_scaling, config.num_experts) == (1e6, None, 128)
    assert config.dtype == torch.float16


def test_dense_layers(tmp_path: Path) -> None:
    config = read(tmp_path, decoder_sparse_step=2, mlp_only_layers=[1], num_hidden_layers=6)
    assert config.dense_layers == {0, 1, 2, 4}
    assert config.dense_width == 6144


def test_sliding_window_only_where_used(tmp_path: Path) -> None:
    assert read(tmp_path, sliding_window=4096).sliding_window is None
    assert read(tmp_path, sliding_window=4096, use_sliding_window=True).sliding_window == 4096


def test_yarn_makes_the_context_longer(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert read(tmp_path, rope_scaling=scaling).max_position == 131072


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling='longrope' .* default, linear"),
        ({"rope_scaling": {"type": "yarn"}}, r"rope_scaling\.factor=None .* a number"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, r"rope_scaling\.low_freq_factor"),
        ({"partial_rotary_factor": 0.25}, r"partial_rotary_factor=0\.25"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' .* 'silu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn'"),
        ({"hidden_size": "absent"}, "hidden_size=None .* an integer"),
        ({"num_key_value_heads": 5}, "num_kv_heads=5 .* divisor"),
        ({"num_experts_per_tok": 129}, "num_topk=129 .* 1 to num_experts=128"),
        ({"num_attention_heads": 0, "head_dim": None}, r"num_heads=0 .* 1 or more; see .*config\.json"),
        ({"rope_scaling": "yarn"}, "rope_parameters='yarn' .* an object"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, r"rope_scaling\.factor=0 .* above 0"),
        ({"rope_theta": "big"}, "rope_theta='big' .* a number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small' .* a number"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>' .* a token id"),
        ({"use_sliding_window": True, "sliding_window": "wide"}, "sliding_window='wide' .* an integer"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window=0 .* 1 or more"),
        ({"head_dim": 127}, "head_dim=127 .* even"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM' .* MixtralForCausalLM or Qwen3MoeForCausalLM"),
        (
            {"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 2048, "kv_lora_rank": 512},
            "DeepseekV32ForCausalLM' .* needs a sparse attention indexer, multi-head latent attention",
        ),
        (
            {"architectures": ["Qwen3NextForCausalLM"], "linear_num_key_heads": 16},
            "Qwen3NextForCausalLM' .* needs linear attention layers",
        ),
        (
            {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": {"linear_num_key_heads": 16}},
            "Qwen3_5MoeForConditionalGeneration' .* needs linear attention layers",
        ),
    ],
)
def test_refused_by_name(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        read(tmp_path, **changes)


@pytest.mark.parametrize("content", [None, "{", "[]", "[" * 100_000])
def test_unreadable(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)


def test_unknown_shape() -> None:
    with pytest.raises(ConfigError, match="qwen3-30b-a3b"):
        named_shape("qwen3")
