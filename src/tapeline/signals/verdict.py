"""What a triage says, and from where on it says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal[
    "crash",
    "hang",
    "starvation",
    "checkpoint-bound",
    "small kernels",
    "persistent straggler",
    "rotating straggler",
    "communication-bound",
    "healthy",
    "unknown",
]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One cause.

    Attributes:
        ranks: whose; empty where it is all of them, or not known.
        evidence: what it is concluded from, one line each.
        refuted_by: what would show that it is wrong.
        ceiling: the most that doing it can save, as a share of the time that steps take; None
            where it isn't a matter of speed.
    """

    kind: Kind
    ranks: tuple[int, ...]
    evidence: tuple[str, ...]
    refuted_by: str
    change: str
    ceiling: float | None = None

    @property
    def speedup(self) -> float | None:
        """The ceiling as a factor, `1 / (1 − ceiling)`: Amdahl's law for a part done in no time."""
        if self.ceiling is None:
            return None
        return 1 / (1 - self.ceiling) if self.ceiling < 1 else float("inf")

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them."""
        speedup = self.speedup
        told = None if speedup == float("inf") else speedup
        return {**asdict(self), "speedup": told}


@dataclass(frozen=True, slots=True)
class Limits:
    """From where on something is a finding.

    Attributes:
        stuck_s: seconds without progress that are a hang, by phase.
        stuck_else_s: the same for phases that are not in `stuck_s`.
        starved, checkpoint: shares of the time since startup.
        idle: share of the computing time between kernels.
        small_kernel_us: a kernel shorter than that costs about as much to launch as to run.
        launching, launch_us: share of the computing time between kernels, and the time from one
            to the next, up to which launching them is what takes it.
        imbalance: share of a step in which ranks wait for the slowest.
        communication: share of a step in collectives when nobody is late.
        other: share of the time since startup that no bucket explains.
        persistent: share of the windows in which one rank is the slowest.
        num_windows: fewer say nothing about persistence.
    """

    stuck_s: Mapping[str, float] = field(
        default_factory=lambda: {
            "startup": 600.0,
            "restore": 900.0,
            "checkpoint": 900.0,
            "evaluation": 1800.0,
        }
    )
    stuck_else_s: float = 60.0
    starved: float = 0.1
    checkpoint: float = 0.1
    idle: float = 0.2
    small_kernel_us: float = 10.0
    launching: float = 0.5
    launch_us: float = 50.0
    imbalance: float = 0.1
    communication: float = 0.15
    other: float = 0.15
    persistent: float = 0.8
    num_windows: int = 5

    def stuck_after_s(self, phase: str) -> float:
        """Seconds without progress in a phase that are a hang."""
        return self.stuck_s.get(phase, self.stuck_else_s)
