"""Report: tables, figures and the self-contained page. Draws what others measured.

Each name is fetched when first asked for: a table needs no matplotlib.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_MODULES = {
    "figures": (
        "budget_figure",
        "loss_figure",
        "precision_figure",
        "save_figure",
        "svg",
        "tape_figure",
    ),
    "page": ("Page", "Section", "write_page"),
    "tables": (
        "Table",
        "format_bytes",
        "format_count",
        "format_ms",
        "format_number",
        "format_percent",
        "print_table",
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

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


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tapeline.report' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tapeline.report.{_MODULE_OF[name]}"), name)
