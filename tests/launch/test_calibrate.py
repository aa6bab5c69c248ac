"""`calibrate` as a user runs it, and the pieces of its choices."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from dbo.config import DBOConfig
from dbo.errors import ConfigError
from dbo.policy import PROBE_OVERLAP, PROBE_WHOLE
from launch import cli
from launch.__main__ import main
from launch.calibrate import (
    LEAST_ROUNDS,
    Calibration,
    Script,
    Size,
    comm_sms_choices,
    grid,
    halved,
    local_experts,
    outside_in,
    spread_sizes,
)
from launch.config import CalibrateOptions
from launch.parts import AttentionBench, ExpertBench, phase_lens, prefill_lens
from launch.profile import read_profile
from launch.scheduler import Limits
from moe.config import named_shape
from tests.ranks import launch_ranks

SMALL = ["--device", "cpu", "--shape", "tiny", "--log-level", "warning", "--budget", "4", "--max-rounds", "3"]
SIZES = ["--prefill-tokens", "8,40", "--decode-tokens", "2,6", "--prompt-tokens", "16", "--context", "5"]
LIMITS = Limits(max_num_tokens=1024, max_num_seqs=16, max_model_len=512, block_size=16, num_blocks=64)


@pytest.fixture
def calibrate(tmp_path, capsys, fresh_logging):
    """Run `calibrate` on one rank, here; gives (exit code, standard output, standard error)."""

    def run(*argv: str, base: list[str] = SMALL):
        code = cli.run(main, ["calibrate", *base, "--out", str(tmp_path / "p.json"), *argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_one_rank_writes_a_profile_and_prints_it(calibrate, tmp_path):
    code, out, err = calibrate(*SIZES)
    assert code == 0, err
    made = read_profile(tmp_path / "p.json")
    assert made.steps is not None
    assert made.steps["prefill"].whole.tokens == made.steps["prefill"].overlap.tokens == (8, 40)
    assert made.steps["prefill"].split is not None
    assert made.steps["decode"].whole.tokens == (2, 6)
    assert all(cost.n >= 3 for cost in made.steps["prefill"].overlap.costs)
    assert [each.num_local_experts for each in made.layer.experts] == [1, 2, 4, 8]
    assert (made.setup.ranks, made.setup.all2all, made.layer.messages) == (1, "local", None)
    assert made.environment["torch"] == torch.__version__
    rows = [line.split() for line in out.splitlines()]
    assert [row[:2] for row in rows[2:6]] == [["prefill", "8"], ["prefill", "40"], ["decode", "2"], ["decode", "6"]]


def test_two_ranks_measure_messages_and_the_slowest_rank(tmp_path):
    file = tmp_path / "p.json"
    argv = ["calibrate", *SMALL, *SIZES, "--out", str(file), "--json"]
    done = launch_ranks(2, ["-m", "launch", *argv], timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(file.read_text())
    made = read_profile(file)
    assert (made.setup.ranks, made.setup.all2all, made.setup.device) == (2, "torch", "cpu")
    assert made.layer.messages is not None
    assert made.layer.packing is not None
    assert made.layer.dispatch_bytes > made.layer.combine_bytes == 64 * 4
    assert made.steps is not None
    for steps in made.steps.values():
        assert 0 <= steps.whole_skew <= 1
        assert steps.overlap.tokens == steps.whole.tokens
    made.step_costs()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--prefill-tokens", "8,x"], ["--prefill-tokens", "8,x"]),
        (["--prefill-tokens", "1"], ["--prefill-tokens", "2 to"]),
        (["--decode-tokens", "9", "--max-num-seqs", "8"], ["--decode-tokens", "2 to 8"]),
        (["--out", "/no/such/p.json"], ["--out", "/no/such/p.json"]),
        (["--shape", "nothing"], ["nothing", "tiny"]),
        (["--model", "x"], ["--model", "give one of the two"]),
        (["--budget", "0"], ["--budget", "1 or more"]),
        (["--max-rounds", "2"], ["--max-rounds", "3 or more"]),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_is_measured(calibrate, argv, words):
    code, out, err = calibrate(*argv)
    assert (code, out) == (2, "")
    (line,) = [line for line in err.splitlines() if line.startswith("error")]
    assert all(word in line for word in words), line


def options(**changes) -> CalibrateOptions:
    return CalibrateOptions(shape="tiny", out="x", **changes)


def test_sizes_fit_into_a_step_and_into_the_cache():
    assert grid("prefill", options(prompt_tokens=128), LIMITS) == (32, 64, 128, 256, 512, 1024)
    assert grid("decode", options(), LIMITS) == (2, 4, 8, 16)
    assert grid("decode", options(num_ubatches=3), LIMITS) == (4, 8, 16)
    small = Limits(max_num_tokens=20, max_num_seqs=1, max_model_len=512, block_size=16, num_blocks=64)
    assert grid("prefill", options(), small) == (20,)
    assert grid("prefill", options(prefill_tokens="64,8,8"), LIMITS) == (8, 64)
    with pytest.raises(ConfigError, match="--prefill-tokens"):
        grid("prefill", options(prefill_tokens="2048"), LIMITS)


def test_choices_of_sizes():
    assert halved([2, 8], 2) == [1, 2, 4, 8]
    assert halved([9], 3) == [3, 9]
    assert spread_sizes([1, 2, 4, 8, 16, 32], 3) == [1, 4, 32]
    assert spread_sizes([4, 1], 3) == [1, 4]
    assert outside_in([1, 2, 4, 8, 16]) == [1, 16, 4, 2, 8]
    assert outside_in([3]) == [3]
    assert local_experts(128, 2) == [1, 2, 4, 8, 16, 32, 64]
    assert local_experts(6, 2) == [1, 2, 3]
    assert local_experts(8, 1) == [1, 2, 4, 8]
    assert prefill_lens(40, 16) == [14, 13, 13]
    assert phase_lens("decode", 3, 16) == [1, 1, 1]


def test_a_script_asks_for_arms_in_its_phase_only():
    script = Script("decode", ["overlap", "whole", "overlap"])
    asked = [script.fields(uniform)["probe"] for uniform in (False, True, True, False, True, True)]
    assert asked == [PROBE_WHOLE, PROBE_OVERLAP, PROBE_WHOLE, PROBE_WHOLE, PROBE_OVERLAP, PROBE_WHOLE]


@pytest.mark.parametrize("lens", [[1], [7, 5], [16, 16, 1]])
def test_the_attention_bench_runs_layers_without_experts(lens):
    bench = AttentionBench(named_shape("tiny"), torch.device("cpu"), 4, 200)
    cost = bench.measure(lens, 3, until_s=0.0)
    assert cost.n == 3
    assert cost.median > 0


@pytest.mark.parametrize("layout", ["rows", "padded"])
@pytest.mark.parametrize("num_local_experts", [1, 3, 4])
def test_the_expert_bench_makes_the_rows_that_would_arrive(layout, num_local_experts):
    config = named_shape("tiny")  # 8 experts, top 2
    bench = ExpertBench(config, torch.device("cpu"), 4, layout)
    received = bench._received(num_local_experts, 100)
    if layout == "padded":
        assert received.x.shape == (num_local_experts, -(-200 // num_local_experts), config.hidden)
    else:
        here = received.topk_idx[received.topk_idx >= 0]
        assert len(here) == 200 or num_local_experts == 1  # 800 / n tokens, each with one expert of one
        counts = torch.bincount(here, minlength=num_local_experts)
        assert counts.max() - counts.min() <= counts.float().mean() * 0.2
        assert all(len(set(row)) == len(row) for row in (r[r >= 0].tolist() for r in received.topk_idx))
    assert bench.measure(num_local_experts, 100, until_s=0.0).median > 0


def test_numbers_of_sms_to_try():
    def choices(text: str, device: str = "cuda", transport: object = SimpleNamespace(set_num_sms=None)):
        engine = SimpleNamespace(mesh=SimpleNamespace(device=torch.device(device)), all2all=transport)
        return comm_sms_choices(options(comm_sms=text), engine, DBOConfig(comm_sms=20))

    assert choices("auto") == (8, 16, 24)
    assert choices("24,8,8") == (8, 24)
    assert choices("8,16", device="cpu") == choices("8,16", transport=SimpleNamespace()) == (20,)
    for wrong in ("7", "0", "x", ""):
        with pytest.raises(ConfigError, match="--comm-sms"):
            choices(wrong)


class Simulated(Calibration):
    """One whose measurements take a made-up time: `warm(n)` seconds, and `first` more when a size is new."""

    def __init__(self, monkeypatch, budget, warm, first):
        self.grids = {"prefill": tuple(2**i for i in range(5, 15)), "decode": tuple(2**i for i in range(1, 9))}
        self.options, self.mesh = options(budget=budget), SimpleNamespace(world_size=1, rank=0)
        self._texts, self.notes = {"prefill": "auto", "decode": "auto"}, []
        self._warm, self._first, self._seen, self._now, self._started_s = warm, first, set(), 0.0, 0.0
        monkeypatch.setattr("launch.calibrate.time", SimpleNamespace(monotonic=lambda: self._now))

    def _measure(self, size, *, count=True, split=False, sms=()):
        self._now += self._warm(size.num_tokens) + (0 if size in self._seen else self._first)
        self._seen.add(size)

    def _progress(self):
        pass


def test_what_is_slow_the_first_time_only_costs_no_sizes(monkeypatch):
    made = Simulated(monkeypatch, budget=80, warm=lambda n: 0.1 + n * 2e-5, first=1.5)
    estimates = made._sizes()
    assert not made.notes
    assert len(estimates) == 18
    assert made._now + (LEAST_ROUNDS + 1) * sum(estimates.values()) < 80


@pytest.mark.parametrize("first", [0.0, 2.0])
@pytest.mark.parametrize("each", [0.0002, 0.001, 0.003, 0.004, 0.01, 0.03, 0.1])
def test_sizes_that_do_not_fit_are_not_run(monkeypatch, each, first):
    made = Simulated(monkeypatch, budget=100, warm=lambda n: n * each, first=first)
    estimates = made._sizes()
    assert any("prefill: measured up to" in note for note in made.notes) == (len(estimates) < 18)
    assert made._now + LEAST_ROUNDS * sum(estimates.values()) < 100
    assert {size.phase for size in estimates} == {"prefill", "decode"}


def test_sizes_are_measured_with_the_sms_that_they_use():
    """`deepep` sends small batches by kernels that take none; the partition is not entered for them either."""
    made = object.__new__(Calibration)
    made.choices, made.dbo = (8, 16, 24), DBOConfig(num_ubatches=2)
    made.mesh = SimpleNamespace(device=torch.device("cuda"))
    transport = SimpleNamespace(name="deepep", set_num_sms=None, uses_sms=lambda n: n > 256)
    made.engine = SimpleNamespace(all2all=transport)
    made.grids = {"prefill": (1024,), "decode": (512, 1024)}
    assert made._choices_of(Size("decode", 512)) == (8,)
    assert made._choices_of(Size("decode", 513)) == made._choices_of(Size("prefill", 1024)) == (8, 16, 24)
    times = {(Size("decode", 512), "overlap", 8): [5.0]}
    times |= {(Size("decode", 1024), "overlap", n): [float(n)] for n in made.choices}
    assert [cost.median for cost in made._arm("decode", "overlap", times, [24]).costs] == [5.0, 24.0]
