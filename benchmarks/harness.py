"""What every benchmark here shares: rows, interleaved repetitions, ratios, a table or JSON.

A benchmark measures subjects in turn, over and over, so that a machine that slows down slows all
of them; a row holds the median and the range. The machine and its load stand beside the numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from tapeline.machine import Machine


@dataclass(frozen=True, slots=True)
class Row:
    """One number: a median over repetitions, with the lowest and the highest."""

    case: str
    subject: str
    metric: str
    value: float
    unit: str
    low: float
    high: float
    repetitions: int

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class Samples:
    """Repetitions by case, subject and metric."""

    values: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)

    def add(self, case: str, subject: str, metric: str, value: float, unit: str) -> None:
        """Add one repetition."""
        self.values.setdefault((case, subject, metric), []).append(value)
        self.units[metric] = unit

    def rows(self, ratios_of: str, ratios_to: Iterable[str]) -> list[Row]:
        """A row for each metric, and the ratios of one metric to that of the reference subjects.

        A ratio is of medians; its range is that of the ratios within one repetition.
        """
        rows = []
        for (case, subject, metric), values in self.values.items():
            rows.append(_row(case, subject, metric, values, self.units[metric]))
        for reference in ratios_to:
            for (case, subject, metric), values in self.values.items():
                below = self.values.get((case, reference, ratios_of))
                if metric == ratios_of and subject != reference and below:
                    ratios = [a / b for a, b in zip(values, below, strict=False)]
                    middle = statistics.median(values) / statistics.median(below)
                    name = f"ratio_to:{reference}"
                    rows.append(_row(case, subject, name, ratios, "", middle))
        return rows


def _row(
    case: str,
    subject: str,
    metric: str,
    values: list[float],
    unit: str,
    middle: float | None = None,
) -> Row:
    value = statistics.median(values) if middle is None else middle
    return Row(case, subject, metric, value, unit, min(values), max(values), len(values))


def main(description: str | None, measure: Callable[[bool], list[Row]]) -> None:
    """Run a benchmark from the command line.

    Args:
        description: what it measures.
        measure: called with whether to be quick.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, smaller cases")
    arguments = parser.parse_args()
    before = Machine.here()
    rows = measure(arguments.quick)
    machine = {**before.as_dict(), "load_1min_after": Machine.here().load_1min}
    if arguments.json:
        told = {"machine": machine, "quick": arguments.quick}
        print(json.dumps({**told, "rows": [row.as_dict() for row in rows]}))
        return
    print(f"{before}, afterwards {machine['load_1min_after']:g}")
    rows.sort(key=lambda row: (row.case, row.metric))  # stable: the subjects keep their order
    table = Table("case", "metric", "subject", "median", "lowest", "highest", "unit")
    for row in rows:
        numbers = (f"{number:,.4g}" for number in (row.value, row.low, row.high))
        table.add_row(row.case, row.metric, row.subject, *numbers, row.unit)
    Console(width=120).print(table)
