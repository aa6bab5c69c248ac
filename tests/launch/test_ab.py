"""`ab` as a user runs it on one rank: what it refuses before it measures, and that its gate fails when it must."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from launch import cli
from launch.__main__ import main
from launch.engine import Engine
from moe import experts
from moe.all2all.local import LocalAll2All

SPLITTING = ["--allow-single-rank", "--dbo-prefill-token-threshold", "2", "--dbo-decode-token-threshold", "2"]
SMALL = "synthetic:requests=3,prompt_tokens=5-9,new_tokens=2"


@pytest.fixture
def ab(tmp_path, capsys, fresh_logging):
    """Run `ab` on one rank, here; gives (exit code, standard output, standard error)."""

    def run(*argv: str, workload: str = SMALL, model: tuple[str, ...] = ("--shape", "tiny")):
        needed = ["--device", "cpu", "--rounds", "3", "--warmup", "0", "--log-level", "error"]
        where = ["--report", str(tmp_path / "report"), "--workload", workload]
        code = cli.run(main, ["ab", *needed, *where, *model, *argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def read_report(tmp_path: Path):
    """The report, as strict JSON."""

    def refuse(constant: str):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads((tmp_path / "report" / "ab.json").read_text(), parse_constant=refuse)


@pytest.mark.parametrize(
    ("argv", "content", "words"),
    [
        (["--arms", "whole"], None, ["--arms", "overlap"]),
        (["--arms", "whole,overlap,fast"], None, ["--arms", "fast", "split"]),
        (["--rate", "0"], None, ["--rate", "requests a second"]),
        (["--profile", "p.json"], None, ["--profile", "--arms with auto"]),
        (["--num-layers", "1", "--shape", "no such"], None, ["no such", "mixtral-8x7b"]),
        (["--report", "/dev/null"], None, ["--report", "/dev/null"]),
        (["--workload", "no-such.jsonl"], None, ["--workload", "no-such.jsonl", "No such file"]),
        ([], "\n", ["--workload", "at least one prompt"]),
        ([], '{"prompt": "x"}', ["prompt '1'", "no tokenizer.json"]),
        ([], '{"token_ids": [99999]}', ["prompt '1'", "99999"]),
        (["--max-model-len", "4"], '{"token_ids": [1, 2, 3, 4, 5]}', ["prompt '1'", "--max-model-len is 4"]),
        (["--max-model-len", "4"], '{"id": "a", "token_ids": [1], "max_new_tokens": 9}', ["prompt 'a'", "1 + 9"]),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_is_measured(ab, tmp_path, argv, content, words):
    workload = SMALL
    if content is not None:
        (tmp_path / "in.jsonl").write_text(content)
        workload = str(tmp_path / "in.jsonl")
    code, out, err = ab(*argv, workload=workload)
    assert (code, out) == (2, "")
    (line,) = [line for line in err.splitlines() if not line.startswith("weights")]
    assert all(word in line for word in words), line


def test_fewer_layers_with_random_weights(ab, tmp_path, tiny_models):
    few = ("--model", tiny_models("mixtral").directory, "--load-format", "dummy", "--num-layers", "1")
    code, out, _ = ab(*SPLITTING, "--skip-breakdown", model=few)
    assert code == 0
    assert "equality gate passed" in out
    report = read_report(tmp_path)
    assert report["breakdown"] == []
    assert "not measured: left out (--skip-breakdown)" in out
    assert report["arms"]["overlap"]["split_steps"]["prefill"] > 0
    assert report["arms"]["whole"]["split_steps"] == {"prefill": 0, "decode": 0}
    traced = report["timeline"]
    assert {name: step["num_ubatches"] for name, step in traced.items()} == {"whole": 1, "split": 2, "overlap": 2}
    assert len({(step["phase"], step["num_tokens"]) for step in traced.values()}) == 1
    events = json.loads((tmp_path / "report" / "trace.json").read_text())["traceEvents"]
    lanes = {(event["pid"], event["cat"]) for event in events if event["ph"] == "X"}
    assert lanes == {(arm, lane) for arm in range(3) for lane in ("compute", "comm")}
    assert (tmp_path / "report" / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_all_messages_are_counted_and_a_step_is_taken_apart(ab, tmp_path, monkeypatch):
    """One rank sends nothing, so its transport is made to take time: 20 ms in each of two layers."""
    dispatch = LocalAll2All.dispatch

    def slow(self, *args, **kwargs):
        work = dispatch(self, *args, **kwargs)
        finish = work.wait
        return SimpleNamespace(result=lambda: (time.sleep(0.02), finish())[1])

    monkeypatch.setattr(LocalAll2All, "dispatch", slow)
    code, out, _ = ab(*SPLITTING, "--rounds", "1")
    assert code == 0
    report = read_report(tmp_path)
    assert (report["arms"]["whole"]["messages"], report["arms"]["whole"]["sent_bytes"]) == (0, 0)
    assert [step["phase"] for step in report["breakdown"]] == ["prefill", "decode"]
    for step in report["breakdown"]:
        ms = step["ms"]
        assert all(len(samples) == 5 for samples in step["samples_ms"].values())
        assert min(ms["whole"], ms["messages"]) > 40
        assert ms["compute"] < ms["whole"] - 20
        assert step["communication_share"] > 0.3
        assert step["ceiling"] == pytest.approx(ms["whole"] / max(ms["compute"], ms["messages"]))
    prefill = report["breakdown"][0]
    assert min(prefill["ms"]["split"], prefill["ms"]["split_messages"]) > 80
    assert prefill["ms"]["split_compute"] < prefill["ms"]["split"] - 40
    assert prefill["device"] == {}
    assert "GPU-busy share and launches per step: not measured, CUDA only" in out


def test_experts_are_chosen_by_a_rule_however_the_batch_is_cut(ab, tmp_path, monkeypatch):
    chosen = []
    rows = experts._ExpertByExpert._rows

    def watch(self, x, topk_idx, topk_weights):
        chosen.append(topk_idx[topk_idx >= 0])
        return rows(self, x, topk_idx, topk_weights)

    monkeypatch.setattr(experts._ExpertByExpert, "_rows", watch)
    code, out, _ = ab(*SPLITTING, "--routing", "one-expert", "--rounds", "1")
    assert code == 0
    assert "equality gate passed" in out
    assert "experts are chosen by --routing one-expert" in out
    assert set(torch.cat(chosen).tolist()) == {0, 1}
    code, out, err = ab("--routing", "zipf")
    assert (code, out) == (2, "")
    assert "--routing" in err


def test_requests_arrive_by_the_clock(ab, tmp_path):
    code, out, _ = ab(*SPLITTING, "--rate", "20", "--rounds", "5", "--arms", "whole,overlap,auto")
    assert code == 0
    assert "compare TTFT and ITL" in out
    report = read_report(tmp_path)
    assert report["paced"]
    assert set(report["speedup"]["auto_over_whole"]) == {"prefill", "decode", "total", "ttft", "itl"}
    assert report["speedup"]["auto_over_whole"]["ttft"]["low"] > 0
    assert report["arms"]["whole"]["latency_ms"]["ttft"]["high"] < 1000  # counted from the arrival
    code, out, err = ab("--rate", "2x")
    assert (code, out) == (2, "")
    assert "only a trace has a pace" in err


def test_several_sizes_make_one_report(ab, tmp_path):
    workload = "synthetic:requests=2,prompt_tokens=8/64,new_tokens=1"
    code, out, _ = ab(*SPLITTING, "--rounds", "5", "--json", workload=workload)
    assert code == 0
    report = read_report(tmp_path)
    assert json.loads(out) == report
    points = report["crossover"]["prefill"]["overlap"]["points"]
    assert [point["tokens"] for point in points] == [16, 128]
    assert all(point["speed"]["low"] <= point["speed"]["value"] <= point["speed"]["high"] for point in points)
    assert [size["workload"] for size in report["sizes"]] == [workload.replace("8/64", n) for n in ("8", "64")]
    for name in ("1/ab.json", "2/report.html", "report.html"):
        assert (tmp_path / "report" / name).stat().st_size > 1000


def test_the_gate_fails_on_one_bit_also_when_split_is_not_measured(ab, tmp_path, monkeypatch):
    forward = Engine.forward

    def faulty(self, schedule, plan, dbo):
        hidden = forward(self, schedule, plan, dbo)
        return hidden * (1 + 1e-6) if plan.should_ubatch and dbo.interleave else hidden

    monkeypatch.setattr(Engine, "forward", faulty)
    code, out, _ = ab(*SPLITTING, "--arms", "whole,overlap")
    assert code == 1
    assert "equality gate FAILED: split and overlap DIFFER" in out
    assert "faster" not in out
    report = read_report(tmp_path)
    assert (list(report["arms"]), report["gate"]["passed"]) == (["whole", "overlap"], False)


@pytest.mark.parametrize(
    ("name", "head", "row", "broken"),
    [
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "2023-11-16 18:15:46.68,{},3", "now,1,1"),
        ("t.jsonl", "", '{{"timestamp": 0, "input_length": {}, "output_length": 2, "hash_ids": [0]}}', "{"),
    ],
)
def test_a_trace_is_replayed_and_its_bad_rows_are_named(ab, tmp_path, name, head, row, broken):
    trace = tmp_path / name
    rows = [row.format(length) for length in (7, 500, 9, 30)]
    trace.write_text(head + "\n".join(rows))
    code, _, err = ab(
        *SPLITTING, "--max-requests", "3", "--max-model-len", "16", "--log-level", "info", workload=str(trace)
    )
    assert code == 0, err
    assert "1 of 3 requests shortened to 16 tokens (--max-model-len)" in err
    trace.write_text(head + "\n".join([*rows, broken, broken]))
    code, out, err = ab(workload=str(trace))
    line = len(rows) + 1 + head.count("\n")
    assert (code, out) == (2, "")
    assert f"{trace}:{line}: " in err
    assert "(and 1 more)" in err
