"""A plan as one HTML file that needs nothing else: a plot for each number of ranks, the table, the crossovers.

Its own file because it turns finished numbers into marks on a page and computes none. As in `launch.html`, figures are
inline SVG with a title and a description, and what a colour tells is also told by a word.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from launch.html import WIDTH, Markup, scrolling, svg, tag, text
from launch.plan import Plan, Prediction

_HEIGHT = 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 90, 14, 36

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d1d9e0; --page: #fff;
  --whole: #6e7781; --overlap: #0969da; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --page: #0d1117;
  --whole: #9198a1; --overlap: #58a6ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
.soft, figcaption { color: var(--soft); font-size: .9rem; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
figure { margin: .75rem 0; } svg { display: block; width: 100%; height: auto; min-width: 30rem; max-width: 48rem; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; } svg text.soft { fill: var(--soft); font-size: 12px; }
.axis { stroke: var(--line); } .whole { stroke: var(--whole); } .overlap { stroke: var(--overlap); }
polyline { fill: none; stroke-width: 2; } .whole.dash { stroke-dasharray: 6 4; }
polygon { stroke: none; opacity: .18; } polygon.whole { fill: var(--whole); } polygon.overlap { fill: var(--overlap); }
text.whole { fill: var(--whole); stroke: none; } text.overlap { fill: var(--overlap); stroke: none; }
pre { overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
:focus-visible { outline: 2px solid var(--overlap); outline-offset: 2px; }
@media print { :root { --ink: #000; --page: #fff; --soft: #444; } figure, table { break-inside: avoid; } }
"""


def page(plan: Plan) -> str:
    """The whole file."""
    title = f"Plan: {plan.source}, {plan.origin} costs"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Markup(_STYLE)),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, tag('body', tag('main', *_parts(plan, title))), lang='en')}\n"


def _parts(plan: Plan, title: str) -> Iterator[Markup]:
    yield tag("h1", title)
    yield tag("p", f"{plan.model}, {plan.num_ubatches} ubatches", class_="soft")
    yield tag("ul", *(tag("li", sentence) for sentence in plan.sentences()))
    for (phase, ep), points in _groups(plan).items():
        yield tag("h2", f"{phase.capitalize()}, EP {ep}")
        yield tag("figure", scrolling(throughput(points), f"{phase}, EP {ep}"), tag("figcaption", _CAPTION))
    yield tag("h2", "All predictions")
    table_head, *rows = plan.rows()
    yield scrolling(
        tag(
            "table",
            tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in table_head))),
            tag("tbody", *(tag("tr", *(tag("td", cell) for cell in row)) for row in rows)),
        ),
        "All predictions",
    )
    yield tag("h2", "Assumptions")
    yield tag("ul", *(tag("li", f"{name}: {value}") for name, value in plan.options.items()))
    yield tag("h2", "Command")
    yield tag("pre", plan.command, tabindex=0)


_CAPTION = "Tokens per second of one GPU over tokens a rank in a step; both axes logarithmic. Bands: 80% of the draws."


def _groups(plan: Plan) -> dict[tuple[str, int], list[Prediction]]:
    found: dict[tuple[str, int], list[Prediction]] = {}
    for point in plan.predictions:
        found.setdefault((point.phase, point.ep), []).append(point)
    return found


def throughput(points: Sequence[Prediction]) -> Markup:
    """Both arms' tokens per second, with bands."""
    rates = {
        "whole": [[p.tokens / ms * 1e3 for ms in (p.whole_ms.value, p.whole_ms.high, p.whole_ms.low)] for p in points],
        "overlap": [
            [p.tokens / ms * 1e3 for ms in (p.overlap_ms.value, p.overlap_ms.high, p.overlap_ms.low)] for p in points
        ],
    }
    every = [rate for rows in rates.values() for row in rows for rate in row]
    x = _Scale([p.tokens for p in points], _LEFT, WIDTH - _RIGHT)
    y = _Scale(every, _HEIGHT - _BOTTOM, _TOP)
    marks = [*_axes(x, y, [p.tokens for p in points], every)]
    for arm, rows in rates.items():
        upper = [f"{x.at(p.tokens):.1f},{y.at(row[2]):.1f}" for p, row in zip(points, rows, strict=True)]
        lower = [f"{x.at(p.tokens):.1f},{y.at(row[1]):.1f}" for p, row in zip(points, rows, strict=True)]
        line = [f"{x.at(p.tokens):.1f},{y.at(row[0]):.1f}" for p, row in zip(points, rows, strict=True)]
        marks.append(tag("polygon", points=" ".join([*upper, *reversed(lower)]), class_=arm))
        marks.append(tag("polyline", points=" ".join(line), class_=f"{arm} dash" if arm == "whole" else arm))
    ends = [y.at(rates[arm][-1][0]) + 4 for arm in ("whole", "overlap")]
    if abs(ends[0] - ends[1]) < 13:  # labels would lie on each other
        middle, down = sum(ends) / 2, 6.5 if ends[0] >= ends[1] else -6.5
        ends = [middle + down, middle - down]
    marks += [text(WIDTH - _RIGHT + 6, end, arm, class_=arm) for arm, end in zip(rates, ends, strict=True)]
    told = "; ".join(
        f"{p.tokens} tokens: whole {p.whole_tokens_per_s:.0f}, overlap {p.overlap_tokens_per_s:.0f} per second"
        for p in points
    )
    title = f"Predicted throughput, {points[0].phase}, EP {points[0].ep}"
    return svg(title, f"{told}.", _HEIGHT, *marks)


class _Scale:
    """A logarithmic axis from a range of values to a range of places."""

    def __init__(self, values: Sequence[float], start: float, end: float):
        self._low, high = math.log(min(values)), math.log(max(values))
        self._start, self._factor = start, (end - start) / max(high - self._low, 1e-9)

    def at(self, value: float) -> float:
        return self._start + (math.log(value) - self._low) * self._factor


def _axes(x: _Scale, y: _Scale, tokens: Sequence[int], rates: Sequence[float]) -> Iterator[Markup]:
    bottom = _HEIGHT - _BOTTOM
    yield tag("line", x1=_LEFT, y1=bottom, x2=WIDTH - _RIGHT, y2=bottom, class_="axis")
    last = -math.inf
    for n in tokens:
        if x.at(n) - last > 38:
            last = x.at(n)
            yield text(last, bottom + 16, f"{n}", "middle", "soft")
    yield text((_LEFT + WIDTH - _RIGHT) / 2, bottom + 31, "tokens a rank", "middle", "soft")
    low, high = min(rates), max(rates)
    for share in (0.0, 0.5, 1.0):
        rate = low * (high / low) ** share
        yield text(_LEFT - 6, y.at(rate) + 4, f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}", "end", "soft")
        yield tag("line", x1=_LEFT, y1=f"{y.at(rate):.1f}", x2=WIDTH - _RIGHT, y2=f"{y.at(rate):.1f}", class_="axis")
