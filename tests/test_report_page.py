"""The page: self-contained, escaped, readable without eyes or network."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from tapeline.report import Table
from tapeline.report.figures import loss_figure
from tapeline.report.page import Page, Section, write_page

EVIL = "<script>alert('x')</script>\"><img src=http://evil.example/x onerror=a> & `<b>` $a$"
HASH = "0123456789abcdef" * 4
VOID = {"meta", "link", "br", "img"}


class _Read(HTMLParser):
    """Every element with its attributes and its text, and whether tags nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[tuple[str, str]] = []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.text.append((self.open[-1], data))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.elements if name == tag]


def _page(text: str) -> Page:
    figure = loss_figure({text: [3.0, 2.0, 1.0]}, [(2, text)], {3: 1.0}, 2.0)
    return Page(
        title=text,
        summary=text,
        sections=[
            Section(text, f"{text}\n\nSecond {HASH}.", Table([text, "n"], [[text, 1]], text)),
            Section(text, text, figure=figure, alt=text),
            Section(text, text, Table(["a"], [[None]]), figure, text),
        ],
        headline=[(text, text, text)],
    )


@pytest.fixture
def html(tmp_path) -> str:
    write_page(tmp_path / "page.html", _page(EVIL))
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    return (tmp_path / "page.html").read_text(encoding="utf-8")


def test_every_text_field_is_escaped(html):
    read = _Read(html)
    assert {"script", "img", "b"}.isdisjoint(tag for tag, _ in read.elements)
    assert not any(name.startswith("on") for _, attrs in read.elements for name in attrs)
    shown = "".join(text for _, text in read.text)
    assert shown.count("<script>alert('x')</script>") == 15  # each field above, figures apart
    assert [text for tag, text in read.text if tag == "title"] == [EVIL]


def test_the_page_asks_for_nothing_from_outside(html):
    read = _Read(html)
    for _, attrs in read.elements:
        for name in ("src", "href", "xlink:href", "srcset", "action", "data"):
            assert re.match(r"#|data:,$", attrs.get(name) or "#"), attrs
    css = "".join(text for tag, text in read.text if tag == "style")
    assert "@import" not in css
    assert "url(" not in css
    policy = next(a["content"] for a in read.of("meta") if "http-equiv" in a)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def test_structure_for_readers_and_small_screens(html):
    read = _Read(html)
    assert read.of("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in read.of("meta")
    headings = [tag for tag, _ in read.elements if re.fullmatch(r"h\d", tag)]
    assert headings == ["h1", "h2", "h2", "h2"]
    drawings = [attrs for attrs in read.of("div") if attrs.get("role") == "img"]
    assert [attrs["aria-label"] for attrs in drawings] == [EVIL, EVIL]
    assert len(read.of("svg")) == 2
    ids = [attrs["id"] for _, attrs in read.elements if "id" in attrs]
    assert len(ids) == len(set(ids)), "one figure shown twice must not share its ids"
    for scheme in ("prefers-color-scheme: dark", "@media print"):
        assert scheme in html


def test_hashes_and_commands_are_code_and_numbers_are_right_aligned(tmp_path):
    table = Table(["run", "steps"], [[HASH, 1140], ["`b`", None]], "Runs")
    write_page(tmp_path / "p.html", Page("t", "Try `tapeline demo`.", [Section("h", HASH, table)]))
    read = _Read((tmp_path / "p.html").read_text())
    assert [text for tag, text in read.text if tag == "code"] == ["tapeline demo", HASH, HASH, "b"]
    assert [attrs.get("class") for attrs in read.of("td")] == [None, "number"] * 2
    assert [text for tag, text in read.text if tag == "td"] == ["1,140", "–"]


def test_equal_pages_are_equal_bytes(tmp_path, html):
    write_page(tmp_path / "again.html", _page(EVIL))
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == html


def test_a_name_that_is_not_text_does_not_cost_the_page(tmp_path):
    write_page(tmp_path / "p.html", Page("from \udcff.csv", "s", []))
    assert "<h1>from ?.csv</h1>" in (tmp_path / "p.html").read_text()


def test_a_figure_without_alt_text_is_our_fault():
    figure = loss_figure({"a": [1.0]})
    with pytest.raises(AssertionError, match="the figure of section 'Loss' has no alt text"):
        Section("Loss", "", figure=figure, alt=" ")
