"""How ranks get the sum of all lanes: subtrees travel, and the tree is finished in parts.

Covers the collectives and the count of bytes. The order of additions is the tree's (`tree.py`).

Each rank finishes the tree for its own share of the elements: it gets every rank's subtrees of
that share (all-to-all), adds them up, and the finished shares are gathered by all. A rank of a
power-of-two world holds one subtree and sends 2n(p−1)/p numbers per step, what the best all-reduce
sends (formulas.md section 6); an uneven world sends a little more, since some ranks hold several.
The same code serves both.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tapeline.training.tree import TreeSum, lanes_of, subtrees


class Exchange:
    """Sums vectors over all lanes and ranks, to the same bits on each.

    Args:
        num_lanes: leaves of the tree.
        rank, world_size: of this process.
        group: of processes; None is the default one. Unused where this rank is alone.

    Attributes:
        lanes: this rank's.
        bytes_sent: to other ranks so far.
    """

    def __init__(
        self, num_lanes: int, rank: int, world_size: int, group: dist.ProcessGroup | None = None
    ) -> None:
        self.lanes = lanes_of(rank, world_size, num_lanes)
        self.world_size = world_size
        self.group = group
        self.bytes_sent = 0
        self._spans = [
            subtrees(lanes_of(other, world_size, num_lanes)) for other in range(world_size)
        ]

    def padded(self, size: int) -> int:
        """`size` rounded up to equal shares of the ranks."""
        return -(-size // self.world_size) * self.world_size

    def sum(self, subtree_sums: list[Tensor]) -> Tensor:
        """The sum over all lanes, in the memory of the first tensor given.

        Args:
            subtree_sums: of this rank's subtrees, from left to right; each contiguous and of the
                same length, a multiple of the number of ranks.
        """
        result = subtree_sums[0]
        if self.world_size == 1:
            return result
        share = len(result) // self.world_size
        sent = result
        if len(subtree_sums) > 1:  # what each rank gets lies together
            sent = torch.stack([s.view(self.world_size, share) for s in subtree_sums], dim=1)
        counts = [len(spans) for spans in self._spans]
        received = result.new_empty(sum(counts), share)
        dist.all_to_all_single(
            received.view(-1),
            sent.view(-1),
            [count * share for count in counts],
            [len(subtree_sums) * share] * self.world_size,
            group=self.group,
        )
        tree = TreeSum()
        spans = [span for spans in self._spans for span in spans]
        for span, part in zip(spans, received, strict=True):
            tree.add(span, part)
        (finished,) = tree.values
        dist.all_gather(list(result.view(self.world_size, share)), finished, group=self.group)
        others = self.world_size - 1
        self.bytes_sent += (len(subtree_sums) + 1) * share * others * result.element_size()
        return result
