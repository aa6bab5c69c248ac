"""Public traces of LLM requests as workloads: how long prompts and answers were, and which prompts began alike.

Its own file because these formats are other people's, and because a trace says nothing of the text: its tokens are made
here, the same on every rank. Two formats, told apart by their first line:

    azure      Azure LLM inference traces: CSV with TIMESTAMP, ContextTokens, GeneratedTokens
    mooncake   Mooncake traces: JSON lines with timestamp, input_length, output_length, hash_ids

A hash id stands for a block of 512 tokens: blocks with the same id get the same tokens, so equal prefixes stay equal.
A malformed row never stops the others: it is a `BadLine` with its number, and the caller decides.
"""

from __future__ import annotations

import datetime
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from launch.sampling import SamplingParams
from launch.workload import BadLine, Prompt, fit_lengths

TraceFormat = Literal["azure", "mooncake"]

BLOCK_TOKENS = 512
"""Tokens behind one hash id of a Mooncake trace."""
_AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
_MOONCAKE_KEYS = frozenset({"timestamp", "input_length", "output_length"})


@dataclass(frozen=True, kw_only=True)
class TraceRow:
    """One request of a trace."""

    line: int
    arrival_s: float  # on the trace's own clock
    prompt_tokens: int
    new_tokens: int
    hash_ids: tuple[int, ...] | None = None


def trace_format(text: str) -> TraceFormat | None:
    """The format of a file that is a trace, told by its first line that is not blank; None for any other file."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    if [name.strip() for name in first.split(",")] == _AZURE_COLUMNS:
        return "azure"
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):
        return None
    return "mooncake" if isinstance(row, dict) and row.keys() >= _MOONCAKE_KEYS else None


def read_trace(
    text: str, source: str, kind: TraceFormat, *, max_requests: int | None = None
) -> tuple[list[TraceRow], list[BadLine]]:
    """The rows of a trace in order of arrival, the first `max_requests` of them, and all rows that are none."""
    lines = ((number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip())
    if kind == "azure":
        next(lines)  # names the columns
    parse = _azure_row if kind == "azure" else _mooncake_row
    rows: list[TraceRow] = []
    bad: list[BadLine] = []
    for number, line in lines:
        try:
            rows.append(parse(number, line))
        except ValueError as error:
            bad.append(BadLine(source, number, str(error)))
    return sorted(rows, key=lambda row: row.arrival_s)[:max_requests], bad


def trace_prompts(
    rows: Sequence[TraceRow], *, vocab_size: int, longest: int, seed: int = 0
) -> tuple[list[Prompt], int]:
    """A prompt for every row, and how many had to be shortened so that prompt + answer are at most `longest` tokens.

    `rows` are in order of arrival; times count from the first. The ids of the prompts are the rows' line numbers. The
    same for the same arguments.
    """
    prompts = []
    num_shortened = 0
    for index, row in enumerate(rows):
        length, new_tokens = fit_lengths(row.prompt_tokens, row.new_tokens, longest)
        num_shortened += (length, new_tokens) != (row.prompt_tokens, row.new_tokens)
        prompts.append(
            Prompt(
                id=str(row.line),
                index=index,
                kind="token_ids",
                content=_tokens(row, length, vocab_size, seed),
                params=SamplingParams(max_new_tokens=new_tokens, ignore_eos=True),
                arrival_s=row.arrival_s - rows[0].arrival_s,
            )
        )
    return prompts, num_shortened


def _tokens(row: TraceRow, length: int, vocab_size: int, seed: int) -> list[int]:
    if row.hash_ids is None:
        return _draw((seed, 0, row.line), length, vocab_size)
    blocks = (_draw((seed, 1, block), BLOCK_TOKENS, vocab_size) for block in row.hash_ids)
    return list(itertools.islice(itertools.chain.from_iterable(blocks), length))


def _draw(key: tuple[int, ...], length: int, vocab_size: int) -> list[int]:
    return list(np.random.default_rng(key).integers(vocab_size, size=length).tolist())


def _azure_row(number: int, line: str) -> TraceRow:
    cells = line.split(",")
    if len(cells) != len(_AZURE_COLUMNS):
        raise ValueError(f"has {len(cells)} columns; needs {', '.join(_AZURE_COLUMNS)}")
    stamp, context, generated = (cell.strip() for cell in cells)
    try:
        arrival = datetime.datetime.fromisoformat(stamp)
    except ValueError:
        raise ValueError(f"TIMESTAMP {stamp!r} is no date and time") from None
    if arrival.tzinfo is None:
        arrival = arrival.replace(tzinfo=datetime.UTC)
    return TraceRow(
        line=number,
        arrival_s=arrival.timestamp(),
        prompt_tokens=_count("ContextTokens", context),
        new_tokens=_count("GeneratedTokens", generated),
    )


def _mooncake_row(number: int, line: str) -> TraceRow:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not a request: nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    if missing := sorted(_MOONCAKE_KEYS - row.keys()):
        raise ValueError(f"has no {missing[0]}")
    stamp, hash_ids = row["timestamp"], row.get("hash_ids")
    if not isinstance(stamp, int | float) or isinstance(stamp, bool) or not 0 <= stamp < float("inf"):
        raise ValueError("timestamp must be milliseconds, 0 or more")
    length = _count("input_length", row["input_length"])
    if hash_ids is not None:
        _check_hash_ids(hash_ids, length)
    return TraceRow(
        line=number,
        arrival_s=stamp / 1e3,
        prompt_tokens=length,
        new_tokens=_count("output_length", row["output_length"]),
        hash_ids=None if hash_ids is None else tuple(hash_ids),
    )


def _check_hash_ids(hash_ids: Any, prompt_tokens: int) -> None:
    if not isinstance(hash_ids, list) or not all(type(block) is int and block >= 0 for block in hash_ids):
        raise ValueError("hash_ids must be a list of whole numbers, 0 or more")
    if len(hash_ids) != (needed := -(-prompt_tokens // BLOCK_TOKENS)):
        raise ValueError(f"{len(hash_ids)} hash_ids; {prompt_tokens} tokens are {needed} blocks of {BLOCK_TOKENS}")


def _count(name: str, value: Any) -> int:
    """`value`, a number or its digits, if it is a count of at least 1."""
    digits = value.isascii() and value.isdigit() and len(value) < 10 if isinstance(value, str) else type(value) is int
    if not digits or int(value) < 1:
        raise ValueError(f"{name} must be a whole number, 1 or more; is {value!r}")
    return int(value)
