"""What a model is: `ModelConfig`, and the reading of a Hugging Face `config.json` into one.

Its own file because everything (weights, KV cache, engine, reports) asks these questions of a model, and nobody
else should know how a published `config.json` spells the answers. The spelling of one family lives in
`moe/models/<family>.py`; what all of them share (rope scaling, dtype, sliding window, end tokens) is read here.

Invariants: a `ModelConfig` is complete and consistent once it exists; anything in a `config.json` that would change
the result and is not implemented is refused by name, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dbo.errors import ConfigError

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only mixture-of-experts language model. Widths are in elements, lengths in tokens."""

    family: str
    vocab_size: int
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None  # None = plain rotary; else has `rope_type`, one of ROPE_KINDS
    max_position: int  # longest context the model is made for
    tie_embeddings: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    num_experts: int
    num_topk: int
    expert_width: int
    shared_expert_width: int = 0  # 0 = no shared expert
    norm_topk_prob: bool = True  # the chosen experts' probabilities are divided by their sum
    dense_layers: frozenset[int] = frozenset()  # layers with one ordinary MLP of `dense_width` instead of experts
    dense_width: int = 0
    sliding_window: int | None = None  # a token sees itself and the `sliding_window - 1` tokens before it
    eos_token_ids: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16  # what the checkpoint stores
    batch_invariant: bool = False
    """A token's hidden state and logits are, bit for bit, a function of its own request alone, for a given number of
    ranks and device: whatever is in its batch, however that is cut or padded. No checkpoint says so; whoever runs it
    does. Slower."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_position"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            "num_kv_heads",
            self.num_kv_heads,
            f"a divisor of num_heads={self.num_heads}",
        )
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even (rotary embeddings turn pairs)")
        if self.sliding_window is not None:
            _require(self.sliding_window >= 1, "sliding_window", self.sliding_window, "1 or more, or null")
        if len(self.dense_layers) < self.num_layers:
            _require(self.num_experts >= 1, "num_experts", self.num_experts, "1 or more")
            _require(self.expert_width >= 1, "expert_width", self.expert_width, "1 or more")
            _require(
                1 <= self.num_topk <= self.num_experts,
                "num_topk",
                self.num_topk,
                f"1 to num_experts={self.num_experts}",
            )
        if self.dense_layers:
            _require(self.dense_width >= 1, "dense_width", self.dense_width, "1 or more where layers are dense")


def read_config(directory: str | Path) -> ModelConfig:
    """Read `config.json` (and the end tokens of `generation_config.json`) of a Hugging Face model directory.

    Raises ConfigError for a missing or malformed file, an unknown architecture, and every setting that is not
    implemented; the message names the file, the key and what would be accepted.
    """
    from moe.models.registry import find_family  # the families import this module

    raw = HFConfig.read(Path(directory) / "config.json")
    try:
        return find_family(raw).parse(raw)
    except ConfigError as error:
        if error.remedy:
            raise
        raise raw.error(error.field, error.value, error.allowed) from None  # a check of ModelConfig knows no file


def named_shape(name: str) -> ModelConfig:
    """A shape for runs with random weights (`load_format="dummy"`): a published model's, or one made for study.

    `shape_note` tells where a shape differs from its model. `tiny` runs anywhere in milliseconds. In `link` a core
    takes about as long to compute a layer as a 400 Mbit/s link takes to carry its messages, in float32: the case in
    which overlap has most to gain.
    """
    shapes = _shapes()
    _require(name in shapes, "shape", name, ", ".join(shapes))
    return shapes[name]


def _shapes() -> dict[str, ModelConfig]:
    qwen3: dict[str, Any] = {
        "family": "qwen3_moe",
        "vocab_size": 151936,
        "num_kv_heads": 4,
        "head_dim": 128,
        "qk_norm": True,
        "num_experts": 128,
        "num_topk": 8,
        "eos_token_ids": (151645, 151643),
    }
    study: dict[str, Any] = {
        "family": "mixtral",
        "vocab_size": 2048,
        "max_position": 32768,
        "num_experts": 8,
        "num_topk": 2,
    }
    return {
        "tiny": ModelConfig(
            **study,
            hidden=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            expert_width=96,
            dtype=torch.float32,
        ),
        "link": ModelConfig(
            **study,
            hidden=512,
            num_layers=8,
            num_heads=8,
            num_kv_heads=4,
            head_dim=64,
            expert_width=768,
            dtype=torch.float32,
        ),
        "qwen3-30b-a3b": ModelConfig(
            **qwen3, hidden=2048, num_layers=48, num_heads=32, expert_width=768, rope_theta=1e6, max_position=40960
        ),
        "qwen3-235b-a22b": ModelConfig(
            **qwen3, hidden=4096, num_layers=94, num_heads=64, expert_width=1536, rope_theta=5e6, max_position=262144
        ),
        "mixtral-8x7b": ModelConfig(
            family="mixtral",
            vocab_size=32000,
            hidden=4096,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            rms_norm_eps=1e-5,
            rope_theta=1e6,
            max_position=32768,
            num_experts=8,
            num_topk=2,
            expert_width=14336,
            eos_token_ids=(2,),
        ),
        "olmoe": ModelConfig(
            family="qwen3_moe",
            vocab_size=50304,
            hidden=2048,
            num_layers=16,
            num_heads=16,
            num_kv_heads=16,
            head_dim=128,
            qk_norm=True,
            rms_norm_eps=1e-5,
            max_position=4096,
            num_experts=64,
            num_topk=8,
            norm_topk_prob=False,
            expert_width=1024,
            eos_token_ids=(50279,),
        ),
        "gpt-oss-120b": ModelConfig(
            family="qwen3_moe",
            vocab_size=201088,
            hidden=2880,
            num_layers=36,
            num_heads=64,
            num_kv_heads=8,
            head_dim=64,
            attention_bias=True,
            rms_norm_eps=1e-5,
            rope_theta=150000.0,
            max_position=131072,
            num_experts=128,
            num_topk=4,
            expert_width=2880,
            eos_token_ids=(200002,),
        ),
        "deepseek-v3": ModelConfig(
            family="qwen3_moe",
            vocab_size=129280,
            hidden=7168,
            num_layers=61,
            num_heads=128,
            num_kv_heads=2,
            head_dim=128,
            max_position=163840,
            num_experts=256,
            num_topk=8,
            expert_width=2048,
            shared_expert_width=2048,
            dense_layers=frozenset(range(3)),
            dense_width=18432,
            eos_token_ids=(1,),
        ),
    }


_NOTES = {
    "olmoe": "q/k norms are a head's, not the whole row's",
    "gpt-oss-120b": "every layer attends to the whole context (the model: to 128 tokens in every second one); experts "
    "have no biases and a plain SwiGLU; there are no attention sinks; weights are bfloat16 (the model: 4-bit experts)",
    "deepseek-v3": "grouped-query attention stands in for multi-head latent attention: 128 heads of 128 over 2 KV "
    "heads, 1.28 times its weights, 0.80 times its score products, 0.89 times its KV cache; the router is a softmax "
    "without groups or bias; weights are bfloat16 (the model: 8-bit)",
}


def shape_note(name: str) -> str:
    """What in a named shape is not as in the model it is called after, for whoever reads its timings; may be empty."""
    return _NOTES.get(name, "")


@dataclass(frozen=True)
class HFConfig:
    """The raw keys of one `config.json`, read with errors that name the file and the key."""

    file: Path
    keys: Mapping[str, Any]

    @classmethod
    def read(cls, file: Path) -> HFConfig:
        """Parse `file`. Raises ConfigError when it is missing, not JSON, or not an object."""
        try:
            keys = json.loads(file.read_text())
        except (OSError, ValueError, RecursionError) as error:
            why = "it does not exist" if isinstance(error, FileNotFoundError) else str(error)
            raise ConfigError("model", str(file), f"a readable JSON file ({why})", "give a model directory") from None
        _require(isinstance(keys, dict), "model", str(file), "a JSON object")
        return cls(file, keys)

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of `names` that is present and not null, else `default`."""
        return next((self.keys[n] for n in names if self.keys.get(n) is not None), default)

    def integer(self, *names: str, default: int | None = None) -> int:
        """Like `get`, for a required or defaulted integer."""
        value = self.get(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(names[0], value, "an integer")
        return value

    def optional_integer(self, name: str) -> int | None:
        """An integer, or None where the key is absent or null."""
        return None if self.get(name) is None else self.integer(name)

    def number(self, *names: str, default: float) -> float:
        """Like `get`, for a number."""
        return self._as_number(names[0], self.get(*names, default=default))

    def _as_number(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, value, "a number")
        return float(value)

    def refuse_unless(self, name: str, allowed: tuple[Any, ...]) -> None:
        """Raise unless key `name` is absent or has one of the values that are implemented."""
        if name in self.keys and self.keys[name] not in allowed:
            raise self.error(name, self.keys[name], " or ".join(map(repr, allowed)))

    def error(self, name: str, value: Any, allowed: str) -> ConfigError:
        """A ConfigError about one key of this file."""
        return ConfigError(name, value, allowed, f"see {self.file}")

    def common(self, *, default_theta: float) -> dict[str, Any]:
        """The ModelConfig fields that LLaMA-like families spell alike."""
        self.refuse_unless("hidden_act", ("silu",))
        if self.get("quantization_config"):
            raise self.error("quantization_config", self.get("quantization_config"), "absent (float weights)")
        num_heads, hidden = self.integer("num_attention_heads"), self.integer("hidden_size")
        theta, scaling, max_position = self._rope(default_theta)
        dtype = str(self.get("dtype", "torch_dtype", default="float32")).removeprefix("torch.")
        if dtype not in DTYPES:
            raise self.error("dtype", dtype, ", ".join(DTYPES))
        return {
            "vocab_size": self.integer("vocab_size"),
            "hidden": hidden,
            "num_layers": self.integer("num_hidden_layers"),
            "num_heads": num_heads,
            "num_kv_heads": self.integer("num_key_value_heads", default=num_heads),
            "head_dim": self.integer("head_dim", default=hidden // max(num_heads, 1)),
            "rope_theta": theta,
            "rope_scaling": scaling,
            "max_position": max_position,
            "tie_embeddings": bool(self.get("tie_word_embeddings", default=False)),
            "eos_token_ids": self._eos_token_ids(),
            "dtype": DTYPES[dtype],
        }

    def _rope(self, default_theta: float) -> tuple[float, Mapping[str, Any] | None, int]:
        """(theta, scaling or None, longest context); `rope_parameters` is the newer spelling of `rope_scaling`."""
        rope = self.get("rope_parameters", "rope_scaling", default={})
        if not isinstance(rope, Mapping):
            raise self.error("rope_parameters", rope, "an object")
        rope = dict(rope)
        theta = self._as_number("rope_theta", rope.get("rope_theta") or self.get("rope_theta", default=default_theta))
        kind = rope.get("rope_type") or rope.get("type") or "default"
        max_position = self.integer("max_position_embeddings")
        if kind not in ROPE_KINDS:
            raise self.error("rope_scaling", kind, ", ".join(ROPE_KINDS))
        if self.get("partial_rotary_factor", default=rope.get("partial_rotary_factor", 1.0)) != 1.0:
            raise self.error("partial_rotary_factor", self.get("partial_rotary_factor"), "1.0 (whole heads turn)")
        if kind == "default":
            return theta, None, max_position
        rope["rope_type"] = kind
        original = self.get("original_max_position_embeddings", default=rope.get("original_max_position_embeddings"))
        rope["original_max_position_embeddings"] = original or max_position
        needed = ("factor",) if kind != "llama3" else ("factor", "low_freq_factor", "high_freq_factor")
        for name in needed:
            if not isinstance(rope.get(name), int | float) or rope[name] <= 0:
                raise self.error(f"rope_scaling.{name}", rope.get(name), f"a number above 0 ({kind} scaling needs it)")
        if kind == "yarn" and original:
            max_position = max(max_position, int(original * rope["factor"]))
        return theta, rope, max_position

    def _eos_token_ids(self) -> tuple[int, ...]:
        """End tokens of config.json and generation_config.json: chat models often list more in the latter."""
        ids: dict[int, None] = {}
        generation = self.file.with_name("generation_config.json")
        sources = [self.keys] + ([HFConfig.read(generation).keys] if generation.exists() else [])
        for keys in sources:
            value = keys.get("eos_token_id")
            for token in value if isinstance(value, list) else [value]:
                if token is None:
                    continue
                if isinstance(token, bool) or not isinstance(token, int):
                    raise self.error("eos_token_id", token, "a token id, or a list of them")
                ids[token] = None
        return tuple(ids)


def _require(ok: bool, field: str, value: Any, allowed: str) -> None:
    if not ok:
        raise ConfigError(field, value, allowed, "")
