"""A store opened without reading its rows: what is in it, and one session at a time."""

from __future__ import annotations

from collections.abc import Iterator

from tapeline.errors import StoreError
from tapeline.session import Session
from tapeline.store.formats import READERS, Reader
from tapeline.store.layout import EVERY_FORMAT, INDEX, StoreIndex, check_format
from tapeline.store.place import Place, Root, is_remote, place_of
from tapeline.store.recover import put_back


def open_reader(root: Root, fmt: str | None = None) -> Reader:
    """A reader of one format of a store, by default the fastest that is there.

    Raises:
        StoreError: there is no such store, its index is damaged, or a file's size disagrees.
    """
    place, fmt = _find(root, fmt)
    index = StoreIndex.load(place, fmt)
    while True:
        try:
            return READERS[fmt](place, index)
        except StoreError:
            # An append or a replacement may have ended between the index and the files.
            again = StoreIndex.load(place, fmt)
            if again == index:
                raise
            index = again


def stream_sessions(root: Root, fmt: str | None = None) -> Iterator[Session]:
    """All sessions of a store in order, one in memory at a time, whatever the store's size.

    Raises:
        StoreError: as `Shards` does; of a damaged session, when its turn comes.
    """
    reader = open_reader(root, fmt)
    return (reader.session(number) for number in range(len(reader.index.sessions)))


def _find(root: Root, fmt: str | None) -> tuple[Place, str]:
    """The place of the wanted format, or of the fastest one there is."""
    if fmt is not None:
        check_format(fmt)
    places = {
        name: place_of(root, name) for name in (("zarr",) if is_remote(root) else EVERY_FORMAT)
    }
    for place in places.values():
        put_back(place)
    here = [name for name, place in places.items() if place.has(INDEX)]
    wanted = tuple(places) if fmt is None else (fmt,)
    for name in here:
        if name in wanted:
            return places[name], name
    raise StoreError(
        root,
        expected=f"a store in {' or '.join(wanted)} format",
        found=f"one in {', '.join(here)}" if here else "no store",
        fix=(
            f"Convert it with `tapeline store convert {root} --to {fmt}`"
            if here
            else "Make one with `tapeline ingest` or `write_shards`"
        ),
    )
