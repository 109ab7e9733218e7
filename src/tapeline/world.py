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
            RunError: a value is not a number, or the rank is outside the world.
        """
        try:
            rank, size, local_rank = (
                int(environment.get(name, default))
                for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
            )
        except ValueError as error:
            raise RunError(
                "RANK, WORLD_SIZE, LOCAL_RANK",
                expected="whole numbers, as torchrun sets them",
                found=str(error),
                fix="Start the job with torchrun, or unset the three variables",
            ) from None
        if not 0 <= rank < size:
            raise RunError(
                "RANK",
                expected=f"0 to {size - 1} in a world of {size}",
                found=str(rank),
                fix="Start the job with torchrun, or unset RANK and WORLD_SIZE",
            )
        return cls(rank, size, local_rank)
