"""Turn a dense LLaMA-family checkpoint into a Mixtral-format mixture of experts.

Every expert starts as a copy of the layer's MLP and the router is random. Mixtral renormalises the weights of
the chosen experts to one, so with `noise=0` the mixture computes exactly what the source computes, whatever the
router says: a real language model with real routing to test and demonstrate expert parallelism on. With
`noise > 0` the experts differ (the idea is sparse upcycling, Komatsuzaki et al., arXiv:2212.05055).

The file stands alone: nothing at run time needs it, and it needs nothing of the runtime but its errors.

Invariants:
- one tensor is in memory at a time, plus its float32 copy when noise is added;
- the result depends on the source and the options alone: each random tensor has a seed of its own;
- the output directory appears complete or not at all.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from dbo.errors import ConfigError, DBOError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_RECORD = "upcycle.json"  # marks a directory as ours and says what it was made from
_FORMAT = 1  # raise it when the same options start to give another result
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
_HF_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    # What transformers assumes where a config.json of the family is silent; Mixtral's own defaults differ.
    "llama": {"max_position_embeddings": 2048, "sliding_window": None},
    "mistral": {"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8},
}
_NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_REFUSED = {
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
class UpcycleOptions:
    """What to make of a dense checkpoint.

    Attributes:
        num_experts: experts in each layer, >= 1.
        num_topk: experts per token, 1 to `num_experts`.
        noise: each expert's weights get `noise * rms(weight) * N(0, 1)` added; 0 keeps the source's function.
        seed: of the router and of the noise.
        dtype: `auto` keeps the dtype of a safetensors source and makes float32 of a GGUF.
        max_shard_bytes: upper bound of one weight file (a single larger tensor still gets one).

    Raises:
        ConfigError: a value out of its range.
    """

    num_experts: int = 8
    num_topk: int = 2
    noise: float = 0.0
    seed: int = 0
    dtype: str = "auto"
    max_shard_bytes: int = 2 << 30

    def __post_init__(self) -> None:
        if self.num_experts < 1:
            raise ConfigError("--experts", self.num_experts, "1 or more", "for example --experts 8")
        if not 1 <= self.num_topk <= self.num_experts:
            allowed = f"1 to --experts ({self.num_experts})"
            raise ConfigError("--top-k", self.num_topk, allowed, "lower --top-k or raise --experts")
        if not 0.0 <= self.noise < float("inf"):
            raise ConfigError("--noise", self.noise, "0 or more", "0.2 makes experts clearly different")
        if self.max_shard_bytes < 1:
            raise ConfigError("max_shard_bytes", self.max_shard_bytes, "1 or more")
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise ConfigError("--dtype", self.dtype, f"auto, {', '.join(DTYPES)}", "auto suits most")


@dataclass(frozen=True, kw_only=True)
class UpcycleResult:
    """What `upcycle` did: `up_to_date` means that the directory was already what was asked for."""

    up_to_date: bool
    num_bytes: int
    num_shards: int


class DenseSource(Protocol):
    """A dense checkpoint whose tensors have the names of transformers' LlamaForCausalLM."""

    location: Path
    """The directory or file, for messages."""
    config: Mapping[str, Any]
    """Keys as in a LLaMA config.json."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor, without reading one."""

    def tensor(self, name: str) -> Tensor:
        """Read one tensor, shaped as `shapes` says; GGUF blocks become float32."""

    def dtype(self) -> torch.dtype:
        """What `--dtype auto` means for this source."""

    def save_tokenizer(self, out: Path) -> None:
        """Write the tokenizer, the chat template and the generation defaults, as far as the source has them."""


class SafetensorsSource:
    """A directory as `save_pretrained` writes it: config.json and one or many safetensors files."""

    def __init__(self, directory: Path, weights: Sequence[Path]) -> None:
        self.location = directory
        self.config: Mapping[str, Any] = _read_json(directory / "config.json")
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
        if dtype not in _SAFETENSORS_NAMES:
            raise UpcycleError(f"{self.location}: weights are {dtype}; choose one of --dtype {', '.join(DTYPES)}")
        return dtype

    def save_tokenizer(self, out: Path) -> None:
        """Copy the files that are there."""
        for name in _TOKENIZER_FILES:
            if (self.location / name).is_file():
                shutil.copyfile(self.location / name, out / name)


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
        self.config: Mapping[str, Any] = self._hf_config({key: field.contents() for key, field in small.items()})

    def _hf_name(self, name: str) -> str:
        match name.split("."):
            case ["blk", layer, part, "weight"] if part in self._LAYER:
                return f"model.layers.{layer}.{self._LAYER[part]}.weight"
        return self._TOP.get(name, name)

    def _hf_config(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """The metadata in the words of a LLaMA config.json."""
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
            return {
                "model_type": "llama",
                "vocab_size": self.shapes()["model.embed_tokens.weight"][0],
                "hidden_size": hidden,
                "intermediate_size": meta["llama.feed_forward_length"],
                "num_hidden_layers": meta["llama.block_count"],
                "num_attention_heads": num_heads,
                "num_key_value_heads": meta.get("llama.attention.head_count_kv", num_heads),
                "head_dim": head_dim,
                "max_position_embeddings": meta["llama.context_length"],
                "rms_norm_eps": meta["llama.attention.layer_norm_rms_epsilon"],
                "rope_theta": meta.get("llama.rope.freq_base", 10000.0),
                "tie_word_embeddings": "lm_head.weight" not in self._tensors,
                "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
                "eos_token_id": sorted({end for end in ends if end is not None}) or None,
                "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
            }
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
            return _rotary_halves(weight, self.config["num_attention_heads"])
        if name.endswith("k_proj.weight"):
            return _rotary_halves(weight, self.config["num_key_value_heads"])
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
        UpcycleError: a file is damaged, or its family is not one that can be upcycled.
    """
    source = GGUFSource(files[0]) if files[0].suffix == ".gguf" else SafetensorsSource(files[0].parent, files[1:])
    _check_family(source.config, source.location)
    return source


def upcycle(
    source_path: Path, out: Path, options: UpcycleOptions, *, force: bool = False, progress: bool = True
) -> UpcycleResult:
    """Write the mixture to `out`; do nothing if it already holds the result of the same source and options.

    Args:
        source_path: a directory with config.json and safetensors, a GGUF file, or a directory with one.
        out: a directory that does not exist, is empty, or was made by this function (else `force` is needed).
        options: experts, top-k, noise, seed, dtype.
        force: overwrite whatever is in `out`.
        progress: draw a progress bar on standard error.

    Raises:
        UpcycleError: the source is missing, damaged or of another family; `out` is not ours; the disk is too full.
    """
    files = source_files(source_path)
    out = out.resolve()
    for kept in (source_path.resolve(), Path.cwd()):
        if kept.is_relative_to(out):
            raise UpcycleError(f"{out}: replacing it would delete {kept}; choose another --out")
    fingerprint = _fingerprint(files, options)
    made = _read_record(out)
    if made is not None and made["fingerprint"] == fingerprint and _sizes(out, made["files"]) == made["files"]:
        return UpcycleResult(
            up_to_date=True,
            num_bytes=sum(made["files"].values()),
            num_shards=sum(name.endswith(".safetensors") for name in made["files"]),
        )
    if made is None and out.exists() and not force and (not out.is_dir() or any(out.iterdir())):
        raise UpcycleError(f"{out}: holds something that upcycle did not make; choose another --out or add --force")

    source = open_source(files)
    dtype = source.dtype() if options.dtype == "auto" else DTYPES[options.dtype]
    shards = _plan(source, options, dtype)
    num_bytes = sum(entry.num_bytes for shard in shards for entry in shard)
    _check_space(out, num_bytes)
    with _replacing(out) as directory:
        source.save_tokenizer(directory)
        _write_json(directory / "config.json", _mixtral_config(source.config, options, dtype))
        _write_shards(directory, shards, source, options, dtype, progress=progress)
        sizes = _sizes(directory, [path.name for path in directory.iterdir()])
        record = {"source": str(source_path), "options": asdict(options), "fingerprint": fingerprint, "files": sizes}
        _write_json(directory / _RECORD, record)
    return UpcycleResult(up_to_date=False, num_bytes=num_bytes, num_shards=len(shards))


# --- configuration ---------------------------------------------------------------------------------------------


def _check_family(config: Mapping[str, Any], path: Path) -> None:
    """Only what a Mixtral layer can express: no biases, gated SiLU, plain pre-norms."""
    family = str(config.get("model_type"))
    if family not in _HF_DEFAULTS:
        why = _REFUSED.get(family, "it is not a family that Mixtral's layers are known to express")
        supported = " and ".join(_HF_DEFAULTS)
        raise UpcycleError(f"{path}: model type {family!r} cannot be upcycled: {why} (supported: {supported})")
    for key in _NEEDED:
        if not isinstance(config.get(key), int):
            raise UpcycleError(f"{path}: config.json has no {key}")
    refusals = {
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "quantization_config": config.get("quantization_config") is not None,
    }
    for key, refused in refusals.items():
        if refused:
            raise UpcycleError(f"{path}: config.json has {key}={config[key]!r}, which Mixtral has no place for")


def _mixtral_config(dense: Mapping[str, Any], options: UpcycleOptions, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of the mixture: every value spelled out, rotary settings in the old and the new form."""
    silent = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
    known = {
        **silent,
        "num_key_value_heads": dense["num_attention_heads"],
        **_HF_DEFAULTS[dense["model_type"]],
        **dense,
    }
    copied = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
        "max_position_embeddings rms_norm_eps sliding_window tie_word_embeddings "
        "bos_token_id eos_token_id pad_token_id"
    )
    scaling = dict(known.get("rope_parameters") or known.get("rope_scaling") or {})
    theta = float(scaling.pop("rope_theta", None) or known.get("rope_theta") or 10000.0)
    rope_type = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaled = None if rope_type == "default" else {"rope_type": rope_type, **scaling}
    name = str(dtype).removeprefix("torch.")
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **{key: known.get(key) for key in copied.split()},
        "head_dim": known.get("head_dim") or known["hidden_size"] // known["num_attention_heads"],
        "hidden_act": "silu",
        "rope_theta": theta,
        "rope_scaling": scaled,
        "rope_parameters": {"rope_theta": theta, **(scaled or {"rope_type": "default"})},
        "num_local_experts": options.num_experts,
        "num_experts_per_tok": options.num_topk,
        "dtype": name,
        "torch_dtype": name,
    }


# --- what is written where -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One tensor of the mixture and the source tensor it is made of (None for a router)."""

    name: str
    shape: tuple[int, ...]
    num_bytes: int
    source: str | None
    expert: bool


_PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # Mixtral's names


def _plan(source: DenseSource, options: UpcycleOptions, dtype: torch.dtype) -> list[list[_Entry]]:
    """All tensors in the order in which they are written, cut into shards; checks every source tensor."""
    expected = _dense_shapes(source.config)
    _check_tensors(source, expected)
    entries = []

    def add(name: str, shape: tuple[int, ...], origin: str | None, *, expert: bool = False) -> None:
        size = torch.Size(shape).numel() * dtype.itemsize
        entries.append(_Entry(name=name, shape=shape, num_bytes=size, source=origin, expert=expert))

    for name, shape in expected.items():
        prefix, mlp, projection = name.partition(".mlp.")
        if not mlp:
            add(name, shape, name)
            continue
        moe = f"{prefix}.block_sparse_moe"
        part = next(w for w, dense in _PROJECTIONS.items() if projection.startswith(dense))
        if part == "w1":
            add(f"{moe}.gate.weight", (options.num_experts, shape[1]), None)
        # All experts of one projection follow each other, so that its source is read once.
        for expert in range(options.num_experts):
            add(f"{moe}.experts.{expert}.{part}.weight", shape, name, expert=True)
    return _cut(entries, options.max_shard_bytes)


def _cut(entries: Sequence[_Entry], max_bytes: int) -> list[list[_Entry]]:
    shards: list[list[_Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.num_bytes
    return shards


def _dense_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a LLaMA-family model and its shape, [out, in] for projections."""
    hidden, width, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // num_heads
    default_kv_heads = _HF_DEFAULTS[config["model_type"]].get("num_key_value_heads", num_heads)
    num_kv_heads = config.get("num_key_value_heads") or default_kv_heads
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (num_heads * head_dim, hidden),
        "self_attn.k_proj": (num_kv_heads * head_dim, hidden),
        "self_attn.v_proj": (num_kv_heads * head_dim, hidden),
        "self_attn.o_proj": (hidden, num_heads * head_dim),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _check_tensors(source: DenseSource, expected: Mapping[str, tuple[int, ...]]) -> None:
    """All of `expected` in its shape, and nothing that the mixture would silently lose."""
    found = source.shapes()
    for name, shape in expected.items():
        if name not in found:
            raise UpcycleError(f"{source.location}: tensor {name} is missing")
        if found[name] != shape:
            raise UpcycleError(f"{source.location}: tensor {name} has shape {found[name]}, config.json implies {shape}")
    # A tied head may be stored too; some old files carry rotary tables that are computed anyway.
    surplus = [n for n in found if n not in expected and n != "lm_head.weight" and "rotary_emb" not in n]
    if surplus:
        raise UpcycleError(f"{source.location}: Mixtral has no place for tensor {surplus[0]} ({len(surplus)} such)")


# --- random parts ----------------------------------------------------------------------------------------------


def _normal(shape: tuple[int, ...], *key: object) -> Tensor:
    """Standard normal float32 numbers that depend on `key` alone."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.randn(shape, generator=generator)


def _router(entry: _Entry, options: UpcycleOptions) -> Tensor:
    """[num_experts, hidden]: logits of about unit variance, since a norm precedes the router."""
    return _normal(entry.shape, options.seed, entry.name) / math.sqrt(entry.shape[1])


def _perturbed(weight: Tensor, entry: _Entry, options: UpcycleOptions) -> Tensor:
    weight = weight.float()
    rms = weight.square().mean().sqrt()
    return weight + options.noise * rms * _normal(entry.shape, options.seed, entry.name)


def _rotary_halves(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of q or k from llama.cpp's order (pairs interleaved) to transformers' (first halves, then second)."""
    pairs = weight.view(num_heads, weight.shape[0] // num_heads // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


# --- files -----------------------------------------------------------------------------------------------------


def _write_shards(
    directory: Path,
    shards: Sequence[Sequence[_Entry]],
    source: DenseSource,
    options: UpcycleOptions,
    dtype: torch.dtype,
    *,
    progress: bool,
) -> None:
    read = lru_cache(maxsize=1)(source.tensor)

    def make(entry: _Entry) -> Tensor:
        if entry.source is None:
            return _router(entry, options)
        weight = read(entry.source)
        return _perturbed(weight, entry, options) if entry.expert and options.noise else weight

    total = sum(entry.num_bytes for shard in shards for entry in shard)
    weight_map: dict[str, str] = {}
    with tqdm(total=total, desc="upcycle", unit="B", unit_scale=True, unit_divisor=1024, disable=not progress) as bar:
        for number, shard in enumerate(shards, start=1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            weight_map |= {entry.name: name for entry in shard}
            _write_shard(directory / name, shard, dtype, make, bar.update)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", index)


def _write_shard(
    path: Path,
    shard: Sequence[_Entry],
    dtype: torch.dtype,
    make: Callable[[_Entry], Tensor],
    written: Callable[[int], Any],
) -> None:
    """One safetensors file, streamed: the library's own writer wants all tensors of a file in memory at once."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in shard:
        begin, end = end, end + entry.num_bytes
        header[entry.name] = {
            "dtype": _SAFETENSORS_NAMES[dtype],
            "shape": entry.shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for entry in shard:
            flat = make(entry).to(dtype).contiguous().view(-1)
            file.write(flat.view(torch.uint8).numpy().data)
            written(entry.num_bytes)


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


@contextlib.contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """A directory beside `out` that takes its place when the block ends well, and vanishes when it does not."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    partial.mkdir()
    try:
        yield partial
        if out.is_dir():
            shutil.rmtree(out)
        else:
            out.unlink(missing_ok=True)
        partial.rename(out)
    except OSError as error:
        raise UpcycleError(f"{out}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_space(out: Path, num_bytes: int) -> None:
    existing = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        need, have = num_bytes / 2**30, free / 2**30
        raise UpcycleError(f"{out}: needs {need:.1f} GiB, {have:.1f} GiB are free (--dtype bfloat16 halves it)")


def _fingerprint(files: Sequence[Path], options: UpcycleOptions) -> str:
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr((_FORMAT, stats, asdict(options))).encode()).hexdigest()


def _read_record(out: Path) -> dict[str, Any] | None:
    """What an earlier run noted in `out`, None if it is not a directory of ours."""
    try:
        record = _read_json(out / _RECORD)
    except UpcycleError:
        return None
    return record if {"fingerprint", "files"} <= record.keys() else None


def _sizes(directory: Path, names: Sequence[str] | Mapping[str, int]) -> dict[str, int]:
    return {name: (directory / name).stat().st_size for name in names if (directory / name).is_file()}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UpcycleError(f"{path}: cannot be read ({error})") from None
    if not isinstance(value, dict):
        raise UpcycleError(f"{path}: expected a JSON object")
    return value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


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
