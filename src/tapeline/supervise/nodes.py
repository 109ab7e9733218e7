"""The machines of one run: each has a supervisor and as many ranks; all start the same attempts.

They agree by small files in the run's folder, which all of them see; node 0 leads:

    attempt-0003/begin.json    by node 0: where the ranks meet, and how they begin
    attempt-0003/node-1.json   by node 1: it has come; then how its ranks ended
    attempt-0003/decided.json  by node 0: no attempt follows, and why

Nobody starts ranks before all have come, and who comes has ended what was left of the attempt
before. A machine that is lost is noticed by the ranks of the others, which lose their connections
to it or wait for it; the run goes on when its supervisor is started again, which is the
scheduler's part. Does not cover going on with fewer machines.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tapeline.errors import RunError
from tapeline.supervise.history import History
from tapeline.supervise.processes import publish, published

_POLL_S = 0.05
_LOST_S = 5.0
_SAID_S = 30.0  # of waiting, until it is told for what
_NUMBER = ("SLURM_STEP_NUM_NODES", "PET_NNODES")
_INDEX = ("SLURM_NODEID", "PET_NODE_RANK", "JOB_COMPLETION_INDEX")


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of a run.

    Attributes:
        index: from 0, which leads.
        number: of machines.
        address: by which the others reach node 0.
    """

    index: int = 0
    number: int = 1
    address: str = "127.0.0.1"

    @classmethod
    def of(
        cls,
        environment: Mapping[str, str],
        *,
        number: int | None = None,
        index: int | None = None,
        address: str | None = None,
    ) -> Node:
        """What is given, and else what the scheduler says: a step of Slurm's, or Kubernetes.

        Raises:
            RunError: that is no machine of so many.
        """
        number = _first(environment, _NUMBER, 1) if number is None else number
        if number == 1 and index:
            raise RunError(
                "--node",
                expected="the number of machines beside it",
                found=f"{index} alone",
                fix="Give --nodes too",
            )
        if number == 1:
            return cls()
        index = _first(environment, _INDEX, -1) if index is None else index
        if not 0 <= index < number:
            raise RunError(
                "--node",
                expected=f"which of the {number} nodes this is, from 0 to {number - 1}",
                found="nothing" if index == -1 else str(index),
                fix=f"Give --node, or set one of {', '.join(_INDEX)}",
            )
        return cls(index, number, address or environment.get("MASTER_ADDR") or socket.gethostname())


@dataclass(frozen=True, slots=True)
class Share:
    """The ranks of an attempt that this machine starts, as many as every other.

    Attributes:
        num_local: how many.
        node: this machine.
        port: on which rank 0 meets the others.
    """

    num_local: int
    node: Node = Node()
    port: int = 0

    @property
    def num_ranks(self) -> int:
        """Of the attempt."""
        return self.num_local * self.node.number

    @property
    def ranks(self) -> range:
        """Of this machine."""
        first = self.node.index * self.num_local
        return range(first, first + self.num_local)


@dataclass(frozen=True, slots=True)
class Begin:
    """An attempt that has been agreed on.

    Attributes:
        number: of the attempt.
        folder: of it.
        share: this machine's.
        resumes: the run has begun before.
    """

    number: int
    folder: Path
    share: Share
    resumes: bool


@dataclass(slots=True)
class Nodes:
    """This machine among those of a run.

    Args:
        node: which.
        history: of the run.
        host: its name.
        stopped: whether it was told to stop.
        say: told what is waited for.
    """

    node: Node
    history: History
    host: str
    stopped: Callable[[], bool]
    say: Callable[[str], None]
    _ports: set[int] = field(init=False, default_factory=set)
    _last: int = field(init=False, default=0)

    @property
    def leads(self) -> bool:
        """Whether this is node 0."""
        return self.node.index == 0

    def begin(self, num_local: int) -> Begin | None:
        """The next attempt, once all have come; None if there is none, or told to stop."""
        if self.decided():
            return None
        folder = self._new() if self.leads else self._wait(self._found, "node 0 to begin")
        if folder is None:
            return None
        self._last = _number(folder)
        agreed = published(folder / "begin.json") or {}
        publish(self._file(folder, self.node.index), {"host": self.host})
        if not self._wait(lambda: not self._missing(folder) or None, "every node to come"):
            return None
        node = Node(self.node.index, self.node.number, agreed["address"])
        share = Share(num_local, node, agreed["port"])
        return Begin(self._last, folder, share, agreed["resumes"])

    def end(self, folder: Path, how: str) -> None:
        """Tell the others how the ranks of this machine ended, and hear of theirs.

        A machine that says nothing for a while is taken for lost.
        """
        publish(self._file(folder, self.node.index), {"host": self.host, "ended": how})
        deadline = time.monotonic() + _LOST_S
        while not all(self.others(folder)) and time.monotonic() < deadline and not self.stopped():
            time.sleep(_POLL_S)

    def others(self, folder: Path) -> list[str | None]:
        """How the ranks of every other machine ended; None while they run."""
        others = (n for n in range(self.node.number) if n != self.node.index)
        return [(published(self._file(folder, n)) or {}).get("ended") for n in others]

    def host_of(self, folder: Path, node: int) -> str:
        """The name of a machine that has come to an attempt."""
        return str((published(self._file(folder, node)) or {})["host"])

    def decide(self, folder: Path, exit_code: int, reason: str) -> None:
        """As node 0: tell the others, if there are any, that no attempt follows."""
        if self.node.number > 1:
            publish(folder / "decided.json", {"exit_code": exit_code, "reason": reason})

    def decided(self) -> tuple[int, str] | None:
        """Exit code and reason, if node 0 has ended the run; what it said to others is old."""
        newest = self._newest()
        said = published(newest / "decided.json") if newest else None
        if newest and said and (_number(newest) == self._last or not said["exit_code"]):
            return said["exit_code"], said["reason"]
        return None

    def _new(self) -> Path:
        _, folder = self.history.next_attempt()
        begin = {
            "address": self.node.address,
            "port": self._free_port(),
            "resumes": self.history.begun(),
        }
        publish(folder / "begin.json", begin)
        return folder

    def _found(self) -> Path | None:
        """An attempt that waits for this machine."""
        newest = self._newest()
        if newest is None or _number(newest) <= self._last or not (newest / "begin.json").exists():
            return None
        if self._file(newest, self.node.index).exists():  # by a supervisor here that is no more
            publish(self._file(newest, self.node.index), {"host": self.host, "ended": "killed"})
            self._last = _number(newest)
            return None
        return newest

    def _wait(self, look: Callable[[], Any], what: str) -> Any:
        began_s, said = time.monotonic(), False
        while (found := look()) is None and not self.stopped():
            if self.decided():
                return None
            if not said and time.monotonic() - began_s > _SAID_S:
                said = True
                self.say(f"waits for {what}")
            time.sleep(_POLL_S)
        return found

    def _missing(self, folder: Path) -> list[int]:
        return [n for n in range(self.node.number) if not self._file(folder, n).exists()]

    def _newest(self) -> Path | None:
        return max(self.history.folder.glob("attempt-*"), default=None)

    def _file(self, folder: Path, node: int) -> Path:
        return folder / f"node-{node}.json"

    def _free_port(self) -> int:
        """A port that no attempt before has had: reuse reaches whoever is left of it."""
        while True:
            with socket.socket() as free:
                free.bind(("", 0))
                port: int = free.getsockname()[1]
            if port not in self._ports:
                self._ports.add(port)
                return port


def _number(folder: Path) -> int:
    return int(folder.name.partition("-")[2])


def _first(environment: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    for name in names:
        if (text := environment.get(name)) and text.isdigit():
            return int(text)
    return default
