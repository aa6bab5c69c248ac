"""The errors that `dbo` raises on purpose: few, each with one meaning, all children of `DBOError`.

A file of its own because every other module imports it and it imports none of them. `UBatchCancelled` is the one
exception that is no error: it unwinds the siblings of a ubatch that failed and never leaves the runner.
"""

from __future__ import annotations


class DBOError(Exception):
    """Base of everything that `dbo` raises on purpose."""


class ConfigError(DBOError, ValueError):
    """A setting with a value that is not allowed: one line with field, value, what is allowed, and what to do."""

    def __init__(self, field: str, value: object, allowed: str, remedy: str = "") -> None:
        super().__init__(f"{field}={value!r} is not allowed: {allowed}" + (f"; {remedy}" if remedy else ""))
        self.field, self.value, self.allowed, self.remedy = field, value, allowed, remedy

    def __reduce__(self) -> tuple[type[ConfigError], tuple[object, ...]]:
        return type(self), (self.field, self.value, self.allowed, self.remedy)


class PeerFailed(DBOError):
    """Another rank failed or disappeared. `rank` and `host` say who, `reason` why."""

    def __init__(self, rank: int, host: str, reason: str) -> None:
        super().__init__(f"rank {rank} on {host} failed: {reason}")
        self.rank, self.host, self.reason = rank, host, reason

    def __reduce__(self) -> tuple[type[PeerFailed], tuple[object, ...]]:
        return type(self), (self.rank, self.host, self.reason)


class StepTimeout(DBOError):
    """A step took longer than its limit; the message says what every ubatch last reached."""


class AgreementError(DBOError):
    """The ranks did not reduce the same thing: a protocol error between ranks, never a matter of load."""


class UBatchCancelled(BaseException):
    """Raised inside a ubatch, at its next yield point, because a sibling failed or the caller was interrupted.

    A `BaseException`, so that `except Exception` in model code does not swallow it. `finally` blocks run as usual.
    """
