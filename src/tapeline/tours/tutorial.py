"""`tapeline tutorial`: every promise of the small problem, measured on the synthetic market."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapeline.budget import measure_budget
from tapeline.files import atomic_write
from tapeline.report import Table, format_bytes, format_ms, format_number, format_percent
from tapeline.report.figures import budget_figure, precision_figure, save_figure
from tapeline.tours import lessons


@dataclass(frozen=True, slots=True)
class Tutorial:
    """What the tutorial found.

    Attributes:
        figures: everything, as JSON can hold it; also in `tutorial.json`.
        table: the main figures beside the reference values.
        pictures: stems of the two figures; each is there as .svg and .png.
    """

    figures: dict[str, Any]
    table: Table
    pictures: tuple[Path, ...]


def run_tutorial(out: Path, say: Callable[[str], None]) -> Tutorial:
    """Run all lessons; about a minute on two cores.

    Args:
        out: folder for the store, the runs, `tutorial.json` and the two figures.
        say: told what is being done.
    """
    say("1/7 a synthetic market in three formats")
    problem = lessons.Problem.make(out / "store")
    sizes = lessons.sizes(problem)
    say("2/7 the time budget of a step")
    budget = measure_budget(out / "store")
    say("3/7 float32 against bfloat16")
    precision = lessons.precision(problem)
    say("4/7 accumulation and data parallelism")
    exactness = lessons.exactness(problem)
    say("5/7 a run that is killed with SIGKILL and resumed")
    resume = lessons.resume(problem, out / "runs")
    say("6/7 reading ahead in a background thread")
    prefetch = lessons.prefetch(problem)
    say("7/7 two instruments in one store")
    instruments = lessons.instruments(out / "two-instruments")

    losses = precision.pop("losses")
    pictures = (out / "time-budget", out / "precision")
    save_figure(budget_figure(budget), pictures[0])
    save_figure(precision_figure(losses["float32"], losses["bfloat16"]), pictures[1])
    figures = {
        "machine": budget.machine.as_dict(),
        "sizes": sizes,
        "budget": budget.as_dict(),
        "precision": precision,
        "exactness": exactness,
        "resume": resume,
        "prefetch": prefetch,
        "instruments": instruments,
        "figures": [f"{stem}.{kind}" for stem in pictures for kind in ("svg", "png")],
    }
    atomic_write(out / "tutorial.json", json.dumps(figures, indent=2))
    return Tutorial(figures, _table(figures), pictures)


def _table(figures: dict[str, Any]) -> Table:
    """The main figures beside those of the reference: one laptop, for orientation only."""
    return Table(
        columns=["what", "here", "reference"],
        rows=[*_data_rows(figures), *_training_rows(figures)],
        caption=f"The small problem on {figures['budget']['machine']['processor']}",
    )


def _data_rows(figures: dict[str, Any]) -> list[list[str | None]]:
    sizes = figures["sizes"]
    rows = {row["case"]: row for row in figures["budget"]["rows"]}
    cases = ("csv looped", "npy looped", "mmap looped", "mmap gathered")
    loops = [rows[case]["batch_ms"] for case in cases[:3]]
    return [
        [
            "store as csv / npy / mmap",
            " / ".join(format_bytes(sizes["bytes"][fmt]) for fmt in ("csv", "npy", "mmap")),
            "2.21 / 1.50 / 1.50 MB",
        ],
        ["same bits from every format", _yes(sizes["formats_identical"]), "yes"],
        ["windows of a session", sizes["windows_per_session"], "1,111"],
        [
            "reading all rows: csv / npy / mmap",
            " / ".join(format_ms(rows[case]["load_epoch_ms"]) for case in cases[:3]),
            "12.5 / 0.83 / 0.39 ms",
        ],
        [
            "a batch, window by window",
            f"{format_ms(min(loops))} to {format_ms(max(loops))}",
            "0.48 to 0.74 ms",
        ],
        ["a batch, gathered", format_ms(rows["mmap gathered"]["batch_ms"]), "0.27 ms"],
        ["computing a step", format_ms(rows["mmap gathered"]["compute_ms"]), "1.1 to 1.2 ms"],
        [
            "data's share of a step: csv / npy / mmap looped / gathered",
            " / ".join(format_percent(rows[case]["data_share"]) for case in cases),
            "34 / 31 / 39 / 20 %",
        ],
    ]


def _training_rows(figures: dict[str, Any]) -> list[list[str | None]]:
    precision, exact, resume = figures["precision"], figures["exactness"], figures["resume"]
    prefetch, instruments = figures["prefetch"], figures["instruments"]
    means, skill = precision["last_50_mean"], precision["out_of_sample"]["float32"]
    return [
        [
            "loss, last 50 of 300 steps: float32 / bfloat16",
            f"{means['float32']:.4f} / {means['bfloat16']:.4f}",
            "0.0527 / 0.0525",
        ],
        [
            "largest difference of one step's loss",
            f"{precision['largest_step_difference']:.4f} "
            f"({format_percent(precision['largest_step_difference_share'])})",
            "0.0132 (22 %)",
        ],
        [
            "out of sample: error / of predicting zero",
            f"{skill['mse']:.4f} / {skill['mse_zero']:.4f}",
            None,
        ],
        [
            "accumulating 4 parts, after 20 steps",
            f"{exact['accumulation_deviation']:.1e}",
            "≤ 1.4e-7",
        ],
        [
            "averaging two halves / one half alone",
            f"{exact['data_parallel_deviation']:.1e} / {exact['half_batch_deviation']:.2g}",
            "≤ 1.5e-8 / 0.12",
        ],
        ["killed and resumed: the same bits", _yes(resume["bitwise_equal"]), "yes"],
        [
            "resumed from weights alone: off by",
            format_number(resume["weights_only_deviation"]),
            "0.039",
        ],
        ["a checkpoint", format_bytes(resume["checkpoint_bytes"]), "693 kB"],
        [
            "waiting for a batch: read when asked / ahead",
            f"{format_ms(prefetch['depth_0']['wait_ms'])} / "
            f"{format_ms(prefetch['depth_2']['wait_ms'])}",
            None,
        ],
        [
            "of the wait, hidden by reading ahead",
            format_percent(prefetch["overlap"]) if prefetch["overlap"] else "none: busy cores",
            None,
        ],
        [
            "windows that mix two instruments",
            f"{instruments['windows_mixing']} of {instruments['windows_examined']:,}",
            "0",
        ],
    ]


def _yes(value: bool) -> str:
    return "yes" if value else "NO"
