"""`tapeline compare-precision` and `tapeline sweep-batch`: a setting held against seed noise."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tapeline.cli.output import Json, Set, print_json, progress_bar, say, whole_numbers
from tapeline.errors import ConfigError

if TYPE_CHECKING:
    from tapeline.prove import BatchSweep, PrecisionTrial

Seeds = Annotated[int, typer.Option(min=3, help="Runs of each, with the same seeds.")]
Out = Annotated[Path | None, typer.Option(help="Folder for the runs; default: in trials/.")]


class Lower(StrEnum):
    """What is held against float32."""

    bfloat16 = "bfloat16"
    float16 = "float16"


class Rescale(StrEnum):
    """How a learning rate grows with the batch."""

    none = "none"
    linear = "linear"
    sqrt = "sqrt"


def compare_precision(
    config: Annotated[Path, typer.Argument(help="A TOML file, as for `tapeline train`.")],
    precision: Annotated[Lower, typer.Option(help="Held against float32.")] = Lower.bfloat16,
    seeds: Seeds = 3,
    out: Out = None,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Train in both precisions with several seeds: does the lower one cost more than a seed?

    Writes precision.svg and .png beside the runs. Exit 1 if it leaves the seed band.

    Example: tapeline compare-precision examples/reference.toml --seeds 5
    """
    from tapeline.config import RunConfig
    from tapeline.prove import compare_precision as compare

    settings = RunConfig.load(config, overrides or [])
    folder = out or Path("trials") / f"{settings.name}-precision"
    with progress_bar("Training") as progress:
        found = compare(settings, precision.value, seeds, folder, say, progress)
    _draw_precision(found, folder / "precision")
    if as_json:
        print_json(found.as_dict())
    else:
        _print_precision(found)
    say(found.sentence())
    say(f"figure: {folder / 'precision.svg'}")
    if not found.same:
        raise typer.Exit(1)


def _draw_precision(found: PrecisionTrial, stem: Path) -> None:
    from tapeline.report.figures import save_figure
    from tapeline.report.seed_figures import seed_band_figure

    sides = {"float32": found.reference, found.candidate: found.other}
    curves = {name: list(side.curves.values()) for name, side in sides.items()}
    figure = seed_band_figure(found.reference.steps, curves, found.limits(), found.sentence())
    save_figure(figure, stem)


def _print_precision(found: PrecisionTrial) -> None:
    from statistics import fmean

    from tapeline.report import Table, print_table

    outside = set(found.outside)
    rows = []
    for place, step in enumerate(found.reference.steps):
        means = [fmean(side.at(place).values()) for side in (found.reference, found.other)]
        low, high = found.limits()[place]
        rows.append([step, means[0], low, high, means[1], "OUTSIDE" if step in outside else ""])
    columns = ["step", "float32", "seed band from", "to", found.candidate, ""]
    caption = f"Validation error, means of {len(found.reference.curves)} seeds"
    print_table(Table(columns=columns, rows=rows, caption=caption))


def sweep_batch(
    config: Annotated[Path, typer.Argument(help="A TOML file, as for `tapeline train`.")],
    factors: Annotated[str, typer.Option(help="How many times larger, such as 2,4,8.")] = "2,4,8",
    seeds: Seeds = 3,
    lr_rescale: Annotated[
        Rescale, typer.Option(help="How the learning rate grows with the batch.")
    ] = Rescale.none,
    out: Out = None,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Train larger batches over as many samples and over as many steps: is either any better?

    Writes batch.svg and .png beside the runs.

    Example: tapeline sweep-batch examples/reference.toml --factors 2,4 --lr-rescale sqrt
    """
    from tapeline.config import RunConfig
    from tapeline.prove import sweep_batch as sweep

    settings = RunConfig.load(config, overrides or [])
    chosen = _factors(factors)
    folder = out or Path("trials") / f"{settings.name}-batch"
    with progress_bar("Training") as progress:
        found = sweep(
            settings,
            chosen,
            seeds,
            folder,
            say,
            lr_rescale=lr_rescale.value,
            progress=progress,
        )
    _draw_batch(found, folder / "batch")
    if as_json:
        print_json(found.as_dict())
    else:
        _print_batch(found)
    for sentence in found.sentences():
        say(sentence)
    say(f"figure: {folder / 'batch.svg'}")


def _factors(text: str) -> list[int]:
    found = sorted(set(whole_numbers(text, "--factors", "2,4,8")))
    if found[0] < 2:
        raise ConfigError(
            "--factors",
            expected="2 or more each: the configuration's own batch is always trained",
            found=repr(text),
            fix="Write, for example, --factors 2,4,8",
        )
    return found


def _draw_batch(found: BatchSweep, stem: Path) -> None:
    from tapeline.report.figures import save_figure
    from tapeline.report.seed_figures import batch_figure

    efforts: dict[str, dict[int, list[float]]] = {}
    for row in found.rows:
        errors = [error for error in row.replicas.best().values() if math.isfinite(error)]
        if errors:
            efforts.setdefault(row.effort, {})[row.batch] = errors
    base = (found.batch, list(found.base.best().values()))
    save_figure(batch_figure(base, efforts, "\n".join(found.sentences())), stem)


def _print_batch(found: BatchSweep) -> None:
    from statistics import fmean

    from tapeline.report import Table, print_table

    rows: list[list[str | int | float | None]] = [
        [found.batch, "its own", found.steps, found.base_mse, None, None, ""]
    ]
    for row in found.rows:
        mean, last = fmean(row.replicas.best().values()), row.against
        share = (
            [100 * v / found.base_mse for v in (last.difference, last.half_width)] if last else []
        )
        rows.append([row.batch, row.effort, row.steps, mean, *(share or (None, None)), row.verdict])
    columns = ["batch", "effort", "steps", "lowest validation error", "difference %", "± %", ""]
    caption = f"Means of {len(found.base.curves)} seeds, learning rate rescaled: {found.lr_rescale}"
    print_table(Table(columns=columns, rows=rows, caption=caption))
