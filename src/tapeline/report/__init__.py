"""Report: tables, figures and the self-contained page. Draws what others measured."""

from tapeline.report.figures import (
    budget_figure,
    loss_figure,
    precision_figure,
    save_figure,
    svg,
    tape_figure,
)
from tapeline.report.page import Page, Section, write_page
from tapeline.report.tables import (
    Table,
    format_bytes,
    format_count,
    format_ms,
    format_number,
    format_percent,
    print_table,
)

__all__ = [
    "Page",
    "Section",
    "Table",
    "budget_figure",
    "format_bytes",
    "format_count",
    "format_ms",
    "format_number",
    "format_percent",
    "loss_figure",
    "precision_figure",
    "print_table",
    "save_figure",
    "svg",
    "tape_figure",
    "write_page",
]
