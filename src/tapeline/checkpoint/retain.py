"""Which checkpoints stay and why, which go: pure functions of what is there.

Covers: the last N, one in every K steps, the best by a metric, the tagged. Does not cover
deleting, nor finding out what verifies.

Whatever the policy: the newest checkpoint that verifies, the best ones and the tagged ones stay.
Only verified checkpoints count, so a damaged one never pushes a good one out, and nothing goes
unless a newer one was verified: to call this after a commit is to delete only after a commit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tapeline.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Held:
    """A checkpoint that is there.

    Attributes:
        step: optimiser steps completed.
        verified: every byte was checked.
        metric: what `best` compares; None where it was not measured.
        tags: names somebody gave it.
    """

    step: int
    verified: bool = True
    metric: float | None = None
    tags: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Retention:
    """What stays; what any of the rules names stays.

    Attributes:
        last: this many of the newest.
        every: the first one of each `every` steps: at or after `every`, `2 · every`, …
        best: this many of the best by metric. NaN and infinities are never best, of equal ones
            the earlier is better.
        mode: whether a lower or a higher metric is better.

    Raises:
        CheckpointError: a number is out of range.
    """

    last: int = 3
    every: int | None = None
    best: int = 0
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        numbers = {"last": (self.last, 1), "every": (self.every, 1), "best": (self.best, 0)}
        for name, (number, least) in numbers.items():
            if number is not None and number < least:
                raise CheckpointError(
                    f"retention, {name}",
                    expected=f"at least {least}",
                    found=str(number),
                    fix="The newest checkpoint always stays; leave out a rule that isn't wanted",
                )


def reasons_to_keep(held: Iterable[Held], retention: Retention) -> dict[int, tuple[str, ...]]:
    """The steps that stay, each with the rules that keep it; a tagged one even if damaged."""
    held = sorted(held, key=lambda one: one.step)
    verified = [one for one in held if one.verified]
    reasons: dict[int, list[str]] = {}

    def keep(step: int, reason: str) -> None:
        reasons.setdefault(step, []).append(reason)

    for number, one in enumerate(reversed(verified[-retention.last :])):
        keep(one.step, f"last {number + 1} of {retention.last}" if number else "newest")
    if retention.every:
        first: dict[int, int] = {}
        for one in verified:
            first.setdefault(one.step // retention.every, one.step)
        for block, step in first.items():
            if block:
                keep(step, f"first from step {block * retention.every}")
    sign = 1 if retention.mode == "min" else -1
    ranked = sorted(
        (sign * one.metric, one.step)
        for one in verified
        if one.metric is not None and math.isfinite(one.metric)
    )
    for number, (_, step) in enumerate(ranked[: retention.best]):
        keep(step, f"best {number + 1} of {retention.best}")
    for one in held:
        for tag in sorted(one.tags):
            keep(one.step, f"tagged {tag}")
    return {step: tuple(reasons[step]) for step in sorted(reasons)}


def to_delete(held: Iterable[Held], retention: Retention) -> list[int]:
    """The steps that go, lowest first.

    A damaged one goes once it is older than the `last` newest verified ones: until then it shows
    what happened, and it may be a save in flight.
    """
    held = list(held)
    verified = sorted(one.step for one in held if one.verified)
    if not verified:
        return []
    oldest = verified[-retention.last :][0]
    stay = reasons_to_keep(held, retention)
    return sorted(
        one.step for one in held if one.step not in stay and (one.verified or one.step < oldest)
    )
