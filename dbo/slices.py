"""Where a step is cut into ubatches, and how each field of a batch follows the cut.

A file of its own because it is arithmetic on host numbers: no rank, stream or model is needed to test it. Invariants:

- the true slices of a plan's ubatches partition this rank's tokens, and the padded ones partition the padded tokens;
- a request may straddle a cut; its halves together have its tokens, and a later half counts the earlier as computed;
- every field of a batch declares how it is sliced. One that does not fails when its class is made.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from dbo.agreement import BatchPlan
from dbo.config import DBOConfig

IntArray = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class UBatchSlice:
    """One ubatch's share of this rank's batch. Slices count rows of the whole batch and have no step."""

    index: int
    tokens: slice
    """True tokens; empty at the end of the batch where only padding is left."""
    requests: slice
    """Requests with a token in `tokens`."""
    tokens_padded: slice
    requests_padded: slice
    """`requests` and, in a uniform decode padded for a graph, one request for each token of padding."""
    cut_head: int = 0
    """Tokens of the first request that lie in earlier ubatches."""
    cut_tail: int = 0
    """Tokens of the last request that lie in later ubatches."""
    num_tokens_per_rank: tuple[int, ...] | None = None
    """True tokens of every rank in this ubatch; None where ranks cut in their own ways."""

    @property
    def num_tokens(self) -> int:
        """True tokens."""
        return _length(self.tokens)

    @property
    def num_tokens_padded(self) -> int:
        """Tokens with padding."""
        return _length(self.tokens_padded)

    @property
    def num_requests(self) -> int:
        """True requests."""
        return _length(self.requests)


def _length(s: slice) -> int:
    return int(s.stop - s.start)


# ---------------------------------------------------------------------------------------------- where to cut


def can_cut(query_lens: IntArray, config: DBOConfig, *, seq_lens: IntArray | None = None) -> bool:
    """Whether this rank's own cut gives `config.num_ubatches` parts, none empty: what `Vote.can_cut` says.

    Always true for `cut="tokens"`, where the agreement itself sees whether a last ubatch would be empty. Arguments as
    for `make_slices`.
    """
    return config.cut == "tokens" or _own_cut(query_lens, config, seq_lens) is not None


def make_slices(plan: BatchPlan, query_lens: IntArray, *, seq_lens: IntArray | None = None) -> list[UBatchSlice]:
    """The ubatches of this rank's batch, `plan.num_ubatches` of them; one if the plan does not split.

    `query_lens` [num_requests], integers > 0, on the host: new tokens of each request, in batch order. `seq_lens`
    [num_requests], on the host: length of each request's KV cache after this step; used by `cut="balanced"` alone,
    where None means that nothing was computed before. Raises `ValueError` if the lengths do not fit the plan.
    """
    if len(query_lens) and query_lens.min() < 1:
        raise ValueError(f"query_lens must be positive, found {query_lens.min()}")
    ends = np.cumsum(query_lens)
    num_tokens = _total(ends)
    row_per_token = plan.uniform_decode and plan.num_tokens_padded is not None and num_tokens == len(query_lens)
    bounds = _bounds(plan, query_lens, seq_lens, num_tokens)
    return [_slice(plan, k, start, stop, ends, row_per_token) for k, (start, stop) in enumerate(pairwise(bounds))]


def _total(ends: IntArray) -> int:
    return int(ends[-1]) if len(ends) else 0


def tokens_per_rank_of_ubatch(plan: BatchPlan, index: int) -> tuple[int, ...] | None:
    """True tokens that every rank has in ubatch `index`; None where ranks cut in their own ways."""
    if not plan.should_ubatch:
        return plan.num_tokens_per_rank
    if plan.num_tokens_padded is None:
        return None
    size = plan.num_tokens_padded // plan.num_ubatches
    return tuple(min(max(n - index * size, 0), size) for n in plan.num_tokens_per_rank)


def _bounds(plan: BatchPlan, query_lens: IntArray, seq_lens: IntArray | None, num_tokens: int) -> list[int]:
    """First token of each ubatch, and the end of the padded batch."""
    end = num_tokens if plan.num_tokens_padded is None else plan.num_tokens_padded
    if end < num_tokens:
        raise ValueError(f"{num_tokens} tokens in the batch, but the plan pads to {end}")
    if not plan.should_ubatch:
        return [0, end]
    if plan.config.cut == "tokens":
        return [end * k // plan.num_ubatches for k in range(plan.num_ubatches + 1)]
    inner = _own_cut(query_lens, plan.config, seq_lens)
    if inner is None:
        raise ValueError(f"this batch cannot be cut in {plan.num_ubatches} by {plan.config.cut}: vote can_cut=False")
    return [0, *inner, end]


def _own_cut(query_lens: IntArray, config: DBOConfig, seq_lens: IntArray | None) -> list[int] | None:
    """Tokens at which this rank cuts, or None if a ubatch would be empty. For cuts that ranks make on their own."""
    query_lens = query_lens.astype(np.int64)  # also what has no sign or few bits
    ends = np.cumsum(query_lens)
    num_tokens = _total(ends)
    shares = np.arange(1, config.num_ubatches) / config.num_ubatches
    if config.cut == "requests":
        possible = ends[:-1][ends[:-1] % config.cut_alignment == 0]
        return _nearest(possible, shares * num_tokens)
    # A token's attention reads as many keys as its sequence then has.
    computed = np.zeros_like(ends) if seq_lens is None else seq_lens.astype(np.int64) - query_lens
    work = np.cumsum(np.repeat(computed - ends + query_lens, query_lens) + np.arange(1, num_tokens + 1))
    possible = np.arange(config.cut_alignment, num_tokens, config.cut_alignment)
    ideal = np.searchsorted(work, shares * (work[-1] if num_tokens else 0)) + 1
    return _nearest(possible, ideal)


def _nearest(possible: IntArray, ideal: npt.NDArray[Any]) -> list[int] | None:
    """For each ideal place the nearest possible one that leaves a place for each of the others; both ascend."""
    if len(possible) < len(ideal):
        return None
    chosen: list[int] = []
    first = 0
    for k, target in enumerate(ideal):
        room = possible[first : len(possible) - (len(ideal) - 1 - k)]
        first += int(np.abs(room - target).argmin())
        chosen.append(int(possible[first]))
        first += 1
    return chosen


def _slice(plan: BatchPlan, index: int, start: int, stop: int, ends: IntArray, row_per_token: bool) -> UBatchSlice:
    """Ubatch `index` with padded tokens [start, stop) of requests that end at `ends`."""
    num_tokens = _total(ends)
    true_start, true_stop = min(start, num_tokens), min(stop, num_tokens)
    tokens_padded = slice(start, stop)
    if true_start == true_stop:
        requests, head, tail = slice(len(ends), len(ends)), 0, 0
    else:
        first = int(np.searchsorted(ends, true_start, side="right"))
        last = int(np.searchsorted(ends, true_stop, side="left"))
        requests = slice(first, last + 1)
        head = true_start - (int(ends[first - 1]) if first else 0)
        tail = int(ends[last]) - true_stop
    return UBatchSlice(
        index=index,
        tokens=slice(true_start, true_stop),
        requests=requests,
        tokens_padded=tokens_padded,
        requests_padded=tokens_padded if row_per_token else requests,
        cut_head=head,
        cut_tail=tail,
        num_tokens_per_rank=tokens_per_rank_of_ubatch(plan, index),
    )


# ---------------------------------------------------------------------------------- how a batch follows the cut


class Rule(Protocol):
    """How one field of a batch is padded and sliced."""

    def pad(self, value: Any, num_tokens: int, num_requests: int | None) -> Any:
        """`value` made long enough for so many tokens and requests; None = leave requests alone."""
        ...

    def cut(self, value: Any, batch: Any, s: UBatchSlice) -> Any:
        """Ubatch `s`'s part of `value`, which is a field of the whole, padded `batch`."""
        ...


@dataclass(frozen=True)
class _ByToken:
    dim: int
    pad_value: int | float
    align_bytes: int

    def pad(self, value: Any, num_tokens: int, num_requests: int | None) -> Any:
        return _map(value, lambda t: _pad(t, self.dim, num_tokens, self.pad_value))

    def cut(self, value: Any, batch: Any, s: UBatchSlice) -> Any:
        return _map(value, lambda t: self._cut_one(t, s.tokens_padded))

    def _cut_one(self, t: Any, tokens: slice) -> Any:
        if t.shape[self.dim] < tokens.stop:
            raise ValueError(
                f"{t.shape[self.dim]} tokens along dim {self.dim}, slice needs {tokens.stop}: pad_batch first"
            )
        part = _narrow(t, self.dim, tokens)
        misaligned = self.align_bytes > 1 and isinstance(part, torch.Tensor) and part.data_ptr() % self.align_bytes
        return part.clone() if misaligned else part


@dataclass(frozen=True)
class _ByRequest:
    dim: int
    pad_value: int | float

    def pad(self, value: Any, num_tokens: int, num_requests: int | None) -> Any:
        if num_requests is None:
            return value
        return _map(value, lambda t: _pad(t, self.dim, num_requests, self.pad_value))

    def cut(self, value: Any, batch: Any, s: UBatchSlice) -> Any:
        # Slicing stops at the end of the field: without rows of padding this gives the true requests.
        return _map(value, lambda t: _narrow(t, self.dim, s.requests_padded))


@dataclass(frozen=True)
class _Shared:
    def pad(self, value: Any, num_tokens: int, num_requests: int | None) -> Any:
        return value

    def cut(self, value: Any, batch: Any, s: UBatchSlice) -> Any:
        return value


@dataclass(frozen=True)
class _Derived:
    compute: Callable[[Any, UBatchSlice], Any]
    padded_as: Rule

    def pad(self, value: Any, num_tokens: int, num_requests: int | None) -> Any:
        return self.padded_as.pad(value, num_tokens, num_requests)

    def cut(self, value: Any, batch: Any, s: UBatchSlice) -> Any:
        return self.compute(batch, s)


def by_token(*, dim: int = 0, pad: int | float = 0, align_bytes: int = 1) -> Rule:
    """Rows along `dim` are tokens (`dim=-1` for positions [3, num_tokens]); `pad` fills rows of padding.

    Parts are views. One of a later ubatch starts where the cut falls, so its address is a multiple of the cut times
    the row's size and no more: 7 int64 tokens are 56 bytes. Kernels that load 16 bytes at once, TMA, and code
    specialised on aligned pointers need more; `align_bytes` copies a part that is not so aligned, and
    `cut_alignment` makes the cut itself fall well for all fields at once. Rows of hidden states need neither.
    """
    return _ByToken(dim, pad, align_bytes)


def by_request(*, dim: int = 0, pad: int | float = 0) -> Rule:
    """Rows along `dim` are requests. A request that straddles a cut is in both ubatches. Parts are views."""
    return _ByRequest(dim, pad)


def shared() -> Rule:
    """The same object for every ubatch, which must not change it."""
    return _Shared()


def derived(compute: Callable[[Any, UBatchSlice], Any], *, padded_as: Rule | None = None) -> Rule:
    """`compute(batch, s)` from the whole padded batch, for values that a cut changes (see `cut_seq_lens`).

    Padding leaves the value alone, or treats it as rule `padded_as` says.
    """
    return _Derived(compute, padded_as or _Shared())


def ruled(rule: Rule, **kwargs: Any) -> Any:
    """A dataclass field with its rule; `kwargs` as for `dataclasses.field`."""
    return field(metadata={"rule": rule}, **kwargs)


class Batch:
    """Base of dataclasses that hold a step's inputs and can be padded and split.

    A rule applies to tensors, numpy arrays, None, and dicts, lists and tuples of these. Raises `TypeError` when a class
    is made with a field that has no rule (the idea of SGLang's two-batch overlap, which raises when it splits).
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__dataclass_fields__" in cls.__dict__:
            return  # made a second time, by dataclass(slots=True)
        own = {name: cls.__dict__.get(name) for name, kind in inspect.get_annotations(cls).items() if _is_field(kind)}
        inherited = {f.name: f for base in cls.__mro__[:0:-1] if is_dataclass(base) for f in fields(base)}
        for name, declared in {**inherited, **own}.items():
            if "rule" not in getattr(declared, "metadata", {}):
                raise TypeError(f"{cls.__name__}.{name} has no slicing rule: declare it with dbo.slices.ruled(...)")


def _is_field(annotation: Any) -> bool:
    """Whether a dataclass makes a field of it; annotations may be strings."""
    return annotation is not KW_ONLY and not re.match(r"([\w.]+\.)?(ClassVar\b|KW_ONLY$)", str(annotation))


B = TypeVar("B", bound=Batch)


def pad_batch(batch: B, num_tokens: int, num_requests: int | None = None) -> B:
    """A batch whose fields by token have `num_tokens` rows, and by request `num_requests` (None: as they are).

    `batch` is left alone; fields that are long enough are shared with it. Raises `ValueError` if one is longer.
    """
    return _each_field(batch, lambda rule, value: rule.pad(value, num_tokens, num_requests))


def split_batch(batch: B, slices: Sequence[UBatchSlice]) -> list[B]:
    """One batch for each ubatch, of views where the rules allow.

    Fields by token must have the padded length already (`pad_batch`), else `ValueError`: what is cut short here would
    be wrong only for some numbers of ubatches.
    """
    return [_each_field(batch, lambda rule, value, s=s: rule.cut(value, batch, s)) for s in slices]  # type: ignore[misc]


def _each_field(batch: B, change: Callable[[Rule, Any], Any]) -> B:
    if "__dataclass_fields__" not in type(batch).__dict__:
        raise TypeError(f"{type(batch).__name__} is not a dataclass: decorate it with @dataclass")
    values = {f.name: change(f.metadata["rule"], getattr(batch, f.name)) for f in fields(batch)}  # type: ignore[arg-type]
    return replace(batch, **values)  # type: ignore[type-var]


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    """`function` of every tensor or array in `value`."""
    if value is None:
        return None
    if isinstance(value, dict):
        return {key: _map(item, function) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_map(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # a named tuple?
    return function(value)


def _narrow(t: Any, dim: int, rows: slice) -> Any:
    return t[(slice(None),) * (dim % t.ndim) + (rows,)]


def _pad(t: Any, dim: int, length: int, pad_value: int | float) -> Any:
    """`t` with rows of `pad_value` appended along `dim`; `t` itself if it is long enough."""
    missing = length - t.shape[dim]
    if missing < 0:
        raise ValueError(f"a field has {t.shape[dim]} rows along dim {dim}, more than the {length} to pad to")
    if missing == 0:
        return t
    shape = list(t.shape)
    shape[dim] = missing
    if isinstance(t, torch.Tensor):
        return torch.cat([t, t.new_full(shape, pad_value)], dim)
    return np.concatenate([t, np.full(shape, pad_value, t.dtype)], dim)


Lengths = TypeVar("Lengths", IntArray, torch.Tensor)


def cut_query_lens(query_lens: Lengths, s: UBatchSlice) -> Lengths:
    """`query_lens` [num_requests] of the whole batch -> what of them lies in ubatch `s`. Never waits for a device."""
    part = _minus(query_lens[s.requests_padded], 0, s.cut_head)
    return _minus(part, s.num_requests - 1, s.cut_tail)


def cut_seq_lens(seq_lens: Lengths, s: UBatchSlice) -> Lengths:
    """`seq_lens` [num_requests], KV length after the step -> KV length after ubatch `s`. Never waits for a device."""
    return _minus(seq_lens[s.requests_padded], s.num_requests - 1, s.cut_tail)


def _minus(lengths: Lengths, row: int, tokens: int) -> Lengths:
    """`lengths` with `tokens` taken from one row: a view if there is nothing to take, else a copy."""
    if tokens == 0:
        return lengths
    lengths = lengths.clone() if isinstance(lengths, torch.Tensor) else lengths.copy()
    lengths[row] -= tokens
    return lengths
