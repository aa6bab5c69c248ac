"""Prompt files: JSON lines in, checked prompts and named mistakes out.

Its own file because every rank reads the same text and must come to the same list, so nothing here depends on the
rank. A malformed line never stops the others: it is a `BadLine` with its number, and the caller decides.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dbo.errors import ConfigError
from launch.config import closest
from launch.sampling import SamplingParams, request_seed

_CONTENT = ("prompt", "messages", "token_ids")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One well-formed line. `content` is the value of its `kind`."""

    id: str
    index: int  # among the well-formed lines
    kind: str  # prompt | messages | token_ids
    content: Any
    params: SamplingParams
    arrival_s: float = 0.0  # after the first one


@dataclass(frozen=True)
class BadLine:
    """A line that cannot run; prints as `file:line: reason`."""

    source: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line}: {self.reason}"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or isinstance(value, float)


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(_is_int(v) and v >= 0 for v in value)


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(v, str) for v in value))


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
    )


_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "id": (lambda v: isinstance(v, str) or _is_int(v), "a string"),
    "prompt": (lambda v: isinstance(v, str), "a string"),
    "messages": (_is_messages, "a list of objects with a role and a content, both strings"),
    "token_ids": (_is_token_ids, "a list of token ids"),
    "max_new_tokens": (_is_int, "a whole number"),
    "temperature": (_is_number, "a number"),
    "top_p": (_is_number, "a number"),
    "top_k": (_is_int, "a whole number"),
    "seed": (_is_int, "a whole number"),
    "stop": (_is_stop, "a string or a list of strings"),
    "stop_token_ids": (_is_token_ids, "a list of token ids"),
    "ignore_eos": (lambda v: isinstance(v, bool), "true or false"),
}


def read_prompts(text: str, source: str, defaults: SamplingParams) -> tuple[list[Prompt], list[BadLine]]:
    """All prompts of `text`, in order, and all lines that are none.

    `defaults` holds what a line does not say; a request without a seed gets one from `defaults.seed` and its id. A
    line without an id is called by its number. Blank lines are skipped.
    """
    prompts: list[Prompt] = []
    bad: list[BadLine] = []
    lines_of_id: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            prompt = _parse(line, number, len(prompts), defaults)
            if prompt.id in lines_of_id:
                raise ValueError(f"id {prompt.id!r} is also that of line {lines_of_id[prompt.id]}")
        except ValueError as error:
            bad.append(BadLine(source, number, str(error)))
            continue
        lines_of_id[prompt.id] = number
        prompts.append(prompt)
    return prompts, bad


def _parse(line: str, number: int, index: int, defaults: SamplingParams) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not a prompt: nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    if "\\ud" in line.lower() and re.search("[\ud800-\udfff]", json.dumps(row, ensure_ascii=False)):
        raise ValueError("half of a surrogate pair (\\ud800 to \\udfff alone) is no text")
    for key, value in row.items():
        if key not in _FIELDS:
            raise ValueError(f"unknown key {key!r}; {closest(key, _FIELDS) or 'known: ' + ', '.join(_FIELDS)}")
        fits, wanted = _FIELDS[key]
        if not fits(value):
            raise ValueError(f"{key} must be {wanted}")
    kinds = [kind for kind in _CONTENT if kind in row]
    if len(kinds) != 1:
        raise ValueError(f"needs one of {', '.join(_CONTENT)}; has {' and '.join(kinds) or 'none'}")
    request_id = str(row.get("id", number))
    params = _params(row, request_id, defaults)
    return Prompt(id=request_id, index=index, kind=kinds[0], content=row[kinds[0]], params=params)


def _params(row: Mapping[str, Any], request_id: str, defaults: SamplingParams) -> SamplingParams:
    stop = row.get("stop", defaults.stop)
    return SamplingParams(
        max_new_tokens=row.get("max_new_tokens", defaults.max_new_tokens),
        temperature=row.get("temperature", defaults.temperature),
        top_p=row.get("top_p", defaults.top_p),
        top_k=row.get("top_k", defaults.top_k),
        seed=row.get("seed", request_seed(defaults.seed, request_id)),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(row.get("stop_token_ids", defaults.stop_token_ids)),
        ignore_eos=row.get("ignore_eos", defaults.ignore_eos),
    )


def fit_lengths(prompt_tokens: int, new_tokens: int, longest: int) -> tuple[int, int]:
    """Both lengths, together at most `longest`: the answer is cut to half of it at most, then the prompt."""
    if prompt_tokens + new_tokens <= longest:
        return prompt_tokens, new_tokens
    new_tokens = min(new_tokens, longest // 2)
    return min(prompt_tokens, longest - new_tokens), new_tokens


def pace(prompts: Sequence[Prompt], rate: str, seed: int) -> list[Prompt]:
    """The same prompts with times of arrival for a `--rate`: `2.5` requests a second, or `2x` their own pace.

    Prompts with arrival times keep their rhythm, stretched; others arrive at random (Poisson). The same for the same
    arguments. Raises ConfigError for a multiple of a pace that the prompts do not have.
    """
    last_s, speed = prompts[-1].arrival_s, float(rate.removesuffix("x"))
    if rate.endswith("x") and last_s <= 0:
        raise ConfigError("--rate", rate, "requests a second, such as 2.5", "only a trace has a pace of its own")
    if last_s <= 0:
        rng = random.Random(seed)
        arrivals = itertools.accumulate((rng.expovariate(speed) for _ in prompts[1:]), initial=0.0)
        return [replace(prompt, arrival_s=arrival) for prompt, arrival in zip(prompts, arrivals, strict=True)]
    factor = 1 / speed if rate.endswith("x") else (len(prompts) - 1) / last_s / speed
    return [replace(prompt, arrival_s=prompt.arrival_s * factor) for prompt in prompts]


Draw = Callable[[random.Random], int]
MAX_ALTERNATIVES = 32
_SYNTHETIC = {"requests": "16", "prompt_tokens": "128", "new_tokens": "16"}
_VALUES = "N, N-M or lognormal:MEDIAN:SIGMA"


def synthetic_prompts(spec: str, vocab_size: int, seed: int, longest: int | None = None) -> list[Prompt]:
    """Random prompts for `synthetic:requests=16,prompt_tokens=64-256,new_tokens=lognormal:16:0.8`.

    `N-M` is drawn from evenly; a lognormal draw is rounded and at least 1. Where one is among the lengths, prompt and
    answer are shortened to `longest` tokens together, since its tail has no end. The same for the same arguments.
    Raises ConfigError for a key or value that makes no sense.
    """
    draws = _draws(spec)
    rng = random.Random(seed)
    prompts = []
    for index in range(draws["requests"](rng)):
        length, new_tokens = draws["prompt_tokens"](rng), draws["new_tokens"](rng)
        if longest is not None and "lognormal" in spec:
            length, new_tokens = fit_lengths(length, new_tokens, longest)
        token_ids = [rng.randrange(vocab_size) for _ in range(length)]
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        prompts.append(Prompt(id=str(index), index=index, kind="token_ids", content=token_ids, params=params))
    return prompts


def alternatives(workload: str) -> list[str]:
    """The workloads that `synthetic:prompt_tokens=64/256/1024` stands for, every combination of what slashes separate;
    any other one stands for itself. Raises ConfigError for more than `MAX_ALTERNATIVES`."""
    if not workload.startswith("synthetic:"):
        return [workload]
    parts = []
    for part in workload.removeprefix("synthetic:").split(","):
        name, equals, values = part.partition("=")
        parts.append([f"{name}{equals}{value}" for value in values.split("/")])
    found = [f"synthetic:{','.join(chosen)}" for chosen in itertools.product(*parts)]
    if len(found) > MAX_ALTERNATIVES:
        raise ConfigError("--workload", workload, f"at most {MAX_ALTERNATIVES} combinations, not {len(found)}", "")
    return found


def _draws(spec: str) -> dict[str, Draw]:
    texts = dict(_SYNTHETIC)
    for part in filter(None, spec.removeprefix("synthetic:").split(",")):
        name, _, text = part.partition("=")
        if name not in texts:
            allowed = ", ".join(f"{known}=..." for known in texts)
            raise ConfigError("--workload", part, f"{allowed} with {_VALUES}", closest(name, texts))
        texts[name] = text
    return {name: _draw(name, text) for name, text in texts.items()}


def _draw(name: str, text: str) -> Draw:
    if match := re.fullmatch(r"(\d+)(?:-(\d+))?", text):
        low, high = int(match[1]), int(match[2] or match[1])
        if 1 <= low <= high:
            return lambda rng: rng.randint(low, high)
    if match := re.fullmatch(r"lognormal:(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)", text):
        median, sigma = float(match[1]), float(match[2])
        if median >= 1 and sigma <= 4:
            return lambda rng: max(1, round(rng.lognormvariate(math.log(median), sigma)))
    raise ConfigError("--workload", f"{name}={text}", f"{_VALUES}, 1 <= N <= M, 1 <= MEDIAN, SIGMA <= 4", "")
