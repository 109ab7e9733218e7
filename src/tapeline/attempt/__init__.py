"""One life of a run: its parts, where it begins, what it saves, how it ends."""

from tapeline.attempt.ending import RunResult
from tapeline.attempt.kept import KeptCheckpoints, Row
from tapeline.attempt.life import Progress, live
from tapeline.attempt.parts import Data, Parts
from tapeline.attempt.promise import Promise

__all__ = [
    "Data",
    "KeptCheckpoints",
    "Parts",
    "Progress",
    "Promise",
    "Row",
    "RunResult",
    "live",
]
