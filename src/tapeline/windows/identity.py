"""What a loader's state belongs to, in a few words, and whether that is what is there.

Covers data, windows, order, batch and form. What changes no batch is left out: ranks, depth,
device, where the store lies, and sessions of it in which no window lies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import xxhash

from tapeline.errors import WindowError
from tapeline.store import Shards
from tapeline.windows.form import Form
from tapeline.windows.index import WindowIndex
from tapeline.windows.order import Order
from tapeline.windows.plan import Plan

_DIGITS = 6  # of each hash: against mistakes, not against malice


def data_fingerprint(shards: Shards, *indexes: WindowIndex) -> str:
    """What the sessions are that windows lie in: xxh3-128 over columns and content, in order.

    Sessions that are appended to a store later don't change it, unless windows lie in them.

    Args:
        shards: the store.
        indexes: of windows in it.
    """
    used = np.unique(np.concatenate([index.sessions for index in indexes]))
    columns, entries = shards.index.columns, shards.index.sessions
    told = [entries[number].digest(columns) for number in used.tolist()]
    return xxhash.xxh3_128_hexdigest(" ".join(told).encode())


def identity_of(
    shards: Shards, index: WindowIndex, order: Order, plan: Plan, form: Form
) -> tuple[str, ...]:
    """All that decides the batches but the seed, in words without spaces."""
    tail = "" if plan.tail == "seamless" else f"/{plan.tail}"
    hashes = index.fingerprint(), data_fingerprint(shards, index), form.fingerprint()
    shape = f"T{index.T}", f"B{plan.batch}{tail}", f"{plan.num}"
    return order.name, *shape, *(digest[:_DIGITS] for digest in hashes)


def checked_state(state: object, ours: Sequence[str]) -> tuple[int, int]:
    """The position and the seed of a state that belongs to `ours`.

    Raises:
        WindowError: it isn't a loader's state, or belongs to something else; both sides are told.
    """
    values = state if isinstance(state, Mapping) else {}
    position, seed, of = (values.get(name) for name in ("position", "seed", "of"))
    saved = str(of).split(" ")
    if type(position) is not int or type(seed) is not int or len(saved) != len(ours):
        raise WindowError(
            "loader state",
            expected="a whole position and seed, and what they are of",
            found=f"position {position}, seed {seed}, of {of}" if values else repr(state)[:80],
            fix="Pass what `Loader.state_dict()` returned",
        )
    differing = [n for n, (a, b) in enumerate(zip(saved, ours, strict=True)) if a != b]
    if differing:
        raise WindowError(
            "loader state",
            expected=f"one of {_told(ours, differing)}, as this loader has",
            found=f"one of {_told(saved, differing)}",
            fix="Resume with the data, split, T, batch, tail, order and form it was saved under, "
            "or start anew",
        )
    if position < 0:
        raise WindowError(
            "loader state",
            expected="a position of 0 or more",
            found=str(position),
            fix="Pass what `Loader.state_dict()` returned",
        )
    return position, seed


def _told(identity: Sequence[str], which: list[int]) -> str:
    """Parts of what a state is of, in words."""
    order, length, batch, num, windows, data, form = identity
    words = (
        f"order {order}",
        f"T {length.removeprefix('T')}",
        f"batch {batch.removeprefix('B').replace('/', ' with tail ')}",
        f"{num} windows",
        f"windows {windows}",
        f"data {data}",
        f"form {form}",
    )
    return ", ".join(words[n] for n in which)
