"""`--overlap auto` between ranks: decided by the profile, alike everywhere, refused where it does not hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dbo.config import DBOConfig
from dbo.policy import ArmCosts, Curve, StepCosts
from launch import cli
from launch.__main__ import main
from launch.config import EngineOptions
from launch.profile import fingerprint, write_profile
from launch.session import load_engine, resolve
from moe.config import read_config
from tests.launch import tiny
from tests.launch.engine_cases import OPTIONS, Recorder, _request
from tests.launch.profiles import profile, steps
from tests.ranks import launch_ranks

# Prefill pays from some 12 tokens a rank on, decode never.
COSTS = StepCosts(
    prefill=ArmCosts(whole=Curve((4, 32), (4.0, 32.0)), overlap=Curve((4, 32), (10.0, 20.0)), whole_skew=0.5),
    decode=ArmCosts(whole=Curve((1, 8), (1.0, 1.0)), overlap=Curve((1, 8), (2.0, 2.0))),
)


def decide(ctx, directory, prompts_by_rank):
    """Run on a rank of a pool; what was decided and computed, and the drifts that were voted."""
    options = EngineOptions(model=directory, overlap="auto", **OPTIONS)
    with ctx.mesh() as mesh:
        engine = load_engine(options, resolve(options, read_config(directory)), mesh, model=Path(directory))
        engine.costs = COSTS
        recorder = Recorder()
        requests = [_request(index, tokens, {}) for index, tokens in prompts_by_rank[ctx.rank]]
        result = engine.run(requests, DBOConfig(overlap="auto"), recorder)
        whole = [_request(index, tokens, {}) for index, tokens in prompts_by_rank[ctx.rank]]
        engine.run(whole, DBOConfig())
        engine.close()
        same = [a.output_ids for a in requests] == [b.output_ids for b in whole]
        return recorder.plans, dict(result.reasons), result.summary, same


def test_all_ranks_decide_alike_and_by_the_costs(ranks, tiny_models):
    model = tiny_models("mixtral")
    split = [[(i, p) for i, p in enumerate(model.prompts) if i % 2 == rank] for rank in range(2)]
    first, second = ranks(2).run(decide, model.directory, split, timeout=90)
    assert first[0] == second[0]  # plans, with reasons
    assert first[1] == second[1]
    assert first[1]["split"] > 0
    assert first[1]["policy: not profitable"] > 0
    assert "overlap auto by a measured profile" in first[2]
    assert first[3]
    assert second[3]
    looks = 0
    for num_tokens, num_ubatches, _, reason, *_, uniform in first[0]:
        if reason == "split":
            looks += uniform or max(num_tokens) < 12
        elif reason == "policy: not profitable":
            assert uniform or max(num_tokens) < 24
        assert (num_ubatches > 1) == (reason == "split")
    assert looks <= len(first[0]) / 8  # what runs contradicts these costs, so the other arm is looked at now and then


# ------------------------------------------------------------------------------------------------ the whole command


@pytest.fixture(scope="module")
def model(tiny_models) -> str:
    directory = Path(tiny_models("mixtral").directory)
    tiny.byte_level().save(str(directory / "tokenizer.json"))
    return str(directory)


def arguments(model: str, tmp_path: Path, *argv: str) -> list[str]:
    tiny.write_prompts(tmp_path / "prompts.jsonl", tiny.prompts(8))
    files = ["--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    return ["generate", "--model", model, *files, "--device", "cpu", "--max-new-tokens", "4", *argv]


def write(tmp_path: Path, model: str, **setup) -> str:
    flat = steps({1: 10.0}, {1: 1.0})  # overlap always pays
    file = tmp_path / "profile.json"
    made = profile(model=fingerprint(read_config(model)), prefill=flat, decode=flat, **setup)
    write_profile(made, file)
    return str(file)


def test_generate_decides_by_a_profile_and_says_what_differs(model, tmp_path):
    file = write(tmp_path, model)
    argv = arguments(model, tmp_path, "--overlap", "auto", "--profile", file, "--json")
    done = launch_ranks(2, ["-m", "launch", *argv], timeout=90)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["reasons"]["split"] > 0
    assert summary["overlap"] == "auto"
    assert "overlap auto: 2 ubatches (threads) where the profile says that it pays" in done.stderr
    assert done.stderr.count(f"{file}: host a in the profile, ") == 1  # rank 0 alone


def test_a_profile_of_more_ranks_is_refused_naming_both(model, tmp_path):
    file = write(tmp_path, model, ranks=4)
    argv = arguments(model, tmp_path, "--overlap", "auto", "--profile", file)
    done = launch_ranks(2, ["-m", "launch", *argv], timeout=90)
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert "ranks 4 in the profile, 2 here" in line
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--profile", "x.json"], ["--profile", "x.json", "--overlap auto, not off"]),
        (["--overlap", "auto", "--profile", "x.json"], ["--profile", "x.json", "No such file"]),
    ],
)
def test_a_profile_that_nothing_reads_or_that_is_missing(model, tmp_path, capsys, fresh_logging, argv, words):
    assert cli.run(main, arguments(model, tmp_path, *argv)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert all(word in line for word in words), line


def test_without_a_profile_thresholds_decide_and_the_log_says_so_once(model, tmp_path, capsys, fresh_logging):
    assert cli.run(main, arguments(model, tmp_path, "--overlap", "auto")) == 0
    err = capsys.readouterr().err
    assert err.count("--overlap auto without --profile goes by the thresholds") == 1
    assert "for want of a measured profile" in err


def test_the_number_of_sms_of_the_profile_is_used_and_a_difference_said(model, tmp_path, capsys, fresh_logging):
    single = {"ranks": 1, "all2all": "local", "comm_sms": 8}
    argv = arguments(model, tmp_path, "--overlap", "auto", "--profile", write(tmp_path, model, **single))
    assert cli.run(main, [*argv, "--comm-sms", "16"]) == 0
    assert "comm-sms 8 in the profile, which is used, not 16" in capsys.readouterr().err
    assert cli.run(main, argv) == 0
    assert "comm-sms" not in capsys.readouterr().err
