"""Ranks that save and load together: what they tell each other, and that all must agree.

Covers: gathering small values from every rank, and work that counts only if it succeeds on all.
Does not cover what is saved.

Votes travel over gloo in two process groups of their own, whatever the training uses. One serves
the loop, where every rank makes the same calls in the same order; the other the threads that
write behind it, one vote at a time. So no vote can meet a collective of the training, nor the two
kinds of vote each other, and nothing waits in a circle: a writing thread waits only for writing
threads, the loop for loops and for its own thread. A rank that dies closes its connections: the
others are told at once. One that hangs is given up after a time limit. Either breaks the group,
so that no later save can mix up two votes, and the job has to be started again.

Values are JSON: nothing that another rank sends is unpickled.
"""

from __future__ import annotations

import datetime
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from tapeline.errors import CheckpointError

TIMEOUT_S = 1800.0  # as torch's own: a slow disk may keep the others waiting for long
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Poll(Generic[T]):
    """How a piece of work went on all ranks.

    Attributes:
        answers: what it returned on each; None where it failed.
        failure: the error that names the ranks where it failed; None if there are none.
    """

    answers: list[T]
    failure: CheckpointError | None


class Channel(ABC):
    """Ranks that vote; used by one thread at a time."""

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, which JSON can hold, in the order of ranks.

        Raises:
            CheckpointError: a rank died, or didn't answer within the time limit.
        """

    def poll(self, work: Callable[[], T]) -> Poll[T]:
        """Do `work` on every rank; it returns what JSON can hold.

        Raises:
            CheckpointError: a rank was lost. A failure of the work itself is in the result.
        """
        answer: dict[str, Any]
        mine: BaseException | None = None
        try:
            answer = {"ok": work()}
        except CheckpointError as error:
            mine = error
            answer = {key: getattr(error, key) for key in ("where", "expected", "found", "fix")}
        except BaseException as error:  # the others must not wait for this rank
            mine = error
            answer = {
                "where": "a save or a load",
                "expected": "no error",
                "found": f"{type(error).__name__}: {error}",
                "fix": "See this rank's own error",
            }
        answers = self.gather(answer)
        if mine is not None and not isinstance(mine, CheckpointError):
            raise mine
        failed = {rank: one for rank, one in enumerate(answers) if "ok" not in one}
        failure = mine if len(answers) == 1 else _told(failed) if failed else None
        if failure is not None and failure is not mine:
            failure.__cause__ = mine
        return Poll([one.get("ok") for one in answers], failure)

    def vote(self, work: Callable[[], T]) -> list[T]:
        """Do `work` on every rank; what it returned on each.

        Raises:
            CheckpointError: it failed on a rank, which is named, or a rank was lost.
        """
        poll = self.poll(work)
        if poll.failure is not None:
            raise poll.failure
        return poll.answers


class Alone(Channel):
    """One process, which agrees with itself."""

    def gather(self, value: Any) -> list[Any]:
        """The one value."""
        return [value]


class Gloo(Channel):
    """A process group of its own."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def gather(self, value: Any) -> list[Any]:
        """Sizes first, then texts of the longest one's size."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        try:
            num_ranks = dist.get_world_size(self._group)
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(num_ranks)]
            dist.all_gather(sizes, torch.tensor([len(text)]), group=self._group)
            longest = max(int(size) for size in sizes)
            texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(num_ranks)]
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(text)] = text
            dist.all_gather(texts, padded, group=self._group)
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(
                "ranks",
                expected="an answer from every rank",
                found=str(error).splitlines()[0].strip(),
                fix="Start the job again: it resumes from its newest checkpoint",
            ) from error
        return [
            json.loads(bytes(answer[: int(size)].numpy().data))
            for answer, size in zip(texts, sizes, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a job, for its checkpoints.

    Attributes:
        rank: of this process.
        size: how many there are.
        loop: for what is agreed between two steps.
        behind: for what the writing threads agree.
    """

    rank: int
    size: int
    loop: Channel
    behind: Channel

    @classmethod
    def joined(cls, members: Sequence[int] | None = None, *, timeout_s: float = TIMEOUT_S) -> Ranks:
        """Set up the votes of a job that has called `torch.distributed.init_process_group`.

        A collective: every rank of the job calls it at the same place.

        Args:
            members: the ranks that save together; all of the job's by default.
            timeout_s: how long a rank may keep the others waiting, e.g. by a slow disk.
        """
        limit = datetime.timedelta(seconds=timeout_s)
        ranks = list(members) if members is not None else None
        loop, behind = (dist.new_group(ranks, timeout=limit, backend="gloo") for _ in range(2))
        assert loop is not None
        assert behind is not None
        return cls(dist.get_rank(loop), dist.get_world_size(loop), Gloo(loop), Gloo(behind))

    @classmethod
    def alone(cls) -> Ranks:
        """One process that saves and loads by itself."""
        return cls(0, 1, Alone(), Alone())


def _told(failed: Mapping[int, Mapping[str, str]]) -> CheckpointError:
    (_, first), *_ = failed.items()
    ranks = " and ".join(map(str, failed))
    return CheckpointError(
        f"rank{'s' if len(failed) > 1 else ''} {ranks}, {first['where']}",
        expected=first["expected"],
        found=first["found"],
        fix=first["fix"],
    )
