"""A search's folder: what it is made from, frozen when it began, and where its parts lie.

<search>/
  search.json    the settings, the base as resolved, and what the search is called in its storage
  base.toml      a copy of the base's file, which trials are started from
  journal.log    every entry, unless a database holds them
  trials/N       a run for each trial
  finals/N/      a run for each fresh seed of a picked trial
  workers/       what workers said
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tapeline.config import RunConfig
from tapeline.errors import RunError
from tapeline.files import atomic_write
from tapeline.search.journal import (
    JOURNAL,
    SearchJournal,
    begin_journal,
    open_storage,
    without_password,
)
from tapeline.search.schedule import Rules
from tapeline.search.space import SearchConfig

ABOUT, BASE = "search.json", "base.toml"
_MAY_CHANGE = {"workers", "lease_s", "base"}


@dataclass(frozen=True, slots=True)
class SearchFolder:
    """One search on disk.

    Attributes:
        path: the folder, which all workers of all machines see.
        base: what trials are laid over.
        rules: what the schedule goes by.
        identity: what it is called in its storage.
        storage: URL of a database; None for a file in the folder.
    """

    path: Path
    config: SearchConfig
    base: RunConfig
    rules: Rules
    identity: str
    storage: str | None

    @classmethod
    def begin(cls, path: Path, config: SearchConfig, storage: str | None) -> Self:
        """Make the folder, or join the search that is there.

        Raises:
            ConfigError: the search or its base is wrong.
            RunError: another search is there, or its database can't be reached.
        """
        base = config.base_config()
        config.rules(base)
        identity = f"{config.name} {uuid.uuid4().hex[:12]}"
        about = {
            "format": "tapeline search",
            "version": 1,
            "id": identity,
            "settings": config.model_dump(mode="json"),
            "base": base.resolved(),
            "storage": storage and without_password(storage),
        }
        if not (path / ABOUT).exists():
            if path.exists() and any(_is_foreign(one.name) for one in path.iterdir()):
                raise RunError(
                    path,
                    expected="a place for a new search, or one that goes on",
                    found="other files",
                    fix="Choose another folder with --out",
                )
            # In this order: whoever joins finds a whole search, and an early crash leaves none.
            path.mkdir(parents=True, exist_ok=True)
            begin_journal(open_storage(storage, path), identity, config.direction)
            _write_once(path / ABOUT, json.dumps(about, indent=1))
        found = cls.open(path, storage)
        same = found.base == base and _identity(found.config) == _identity(config)
        if not same:
            raise RunError(
                path,
                expected="the search as it began",
                found="other settings in its file or its base",
                fix="Give the changed one another folder with --out, or undo the change",
            )
        if not found.base_file.exists():
            atomic_write(found.base_file, Path(config.base).read_bytes())
        return found

    @classmethod
    def open(cls, path: Path, storage: str | None = None) -> Self:
        """The search in a folder.

        Args:
            storage: URL of its database, where it needs a password, which isn't written down.

        Raises:
            RunError: there is none.
        """
        try:
            about: dict[str, Any] = json.loads((path / ABOUT).read_text())
            config = SearchConfig.from_mapping(about["settings"], ABOUT)
            base = RunConfig.from_mapping(about["base"], ABOUT)
            told = about["storage"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                path,
                expected=f"the folder of a search, with {ABOUT}",
                found="none" if isinstance(error, OSError) else "one that can't be read",
                fix="Give the folder that `tapeline search` made",
            ) from None
        return cls(path, config, base, config.rules(base), about["id"], storage or told)

    @property
    def base_file(self) -> Path:
        """What trials are started from."""
        return self.path / BASE

    def journal(self) -> SearchJournal:
        """The journal, read from its beginning.

        Raises:
            RunError: its database can't be reached, or isn't the one that it began with.
        """
        return SearchJournal(open_storage(self.storage, self.path), self.identity)


def _is_foreign(name: str) -> bool:
    """Whether a file isn't of a search that another command begins just now, or died beginning."""
    return not name.startswith((".", JOURNAL))


def _identity(config: SearchConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude=_MAY_CHANGE)


def _write_once(path: Path, text: str) -> None:
    """Write a file that wasn't there; of several machines at once, the first one's stays."""
    mine = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")
    atomic_write(mine, text)
    with contextlib.suppress(FileExistsError):
        os.link(mine, path)
    mine.unlink()
