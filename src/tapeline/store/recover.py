"""What a writer that was killed left beside the shards of a format.

Covers: putting back the shards that a killed replacement had moved aside, and deleting the rest.
Does not cover leftovers inside the folder (the formats' `Writer`s), nor stores behind a URL, where
nothing is renamed.

A replacement is written aside; then the old folder is moved aside and the new one moved in. So that
one killed in between can be told from one killed earlier, the old folder is marked before.
"""

from __future__ import annotations

import contextlib
import shutil

from tapeline.files import fsync_path
from tapeline.store.layout import INDEX
from tapeline.store.place import Folder, Place

_MARK = "replaced"


def mark_replaced(place: Folder) -> None:
    """Say that these shards are about to be moved aside, if they are whole ones."""
    if place.has(INDEX):
        place.commit(_MARK, b"")


def put_back(place: Place) -> None:
    """If the shards are gone and lie aside, put them back; nothing if that isn't allowed."""
    if isinstance(place, Folder) and not place.folder.exists() and place.leftovers():
        with contextlib.suppress(OSError), place.locked():
            _put_back(place)


def recover(place: Place) -> None:
    """Put back what belongs here, delete what else lies aside: before a write, under the lock."""
    if isinstance(place, Folder):
        _put_back(place)
        for path in place.leftovers():
            shutil.rmtree(path, ignore_errors=True)


def _put_back(place: Folder) -> None:
    if place.folder.exists():  # a replacement has ended while this one waited for the lock
        return
    for path in place.leftovers():
        if (path / _MARK).exists() and (path / INDEX).exists():
            path.rename(place.folder)
            place.remove([_MARK])
            fsync_path(place.folder.parent)
            return
