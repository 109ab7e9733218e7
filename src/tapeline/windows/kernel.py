"""The hot loops, compiled by numba: without the interpreter lock, cached on disk if
there is a place for it.

`gather` copies windows into a batch, scaling and casting on the way, and makes the targets;
`gather_drawn` finds the windows of consecutive positions first. `walk` turns positions into
windows. What they compute is defined by `make_batch`, by `order.py` and by `index.py`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from tapeline.compiled import compiled

_U16, _U27, _U30, _U31 = np.uint64(16), np.uint64(27), np.uint64(30), np.uint64(31)
_TOUCH = 512  # values: two kilobytes, the best of 512 bytes to 4 kB on the machine it was tried on
_LARGER_THAN_CACHE = 1 << 22  # values: 16 MiB
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@numba.njit(inline="always")
def _permute(words: Any, num: Any, bits: Any, keys: Any, windows: Any) -> Any:
    # Rounds outside, words inside: so the rounds are vectorised. What must walk on is kept in
    # front, with the place it goes to.
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    shift = np.uint64((bits + 1) // 2)
    places = np.arange(len(words))
    left = len(words)
    while left:
        for r in range(len(keys)):
            offset, factor = keys[r, 0], keys[r, 1]
            for i in range(left):
                word = ((words[i] + offset) * factor) & mask
                words[i] = word ^ (word >> shift)
        walking = 0
        for i in range(left):
            if words[i] < num:
                windows[places[i]] = np.int64(words[i])
            else:
                words[walking], places[walking] = words[i], places[i]
                walking += 1
        left = walking


@numba.njit(inline="always")
def _replace(words: Any, num: Any, bits: Any, keys: Any, windows: Any) -> Any:
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    for i in range(len(words)):
        state = (words[i] ^ keys[0, 0]) * keys[0, 1]
        word = num
        while word >= num:
            state += _GAMMA
            word = (state ^ (state >> _U30)) * _MIX_1
            word = (word ^ (word >> _U27)) * _MIX_2
            word = (word ^ (word >> _U31)) & mask
        windows[i] = np.int64(word)


@numba.njit(inline="always")
def _find(rows: Any, base: Any, blocks: Any) -> Any:
    # A binary search without branches, steps outside and windows inside, and with unsigned
    # indices, which need no look at the sign: so it is vectorised too.
    ends, origins, strides = blocks[0], blocks[1], blocks[2]
    block = np.zeros(len(rows), np.uint64)
    size = len(ends)
    while size > 1:
        half = np.uint64(size >> 1)
        for b in range(len(rows)):
            after = block[b] + half
            block[b] = after if ends[after - np.uint64(1)] <= base + rows[b] else block[b]
        size -= size >> 1
    for b in range(len(rows)):
        begin = ends[block[b] - np.uint64(1)] if block[b] else 0
        rows[b] = origins[block[b]] + (base + rows[b] - begin) * strides[block[b]]


@numba.njit(inline="always")
def _copy(inputs: Any, row: Any, columns: Any, length: Any, scaling: Any, x: Any) -> Any:
    # The loops run on one-dimensional contiguous slices: only those are vectorised.
    width = length * columns
    start = row * columns
    source = inputs[start : start + width]
    if scaling.shape[1]:
        offset, factor = scaling[0], scaling[1]
        for i in range(width):
            x[i] = (source[i] - offset[i]) * factor[i]
    else:
        for i in range(width):
            x[i] = source[i]


@numba.njit(inline="always")
def _touch(inputs: Any, rows: Any, columns: Any, width: Any) -> Any:
    # In a store larger than the caches each window begins with a wait for memory, and again on
    # each page. Asked for together, the waits overlap; a copy only ever asks for the next bytes.
    seen = np.float32(0.0)
    for b in range(len(rows)):
        start = rows[b] * columns
        for i in range(start, start + width, _TOUCH):
            seen += inputs[i]
    return seen


@numba.njit(inline="always")
def _round_bfloat16(values: Any, into: Any) -> Any:
    bits = values.view(np.uint32)
    for i in range(len(bits)):
        rounded = (bits[i] + np.uint32(0x7FFF) + ((bits[i] >> np.uint32(16)) & np.uint32(1))) >> (
            np.uint32(16)
        )
        into[i] = rounded if values[i] == values[i] else np.uint32(0x7FC0)


@numba.njit(inline="always")
def _fill(
    flat: Any,
    inputs: Any,
    rows: Any,
    columns: Any,
    length: Any,
    targets: Any,
    scaling: Any,
    x: Any,
    y: Any,
) -> Any:
    if len(rows) and len(inputs) > _LARGER_THAN_CACHE:
        y[0, 0] = _touch(inputs, rows, columns, length * columns)  # written, so that it is done
    if x.itemsize == 2:
        scratch = np.empty(length * columns, np.float32)
        for b in range(len(rows)):
            _copy(inputs, rows[b], columns, length, scaling, scratch)
            _round_bfloat16(scratch, x[b])
    else:
        for b in range(len(rows)):
            _copy(inputs, rows[b], columns, length, scaling, x[b])
    # Apart from the copies, so that their cache misses overlap.
    for b in range(len(rows)):
        for t in range(len(targets)):
            last = (rows[b] + length - 1) * columns + targets[t, 1]
            target = last + targets[t, 0] * columns
            y[b, t] = flat[target] - flat[last] if target < len(flat) else np.float32(np.nan)


@compiled
def gather(
    flat: npt.NDArray[np.float32],
    inputs: npt.NDArray[np.float32],
    rows: npt.NDArray[np.int64],
    columns: int,
    length: int,
    targets: npt.NDArray[np.int64],
    scaling: npt.NDArray[np.float32],
    x: npt.NDArray[Any],
    y: npt.NDArray[np.float32],
) -> Any:
    """Fill `x` and `y` with given windows.

    Args:
        flat: float32 `[rows · columns]`, the store's matrix in C order: targets come from it.
        inputs: float32 `[rows · columns]`, what x comes from: the same, or the matrix scaled.
        rows: int64 `[batch]`, each window's first row in the matrix. Not checked here.
        columns: of the matrix.
        length: T, the rows of a window.
        targets: int64 `[targets, 2]`: the horizon and the column of each.
        scaling: float32 `[2, T · columns]`, what to subtract and to multiply by; `[2, 0]`: nothing.
        x: `[batch, T · columns]`, written: float32, or uint16 for the bits of bfloat16 (nearest,
            ties to even, as torch casts).
        y: float32 `[batch, targets]`, written: the target's value minus the window's last,
            unscaled; NaN behind the matrix's end.
    """
    _fill(flat, inputs, rows, columns, length, targets, scaling, x, y)


@compiled
def gather_drawn(
    flat: npt.NDArray[np.float32],
    inputs: npt.NDArray[np.float32],
    blocks: npt.NDArray[np.int64],
    first: int,
    base: int,
    num: np.uint64,
    bits: int,
    keys: npt.NDArray[np.uint64],
    replace: bool,
    columns: int,
    length: int,
    targets: npt.NDArray[np.int64],
    scaling: npt.NDArray[np.float32],
    x: npt.NDArray[Any],
    y: npt.NDArray[np.float32],
) -> Any:
    """Fill `x` and `y` with the windows of consecutive positions, drawn and found on the way.

    Args:
        blocks: int64 `[3, blocks]`: for each block of windows, the number behind its last window,
            the row in the matrix where its first window starts, and the rows between two starts.
        first: position of the first window of the batch, within 0…num−1 for a permutation.
        base: added to every drawn window.
        num, bits, keys, replace: as in `walk`.
        flat, inputs, columns, length, targets, scaling, x, y: as in `gather`.
    """
    rows = np.empty(len(x), np.int64)
    words = np.arange(first, first + len(x)).astype(np.uint64)
    if replace:
        _replace(words, num, bits, keys, rows)
    else:
        _permute(words, num, bits, keys, rows)
    _find(rows, base, blocks)
    gather(flat, inputs, rows, columns, length, targets, scaling, x, y)


@compiled
def walk(
    words: npt.NDArray[np.uint64],
    num: np.uint64,
    bits: int,
    keys: npt.NDArray[np.uint64],
    replace: bool,
    windows: npt.NDArray[np.int64],
) -> Any:
    """Draw windows in 0…num−1, as `order.py` defines it.

    Args:
        words: uint64 `[n]`, the positions, each in 0…num−1 for a permutation; overwritten.
        num: size of the domain, as uint64 so that no product becomes a float.
        bits: of the smallest power of two that is at least `num`; at least 1.
        keys: uint64 `[rounds, 2]`, what to add and the odd factor of each round.
        replace: draw each window for itself, from the first pair of keys.
        windows: int64 `[n]`, written.
    """
    if replace:
        _replace(words, num, bits, keys, windows)
    else:
        _permute(words, num, bits, keys, windows)
