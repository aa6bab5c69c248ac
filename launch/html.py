"""The report of an A/B as one HTML file that needs nothing else: no network, no script to be read, no image.

Its own file because it turns finished numbers into marks on a page and computes none. Figures are inline SVG with a
title and a description; every fact that a colour tells is also told by a word. The page is well-formed XML too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from dbo.trace import LANES, Span
from launch.statistics import MIN_ROUNDS, Interval
from launch.timeline import StepTimeline

if TYPE_CHECKING:
    from launch.report import ABReport

_RANKS_SHOWN = 4  # timelines of more ranks are in trace.json
_BINS = 45
_WIDTH = 600  # of a figure, in its own units
_LEFT = 150  # room for labels

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d1d9e0; --page: #fff; --panel: #f6f8fa;
  --whole: #6e7781; --split: #bf6a02; --overlap: #0969da;
  --u0: #0969da; --u1: #d4720b; --u2: #1a7f37; --u3: #8250df; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --page: #0d1117;
  --panel: #151b23; --whole: #9198a1; --split: #e3893a; --overlap: #58a6ff;
  --u0: #58a6ff; --u1: #f0883e; --u2: #3fb950; --u3: #bc8cff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.25rem 0 .25rem; }
p, li, dd { max-width: 46rem; }
.soft, figcaption, caption { color: var(--soft); font-size: .9rem; text-align: left; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
caption { caption-side: bottom; padding-top: .4rem; position: sticky; left: 0; max-width: calc(100vw - 2rem); }
th, td { padding: .35rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
figure { margin: .75rem 0; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg text.soft { fill: var(--soft); font-size: 12px; }
.chart svg { min-width: 32rem; max-width: 48rem; }
.axis { stroke: var(--line); } .one { stroke: var(--soft); stroke-dasharray: 4 3; }
.whole { fill: var(--whole); stroke: var(--whole); } .split { fill: var(--split); stroke: var(--split); }
.overlap { fill: var(--overlap); stroke: var(--overlap); }
.bar { stroke: none; } .interval { stroke-width: 3; }
.lanes { display: grid; grid-template-columns: 4.5rem 1fr; gap: 0 .5rem; align-items: start; font-size: .8rem; }
.lanes .names span { display: block; height: 26px; line-height: 22px; }
.lanes .scroll { background: var(--panel); border: 1px solid var(--line); }
.lanes svg { height: 52px; width: calc(100% * var(--zoom, 1)); }
.u0 { fill: var(--u0); } .u1 { fill: var(--u1); } .u2 { fill: var(--u2); } .u3 { fill: var(--u3); }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 .8em; }
.key.u0 { background: var(--u0); } .key.u1 { background: var(--u1); } .key.u2 { background: var(--u2); }
.key.u3 { background: var(--u3); }
pre { background: var(--panel); padding: .75rem; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: minmax(6rem, max-content) 1fr; gap: .2rem 1rem; font-size: .9rem; }
dt { color: var(--soft); overflow-wrap: anywhere; } dd { margin: 0; overflow-wrap: anywhere; }
input { width: min(20rem, 60vw); vertical-align: middle; }
:focus-visible { outline: 2px solid var(--overlap); outline-offset: 2px; }
@media print { :root { --ink: #000; --page: #fff; --panel: #fff; --soft: #444; } .zoom { display: none; }
  h2 { break-after: avoid; } figure, table, .lanes { break-inside: avoid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""

_SCRIPT = """
const zoom = document.getElementById("zoom");
if (zoom) zoom.addEventListener("input", () => {
  document.documentElement.style.setProperty("--zoom", zoom.value);
  document.getElementById("zoom-value").textContent = zoom.value + "x";
});
"""


class Markup(str):
    """Text that is markup already."""


def tag(name: str, /, *children: str, **attributes: object) -> Markup:
    """An element. Children that are no Markup are escaped; `class_` is `class`, `aria_label` is `aria-label`."""
    pairs = "".join(f' {key.strip("_").replace("_", "-")}="{escape(str(value))}"' for key, value in attributes.items())
    inner = "".join(child if isinstance(child, Markup) else escape(child) for child in children)
    if name in ("meta", "input", "line", "rect", "circle") and not children:
        return Markup(f"<{name}{pairs}/>")
    return Markup(f"<{name}{pairs}>{inner}</{name}>")


def page(report: ABReport) -> str:
    """The whole file."""
    verdict = report.verdict().removeprefix("total: ")
    headline = verdict[:1].upper() + verdict[1:] + "."
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"A/B: {verdict}"),
        tag("style", Markup(_STYLE)),
    )
    body = tag("main", *_summary(report, headline), *_figures(report), *_details(report))
    html = tag("html", head, tag("body", body, tag("script", Markup(_SCRIPT))), lang="en")
    return f"<!DOCTYPE html>\n{html}\n"


def _summary(report: ABReport, headline: str) -> Iterable[Markup]:
    yield tag("h1", headline)
    yield tag("p", report.workload, class_="soft")
    sentences = [*report.phase_verdicts(), f"Equality gate {report.gate.describe()}.", *report.overlaps()]
    yield tag("ul", *(tag("li", sentence) for sentence in [*sentences, *report.stability()]))
    yield tag("h2", "Arms")
    yield _table(report.rows(), f"Median [smallest .. largest] over {report.num_rounds} rounds.")
    yield tag("h3", "Single steps and requests")
    yield _table(
        report.latency_rows(),
        "p50 / p90 / p99 over all rounds. TTFT counts from the start of a round; ITL is a request's mean. "
        "Waiting: the host standing still for messages, of all step time.",
    )


def _figures(report: ABReport) -> Iterable[Markup]:
    yield tag("h2", "How much faster")
    yield intervals(report.ratios())
    yield tag("h2", "How long steps took")
    for phase, samples in report.step_samples().items():
        yield tag("h3", f"{phase.capitalize()} steps")
        yield distribution(phase, samples)
    if report.timelines:
        yield from _timelines(report.timelines)


def _details(report: ABReport) -> Iterable[Markup]:
    yield tag("h2", "Command")
    yield tag("pre", report.command, tabindex=0)
    for title, facts in (("Environment", report.environment), ("Options", report.options)):
        yield tag("h2", title)
        pairs = ((tag("dt", name), tag("dd", value)) for name, value in facts.items())
        yield tag("dl", *(part for pair in pairs for part in pair))


def _table(rows: Sequence[Sequence[str]], caption: str) -> Markup:
    head, *body = rows
    return _scrolling(
        tag(
            "table",
            tag("caption", caption),
            tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head))),
            tag(
                "tbody",
                *(tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in body),
            ),
        ),
        caption,
    )


def _scrolling(content: Markup, label: str) -> Markup:
    """A region that a keyboard can scroll too."""
    return tag("div", content, class_="scroll", tabindex=0, role="region", aria_label=label)


def _svg(title: str, description: str, height: float, *marks: Markup, **attributes: object) -> Markup:
    return tag(
        "svg",
        tag("title", title),
        tag("desc", description),
        *marks,
        viewBox=f"0 0 {_WIDTH} {height:g}",
        role="img",
        aria_label=f"{title}. {description}",
        **attributes,
    )


def _text(x: float, y: float, words: str, anchor: str = "start", class_: str = "label") -> Markup:
    return tag("text", words, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, class_=class_)


def _line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return tag("line", x1=f"{x1:.1f}", y1=f"{y1:.1f}", x2=f"{x2:.1f}", y2=f"{y2:.1f}", class_=class_)


def _chart(figure: Markup, words: str) -> Markup:
    """A figure that scrolls where the screen is too narrow for its text."""
    return tag("figure", _scrolling(figure, words), tag("figcaption", words), class_="chart")


def intervals(ratios: Mapping[tuple[str, str, str], Interval]) -> Markup:
    """Speed of one arm over another with its 95% interval: a row for each (other, baseline, phase)."""
    if not ratios:
        why = f"the gate failed, no step split, or there were fewer than {MIN_ROUNDS} rounds"
        return tag("p", f"Nothing can be compared: {why}.")
    bounds = [bound for ratio in ratios.values() for bound in (ratio.low, ratio.high, 1.0)]
    low, high = math.log(min(bounds)) - 0.02, math.log(max(bounds)) + 0.02
    right = _WIDTH - 125

    def at(ratio: float) -> float:
        return _LEFT + (math.log(ratio) - low) / (high - low) * (right - _LEFT)

    marks, y = [], 10.0
    for (other, baseline, phase), ratio in ratios.items():
        y += 24
        marks += [
            _text(0, y + 4, f"{phase}: {other} / {baseline}"),
            _line(_LEFT, y, right, y, "axis"),
            _line(at(ratio.low), y, at(ratio.high), y, f"interval {other}"),
            tag("circle", cx=f"{at(ratio.value):.1f}", cy=y, r=5, class_=other),
            _text(_WIDTH, y + 4, f"{ratio.value:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]", "end"),
        ]
    marks += [_line(at(1), 16, at(1), y + 14, "one"), _text(at(1), y + 28, "1x: no difference", "middle", "soft")]
    told = "; ".join(
        f"{phase}, {other} over {baseline}: {ratio.value:.2f}, from {ratio.low:.2f} to {ratio.high:.2f}"
        for (other, baseline, phase), ratio in ratios.items()
    )
    words = "Dot: median over rounds; bar: 95% interval. Right of the dashed line the first-named arm is faster."
    return _chart(_svg("Speed of arms over each other", f"{told}.", y + 36, *marks), words)


def distribution(phase: str, samples: Mapping[str, Sequence[float]]) -> Markup:
    """A histogram of step times in ms for each arm, on one logarithmic axis."""
    every = np.concatenate([np.asarray(values, dtype=np.float64) for values in samples.values()])
    low, high = max(float(every.min()), 1e-3) * 0.98, float(every.max()) * 1.02
    edges = np.geomspace(low, high, _BINS + 1)
    step, height = (_WIDTH - _LEFT) / _BINS, 44.0
    marks, y, told = [], 0.0, []
    for arm, values in samples.items():
        counts, _ = np.histogram(np.clip(values, low, high), edges)
        y += height + 10
        median = float(np.median(values))
        told.append(f"{arm}: median {median:.2f} ms of {len(values)} steps")
        marks += [_text(0, y - 18, arm), _text(0, y - 2, f"median {median:.2f} ms", class_="soft")]
        for number, count in enumerate(counts):
            size = height * int(count) / int(counts.max())
            if count:
                x = _LEFT + number * step
                place = {"x": f"{x:.1f}", "y": f"{y - size:.1f}", "width": f"{step - 1:.1f}", "height": f"{size:.1f}"}
                marks.append(tag("rect", **place, class_=f"bar {arm}"))
        marks.append(_line(_LEFT, y, _WIDTH, y, "axis"))
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        value = low * (high / low) ** share
        marks.append(_text(_LEFT + share * (_WIDTH - _LEFT), y + 16, f"{value:.3g} ms", anchor, "soft"))
    figure = _svg(f"Distribution of {phase} step times", "; ".join(told) + ".", y + 22, *marks)
    return _chart(figure, "Steps of all rounds, by rank 0's clock; logarithmic axis.")


def _timelines(timelines: Mapping[str, StepTimeline]) -> Iterable[Markup]:
    step = next(iter(timelines.values()))
    num_ranks, num_ubatches = len(step.spans_of_rank), max(t.num_ubatches for t in timelines.values())
    longest = max(timeline.duration_us for timeline in timelines.values())
    yield tag("h2", "One step, traced")
    yield tag(
        "p",
        f"The same {step.phase} step of {step.num_tokens} tokens in every arm, from one more run that is not timed. "
        "Upper lane: compute; lower lane: messages, on the CPU up to the moment when the host noticed their end. "
        f"All share one scale, 0 to {longest / 1e3:.2f} ms; each rank's time starts at its own first span.",
    )
    keys = (part for u in range(num_ubatches) for part in (tag("span", "", class_=f"key u{u % 4}"), f"ubatch {u}"))
    yield tag("p", *keys, class_="soft")
    slider = tag("input", id="zoom", type="range", min=1, max=40, value=1)
    yield tag("p", tag("label", "Zoom ", slider), " ", tag("output", "1x", id="zoom-value", for_="zoom"), class_="zoom")
    for arm, timeline in timelines.items():
        share = f"{timeline.overlap_share:.0%} of message time hidden behind compute"
        yield tag("h3", f"{arm}: {timeline.duration_us / 1e3:.2f} ms, {share}")
        for rank, spans in list(timeline.spans_of_rank.items())[:_RANKS_SHOWN]:
            yield lanes(f"{arm}, rank {rank}", spans, longest)
    if num_ranks > _RANKS_SHOWN:
        yield tag("p", f"Ranks {_RANKS_SHOWN} to {num_ranks - 1} are in trace.json.", class_="soft")


def lanes(title: str, spans: Sequence[Span], longest_us: float) -> Markup:
    """Two lanes of one rank, `longest_us` wide."""
    scale = _WIDTH / max(longest_us, 1e-9)
    marks = [
        tag(
            "rect",
            tag("title", _words(span)),
            x=f"{span.t0 * scale:.3f}",
            y=2 + 26 * LANES.index(span.lane),
            width=f"{max((span.t1 - span.t0) * scale, 0.05):.3f}",
            height=20,
            class_=f"u{span.ubatch % 4}",
        )
        for span in spans
    ]
    busy = {lane: sum(span.t1 - span.t0 for span in spans if span.lane == lane) / 1e3 for lane in LANES}
    told = f"{len(spans)} spans; compute {busy['compute']:.2f} ms, messages {busy['comm']:.2f} ms."
    figure = _svg(title, told, 52, *marks, preserveAspectRatio="none")
    names = tag("div", tag("span", "compute"), tag("span", "messages"), class_="names", aria_hidden="true")
    return tag("figure", tag("figcaption", title), tag("div", names, _scrolling(figure, title), class_="lanes"))


def _words(span: Span) -> str:
    layer = "" if span.layer is None else f", layer {span.layer}"
    after = "after " if span.lane == "compute" else ""
    return f"ubatch {span.ubatch}{layer}, {after}{span.label}: {span.t1 - span.t0:.0f} us"
