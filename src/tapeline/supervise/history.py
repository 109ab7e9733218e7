"""What a supervisor keeps of a run in `supervise/` of its folder, over its own lives.

    supervise/history.jsonl    a line for each attempt that ended
    supervise/attempt-0001/    output, stacks and ends of its ranks
    supervise/quarantine.json  see `quarantine`

Does not cover the run's own record: of that, the end of an attempt that couldn't say it itself is
added to `attempts.jsonl`.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tapeline.clock import utc
from tapeline.errors import RunError
from tapeline.files import Journal, read_journal
from tapeline.supervise.policy import Ended


class History:
    """The attempts of a run that a supervisor has seen end.

    Args:
        run: folder of the run.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.folder = run / "supervise"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._path = self.folder / "history.jsonl"
        self.ended = [
            Ended(**{name: line[name] for name in Ended.__dataclass_fields__})
            for line in read_journal(self._path)
        ]

    @contextlib.contextmanager
    def locked(self, node: int) -> Iterator[None]:
        """Be the run's one supervisor on a machine; the lock goes with the process.

        Raises:
            RunError: there is another.
        """
        with (self.folder / f".lock-{node}").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(
                    self.run,
                    expected="a run that no other supervisor looks after",
                    found="one that is supervised now",
                    fix="Wait until that supervisor ends, or send it SIGTERM",
                ) from None
            yield

    def next_attempt(self) -> tuple[int, Path]:
        """The number of the next attempt, and its new folder."""
        taken = [int(path.name.partition("-")[2]) for path in self.folder.glob("attempt-*")]
        number = max(taken, default=0) + 1
        folder = self.folder / f"attempt-{number:04d}"
        folder.mkdir()
        return number, folder

    def add(self, ended: Ended, **more: Any) -> None:
        """Keep how an attempt ended; on the disk before this returns."""
        self.ended.append(ended)
        with Journal(self._path) as journal:
            journal.append({**asdict(ended), **more})

    def committed(self) -> int:
        """The highest step that is saved, or was once; 0 for none."""
        manifests = (self.run / "checkpoints").glob("step-*/manifest.json")
        here = [int(path.parent.name.partition("-")[2]) for path in manifests]
        return max([*here, *(ended.committed for ended in self.ended)], default=0)

    def begun(self) -> bool:
        """Whether there is a run to go on with."""
        return (self.run / "run.json").exists()

    def note_end(
        self,
        *,
        after: int,
        how: str,
        step: int | None,
        evidence: str,
        wall_ns: int,
        elsewhere: bool,
    ) -> None:
        """Add to the run's record how its last life ended, unless it said so itself.

        Args:
            after: lives there were before; without another, none has ended.
            how, step, evidence, wall_ns: of the end.
            elsewhere: another rank than 0 failed first. Only rank 0 writes into the record, and
                what it knows of such an end is that a connection was lost.
        """
        life = self._last_life()
        said = life.get("how")
        if self.num_lives() <= after or (said and not (said == "failed" and elsewhere)):
            return
        line = {"attempt": life["attempt"], "how": how, "evidence": evidence}
        if not said:
            line["ended"] = utc(wall_ns)
        with Journal(self.run / "attempts.jsonl") as journal:
            journal.append(line if said or step is None else {**line, "step": step})

    def num_lives(self) -> int:
        """Lives of the run that have begun to train; an attempt may end before that."""
        return int(self._last_life().get("attempt", 0))

    def stopped(self, *, after: int) -> str | None:
        """Why a life after so many ended by the criteria of its configuration, if one did."""
        life = self._last_life()
        ended = self.num_lives() > after and life.get("how") == "stopped"
        return life["evidence"] if ended else None

    def _last_life(self) -> dict[str, Any]:
        """What the run's record says of it; nothing before the first."""
        lives: dict[int, dict[str, Any]] = {}
        for line in read_journal(self.run / "attempts.jsonl"):
            lives.setdefault(line["attempt"], {}).update(line)
        return lives[max(lives)] if lives else {}
