"""Turn a dense LLaMA-family checkpoint into a Mixtral-format mixture of experts.

Every expert starts as a copy of the layer's MLP and the router is random. Mixtral renormalises the weights of
the chosen experts to one, so with `noise=0` the mixture computes exactly what the source computes, whatever the
router says: a real language model with real routing to test and demonstrate expert parallelism on. With
`noise > 0` the experts differ (the idea is sparse upcycling, Komatsuzaki et al., arXiv:2212.05055).

The file stands alone: nothing at run time needs it. Reading the source is `moe.dense`.

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
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from dbo.errors import ConfigError
from moe.dense import DenseConfig, DenseSource, UpcycleError, open_source, read_json, source_files

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_RECORD = "upcycle.json"  # marks a directory as ours and says what it was made from
_FORMAT = 1  # raise it when the same options start to give another result


@dataclass(frozen=True, kw_only=True)
class UpcycleOptions:
    """What to make of a dense checkpoint.

    Attributes:
        num_experts: experts in each layer, >= 1.
        num_topk: experts per token, 1 to `num_experts`.
        noise: each expert's weights get `noise * rms(weight) * N(0, 1)` added; 0 keeps the source's function.
        seed: of the router and of the noise, >= 0.
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
        if self.seed < 0:
            raise ConfigError("--seed", self.seed, "0 or more")
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


def _mixtral_config(dense: DenseConfig, options: UpcycleOptions, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of the mixture, rotary settings in the form of transformers 4 and in that of 5."""
    name = str(dtype).removeprefix("torch.")
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **asdict(dense),
        "hidden_act": "silu",
        "rope_parameters": {"rope_theta": dense.rope_theta, **(dense.rope_scaling or {"rope_type": "default"})},
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
    """All tensors in the order in which they are written, cut into shards."""
    entries = []

    def add(name: str, shape: tuple[int, ...], origin: str | None, *, expert: bool = False) -> None:
        size = torch.Size(shape).numel() * dtype.itemsize
        entries.append(_Entry(name=name, shape=shape, num_bytes=size, source=origin, expert=expert))

    for name, shape in source.config.shapes().items():
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
    with tqdm(
        total=total, desc="upcycle", unit="B", unit_scale=True, unit_divisor=1024, mininterval=0.5, disable=not progress
    ) as bar:
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
def _replacing(out: Path) -> Iterator[Path]:
    """A directory beside `out` that takes its place when the block ends well, and vanishes when it does not."""
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    try:
        partial.mkdir(parents=True)
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
        record = read_json(out / _RECORD)
    except UpcycleError:
        return None
    return record if {"fingerprint", "files"} <= record.keys() else None


def _sizes(directory: Path, names: Sequence[str] | Mapping[str, int]) -> dict[str, int]:
    return {name: (directory / name).stat().st_size for name in names if (directory / name).is_file()}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
