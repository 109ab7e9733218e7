"""Proofs and trials of whole runs: kills that leave the bits alone, precisions, batches."""

from tapeline.prove.batches import BatchRow, BatchSweep, sweep_batch
from tapeline.prove.certificate import Certificate, Life
from tapeline.prove.precision import PrecisionTrial, compare_precision
from tapeline.prove.proving import Trial, prove

__all__ = [
    "BatchRow",
    "BatchSweep",
    "Certificate",
    "Life",
    "PrecisionTrial",
    "Trial",
    "compare_precision",
    "prove",
    "sweep_batch",
]
