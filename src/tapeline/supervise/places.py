"""The places of this machine that a run's ranks are started on: which are there, fit and trusted.

A place is a slot of the machine: one device, or one share of it. Covers choosing slots for an
attempt, and counting what happened on one against it. Does not cover when to move.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tapeline.clock import Clock
from tapeline.config import TrainingConfig
from tapeline.errors import RunError
from tapeline.supervise.alerts import Alerts
from tapeline.supervise.elastic import Ranks, choose, heaviest
from tapeline.supervise.quarantine import Quarantine


@dataclass(slots=True)
class Places:
    """The places of one run.

    Args:
        ranks: how many are asked for.
        training: what decides on how many it can be trained; None allows any number.
        quarantine: places that are left out.
        health: a shell command that says by exit code 0 that TAPELINE_SLOT can be used.
        alerts: who is told.
        clock: for what is in quarantine now.

    Attributes:
        host: this machine's name.
    """

    ranks: Ranks
    training: TrainingConfig | None
    quarantine: Quarantine
    health: str | None
    alerts: Alerts
    clock: Clock
    host: str = field(init=False, default_factory=lambda: host_name(os.environ))

    def choose(self) -> list[int]:
        """Slots for the next attempt; none as long as too few are fit.

        Raises:
            RunError: the configuration can't be trained on any number that is asked for.
        """
        if slots := choose(self._usable(), self.ranks, self.training):
            return slots
        healthy = [slot for slot in range(self.ranks.most) if self._healthy(slot)]
        if slots := choose(healthy, self.ranks, self.training):
            out = ", ".join(self.quarantine.out(self.clock.wall_ns()))
            self.alerts.send("degraded", f"{out} used despite quarantine: the rest is too few")
            return slots
        if len(healthy) == self.ranks.most:
            raise RunError(
                "--ranks",
                expected="a number of ranks that the configuration can be trained on",
                found=f"{self.ranks.least}:{self.ranks.most}",
                fix="See training.lanes, training.batch and training.accumulate",
            )
        fit = f"{len(healthy)} of {self.ranks.most} places are fit by --health"
        self.alerts.send("unhealthy", f"{fit}: waits until there are enough")
        return []

    def more_than(self, number: int) -> bool:
        """Whether an attempt could have more ranks than so many."""
        return len(choose(self._usable(), self.ranks, self.training)) > number

    def failed(self, name: str, reason: str) -> None:
        """Count a failure against a place, of this machine or another."""
        if self.quarantine.failed(name, reason, self.clock.wall_ns()):
            self._tell(name, reason)

    def evict(self, slot: int, number: int, times: float, reason: str) -> bool:
        """Put a slow slot in quarantine, unless steps would take even longer without it.

        Args:
            slot: which.
            number: ranks there are now.
            times: how many times as long as another it takes for as much.
            reason: in words.

        Returns:
            Whether it was.
        """
        left = choose([s for s in self._usable() if s != slot], self.ranks, self.training)
        if not left:
            return False
        heavier = heaviest(len(left), self.training) / heaviest(number, self.training)
        if times <= heavier:
            return False
        self.quarantine.put(self._name(slot), reason, self.clock.wall_ns())
        self._tell(self._name(slot), reason)
        return True

    def _usable(self) -> list[int]:
        out = self.quarantine.out(self.clock.wall_ns())
        slots = range(self.ranks.most)
        return [s for s in slots if self._name(s) not in out and self._healthy(s)]

    def _tell(self, name: str, reason: str) -> None:
        self.alerts.send("quarantine", f"{name} is in quarantine: {reason}")

    def _name(self, slot: int) -> str:
        return f"{self.host}:{slot}"

    def _healthy(self, slot: int) -> bool:
        if self.health is None:
            return True
        environment = {**os.environ, "TAPELINE_SLOT": str(slot)}
        done = subprocess.run(
            self.health, shell=True, env=environment, stdout=subprocess.DEVNULL, check=False
        )
        return done.returncode == 0


def host_name(environment: Mapping[str, str]) -> str:
    """This machine's name, as its scheduler knows it: Slurm's, the node's of a pod, or its own."""
    names = (environment.get(key) for key in ("SLURMD_NODENAME", "NODE_NAME"))
    return next((name for name in names if name), socket.gethostname())


def devices(slots: list[int], environment: Mapping[str, str]) -> dict[str, str]:
    """Which devices the ranks see: those of the slots, where there are any."""
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    there = sorted(int(path.name[6:]) for path in Path("/dev").glob("nvidia[0-9]*"))
    found = listed.split(",") if listed else [str(number) for number in there]
    if len(found) <= max(slots):
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(found[slot] for slot in slots)}
