"""Metrics: what a step's line says, what Prometheus reads, and that neither can hold up or end a run."""

from __future__ import annotations

import json
import math
import socket
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dbo.agreement import BatchPlan, Reason
from dbo.config import DBOConfig
from dbo.errors import ConfigError
from launch import cli
from launch.__main__ import main
from launch.config import GenerateOptions
from launch.engine import StepRecord
from launch.metrics import Endpoint, JsonLines, open_sinks, step_row
from tests.launch import tiny
from tests.ranks import launch_ranks

NUM_BLOCKS = 40
RECORD = StepRecord(
    phase="decode", num_tokens=6, num_tokens_padded=8, num_tokens_of_all=12, num_rows_of_all=16, num_ubatches=2,
    reason="split", agree_ms=1.0, wait_ms=5.0, wall_ms=20.0,
)  # fmt: skip
PLAN = BatchPlan(
    config=DBOConfig(),
    votes={"num_tokens": (6, 6), "num_kv_blocks": (10, 30), "num_running": (6, 7), "num_waiting": (0, 2)},
    reason=Reason.SPLIT,
    reason_rank=None,
    num_ubatches=2,
    num_tokens_padded=8,
)
WHOLE = replace(RECORD, phase="prefill", num_ubatches=1, reason="idle rank", num_rows_of_all=12, wait_ms=None)


def read(port: int) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """What Prometheus reads: values by labels, by name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return values


@pytest.fixture
def endpoint():
    opened = Endpoint("127.0.0.1", 0, NUM_BLOCKS)
    yield opened
    opened.close()


def test_a_line_says_what_all_ranks_did():
    row = step_row(3, RECORD, PLAN, NUM_BLOCKS)
    assert abs(row.pop("time") - time.time()) < 10
    assert row == {
        "step": 3, "phase": "decode", "tokens": 12, "tokens_per_s": 600.0, "step_ms": 20.0, "agree_ms": 1.0,
        "num_ubatches": 2, "reason": "split", "reason_rank": None, "padding_share": 0.25, "kv_use": 0.75,
        "comm_share": 0.25, "running": 13, "waiting": 2,
    }  # fmt: skip
    assert step_row(0, WHOLE, PLAN, NUM_BLOCKS)["comm_share"] is None


def test_lines_reach_the_file_during_the_run_and_at_its_end(tmp_path, monkeypatch):
    file = tmp_path / "metrics.jsonl"
    lines = JsonLines(file, NUM_BLOCKS)
    lines.step(RECORD, PLAN)
    assert file.read_text() == ""
    monkeypatch.setattr("launch.metrics.FLUSH_S", 0.0)
    lines.step(RECORD, PLAN)
    assert len(file.read_text().splitlines()) == 2
    monkeypatch.undo()
    lines.step(RECORD, PLAN)
    lines.close()
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [0, 1, 2]
    JsonLines(file, NUM_BLOCKS, append=True).close()
    assert len(file.read_text().splitlines()) == 3
    JsonLines(file, NUM_BLOCKS).close()
    assert file.read_text() == ""


def test_a_full_disk_ends_the_metrics_and_not_the_run(caplog):
    lines = JsonLines(Path("/dev/full"), NUM_BLOCKS)
    for _ in range(200):
        lines.step(RECORD, PLAN)
    lines.close()
    assert [r.getMessage() for r in caplog.records] == ["no more metrics: /dev/full: No space left on device"]


def test_prometheus_reads_counters_gauges_and_a_histogram(endpoint):
    assert read(endpoint.port)["dbo_split_share"] == {(): 0}
    for record in (RECORD, RECORD, WHOLE, replace(RECORD, wall_ms=20_000.0)):
        endpoint.step(record, PLAN)
    values = read(endpoint.port)
    decode = (("phase", "decode"),)
    assert values["dbo_steps_total"] == {
        (("phase", "decode"), ("reason", "split")): 3,
        (("phase", "prefill"), ("reason", "idle rank")): 1,
    }
    assert values["dbo_tokens_total"] == {decode: 36, (("phase", "prefill"),): 12}
    assert values["dbo_split_share"] == {(): 0.75}
    assert values["dbo_padding_rows_total"] == {(): 12}
    assert values["dbo_agree_seconds_total"][()] == pytest.approx(0.004)
    assert values["dbo_message_wait_seconds_total"][()] == pytest.approx(0.015)
    assert values["dbo_padding_share"] == {(): 0.25}
    assert values["dbo_comm_share"] == {(): 5 / 20_000}
    assert values["dbo_tokens_per_second"] == {(): 0.6}
    assert values["dbo_kv_use"] == {(("rank", "0"),): 0.25, (("rank", "1"),): 0.75}
    assert values["dbo_requests"][("rank", "1"), ("state", "waiting")] == 2
    buckets = {dict(labels)["le"]: n for labels, n in values["dbo_step_seconds_bucket"].items() if decode[0] in labels}
    assert [buckets[le] for le in ("0.01", "0.02", "10.0", "+Inf")] == [0, 2, 2, 3]  # a bound belongs to its bucket
    assert values["dbo_step_seconds_count"][decode] == 3
    assert values["dbo_step_seconds_sum"][decode] == pytest.approx(20.04)
    endpoint.step(WHOLE, PLAN)
    assert math.isnan(read(endpoint.port)["dbo_comm_share"][()])


def test_only_the_loopback_can_read_by_default(endpoint):
    assert GenerateOptions(model="m", prompts="p", output="o").metrics_host == "127.0.0.1"
    assert GenerateOptions(model="m", prompts="p", output="o").metrics_port is None
    with pytest.raises(ConnectionRefusedError):  # a loopback address too, but not the one
        socket.create_connection(("127.0.0.2", endpoint.port), timeout=5)


def test_a_reader_who_stalls_holds_up_nobody(endpoint):
    with socket.create_connection(("127.0.0.1", endpoint.port)) as stalled, socket.socket() as unread:
        stalled.sendall(b"GET /metrics HT")  # and nothing more
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        unread.connect(("127.0.0.1", endpoint.port))
        unread.sendall(b"GET /metrics HTTP/1.1\r\n\r\n" * 50)
        started = time.monotonic()
        for _ in range(2000):
            endpoint.step(RECORD, PLAN)
        assert read(endpoint.port)["dbo_steps_total"]
        endpoint.close()
        assert time.monotonic() - started < 5


def test_a_port_in_use_and_a_foreign_address_are_named(endpoint):
    with pytest.raises(ConfigError, match=rf"--metrics-port={endpoint.port}.*127\.0\.0\.1.*in use.*choose another"):
        Endpoint("127.0.0.1", endpoint.port, NUM_BLOCKS)
    with pytest.raises(ConfigError, match=r"--metrics-port=0.*192\.0\.2\.1"):
        Endpoint("192.0.2.1", 0, NUM_BLOCKS)
    with pytest.raises(ConfigError, match="--metrics-port=70000"):
        Endpoint("127.0.0.1", 70_000, NUM_BLOCKS)


def test_without_the_package_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match="pip install prometheus-client"):
        Endpoint("127.0.0.1", 0, NUM_BLOCKS)


def test_off_and_on_other_ranks_there_is_nothing(tmp_path):
    options = GenerateOptions(model="m", prompts="p", output="o")
    assert open_sinks(options, 0, 1) == []
    assert open_sinks(replace(options, metrics=str(tmp_path / "m"), metrics_port=0), 1, 1) == []
    with pytest.raises(ConfigError, match="--metrics='/no/such/dir/m'"):
        open_sinks(replace(options, metrics="/no/such/dir/m"), 0, 1)
    with pytest.raises(ConfigError, match="another file than --prompts"):  # which it would empty
        open_sinks(replace(options, metrics="./p"), 0, 1)


# -------------------------------------------------------------------------------------------------- the whole command


def arguments(model: str, tmp_path: Path, *argv: str) -> list[str]:
    files = ["--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    return ["generate", "--model", model, *files, "--device", "cpu", "--max-new-tokens", "6", *argv]


@pytest.fixture(scope="module")
def model(tiny_models) -> str:
    directory = Path(tiny_models("mixtral").directory)
    tiny.byte_level().save(str(directory / "tokenizer.json"))
    return str(directory)


def test_a_port_in_use_is_one_line(model, tmp_path, capsys, fresh_logging, endpoint):
    tiny.write_prompts(tmp_path / "prompts.jsonl", tiny.prompts(2))
    assert cli.run(main, arguments(model, tmp_path, "--metrics-port", str(endpoint.port))) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert f"--metrics-port={endpoint.port}" in line


def test_the_lines_of_a_run_on_two_ranks_add_up(model, tmp_path):
    prompts = tiny.prompts(12)
    tiny.write_prompts(tmp_path / "prompts.jsonl", prompts)
    overlap = ["--overlap", "on", "--dbo-decode-token-threshold", "2", "--dbo-prefill-token-threshold", "2"]
    file = tmp_path / "metrics.jsonl"
    options = ["--metrics", str(file), "--metrics-port", "0", "--max-num-tokens", "24", "--json", *overlap]
    done = launch_ranks(2, ["-m", "launch", *arguments(model, tmp_path, *options)], timeout=90)
    assert done.returncode == 0, done.stderr
    assert "metrics at http://127.0.0.1:" in done.stderr
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert sum(row["tokens"] for row in rows) == sum(map(len, prompts)) + 12 * 5  # the last token of each is not fed
    summary = json.loads(done.stdout)
    assert sum(phase["steps"] for phase in summary["phases"].values()) == len(rows)
    assert sum(row["reason"] == "split" for row in rows) == summary["reasons"]["split"]
    for row in rows:
        assert 0 < row["comm_share"] < 1
        assert 0 < row["kv_use"] <= 1
        assert 0 <= row["padding_share"] < 1
        assert row["agree_ms"] <= row["step_ms"]
    assert rows[0]["running"] + rows[0]["waiting"] == 12
