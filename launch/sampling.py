"""From logits to the next token: greedy, temperature, top-k, top-p, log-probabilities.

Its own file because the result must depend on the request alone. Randomness is counter-based: the uniform number of a
token is a hash of (seed of the request, position of the token), so neither the rank nor the batch a request lands in,
nor a preemption in between, changes what it samples.

Nothing here waits for a device: numbers go to it, token ids come back when the caller reads them.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request samples and when it ends. Raises ValueError for a value out of range."""

    max_new_tokens: int = 64
    temperature: float = 0.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = all
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, fine, allowed in (
            ("max_new_tokens", self.max_new_tokens >= 1, "1 or more"),
            ("temperature", 0 <= self.temperature <= sys.float_info.max, "0 or more, finite"),
            ("top_p", 0 < self.top_p <= 1, "above 0, up to 1"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("stop", all(self.stop), "strings that are not empty"),
        ):
            if not fine:
                raise ValueError(f"{name}={getattr(self, name)!r}: allowed {allowed}")


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the chosen token and of the likeliest ones, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def request_seed(seed: int, request_id: str) -> int:
    """The seed of a request that brings none: from the run's seed and its id, the same in any order or subset."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{request_id}".encode(), digest_size=8).digest(), "little")


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for one token of one request (splitmix64's finaliser over seed and counter)."""
    z = _mix(seed) + (position + 1) * 0x9E3779B97F4A7C15
    return (_mix(z) >> 11) / 2**53


def _mix(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """Choose a token for each row.

    logits [n, vocab] float32; row i belongs to a request with `params[i]` whose new token gets position
    `positions[i]`. Returns [n] int64 on the logits' device, -1 for a row that holds NaN; does not block the host.
    """
    chosen = logits.argmax(dim=-1)
    broken = logits.gather(1, chosen[:, None]).squeeze(1).isnan()  # NaN counts as largest
    random = [i for i, p in enumerate(params) if p.temperature > 0]
    if random:
        rows = _to(random, torch.int64, logits)
        chosen[rows] = _draw(logits[rows], [params[i] for i in random], [positions[i] for i in random])
    return chosen.masked_fill_(broken, -1)


def _draw(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """Inverse-CDF sampling over the tokens that survive top-k, then top-p."""
    temperature = _to([p.temperature for p in params], torch.float64, logits)
    top_k = _to([min(p.top_k or logits.shape[1], logits.shape[1]) for p in params], torch.int64, logits)
    top_p = _to([p.top_p for p in params], torch.float64, logits)
    u = _to([uniform(p.seed, n) for p, n in zip(params, positions, strict=True)], torch.float64, logits)

    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    scaled = (ranked - ranked[:, :1]).double() / temperature[:, None]  # at most 0: no temperature overflows
    place = torch.arange(logits.shape[1], device=logits.device)
    probs = scaled.masked_fill(place >= top_k[:, None], -torch.inf).softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    probs = probs.masked_fill(before >= top_p[:, None], 0.0)  # the likeliest token stays: nothing comes before it
    cumulative = probs.cumsum(dim=-1)
    index = torch.searchsorted(cumulative, u[:, None] * cumulative[:, -1:], right=True)
    last = (probs > 0).sum(dim=-1, keepdim=True) - 1  # u just under 1 may round up past the last kept token
    last = last.clamp_(min=0)  # a row of NaN keeps none
    return order.gather(1, torch.minimum(index, last)).squeeze(1)


def top_logprobs(logits: Tensor, chosen: Tensor, num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities under the model (before temperature) for each row; blocks until they are on the host.

    logits [n, vocab] float32, chosen [n] int64.
    """
    logprobs = logits.log_softmax(dim=-1)
    of_chosen = logprobs.gather(1, chosen[:, None]).squeeze(1)
    values, ids = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
    columns = zip(chosen.tolist(), of_chosen.tolist(), ids.tolist(), values.tolist(), strict=True)
    return [TokenLogprobs(token, lp, tuple(zip(i, v, strict=True))) for token, lp, i, v in columns]


def _to(values: Sequence[float], dtype: torch.dtype, like: Tensor) -> Tensor:
    host = torch.tensor(values, dtype=dtype, pin_memory=like.is_cuda)
    return host.to(like.device, non_blocking=True)
