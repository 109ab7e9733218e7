"""Runs as folders: what a run was, what became of it, what it measured. No torch, no training."""

from tapeline.runs.folder import RunFolder
from tapeline.runs.metrics import MetricsJournal
from tapeline.runs.record import code_state, record

__all__ = ["MetricsJournal", "RunFolder", "code_state", "record"]
