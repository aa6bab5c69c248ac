"""The report as a page: well-formed, whole without a network, every figure drawn and told in words."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from dbo.trace import Span
from launch.ceiling import StepBreakdown
from launch.crossover import Sweep
from launch.html import _STYLE, page, sweep_page, tag
from launch.report import ABReport, ArmResult, Gate, Latencies, RoundTimes
from launch.timeline import StepTimeline

ARMS = {"whole": 1.0, "split": 1.2, "overlap": 0.8}
SHAPES = ("rect", "circle", "line")


def timeline(num_ubatches: int, us: float, num_ranks: int = 2) -> StepTimeline:
    """A step of four layers, in which ubatches take turns and messages lie under the other's compute."""
    spans = [
        Span(ubatch=u, layer=layer, label="dispatch", lane=lane, t0=at + shift, t1=at + shift + us)
        for layer in range(4)
        for u in range(num_ubatches)
        for at in [(layer * num_ubatches + u) * us]
        for lane, shift in (("compute", 0.0), ("comm", us))
    ]
    ranks = dict.fromkeys(range(num_ranks), spans)
    return StepTimeline(phase="prefill", num_tokens=2048, num_ubatches=num_ubatches, spans_of_rank=ranks)


def arm(name: str, factor: float, rng: np.random.Generator) -> ArmResult:
    return ArmResult(
        name=name,
        rounds=tuple(RoundTimes(prefill=100 * factor * x, decode=50 * factor) for x in rng.lognormal(0, 0.03, 10)),
        prefill_steps=2,
        decode_steps=30,
        split_prefill_steps=0 if name == "whole" else 2,
        split_decode_steps=0,
        num_tokens=4096,
        num_rows=4608,
        new_tokens=64,
        reasons=Counter({"split": 2, "below threshold": 30}),
        positions=tuple((list(ARMS).index(name) + n) % 3 for n in range(10)),
        latencies=Latencies(
            prefill_step=tuple(50 * factor * rng.lognormal(0, 0.1, 20)),
            decode_step=tuple(2 * factor * rng.lognormal(0, 0.2, 300)),
            ttft=tuple(60 * factor * rng.lognormal(0, 0.1, 80)),
            itl=tuple(2 * factor * rng.lognormal(0, 0.1, 80)),
        ),
        wait_share=0.3 * factor,
        prefill_step_tokens=1024,
        messages=120,
        sent_bytes=3.4e6,
    )


def breakdown(phase: str, ms: float) -> StepBreakdown:
    forms = {"whole": 1.0, "split": 1.1, "overlap": 0.8, "compute": 0.7, "messages": 0.4}
    forms |= {"split_compute": 0.75, "split_messages": 0.5}
    times = {form: [ms * factor * x for x in (0.98, 1.0, 1.05)] for form, factor in forms.items()}
    return StepBreakdown(phase=phase, num_tokens=2048, num_ubatches=2, times=times)


def canned(*, difference: float = 1e-6, num_ranks: int = 2) -> ABReport:
    rng = np.random.default_rng(0)
    return ABReport(
        command="python -m launch ab --workload 'a & b <c>.csv'",
        workload="a & b <c>.csv",
        environment={"host": "somewhere", "processor": "one with a long name " * 4},
        options={"num_ubatches": "2"},
        arms={name: arm(name, factor, rng) for name, factor in ARMS.items()},
        gate=Gate(split_equals_overlap=True, tokens_equal=True, max_relative_difference=difference, tolerance=1e-4),
        timelines={
            "whole": timeline(1, 160, num_ranks),
            "split": timeline(2, 100, num_ranks),
            "overlap": timeline(2, 70, num_ranks),
        },
        breakdowns=(breakdown("prefill", 50.0), breakdown("decode", 2.0)),
        notes=("a note",),
    )


def canned_sweep() -> Sweep:
    """Overlap loses at 256 tokens a rank and wins at 4096."""
    sizes = {256: 1.3, 1024: 1.05, 4096: 0.8}
    reports = []
    for number, (tokens, factor) in enumerate(sizes.items()):
        rng = np.random.default_rng(number)
        arms = {name: arm(name, f, rng) for name, f in {"whole": 1.0, "split": 1.2, "overlap": factor}.items()}
        sized = {name: replace(a, prefill_step_tokens=tokens, decode_step_tokens=8) for name, a in arms.items()}
        reports.append(replace(canned(), arms=sized, workload=f"synthetic:prompt_tokens={tokens}"))
    return Sweep(reports=reports)


def read(text: str) -> ElementTree.Element:
    assert text.startswith("<!DOCTYPE html>")
    return ElementTree.fromstring(text)


def child(element: ElementTree.Element, path: str) -> ElementTree.Element:
    found = element.find(path)
    assert found is not None, path
    return found


def words(element: ElementTree.Element) -> str:
    return "".join(element.itertext())


def test_the_page_is_well_formed_and_complete():
    root = read(page(canned()))
    assert root.get("lang") == "en"
    assert words(child(root, "head/title")).startswith("A/B: overlap is 1.")
    (headline,) = root.iter("h1")
    assert re.fullmatch(r"Overlap is 1\.\d\dx faster than whole \(95% interval .*\)\.", words(headline))
    levels = [int(element.tag[1]) for element in root.iter() if re.fullmatch("h[1-6]", str(element.tag))]
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert "python -m launch ab --workload 'a & b <c>.csv'" in [words(pre) for pre in root.iter("pre")]
    assert {"host", "num_ubatches"} <= {words(term) for term in root.iter("dt")}
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(set(ids)) == len(ids)


def test_nothing_is_fetched():
    text = page(canned())
    assert not re.search(r"https?:|//[a-z]|url\(|@import|\bsrc=|\bhref=", text)


def test_every_figure_is_drawn_and_told():
    figures = list(read(page(canned())).iter("svg"))
    assert len(figures) == 1 + 1 + 2 + 3 * 2  # a step taken apart, ratios, two phases, two ranks of three arms
    for figure in figures:
        assert figure.get("role") == "img"
        assert words(child(figure, "title"))
        assert len(words(child(figure, "desc"))) > 20
        drawn = [element for shape in SHAPES for element in figure.iter(shape)]
        assert len(drawn) >= 8
        places = [element.get(name) for element in drawn for name in ("x", "x1", "cx", "width") if element.get(name)]
        assert len(set(places)) > 4
        assert all(0 <= float(place) <= 600 for place in places)


def test_tables_have_headers_for_rows_and_columns():
    tables = list(read(page(canned())).iter("table"))
    assert len(tables) == 3
    for table, num_rows in zip(tables, (len(ARMS), len(ARMS), 2), strict=True):
        assert words(child(table, "caption"))
        scopes = Counter(header.get("scope") for header in table.iter("th"))
        assert scopes["row"] == num_rows
        assert scopes["col"] == len(list(table.iter("td"))) // num_rows + 1


def test_a_failed_gate_draws_no_speedup():
    root = read(page(canned(difference=float("nan"))))
    assert "No speed-up is stated" in "".join(words(headline) for headline in root.iter("h1"))
    assert not list(root.iter("circle"))


def test_a_phase_that_did_not_split_is_not_compared():
    assert {phase for _, _, phase in canned().ratios()} == {"prefill", "total"}


def test_more_ranks_than_fit_are_pointed_to():
    text = page(canned(num_ranks=9))
    assert text.count("<svg") == 1 + 1 + 2 + 3 * 4
    assert "Ranks 4 to 8 are in trace.json." in text


def test_text_is_escaped_and_markup_is_not():
    assert tag("p", "<&>", tag("b", '"'), class_="a b", aria_label='"') == (
        '<p class="a b" aria-label="&quot;">&lt;&amp;&gt;<b>&quot;</b></p>'
    )


def test_a_step_taken_apart_is_told_in_words_and_numbers():
    text = words(read(page(canned())))
    for part in ("50.0 / 55.0 / 40.0", "35.0 (37.5)", "20.0 (25.0)", "30%", "1.43x (1.33x)", "67% (80%)"):
        assert part in text
    assert "67%" not in words(read(page(canned(difference=1.0)))), "no gain where the gate failed"


def test_a_sweep_is_one_page_with_a_curve_for_each_arm():
    text = sweep_page(canned_sweep())
    root = read(text)
    (headline,) = root.iter("h1")
    assert words(headline).startswith("Prefill: overlap is faster at 4096; slower at 256")
    (figure,) = root.iter("svg")
    curves = [element.get("class") for element in figure.iter("polyline")]
    assert curves == ["curve split", "curve overlap"]
    assert all(len((line.get("points") or "").split()) == 3 for line in figure.iter("polyline"))
    assert "overlap at 4096 tokens: 1.2" in words(child(figure, "desc"))
    assert not re.search(r"https?:|//[a-z]|url\(|@import|\bsrc=|\bhref=", text)
    assert len(list(root.iter("table"))) == 1
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(set(ids)) == len(ids)


def contrast(one: str, other: str) -> float:
    """The ratio of the Web Content Accessibility Guidelines, 1 to 21."""

    def luminance(colour: str) -> float:
        digits = colour if len(colour) == 6 else "".join(2 * digit for digit in colour)
        parts = [int(digits[k : k + 2], 16) / 255 for k in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_marks_stand_out_from_the_page(scheme):
    assert contrast("000", "fff") == pytest.approx(21)
    light, dark = re.findall(r":root \{(.*?)\}", _STYLE, re.DOTALL)[:2]
    colours = dict(re.findall(r"--([a-z0-9]+): #([0-9a-f]+)", light))
    colours |= dict(re.findall(r"--([a-z0-9]+): #([0-9a-f]+)", dark)) if scheme == "dark" else {}
    for name in ("ink", "soft"):
        assert contrast(colours[name], colours["page"]) >= 4.5
    for name in ("whole", "split", "overlap", "auto", "u0", "u1", "u2", "u3"):
        assert contrast(colours[name], colours["page"]) >= 3
        assert contrast(colours[name], colours["panel"]) >= 3
