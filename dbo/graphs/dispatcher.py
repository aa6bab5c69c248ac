"""Which graph a step runs from: its shape -> the nearest captured shape that holds it.

A file of its own because it is arithmetic on numbers that all ranks share. Invariants:

- the keys are the only truth: a descriptor is dispatched to if and only if it is among them, and what is captured is
  captured under exactly these objects. For every number of ubatches the key is made by the same rounding (`_padded`),
  so a size that the ubatches do not divide is not saved under one number and looked up under another;
- after the ranks agreed, `settle` looks again, with agreed numbers only: every rank finds the same graph.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from dbo.agreement import BatchPlan
from dbo.errors import ConfigError
from dbo.graphs.descriptor import BatchDescriptor, Variants
from dbo.graphs.mode import CUDAGraphMode

Routine = tuple[CUDAGraphMode, bool]
"""A runtime mode, and whether it is the routine for uniform decode alone."""

_DECODE, _MIXED, _PIECES = (
    (CUDAGraphMode.FULL, True),
    (CUDAGraphMode.FULL, False),
    (CUDAGraphMode.PIECEWISE, False),
)
_LEVEL = {_PIECES: 1, _DECODE: 2, _MIXED: 3}
"""What a rank votes: 0 = no graph, 1 = segments, 2 = one graph if all ranks have uniform decodes, 3 = one graph."""
ANY = max(_LEVEL.values())


def default_capture_sizes(largest: int) -> list[int]:
    """1, 2, 4, multiples of 8 up to 256, of 16 up to 512, then four a doubling, and `largest` itself.

    Small steps are decode, where a row of padding costs little and graphs save most.
    """
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)}
    for bits in range(9, largest.bit_length()):
        sizes |= set(range(1 << bits, 2 << bits, 1 << bits - 2))
    return sorted({size for size in sizes if size < largest} | {largest})


class GraphDispatcher:
    """The shapes that have, or will have, graphs: for steps that are not split, and for each number of ubatches.

    sizes: tokens of a step, before rounding up for ubatches. num_ubatches: beside 1. multiple: what a step of U
    ubatches is rounded to, U times this. max_num_requests: of a rank; a uniform decode never has more tokens.
    tokens_per_request: fewest, on average, in a mixed step that runs from one graph, whose attention is laid out for
    the most requests.
    variants: all that steps will come with. The same on every rank. Raises `ConfigError`.
    """

    def __init__(
        self,
        mode: CUDAGraphMode,
        sizes: Iterable[int],
        *,
        num_ubatches: Sequence[int] = (),
        multiple: int = 1,
        max_num_requests: int,
        tokens_per_request: int = 1,
        variants: Sequence[Variants] = ((),),
    ) -> None:
        sizes = sorted(set(sizes))
        if mode is not CUDAGraphMode.NONE and (not sizes or sizes[0] < 1):
            raise ConfigError("cudagraph_capture_sizes", sizes, "one or more numbers of tokens, each 1 or more")
        self.mode = mode
        self._multiple, self._max_num_requests = multiple, max_num_requests
        self._tokens_per_request = tokens_per_request
        self._keys: dict[CUDAGraphMode, set[BatchDescriptor]] = {m: set() for m in CUDAGraphMode if m.is_runtime}
        for size in sizes:
            for num in {1, *num_ubatches}:
                for each in variants:
                    for runtime, decode in self._routines():
                        if not decode or size <= max_num_requests:
                            self._keys[runtime].add(self._key((runtime, decode), self._padded(size, num), num, each))
        self._index()

    def dispatch(
        self,
        num_tokens: int,
        *,
        uniform_decode: bool,
        num_ubatches: int = 1,
        variants: Variants = (),
        limit: int = ANY,
    ) -> tuple[CUDAGraphMode, BatchDescriptor]:
        """The runtime mode and shape of a step of `num_tokens` tokens, where all ranks vote `limit` or more.

        The best routine that has a graph large enough: of uniform decode, of whole mixed steps, of segments. Without
        one NONE, and the step's own shape, not padded.
        """
        for routine in (_DECODE, _MIXED, _PIECES):
            runtime, decode = routine
            if _LEVEL[routine] <= limit and (uniform_decode or not decode):
                sizes = self._sizes.get((*routine, num_ubatches, variants), [])
                at = bisect_left(sizes, num_tokens)
                if at < len(sizes):
                    return runtime, self._key(routine, sizes[at], num_ubatches, variants)
        own = BatchDescriptor(
            num_tokens=num_tokens, uniform_decode=uniform_decode, num_ubatches=num_ubatches, variants=variants
        )
        return CUDAGraphMode.NONE, own

    def vote(
        self,
        num_tokens: int,
        *,
        uniform_decode: bool,
        variants: Variants = (),
        fits: Callable[[BatchDescriptor], bool] = lambda key: True,
    ) -> tuple[int, int]:
        """`graph_mode` and `num_tokens_padded` of this rank's vote; a rank without work stands in nobody's way.

        fits: whether a graph of a whole mixed step can hold what this rank has, its requests and their lengths; it
        must not fit a shape and fail to fit a larger one.
        """
        if num_tokens == 0:
            return ANY, 0
        mixed = self.dispatch(num_tokens, uniform_decode=False, variants=variants)
        limit = ANY if mixed[0] is CUDAGraphMode.FULL and fits(mixed[1]) else _LEVEL[_DECODE]
        mode, descriptor = self.dispatch(num_tokens, uniform_decode=uniform_decode, variants=variants, limit=limit)
        if mode is not CUDAGraphMode.FULL:
            return mode.level, descriptor.num_tokens if mode.level else 0
        return limit, descriptor.num_tokens

    def settle(self, plan: BatchPlan, variants: Variants = ()) -> tuple[BatchPlan, CUDAGraphMode, BatchDescriptor]:
        """Dispatch again with what the ranks agreed on: the plan, padded to the graph, or to nothing without one.

        A graph that would leave a rank's last ubatch empty is not used; such a step runs eagerly, as it was planned.
        """
        num_tokens = plan.num_tokens_padded
        if not num_tokens or plan.graph_mode == 0:
            mode, descriptor = CUDAGraphMode.NONE, self._eager(plan, variants)
        else:
            mode, descriptor = self.dispatch(
                num_tokens,
                uniform_decode=plan.uniform_decode,
                num_ubatches=plan.num_ubatches,
                variants=variants,
                limit=plan.graph_mode,
            )
            last = descriptor.num_tokens - descriptor.num_tokens_per_ubatch
            if plan.should_ubatch and last >= min(plan.num_tokens_per_rank):
                mode, descriptor = CUDAGraphMode.NONE, self._eager(plan, variants)
        if mode is not CUDAGraphMode.NONE:
            return replace(plan, num_tokens_padded=descriptor.num_tokens), mode, descriptor
        return plan if plan.should_ubatch else replace(plan, num_tokens_padded=None), mode, descriptor

    def shapes(self) -> Iterator[tuple[CUDAGraphMode, BatchDescriptor]]:
        """All shapes, largest first, so that smaller ones find memory that larger ones have given back."""
        found = [(mode, key) for mode, keys in self._keys.items() for key in keys]
        yield from sorted(found, key=lambda pair: (-pair[1].num_tokens, -pair[0].level, *_order(pair[1])))

    def drop(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> None:
        """Forget a shape that was not captured. On every rank alike."""
        self._keys[mode].discard(descriptor)
        self._index()

    def max_num_tokens(self) -> int:
        """Tokens of the largest shape, 0 without any."""
        return max((key.num_tokens for _, key in self.shapes()), default=0)

    def _routines(self) -> list[Routine]:
        routines: list[Routine] = [_DECODE] if self.mode.separate_routines else []
        if self.mode.mixed_mode is not CUDAGraphMode.NONE:
            routines.append((self.mode.mixed_mode, False))
        return routines

    def _padded(self, num_tokens: int, num_ubatches: int) -> int:
        unit = 1 if num_ubatches == 1 else num_ubatches * self._multiple
        return -(-num_tokens // unit) * unit

    def _key(self, routine: Routine, num_tokens: int, num_ubatches: int, variants: Variants) -> BatchDescriptor:
        mode, decode = routine
        most = num_tokens if decode else min(-(-num_tokens // self._tokens_per_request), self._max_num_requests)
        exact = BatchDescriptor(
            num_tokens=num_tokens,
            num_requests=most,
            uniform_decode=decode,
            num_ubatches=num_ubatches,
            variants=variants,
        )
        return exact.relaxed() if mode is CUDAGraphMode.PIECEWISE else exact

    def _index(self) -> None:
        """Sizes in ascending order for each routine, number of ubatches and variants: made from the keys alone."""
        found: dict[tuple[CUDAGraphMode, bool, int, Variants], set[int]] = {}
        for mode, keys in self._keys.items():
            for key in keys:
                found.setdefault((mode, key.uniform_decode, key.num_ubatches, key.variants), set()).add(key.num_tokens)
        self._sizes = {routine: sorted(sizes) for routine, sizes in found.items()}

    def _eager(self, plan: BatchPlan, variants: Variants) -> BatchDescriptor:
        return BatchDescriptor(
            num_tokens=plan.num_tokens_padded or max(plan.num_tokens_per_rank),
            uniform_decode=plan.uniform_decode,
            num_ubatches=plan.num_ubatches,
            variants=variants,
        )


def _order(key: BatchDescriptor) -> tuple[int, bool, Variants]:
    return key.num_ubatches, not key.uniform_decode, key.variants
