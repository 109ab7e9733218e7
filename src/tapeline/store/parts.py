"""Parts: a store written by several processes that know nothing of each other, then joined.

Covers: one process's part, finding that all are complete, joining them in order. Does not cover
who reads which input; contiguous slices give the store that one process would have written.

Part i of n is a store of its own under `parts/<i>-of-<n>`, complete once its `done` is there, and
kept after the join: `parts` may then be deleted.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from tapeline.errors import StoreError
from tapeline.session import Session
from tapeline.store.formats import Reader
from tapeline.store.layout import INDEX, StoreIndex, check_format
from tapeline.store.place import Root, is_remote, place_of
from tapeline.store.shards import open_reader
from tapeline.store.write import Sessions, append_shards

PARTS = "parts"
_DONE = "done"


def write_part(
    sessions: Sessions,
    root: Root,
    fmt: str,
    *,
    part: int,
    num_parts: int,
) -> Root | None:
    """Write part `part` of `num_parts` (from 1) of the store at `root`; the last to end joins all.

    A part that was killed is started again; sessions that are there already are passed over.

    Args:
        sessions: this part's sessions, in order; there may be none.
        root: the store, a folder that all processes see or a URL.
        fmt: the format of the parts and of the store.
        part: which one this is, 1 to `num_parts`.
        num_parts: how many processes there are.

    Returns:
        The joined shards' place, if this part was the last to be complete; None before.

    Raises:
        StoreError: no such part, or what `append_shards` raises.
    """
    check_format(fmt)
    if not 1 <= part <= num_parts:
        raise StoreError(
            f"part {part}/{num_parts}",
            expected=f"a part from 1 to {num_parts}",
            found=str(part),
            fix="Count the parts from 1",
        )
    place = place_of(root, _name(part, num_parts))
    place.remove([_DONE])
    rest = iter(sessions)
    first = next(rest, None)
    if first is not None:
        append_shards(itertools.chain([first], rest), str(place), fmt)
    place.commit(_DONE, b"")
    return None if _missing(root, num_parts) else join_parts(root, fmt)


def join_parts(root: Root, fmt: str) -> Root:
    """Join the parts under `root` into its shards of one format, in the order of their numbers.

    Whatever was joined already is passed over, so that a second call changes nothing.

    Returns:
        The place of the joined shards.

    Raises:
        StoreError: no parts, parts of several runs, a part that isn't complete, or what
            `append_shards` raises.
    """
    check_format(fmt)
    names = place_of(root, PARTS).sizes()
    numbers = {int(match[1]) for name in names if (match := re.match(r"\d+-of-(\d+)/", name))}
    if len(numbers) != 1:
        raise StoreError(
            place_of(root, PARTS),
            expected="the parts of one run, <i>-of-<n>",
            found=f"those of {sorted(numbers)}" if numbers else "none",
            fix="Delete the parts of other runs" if numbers else "Write them with `--part i/n`",
        )
    num_parts = numbers.pop()
    if missing := _missing(root, num_parts):
        raise StoreError(
            place_of(root, PARTS),
            expected=f"{num_parts} parts that are complete",
            found=f"{len(missing)} that aren't: {', '.join(map(str, missing[:8]))}",
            fix="Run those parts, again if they were interrupted, then join",
        )
    places = [place_of(root, _name(part, num_parts)) for part in range(1, num_parts + 1)]
    return join_shards([str(p) for p in places if p.has(f"{fmt}/{INDEX}")], root, fmt)


def join_shards(parts: Sequence[Root], root: Root, fmt: str) -> Root:
    """Append the sessions of several stores to the shards of one format at `root`, in order.

    A session that the store holds already is passed over without being read again.

    Returns:
        The place of the joined shards.

    Raises:
        StoreError: a part isn't a store, or what `append_shards` raises.
    """
    check_format(fmt)
    readers = [open_reader(part) for part in parts]
    try:
        append_shards(_new_sessions(readers, root, fmt), root, fmt)
    except StoreError:
        # Another process may have ended at the same time and joined the same parts: as good.
        if next(_new_sessions(readers, root, fmt), None) is not None or not readers:
            raise
    place = place_of(root, fmt)
    return str(place) if is_remote(root) else place.folder


def _new_sessions(readers: list[Reader], root: Root, fmt: str) -> Iterator[Session]:
    place = place_of(root, fmt)
    held: set[str] = set()
    if place.has(INDEX):
        index = StoreIndex.load(place, fmt)
        held = {entry.digest(index.columns) for entry in index.sessions}
    for reader in readers:
        for number, entry in enumerate(reader.index.sessions):
            if entry.digest(reader.index.columns) not in held:
                yield reader.session(number)


def _name(part: int, num_parts: int) -> str:
    return f"{PARTS}/{part}-of-{num_parts}"


def _missing(root: Root, num_parts: int) -> list[int]:
    numbers = range(1, num_parts + 1)
    return [part for part in numbers if not place_of(root, _name(part, num_parts)).has(_DONE)]
