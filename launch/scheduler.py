"""Which tokens a rank computes next: continuous batching over a token budget and a paged KV cache.

Its own file because it is pure bookkeeping: no torch, no ranks, no clock. A step is

    schedule = scheduler.schedule()          # picks chunks, takes blocks, counts the tokens as computed
    scheduler.commit(schedule, token_ids)    # the sampled tokens arrive; requests that end leave

`schedule()` already counts everything that does not depend on the sampled tokens, also that a request reaches its
last token. So when `schedule.foreseeable`, the next `schedule()` gives the same answer before and after `commit`, and
the engine may ask early.

Invariants: requests run in order of arrival, and when blocks run out the latest one gives its blocks back and is
computed again later, so the oldest always gets on and every request ends; a block belongs to one request at most; a
request alone always fits (`check` refuses those that would not).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from launch.sampling import SamplingParams, TokenLogprobs

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds a rank's steps; all counts are at least 1."""

    max_num_tokens: int
    max_num_seqs: int
    max_model_len: int  # prompt + answer
    block_size: int
    num_blocks: int

    @property
    def max_request_tokens(self) -> int:
        """Longest prompt + answer: the context limit, or what the whole KV cache holds and one token more."""
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)


class StopText(Protocol):
    """Looks for stop strings in the text of a growing answer."""

    def push(self, token_id: int) -> bool:
        """Add a token; True when a stop string has appeared."""


@dataclass(eq=False, kw_only=True)
class Request:
    """One prompt and its growing answer."""

    id: str
    index: int  # place in the input: the order of arrival
    prompt_ids: Sequence[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    stop_text: StopText | None = None
    arrival_s: float = 0.0  # after the start of the run

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    first_token_s: float = 0.0  # clock readings of the engine
    last_token_s: float = 0.0

    # What the scheduler knows. `num_sampled` may be one ahead of `output_ids`, while a step is under way.
    num_computed: int = 0
    num_sampled: int = 0
    max_sampled: int = 0
    blocks: array[int] = field(default_factory=lambda: array("i"))  # only ever extended, or replaced
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and answer so far, with the token that a step under way will bring."""
        return len(self.prompt_ids) + self.num_sampled

    @property
    def stops_on_tokens(self) -> bool:
        """Whether the value of a token can end this request."""
        params = self.params
        return bool(params.stop_token_ids or self.stop_text or (self.eos_token_ids and not params.ignore_eos))

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens `start` to `stop` of prompt + answer."""
        split = len(self.prompt_ids)
        tokens = list(self.prompt_ids[start:stop])
        return tokens + self.output_ids[max(start - split, 0) : max(stop - split, 0)]

    def append(self, token_id: int) -> None:
        """Take a sampled token; sets `finish_reason` when the answer ends with it."""
        self.output_ids.append(token_id)
        text_stops = self.stop_text is not None and self.stop_text.push(token_id)
        ends = token_id in self.params.stop_token_ids
        ends |= token_id in self.eos_token_ids and not self.params.ignore_eos
        if ends or text_stops:
            self.finish_reason = "stop"
        elif len(self.output_ids) >= self.max_sampled:
            self.finish_reason = "length"


class Chunk(NamedTuple):
    """Tokens `start` to `start + num_tokens` of a request, computed in one step."""

    request: Request
    start: int
    num_tokens: int
    samples: bool  # reaches the last known token: its logits give the next one
    blocks: array[int]  # int32; those of the request when it was scheduled, and maybe further ones behind them

    @property
    def is_decode(self) -> bool:
        """One token after an answer has begun."""
        return self.num_tokens == 1 and self.start >= len(self.request.prompt_ids)


@dataclass(frozen=True)
class Schedule:
    """One step of one rank; empty when the rank is idle."""

    chunks: tuple[Chunk, ...]
    foreseeable: bool  # the next schedule does not depend on the tokens this step samples
    num_ended: int  # requests whose last token this step samples, whatever its value
    num_running: int = 0  # requests under way in this step, those that end with it too
    num_kv_blocks: int = 0  # that they hold

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @cached_property
    def query_lens(self) -> npt.NDArray[np.int32]:
        """[num_requests] tokens computed for each request."""
        return np.array([chunk.num_tokens for chunk in self.chunks], dtype=np.int32)

    @cached_property
    def seq_lens(self) -> npt.NDArray[np.int32]:
        """[num_requests] KV length of each request after the step."""
        return np.array([chunk.start + chunk.num_tokens for chunk in self.chunks], dtype=np.int32)

    @property
    def uniform_decode(self) -> bool:
        """Every request computes one token (also true when idle: an idle rank objects to nothing)."""
        return all(chunk.num_tokens == 1 for chunk in self.chunks)

    @cached_property
    def sampling(self) -> list[Chunk]:
        """The chunks that sample a token, in order."""
        return [chunk for chunk in self.chunks if chunk.samples]


def fit_cache(limits: Limits, requests: Sequence[Request]) -> Limits:
    """`limits` with no more blocks than these requests can ever hold at once: the rest of the memory stays free."""
    lengths = (min(len(r.prompt_ids) + r.params.max_new_tokens, limits.max_model_len) for r in requests)
    blocks = sorted((-(-length // limits.block_size) for length in lengths), reverse=True)
    return replace(limits, num_blocks=max(1, min(limits.num_blocks, sum(blocks[: limits.max_num_seqs]))))


class Scheduler:
    """The requests of one rank and the blocks of its KV cache."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # by order of arrival; all of them arrived before all of `waiting`
        self.free_blocks = list(range(limits.num_blocks - 1, -1, -1))
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether any request still needs a step (not counting a step under way)."""
        return bool(self.waiting or self.running)

    def check(self, num_prompt_tokens: int) -> str | None:
        """Why a prompt of this length can never run, or None."""
        limits = self.limits
        if num_prompt_tokens == 0:
            return "the prompt is empty"
        if num_prompt_tokens >= limits.max_model_len:
            return f"the prompt has {num_prompt_tokens} tokens; --max-model-len is {limits.max_model_len}"
        if num_prompt_tokens >= limits.max_request_tokens:
            room = limits.max_request_tokens - 1
            return f"the prompt has {num_prompt_tokens} tokens; the KV cache holds {room}; raise --kv-cache-memory"
        return None

    def add(self, request: Request) -> None:
        """Queue a request that passed `check`; requests are added in order of `index`."""
        room = self.limits.max_request_tokens - len(request.prompt_ids)
        request.max_sampled = min(request.params.max_new_tokens, room)
        self.waiting.append(request)

    def schedule(self) -> Schedule:
        """Pick the chunks of the next step."""
        chunks: list[Chunk] = []
        preempted = self._continue_running(chunks)
        if not preempted:
            self._admit_waiting(chunks)
        num_running, num_kv_blocks = len(self.running), self.limits.num_blocks - len(self.free_blocks)
        ended = self._count(chunks)
        unforeseen = any(c.samples and c.request not in ended and c.request.stops_on_tokens for c in chunks)
        return Schedule(
            tuple(chunks),
            foreseeable=not unforeseen,
            num_ended=len(ended),
            num_running=num_running,
            num_kv_blocks=num_kv_blocks,
        )

    def commit(self, schedule: Schedule, token_ids: Sequence[int]) -> list[Request]:
        """Hand over the sampled tokens, one for each of `schedule.sampling`; returns the requests that ended."""
        finished = []
        for chunk, token_id in zip(schedule.sampling, token_ids, strict=True):
            request = chunk.request
            request.append(token_id)
            if request.finish_reason is not None:
                self._release(request)
                finished.append(request)
        return finished

    def _continue_running(self, chunks: list[Chunk]) -> bool:
        """Chunks of the requests under way, oldest first; True if one had to give way."""
        budget, preempted = self.limits.max_num_tokens, False
        while len(chunks) < len(self.running) and budget > 0:
            request = self.running[len(chunks)]  # only requests behind this one give way: places do not shift
            num_tokens = min(request.num_tokens - request.num_computed, budget)
            while not self._grow(request, request.num_computed + num_tokens):
                preempted = True
                if self._preempt_latest() is request:
                    return True
            chunks.append(self._chunk(request, num_tokens))
            budget -= num_tokens
        return preempted

    def _admit_waiting(self, chunks: list[Chunk]) -> None:
        """Start waiting requests while tokens, places and blocks last; each takes all the blocks of its prompt."""
        budget = self.limits.max_num_tokens - sum(chunk.num_tokens for chunk in chunks)
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting[0]
            if not self._grow(request, request.num_tokens):
                return
            self.running.append(self.waiting.popleft())
            chunks.append(self._chunk(request, min(request.num_tokens, budget)))
            budget -= chunks[-1].num_tokens

    def _chunk(self, request: Request, num_tokens: int) -> Chunk:
        start = request.num_computed
        samples = start + num_tokens == request.num_tokens
        return Chunk(request, start, num_tokens, samples, request.blocks)

    def _count(self, chunks: Sequence[Chunk]) -> set[Request]:
        """Count the chunks as computed; requests that sample their last token leave now. Returns those."""
        ended = set()
        for chunk in chunks:
            request = chunk.request
            request.num_computed += chunk.num_tokens
            request.num_sampled += chunk.samples
            if chunk.samples and request.num_sampled >= request.max_sampled:
                self._release(request)
                ended.add(request)
        return ended

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Give `request` the blocks for `num_tokens` tokens, or nothing and False."""
        missing = -(-num_tokens // self.limits.block_size) - len(request.blocks)
        if missing > len(self.free_blocks):
            return False
        if missing > 0:
            request.blocks.extend([self.free_blocks.pop() for _ in range(missing)])
        return True

    def _preempt_latest(self) -> Request:
        """The latest request gives its blocks back and will be computed again from its first token."""
        request = self.running[-1]
        self._release(request)
        request.num_computed = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)
        return request

    def _release(self, request: Request) -> None:
        if request in self.running:
            self.running.remove(request)
        self.free_blocks += reversed(request.blocks)
        request.blocks = array("i")
