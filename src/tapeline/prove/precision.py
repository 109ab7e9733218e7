"""`tapeline compare-precision`: does a lower precision cost more than another seed would?

The band is where the next seed of the reference would fall at each evaluation (95 %, Student's t).
The other precision is the same if the mean over its seeds stays within it all through the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tapeline.config import RunConfig
from tapeline.prove.room import make_room
from tapeline.prove.variants import Progress, Say, Variant, train_variants
from tapeline.runs.spread import Comparison, Spread, compare, spread_of
from tapeline.words import percent

REFERENCE = "float32"


@dataclass(frozen=True, slots=True)
class PrecisionTrial:
    """What two precisions came to.

    Attributes:
        candidate: the precision held against float32.
        reference, other: both precisions' runs, evaluated at the same steps.
        bands: of the reference, at each evaluation.
        outside: steps at which the other's mean is outside the band.
        last: the difference after the last step, paired by seed.
    """

    candidate: str
    reference: Variant
    other: Variant
    bands: tuple[Spread, ...]
    outside: tuple[int, ...]
    last: Comparison | None

    @property
    def same(self) -> bool:
        """Whether the other precision is within the seed band all through."""
        return not self.outside

    def limits(self) -> list[tuple[float, float]]:
        """The band's lower and upper end at each evaluation."""
        return [(b.mean - b.next_half_width, b.mean + b.next_half_width) for b in self.bands]

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it."""
        return {
            "same": self.same,
            "sentence": self.sentence(),
            "runs": {REFERENCE: self.reference.as_dict(), self.candidate: self.other.as_dict()},
            "band": self.limits(),
            "outside": list(self.outside),
            "last": self.last and self.last.as_dict(),
        }

    def sentence(self) -> str:
        """The finding in words."""
        band, seeds = self.bands[-1], len(self.reference.curves)
        width = (
            f"±{percent(band.next_half_width / band.mean, '.1f')} at the end, from {seeds} seeds"
        )
        if self.other.failures:
            broke, first = len(self.other.failures), next(iter(self.other.failures.values()))
            return (
                f"Not the same: {self.candidate} broke off with {broke} of {seeds} seeds: {first}"
            )
        assert self.last is not None, "there is a difference where no run broke off"
        difference, half_width = (
            share / band.mean for share in (self.last.difference, self.last.half_width)
        )
        gap = f"{percent(difference, '+.2f')} ± {percent(half_width, '.2f')}"
        if self.same:
            return (
                f"Same within the seed band ({width}): {self.candidate} ends {gap} from "
                f"{REFERENCE}, paired by seed."
            )
        return (
            f"Not the same: {self.candidate} leaves the seed band ({width}) at step "
            f"{self.outside[0]:,}, {len(self.outside)} of {len(self.bands)} evaluations; it ends "
            f"{gap} from {REFERENCE}."
        )


def compare_precision(
    config: RunConfig,
    candidate: str,
    seeds: int,
    out: Path,
    say: Say,
    progress: Progress | None = None,
) -> PrecisionTrial:
    """Train in float32 and in `candidate`, with the same seeds, and judge by the validation loss.

    Args:
        config: whose `training.precision` is set aside.
        candidate: "bfloat16" or "float16".
        seeds: three at least, or the band is too wide to tell anything.
        out: folder for the runs; what an earlier trial left there is replaced.
        say, progress: as in `train_variants`.

    Raises:
        RunError: `out` holds something else, or fewer than two float32 runs reached their end.
        TapelineError: as in `train_variants`.
    """
    make_room(out, "trial")
    variants = {name: {"precision": name} for name in (REFERENCE, candidate)}
    found = train_variants(config, variants, seeds, out, say, progress)
    return judge(candidate, found[REFERENCE], found[candidate])


def judge(candidate: str, reference: Variant, other: Variant) -> PrecisionTrial:
    """Hold one precision's errors against the other's.

    Raises:
        RunError: fewer than two runs of the reference reached their end.
    """
    places = range(len(reference.steps))
    bands = tuple(spread_of(list(reference.at(place).values())) for place in places)
    outside = tuple(
        step
        for place, step in enumerate(reference.steps)
        if not _within(list(other.at(place).values()), bands[place])
    )
    last = None if other.failures else compare(reference.at(-1), other.at(-1))
    return PrecisionTrial(candidate, reference, other, bands, outside, last)


def _within(values: Sequence[float], band: Spread) -> bool:
    """Whether their mean is in the band; an infinite one isn't."""
    return abs(fmean(values) - band.mean) <= band.next_half_width
