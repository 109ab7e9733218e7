"""Proofs and trials of whole runs: kills that leave the bits alone, precisions, batches."""

from tapeline.prove.certificate import Certificate, Life
from tapeline.prove.proving import Trial, prove

__all__ = ["Certificate", "Life", "Trial", "prove"]
