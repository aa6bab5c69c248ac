"""Which prompts of a batch one call of attention can serve.

Its own file because it is a rule on lengths alone. Prompts that lie side by side are a segment, of one of two kinds:

    dense     whole prompts of one length, a multiple of 128: the fastest form, as one batch
    packed    any others, row after row

A cut leaves half a prompt at the end of one ubatch and the other half at the start of the next; the whole prompts
beside it stay dense. Invariant: segments cover all prompts, in order, and are a few at most, for a call costs more than
a short dense one gains.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dbo.slices import IntArray

DENSE_UNIT = 128
DENSE_ROWS = 1024  # of a dense segment beside others, at least
MAX_SEGMENTS = 3


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Prompts `first` to `last` (not included) of a batch's."""

    first: int
    last: int
    length: int | None  # of each of them, where they are dense
    fresh: bool  # all their keys are in this batch


def plan_segments(query_lens: IntArray, seq_lens: IntArray, window: int | None) -> list[Segment]:
    """Cut a batch's prompts into segments.

    query_lens, seq_lens [prompts]: new tokens of each, and tokens with those before; window: how far back a token sees,
    None = to the first.
    """
    fresh = query_lens == seq_lens
    dense = fresh & (query_lens % DENSE_UNIT == 0)
    if window is not None:
        dense &= query_lens <= window
    segments = _merged(_runs(query_lens, fresh, dense))
    if len(segments) > 1:
        segments = _merged([s if _dense_rows(s) >= DENSE_ROWS else replace(s, length=None) for s in segments])
    while len(segments) > MAX_SEGMENTS:
        least = min((s for s in segments if s.length is not None), key=_dense_rows)
        segments = _merged([replace(s, length=None) if s is least else s for s in segments])
    return segments


def _runs(query_lens: IntArray, fresh: npt.NDArray[np.bool_], dense: npt.NDArray[np.bool_]) -> list[Segment]:
    """Longest runs of one length that can be dense, and between them prompts one by one."""
    goes_on = dense[1:] & dense[:-1] & (query_lens[1:] == query_lens[:-1])
    bounds = [0, *(np.flatnonzero(~goes_on) + 1).tolist(), len(query_lens)]
    return [
        Segment(first=a, last=b, length=int(query_lens[a]) if dense[a] else None, fresh=bool(fresh[a]))
        for a, b in itertools.pairwise(bounds)
    ]


def _dense_rows(segment: Segment) -> int:
    return 0 if segment.length is None else (segment.last - segment.first) * segment.length


def _merged(segments: Sequence[Segment]) -> list[Segment]:
    """Packed neighbours become one."""
    merged: list[Segment] = []
    for s in segments:
        if merged and s.length is None and merged[-1].length is None:
            before = merged.pop()
            s = replace(s, first=before.first, fresh=before.fresh and s.fresh)
        merged.append(s)
    return merged
