"""The hot loops, compiled by numba: without the interpreter lock, cached on disk.

`gather` copies windows into a batch, scaling on the way, and makes the targets. `walk` turns
positions into windows. What they compute is defined by `make_batch` and by `order.py`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt


@numba.njit(nogil=True, cache=True, boundscheck=False)
def gather(
    flat: npt.NDArray[np.float32],
    rows: npt.NDArray[np.int64],
    columns: int,
    target: npt.NDArray[np.int64],
    scaling: npt.NDArray[np.float32],
    x: npt.NDArray[np.float32],
    y: npt.NDArray[np.float32],
) -> Any:
    """Fill `x` and `y`.

    Args:
        flat: float32 `[rows · columns]`, the store's matrix in C order.
        rows: int64 `[batch]`, each window's first row in the matrix. Not checked here.
        columns: of the matrix.
        target: int64 `[3]`: T, horizon, and the column whose change is the target.
        scaling: float32 `[2, T · columns]`, what to subtract and to multiply by; `[2, 0]`: nothing.
        x: float32 `[batch, T · columns]`, written.
        y: float32 `[batch]`, written: the target's value minus the window's last, unscaled.
    """
    # The loops run on one-dimensional contiguous slices: only those are vectorised.
    length, horizon, column = target
    width = length * columns
    scaled = scaling.shape[1] > 0
    offset, factor = scaling[0], scaling[1]
    for b in range(len(rows)):
        start = rows[b] * columns
        source = flat[start : start + width]
        into = x[b]
        if scaled:
            for i in range(width):
                into[i] = (source[i] - offset[i]) * factor[i]
        else:
            for i in range(width):
                into[i] = source[i]
        last = start + (length - 1) * columns + column
        y[b] = flat[last + horizon * columns] - flat[last]


@numba.njit(nogil=True, cache=True, boundscheck=False)
def walk(
    positions: npt.NDArray[np.int64],
    num: np.uint64,
    bits: int,
    keys: npt.NDArray[np.uint64],
    windows: npt.NDArray[np.int64],
) -> Any:
    """Permute positions within 0…num−1, as `order.py` defines it.

    Args:
        positions: int64 `[n]`, each in 0…num−1.
        num: size of the domain, as uint64 so that no product becomes a float.
        bits: of the smallest power of two that is at least `num`; at least 1.
        keys: uint64 `[rounds, 2]`, what to add and the odd factor of each round.
        windows: int64 `[n]`, written.
    """
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    shift = np.uint64((bits + 1) // 2)
    for i in range(len(positions)):
        word = np.uint64(positions[i])
        while True:
            for r in range(len(keys)):
                word = ((word + keys[r, 0]) * keys[r, 1]) & mask
                word ^= word >> shift
            if word < num:
                break
        windows[i] = np.int64(word)
