"""Prompt files: what a line may say, and that a bad line is named and harms no other."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest

from dbo.errors import ConfigError
from launch.sampling import SamplingParams, request_seed
from launch.workload import alternatives, pace, read_prompts, synthetic_prompts

GAPS = (0.0, 1.0, 1.0, 4.0)
DEFAULTS = SamplingParams(max_new_tokens=9, temperature=0.5, seed=3)


def read(*lines):
    return read_prompts("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), "p", DEFAULTS)


def test_all_kinds_and_fields():
    fields = {"stop": ["u"], "stop_token_ids": [5], "ignore_eos": True, "top_k": 3, "top_p": 0.5, "temperature": 0}
    prompts, bad = read(
        {"id": "a", "prompt": "hi"},
        "",
        {"messages": [{"role": "user", "content": "x"}], "stop": "end", "seed": 8, "max_new_tokens": 1},
        {"id": 7, "token_ids": [1, 2], **fields},
    )
    assert not bad
    assert [(p.id, p.index, p.kind) for p in prompts] == [
        ("a", 0, "prompt"),
        ("3", 1, "messages"),
        ("7", 2, "token_ids"),
    ]
    a, b, c = (p.params for p in prompts)
    assert a == SamplingParams(max_new_tokens=9, temperature=0.5, seed=request_seed(3, "a"))
    assert (b.stop, b.seed, b.max_new_tokens) == (("end",), 8, 1)
    values = {"stop": ("u",), "stop_token_ids": (5,)}
    assert {name: getattr(c, name) for name in fields} == {**fields, **values}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "x"', "not JSON: Expecting ',' delimiter at column 15"),
        ("[1]", "not a JSON object"),
        ('{"prompts": "x"}', "unknown key 'prompts'; did you mean prompt?"),
        ('{"id": "x"}', "needs one of prompt, messages, token_ids; has none"),
        ('{"prompt": "x", "token_ids": [1]}', "has prompt and token_ids"),
        ('{"prompt": 3}', "prompt must be a string"),
        ('{"token_ids": [1, -1]}', "token_ids must be a list of token ids"),
        ('{"token_ids": [true]}', "token_ids must be"),
        ('{"messages": [{"content": "x"}]}', "messages must be a list of objects"),
        ('{"messages": [{"role": "user", "content": null}]}', "a role and a content, both strings"),
        ('{"messages": [{"role": "user"}]}', "a role and a content, both strings"),
        ('{"prompt": "\\ud800"}', "half of a surrogate pair"),
        ('{"id": "\\uDFFF", "prompt": "x"}', "half of a surrogate pair"),
        ("[" * 100_000, "nested too deeply"),
        ('{"prompt": "x", "temperature": Infinity}', "temperature=inf: allowed 0 or more, finite"),
        ('{"prompt": "x", "temperature": "hot"}', "temperature must be a number"),
        ('{"prompt": "x", "temperature": -1}', "temperature=-1: allowed 0 or more"),
        ('{"prompt": "x", "max_new_tokens": 0}', "max_new_tokens=0: allowed 1 or more"),
        ('{"id": "good", "prompt": "x"}', "id 'good' is also that of line 1"),
    ],
)
def test_a_bad_line_is_named_and_the_others_stay(line, words):
    prompts, bad = read({"id": "good", "prompt": "x"}, line, {"id": "last", "prompt": "x\u2028y"})
    assert [p.id for p in prompts] == ["good", "last"]
    assert [p.index for p in prompts] == [0, 1]
    (error,) = bad
    assert str(error).startswith("p:2: ")
    assert words in str(error)


def test_synthetic_lengths_are_drawn_as_asked():
    spec = "synthetic:requests=400,prompt_tokens=lognormal:40:0.8,new_tokens=3-5"
    prompts = synthetic_prompts(spec, 100, seed=1)
    lengths = sorted(len(prompt.content) for prompt in prompts)
    assert 34 <= lengths[200] <= 46  # the median
    assert 0.6 <= math.log(lengths[336] / lengths[200]) <= 1.0  # one sigma above it
    assert {prompt.params.max_new_tokens for prompt in prompts} == {3, 4, 5}
    assert prompts == synthetic_prompts(spec, 100, seed=1) != synthetic_prompts(spec, 100, seed=2)
    short = synthetic_prompts(spec, 100, seed=1, longest=50)
    assert max(len(prompt.content) + prompt.params.max_new_tokens for prompt in short) == 50


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("prompt_tokens=0", "prompt_tokens=0"),
        ("prompt_tokens=9-3", "1 <= N <= M"),
        ("new_tokens=lognormal:0.5:1", "1 <= MEDIAN"),
        ("new_tokens=lognormal:9:9", "SIGMA <= 4"),
        ("prompt=3", "did you mean prompt_tokens?"),
    ],
)
def test_synthetic_values_that_make_no_sense_are_refused(part, words):
    with pytest.raises(ConfigError, match="--workload") as caught:
        synthetic_prompts(f"synthetic:{part}", 100, seed=0)
    assert words in str(caught.value)


def arrivals(prompts):
    return [prompt.arrival_s for prompt in prompts]


def test_a_pace_keeps_the_rhythm_of_a_trace():
    prompts = [
        replace(p, arrival_s=gap) for p, gap in zip(synthetic_prompts("synthetic:requests=4", 9, 0), GAPS, strict=True)
    ]
    assert arrivals(pace(prompts, "2x", 0)) == [0.0, 0.5, 0.5, 2.0]
    assert arrivals(pace(prompts, "1.5", 0)) == [0.0, 0.5, 0.5, 2.0]  # 3 gaps in 2 s


def test_requests_without_times_arrive_at_random():
    prompts = synthetic_prompts("synthetic:requests=2000", 9, 0)
    paced = arrivals(pace(prompts, "4", 7))
    assert paced == sorted(paced) == arrivals(pace(prompts, "4", 7)) != arrivals(pace(prompts, "4", 8))
    assert paced[0] == 0.0
    assert paced[-1] == pytest.approx(2000 / 4, rel=0.1)
    assert sum(b - a < 0.05 for a, b in itertools.pairwise(paced)) / 2000 == pytest.approx(1 - math.exp(-0.2), abs=0.03)
    with pytest.raises(ConfigError, match="only a trace has a pace"):
        pace(prompts, "2x", 0)


def test_slashes_stand_for_several_workloads():
    assert alternatives("traces/a.csv") == ["traces/a.csv"]
    assert alternatives("synthetic:") == ["synthetic:"]
    assert alternatives("synthetic:requests=4/8,prompt_tokens=9,new_tokens=1-2/lognormal:3:1") == [
        f"synthetic:requests={requests},prompt_tokens=9,new_tokens={new}"
        for requests in (4, 8)
        for new in ("1-2", "lognormal:3:1")
    ]
    with pytest.raises(ConfigError, match="at most 32 combinations, not 36"):
        alternatives("synthetic:requests=1/2/3/4/5/6,prompt_tokens=1/2/3/4/5/6")
