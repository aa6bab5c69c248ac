"""The profile file: there and back, what is refused, and both values named where it does not hold."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from dbo.errors import ConfigError
from launch.profile import (
    Cost,
    PhaseSteps,
    Profile,
    Series,
    check_out,
    costs_for,
    differences,
    fingerprint,
    mismatches,
    read_profile,
    write_profile,
)
from moe.config import named_shape
from tests.launch.profiles import flat, layer, profile, series, steps


def test_there_and_back(tmp_path):
    made = profile(notes=["prefill: measured up to 256 tokens"], comm_sms=8)
    made = replace(
        made,
        comm_sms={"8": {"prefill": flat(1.0), "decode": flat(2.0)}},
        layer=layer(
            packing=series({1: 0.1, 64: 0.3}),
            messages=series({1: 0.2, 64: 1.0}),
            sm_tax={"prefill": 0.25, "decode": 0.0},
        ),
    )
    file = tmp_path / "p.json"
    write_profile(made, file)
    assert read_profile(file) == made
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]
    content = json.loads(file.read_text())
    assert (content["format"], content["version"], content["origin"]) == ("dbo-moe profile", 1, "measured")
    assert content["steps"]["prefill"]["whole"]["tokens"] == [16, 256]
    write_profile(replace(made, origin="derived", steps=None), file)
    assert read_profile(file).steps is None


def test_what_auto_decides_by():
    costs = profile(comm_sms=8).step_costs()
    assert costs.prefill.whole.at(136) == pytest.approx(85)
    assert (costs.prefill.whole_skew, costs.decode.whole_skew, costs.comm_sms) == (0.5, 1.0, 8)
    with pytest.raises(ConfigError, match=r"--profile='derived'.*a measured profile.*launch calibrate"):
        replace(profile(), origin="derived", steps=None).step_costs()


def test_a_noisy_measurement_asks_for_a_wider_margin():
    rng = np.random.default_rng(3)
    medians = [np.median(rng.normal(1, 0.05, 9)) for _ in range(4000)]
    samples = [rng.normal(1, 0.05, 9) for _ in range(400)]
    told = [Cost(median=float(np.median(s)), low=s.min(), high=s.max(), n=9).standard_error for s in samples]
    assert np.median(told) == pytest.approx(np.std(medians), rel=0.25)
    quiet, noisy = steps({8: 1.0}, {8: 1.0}), PhaseSteps(whole=series({8: 1.0}, 0.12), overlap=series({8: 1.0}, 0.12))
    assert 0.01 <= quiet.margin < noisy.margin == noisy.costs().margin < 0.1
    assert PhaseSteps(whole=series({8: 1.0}, 0.9), overlap=series({8: 1.0}, 0.9)).margin == 0.1


def broken(change) -> str:
    content = profile().to_json()
    change(content)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["JSON"]),
        ("[]", ["a dbo-moe profile"]),
        ('{"format": "other"}', ["a dbo-moe profile", "launch calibrate"]),
        (broken(lambda c: c.update(version=9)), ["version 1, not 9", "calibrate again"]),
        (broken(lambda c: c.pop("setup")), ["setup", "damaged"]),
        (broken(lambda c: c.update(extra=1)), ["extra", "damaged"]),
        (broken(lambda c: c["steps"].pop("decode")), ["prefill and decode", "damaged"]),
        (broken(lambda c: c["steps"]["prefill"]["whole"]["median"].pop()), ["damaged"]),
        (broken(lambda c: c["steps"]["prefill"]["whole"]["median"].__setitem__(0, -1.0)), ["median", "damaged"]),
        (broken(lambda c: c["steps"]["prefill"]["whole"]["tokens"].reverse()), ["ascending", "damaged"]),
        (broken(lambda c: c["layer"].update(experts=[])), ["experts", "damaged"]),
        (broken(lambda c: c["steps"].update(prefill=None)), ["damaged"]),
    ],
)  # fmt: skip
def test_what_is_no_profile_is_one_error_that_names_the_file(tmp_path, text, words):
    file = tmp_path / "p.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_profile(file)
    assert all(word in str(error.value) for word in ["--profile", str(file), *words]), error.value


def test_a_file_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(ConfigError, match=r"--profile=.*nothing.*No such file"):
        read_profile(tmp_path / "nothing")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="--profile"):
        read_profile(tmp_path / "bytes")
    with pytest.raises(ConfigError, match="--out"):
        check_out(str(tmp_path / "no" / "such.json"))
    with pytest.raises(ConfigError, match="--out"):
        check_out(str(tmp_path))
    with pytest.raises(ConfigError, match="--out"):
        write_profile(profile(), tmp_path / "no" / "such.json")


@pytest.mark.parametrize(
    ("here", "words"),
    [
        ({"ranks": 4}, ["ranks 2 in the profile, 4 here"]),
        ({"all2all": "deepep_ht"}, ["all2all torch in the profile, deepep_ht here"]),
        ({"whole_comm_sms": 64}, ["whole_comm_sms None in the profile, 64 here"]),
        ({"device": "cuda", "num_ubatches": 3}, ["device cpu in the profile, cuda here", "num_ubatches 2", "3 here"]),
        ({"model": {**profile().setup.model, "hidden": 7}}, ["hidden 500 in the profile, 7 here"]),
    ],
)
def test_another_model_rank_count_or_transport_is_refused_with_both_values(here, words):
    made = profile()
    text = json.dumps(made.to_json())
    with pytest.raises(ConfigError) as error:
        costs_for(text, "p.json", replace(made.setup, **here), {})
    assert all(word in str(error.value) for word in words), error.value
    assert not mismatches(made, made.setup)


def test_another_host_or_version_is_a_warning_with_both_values():
    made = profile(environment={"host": "a", "torch": "2.11"})
    here = replace(made.setup, driver="greenlet", comm_sms=4)
    _, warnings = costs_for(json.dumps(made.to_json()), "p", here, {"host": "b", "torch": "2.11"})
    assert warnings == ["driver threads in the profile, greenlet here", "host a in the profile, b here"]
    assert differences(made, made.setup, {"host": "a", "torch": "2.11"}) == []


def test_a_fingerprint_tells_what_costs_depend_on():
    tiny = named_shape("tiny")
    assert json.loads(json.dumps(fingerprint(tiny))) == fingerprint(tiny)
    assert fingerprint(replace(tiny, hidden=128)) != fingerprint(tiny)
    assert fingerprint(replace(tiny, rms_norm_eps=1.0)) == fingerprint(tiny)
    names = {replace(profile().setup, model=fingerprint(named_shape(name))).fingerprint for name in ("tiny", "link")}
    assert len(names) == 2


def test_costs_that_cannot_be():
    for bad in ({"median": 0.0}, {"low": 2.0}, {"high": float("nan")}, {"n": 0}, {"high": float("inf")}):
        with pytest.raises(ConfigError):
            Cost(**{"median": 1.0, "low": 1.0, "high": 1.0, "n": 1, **bad})
    with pytest.raises(ConfigError):
        Series(tokens=(), costs=())
    assert series({1: 1.0, 2: 2.0}, spread=0.2).spread == pytest.approx(0.2)
    assert Profile.from_json(profile().to_json(), "x") == profile()
