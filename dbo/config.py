"""Every knob of the overlap, checked once, with one meaning each.

A file of its own because everything else in this package takes its settings from here and none of them reads
argv or the environment. Invariant: a `DBOConfig` that exists is valid, and it never changes.
"""

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

from dbo.errors import ConfigError

Overlap = Literal["off", "on", "auto"]
Cut = Literal["tokens", "requests", "balanced"]
Driver = Literal["threads", "greenlet"]


@dataclass(frozen=True, kw_only=True)
class DBOConfig:
    """Settings of the overlap, the same on every rank (see `shared_options`).

    Raises `ConfigError` for a value that is not allowed.
    """

    overlap: Overlap = "off"
    """`off` never splits, `on` splits by the thresholds, `auto` by a measured profile where there is one."""
    num_ubatches: int = 2
    """Into how many ubatches a step is split, at least 2."""
    decode_token_threshold: int = 32
    """Fewest tokens with which a rank wants to split a uniform decode step."""
    prefill_token_threshold: int = 512
    """Fewest tokens with which a rank wants to split any other step."""
    cut: Cut = "tokens"
    """Where to cut: `tokens` into equal numbers of tokens (identical shapes on all ranks, the only cut that CUDA
    graphs can use), `requests` at the nearest request boundary, `balanced` into equal attention work."""
    cut_alignment: int = 1
    """Every cut lies at a multiple of so many tokens."""
    allow_single_rank: bool = False
    """Split even when there is only one rank, where nothing can be hidden: for study."""
    driver: Driver = "threads"
    """How a ubatch passes the turn: between kept threads, or between greenlets of one thread."""
    step_timeout_s: float = 60.0
    """Longest wait for another rank or ubatch in seconds; 0 waits for ever."""
    interleave: bool = True
    """False runs the ubatches one after another: the `split` arm of a comparison."""
    comm_sms: int = 20
    """Streaming multiprocessors set aside for communication while ubatches run; 0 sets none aside."""

    def __post_init__(self) -> None:
        for name, allowed in (("overlap", Overlap), ("cut", Cut), ("driver", Driver)):
            self._require(name, getattr(self, name) in get_args(allowed), "one of " + ", ".join(get_args(allowed)))
        for name, least in _LEAST.items():
            value = getattr(self, name)
            self._require(name, type(value) is int and value >= least, f"a whole number, at least {least}")
        for name in ("allow_single_rank", "interleave"):
            self._require(name, isinstance(getattr(self, name), bool), "True or False")
        seconds = self.step_timeout_s
        holds = type(seconds) in (int, float) and math.isfinite(seconds) and seconds >= 0
        self._require("step_timeout_s", holds, "seconds, or 0 for no limit")

    def _require(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise ConfigError(name, getattr(self, name), allowed, _REMEDY.get(name, ""))

    @property
    def part_multiple(self) -> int:
        """Tokens of which a padded step is a multiple: buffers for n tokens need room for n rounded up to it."""
        return self.num_ubatches * self.cut_alignment

    def shared_options(self) -> dict[str, str]:
        """Every option as text, to be compared between ranks at start-up: votes only mean the same if these are."""
        return {field.name: str(getattr(self, field.name)) for field in fields(self)}


_LEAST = {
    "num_ubatches": 2,
    "decode_token_threshold": 0,
    "prefill_token_threshold": 0,
    "cut_alignment": 1,
    "comm_sms": 0,
}
_REMEDY = {"num_ubatches": "use 2, or overlap=off for steps that are never split"}
