"""Which contract a life of a run is under: the run's, unless something has changed since.

Covers: what is recorded of it, and what a resume finds changed. Does not cover what may change at
all: settings that decide the bits are part of the configuration's hash.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tapeline.attempt.parts import Parts
from tapeline.errors import TrainingError
from tapeline.training import Contract
from tapeline.training.determinism import determinism_record, differences
from tapeline.training.ranks import from_all


@dataclass(frozen=True, slots=True)
class Promise:
    """The contract of one life, and what it rests on.

    Attributes:
        contract: what holds.
        determinism: settings and versions that the bits depend on.
        world_size: the ranks of this life.
    """

    contract: Contract
    determinism: dict[str, Any]
    world_size: int

    @classmethod
    def of_new(cls, parts: Parts) -> Promise:
        """The promise that a run begins with; every rank must call it.

        Raises:
            TrainingError: some rank would compute other bits than rank 0; on every rank.
        """
        records = from_all(parts.world, determinism_record())
        for rank, record in enumerate(records):
            differing = [name for name, value in record.items() if value != records[0][name]]
            if differing:
                raise TrainingError(
                    f"rank {rank} of {parts.world.size}",
                    expected=", ".join(f"{n} {records[0][n]}" for n in differing)
                    + ", as on rank 0",
                    found=", ".join(f"{n} {record[n]}" for n in differing),
                    fix="Start all ranks alike, on one kind of processor",
                )
        return cls(parts.contract, records[0], parts.world.size)

    def kept(self, step: int, record: Mapping[str, Any], saved: Mapping[str, Any]) -> Promise:
        """This promise after a resume: given up, aloud, if something has changed.

        Args:
            step: where this life begins.
            record: of the run.
            saved: metadata of the checkpoint it begins from; empty at the run's beginning.
        """
        earlier = saved.get("contract", {})
        if earlier.get("scope") == "statistical":
            contract = Contract(**earlier)
        else:
            changed = differences(record["determinism"])
            if self.contract.scope == "at this world size":
                before = saved.get("world_size", self.world_size)
                if before != self.world_size:
                    changed["ranks"] = (before, self.world_size)
            if not changed:
                return self
            why = ", ".join(f"{name} {then} → {now}" for name, (then, now) in changed.items())
            contract = Contract.given_up(step, why)
        warnings.warn(
            f"This run no longer keeps its contract: {contract.text}. It goes on with other bits "
            "than it would have had.",
            RuntimeWarning,
            stacklevel=3,
        )
        return Promise(contract, self.determinism, self.world_size)

    def as_dict(self) -> dict[str, Any]:
        """What records and checkpoints say of it."""
        return {
            "contract": self.contract.as_dict(),
            "determinism": self.determinism,
            "world_size": self.world_size,
        }
