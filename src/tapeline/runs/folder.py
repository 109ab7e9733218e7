"""The run folder: where things are, and how they are read and written.

    <run>/
      run.json              the record
      attempts.jsonl        a start and an end for each life of the run
      attempts/1.json       what each life ran in: code, environment, machine, and its origin
      metrics/rank-0.jsonl  losses and validations, by attempt and step
      checkpoints/step-…/   written by `checkpoint/`
      supervise/            written by `supervise/`, where a supervisor restarts the run

Plain files, to be read with anything. A life without an end was killed; the next one says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tapeline.clock import Clock, SystemClock, utc
from tapeline.errors import RunError
from tapeline.files import Journal, atomic_write, read_journal, xxh3_json
from tapeline.runs.metrics import with_nan
from tapeline.runs.record import SURROUNDINGS, surroundings
from tapeline.runs.secrecy import redacted

RECORD = "run.json"


class RunFolder:
    """One run on disk.

    Args:
        path: the folder; `create` makes it, everything else needs it to be there.
        clock: for the times of attempts; by default the machine's.
    """

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        self.path = path
        self.attempts_path = path / "attempts.jsonl"
        self.checkpoints_path = path / "checkpoints"
        self._clock = clock or SystemClock()
        self._taken: dict[str, Any] = {}  # what `create` has just been told of this process

    def attempt_path(self, number: int) -> Path:
        """The record of one life."""
        return self.path / "attempts" / f"{number}.json"

    def metrics_path(self, rank: int) -> Path:
        """The metrics journal of one rank."""
        return self.path / "metrics" / f"rank-{rank}.jsonl"

    def errors_path(self, rank: int) -> Path:
        """What a rank wrote down when it raised: a line of JSON and a traceback."""
        return self.path / "errors" / f"rank-{rank}.txt"

    @property
    def findings_path(self) -> Path:
        """The journal of what watchers found."""
        return self.path / "findings.jsonl"

    @property
    def intervals_path(self) -> Path:
        """The journal of intervals between saves that the run chose itself."""
        return self.path / "intervals.jsonl"

    def check_free(self) -> None:
        """Raise a `RunError` if something is here already."""
        if self.path.exists() and (not self.path.is_dir() or self._occupied()):
            raise RunError(
                self.path,
                expected="a place for a new run",
                found="files already there",
                fix=f"Resume it with `tapeline resume {self.path}`, or choose another folder",
            )

    def create(self, record: dict[str, Any]) -> None:
        """Make the folder and write the record, with a hash over itself.

        Raises:
            RunError: something is here already.
        """
        self.check_free()
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            atomic_write(
                self.path / RECORD, json.dumps({**record, "xxh3": _digest(record)}, indent=2)
            )
        except OSError:
            if not any(self.path.iterdir()):
                self.path.rmdir()  # a folder without a record is in the way of the next try
            raise
        self._taken = {key: record[key] for key in SURROUNDINGS if key in record}

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run's one lock; it goes with the process, however that ends.

        Raises:
            RunError: another process holds it.
        """
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(
                    self.path,
                    expected="a run that no other process trains",
                    found="one that is being trained now",
                    fix="Wait until that process ends, or stop it",
                ) from None
            yield

    def _occupied(self) -> bool:
        # What a supervisor notes before the run begins is no run.
        return any(file.name != "supervise" for file in self.path.iterdir())

    def record(self) -> dict[str, Any]:
        """The record.

        Raises:
            RunError: the folder holds none, or a damaged one.
        """
        path = self.path / RECORD
        try:
            values: dict[str, Any] = json.loads(path.read_text())
            if values["format"] != "tapeline run" or values["version"] != 1:
                raise ValueError
            written = values.pop("xxh3")
        except OSError as error:
            raise RunError(
                self.path,
                expected=f"the folder of a run, with {RECORD}",
                found=error.strerror or "none",
                fix="Give the folder that `tapeline train` made"
                + (
                    "; of a ledger alone, `tapeline report`"
                    if (self.path / "ledger").exists()
                    else ""
                ),
            ) from None
        except (ValueError, KeyError, TypeError):
            raise RunError(
                path,
                expected="the record of a run, version 1",
                found="something else",
                fix="Restore the file, or start the run anew",
            ) from None
        if written != _digest(values):
            raise RunError(
                path,
                expected="the record as it was written, by its hash",
                found="a changed one",
                fix="Undo the change; settings that may change are given with --set",
            )
        return values

    def attempts(self) -> list[dict[str, Any]]:
        """The lives of the run in order: each start with its end, if it had one."""
        lives: dict[int, dict[str, Any]] = {}
        for line in read_journal(self.attempts_path):
            lives.setdefault(line["attempt"], {}).update(line)
        return list(lives.values())

    def attempt_record(self, number: int) -> dict[str, Any] | None:
        """What a life ran in, and where it came from; None where that wasn't recorded."""
        try:
            found = json.loads(self.attempt_path(number).read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def begin_attempt(
        self, *, from_step: int, world_size: int, said: Mapping[str, Any] | None = None
    ) -> int:
        """Note that a life begins and what it runs in; the one before, without an end, was killed.

        Args:
            from_step: steps done before; the local checkpoint of that step is its origin.
            world_size: its ranks.
            said: more to record of this life, such as its configuration and contract.

        Returns:
            The attempt's number, from 1.
        """
        lives = self.attempts()
        number = len(lives) + 1
        self._record_attempt(number, from_step, said or {})
        with Journal(self.attempts_path) as journal:
            if lives and "how" not in lives[-1]:
                seen = max((step for step, _ in self._steps(number - 1)), default=None)
                evidence = "no end was recorded; " + (
                    "no step either" if seen is None else f"its last recorded step is {seen}"
                )
                journal.append({"attempt": number - 1, "how": "killed", "evidence": evidence})
            journal.append(
                {
                    "attempt": number,
                    "started": utc(self._clock.wall_ns()),
                    "host": socket.gethostname(),
                    "pid": os.getpid(),
                    "world_size": world_size,
                    "from_step": from_step,
                }
            )
        return number

    def _record_attempt(self, number: int, from_step: int, said: Mapping[str, Any]) -> None:
        folder = self.record().get("config", {}).get("model", {}).get("folder")
        taken, self._taken = self._taken or surroundings(folder), {}
        origin = self.origin(from_step) if from_step else None
        content = {"attempt": number, "origin": origin, **taken, **redacted(said)}
        self.attempt_path(number).parent.mkdir(exist_ok=True)
        atomic_write(self.attempt_path(number), json.dumps(content, indent=1))

    def origin(self, step: int) -> dict[str, Any]:
        """What the manifest of the local checkpoint of a step says it is; bare if there is none.

        Returns:
            `step`; and `run`, `attempt`, `contract` and the hashes of its `files`.
        """
        path = self.checkpoints_path / f"step-{step:08d}" / "manifest.json"
        try:
            manifest = json.loads(path.read_text())
            about = manifest["metadata"]
            files = {name: file["xxh3_128"] for name, file in manifest["files"].items()}
        except (OSError, ValueError, KeyError, TypeError):
            return {"step": step}
        told = {key: about.get(key) for key in ("run", "attempt", "contract")}
        return {"step": step, **told, "files": files}

    def end_attempt(self, number: int, *, how: str, step: int, evidence: str) -> None:
        """Note how a life ended, in a word of `attempt.ending`, or "finished"."""
        with Journal(self.attempts_path) as journal:
            journal.append(
                {
                    "attempt": number,
                    "ended": utc(self._clock.wall_ns()),
                    "how": how,
                    "step": step,
                    "evidence": evidence,
                }
            )

    def intervals(self) -> list[dict[str, Any]]:
        """Each interval that the run chose itself, and what it was chosen from."""
        return read_journal(self.intervals_path)

    def losses(self) -> dict[int, float]:
        """The loss of each step, counted from 1; of a step done twice, the later one."""
        return dict(sorted(self._steps(None), key=lambda found: found[0]))

    def validations(self) -> dict[int, dict[str, Any]]:
        """The validation figures by step; of a step validated twice, the later ones."""
        lines = read_journal(self.metrics_path(0))
        found = {
            line["step"]: with_nan(line["validation"]) for line in lines if "validation" in line
        }
        return dict(sorted(found.items()))

    def _steps(self, attempt: int | None) -> list[tuple[int, float]]:
        """(step, loss) as journalled, in the order of writing; of one attempt, or of all."""
        return [
            (line["step"] - len(line["losses"]) + 1 + i, float(loss))  # "nan" is one too
            for line in read_journal(self.metrics_path(0))
            if "losses" in line and attempt in (None, line["attempt"])
            for i, loss in enumerate(line["losses"])
        ]


def _digest(record: dict[str, Any]) -> str:
    as_read = json.loads(json.dumps(record))  # tuples are lists then, and keys are text
    return xxh3_json(as_read)
