"""Dense LLaMA-family checkpoints as `moe.upcycle` reads them: safetensors directories and GGUF files alike.

A file of its own because it is all about other people's formats and their silent defaults. Whatever a source is stored
as, it has a `DenseConfig` with every value spelled out, and tensors named and shaped as in transformers'
LlamaForCausalLM.

Invariants: opening reads headers only; a source with anything that a Mixtral layer cannot express is refused, never
trimmed; one tensor is read at a time.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from dbo.errors import DBOError

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    # What transformers assumes where a config.json of the family is silent.
    "llama": {"max_position_embeddings": 2048, "sliding_window": None, "num_key_value_heads": None},
    "mistral": {"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8},
}
_ONLY: Mapping[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "quantization_config": None,
}
_REFUSED: Mapping[str, str] = {
    "mixtral": "it already is a mixture of experts",
    "qwen2_moe": "it already is a mixture of experts",
    "qwen3_moe": "it already is a mixture of experts",
    "deepseek_v3": "it already is a mixture of experts",
    "qwen2": "its attention projections have biases",
    "qwen3": "its attention normalises queries and keys",
    "gemma": "its norms add one to their weights and its embeddings are scaled",
    "gemma2": "it has norms after attention and MLP, and soft-capped logits",
    "gemma3_text": "it has norms after attention and MLP, and alternating attention",
    "phi": "its attention and MLP run in parallel",
    "phi3": "its query, key, value and gate, up projections are fused",
    "olmo2": "its norms follow attention and MLP",
    "granite": "it scales embeddings, residuals and logits",
    "smollm3": "some of its layers have no rotary embedding",
    "cohere": "its attention and MLP run in parallel",
    "starcoder2": "its MLP is not gated",
    "gpt2": "it has learned positions and its MLP is not gated",
}


class UpcycleError(DBOError):
    """The source cannot be upcycled, or the output cannot be written; the message says which and why."""


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """A LLaMA-family model in the words of transformers' config.json, nothing left to defaults."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    sliding_window: int | None
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_id: int | list[int] | None
    pad_token_id: int | None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model and its shape, [out, in] for projections, in the order of the layers."""
        hidden, width = self.hidden_size, self.intermediate_size
        q_width, kv_width = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (q_width, hidden),
            "self_attn.k_proj": (kv_width, hidden),
            "self_attn.v_proj": (kv_width, hidden),
            "self_attn.o_proj": (hidden, q_width),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (width, hidden),
            "mlp.up_proj": (width, hidden),
            "mlp.down_proj": (hidden, width),
        }
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for index in range(self.num_hidden_layers):
            shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes


class DenseSource(Protocol):
    """A dense checkpoint that was opened."""

    location: Path
    """The directory or file, for messages."""
    config: DenseConfig

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every stored tensor, without reading one."""

    def tensor(self, name: str) -> Tensor:
        """Read one tensor, shaped as `shapes` says; GGUF blocks become float32."""

    def dtype(self) -> torch.dtype:
        """What `--dtype auto` means for this source."""

    def save_tokenizer(self, out: Path) -> None:
        """Write the tokenizer, the chat template and the generation defaults, as far as the source has them."""


def source_files(path: Path) -> list[Path]:
    """What a source consists of: config.json and its safetensors, or one GGUF file alone in its directory.

    Raises:
        UpcycleError: nothing usable is there.
    """
    if path.is_file():
        if path.suffix != ".gguf":
            raise UpcycleError(f"{path}: expected a .gguf file or a directory")
        return [path]
    if not path.is_dir():
        raise UpcycleError(f"{path}: no such file or directory")
    if (path / "config.json").is_file():
        weights = sorted(path.glob("model*.safetensors"))
        if not weights:
            raise UpcycleError(f"{path}: no model*.safetensors beside config.json")
        return [path / "config.json", *weights]
    found = sorted(path.glob("*.gguf"))
    if not found:
        raise UpcycleError(f"{path}: neither a config.json nor a .gguf file is there")
    if len(found) > 1:
        raise UpcycleError(f"{path}: several GGUF files; name one of {', '.join(f.name for f in found)}")
    return found


def open_source(files: Sequence[Path]) -> DenseSource:
    """Open what `source_files` found; reads headers and configuration only.

    Raises:
        UpcycleError: a file is damaged, a tensor is missing or has no place in Mixtral, or the family has none.
    """
    source: DenseSource
    source = GGUFSource(files[0]) if files[0].suffix == ".gguf" else SafetensorsSource(files[0].parent, files[1:])
    _check_tensors(source)
    return source


def _check_tensors(source: DenseSource) -> None:
    """All tensors in their shapes, and nothing that the mixture would silently lose."""
    found, expected = source.shapes(), source.config.shapes()
    for name, shape in expected.items():
        if name not in found:
            raise UpcycleError(f"{source.location}: tensor {name} is missing")
        if found[name] != shape:
            raise UpcycleError(f"{source.location}: tensor {name} has shape {found[name]}, its config implies {shape}")
    # A tied head may be stored too; some old files carry rotary tables that are computed anyway.
    surplus = [n for n in found if n not in expected and n != "lm_head.weight" and "rotary_emb" not in n]
    if surplus:
        raise UpcycleError(f"{source.location}: Mixtral has no place for tensor {surplus[0]} ({len(surplus)} such)")


class SafetensorsSource:
    """A directory as `save_pretrained` writes it: config.json and one or many safetensors files."""

    def __init__(self, directory: Path, weights: Sequence[Path]) -> None:
        self.location = directory
        self.config = _read_config(directory / "config.json")
        self._where: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in weights:
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    self._where[name] = path
                    self._shapes[name] = tuple(file.get_slice(name).get_shape())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor, from the files' headers."""
        return self._shapes

    def tensor(self, name: str) -> Tensor:
        """Read one tensor as it is stored."""
        with _opened(self._where[name]) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def dtype(self) -> torch.dtype:
        """The dtype in which the embedding is stored."""
        dtype = self.tensor("model.embed_tokens.weight").dtype
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UpcycleError(f"{self.location}: weights are {dtype}; choose a --dtype other than auto")
        return dtype

    def save_tokenizer(self, out: Path) -> None:
        """Copy the files that are there."""
        for name in _TOKENIZER_FILES:
            if (self.location / name).is_file():
                shutil.copyfile(self.location / name, out / name)


def _read_config(path: Path) -> DenseConfig:
    """A config.json as transformers reads it; only what a Mixtral layer can express passes."""
    raw = read_json(path)
    family = str(raw.get("model_type"))
    if family not in _FAMILIES:
        why = _REFUSED.get(family, "it is not a family that Mixtral's layers are known to express")
        supported = " and ".join(_FAMILIES)
        raise UpcycleError(f"{path}: model type {family!r} cannot be upcycled: {why} (supported: {supported})")
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    for key in required:
        if raw.get(key) is None:
            raise UpcycleError(f"{path}: {key} is missing")
        if isinstance(raw[key], bool) or not isinstance(raw[key], int) or raw[key] < 1:
            raise UpcycleError(f"{path}: {key}={raw[key]!r} is not allowed: an integer, 1 or more")
    for key, only in _ONLY.items():
        if (raw.get(key) or only) != only:
            raise UpcycleError(f"{path}: Mixtral has no place for {key}={raw[key]!r}")
    raw = {**_FAMILIES[family], **raw}
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UpcycleError(f"{path}: rope_parameters={rope!r} is not allowed: an object")
    rope = dict(rope)
    theta = rope.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0
    rope_type = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    return DenseConfig(
        **{key: raw[key] for key in required},
        num_key_value_heads=raw["num_key_value_heads"] or raw["num_attention_heads"],
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        max_position_embeddings=raw["max_position_embeddings"],
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=float(theta),
        rope_scaling=None if rope_type == "default" else {"rope_type": rope_type, **rope},
        sliding_window=raw["sliding_window"],
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        bos_token_id=raw.get("bos_token_id", 1),
        eos_token_id=raw.get("eos_token_id", 2),
        pad_token_id=raw.get("pad_token_id"),
    )


class GGUFSource:
    """One GGUF file of architecture `llama`, read through the `gguf` package.

    Tensors are dequantised one by one and metadata is read directly: transformers' own loader builds the whole model
    in memory. It translates the tokenizer, which is more than names.
    """

    _LAYER: Mapping[str, str] = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    _TOP: Mapping[str, str] = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError:
            raise UpcycleError(f"{path}: reading GGUF needs `pip install 'dbo-moe[demo]'`") from None
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, OSError, IndexError) as error:
            raise UpcycleError(f"{path}: not a readable GGUF file ({error})") from None
        self.location = path
        self._dequantize: Callable[..., Any] = gguf.quants.dequantize
        self._tensors = {self._hf_name(t.name): t for t in reader.tensors}
        wanted = ("general.architecture", "llama.", "tokenizer.ggml.")
        small = {k: f for k, f in reader.fields.items() if k.startswith(wanted) and len(f.data) == 1}
        self.config = self._config({key: field.contents() for key, field in small.items()})

    def _hf_name(self, name: str) -> str:
        match name.split("."):
            case ["blk", layer, part, "weight"] if part in self._LAYER:
                return f"model.layers.{layer}.{self._LAYER[part]}.weight"
        return self._TOP.get(name, name)

    def _config(self, meta: Mapping[str, Any]) -> DenseConfig:
        """The metadata in the words of transformers."""
        family = meta.get("general.architecture")
        if family != "llama" or meta.get("llama.expert_count", 0):
            kind = f"{family}, a mixture of experts" if family == "llama" else family
            raise UpcycleError(f"{self.location}: a GGUF of architecture {kind}; supported: dense llama")
        if "rope_freqs.weight" in self._tensors or meta.get("llama.rope.scaling.type", "none") != "none":
            raise UpcycleError(f"{self.location}: has scaled rotary frequencies; take the model's safetensors release")
        try:
            hidden, num_heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
            head_dim = meta.get("llama.attention.key_length", hidden // num_heads)
            if meta.get("llama.rope.dimension_count", head_dim) != head_dim:
                raise UpcycleError(f"{self.location}: rotates only a part of each head, Mixtral rotates all of it")
            ends = (meta.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot"))
            return DenseConfig(
                vocab_size=self.shapes()["model.embed_tokens.weight"][0],
                hidden_size=hidden,
                intermediate_size=meta["llama.feed_forward_length"],
                num_hidden_layers=meta["llama.block_count"],
                num_attention_heads=num_heads,
                num_key_value_heads=meta.get("llama.attention.head_count_kv", num_heads),
                head_dim=head_dim,
                max_position_embeddings=meta["llama.context_length"],
                rms_norm_eps=meta["llama.attention.layer_norm_rms_epsilon"],
                rope_theta=meta.get("llama.rope.freq_base", 10000.0),
                rope_scaling=None,
                sliding_window=None,
                tie_word_embeddings="lm_head.weight" not in self._tensors,
                bos_token_id=meta.get("tokenizer.ggml.bos_token_id"),
                eos_token_id=sorted({end for end in ends if end is not None}) or None,
                pad_token_id=meta.get("tokenizer.ggml.padding_token_id"),
            )
        except KeyError as error:
            raise UpcycleError(f"{self.location}: {error.args[0]} is missing") from None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor; GGUF lists the fastest dimension first."""
        return {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}

    def tensor(self, name: str) -> Tensor:
        """Dequantise one tensor to float32, rotary halves in transformers' order."""
        stored = self._tensors[name]
        weight = torch.tensor(self._dequantize(stored.data, stored.tensor_type), dtype=torch.float32)
        if name.endswith("q_proj.weight"):
            return _rotary_halves(weight, self.config.num_attention_heads)
        if name.endswith("k_proj.weight"):
            return _rotary_halves(weight, self.config.num_key_value_heads)
        return weight

    def dtype(self) -> torch.dtype:
        """float32: dequantised values are not exact in less."""
        return torch.float32

    def save_tokenizer(self, out: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and chat_template.jinja from the metadata."""
        try:
            import transformers
        except ImportError:
            raise UpcycleError("the tokenizer of a GGUF needs `pip install 'dbo-moe[demo]'`") from None
        with _quiet(transformers):
            tokenizer = transformers.AutoTokenizer.from_pretrained(self.location.parent, gguf_file=self.location.name)
            tokenizer.save_pretrained(out)


def _rotary_halves(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of q or k from llama.cpp's order (pairs interleaved) to transformers' (first halves, then second)."""
    pairs = weight.view(num_heads, weight.shape[0] // num_heads // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file, memory-mapped; damage is reported with the file's name."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise UpcycleError(f"{path}: no such file, though the index names it") from None
    except Exception as error:  # safetensors raises its own Rust-side class for damaged files
        if isinstance(error, DBOError):
            raise
        raise UpcycleError(f"{path}: not a readable safetensors file ({error})") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises UpcycleError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UpcycleError(f"{path}: cannot be read ({error})") from None
    if not isinstance(value, dict):
        raise UpcycleError(f"{path}: expected a JSON object")
    return value


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without transformers' own bars and hints: this command has one bar."""
    logging = transformers.utils.logging
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
