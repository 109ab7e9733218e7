"""A cache of stores on this machine: each one a store in mmap format, filled by appending to it.

Covers: fetching what is missing, hashes before use, the bound, processes that share the cache.
Does not cover how a session is fetched: the source's reader does.

An append commits with its index, so whatever ends a download (a kill, a lost server) leaves the
sessions committed so far and nothing half-written; the next open goes on from there. Sessions are
committed in groups, since each commit writes the whole index.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import xxhash

from tapeline.errors import StoreError
from tapeline.files import ASIDE
from tapeline.session import Session
from tapeline.store.formats import MappedReader, Reader, arrays_of, content_hash
from tapeline.store.layout import StoreIndex
from tapeline.store.place import Folder, locked
from tapeline.store.write import append_unlocked

COMMIT_BYTES = 64 << 20  # what an interrupted download loses at most, beside one session
_SUFFIX = ".cached"  # only folders named so are ever deleted


def cached_reader(source: Reader, cache: Path, cache_bytes: int | None) -> MappedReader:
    """The sessions of `source` as a mapped file in `cache`, complete.

    Raises:
        StoreError: a session differs from its hash or can't be fetched, or the bound is too small.
    """
    entry = cache / _name_of(source)
    with locked(entry):
        held = _held(entry, source.index)
        os.utime(entry)
        first = 0 if held is None else len(held.index.sessions)
        if held is not None and first == len(source.index.sessions):
            return held
        _make_room(source, entry, cache, cache_bytes)
        for group in _groups(source, first):
            append_unlocked((_checked(source, number) for number in group), entry, "mmap", "refuse")
        return _open(entry)


def _name_of(source: Reader) -> str:
    """A folder's name for a store: readable, and no other store's."""
    place = str(source.place)
    last = re.sub(r"[^A-Za-z0-9_-]+", "-", place.rstrip("/").split("/")[-2])
    return f"{last}-{xxhash.xxh3_64_hexdigest(place.encode())}{_SUFFIX}"


def _open(entry: Path) -> MappedReader:
    place = Folder(entry / "mmap")
    return MappedReader(place, StoreIndex.load(place, "mmap"))


def _held(entry: Path, wanted: StoreIndex) -> MappedReader | None:
    """What the cache has of a store; anything that can't be continued is deleted."""
    for leftover in entry.glob(f"{ASIDE}*"):  # of a process that was killed: the lock is held
        shutil.rmtree(leftover)
    with contextlib.suppress(StoreError):
        held = _open(entry)
        have = held.index
        begins = have.sessions == wanted.sessions[: len(have.sessions)]
        if begins and (have.columns, have.beside) == (wanted.columns, wanted.beside):
            return held
    shutil.rmtree(entry / "mmap", ignore_errors=True)  # whoever has it mapped keeps it
    return None


def _groups(source: Reader, first: int) -> Iterator[list[int]]:
    group: list[int] = []
    num_bytes = 0
    for number in range(first, len(source.index.sessions)):
        group.append(number)
        num_bytes += source.index.raw_bytes(number)
        if num_bytes >= COMMIT_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def _checked(source: Reader, number: int) -> Session:
    session = source.session(number)
    written = source.index.sessions[number].xxh3
    for name, array in arrays_of(session).items():
        if content_hash(array) != written[name]:
            raise StoreError(
                f"{source.place}, session {session.key}, {name}",
                expected=f"content {written[name]}, as the index says",
                found=f"content {content_hash(array)}",
                fix="Write the store again from its source",
            )
    return session


def _make_room(source: Reader, entry: Path, cache: Path, cache_bytes: int | None) -> None:
    whole = sum(source.index.raw_bytes(n) for n in range(len(source.index.sessions)))
    free = shutil.disk_usage(cache).free + _bytes_of(entry)
    if cache_bytes is not None:
        _evict(cache, entry, cache_bytes - whole)
        free = cache_bytes - sum(map(_bytes_of, _others(cache, entry)))
    if whole > free:
        raise StoreError(
            cache,
            expected=f"room for the {whole:,} bytes of {source.place}, decoded",
            found=f"{free:,} bytes " + ("on the disk" if cache_bytes is None else "of the bound"),
            fix="Allow more bytes, choose another folder, or split the store",
        )


def _evict(cache: Path, entry: Path, allowed: int) -> None:
    """Delete other stores, the longest unused first, until they take no more than `allowed`."""
    others = sorted(_others(cache, entry), key=lambda path: path.stat().st_mtime_ns)
    taken = sum(map(_bytes_of, others))
    if allowed < 0:  # deleting them all wouldn't help
        return
    for other in others:
        if taken <= allowed:
            return
        with contextlib.suppress(BlockingIOError), locked(other, wait=False):
            taken -= _bytes_of(other)
            shutil.rmtree(other)


def _others(cache: Path, entry: Path) -> list[Path]:
    return [path for path in cache.glob(f"*{_SUFFIX}") if path != entry]


def _bytes_of(entry: Path) -> int:
    return sum(Folder(entry).sizes().values())
