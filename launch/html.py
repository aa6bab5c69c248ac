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
from launch.ceiling import Form, StepBreakdown
from launch.statistics import MIN_ROUNDS, Interval
from launch.timeline import StepTimeline

if TYPE_CHECKING:
    from launch.crossover import Point, Sweep
    from launch.report import ABReport

_RANKS_SHOWN = 4  # timelines of more ranks are in trace.json
_BINS = 45
WIDTH = 600  # of a figure, in its own units
_LEFT = 150  # room for labels

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d1d9e0; --page: #fff; --panel: #f6f8fa;
  --whole: #6e7781; --split: #bf6a02; --overlap: #0969da; --auto: #8250df;
  --u0: #0969da; --u1: #d4720b; --u2: #1a7f37; --u3: #8250df; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --page: #0d1117;
  --panel: #151b23; --whole: #9198a1; --split: #e3893a; --overlap: #58a6ff; --auto: #bc8cff;
  --u0: #58a6ff; --u1: #f0883e; --u2: #3fb950; --u3: #bc8cff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 64rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.25rem 0 .25rem; }
p, li, dd { max-width: 46rem; }
.soft, figcaption, caption { color: var(--soft); font-size: .9rem; text-align: left; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
caption { caption-side: bottom; padding-top: .4rem; position: sticky; left: 0;
  max-width: min(46rem, calc(100vw - 2rem)); }
th, td { padding: .35rem .5rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
figure { margin: .75rem 0; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg text.soft { fill: var(--soft); font-size: 12px; }
.chart svg { min-width: 32rem; max-width: 48rem; }
.axis { stroke: var(--line); } .one { stroke: var(--soft); stroke-dasharray: 4 3; }
.whole { fill: var(--whole); stroke: var(--whole); } .split { fill: var(--split); stroke: var(--split); }
.overlap { fill: var(--overlap); stroke: var(--overlap); } .auto { fill: var(--auto); stroke: var(--auto); }
.bar { stroke: none; } .interval { stroke-width: 3; } .curve { fill: none; stroke-width: 1.5; }
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
@media print { .scroll { overflow: visible; } table { font-size: .7rem; } th, td { padding: .25rem .35rem; }
  .chart svg { min-width: 0; } :root { --ink: #000; --page: #fff; --panel: #fff; --soft: #444; }
  .zoom { display: none; }
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
    if name in ("meta", "input", "line", "rect", "circle", "polyline") and not children:
        return Markup(f"<{name}{pairs}/>")
    return Markup(f"<{name}{pairs}>{inner}</{name}>")


def page(report: ABReport) -> str:
    """The whole file."""
    verdict = report.headline
    return _document(verdict, [*_summary(report, _sentence(verdict)), *_figures(report), *_details(report)])


def sweep_page(sweep: Sweep) -> str:
    """The whole file of a comparison at several sizes."""
    verdicts = sweep.verdicts() or ["nothing ran"]
    body = [
        tag("h1", _sentence(verdicts[0])),
        tag("p", "Tokens a rank and step, the median of a phase.", class_="soft"),
    ]
    body.append(tag("ul", *(tag("li", sentence) for sentence in [*verdicts, *sweep.reports[0].notes])))
    for phase in sweep.phases:
        body += [tag("h2", f"{phase.capitalize()} steps"), crossing(phase, sweep.curves(phase))]
        body.append(_table(sweep.rows(phase), f"Speed over whole in {phase} steps, with its 95% interval."))
    gates = [f"{report.workload}: equality gate {report.gate.describe()}" for report in sweep.reports]
    body += [tag("h2", "Each size"), tag("ol", *(tag("li", gate) for gate in gates))]
    body.append(tag("p", "Their own reports lie in the directories 1, 2, ... beside this file.", class_="soft"))
    return _document(verdicts[0], [*body, *_details(sweep.reports[0])])


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:] + "."


def _document(title: str, content: Sequence[Markup]) -> str:
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"A/B: {title}"),
        tag("style", Markup(_STYLE)),
    )
    html = tag("html", head, tag("body", tag("main", *content), tag("script", Markup(_SCRIPT))), lang="en")
    return f"<!DOCTYPE html>\n{html}\n"


def _summary(report: ABReport, headline: str) -> Iterable[Markup]:
    yield tag("h1", headline)
    yield tag("p", report.workload, class_="soft")
    sentences = [*report.phase_verdicts(), f"Equality gate {report.gate.describe()}.", *report.overlaps()]
    sentences += [*report.reason_lines(), *report.power_notes(), *report.stability(), *report.notes]
    yield tag("ul", *(tag("li", sentence) for sentence in sentences))
    yield tag("h2", "Arms")
    yield _table(report.rows(), f"Median [smallest .. largest] over {report.num_rounds} rounds.")
    yield tag("h3", "Single steps and requests")
    yield _table(
        report.latency_rows(),
        "p50 / p90 / p99 over all rounds. TTFT counts from a request's arrival; ITL is a request's mean. "
        "Waiting: the host standing still for messages, of all step time.",
    )
    yield from _breakdown(report)


def _breakdown(report: ABReport) -> Iterable[Markup]:
    rows, sentences = report.breakdown_rows(), report.breakdown_notes()
    if rows or sentences:
        yield tag("h2", "What messages cost, and the ceiling")
    if rows:
        yield _table(
            rows,
            "One step again and again, in ms, medians of the slowest rank. Compute alone: on recorded tokens, nothing "
            "sent; messages alone: nothing computed. Comm. share: the part of a whole step that messages add. Ceiling: "
            "whole over the longer of the two alone; efficiency: what overlap gained of that. In brackets: of ubatches "
            "one after another, and with their compute in place of whole compute.",
        )
        yield pieces(report.breakdowns)
    yield from (tag("p", _sentence(sentence), class_="soft") for sentence in sentences)


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
    return scrolling(
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


def scrolling(content: Markup, label: str) -> Markup:
    """A region that a keyboard can scroll too."""
    return tag("div", content, class_="scroll", tabindex=0, role="region", aria_label=label)


def svg(title: str, description: str, height: float, *marks: Markup, **attributes: object) -> Markup:
    """A figure, `WIDTH` wide, with a title and what a reader of it would be told."""
    return tag(
        "svg",
        tag("title", title),
        tag("desc", description),
        *marks,
        viewBox=f"0 0 {WIDTH} {height:g}",
        role="img",
        aria_label=f"{title}. {description}",
        **attributes,
    )


def text(x: float, y: float, words: str, anchor: str = "start", class_: str = "label") -> Markup:
    """Words in a figure."""
    return tag("text", words, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, class_=class_)


def _line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return tag("line", x1=f"{x1:.1f}", y1=f"{y1:.1f}", x2=f"{x2:.1f}", y2=f"{y2:.1f}", class_=class_)


def _chart(figure: Markup, words: str) -> Markup:
    """A figure that scrolls where the screen is too narrow for its text."""
    return tag("figure", scrolling(figure, words), tag("figcaption", words), class_="chart")


def intervals(ratios: Mapping[tuple[str, str, str], Interval]) -> Markup:
    """Speed of one arm over another with its 95% interval: a row for each (other, baseline, phase)."""
    if not ratios:
        why = f"the gate failed, no step split, or there were fewer than {MIN_ROUNDS} rounds"
        return tag("p", f"Nothing can be compared: {why}.")
    bounds = [bound for ratio in ratios.values() for bound in (ratio.low, ratio.high, 1.0)]
    low, high = math.log(min(bounds)) - 0.02, math.log(max(bounds)) + 0.02
    right = WIDTH - 125

    def at(ratio: float) -> float:
        return _LEFT + (math.log(ratio) - low) / (high - low) * (right - _LEFT)

    marks, y = [], 10.0
    for (other, baseline, phase), ratio in ratios.items():
        y += 24
        marks += [
            text(0, y + 4, f"{phase}: {other} / {baseline}"),
            _line(_LEFT, y, right, y, "axis"),
            _line(at(ratio.low), y, at(ratio.high), y, f"interval {other}"),
            tag("circle", cx=f"{at(ratio.value):.1f}", cy=y, r=5, class_=other),
            text(WIDTH, y + 4, f"{ratio.value:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]", "end"),
        ]
    marks += [_line(at(1), 16, at(1), y + 14, "one"), text(at(1), y + 28, "1x: no difference", "middle", "soft")]
    told = "; ".join(
        f"{phase}, {other} over {baseline}: {ratio.value:.2f}, from {ratio.low:.2f} to {ratio.high:.2f}"
        for (other, baseline, phase), ratio in ratios.items()
    )
    words = "Dot: median over rounds; bar: 95% interval. Right of the dashed line the first-named arm is faster."
    return _chart(svg("Speed of arms over each other", f"{told}.", y + 36, *marks), words)


def pieces(steps: Sequence[StepBreakdown]) -> Markup:
    """How long a step took in each form, as bars: what overlap reached lies between whole and the longer one alone."""
    longest = max(max(step.ms(form) or 0.0 for form in step.times) for step in steps)
    marks, y, told = [], 0.0, []
    for step in steps:
        y += 20
        marks.append(text(0, y, f"{step.phase}, {step.num_tokens} tokens"))
        for form, words in _FORMS.items():
            if (ms := step.ms(form)) is not None:
                width = ms / longest * (WIDTH - _LEFT - 80)
                place = {"x": _LEFT, "y": f"{y + 6:.1f}", "width": f"{max(width, 0.5):.1f}", "height": 13}
                marks += [
                    text(_LEFT - 8, y + 17, words, "end", "soft"),
                    tag("rect", **place, class_=f"bar {form if form in ('split', 'overlap') else 'whole'}"),
                    text(_LEFT + width + 6, y + 17, f"{ms:.1f} ms"),
                ]
                told.append(f"{step.phase}, {words}: {ms:.1f} ms")
                y += 18
        y += 6
    return _chart(svg("One step taken apart", "; ".join(told) + ".", y + 6, *marks), "Medians of the slowest rank.")


_FORMS: Mapping[Form, str] = {
    "whole": "whole",
    "split": "split",
    "overlap": "overlap",
    "compute": "compute alone",
    "messages": "messages alone",
}


def crossing(phase: str, curves: Mapping[str, Sequence[Point]]) -> Markup:
    """Speed of arms over whole against the tokens of a rank in a step, both axes logarithmic."""
    drawn = [(arm, point.tokens, point.speed) for arm, points in curves.items() for point in points if point.speed]
    if not drawn:
        return tag("p", "Nothing can be compared: the gate failed, no step split, or there were too few rounds.")
    bounds = [bound for _, _, speed in drawn for bound in (speed.low, speed.high, 1.0)]
    low, high = math.log(min(bounds)) - 0.03, math.log(max(bounds)) + 0.03
    sizes = sorted({tokens for _, tokens, _ in drawn})
    left, right, top, bottom = 60.0, WIDTH - 20.0, 12.0, 232.0
    span = math.log(sizes[-1] / sizes[0]) or 1.0

    def at(tokens: float, ratio: float) -> tuple[float, float]:
        x = left + 12 + math.log(tokens / sizes[0]) / span * (right - left - 24)
        return x, bottom - (math.log(ratio) - low) / (high - low) * (bottom - top)

    marks = [_line(left, bottom, right, bottom, "axis"), _line(left, top, left, bottom, "axis")]
    marks += [text(at(tokens, 1)[0], bottom + 16, f"{tokens:.0f}", "middle", "soft") for tokens in sizes]
    for ratio in _ticks(math.exp(low), math.exp(high)):
        y = at(sizes[0], ratio)[1]
        marks += [text(left - 6, y + 4, f"{ratio:g}x", "end", "soft"), _line(left, y, right, y, "axis")]
    one = at(sizes[0], 1.0)[1]
    marks += [_line(left, one, right, one, "one"), text((left + right) / 2, bottom + 32, "tokens a rank", "middle")]
    for number, (arm, points) in enumerate(curves.items()):
        shift = 4.0 * (number - (len(curves) - 1) / 2)  # intervals beside each other
        places = [(at(point.tokens, point.speed.value), point.speed, point.tokens) for point in points if point.speed]
        path = " ".join(f"{x + shift:.1f},{y:.1f}" for (x, y), _, _ in places)
        marks.append(tag("polyline", points=path, class_=f"curve {arm}", style="fill: none"))
        for (x, y), speed, tokens in places:
            marks += [
                _line(x + shift, at(tokens, speed.low)[1], x + shift, at(tokens, speed.high)[1], f"interval {arm}"),
                tag("circle", cx=f"{x + shift:.1f}", cy=f"{y:.1f}", r=4, class_=arm),
            ]
        marks.append(tag("circle", cx=left + 20 + 110 * number, cy=bottom + 50, r=4, class_=arm))
        marks.append(text(left + 30 + 110 * number, bottom + 54, f"{arm} / whole"))
    told = "; ".join(
        f"{arm} at {tokens:.0f} tokens: {speed.value:.2f}, from {speed.low:.2f} to {speed.high:.2f}"
        for arm, tokens, speed in drawn
    )
    figure = svg(f"Speed over whole in {phase} steps", f"{told}.", bottom + 66, *marks)
    return _chart(figure, "Dot: median; bar: 95% interval. Above the dashed line the arm is faster than whole.")


def _ticks(low: float, high: float) -> list[float]:
    """A few round ratios within bounds, none of them 1 alone."""
    for step in (0.5, 0.25, 0.2, 0.1, 0.05, 0.02, 0.01):
        found = [round(k * step, 2) for k in range(1, int(high / step) + 1) if low <= k * step]
        if len(found) >= 3:
            return found[:: max(1, len(found) // 6)] if 1.0 not in found else _around_one(found)
    return [1.0]


def _around_one(found: Sequence[float]) -> list[float]:
    every = max(1, len(found) // 6)
    return list(found[found.index(1.0) % every :: every])


def distribution(phase: str, samples: Mapping[str, Sequence[float]]) -> Markup:
    """A histogram of step times in ms for each arm, on one logarithmic axis."""
    every = np.concatenate([np.asarray(values, dtype=np.float64) for values in samples.values()])
    low, high = max(float(every.min()), 1e-3) * 0.98, float(every.max()) * 1.02
    edges = np.geomspace(low, high, _BINS + 1)
    step, height = (WIDTH - _LEFT) / _BINS, 44.0
    marks, y, told = [], 0.0, []
    for arm, values in samples.items():
        counts, _ = np.histogram(np.clip(values, low, high), edges)
        y += height + 10
        median = float(np.median(values))
        told.append(f"{arm}: median {median:.2f} ms of {len(values)} steps")
        marks += [text(0, y - 18, arm), text(0, y - 2, f"median {median:.2f} ms", class_="soft")]
        for number, count in enumerate(counts):
            size = height * int(count) / int(counts.max())
            if count:
                x = _LEFT + number * step
                place = {"x": f"{x:.1f}", "y": f"{y - size:.1f}", "width": f"{step - 1:.1f}", "height": f"{size:.1f}"}
                marks.append(tag("rect", **place, class_=f"bar {arm}"))
        marks.append(_line(_LEFT, y, WIDTH, y, "axis"))
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        value = low * (high / low) ** share
        marks.append(text(_LEFT + share * (WIDTH - _LEFT), y + 16, f"{value:.3g} ms", anchor, "soft"))
    figure = svg(f"Distribution of {phase} step times", "; ".join(told) + ".", y + 22, *marks)
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
    scale = WIDTH / max(longest_us, 1e-9)
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
    figure = svg(title, told, 52, *marks, preserveAspectRatio="none")
    names = tag("div", tag("span", "compute"), tag("span", "messages"), class_="names", aria_hidden="true")
    return tag("figure", tag("figcaption", title), tag("div", names, scrolling(figure, title), class_="lanes"))


def _words(span: Span) -> str:
    layer = "" if span.layer is None else f", layer {span.layer}"
    after = "after " if span.lane == "compute" else ""
    return f"ubatch {span.ubatch}{layer}, {after}{span.label}: {span.t1 - span.t0:.0f} us"
