"""The job that is planned: the useful time it needs, its accelerators and their price."""

from __future__ import annotations

from dataclasses import dataclass

from tapeline.plan.inputs import Inputs, Quantity

USEFUL_HOURS = Quantity(
    "useful_hours", "Wall hours that the job would take if nothing were lost", 336.0
)
ACCELERATORS = Quantity("accelerators", "Accelerators that are paid for", 64, whole=True)
PRICE = Quantity("price_per_hour", "Price of one accelerator for an hour", 2.5, positive=False)


@dataclass(frozen=True, slots=True)
class Bill:
    """What a job comes to: wall hours, and money in the unit of the price."""

    wall_hours: float
    cost: float


@dataclass(frozen=True, slots=True)
class Job:
    """A job without what it loses.

    Attributes:
        useful_hours: wall hours at a goodput of 1.
        num_accelerators: paid for all the time.
        price_per_hour: of one accelerator.
    """

    useful_hours: float
    num_accelerators: int
    price_per_hour: float

    def bill(self, goodput: float) -> Bill | None:
        """What it comes to at a share of useful time; None if it never ends (0 or less)."""
        if goodput <= 0:
            return None
        wall_hours = self.useful_hours / goodput
        return Bill(wall_hours, wall_hours * self.num_accelerators * self.price_per_hour)


def take_job(
    inputs: Inputs, useful_hours: float | None, accelerators: int | None, price: float | None
) -> Job:
    """The job that is given, or the default one."""
    return Job(
        inputs.take(USEFUL_HOURS, useful_hours),
        inputs.count(ACCELERATORS, accelerators),
        inputs.take(PRICE, price),
    )
