"""What a run's numbers say: watchers over its metrics, and a triage of its ranks. Pure, no torch.

Nothing here reads a file or a device: a `Snapshot` or an `Evidence` is handed in.
"""

from tapeline.signals.evidence import (
    Evidence,
    Exit,
    Heartbeat,
    Kernels,
    RankEvidence,
    StepTimes,
)
from tapeline.signals.snapshot import Action, Finding, Series, Snapshot
from tapeline.signals.triage import triage
from tapeline.signals.verdict import Limits, Verdict
from tapeline.signals.watch import WATCHERS, Watch, examine

__all__ = [
    "WATCHERS",
    "Action",
    "Evidence",
    "Exit",
    "Finding",
    "Heartbeat",
    "Kernels",
    "Limits",
    "RankEvidence",
    "Series",
    "Snapshot",
    "StepTimes",
    "Verdict",
    "Watch",
    "examine",
    "triage",
]
