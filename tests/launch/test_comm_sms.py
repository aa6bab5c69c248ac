"""`--comm-sms auto` with steps that only claim to have taken so long, and on the CPU, where it has no effect."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dbo.config import DBOConfig
from dbo.errors import ConfigError
from launch.comm_sms import CACHE_VARIABLE, Sweep, cache_file, decide, keep_choice, read_choice, settle_comm_sms
from launch.config import CalibrateOptions, EngineOptions
from launch.scheduler import Limits
from launch.session import dbo_config, load_engine, resolve
from moe.config import named_shape, read_config


@pytest.mark.parametrize("value", ["auto", "0", "8", "64"])
def test_numbers_and_auto_are_taken(value):
    options = EngineOptions(model="m", comm_sms=value)
    assert dbo_config(options).comm_sms == (DBOConfig.comm_sms if value == "auto" else int(value))


@pytest.mark.parametrize("value", ["7", "66", "-2", "many", ""])
def test_other_values_are_refused(value):
    with pytest.raises(ConfigError, match=r"--comm-sms.*auto, or an even number from 0"):
        EngineOptions(model="m", comm_sms=value)


@pytest.mark.parametrize("value", [0, 7, 66])
def test_whole_steps_need_some_sms(value):
    with pytest.raises(ConfigError, match=r"--whole-comm-sms.*an even number from 2 to 64"):
        EngineOptions(model="m", whole_comm_sms=value)


def test_calibrate_takes_several():
    assert dbo_config(CalibrateOptions(out="p", comm_sms="8,16")).comm_sms == DBOConfig.comm_sms


def test_the_file_lies_where_the_environment_says():
    assert cache_file({CACHE_VARIABLE: "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a/comm_sms.json")
    assert cache_file({"XDG_CACHE_HOME": "/b", "HOME": "/c"}) == Path("/b/dbo-moe/comm_sms.json")
    assert cache_file({"HOME": "/c"}) == Path("/c/.cache/dbo-moe/comm_sms.json")


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"key": 3}', '{"key": {"comm_sms": "8"}}'])
def test_a_damaged_file_is_measured_again(tmp_path, damage):
    file = tmp_path / "comm_sms.json"
    file.write_text(damage)
    assert read_choice(file, "key") is None
    keep_choice(file, "key", 8, {8: 1.0})
    assert read_choice(file, "key") == 8


def test_a_file_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    assert "not kept" in keep_choice(tmp_path / "file" / "comm_sms.json", "key", 8, {8: 1.0})


SLOW = {0: {8: 1.0, 16: 2.0, 24: 2.01, 32: 9.0}, 1: {8: 5.0, 16: 3.0, 24: 2.99, 32: 3.0}}  # ms by rank


def sweep_twice(ctx, directory):
    """Measure in one run, find it in the file in the next."""
    asked, said = [], []

    def measure(num_sms):
        asked.append(num_sms)
        first = 50.0 if len(asked) <= 8 else 0.0  # warm-up
        return first + SLOW[ctx.rank][num_sms]

    for name in ("/first", "/second"):
        with ctx.mesh(name) as mesh:
            said.append(decide(mesh, "key", Path(directory) / "cache" / "comm_sms.json", measure))
    return *said, len(asked)


def test_ranks_agree_on_what_is_best_for_the_slowest(ranks, tmp_path):
    for rank, ((chosen, why), (again, known), num_asked) in enumerate(ranks(2).run(sweep_twice, str(tmp_path))):
        assert chosen == again == 16  # 24 is better by less than 1%
        assert "8: 5.00 ms, 16: 3.00 ms, 24: 2.99 ms, 32: 9.00 ms" in why
        assert ("kept in" in why) == (rank == 0)
        assert "measured before" in known
        assert num_asked == 7 * 4
    (entry,) = json.loads((tmp_path / "cache" / "comm_sms.json").read_text()).values()
    assert (entry["comm_sms"], entry["ms"]["16"]) == (16, 3.0)


def settle_on_cpu(ctx, directory, comm_sms):
    with ctx.mesh() as mesh:
        options = EngineOptions(
            model=directory, device="cpu", overlap="on", comm_sms=comm_sms, max_num_tokens=64, kv_cache_memory=2**22
        )
        resolved = resolve(options, read_config(directory))
        engine = load_engine(options, resolved, mesh, model=Path(directory))
        settled = settle_comm_sms(options, engine, resolved.dbo)
        sweep = Sweep(engine, resolved.dbo)
        times = [sweep.measure(num_sms) for num_sms in (8, 16)]
        engine.close()
        return settled.comm_sms, times, sweep.key


@pytest.mark.parametrize("comm_sms", ["auto", "8"])
def test_on_the_cpu_it_has_no_effect_and_steps_can_be_measured(ranks, tiny_models, comm_sms):
    for settled, times, key in ranks(2).run(settle_on_cpu, tiny_models("mixtral").directory, comm_sms):
        assert settled == ("20" if comm_sms == "auto" else "8")
        assert min(times) > 0
        assert "ranks 2; all2all torch" in key


def test_the_step_is_what_the_engine_takes():
    shape = named_shape("tiny")
    limits = Limits(max_num_tokens=8192, max_num_seqs=256, max_model_len=4096, block_size=16, num_blocks=10**6)

    def key(config=shape, **changes):
        mesh = SimpleNamespace(
            device=SimpleNamespace(type="cpu"), world_size=2, peers=SimpleNamespace(hosts=["a", "b"])
        )
        engine = SimpleNamespace(
            limits=replace(limits, **changes), mesh=mesh, model=SimpleNamespace(config=config),
            all2all=SimpleNamespace(name="deepep"),
        )  # fmt: skip
        return Sweep(engine, DBOConfig()).key

    assert "step 4x2048" in key()
    assert "step 1x100;" in key(max_num_tokens=100)
    assert "step 2x2048;" in key(num_blocks=260)
    assert "hosts a+b; device cpu; ranks 2" in key()
    assert key(replace(shape, batch_invariant=True)) != key()
