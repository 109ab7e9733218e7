"""Report: tables, figures and the self-contained page. Draws what others measured.

Here are tables and numbers; what needs matplotlib is imported from its own module.
"""

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
    "Table",
    "format_bytes",
    "format_count",
    "format_ms",
    "format_number",
    "format_percent",
    "print_table",
]
