"""The one journal of a search: entries in one order that every worker sees, on any of its machines.

It is an Optuna study of its own, in a journal file or a database: a trial of that study is an
entry, and its number the entry's place, which the storage hands out. Everything a search decides
follows from the entries in their order (`replay`); no entry is ever changed. Full runs are entries
with a value, so that Optuna's own tools show them.

Beside it each worker keeps a count that moves while it lives, as an attribute of the study: signs
of life are no decisions, and no clock is ever compared with another machine's.
"""

from __future__ import annotations

import fcntl
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState, create_trial

from tapeline.errors import RunError
from tapeline.files import Journal
from tapeline.runs.secrecy import looks_secret, without_credentials

Entry = dict[str, Any]
_ENTRY = "entry"
JOURNAL = "journal.log"


class _File(JournalFileBackend):
    """A journal file whose lock goes with its process, and which a crash can't spoil.

    Optuna's own locks outlive a killed process, and it appends to a line that a crash tore.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def append_logs(self, logs: list[Entry]) -> None:
        """Append lines, durably; one process at a time."""
        with self._path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with Journal(self._path) as journal:
                journal.append(*logs)


def open_storage(url: str | None, folder: Path) -> BaseStorage:
    """A database by its URL, or the journal file of a search's folder.

    Raises:
        RunError: the database can't be reached.
    """
    if url is None:
        return JournalStorage(_File(folder / JOURNAL))
    shown = without_password(url)
    from sqlalchemy.pool import NullPool  # half a second that only databases need

    try:
        # No pool: a worker needs a connection for some milliseconds of each minute.
        return RDBStorage(url, engine_kwargs={"poolclass": NullPool})
    except Exception as error:  # whatever the driver raises, or that it isn't there
        raise RunError(
            shown,
            expected="a database that answers",
            found=without_credentials(str(error).strip().splitlines()[0]),
            fix="Check the URL, such as postgresql+psycopg://host/name, and that it runs",
        ) from None


def without_password(url: str) -> str:
    """The URL of a database as it may be written down; who reads it has the password elsewhere.

    Raises:
        RunError: it is no URL.
    """
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url)._replace(password=None)  # `set` takes None for unchanged
    except (ArgumentError, ValueError):  # the latter of a port that is none
        raise RunError(
            "--storage",
            expected="the URL of a database, such as postgresql+psycopg://host/name",
            found="something else",
            fix="Correct it; without --storage the journal is a file in the search's folder",
        ) from None
    secret = [key for key in parsed.query if looks_secret(key)]
    return parsed.difference_update_query(secret).render_as_string()


def begin_journal(
    storage: BaseStorage, name: str, direction: Literal["minimize", "maximize"]
) -> None:
    """Make the journal of a new search.

    Args:
        storage: what all workers will share.
        name: of the search, in that storage.
        direction: in which its metric is better.
    """
    optuna.create_study(storage=storage, study_name=name, direction=direction)


class SearchJournal:
    """Append entries, and read them in their order.

    Args:
        name: of the search, in that storage.

    Raises:
        RunError: that storage doesn't hold it.
    """

    def __init__(self, storage: BaseStorage, name: str) -> None:
        try:
            self._study = optuna.load_study(storage=storage, study_name=name)
        except KeyError:
            raise RunError(
                f"the journal of {name}",
                expected="the storage that the search began with",
                found="another one",
                fix="Give --storage as it was then; without one it is a file in the folder",
            ) from None
        self._read = 0

    def append(self, entry: Entry, **shown: Any) -> str:
        """Put an entry at the end.

        Args:
            entry: what JSON can hold.
            shown: `value`, `params` and `distributions`, for Optuna's tools to show.

        Returns:
            A token that the entry carries.
        """
        token = uuid.uuid4().hex
        text = json.dumps({**entry, "token": token}, allow_nan=False)
        state = TrialState.COMPLETE if shown else TrialState.PRUNED
        self._study.add_trial(create_trial(state=state, user_attrs={_ENTRY: text}, **shown))
        return token

    def new_entries(self) -> Iterator[tuple[int, Entry]]:
        """(place, entry) of what hasn't been read yet; one that isn't taken is given again."""
        for trial in self._study.get_trials(deepcopy=False)[self._read :]:
            self._read += 1
            yield trial.number, json.loads(trial.user_attrs[_ENTRY])

    def show_life(self, worker: str, count: int) -> None:
        """Move a worker's count."""
        self._study.set_user_attr(f"alive {worker}", count)

    def lives(self) -> dict[str, int]:
        """The counts, by worker."""
        found = self._study.user_attrs
        return {
            key.removeprefix("alive "): int(value)
            for key, value in found.items()
            if key.startswith("alive ")
        }
