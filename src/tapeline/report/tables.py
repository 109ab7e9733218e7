"""Tables and numbers, the same on a terminal and on a page.

Covers: what a table is, how a figure is written with its unit, and printing to standard output.
Does not cover HTML (see `page`).
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

Cell = str | int | float | None

MISSING = "–"
_NUMBER = re.compile(r"[+−-]?(\d[\d,]*(\.\d+)?(e[+-]?\d+)?|NaN|∞)( ?%| [^\d\s]{1,12})?")
_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under named columns.

    Attributes:
        columns: the headings, with the unit where all cells share one.
        rows: one cell for each column: text, a number, or None for what isn't known.
        caption: one line on what the table shows.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            assert len(row) == len(self.columns), (
                f"row {number} of {self.caption!r} has {len(row)} cells for "
                f"{len(self.columns)} columns"
            )

    def texts(self) -> list[list[str]]:
        """Every cell as it is shown."""
        return [[cell_text(cell) for cell in row] for row in self.rows]

    def numeric(self) -> list[bool]:
        """Which columns hold only numbers, with or without a unit: those are aligned right."""
        return [
            all(text == MISSING or _NUMBER.fullmatch(text) for text in column)
            for column in zip(*self.texts(), strict=True)
        ] or [False] * len(self.columns)


def format_number(value: float) -> str:
    """`value` to three significant digits; digits before the point are all kept."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    exponent = int(f"{value:.2e}".partition("e")[2])  # after rounding: 9.996 is 10.0
    if value and exponent < -4:
        return f"{value:.2e}"
    return f"{value:,.{max(0, 2 - exponent)}f}" if value else "0"


def format_ms(value_ms: float) -> str:
    """Milliseconds to three significant digits."""
    return f"{format_number(value_ms)} ms"


def format_bytes(num_bytes: int) -> str:
    """Bytes in powers of a thousand: 1,496,000 is 1.50 MB."""
    power = max(0, min((len(str(num_bytes)) - 1) // 3, len(_BYTE_UNITS) - 1))
    if f"{num_bytes / 1000**power:.3g}" == "1e+03" and power < len(_BYTE_UNITS) - 1:
        power += 1
    number = str(num_bytes) if power == 0 else format_number(num_bytes / 1000**power)
    return f"{number} {_BYTE_UNITS[power]}"


def format_percent(share: float | None) -> str:
    """A share of one in percent: whole from 10 % on, one decimal below; None is unknown."""
    if share is None:
        return "unknown"
    if not math.isfinite(share):
        return f"{format_number(share)} %"
    percent = 100 * share
    return f"{percent:.0f} %" if abs(percent) >= 9.95 or percent == 0 else f"{percent:.1f} %"


def format_count(count: int) -> str:
    """A whole number with its thousands apart."""
    return f"{count:,}"


def cell_text(cell: Cell) -> str:
    """A cell as it is shown: what isn't known is a dash, never a zero."""
    if cell is None:
        return MISSING
    if isinstance(cell, str):
        return cell
    return format_count(cell) if isinstance(cell, int) else format_number(cell)


def printable(text: str) -> str:
    """Text with what a terminal would act on replaced."""
    # Names come from files of others; an escape sequence in one would be run by the terminal.
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def print_table(table: Table, stream: TextIO | None = None) -> None:
    """Print a table; a table is data, so it goes to standard output unless told otherwise.

    On a terminal it folds into the width there is. Elsewhere no cell is ever cut or folded.
    """
    stream = stream or sys.stdout
    drawn = RichTable(
        title=Text(printable(table.caption)) if table.caption else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name, numeric in zip(table.columns, table.numeric(), strict=True):
        drawn.add_column(
            Text(printable(name)),
            justify="right" if numeric else "left",
            no_wrap=numeric,
            overflow="fold",
        )
    for row in table.texts():
        drawn.add_row(*(Text(printable(text)) for text in row))
    console = Console(file=stream, highlight=False)
    if not console.is_terminal:
        natural = console.measure(drawn, options=console.options.update(width=100_000)).maximum
        console = Console(file=stream, highlight=False, width=natural)
    console.print(drawn)
