"""Pages in a real browser: light, dark and narrow; nothing fetched, nothing executed or cut off."""

from __future__ import annotations

import shutil

import pytest
from helpers_report import EVIL, write_page_run
from test_report_figures import BUDGET

from tapeline.report import Table
from tapeline.report.compare_page import ComparedRuns, compare_page
from tapeline.report.page import write_page
from tapeline.report.run_page import run_page
from tapeline.report.seen import SeenRun
from tapeline.store import write_shards
from tapeline.tape import synthetic_sessions
from tapeline.tours.demo_page import demo_page

CHROMIUM = shutil.which("chromium")
VIEWS = (("light", 1280), ("dark", 1280), ("light", 360))
_UNNAMED = """
[...document.querySelectorAll('img, svg')].filter(one => {
    const said = one.closest('[role=img]') || one
    return !(said.getAttribute('aria-label') || said.getAttribute('alt') || '').trim()
}).length
"""
_SMALLEST_TEXT = """
Math.min(...[...document.querySelectorAll('main *')].filter(one => one.textContent.trim())
    .map(one => parseFloat(getComputedStyle(one).fontSize)))
"""
_FILLS = """
[...document.querySelectorAll('svg path')].filter(one => !one.closest('defs'))
    .map(one => getComputedStyle(one).fill)
"""
_CONTRAST = """
(() => {
    const light = value => {
        const [r, g, b] = value.match(/\\d+/g).map(Number)
            .map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b
    }
    const ground = light(getComputedStyle(document.body).backgroundColor)
    const ratio = one => {
        const ink = light(getComputedStyle(one).color)
        return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05)
    }
    return Math.min(...[...document.querySelectorAll('h1, h2, p, td, th, dt, dd, li')].map(ratio))
})()
"""


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine's PATH")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def run_at(folder):
    run = write_page_run(
        folder / "run", name=EVIL, told=EVIL, ranks=3, lives=((0, 30), (20, 40)), ended=False
    )
    return run_page(SeenRun.read(run, 2.5))


def demo_at(folder):
    write_shards(synthetic_sessions(1), folder / "store", "mmap")
    for name in ("killed", "uninterrupted"):
        write_page_run(folder / "runs" / name, name=EVIL)
    figures = {
        "bitwise_equal": True,
        "killed": {"after_step": 23},
        "resumed_from_step": 20,
        "validation": {"skill": 0.1, "mse_zero": 1.0},
        "tape": {
            "instrument": EVIL,
            "source": EVIL,
            "report": None,
            "windows": 9,
            "rows": 10,
            "mid_lowest": 1,
            "mid_highest": 2,
        },
    }
    return demo_page(folder, figures, Table(["what", EVIL], [[EVIL, 1]], EVIL), BUDGET)


def runs_at(folder):
    seen = [
        SeenRun.read(write_page_run(folder / name, name=EVIL, told=EVIL, ranks=ranks), 2.5)
        for name, ranks in (("<b>one", 1), ("two", 4), ("three", 2))
    ]
    return compare_page(ComparedRuns.of(seen))


@pytest.mark.parametrize("make", [run_at, demo_at, runs_at], ids=["run", "demo", "comparison"])
def test_a_page_is_whole_in_every_view(browser, tmp_path, make):
    path = tmp_path / "page.html"
    page = make(tmp_path)
    write_page(path, page)
    for scheme, width in VIEWS:
        view = browser.new_page(
            color_scheme=scheme, viewport={"width": width, "height": 800}, offline=True
        )
        said, asked = [], []
        view.on("console", lambda message, said=said: said.append(message.text))
        view.on("pageerror", lambda error, said=said: said.append(str(error)))
        view.on("request", lambda request, asked=asked: asked.append(request.url))
        view.goto(path.as_uri())
        assert view.title() == page.title
        view.eval_on_selector_all("details", "all => all.forEach(one => one.open = true)")
        assert said == []
        assert asked == [path.as_uri()]
        assert view.evaluate("document.documentElement.scrollWidth") == width
        assert view.evaluate("document.querySelectorAll('script, main img').length") == 0
        assert view.locator("svg").count() == sum(one.figure is not None for one in page.sections)
        assert view.evaluate(_UNNAMED) == 0
        assert view.evaluate(_SMALLEST_TEXT) >= 12
        assert view.evaluate(_CONTRAST) >= 4.5
        view.close()


def test_a_figure_takes_its_colours_from_the_scheme(browser, tmp_path):
    path = tmp_path / "page.html"
    write_page(path, run_at(tmp_path))
    fills = []
    for scheme in ("light", "dark"):
        view = browser.new_page(color_scheme=scheme)
        view.goto(path.as_uri())
        fills.append(view.evaluate(_FILLS))
        view.close()
    light, dark = ({*found} - {"none"} for found in fills)
    assert len(light) == len(dark) >= 5
    assert not light & dark
