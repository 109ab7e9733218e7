"""Whether any rank wishes to stop, carried by messages that ranks send each other anyway.

A message of its own at each step would cost a small model more than the stop is worth. Does not
cover what a rank wishes to stop for (`checkpoint.preempt`).
"""

from __future__ import annotations

from torch import Tensor


class Ballot:
    """One rank's wish, and what became of the wishes of all at the last count.

    Called with a wish, it answers for all ranks: `PreemptionGuard(any_rank=ballot)`. A wish goes
    out with the next step's gradients, so all ranks learn of it between the same two steps.

    Attributes:
        wish: whether this rank wishes to stop.
    """

    def __init__(self) -> None:
        self.wish = False
        self._votes: Tensor | None = None
        self._before: Tensor | None = None

    def count(self, votes: Tensor) -> None:
        """Take the number of wishes among all ranks; the same tensor on each."""
        self._before, self._votes = self._votes, votes

    def __call__(self, wish: bool) -> bool:
        """Wish to stop, or not; returns whether any rank did at the last count."""
        self.wish = wish
        # The newest count would have to be waited for on a device, which then stands idle.
        on_device = self._votes is not None and self._votes.is_cuda
        votes = self._before if on_device else self._votes
        return votes is not None and bool(votes > 0)
