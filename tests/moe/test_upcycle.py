"""The upcycled mixture against its dense source, both run by transformers, and everything that can be refused."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import moe.upcycle
from dbo.errors import ConfigError
from launch.upcycle_command import upcycle_command
from moe.dense import GGUFSource, SafetensorsSource, UpcycleError
from moe.upcycle import UpcycleOptions, upcycle

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
TWO = UpcycleOptions(num_experts=4, num_topk=2)


def save_dense(directory: Path, family: str = "llama", dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    torch.manual_seed(7)
    settings = transformers.AutoConfig.for_model(family, **SMALL | config)
    model = transformers.AutoModelForCausalLM.from_config(settings, dtype=dtype)
    for name, weight in model.named_parameters():
        if "norm" in name:  # ones would hide a norm left out
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return save_dense(tmp_path / "dense")


def logits(directory: Path, **load: Any) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **load).eval()
    ids = torch.randint(0, SMALL["vocab_size"], (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids).logits


def weights(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        found |= load_file(path)
    return found


def edit_config(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 16}),
        ("llama", {"rope_parameters": LLAMA3_ROPE, "rms_norm_eps": 1e-3}),
        ("mistral", {"sliding_window": 24, "rope_parameters": {"rope_type": "default", "rope_theta": 777.0}}),
        ("mistral", {"sliding_window": None}),
    ],
)
def test_same_function_as_the_source(tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    source = save_dense(tmp_path / "dense", family, **config)
    upcycle(source, tmp_path / "moe", TWO, progress=False)
    expected = logits(source)
    assert expected.std() > 0.05
    torch.testing.assert_close(logits(tmp_path / "moe"), expected, atol=1e-4, rtol=0)


def test_a_silent_config_means_the_familys_defaults(tmp_path: Path) -> None:
    source = save_dense(tmp_path / "dense", num_key_value_heads=4)
    kept = {"architectures", "model_type", *SMALL} - {"num_key_value_heads", "max_position_embeddings"}
    edit_config(source, lambda c: [c.pop(key) for key in set(c) - kept])
    upcycle(source, tmp_path / "moe", TWO, progress=False)
    torch.testing.assert_close(logits(tmp_path / "moe"), logits(source), atol=1e-4, rtol=0)


def test_config_as_older_transformers_wrote_it(tmp_path: Path) -> None:
    source = save_dense(tmp_path / "dense", rope_parameters=LLAMA3_ROPE)
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    edit_config(source, lambda c: c.pop("rope_parameters"))
    edit_config(source, lambda c: c.update(rope_theta=50000.0, rope_scaling=scaling))
    upcycle(source, tmp_path / "moe", TWO, progress=False)
    written = json.loads((tmp_path / "moe/config.json").read_text())
    assert written["rope_theta"] == 50000.0
    assert written["rope_scaling"] == scaling
    assert written["rope_parameters"] == LLAMA3_ROPE


def test_noise_makes_experts_differ_by_the_share_asked_for(dense: Path, tmp_path: Path) -> None:
    upcycle(dense, tmp_path / "moe", UpcycleOptions(num_experts=4, noise=0.2), progress=False)
    source, made = weights(dense), weights(tmp_path / "moe")
    for ours, theirs in {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.items():
        base = source[f"model.layers.1.mlp.{theirs}.weight"]
        added = [made[f"model.layers.1.block_sparse_moe.experts.{e}.{ours}.weight"] - base for e in range(4)]
        for noise in added:
            assert (noise.square().mean() / base.square().mean()).sqrt() == pytest.approx(0.2, rel=0.1)
        correlation = torch.corrcoef(torch.stack([noise.flatten() for noise in added]))
        assert (correlation - torch.eye(4)).abs().max() < 0.15
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(made[name], source[name])


def test_the_result_depends_on_seed_and_not_on_shards(dense: Path, tmp_path: Path) -> None:
    def made(**options: Any) -> dict[str, torch.Tensor]:
        out = tmp_path / "moe"
        upcycle(dense, out, UpcycleOptions(num_experts=3, noise=0.1, **options), progress=False)
        return weights(out)

    one, other_seed, sharded = made(), made(seed=1), made(max_shard_bytes=10_000)
    gate, expert = (f"model.layers.0.block_sparse_moe.{n}.weight" for n in ("gate", "experts.2.w1"))
    assert one.keys() == sharded.keys()
    assert all(torch.equal(one[name], sharded[name]) for name in one)
    assert not torch.equal(one[gate], other_seed[gate])
    assert not torch.equal(one[expert], other_seed[expert])


def test_shards_keep_their_bound_and_the_index_names_them(dense: Path, tmp_path: Path) -> None:
    options = UpcycleOptions(num_experts=4, max_shard_bytes=20_000)
    result = upcycle(dense, tmp_path / "moe", options, progress=False)
    index = json.loads((tmp_path / "moe/model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "moe").glob("*.safetensors"))
    assert result.num_shards == len(files) > 3
    total = 0
    for path in files:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            size = sum(file.get_tensor(name).nbytes for name in names)
        assert size <= 20_000
        assert names == {name for name, where in index["weight_map"].items() if where == path.name}
        total += size
    assert total == index["metadata"]["total_size"] == result.num_bytes


@pytest.mark.parametrize(("asked", "got"), [("auto", "BF16"), ("float32", "F32"), ("float16", "F16")])
def test_dtype(tmp_path: Path, asked: str, got: str) -> None:
    source = save_dense(tmp_path / "dense", dtype=torch.bfloat16)
    upcycle(source, tmp_path / "moe", UpcycleOptions(dtype=asked), progress=False)
    with safe_open(tmp_path / "moe/model-00001-of-00001.safetensors", framework="pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {got}  # noqa: SIM118
    names = {"BF16": "bfloat16", "F32": "float32", "F16": "float16"}
    assert json.loads((tmp_path / "moe/config.json").read_text())["dtype"] == names[got]


def test_tokenizer_files_travel(dense: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (dense / name).write_text(f"contents of {name}")
    (dense / "notes.txt").write_text("stays")
    upcycle(dense, tmp_path / "moe", TWO, progress=False)
    assert (tmp_path / "moe/chat_template.jinja").read_text() == "contents of chat_template.jinja"
    assert (tmp_path / "moe/tokenizer.json").is_file()
    assert not (tmp_path / "moe/notes.txt").exists()


# --- running it again, and over what is there ---------------------------------------------------------------


def test_again_is_up_to_date_until_something_changes(dense: Path, tmp_path: Path) -> None:
    def up_to_date(options: UpcycleOptions = TWO) -> bool:
        return upcycle(dense, tmp_path / "moe", options, progress=False).up_to_date

    assert [up_to_date(), up_to_date()] == [False, True]
    other = UpcycleOptions(num_experts=4, seed=3)
    assert [up_to_date(other), up_to_date(other), up_to_date()] == [False, True, False]
    (tmp_path / "moe/model-00001-of-00001.safetensors").unlink()
    assert [up_to_date(), up_to_date()] == [False, True]
    save_dense(dense, rms_norm_eps=1e-3)
    assert [up_to_date(), up_to_date()] == [False, True]


def test_a_foreign_directory_needs_force(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "precious"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(UpcycleError, match=r"precious.*--force"):
        upcycle(dense, out, TWO, progress=False)
    assert (out / "thesis.txt").exists()
    upcycle(dense, out, TWO, force=True, progress=False)
    assert (out / "config.json").exists()
    assert not (out / "thesis.txt").exists()


@pytest.mark.parametrize("out", ["dense", "."])
def test_the_source_is_never_replaced(dense: Path, tmp_path: Path, out: str) -> None:
    with pytest.raises(UpcycleError, match="would delete"):
        upcycle(dense, tmp_path / out, TWO, force=True, progress=False)
    assert (dense / "config.json").exists()


def test_a_failure_leaves_the_old_result_and_no_debris(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upcycle(dense, tmp_path / "moe", TWO, progress=False)
    before = weights(tmp_path / "moe")
    read = SafetensorsSource.tensor

    def fail_late(self: SafetensorsSource, name: str) -> torch.Tensor:
        if name == "model.norm.weight":
            raise KeyboardInterrupt
        return read(self, name)

    monkeypatch.setattr(SafetensorsSource, "tensor", fail_late)
    with pytest.raises(KeyboardInterrupt):
        upcycle(dense, tmp_path / "moe", UpcycleOptions(seed=5), progress=False)
    assert weights(tmp_path / "moe").keys() == before.keys()
    assert sorted(os.listdir(tmp_path)) == ["dense", "moe"]


def test_a_full_disk_is_found_before_writing(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe.upcycle.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(UpcycleError, match=r"needs .* GiB"):
        upcycle(dense, tmp_path / "moe", TWO, progress=False)
    assert os.listdir(tmp_path) == ["dense"]


# --- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 0}, "--experts=0"),
        ({"num_experts": 4, "num_topk": 5}, r"--top-k=5 .*1 to --experts \(4\)"),
        ({"num_topk": 0}, "--top-k=0"),
        ({"noise": -0.1}, "--noise=-0.1"),
        ({"noise": float("nan")}, "--noise=nan"),
        ({"seed": -1}, "--seed=-1 is not allowed: 0 or more"),
        ({"dtype": "int8"}, r"--dtype='int8'.*bfloat16"),
        ({"max_shard_bytes": 0}, "max_shard_bytes=0"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        UpcycleOptions(**options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2"}, "'qwen2'.*biases"),
        ({"model_type": "mixtral"}, "'mixtral'.*already is a mixture"),
        ({"model_type": "unheard_of"}, "'unheard_of'.*supported: llama and mistral"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"intermediate_size": 47}, r"layers.0.mlp.gate_proj.weight has shape \(48, 32\).*\(47, 32\)"),
        ({"num_hidden_layers": 3}, "layers.2.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 1}, "no place for tensor model.layers.1."),
        ({"hidden_size": None}, "config.json: hidden_size is missing"),
        ({"hidden_size": "32"}, "config.json: hidden_size='32' is not allowed: an integer"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 is not allowed: an integer, 1 or more"),
        ({"rope_parameters": "x"}, "rope_parameters='x' is not allowed: an object"),
    ],
)
def test_sources_that_are_no_mixtral(dense: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    edit_config(dense, lambda config: config.update(change))
    with pytest.raises(UpcycleError, match=message):
        upcycle(dense, tmp_path / "moe", TWO, progress=False)
    assert os.listdir(tmp_path) == ["dense"]


def test_a_bias_in_the_weights_is_not_lost(dense: Path, tmp_path: Path) -> None:
    tensors = load_file(dense / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(32)
    save_file(tensors, dense / "model.safetensors")
    with pytest.raises(UpcycleError, match=r"no place for tensor .*q_proj\.bias"):
        upcycle(dense, tmp_path / "moe", TWO, progress=False)


def test_damaged_and_missing_files(dense: Path, tmp_path: Path) -> None:
    def refused(source: Path) -> str:
        with pytest.raises(UpcycleError) as error:
            upcycle(source, tmp_path / "moe", TWO, progress=False)
        return str(error.value)

    assert "nowhere: no such file or directory" in refused(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "neither a config.json nor a .gguf" in refused(tmp_path / "empty")
    (tmp_path / "empty/a.gguf").write_bytes(b"not GGUF at all, but long enough to look at")
    assert "a.gguf: not a readable GGUF" in refused(tmp_path / "empty")
    (tmp_path / "empty/b.gguf").write_bytes(b"")
    assert "name one of a.gguf, b.gguf" in refused(tmp_path / "empty")
    (tmp_path / "notes.txt").write_text("")
    assert "expected a .gguf file or a directory" in refused(tmp_path / "notes.txt")

    whole = (dense / "model.safetensors").read_bytes()
    (dense / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "model.safetensors: not a readable safetensors file" in refused(dense)
    (dense / "model.safetensors").unlink()
    assert "no model*.safetensors" in refused(dense)
    (dense / "model.safetensors").write_bytes(whole)
    for broken in ("{", "[" * 100_000):
        (dense / "config.json").write_text(broken)
        assert "config.json: cannot be read" in refused(dense)


# --- command -------------------------------------------------------------------------------------------------


def test_command(dense: Path, tmp_path: Path) -> None:
    def run(*more: str) -> tuple[int, str]:
        arguments = ["--model", str(dense), "--out", str(tmp_path / "moe"), "--experts", "4", *more]
        result = CliRunner().invoke(upcycle_command, arguments)
        return result.exit_code, result.output

    assert "written, 4 experts, top-2" in run()[1]
    code, text = run()
    assert (code, "up to date, 4 experts" in text) == (0, True)
    edit_config(dense, lambda config: config.update(model_type="gemma"))
    code, text = run()
    assert code != 0
    assert text.startswith("Error: ")
    assert "'gemma'" in text


# --- GGUF ----------------------------------------------------------------------------------------------------


def save_gguf(dense: Path, path: Path) -> Path:
    """A dense checkpoint as llama.cpp's converter writes it: q and k in interleaved pairs, a byte-level vocabulary."""
    config = json.loads((dense / "config.json").read_text())
    names = {hf: short for short, hf in GGUFSource._LAYER.items()}
    top = {hf: short for short, hf in GGUFSource._TOP.items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    tokens = [chr(code) for code in range(33, 33 + SMALL["vocab_size"] - 2)] + ["ab"]
    writer.add_token_list([*tokens, "<end>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(len(tokens))
    writer.add_chat_template("{{ messages }}")
    for name, weight in load_file(dense / "model.safetensors").items():
        for kind, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if kind in name:
                halves = weight.view(config[heads], 2, -1, weight.shape[1])
                weight = halves.transpose(1, 2).reshape(weight.shape)
        inner = name.removesuffix(".weight").split(".", 3)
        short = top.get(name) or f"blk.{inner[2]}.{names[inner[3]]}.weight"
        writer.add_tensor(short, weight.contiguous().numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [False, True])
def test_gguf_is_the_same_function(tmp_path: Path, tied: bool) -> None:
    dense = save_dense(tmp_path / "dense", tie_word_embeddings=tied, rms_norm_eps=1e-4)
    path = save_gguf(dense, tmp_path / "small.gguf")
    upcycle(path, tmp_path / "moe", TWO, progress=False)
    torch.testing.assert_close(logits(tmp_path / "moe"), logits(dense), atol=1e-4, rtol=0)
    config = json.loads((tmp_path / "moe/config.json").read_text())
    assert config["eos_token_id"] == [95]
    assert config["dtype"] == "float32"
    assert (tmp_path / "moe/tokenizer.json").is_file()
    assert (tmp_path / "moe/chat_template.jinja").read_text() == "{{ messages }}"


@pytest.mark.slow
def test_the_demo_model_is_the_same_function(demo_gguf: Path, demo_moe: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_moe)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    answers, scores = [], []
    for load in ({"pretrained_model_name_or_path": demo_gguf.parent, "gguf_file": demo_gguf.name},
                 {"pretrained_model_name_or_path": demo_moe}):  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_pretrained(**load, dtype=torch.float32)
        with torch.no_grad():
            scores.append(model(ids).logits)
        answers.append(tokenizer.decode(model.generate(ids, max_new_tokens=24, do_sample=False)[0][ids.shape[1] :]))
    assert "The capital of France is Paris." in answers[0]
    assert answers[1] == answers[0]
    torch.testing.assert_close(scores[1], scores[0], atol=1e-4, rtol=0)
