"""What can be wrong with a checkpoint, and what loading leaves in memory."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe.all2all.base import expert_range
from moe.config import read_config
from moe.models.decoder import declare_params
from moe.models.registry import family_named
from moe.weights import Checkpoint, Param, Piece, WeightError, load_params
from tests.moe.checkpoints import Checkpoints

CPU = torch.device("cpu")
GATE = "model.layers.1.block_sparse_moe.gate.weight"
LAST_EXPERT = "model.layers.1.block_sparse_moe.experts.4.w2.weight"


def load(path: Path, *, ep_rank: int = 0, ep_size: int = 1, dtype: torch.dtype = torch.float32):
    config = read_config(path)
    experts = expert_range(config.num_experts, ep_size, ep_rank)
    params = declare_params(config, family_named(config.family), experts)
    return load_params(Checkpoint(path), params, dtype=dtype, device=CPU, progress=False)


@pytest.fixture
def mixtral(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    """A copy to break: one file."""
    return Path(shutil.copytree(checkpoints("mixtral").path, tmp_path / "model"))


@pytest.fixture
def sharded(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    """A copy to break: several files and an index."""
    return Path(shutil.copytree(checkpoints("qwen3").path, tmp_path / "model"))


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("ep_rank", [0, 1])
def test_missing_tensor_fails_on_every_rank(mixtral: Path, ep_rank: int) -> None:
    rewrite(mixtral, lambda tensors: tensors.pop(LAST_EXPERT))
    with pytest.raises(WeightError, match=rf"model\.safetensors: tensor {LAST_EXPERT}: missing"):
        load(mixtral, ep_rank=ep_rank, ep_size=2)


def test_wrong_shape(mixtral: Path) -> None:
    rewrite(mixtral, lambda tensors: tensors.update({GATE: torch.zeros(4, 48)}))
    with pytest.raises(WeightError, match=rf"tensor {GATE}: shape \(4, 48\), but the config asks for \(5, 48\)"):
        load(mixtral)


def test_integer_tensor(mixtral: Path) -> None:
    rewrite(mixtral, lambda tensors: tensors.update({GATE: torch.zeros(5, 48, dtype=torch.int32)}))
    with pytest.raises(WeightError, match=rf"tensor {GATE}: dtype I32 is none of F32"):
        load(mixtral)


@pytest.mark.parametrize(
    ("keep", "match"), [(-1, "truncated.*this tensor ends at"), (100, "header alone needs"), (3, "truncated")]
)
def test_truncated_file(mixtral: Path, keep: int, match: str) -> None:
    file = mixtral / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(WeightError, match=match) as caught:
        load(mixtral)
    assert caught.value.file == str(file)


@pytest.mark.parametrize(
    "content", [b"", struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 9) + b'{"a": 1}]', b"x" * 400]
)
def test_not_a_safetensors_file(mixtral: Path, content: bytes) -> None:
    (mixtral / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightError, match=r"model\.safetensors"):
        load(mixtral)


def test_no_weights_at_all(mixtral: Path) -> None:
    (mixtral / "model.safetensors").unlink()
    with pytest.raises(WeightError, match=r"model\.safetensors: does not exist"):
        load(mixtral)


def test_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(WeightError, match=f"{shard.name}: does not exist"):
        load(sharded)


def test_index_that_lies(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    names = sorted(content["weight_map"])
    content["weight_map"][names[0]] = content["weight_map"][names[-1]]
    index.write_text(json.dumps(content))
    with pytest.raises(WeightError, match=f"{names[0]}: missing, though"):
        load(sharded)
    index.write_text('{"weight_map": {"a": 5}}')
    with pytest.raises(WeightError, match="does not exist"):
        Checkpoint(sharded)
    index.write_text("{}")
    with pytest.raises(WeightError, match="not an index"):
        load(sharded)


def test_ranks_hold_slices(checkpoints: Checkpoints) -> None:
    path = checkpoints("mixtral").path
    whole, parts = load(path), [load(path, ep_rank=rank, ep_size=2) for rank in range(2)]
    for name, tensor in whole.items():
        if name.endswith(("w_gate_up", "w_down")):
            assert [len(part[name]) for part in parts] == [3, 2]
            assert torch.equal(tensor, torch.cat([part[name] for part in parts]))
        else:
            assert torch.equal(tensor, parts[1][name])


@pytest.mark.parametrize("ep_rank", [0, 1])
def test_fused_expert_tensors(mixtral: Path, ep_rank: int) -> None:
    """The layout in which all experts of a layer are one tensor."""
    apart = load(mixtral, ep_rank=ep_rank, ep_size=2)

    def fuse(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(3):
            at = f"model.layers.{layer}."
            names = [f"{at}block_sparse_moe.experts.{e}.%s.weight" for e in range(5)]
            w1, w3, w2 = ([tensors.pop(name % w) for name in names] for w in ("w1", "w3", "w2"))
            up = torch.stack([torch.cat(pair) for pair in zip(w1, w3, strict=True)])
            tensors[f"{at}mlp.experts.gate_up_proj"], tensors[f"{at}mlp.experts.down_proj"] = up, torch.stack(w2)

    rewrite(mixtral, fuse)
    fused = load(mixtral, ep_rank=ep_rank, ep_size=2)
    assert all(torch.equal(apart[name], fused[name]) for name in apart)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(mixtral: Path, dtype: torch.dtype) -> None:
    expected = {name: tensor.to(dtype) for name, tensor in load(mixtral).items()}
    rewrite(mixtral, lambda tensors: tensors.update({name: t.to(dtype) for name, t in tensors.items()}))
    for kept in (dtype, torch.float32):
        loaded = load(mixtral, dtype=kept)
        assert all(torch.equal(loaded[name], tensor.to(kept)) for name, tensor in expected.items())


def resident_file_pages() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssFile:")[1].split()[0]) * 1024


def test_pages_are_given_back(tmp_path: Path) -> None:
    """What was copied from a mapped file does not stay in this process's memory a second time."""
    rows, width, count = 1024, 4096, 8  # 16 MiB each
    save_file({f"t{i}": torch.full((rows, width), float(i)) for i in range(count)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    out = torch.empty(rows, width)
    before = resident_file_pages()
    for i in range(count):
        checkpoint.fill(out, Param(shape=(rows, width), pieces=(Piece(f"t{i}", (rows, width)),)))
        assert out[0, 0] == i
        assert out[-1, -1] == i
    assert resident_file_pages() - before < 8 * 2**20
