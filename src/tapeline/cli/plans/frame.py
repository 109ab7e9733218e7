"""What the verbs of `tapeline plan` share: options from quantities, and how an answer is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tapeline.cli.output import print_json, say
from tapeline.files import finite_json
from tapeline.plan import Bill, Inputs, Quantity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tapeline.report import Table

FromRun = Annotated[
    Path | None,
    typer.Option(help="Take what is not given from what this run measured."),
]
Plot = Annotated[Path | None, typer.Option(help="Write the figure to PLOT.svg and .png.")]


def option(quantity: Quantity) -> Any:
    """The command-line option of a quantity; its own default is None, which means "not given"."""
    shown = "" if quantity.default is None else f" Default: {quantity.default:g}."
    return typer.Option(quantity.option, help=f"{quantity.help}.{shown}")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a plan says, and from what.

    Attributes:
        plan: the verb.
        inputs: what was taken.
        model: what was derived, a dataclass or a dictionary; it goes into the JSON as it is.
        tables: the same for a reader.
        notes: the decision and the warnings, a sentence each, the decision first.
    """

    plan: str
    inputs: Inputs
    model: Any
    tables: Sequence[Table]
    notes: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        """As JSON can hold it: a number that does not exist, or is infinite, is None."""
        model = asdict(self.model) if is_dataclass(self.model) else self.model  # type: ignore[arg-type]
        return {
            "plan": self.plan,
            "inputs": {name: value.as_dict() for name, value in self.inputs.values.items()},
            "model": finite_json(model),
            "notes": list(self.notes),
        }


def show(
    answer: Answer,
    *,
    as_json: bool,
    plot: Path | None = None,
    figure: Callable[[], Figure] | None = None,
) -> None:
    """Print an answer on standard output, and draw it if asked to."""
    from tapeline.report import print_table

    if plot and figure:
        from tapeline.report.figures import save_figure

        save_figure(figure(), plot)
        say(f"figure: {plot}.svg, {plot}.png")
    if as_json:
        print_json(answer.as_dict())
        return
    print_table(inputs_table(answer.inputs))
    for table in answer.tables:
        print_table(table)
    for note in answer.notes:
        typer.echo(note)


def bill_cells(bill: Bill | None) -> list[float | None]:
    """Wall hours and cost as two cells; dashes for a job that never ends."""
    return [bill.wall_hours, bill.cost] if bill else [None, None]


def points(share: float) -> str:
    """A share in percent to two decimals, where the third digit decides."""
    return f"{100 * share:.2f} %"


def inputs_table(inputs: Inputs) -> Table:
    """What was taken, each with where it is from."""
    from tapeline.report import Table

    rows = []
    for value in inputs.values.values():
        number = int(value.number) if value.number.is_integer() else value.number
        source = f"{value.source} ({value.detail})" if value.detail else value.source
        rows.append([value.name, number, source])
    return Table(["input", "value", "from"], rows, "What this is derived from")
