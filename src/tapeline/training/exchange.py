"""How ranks get the sum of all lanes: subtrees travel, and the tree is finished in parts.

Covers the messages and the count of their bytes. The order of additions is the tree's (`tree.py`).

Each rank finishes the tree for its own share of the elements: every other rank sends it its
subtrees of that share, and gets the finished share back. A rank of a power-of-two world holds one
subtree and sends 2n(p−1)/p numbers per step, what the best all-reduce sends (formulas.md
section 6); an uneven world sends a little more, since some ranks hold several. The same code
serves both. Messages go from rank to rank, straight from and into place: gloo's collectives of
the same bytes took three times as long, copying them on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

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
        waiting: what each exchange with other ranks is done in, such as a span of a ledger.
    """

    def __init__(
        self, num_lanes: int, rank: int, world_size: int, group: dist.ProcessGroup | None = None
    ) -> None:
        self.lanes = lanes_of(rank, world_size, num_lanes)
        self.rank = rank
        self.world_size = world_size
        self.group = group
        self.bytes_sent = 0
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        self._others = [other for other in range(world_size) if other != rank]
        self._spans = [
            subtrees(lanes_of(other, world_size, num_lanes)) for other in range(world_size)
        ]
        self._received = torch.empty(0)  # kept: fresh memory costs more than the message

    def padded(self, size: int) -> int:
        """`size` rounded up to equal shares of the ranks."""
        return -(-size // self.world_size) * self.world_size

    def sum(self, subtree_sums: list[Tensor]) -> Tensor:
        """The sum over all lanes, in the memory of the first tensor given.

        Args:
            subtree_sums: of this rank's subtrees, from left to right; each contiguous and of the
                same length, a multiple of the number of ranks. Overwritten.
        """
        result = subtree_sums[0]
        if self.world_size > 1:
            with self.waiting():
                self._finish(subtree_sums)
        return result

    def _finish(self, subtree_sums: list[Tensor]) -> None:
        """Put the sum over all lanes into the first tensor."""
        shares = [tensor.view(self.world_size, -1) for tensor in subtree_sums]
        mine, parts = shares[0], self._parts(shares)
        self._swap(
            [(share[other], other) for other in self._others for share in shares],
            [(part, other) for other in self._others for part in parts[other]],
        )
        tree = TreeSum()
        for spans, tensors in zip(self._spans, parts, strict=True):
            for span, tensor in zip(spans, tensors, strict=True):
                tree.add(span, tensor)
        (finished,) = tree.values
        if finished is not parts[self.rank][0]:
            mine[self.rank].copy_(finished)
        self._swap(
            [(mine[self.rank], other) for other in self._others],
            [(mine[other], other) for other in self._others],
        )

    def _parts(self, shares: list[Tensor]) -> list[list[Tensor]]:
        """Where every rank's subtrees of this rank's share are, or will be received."""
        like = shares[0][0]
        rows = sum(len(self._spans[other]) for other in self._others)
        if self._received.shape != (rows, len(like)):
            self._received = like.new_empty(rows, len(like))
        free = iter(self._received)
        return [
            [share[self.rank] for share in shares]
            if other == self.rank
            else [next(free) for _ in spans]
            for other, spans in enumerate(self._spans)
        ]

    def _swap(self, sent: list[tuple[Tensor, int]], received: list[tuple[Tensor, int]]) -> None:
        """Send and receive everything at once; messages between two ranks arrive in order."""
        operations = []
        for kind, messages in ((dist.isend, sent), (dist.irecv, received)):
            number = dict.fromkeys(self._others, 0)
            for tensor, other in messages:
                operations.append(
                    dist.P2POp(kind, tensor, group=self.group, tag=number[other], group_peer=other)
                )
                number[other] += 1
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        self.bytes_sent += sum(tensor.nbytes for tensor, _ in sent)
