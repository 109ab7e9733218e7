"""One life of a run: its parts, where it begins, what it saves, how it ends."""

from tapeline.attempt.kept import KeptCheckpoints, Row
from tapeline.attempt.life import Progress, RunResult, live
from tapeline.attempt.parts import Parts

__all__ = ["KeptCheckpoints", "Parts", "Progress", "Row", "RunResult", "live"]
