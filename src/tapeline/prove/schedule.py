"""When a run is killed, and on how many ranks it goes on: drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

_FIRST_SHARE = 0.85  # of the steps: a kill later than that could come after the last one


@dataclass(frozen=True, slots=True)
class Kill:
    """One planned SIGKILL.

    Attributes:
        at_step: it comes once that step is journalled,
        later: and this share of the time between two looks at the journal later, so that any
            moment of a step can be met.
        ranks: of the life that it ends.
        victims: which of them are killed; fewer than all leaves it to the others to notice.
    """

    at_step: int
    later: float
    ranks: int
    victims: tuple[int, ...]


def plan_kills(num: int, ranks: Sequence[int], steps: int, seed: int) -> list[Kill]:
    """Draw `num` kills, one in each of as many equal stretches of the run.

    The lives take the numbers of ranks in turn, beginning with the second: the uninterrupted run
    has the first. On several ranks every second kill, as drawn, ends one of them alone.
    """
    draw = random.Random(seed).random  # the one method whose numbers Python promises to keep
    last = max(num, int(_FIRST_SHARE * steps))
    kills = []
    for number in range(num):
        size = ranks_of_life(number, ranks)
        at_step = 1 + int((number + draw()) * (last - 1) / num)
        later, alone, victim = draw(), draw() < 0.5, int(draw() * size)
        victims = (victim,) if size > 1 and alone else tuple(range(size))
        kills.append(Kill(at_step, later, size, victims))
    return kills


def ranks_of_life(number: int, ranks: Sequence[int]) -> int:
    """On how many ranks a life goes, counted from 0."""
    return ranks[(number + 1) % len(ranks)]
