"""Traces: both public formats are read, rows that are none are named, and equal prefixes stay equal."""

from __future__ import annotations

import json

import pytest

from launch.traces import BLOCK_TOKENS, read_trace, trace_format, trace_prompts

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


def mooncake(**changes) -> str:
    row = {"timestamp": 0, "input_length": 600, "output_length": 50, "hash_ids": [0, 1]}
    return json.dumps({key: value for key, value in {**row, **changes}.items() if value is not ...})


def test_formats_are_told_apart_by_their_first_line():
    assert trace_format("\n" + AZURE.replace("\n", "\r\n")) == "azure"
    assert trace_format(mooncake()) == "mooncake"
    assert trace_format(mooncake(hash_ids=...)) == "mooncake"
    assert [trace_format(text) for text in ('{"prompt": "x"}', "", "a,b,c\n1,2,3", "[1]", "[" * 100_000)] == [None] * 5


def test_rows_come_in_order_of_arrival_whatever_their_clock():
    later, sooner = "2024-05-10 00:00:00.5+00:00,30,3", "2024-05-09 23:59:59,20,2"
    rows, bad = read_trace("\n".join([AZURE.splitlines()[0], later, "", sooner]), "f.csv", "azure")
    assert not bad
    assert [(row.line, row.prompt_tokens, row.new_tokens) for row in rows] == [(4, 20, 2), (2, 30, 3)]
    assert rows[1].arrival_s - rows[0].arrival_s == pytest.approx(1.5)
    rows, _ = read_trace("\n".join([mooncake(timestamp=900), mooncake(timestamp=5)]), "f", "mooncake", max_requests=1)
    assert [(row.line, row.arrival_s) for row in rows] == [(2, 0.005)]


def test_prompts_arrive_as_they_did_counted_from_the_first():
    rows, _ = read_trace(AZURE, "f.csv", "azure")
    prompts, _ = trace_prompts(rows, vocab_size=10, longest=1000)
    assert [prompt.arrival_s for prompt in prompts] == [0.0, pytest.approx(4.314579)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("yesterday,1,1", "TIMESTAMP 'yesterday' is no date and time"),
        ("2023-11-16 18:15:46,1", "has 2 columns; needs TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("2023-11-16 18:15:46,-1,5", "ContextTokens must be a whole number, 1 or more; is '-1'"),
        ("2023-11-16 18:15:46,1,", "GeneratedTokens must be a whole number, 1 or more; is ''"),
        ("2023-11-16 18:15:46,1e3,5", "ContextTokens must be a whole number, 1 or more; is '1e3'"),
        (mooncake(timestamp=-1), "timestamp must be milliseconds, 0 or more"),
        (mooncake(timestamp="0"), "timestamp must be milliseconds, 0 or more"),
        (mooncake(output_length=0), "output_length must be a whole number, 1 or more; is 0"),
        (mooncake(output_length=True), "output_length must be a whole number, 1 or more; is True"),
        (mooncake(input_length=...), "has no input_length"),
        (mooncake(hash_ids=[0]), "1 hash_ids; 600 tokens are 2 blocks of 512"),
        (mooncake(hash_ids=[0, -1]), "hash_ids must be a list of whole numbers, 0 or more"),
        (mooncake(hash_ids=3), "hash_ids must be a list"),
        (mooncake()[:-1], "not JSON: Expecting ',' delimiter"),
        ("[1]", "not a JSON object"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_row_is_named_and_the_others_stay(line, reason):
    azure = "," in line.split("{")[0] and "[" not in line[:1]
    kind, first, last = ("azure", *AZURE.split("\n")[:2]) if azure else ("mooncake", mooncake(), mooncake())
    rows, (error,) = read_trace("\n".join([first, line, last]), "trace", kind)
    assert rows[-1].line == 3
    assert str(error).startswith("trace:2: ")
    assert reason in str(error)


def test_blocks_with_one_id_hold_the_same_tokens():
    lines = [mooncake(), mooncake(hash_ids=[0, 2]), mooncake(input_length=700), mooncake(hash_ids=...)]
    rows, _ = read_trace("\n".join(lines), "f", "mooncake")
    prompts, shortened = trace_prompts(rows, vocab_size=1000, longest=10_000)
    assert shortened == 0
    first, other_end, longer, unknown = (prompt.content for prompt in prompts)
    assert first[:BLOCK_TOKENS] == other_end[:BLOCK_TOKENS]
    assert first[BLOCK_TOKENS:] != other_end[BLOCK_TOKENS:]
    assert longer[:600] == first
    assert unknown[:BLOCK_TOKENS] != first[:BLOCK_TOKENS]
    assert [len(prompt.content) for prompt in prompts] == [600, 600, 700, 600]
    assert {type(token) for token in first} == {int}
    assert 0 <= min(first) <= max(first) < 1000


def test_requests_beyond_the_limit_are_shortened_and_counted():
    rows, _ = read_trace(
        "\n".join([mooncake(), mooncake(output_length=900), mooncake(input_length=520)]), "f", "mooncake"
    )
    prompts, shortened = trace_prompts(rows, vocab_size=50, longest=600)
    assert [(len(p.content), p.params.max_new_tokens) for p in prompts] == [(550, 50), (300, 300), (520, 50)]
    assert shortened == 2
    assert all(prompt.params.ignore_eos for prompt in prompts)
