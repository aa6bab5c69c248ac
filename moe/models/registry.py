"""Which family a `config.json` belongs to, and why another one cannot run.

Its own file so that a new family is one new module and one line in `FAMILIES`.
"""

from __future__ import annotations

from dbo.errors import ConfigError
from moe.config import HFConfig
from moe.models import mixtral, qwen3_moe
from moe.models.family import Family

FAMILIES: tuple[Family, ...] = (mixtral.FAMILY, qwen3_moe.FAMILY)


def find_family(raw: HFConfig) -> Family:
    """The family that `architectures` or `model_type` of a config.json names. Raises ConfigError if none does."""
    architectures = raw.get("architectures", default=[])
    for family in FAMILIES:
        if family.architecture in architectures or (not architectures and raw.get("model_type") == family.name):
            return family
    missing = _unsupported(raw)
    raise ConfigError(
        "architectures",
        ", ".join(architectures) or raw.get("model_type", default="(none)"),
        " or ".join(family.architecture for family in FAMILIES),
        f"{raw.file} needs {', '.join(missing)}, which is not implemented" if missing else f"see {raw.file}",
    )


def family_named(name: str) -> Family:
    """The family with this `ModelConfig.family`."""
    for family in FAMILIES:
        if family.name == name:
            return family
    raise ConfigError("family", name, ", ".join(f.name for f in FAMILIES), "use a family of moe.models.registry")


def _unsupported(raw: HFConfig) -> list[str]:
    """What a config of another family asks for, in words, read off the keys that published models use for it."""
    keys = {**raw.keys, **(raw.get("text_config", default={}))}
    signs = {
        "index_topk": "a sparse attention indexer",
        "kv_lora_rank": "multi-head latent attention",
        "linear_num_key_heads": "linear attention layers",
        "attn_output_gate": "an attention output gate",
        "n_group": "group-limited routing",
        "shared_expert_intermediate_size": "a shared expert",
        "quantization_config": "quantized weights",
        "vision_config": "image input",
    }
    return [what for key, what in signs.items() if keys.get(key)]
