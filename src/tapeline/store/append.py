"""Appending sessions to a store: the data first, then the index, replaced in one step.

A reader has the old index and the old rows, or the new index and all rows. A crash leaves the old
store and, behind or beside its data, leftovers that no index names; the next append goes over
them. Writers of one folder wait for each other; behind a URL the second is refused at its commit.
"""

from __future__ import annotations

import contextlib

from tapeline.session import as_session
from tapeline.store.formats import WRITERS
from tapeline.store.intake import Intake, NanPolicy
from tapeline.store.layout import StoreIndex, check_format
from tapeline.store.place import Root, place_of
from tapeline.store.recover import recover
from tapeline.store.write import (
    Sessions,
    check_unchanged,
    index_of,
    raw_index,
    write_unlocked,
)


def append_shards(sessions: Sessions, root: Root, fmt: str, *, nan: NanPolicy = "refuse") -> int:
    """Append sessions to the shards of one format at `root`; write them new if there are none.

    A session whose key the store holds with the same content is passed over, so that appending
    the same sessions again changes nothing. Plain arrays have no key: they are numbered on.

    Args:
        sessions: sessions, or plain arrays `[rows, columns]`; read one at a time.
        root: the store's folder, or with zarr a URL.
        fmt: the format, as `write_shards` takes it.
        nan: what to do with rows that aren't finite, as `write_shards` takes it.

    Returns:
        How many sessions were new.

    Raises:
        StoreError: a session doesn't fit those in the store, or the store holds another content
            under its key (both hashes are shown). None of the sessions is appended then.
    """
    check_format(fmt)
    place = place_of(root, fmt)
    place.check_writable()
    with place.locked():
        return append_unlocked(sessions, root, fmt, nan)


def append_unlocked(sessions: Sessions, root: Root, fmt: str, nan: NanPolicy) -> int:
    """What `append_shards` does once it holds the lock."""
    place = place_of(root, fmt)
    recover(place)
    before = raw_index(place)
    if before is None:
        write_unlocked(sessions, root, fmt, nan)
        return len(StoreIndex.load(place, fmt).sessions)
    index = StoreIndex.load(place, fmt)
    intake = Intake(nan, index)
    writer = None
    try:
        for value in sessions:
            admitted = intake.admit(as_session(value, len(intake.entries)))
            if admitted is None:
                continue
            if writer is None:
                writer = WRITERS[fmt](place, index)
            writer.add(len(intake.entries) - 1, *admitted)
        if writer is None:
            return 0
        writer.close()
        writer.sync()
        check_unchanged(place, before)
        index_of(fmt, intake, writer.files).save(place)
        writer.committed()
    except BaseException:
        if writer is not None:
            with contextlib.suppress(OSError):  # a full disk fails here once more
                writer.close()
            # The index as it is: the error may have come after it was replaced.
            writer.abandon(StoreIndex.load(place, fmt))
        raise
    return len(intake.entries) - len(index.sessions)
