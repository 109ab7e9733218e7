"""The one binary tree that lanes are added up in, whoever holds which of them.

Covers which lanes a rank holds, the subtrees it can finish alone, and the additions. No knowledge
of models or of how parts travel.

The sum of lanes [0, V) is the sum of [0, V/2) plus the sum of [V/2, V), and so on down to single
lanes. Floating-point addition isn't associative, so it is this order, and not the number of ranks,
that decides the bits.
"""

from __future__ import annotations

from torch import Tensor

from tapeline.errors import TrainingError


def check_lanes(num_lanes: int, world_size: int) -> None:
    """Raise unless `num_lanes` is a power of two and feeds every rank.

    Raises:
        TrainingError: it isn't, or there are more ranks than lanes.
    """
    if num_lanes < 1 or num_lanes & (num_lanes - 1):
        raise TrainingError(
            "num_lanes",
            expected="a power of two, so that the tree of lanes has no gaps",
            found=str(num_lanes),
            fix="Take 1, 2, 4, 8 or a larger one",
        )
    if world_size > num_lanes:
        raise TrainingError(
            "num_lanes",
            expected=f"at least {world_size}, one for each rank",
            found=str(num_lanes),
            fix="Start fewer ranks; another number of lanes is another run",
        )


def lanes_of(rank: int, world_size: int, num_lanes: int) -> range:
    """The contiguous lanes of a rank: as even as possible, in the order of the ranks."""
    return range(rank * num_lanes // world_size, (rank + 1) * num_lanes // world_size)


def subtrees(lanes: range) -> list[range]:
    """The largest whole subtrees that a contiguous range of lanes holds, from left to right."""
    found: list[range] = []
    for lane in lanes:
        found.append(range(lane, lane + 1))
        while len(found) > 1 and _siblings(found[-2], found[-1]):
            right = found.pop()
            found[-1] = range(found[-1].start, right.stop)
    return found


class TreeSum:
    """Adds subtrees that come from left to right, each pair of siblings as soon as it is there.

    At most one value per level of the tree is held at a time.

    Attributes:
        spans: the subtrees that are finished, from left to right.
        values: their sums. Sums are made in place, in the left one's memory.
    """

    def __init__(self) -> None:
        self.spans: list[range] = []
        self.values: list[Tensor] = []

    def add(self, span: range, value: Tensor) -> list[Tensor]:
        """Take the next subtree; returns the tensors that are no longer needed."""
        assert not self.spans or self.spans[-1].stop == span.start, (self.spans, span)
        self.spans.append(span)
        self.values.append(value)
        freed = []
        while len(self.spans) > 1 and _siblings(self.spans[-2], self.spans[-1]):
            right = self.values.pop()
            self.values[-1].add_(right)
            freed.append(right)
            stop = self.spans.pop().stop
            self.spans[-1] = range(self.spans[-1].start, stop)
        return freed


def _siblings(left: range, right: range) -> bool:
    return len(left) == len(right) and left.start % (2 * len(left)) == 0
