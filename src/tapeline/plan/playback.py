"""How failures are simulated, as numbers: what `confirm` is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from tapeline.plan.inputs import Quantity

SIMULATE = Quantity(
    "simulate",
    "Failures to simulate at each best interval",
    0,
    positive=False,
    whole=True,
    least=1000,
    most=50_000,
)
FAILURE_SHAPE = Quantity(
    "failure_shape",
    "Weibull shape of a machine's life in the simulation; 1 is exponential, 0.7 comes in groups",
    1.0,
    most=10.0,
    least=0.3,
)
MACHINES = Quantity("machines", "Machines with such lives", 1, most=1e5, whole=True)


@dataclass(frozen=True, slots=True)
class Playback:
    """How failures are simulated."""

    num_failures: int
    shape: float
    num_machines: int
