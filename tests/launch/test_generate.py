"""`generate` as a user runs it: on one rank in this process, on several under the launcher."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from launch import cli
from launch.__main__ import main
from launch.output import read_rows
from tests.launch import tiny
from tests.ranks import RankCommand, launch_ranks

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="session")
def model(tiny_models) -> str:
    """A model with a tokenizer and a chat template."""
    directory = Path(tiny_models("mixtral").directory)
    tiny.byte_level().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
    return str(directory)


@pytest.fixture
def generate(model, tmp_path, capsys, fresh_logging):
    """Run `generate` on one rank, here; gives (exit code, rows, standard output, standard error)."""

    def run(*argv: str, prompts: list | str | None = None):
        file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
        if prompts is not None:
            lines = [p if isinstance(p, str) else json.dumps(p) for p in prompts]
            file.write_text("\n".join(lines) + "\n")
        needed = ["--model", model, "--prompts", str(file), "--output", str(out), "--device", "cpu"]
        code = cli.run(main, ["generate", *needed, "--max-new-tokens", "6", *argv])
        captured = capsys.readouterr()
        return code, list(read_rows(out).values()), captured.out, captured.err

    return run


def test_answers_have_all_fields_and_the_order_of_the_prompts(generate, tiny_models):
    known = tiny_models("mixtral")
    prompts = [{"id": f"p{i}", "token_ids": p} for i, p in enumerate(known.prompts[:5])]
    prompts[0]["max_new_tokens"] = 9  # ends last
    code, rows, out, err = generate("--json", prompts=prompts)
    assert code == 0
    assert [r["id"] for r in rows] == ["p0", "p1", "p2", "p3", "p4"]
    assert [r["token_ids"][:6] for r in rows] == [a[:6] for a in known.answers[:5]]
    fields = ["id", "text", "token_ids", "prompt_tokens", "finish_reason", "dp_rank", "ttft_ms", "itl_ms"]
    for row, prompt in zip(rows, prompts, strict=True):
        assert list(row) == fields
        assert row["prompt_tokens"] == len(prompt["token_ids"])
        assert (row["finish_reason"], row["dp_rank"]) == ("length", 0)
        assert row["ttft_ms"] > 0
        assert row["itl_ms"] > 0
    summary = json.loads(out)
    assert summary["output_tokens"] == 6 * 4 + 9
    assert summary["phases"]["decode"]["steps"] == 8
    assert "1 rank, cpu" in err
    assert "dtype auto -> float32" in err


def test_text_chat_and_stop_strings(generate):
    plain = [{"prompt": "Zürich"}, {"messages": [{"role": "user", "content": "hi"}]}]
    code, rows, *_ = generate(prompts=plain)
    assert code == 0
    assert [r["prompt_tokens"] for r in rows] == [len("Zürich".encode()), len("<user>hi")]
    codec_text = tiny.byte_level().decode(rows[0]["token_ids"])
    assert rows[0]["text"] == codec_text
    stop = next(c for c in codec_text[1:] if c.isprintable() and c != "\ufffd")
    code, (stopped, by_token), *_ = generate(
        prompts=[{**plain[0], "stop": [stop]}, {**plain[0], "stop_token_ids": [rows[0]["token_ids"][2]]}]
    )
    assert stopped["finish_reason"] == by_token["finish_reason"] == "stop"
    assert stopped["text"] == codec_text[: codec_text.index(stop)]
    assert by_token["token_ids"] == rows[0]["token_ids"][:3]


def test_prompts_that_cannot_run_are_rows_and_the_others_run(generate):
    prompts = [
        {"id": "empty", "prompt": ""},
        {"id": "fine", "prompt": "abc"},
        {"id": "long", "token_ids": [1] * 40},
        {"id": "unknown", "token_ids": [9999]},
        '{"id": "broken"',
        {"id": "fine too", "prompt": "x"},
    ]
    code, rows, _, err = generate("--max-model-len", "40", prompts=prompts)
    assert code == 1
    assert [r["id"] for r in rows] == ["empty", "fine", "long", "unknown", "fine too"]
    assert [r["finish_reason"] for r in rows] == ["error", "length", "error", "error", "length"]
    for row, words in zip([rows[0], rows[2], rows[3]], ["empty", "--max-model-len is 40", "9999"], strict=True):
        assert words in row["error"]
    assert "prompts.jsonl:5: not JSON" in err


@pytest.mark.parametrize("bad", ['{"id": "broken"', {"id": "empty", "prompt": ""}])
def test_strict_stops_before_anything_runs(generate, bad):
    code, rows, _, err = generate("--strict", prompts=[{"prompt": "a"}, bad])
    assert (code, rows) == (1, [])
    assert "(--strict)" in err.splitlines()[-1]


def test_resume_keeps_what_is_there(generate, tmp_path):
    prompts = [{"id": str(i), "prompt": "abc"[: i + 1]} for i in range(3)]
    _, rows, *_ = generate(prompts=prompts)
    kept = {**rows[1], "text": "kept"}
    (tmp_path / "out.jsonl").write_text(json.dumps(kept) + "\n" + json.dumps(rows[2])[:20])  # cut short by a crash
    code, resumed, *_ = generate("--resume")
    assert code == 0
    assert [r["id"] for r in resumed] == ["0", "1", "2"]
    assert [r["text"] for r in resumed] == [rows[0]["text"], "kept", rows[2]["text"]]
    assert [r["token_ids"] for r in resumed] == [r["token_ids"] for r in rows]


def test_resume_runs_errors_again_and_leaves_other_files_alone(generate, tmp_path):
    out = tmp_path / "out.jsonl"
    prompts = [{"id": "long", "prompt": "a" * 50}, {"id": "short", "prompt": "a"}]
    assert generate("--max-model-len", "40", prompts=prompts)[0] == 1
    assert generate("--max-model-len", "40", "--resume")[0] == 1  # not everything succeeded
    code, rows, *_ = generate("--resume")
    assert (code, [r["finish_reason"] for r in rows]) == (0, ["length", "length"])
    for foreign in ('{"id": "short", "note": "mine"}\n', "notes\n"):
        out.write_text(foreign)
        code, _, _, err = generate("--resume")
        assert (code, out.read_text()) == (2, foreign)
        assert "answers of an earlier run" in err


@pytest.mark.parametrize("output", ["prompts.jsonl", "pipe", "."])
def test_an_output_that_would_destroy_something_is_refused(generate, tmp_path, output):
    os.mkfifo(tmp_path / "pipe")
    code, _, _, err = generate("--output", str(tmp_path / output), prompts=[{"prompt": "a"}])
    assert code == 2
    assert "--output" in err
    assert json.loads((tmp_path / "prompts.jsonl").read_text()) == {"prompt": "a"}
    assert (tmp_path / "pipe").is_fifo()


def test_a_run_that_cannot_start_leaves_earlier_answers_alone(generate, model, tmp_path):
    _, rows, *_ = generate(prompts=[{"prompt": "a"}])
    broken = shutil.copytree(model, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"")
    for argv in (["--model", str(broken)], ["--strict", "--max-model-len", "2"]):
        code, still, *_ = generate(*argv, prompts=[{"prompt": "abc"}])
        assert code
        assert still == rows


def test_logits_that_are_no_numbers_end_the_run(generate, model, tmp_path):
    broken = shutil.copytree(model, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["lm_head.weight"][7] = float("nan")
    save_file(weights, broken / "model.safetensors")
    code, rows, _, err = generate("--model", str(broken), "--logprobs", "1", prompts=[{"id": "mine", "prompt": "a"}])
    assert (code, rows) == (1, [])
    assert "request 'mine': the model's logits are not numbers" in err


def test_a_tokenizer_of_another_model_is_an_error_of_the_prompt(generate, model, tmp_path):
    other = shutil.copytree(model, tmp_path / "other")
    tokenizer = tiny.byte_level()
    tokenizer.add_tokens([f"word{i}" for i in range(10)])
    tokenizer.save(str(other / "tokenizer.json"))
    code, rows, *_ = generate("--model", str(other), prompts=[{"prompt": "word9"}, {"prompt": "a"}])
    assert (code, [r["finish_reason"] for r in rows]) == (1, ["error", "length"])
    assert "not this model's" in rows[0]["error"]


def test_prompts_from_standard_input(generate, monkeypatch):
    data = b'\xef\xbb\xbf{"prompt": "a"}\nnonsense\n{"prompt": "\xff"}\n'
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    code, rows, _, err = generate("--prompts", "-")
    assert (code, len(rows)) == (1, 1)
    assert "standard input:2: not JSON" in err
    assert "standard input:3: not JSON" in err


def test_logprobs_and_dummy_weights(generate):
    _, rows, *_ = generate("--logprobs", "3", "--load-format", "dummy", prompts=[{"prompt": "ab"}])
    row = rows[0]
    assert [p["token_id"] for p in row["logprobs"]] == row["token_ids"]
    for p in row["logprobs"]:
        assert p["top"][0] == [p["token_id"], p["logprob"]]  # greedy
        assert len(p["top"]) == 3
    _, again, *_ = generate("--load-format", "dummy", prompts=[{"prompt": "ab"}])
    assert again[0]["token_ids"] == row["token_ids"]
    _, other, *_ = generate("--load-format", "dummy", "--seed", "1", prompts=[{"prompt": "ab"}])
    assert other[0]["token_ids"] != row["token_ids"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model", "no/such/dir"], ["no/such/dir"]),
        (["--prompts", "no-such.jsonl"], ["--prompts", "no-such.jsonl", "can be read"]),
        (["--output", "no/such/dir/out"], ["--output", "no/such/dir/out", "can be written"]),
        (["--kv-cache-memory", "10"], ["--kv-cache-memory", "10", "two blocks"]),
        (["--max-model-len", "9999"], ["--max-model-len", "9999", "128"]),
        (["--all2all", "local2"], ["--all2all", "local2", "torch"]),
    ],
)
def test_what_cannot_be_is_one_line(generate, argv, words):
    code, _, _, err = generate(*argv, prompts=[{"prompt": "a"}])
    assert code == 2
    (line,) = err.splitlines()
    assert all(word in line for word in words), line


# ------------------------------------------------------------------------------------------------------- several ranks


def arguments(model: str, tmp_path: Path, *argv: str) -> list[str]:
    files = ["--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    return ["-m", "launch", "generate", "--model", model, *files, "--device", "cpu", *argv]


def test_two_ranks_with_bad_lines_and_empty_prompts(model, tmp_path, tiny_models):
    known = tiny_models("mixtral")
    lines = [json.dumps({"id": f"p{i}", "token_ids": p}) for i, p in enumerate(known.prompts[:8])]
    lines[3] = '{"id": "broken"'
    lines[5] = '{"id": "p5", "prompt": ""}'
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    overlap = ["--overlap", "on", "--dbo-decode-token-threshold", "2", "--dbo-prefill-token-threshold", "2"]
    options = ["--max-new-tokens", "8", "--max-num-tokens", "16", "--json", *overlap]
    done = launch_ranks(2, arguments(model, tmp_path, *options), timeout=90)
    rows = list(read_rows(tmp_path / "out.jsonl").values())
    assert done.returncode == 1, done.stderr
    assert [r["id"] for r in rows] == ["p0", "p1", "p2", "p4", "p5", "p6", "p7"]
    assert {r["dp_rank"] for r in rows} == {0, 1}
    for row in rows:
        if row["id"] != "p5":
            assert row["token_ids"] == known.answers[int(row["id"][1:])]
    assert done.stderr.count("prompts.jsonl:4: not JSON") == 1
    summary = json.loads(done.stdout)
    assert summary["finish_reasons"] == {"length": 6, "error": 1}
    assert summary["phases"]["prefill"]["split"] > 0
    assert summary["phases"]["decode"]["split"] > 0


@pytest.mark.parametrize("argv", [["--model", "no/such/dir"], ["--max-num-tokens", "0"]])
def test_a_users_mistake_is_one_line_of_all_ranks(model, tmp_path, argv):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}')
    done = launch_ranks(2, arguments(model, tmp_path, *argv), timeout=60)
    assert done.returncode == 1
    ours = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(ours) == 1
    assert argv[1] in ours[0]
    assert "launch/cli.py" not in done.stderr, "a traceback of ours"
    assert "exitcode  : 2" in done.stderr


LONG = ["--max-new-tokens", "100", "--ignore-eos", "--max-num-seqs", "1", "--max-num-tokens", "32"]


def start_and_wait_for_rows(command: RankCommand, out: Path, num_rows: int) -> None:
    deadline = time.monotonic() + 90
    while len(read_rows(out)) < num_rows:
        assert command.process.poll() is None, command.stderr.read_text()
        assert time.monotonic() < deadline, command.stderr.read_text()
        time.sleep(0.02)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_all_and_loses_nothing(model, tmp_path, killed):
    """... and a rerun with --resume does the rest."""
    tiny.write_prompts(tmp_path / "prompts.jsonl", tiny.prompts(60))
    out = tmp_path / "out.jsonl"
    with RankCommand(2, arguments(model, tmp_path, *LONG)) as command:
        start_and_wait_for_rows(command, out, 4)
        before = read_rows(out)
        os.kill(command.rank_pids()[killed], signal.SIGKILL)
        done = command.wait(20)
    assert done.returncode == 1
    assert f"rank {killed} on" in done.stderr, done.stderr
    assert "ended without a word" in done.stderr
    after = read_rows(out)
    assert len(after) < 60
    assert before.items() <= after.items()
    assert all(len(row["token_ids"]) == 100 for row in after.values())


def test_an_interrupt_ends_after_a_step_and_resume_does_the_rest(model, tmp_path, fresh_logging):
    tiny.write_prompts(tmp_path / "prompts.jsonl", tiny.prompts(16))
    out = tmp_path / "out.jsonl"
    with RankCommand(2, arguments(model, tmp_path, *LONG)) as command:
        start_and_wait_for_rows(command, out, 2)
        os.kill(command.rank_pids()[1], signal.SIGINT)
        done = command.wait(20)
    assert done.returncode == 1
    assert "exitcode  : 130" in done.stderr
    partial = read_rows(out)
    assert 2 <= len(partial) < 16
    assert list(partial) == [f"p{i}" for i in range(16) if f"p{i}" in partial]
    assert cli.run(main, [*arguments(model, tmp_path, *LONG, "--resume")[2:]]) == 0  # on one rank
    complete = read_rows(out)
    assert list(complete) == [f"p{i}" for i in range(16)]
    assert partial.items() <= complete.items()
