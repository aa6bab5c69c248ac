"""The report as a page: well-formed, whole without a network, every figure drawn and told in words."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from dbo.trace import Span
from launch.html import page, tag
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
    )


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
    )


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
    assert len(figures) == 1 + 2 + 3 * 2  # ratios, two phases, two ranks of three arms
    for figure in figures:
        assert figure.get("role") == "img"
        assert words(child(figure, "title"))
        assert len(words(child(figure, "desc"))) > 20
        drawn = [element for shape in SHAPES for element in figure.iter(shape)]
        assert len(drawn) >= 8
        places = [element.get(name) for element in drawn for name in ("x", "x1", "cx") if element.get(name)]
        assert len(set(places)) > 4
        assert all(0 <= float(place) <= 600 for place in places)


def test_tables_have_headers_for_rows_and_columns():
    tables = list(read(page(canned())).iter("table"))
    assert len(tables) == 2
    for table in tables:
        assert words(child(table, "caption"))
        scopes = Counter(header.get("scope") for header in table.iter("th"))
        assert scopes["row"] == len(ARMS)
        assert scopes["col"] == len(list(table.iter("td"))) // len(ARMS) + 1


def test_a_failed_gate_draws_no_speedup():
    root = read(page(canned(difference=float("nan"))))
    assert "No speed-up is stated" in "".join(words(headline) for headline in root.iter("h1"))
    assert not list(root.iter("circle"))


def test_a_phase_that_did_not_split_is_not_compared():
    assert {phase for _, _, phase in canned().ratios()} == {"prefill", "total"}


def test_more_ranks_than_fit_are_pointed_to():
    text = page(canned(num_ranks=9))
    assert text.count("<svg") == 1 + 2 + 3 * 4
    assert "Ranks 4 to 8 are in trace.json." in text


def test_text_is_escaped_and_markup_is_not():
    assert tag("p", "<&>", tag("b", '"'), class_="a b", aria_label='"') == (
        '<p class="a b" aria-label="&quot;">&lt;&amp;&gt;<b>&quot;</b></p>'
    )


@pytest.mark.browser
@pytest.mark.parametrize(("name", "width"), [("wide", 1200), ("phone", 390)])
def test_a_browser_draws_it_without_an_error(tmp_path: Path, name, width):
    file, picture = canned().write(tmp_path) / "report.html", tmp_path / f"{name}.png"
    browser = shutil.which("chromium") or pytest.fail("no chromium")
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync", "--no-first-run"]
    argv = [browser, "--headless", *quiet, f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr"]
    done = subprocess.run(
        [*argv, f"--window-size={width},2400", f"--screenshot={picture}", file.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    assert picture.stat().st_size > 30_000
