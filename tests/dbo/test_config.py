"""Every setting is checked once, and a difference between ranks is visible in the compared options."""

import dataclasses

import pytest

from dbo.config import DBOConfig
from dbo.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("overlap", "yes"),
        ("cut", "token"),
        ("driver", "fibers"),
        ("num_ubatches", 1),
        ("num_ubatches", 2.0),
        ("decode_token_threshold", -1),
        ("prefill_token_threshold", -1),
        ("cut_alignment", 0),
        ("comm_sms", -2),
        ("step_timeout_s", -1.0),
        ("step_timeout_s", float("nan")),
        ("step_timeout_s", float("inf")),
        ("step_timeout_s", "60"),
        ("comm_sms", True),
        ("interleave", "no"),
        ("allow_single_rank", 0),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(name, value):
    with pytest.raises(ConfigError, match=f"{name}.*{value}") as error:
        DBOConfig(**{name: value})
    assert error.value.field == name
    assert error.value.value is value
    assert error.value.allowed
    assert "\n" not in str(error.value)


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DBOConfig().num_ubatches = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value"),
    [("decode_token_threshold", 64), ("num_ubatches", 3), ("cut", "requests"), ("overlap", "on"), ("comm_sms", 8)],
)
def test_ranks_configured_differently_differ_in_exactly_that_shared_option(name, value):
    ours, theirs = DBOConfig().shared_options(), DBOConfig(**{name: value}).shared_options()
    different = {key: (ours[key], theirs[key]) for key in ours if ours[key] != theirs[key]}
    assert different == {name: (str(getattr(DBOConfig(), name)), str(value))}


def test_every_option_is_shared():
    assert set(DBOConfig().shared_options()) == {field.name for field in dataclasses.fields(DBOConfig)}
