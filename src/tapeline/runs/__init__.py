"""Runs as folders: what a run was, what became of it, what it measured. No torch, no training."""

from tapeline.runs.checkout import code_state
from tapeline.runs.folder import RunFolder
from tapeline.runs.history import Metrics, read_metrics
from tapeline.runs.metrics import MachineFigures, MetricsJournal
from tapeline.runs.probe import Probe
from tapeline.runs.record import record

__all__ = [
    "MachineFigures",
    "Metrics",
    "MetricsJournal",
    "Probe",
    "RunFolder",
    "code_state",
    "read_metrics",
    "record",
]
