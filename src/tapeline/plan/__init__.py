"""Plans: derived from numbers instead of guessed. Pure functions, without torch and without files.

A plan is three things, and `plan checkpoint` is the model to copy:

1. `plan/NAME.py`: a `Quantity` for each number it asks for (name with unit, help, default, range;
   declared once, shared ones in `job` and `saving`), frozen dataclasses for what it says, and one
   function from plain numbers to those. It trusts its numbers: `Inputs.take` has checked them.
   What can't be done honestly is a `TapelineError` that says what to change.
2. `cli/plans/NAME.py`: the verb. Options are `Annotated[float | None, option(QUANTITY)] = None`.
   It makes `inputs = Inputs(measured(from_run))`, takes each number by
   `inputs.take(QUANTITY, given)` (given, else measured, else the default; the source is kept),
   calls the function, and hands an `Answer` (inputs, model, tables, notes) to `show`, which prints
   tables or one JSON document and draws the figure. Register it in `cli/plans/__init__.py`.
3. `report/plan_figures.py` (or a file beside it): a function from the plan to a matplotlib figure,
   drawn under `report.style.styled()`.

A table's caption names the model and its source: what was derived is never shown like something
that was measured. `tapeline --help` imports the quantities, so a module that declares them
imports NumPy only where it computes.
"""

from tapeline.plan.inputs import Inputs, Measured, Quantity, Value
from tapeline.plan.job import Bill, Job

__all__ = ["Bill", "Inputs", "Job", "Measured", "Quantity", "Value"]
