"""On how many ranks, and where: what is asked for, less what is out, as the configuration allows.

The global batch is constant, whatever the number of ranks. Under lanes so are the bits; under the
fast paths they are not, and every change says so. Does not cover when to change: the supervisor
goes on with fewer at a failure, and grows back at a saved step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tapeline.config import TrainingConfig
from tapeline.errors import RunError


@dataclass(frozen=True, slots=True)
class Ranks:
    """How many ranks are asked for.

    Attributes:
        least, most: equal where the number is fixed.
    """

    least: int = 1
    most: int = 1

    @classmethod
    def parse(cls, text: str) -> Ranks:
        """`4`, or `2:4`.

        Raises:
            RunError: it is neither.
        """
        found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
        least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= least <= most:
            raise RunError(
                "--ranks",
                expected="a number from 1, or MIN:MAX",
                found=repr(text),
                fix="Give it as 4, or as 2:4 for a run that may go on with fewer",
            )
        return cls(least, most)


def allowed(number: int, training: TrainingConfig) -> bool:
    """Whether a configuration can be trained on so many ranks."""
    if training.strategy == "lanes":
        return number <= training.lanes
    ways = training.tensor_parallel if number > 1 else 1
    return number % ways == 0 and training.batch % (number // ways * training.accumulate) == 0


def load(rank: int, number: int, training: TrainingConfig | None) -> float:
    """The share of the global batch that a rank of so many has to do.

    Lanes are dealt as evenly as their number allows: of 4 on 3 ranks, one rank has two.
    """
    if training is None or training.strategy != "lanes":
        return 1 / number
    lanes = training.lanes
    return ((rank + 1) * lanes // number - rank * lanes // number) / lanes


def heaviest(number: int, training: TrainingConfig | None) -> float:
    """The share of the rank that has the most to do: how long a step takes goes with it."""
    return max(load(rank, number, training) for rank in range(number))


def choose(slots: Sequence[int], ranks: Ranks, training: TrainingConfig | None) -> list[int]:
    """The slots to start on: as many as can be used; none if they are too few.

    Args:
        slots: that can be used.
        ranks: asked for.
        training: of the run; None allows any number.
    """
    for number in range(min(len(slots), ranks.most), ranks.least - 1, -1):
        if training is None or allowed(number, training):
            return list(slots[:number])
    return []


def change_text(before: int, after: int, training: TrainingConfig | None) -> str:
    """What a change of the number of ranks means for the run, in a sentence."""
    words = f"goes on with {after} ranks instead of {before}, the global batch as it was"
    if training is None:
        return words
    if training.strategy == "lanes":
        return f"{words}: the same bits, since {training.lanes} lanes fix every sum"
    return (
        f"{words}: other bits, since {training.strategy} sums in an order that depends on the ranks"
    )
