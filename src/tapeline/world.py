"""Which rank this process is, of how many: read from the environment that torchrun sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tapeline.errors import RunError


@dataclass(frozen=True, slots=True)
class World:
    """The place of one process among all."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> World:
        """Read RANK, WORLD_SIZE and LOCAL_RANK; alone where they are not set.

        Raises:
            RunError: a value is not a whole number, or a rank is outside the world.
        """
        size = _whole(environment, "WORLD_SIZE", default=1)
        if size < 1:
            raise _wrong("WORLD_SIZE", "a whole number from 1", str(size))
        ranks = {name: _whole(environment, name, default=0) for name in ("RANK", "LOCAL_RANK")}
        for name, rank in ranks.items():
            if not 0 <= rank < size:
                raise _wrong(name, f"0 to {size - 1} in a world of {size}", str(rank))
        return cls(ranks["RANK"], size, ranks["LOCAL_RANK"])


def _whole(environment: Mapping[str, str], name: str, *, default: int) -> int:
    text = environment.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise _wrong(name, "a whole number", repr(text)) from None


def _wrong(name: str, expected: str, found: str) -> RunError:
    return RunError(
        f"environment variable {name}",
        expected=expected,
        found=found,
        fix="Start the job with torchrun, or unset RANK, WORLD_SIZE and LOCAL_RANK",
    )
