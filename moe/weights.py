"""Weights from disk: memory-mapped safetensors, or seeded random ones; each rank takes only what it holds.

Its own file because models only *declare* their parameters (`Param`); where the numbers come from, and every way in
which a checkpoint can be wrong, is decided here.

Invariants: a checkpoint is checked completely, from its headers alone and for the experts of *all* ranks, before the
first byte of a tensor is read, so that a broken one fails on every rank alike. Pages of a mapped file are given back
right after they were copied: a rank's memory never holds a tensor twice. Random weights depend on (seed, tensor
name) only, so they are the same for every number of ranks.

The safetensors format is an 8-byte little-endian header length, a JSON header of
`{name: {dtype, shape, data_offsets}}`, and the data; it is read here directly because neither the checks nor the
giving back of pages is possible through the `safetensors` package.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from dbo.errors import DBOError

DISK_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INIT_STD = 0.02


class WeightError(DBOError, ValueError):
    """A checkpoint that cannot be loaded; the text is `<file>: tensor <name>: <reason>`."""

    def __init__(self, file: str | Path, tensor: str | None, reason: str) -> None:
        self.file, self.tensor, self.reason = str(file), tensor, reason
        super().__init__(f"{file}: {f'tensor {tensor}: ' if tensor else ''}{reason}")


@dataclass(frozen=True)
class Piece:
    """One tensor on disk, or some of its rows (dimension 0)."""

    name: str
    shape: tuple[int, ...]
    rows: range | None = None  # None = all

    @property
    def shape_read(self) -> tuple[int, ...]:
        """The shape of what is read."""
        return self.shape if self.rows is None else (len(self.rows), *self.shape[1:])


@dataclass(frozen=True, kw_only=True)
class Param:
    """One parameter as this rank holds it: `pieces`, one after another, fill `shape` in row-major order.

    `fused` is another way in which checkpoints store the same parameter, taken when its first tensor is there.
    `needed` names tensors that only other ranks read, checked nevertheless. `ones`: random weights are all one.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    fused: tuple[Piece, ...] = ()
    needed: tuple[Piece, ...] = ()
    ones: bool = False


class WeightSource(Protocol):
    """Where parameters come from."""

    def check(self, params: Iterable[Param]) -> None:
        """Raise WeightError unless every parameter can be read."""

    def fill(self, out: Tensor, param: Param) -> None:
        """Write `param` into `out` (its shape, any float dtype and device)."""


def load_params(
    source: WeightSource,
    params: Mapping[str, Param],
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
    on_host: Collection[str] = (),
) -> dict[str, Tensor]:
    """Check every parameter, then allocate and fill them one by one; blocks until done. Raises WeightError.

    on_host: names of those that move to the host once filled, on the device, where random ones are the same.
    """
    source.check(params.values())
    size = {name: math.prod(param.shape) * dtype.itemsize for name, param in params.items()}
    loaded: dict[str, Tensor] = {}
    bar = tqdm(total=sum(size.values()), unit="B", unit_scale=True, desc="weights", disable=not progress)
    with bar, torch.no_grad():
        for name, param in params.items():
            loaded[name] = torch.empty(param.shape, dtype=dtype, device=device)
            source.fill(loaded[name], param)
            if name in on_host:
                loaded[name] = loaded[name].cpu()
            bar.update(size[name])
    return loaded


class DummyWeights:
    """Random weights, normal with standard deviation 0.02, generated on the device they are for."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def check(self, params: Iterable[Param]) -> None:
        """Nothing can be missing."""

    def fill(self, out: Tensor, param: Param) -> None:
        """Each piece gets its own generator: what an expert holds does not depend on who else is loaded."""
        if param.ones:
            out.fill_(1.0)
            return
        generator = torch.Generator(device=out.device)
        for piece, target in _targets(out, param.pieces):
            digest = hashlib.blake2b(f"{self._seed}/{piece.name}".encode(), digest_size=7).digest()
            generator.manual_seed(int.from_bytes(digest, "little"))
            target.normal_(0.0, INIT_STD, generator=generator)


@dataclass(frozen=True)
class _Entry:
    """Where one tensor lies."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    end: int


class Checkpoint:
    """The safetensors files of one model directory (`model.safetensors.index.json`, or `model.safetensors` alone)."""

    def __init__(self, directory: str | Path) -> None:
        """Read every header. Raises WeightError for a missing, truncated or malformed file."""
        self._directory = Path(directory)
        self._maps: dict[Path, mmap.mmap] = {}
        self._entries: dict[str, _Entry] = {}
        index = self._directory / "model.safetensors.index.json"
        if not index.exists():
            self._origin = self._directory / "model.safetensors"
            self._entries.update(_read_header(self._origin))
            return
        self._origin = index
        try:
            weight_map = {str(n): str(f) for n, f in json.loads(index.read_text())["weight_map"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WeightError(index, None, f"not an index of safetensors files ({error!r})") from None
        for file in sorted(set(weight_map.values())):
            entries = _read_header(self._directory / file)
            for name in (n for n, f in weight_map.items() if f == file):
                if name not in entries:
                    raise WeightError(self._directory / file, name, f"missing, though {index.name} lists it here")
                self._entries[name] = entries[name]

    def check(self, params: Iterable[Param]) -> None:
        """Every tensor is there, with the expected shape and a float dtype, inside its file."""
        for param in params:
            for piece in (*self._layout(param), *(() if self._is_fused(param) else param.needed)):
                entry = self._entries.get(piece.name)
                if entry is None:
                    raise WeightError(self._origin, piece.name, "missing")
                if entry.shape != piece.shape:
                    raise WeightError(
                        entry.file, piece.name, f"shape {entry.shape}, but the config asks for {piece.shape}"
                    )
                if entry.dtype not in DISK_DTYPES:
                    raise WeightError(
                        entry.file, piece.name, f"dtype {entry.dtype} is none of {', '.join(DISK_DTYPES)}"
                    )
                if entry.end - entry.start != math.prod(entry.shape) * DISK_DTYPES[entry.dtype].itemsize:
                    raise WeightError(entry.file, piece.name, "its byte range does not fit its shape and dtype")

    def fill(self, out: Tensor, param: Param) -> None:
        """Copy (and convert) the parameter from the mapped files, then give their pages back."""
        for piece, target in _targets(out, self._layout(param)):
            entry = self._entries[piece.name]
            dtype = DISK_DTYPES[entry.dtype]
            row_bytes = (entry.end - entry.start) // max(1, piece.shape[0])
            start = entry.start + (piece.rows.start if piece.rows else 0) * row_bytes
            mapped = self._map(entry.file)
            target.copy_(
                torch.frombuffer(mapped, dtype=dtype, count=target.numel(), offset=start).view(piece.shape_read)
            )
            page = start - start % mmap.PAGESIZE
            mapped.madvise(mmap.MADV_DONTNEED, page, start + target.numel() * dtype.itemsize - page)

    def _map(self, file: Path) -> mmap.mmap:
        """Kept open until this object goes: a private mapping, never written, so its pages are the file cache's."""
        if file not in self._maps:
            with file.open("rb") as opened:
                self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[file]

    def _is_fused(self, param: Param) -> bool:
        return bool(param.fused) and param.fused[0].name in self._entries

    def _layout(self, param: Param) -> tuple[Piece, ...]:
        return param.fused if self._is_fused(param) else param.pieces


def _targets(out: Tensor, pieces: Iterable[Piece]) -> Iterable[tuple[Piece, Tensor]]:
    """The part of `out` that each piece fills."""
    flat, offset = out.view(-1), 0
    for piece in pieces:
        count = math.prod(piece.shape_read)
        yield piece, flat[offset : offset + count].view(piece.shape_read)
        offset += count


def _read_header(file: Path) -> dict[str, _Entry]:
    """The tensors of one safetensors file; its data is not touched."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 + max(length, 1):
                raise WeightError(file, None, f"truncated: {size} bytes, its header alone needs {8 + length}")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        entries = {
            name: _Entry(file, t["dtype"], tuple(t["shape"]), *(8 + length + o for o in t["data_offsets"]))
            for name, t in header.items()
        }
    except FileNotFoundError:
        raise WeightError(file, None, "does not exist") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, WeightError):
            raise
        raise WeightError(file, None, f"not a safetensors file ({error!r})") from None
    for name, entry in entries.items():
        if not 0 <= entry.start <= entry.end <= size:
            raise WeightError(file, name, f"truncated: the file has {size} bytes, this tensor ends at {entry.end}")
    return entries
