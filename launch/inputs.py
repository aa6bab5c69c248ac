"""What a step's tokens become on the device: one batch for an eager step, batches at fixed addresses for graphs.

Its own file because it is where host numbers turn into device memory, once a step, without waiting: everything is
filled in pinned memory and copied from there. Invariant: memory is filled again only after the copies that read it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dbo.agreement import BatchPlan
from dbo.graphs.descriptor import BatchDescriptor
from dbo.slices import IntArray, UBatchSlice, cut_query_lens, cut_seq_lens
from launch.scheduler import Limits, Schedule
from moe.batch import FixedInputs, ForwardBatch

_NOTHING = np.empty(0, np.int32)


def wait_event(event: torch.cuda.Event, check: Callable[[], None]) -> None:
    """Wait for the device on the host, calling `check`, which raises to give up: a collective may never end."""
    while not event.query():
        check()
        time.sleep(20e-6)


class Inputs:
    """Memory for the inputs of a step: filled on the host, copied without waiting for it."""

    def __init__(self, limits: Limits, device: torch.device, check: Callable[[], None]):
        self._block_size, self._check = limits.block_size, check
        self._tokens = _Mirror((3, limits.max_num_tokens), torch.int64, device)  # input_ids, positions, slot_mapping
        self._tables = _Mirror((_max_requests(limits), _max_blocks(limits)), torch.int32, device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def build(self, schedule: Schedule, plan: BatchPlan) -> ForwardBatch:
        """The batch of a step. The tokens of the step before must have been committed."""
        if self._copied is not None:
            wait_event(self._copied, self._check)  # the copies of the last step read the memory that is filled now
        width = _fill(schedule, self._tokens.host, self._tables.host, self._block_size)
        num_tokens, num_requests = schedule.num_tokens, len(schedule.chunks)
        tokens = self._tokens.copy(slice(None), slice(num_tokens))
        tables = self._tables.copy(slice(num_requests), slice(width))
        if self._copied is not None:
            self._copied.record()
        return ForwardBatch(
            input_ids=tokens[0],
            positions=tokens[1],
            slot_mapping=tokens[2],
            block_tables=tables,
            query_lens=schedule.query_lens,
            seq_lens=schedule.seq_lens,
            num_tokens=num_tokens,
            num_tokens_per_rank=plan.num_tokens_per_rank,
        )


class GraphInputs:
    """The same for steps that run from graphs: each ubatch of each shape finds its inputs where they were captured.

    num_tokens: of the largest shape. Rows of padding: token 0 at position 0, whose key goes nowhere; no requests.
    """

    def __init__(
        self,
        limits: Limits,
        device: torch.device,
        check: Callable[[], None],
        *,
        num_tokens: int,
        num_ubatches: int,
        num_ranks: int,
    ):
        self._limits, self._check, self._num_ranks = limits, check, num_ranks
        rows = max(_max_requests(limits), min(num_tokens, limits.max_num_seqs + num_tokens // num_ubatches))
        blocks = _max_blocks(limits)
        self._all_tables = np.zeros((_max_requests(limits), blocks), np.int32)
        self._tokens = _Mirror((3, num_tokens), torch.int64, device)
        self._tables = _Mirror((num_ubatches, rows, blocks), torch.int32, device)
        self._numbers = _Mirror((num_ubatches, 3 * rows + 3), torch.int32, device)
        # of each ubatch: the number of its tokens, the length of each request, where tokens and keys of each end
        self._splits = (1, rows, rows + 1, rows + 1)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._batches: dict[BatchDescriptor, list[ForwardBatch]] = {}

    def build(
        self, schedule: Schedule, slices: Sequence[UBatchSlice], descriptor: BatchDescriptor
    ) -> list[ForwardBatch]:
        """One batch a ubatch: always the same objects for a shape, with the lengths of this step in `fixed`."""
        if self._copied is not None:
            wait_event(self._copied, self._check)
        n, end = schedule.num_tokens, descriptor.num_tokens
        width = _fill(schedule, self._tokens.host, self._all_tables, self._limits.block_size)
        self._tokens.host[:2, n:end], self._tokens.host[2, n:end] = 0, -1
        batches = self._batches_of(descriptor)
        for batch, s in zip(batches, slices, strict=True):
            self._refill(batch, s, schedule, width)
        return self._copy(batches, [s.num_requests for s in slices], end)

    def empty(self, descriptor: BatchDescriptor) -> list[ForwardBatch]:
        """Batches of that shape in which every row is padding."""
        if self._copied is not None:
            wait_event(self._copied, self._check)
        end, batches = descriptor.num_tokens, self._batches_of(descriptor)
        self._tokens.host[:2, :end], self._tokens.host[2, :end], self._numbers.host[:] = 0, -1, 0
        for batch in batches:
            _set_lengths(batch, _NOTHING, _NOTHING, 0)
        return self._copy(batches, [0] * len(batches), end)

    def _refill(self, batch: ForwardBatch, s: UBatchSlice, schedule: Schedule, width: int) -> None:
        k, count = s.index, s.num_requests
        query_lens = cut_query_lens(schedule.query_lens, s)[:count]
        seq_lens = cut_seq_lens(schedule.seq_lens, s)[:count]
        self._tables.host[k, :count, :width] = self._all_tables[s.requests, :width]
        num_tokens, lengths, query_ends, key_ends = np.split(self._numbers.host[k], np.cumsum(self._splits)[:-1])
        num_tokens[0] = s.num_tokens
        lengths[:count], lengths[count:] = seq_lens, 0
        for ends, lens in ((query_ends, query_lens), (key_ends, seq_lens)):
            np.cumsum(lens, out=ends[1 : count + 1])
            ends[count + 1 :] = ends[count]
        _set_lengths(batch, query_lens, seq_lens, s.num_tokens)

    def _copy(self, batches: list[ForwardBatch], num_requests: list[int], end: int) -> list[ForwardBatch]:
        for row in range(3):
            self._tokens.copy(row, slice(end))
        for k, count in enumerate(num_requests):
            self._tables.copy(k, slice(count))
        self._numbers.copy(slice(len(batches)))
        if self._copied is not None:
            self._copied.record()
        return batches

    def _batches_of(self, descriptor: BatchDescriptor) -> list[ForwardBatch]:
        if descriptor not in self._batches:
            self._batches[descriptor] = [self._batch(k, descriptor) for k in range(descriptor.num_ubatches)]
        return self._batches[descriptor]

    def _batch(self, k: int, descriptor: BatchDescriptor) -> ForwardBatch:
        size = descriptor.num_tokens_per_ubatch
        rows = size if descriptor.uniform_decode else descriptor.num_requests or self._splits[1]
        num_tokens, seq_lens, query_ends, key_ends = self._numbers.device[k].split(self._splits)
        tokens = self._tokens.device[:, k * size : (k + 1) * size]
        return ForwardBatch(
            input_ids=tokens[0],
            positions=tokens[1],
            slot_mapping=tokens[2],
            block_tables=self._tables.device[k, :rows],
            query_lens=_NOTHING,
            seq_lens=_NOTHING,
            num_tokens=0,
            num_tokens_per_rank=(size,) * self._num_ranks,
            fixed=FixedInputs(
                num_tokens=num_tokens[0],
                seq_lens=seq_lens[:rows],
                query_ends=query_ends[: rows + 1],
                key_ends=key_ends[: rows + 1],
                whole=descriptor.num_requests is not None,
                max_num_keys=descriptor.num_tokens,
                max_seq_len=self._limits.max_request_tokens,
                uniform_decode=descriptor.uniform_decode,
                host_query_lens=_NOTHING,
                host_seq_lens=_NOTHING,
                host_num_tokens=0,
            ),
        )


def _set_lengths(batch: ForwardBatch, query_lens: IntArray, seq_lens: IntArray, num_tokens: int) -> None:
    fixed = batch.fixed
    assert fixed is not None
    fixed.host_query_lens, fixed.host_seq_lens, fixed.host_num_tokens = query_lens, seq_lens, num_tokens


def _fill(schedule: Schedule, into: npt.NDArray[np.int64], tables: npt.NDArray[np.int32], block_size: int) -> int:
    """Write ids, positions and slots of a step into [3, tokens], blocks into [requests, blocks]; gives blocks used."""
    chunks, query_lens, num_tokens = schedule.chunks, schedule.query_lens, schedule.num_tokens
    for table, chunk in zip(tables, chunks, strict=False):
        table[: len(chunk.blocks)] = np.frombuffer(chunk.blocks, dtype=np.int32)
    starts = schedule.seq_lens - np.cumsum(query_lens)  # of a request, less the row of its first token
    at = np.arange(num_tokens) + np.repeat(starts, query_lens)
    blocks = tables[np.repeat(np.arange(len(chunks)), query_lens), at // block_size]
    input_ids, positions, slots = into[:, :num_tokens]
    input_ids[:] = [t for c in chunks for t in c.request.token_ids(c.start, c.start + c.num_tokens)]
    positions[:] = at
    slots[:] = blocks * np.int64(block_size) + at % block_size
    return max((len(chunk.blocks) for chunk in chunks), default=1)


def _max_requests(limits: Limits) -> int:
    return min(limits.max_num_seqs, limits.max_num_tokens)


def _max_blocks(limits: Limits) -> int:
    return -(-limits.max_request_tokens // limits.block_size)


class _Mirror:
    """A host array and its copy on the device; one and the same memory on the CPU."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        pinned = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self._pinned = pinned
        self.device = pinned if device.type == "cpu" else torch.zeros_like(pinned, device=device)
        self.host = pinned.numpy()

    def copy(self, *part: int | slice) -> Tensor:
        """A part of the device's copy, brought up to date; does not wait."""
        to = self.device[part]
        return to if to.is_cpu else to.copy_(self._pinned[part], non_blocking=True)
