"""The runner of the GPU suite, with parts that pass, fail, hang, or miss a gate; and, as a slow test, its rehearsal."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import demo, routing, setup, suite, summary
from benchmarks.gpu.clock import covered
from dbo.agreement import Agreement, Vote
from dbo.config import DBOConfig
from dbo.policy import make_policy
from dbo.slices import make_slices, split_batch
from moe.all2all.local import LocalAll2All
from moe.config import named_shape
from tests.ranks import REPOSITORY

CALL_S = 540  # what one loan of GPUs gives

PROGRAM = """
import argparse, json, os, pathlib, subprocess, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("deed")
parser.add_argument("--out", type=pathlib.Path)
args = parser.parse_args()
result = {"command": "part", "figures": {args.deed: {"value": 1.0, "low": 1.0, "high": 2.0, "unit": "ms"}}}
if args.deed == "hang":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    args.out.with_suffix(".pids").write_text(f"{os.getpid()} {child.pid}")
    child.wait()
if args.deed == "gate":
    result["sizes"] = [{"gates": {"passed": False}}]
print("this is", args.deed)
args.out.write_text(json.dumps(result))
sys.exit(args.deed == "fail")
"""


@pytest.fixture
def make_part(tmp_path, monkeypatch):
    (tmp_path / "deeds.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OUT", str(tmp_path / "packed"))

    def make(deed):
        return suite.Part(name=deed, call=1, seconds=1, module="deeds", arguments=deed, ranks=0)

    return make


def run(parts, out, **options):
    made = suite.Suite(out, 2, rehearse=False, **{"budget_s": 100, **options})
    return made.run(parts)


def test_parts_fit_into_calls_and_correctness_comes_first():
    for call in (1, 2, 3, 4):
        assert sum(part.seconds for part in suite.PARTS if part.call == call) <= CALL_S
    assert [part.call for part in suite.PARTS] == sorted(part.call for part in suite.PARTS)
    assert suite.PARTS[0].name == "first"
    assert len({part.name for part in suite.PARTS}) == len(suite.PARTS)


def test_what_fails_does_not_keep_the_others(make_part, tmp_path, capfd):
    assert not run([make_part(deed) for deed in ("fail", "gate", "fine")], tmp_path / "out")
    status = json.loads((tmp_path / "out" / "status.json").read_text())
    assert {name: each["status"] for name, each in status.items()} == {
        "fail": "failed, exit code 1",
        "gate": "a gate failed",
        "fine": "passed",
    }
    assert "this is fine" in capfd.readouterr().out
    assert "this is fine" in (tmp_path / "out" / "log" / "fine.txt").read_text()
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["fine"]["value"] == 1.0
    assert len(list((tmp_path / "packed").iterdir())) <= 8


def test_what_hangs_is_killed_with_its_children(make_part, tmp_path, monkeypatch):
    monkeypatch.setattr(suite.Part, "limit_s", 4.0)
    monkeypatch.setattr(suite, "STACKS_S", 0.5)
    assert not run([make_part("hang"), make_part("fine")], tmp_path / "out")
    status = json.loads((tmp_path / "out" / "status.json").read_text())
    assert "hung, killed after 4 s" in status["hang"]["status"]
    assert status["fine"]["status"] == "passed"
    assert "Current thread" in (tmp_path / "out" / "log" / "hang.txt").read_text()  # where it hung
    pids = (tmp_path / "out" / "hang.pids").read_text().split()
    deadline = time.monotonic() + 10
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_runs(pid) for pid in pids)


def _runs(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_part_that_would_not_end_in_time_is_not_started(make_part, tmp_path, capfd):
    late = replace(make_part("late"), seconds=1000)
    assert not run([late, make_part("fine")], tmp_path / "out")
    assert "scripts/gpu_suite late" in capfd.readouterr().out
    assert not (tmp_path / "out" / "late.json").exists()


def test_results_of_several_calls_are_merged(make_part, tmp_path):
    for deed in ("one", "two"):
        assert run([make_part(deed)], tmp_path / deed)
        (tmp_path / "packed" / suite.PACK).rename(tmp_path / f"{deed}.tar.gz")
    suite.merge([tmp_path / "one.tar.gz", tmp_path / "two"], tmp_path / "merged")
    found = json.loads((tmp_path / "merged" / "summary.json").read_text())
    assert set(found) == {"one", "two"}
    assert set(json.loads((tmp_path / "merged" / "status.json").read_text())) == {"one", "two"}
    assert "| two | 1 | 1 to 2 | ms |" in (tmp_path / "merged" / "figures.md").read_text()


def test_earlier_results_can_still_be_read():
    for directory in (REPOSITORY / "benchmarks" / "results").glob("*x2"):
        for file in directory.glob("*.json"):
            has_figures = file.stem.partition("-")[0] in summary.READERS or '"figures":' in file.read_text()
            if file.name not in ("summary.json", "status.json"):
                assert bool(summary.read(file)) == has_figures, file


def test_sizes_whose_gate_failed_have_no_figures():
    file = next((REPOSITORY / "benchmarks" / "results").glob("*x2")) / "prefill.json"
    found = json.loads(file.read_text())
    for size in found["sizes"]:
        size["gates"]["passed"] = False
    assert summary.of_prefill(found) == {}


def test_answers_of_invariant_arms_may_not_part_where_others_may():
    def answer(*tokens):
        top = [[[5, -1.0], [6, -1.01]]] * len(tokens)  # as good as undecided
        return {"id": "a", "token_ids": list(tokens), "logprobs": [{"top": each} for each in top]}

    answers = {"off": [answer(5, 5)], "on": [answer(5, 6)]}
    assert demo.compare(answers["off"], answers["on"])["passed"]
    same, other = ([answer(5, 5)], [answer(5, 6)])
    for on, part in ((same, 0), (other, 1)):
        found = {
            "against_cpu": None,
            "against_off": {},
            "invariant": demo.compare_invariant({**answers, "off, invariant": same, "on, invariant": on}),
        }
        assert suite._gate_failed(found) == bool(part)
        assert summary.of_demo(found)["demo_answers_that_part_invariant"]["value"] == part
    assert {"off, invariant", "on, invariant", "on, greenlets, invariant"} <= set(demo.REHEARSED)


def test_calls_that_others_disturbed_do_not_count_as_quiet(monkeypatch):
    sticks = iter([0.10, 0.10, 0.12, 0.10, 0.10, 0.20, 0.21, 0.20])  # before and after each of four calls
    monkeypatch.setattr(setup, "yardstick_us", lambda: next(sticks))
    calls = iter([0.0, 0.0, 0.03, 0.03])
    mesh = SimpleNamespace(device=torch.device("cpu"), world_size=1)
    times = setup.time_arms({"arm": lambda: time.sleep(next(calls))}, mesh, rounds=4, warmup=0)["arm"]
    assert len(times.host_ms) == 4
    assert times.host > 10 > max(times.quiet_ms)
    assert len(times.quiet_ms) == 2


def test_covered_time_is_a_union():
    assert covered([(5, 7), (0, 2), (1, 3), (1.5, 2)]) == 5
    assert covered([]) == 0


def test_names_that_do_not_exist_are_refused():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.suite", "nonsense"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "nonsense is none of first, kernels" in done.stderr


@pytest.mark.slow
def test_rehearsal(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.suite", "--rehearse", "--into", str(tmp_path / "out")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    named = json.loads((tmp_path / "out" / "summary.json").read_text())
    wanted = {
        "expert_path_ratio_16384", "nic_class_speedup_8192", "nic_class_speedup_16384", "nvlink_speedup_16384",
        "host_ms_per_layer_overlap_8192", "off_overhead", "soak_turns",
        *(f"prefill_tokens_per_s_gpu_{arm}_{2048 << k}" for arm in ("whole", "overlap") for k in range(5)),
    }  # fmt: skip
    missing = wanted - set(named) - {"nvlink_speedup_16384"}  # left out where the most SMs are best for whole
    assert not missing


def layers_apart(noise):
    """What `routing` finds of a tiny model on one rank whose whole arm is off by so much at the end of each layer."""
    torch.manual_seed(0)
    config = replace(named_shape("tiny"), num_layers=3)
    place = {"group": None, "device": torch.device("cpu"), "config": config, "max_tokens_per_rank": 96}
    mesh = SimpleNamespace(device=torch.device("cpu"), world_size=1, rank=0)
    model = setup.random_model(config, LocalAll2All(**place), mesh.device)
    batch, kv = setup.prompts(config, 96, 24, mesh)
    parts = split_batch(batch, cut_at(batch, 48))

    class Off(routing.Stream):
        def step(self, layer, x, residual):
            off = noise * torch.randn(x.shape) * x if len(x) == 96 else 0.0
            return super().step(layer, x + off, residual)

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(routing, "Stream", Off)
        return routing.compare_layers(model, batch, parts, kv)


def cut_at(batch, tokens):
    config = DBOConfig(overlap="on", prefill_token_threshold=0, allow_single_rank=True)
    agreement = Agreement(None, dp_rank=0, dp_size=1, config=config, policy=make_policy(config))
    plan = agreement.agree(Vote(num_tokens=batch.num_tokens, num_tokens_padded=batch.num_tokens))
    slices = make_slices(plan, batch.query_lens, seq_lens=batch.seq_lens)
    assert slices[0].num_tokens == tokens
    return slices


def test_roundings_pass_the_gate_and_errors_do_not():
    same = layers_apart(0.0)
    assert routing.passes(same)
    assert routing.worst(same)["same_error"] < 1e-5
    rounded, wrong = layers_apart(2.0**-9), layers_apart(0.5)
    assert len(rounded) == 3
    assert routing.passes(rounded), routing.worst(rounded)
    assert routing.worst(rounded)["same_error"] > 1e-4
    assert not routing.passes(wrong)
    assert routing.worst(wrong)["other_rows"] > 0
