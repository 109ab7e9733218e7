"""Repeating: one configuration with other seeds, and one run again from its record."""

from tapeline.repeat.replicate import Replicated, replicate
from tapeline.repeat.rerun import Rerun, rerun

__all__ = ["Replicated", "Rerun", "replicate", "rerun"]
