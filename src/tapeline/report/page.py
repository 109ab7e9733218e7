"""One self-contained HTML page: headline figures, then sections of text, tables and figures.

Covers: laying out what others measured. Nothing on the page is fetched from anywhere, and a
content policy in the page itself forbids it. All text is escaped; the only markup that passes
is the SVG drawn here from our own figures.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from tapeline.files import atomic_write
from tapeline.report.figures import svg
from tapeline.report.tables import Table

_CODE = re.compile(r"`([^`\n]+)`|\b([0-9a-f]{16,128})\b")


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars of parts, drawn by the page itself, so that they fit any screen.

    Attributes:
        parts: the name of each part, the variable of its colour, and what is known of it.
        rows: of each bar its name, the share of the full width that each part takes, and a note.
        alt: what the bars say, for those who can't see them.
    """

    parts: Sequence[tuple[str, str, str]]
    rows: Sequence[tuple[str, Sequence[float], str]]
    alt: str


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page.

    Attributes:
        text: paragraphs, apart by an empty line; what stands between `backticks`, and every
            hash, is set as code.
        bars: shown after the text.
        figure: shown after them.
        alt: what the figure says, for those who can't see it; required with one.
        table: shown last.
        folded: whether the table is shown only when it is asked for.
    """

    heading: str
    text: str
    table: Table | None = None
    figure: Figure | None = None
    alt: str = ""
    bars: Bars | None = None
    folded: bool = False

    def __post_init__(self) -> None:
        assert self.figure is None or self.alt.strip(), (
            f"the figure of section {self.heading!r} has no alt text"
        )


@dataclass(frozen=True, slots=True)
class Page:
    """A whole page.

    Attributes:
        title: what the page is about.
        summary: the result in a few sentences, in the form of a section's text.
        sections: in reading order.
        headline: the few figures that matter most: label, value with its unit, note.
        verdict: what to know first, in one sentence; in the form of a section's text.
    """

    title: str
    summary: str
    sections: Sequence[Section]
    headline: Sequence[tuple[str, str, str]] = ()
    verdict: str = ""


def write_page(path: Path, page: Page) -> None:
    """Write `page` to one HTML file, whole or not at all."""
    here = files(__package__)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["paragraphs"] = _paragraphs
    environment.filters["code"] = _code
    template = environment.from_string(here.joinpath("page.html.jinja").read_text("utf-8"))
    html = template.render(
        page=page,
        css=Markup(here.joinpath("page.css").read_text("utf-8")),
        figures=[
            Markup(svg(section.figure, f"figure-{number}")) if section.figure else None
            for number, section in enumerate(page.sections, start=1)
        ],
    )
    # A file name may hold bytes that aren't text; they must not cost the whole page.
    atomic_write(path, html.encode("utf-8", "replace"))


def _paragraphs(text: str) -> list[str]:
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]


def _code(text: str) -> Markup:
    """`text` escaped, with hashes and what stands between backticks as code."""
    parts: list[Markup] = []
    end = 0
    for match in _CODE.finditer(text):
        inner = match[1] or match[2]
        parts += [escape(text[end : match.start()]), Markup("<code>{}</code>").format(inner)]
        end = match.end()
    return Markup("").join([*parts, escape(text[end:])])
