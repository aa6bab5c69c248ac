"""`ForwardBatch`: what one forward pass of a rank works on, and how each part follows when the step is cut.

Its own file because it is the seam between scheduler and model. Invariants: token rows are grouped by request, in the
order of `query_lens`; rows at and beyond `num_tokens` are padding, whose `slot_mapping` is -1 and whose results are
never read; a half of a request that a cut left in a later ubatch counts the tokens of the earlier half as computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dbo.slices import (
    Batch,
    IntArray,
    UBatchSlice,
    by_request,
    by_token,
    cut_query_lens,
    cut_seq_lens,
    derived,
    ruled,
    shared,
)


def _true_tokens(batch: ForwardBatch, s: UBatchSlice) -> int:
    return s.num_tokens


def _tokens_per_rank(batch: ForwardBatch, s: UBatchSlice) -> tuple[int, ...] | None:
    return s.num_tokens_per_rank


def _query_lens(batch: ForwardBatch, s: UBatchSlice) -> IntArray:
    return cut_query_lens(batch.query_lens, s)


def _seq_lens(batch: ForwardBatch, s: UBatchSlice) -> IntArray:
    return cut_seq_lens(batch.seq_lens, s)


@dataclass(kw_only=True, eq=False)
class FixedInputs:
    """A batch whose memory stays where it is while steps come and go: what a graph knows of it. B requests at most.

    The engine refills tensors and host numbers before every step: captured parts read the tensors, eager parts the
    host numbers, through this very object.
    """

    num_tokens: Tensor
    """[] int32 on the device, rows that are tokens."""
    seq_lens: Tensor
    """[B] int32 on the device; 0 for no request."""
    query_ends: Tensor
    """[B + 1] int32 on the device: 0, and where each request's tokens end; no request ends where the last one did."""
    key_ends: Tensor
    """[B + 1] int32 on the device, the same for all keys that each request sees."""
    whole: bool
    """The step is captured whole, attention too: else that is an eager part, and reads the lengths on the host."""
    max_num_keys: int
    """Most keys of all requests together, in a step that is captured whole."""
    max_seq_len: int
    uniform_decode: bool
    host_query_lens: IntArray
    """[requests of this step] int32 on the host, as `ForwardBatch.query_lens`; the same for the next two."""
    host_seq_lens: IntArray
    host_num_tokens: int


@dataclass(frozen=True, kw_only=True)
class ForwardBatch(Batch):
    """T token rows (with padding) of B requests; token tensors are on the model's device, lengths on the host."""

    input_ids: Tensor = ruled(by_token(pad=0))
    """[T] int64."""
    positions: Tensor = ruled(by_token(pad=0))
    """[T] int64, position of each token in its request."""
    slot_mapping: Tensor = ruled(by_token(pad=-1))
    """[T] int64, KV slot (block * block_size + offset) where each token's key and value go; -1 = nowhere."""
    block_tables: Tensor = ruled(by_request(pad=0))
    """[B, max_blocks] int32, KV blocks of each request in order; any valid block (0) after the last."""
    query_lens: IntArray = ruled(derived(_query_lens, padded_as=by_request(pad=0)))
    """[B] int32 on the host, new tokens of each request; 0 only in rows of padding."""
    seq_lens: IntArray = ruled(derived(_seq_lens, padded_as=by_request(pad=0)))
    """[B] int32 on the host, KV length of each request after this forward; its last query is at `seq_lens - 1`."""
    num_tokens: int = ruled(derived(_true_tokens))
    """Rows that are tokens: the sum of `query_lens`."""
    num_tokens_per_rank: tuple[int, ...] | None = ruled(derived(_tokens_per_rank), default=None)
    """True tokens of every rank in this (u)batch, where known: lets a backend bound what it receives."""

    fixed: FixedInputs | None = ruled(shared(), default=None)
    """Where a graph may be captured: the lengths above are those of the capture only. Set after the cut."""

    @property
    def num_routed(self) -> int | Tensor:
        """`num_tokens`, as a captured part must read it."""
        return self.num_tokens if self.fixed is None else self.fixed.num_tokens

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> ForwardBatch:
        """The batch of a rank without work: it still takes part in every collective."""
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        return cls(
            input_ids=nothing,
            positions=nothing,
            slot_mapping=nothing,
            block_tables=torch.empty(0, 1, dtype=torch.int32, device=device),
            query_lens=np.empty(0, np.int32),
            seq_lens=np.empty(0, np.int32),
            num_tokens=0,
        )
