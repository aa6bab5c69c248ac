"""The reports of an A/B in a real browser: no error, every figure drawn, nothing wider than the screen, and a keyboard
and a screen reader get everywhere.

Needs `chromium` (Debian: `apt-get install --no-install-recommends chromium`). The page under test carries one more
script, which measures it and writes what it found into the page; the browser prints that page.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launch.html import page, sweep_page
from tests.launch.test_html import canned, canned_sweep

pytestmark = pytest.mark.browser

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-component-update",
    "--disable-background-networking",
    "--no-first-run",
    "--enable-logging=stderr",
]
PAGES = {"report": lambda: page(canned()), "sweep": lambda: sweep_page(canned_sweep())}
PROBE = """<script>
{
const marks = "rect, circle, line, polyline", seen = mark => {
  const box = mark.getBoundingClientRect(), style = getComputedStyle(mark);
  return box.width + box.height > 0 && (style.fill != "none" || style.stroke != "none");
};
const found = {
  figures: [...document.querySelectorAll("svg")].map(figure => ({
    width: figure.getBoundingClientRect().width, height: figure.getBoundingClientRect().height,
    marks: figure.querySelectorAll(marks).length, drawn: [...figure.querySelectorAll(marks)].filter(seen).length,
  })),
  tooWide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  dark: matchMedia("(prefers-color-scheme: dark)").matches,
  page: getComputedStyle(document.body).backgroundColor,
  ink: getComputedStyle(document.body).color,
};
const stops = [...document.querySelectorAll("a, button, input, select, [tabindex]")];
found.stops = stops.map(stop => {
  stop.focus();
  const name = stop.labels?.length ? stop.labels[0].textContent : stop.ariaLabel ?? stop.textContent;
  return {focused: document.activeElement === stop, order: stop.tabIndex, name: name.trim().slice(0, 60)};
});
found.scrolling = [...document.querySelectorAll(".scroll")].every(
  part => part.scrollWidth <= part.clientWidth || stops.includes(part));
const zoom = document.getElementById("zoom"), lane = document.querySelector(".lanes svg");
if (zoom) {
  const before = lane.getBoundingClientRect().width;
  zoom.value = 4;
  zoom.dispatchEvent(new Event("input"));
  found.zoomed = lane.getBoundingClientRect().width / before;
}
document.body.insertAdjacentHTML("beforeend", "<pre id='probe'></pre>");
document.getElementById("probe").textContent = JSON.stringify(found);
}
</script></body>"""


def chromium(tmp_path: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    browser = shutil.which("chromium") or pytest.fail("no chromium")
    return subprocess.run(
        [browser, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *argv],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


def probe(tmp_path: Path, text: str, *argv: str) -> dict[str, Any]:
    file = tmp_path / "probed.html"
    file.write_text(text.replace("</body>", PROBE))
    done = chromium(tmp_path, *argv, "--dump-dom", file.as_uri())
    assert "CONSOLE" not in done.stderr, done.stderr
    match = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match, done.stdout[-2000:]
    found: dict[str, Any] = json.loads(html.unescape(match[1]))
    return found


@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("name", PAGES)
def test_every_figure_is_drawn_and_nothing_is_wider_than_the_screen(tmp_path: Path, name: str, width: int) -> None:
    found = probe(tmp_path, PAGES[name](), f"--window-size={width},2400")
    assert len(found["figures"]) >= 1
    for figure in found["figures"]:
        assert figure["width"] > 300
        assert figure["height"] > 40
        assert figure["drawn"] == figure["marks"] >= 8
    assert found["tooWide"] <= 0


@pytest.mark.parametrize("name", PAGES)
def test_a_keyboard_reaches_everything_and_every_stop_has_a_name(tmp_path: Path, name: str) -> None:
    found = probe(tmp_path, PAGES[name](), "--window-size=390,2400")
    assert all(stop["focused"] and stop["order"] == 0 and stop["name"] for stop in found["stops"])
    assert found["scrolling"]
    if name == "report":
        assert "Zoom" in [stop["name"] for stop in found["stops"]]
        assert found["zoomed"] == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize("dark", [True, False])
def test_light_and_dark(tmp_path: Path, dark: bool) -> None:
    found = probe(tmp_path, page(canned()), f"--blink-settings=preferredColorScheme={0 if dark else 1}")
    assert found["dark"] == dark
    lightness = {key: sum(map(int, re.findall(r"\d+", found[key])[:3])) / 3 for key in ("page", "ink")}
    assert (lightness["page"] < lightness["ink"]) == dark


@pytest.mark.parametrize("name", PAGES)
def test_a_screenshot_and_a_print(tmp_path: Path, name: str) -> None:
    file, picture, paper = (tmp_path / f"{name}{ending}" for ending in (".html", ".png", ".pdf"))
    file.write_text(PAGES[name]())
    done = chromium(tmp_path, "--window-size=1200,3600", f"--screenshot={picture}", file.as_uri())
    assert "CONSOLE" not in done.stderr
    assert picture.stat().st_size > 30_000
    chromium(tmp_path, f"--print-to-pdf={paper}", file.as_uri())
    assert paper.read_bytes().startswith(b"%PDF")
    assert 1 <= paper.read_bytes().count(b"/Type /Page\n") + paper.read_bytes().count(b"/Type /Page ") <= 8
