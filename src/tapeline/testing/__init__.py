"""Faults as data, for tests of what survives them: ours, and those of a user's own loop."""

from tapeline.testing.disk import FaultyDisk
from tapeline.testing.faults import Crash, Fault, Operation, crashes
from tapeline.testing.objects import FaultyObjects

__all__ = ["Crash", "Fault", "FaultyDisk", "FaultyObjects", "Operation", "crashes"]
