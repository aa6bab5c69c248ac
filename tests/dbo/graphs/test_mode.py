"""The modes, against the table of what each captures."""

import pytest

from dbo.errors import ConfigError
from dbo.graphs.mode import CUDAGraphMode as Mode

# mode: decode, mixed, runtime, has full, has piecewise, separate routines, level
TABLE = {
    Mode.NONE: (Mode.NONE, Mode.NONE, True, False, False, False, 0),
    Mode.PIECEWISE: (Mode.PIECEWISE, Mode.PIECEWISE, True, False, True, False, 1),
    Mode.FULL: (Mode.FULL, Mode.FULL, True, True, False, True, 2),
    Mode.FULL_DECODE_ONLY: (Mode.FULL, Mode.NONE, False, True, False, True, 2),
    Mode.FULL_AND_PIECEWISE: (Mode.FULL, Mode.PIECEWISE, False, True, True, True, 2),
}


@pytest.mark.parametrize("mode", Mode)
def test_table(mode: Mode) -> None:
    assert TABLE[mode] == (
        mode.decode_mode,
        mode.mixed_mode,
        mode.is_runtime,
        mode.has_full_cudagraphs,
        mode.has_piecewise_cudagraphs,
        mode.separate_routines,
        mode.level,
    )


def test_a_vote_is_a_level_and_back() -> None:
    for mode in (Mode.NONE, Mode.PIECEWISE, Mode.FULL):
        assert Mode.of_level(mode.level) is mode


@pytest.mark.parametrize("mode", Mode)
def test_parse(mode: Mode) -> None:
    assert Mode.parse(mode.name.lower()) is Mode.parse(mode.name.replace("_", "-")) is mode


def test_parse_names_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match="cudagraph_mode='half' is not allowed: none, piecewise, full, full_decode_"):
        Mode.parse("half")
