"""The order of windows: position → window, a pure function of (seed, epoch, position).

A keyed permutation of 0…n−1 in O(1) memory, our own and versioned: library shuffles have changed
between releases, and a run resumed under another order is another run.

Construction (version 1). On k-bit words, where 2^k is the smallest power of two ≥ n, one round is

    x ← (x + a)·m mod 2^k,   x ← x xor (x >> ⌈k/2⌉)        a and odd m from (seed, epoch, round)

Each step can be undone, so the whole is a bijection on 0…2^k−1. The product carries low bits up,
the shift brings high bits down. A result ≥ n is put through again until it is below n ("cycle
walking"), which keeps it a bijection on 0…n−1 and takes fewer than two passes on average.
"""

from __future__ import annotations

import numpy as np

from tapeline.session import Int64Array
from tapeline.windows.kernel import walk

VERSION = 1
_WORD = (1 << 64) - 1
_ROUNDS = 6  # from here on, chi-square tests of pairs and differences see nothing at 20,000 keys
_ROUNDS_SMALL = 16  # on a few bits a round reaches few permutations, so it takes more of them
_SMALL_BITS = 8


def mix(*words: int) -> int:
    """Hash integers into 64 bits; every word matters and so does its place (splitmix64 chain).

    Keys are mixed, never added: with `seed + epoch`, (s, e) would be (s + 1, e − 1).
    """
    state = 0x243F6A8885A308D3  # pi, so that mix(0) is nothing special
    for word in words:
        state = _splitmix(state ^ _splitmix(word & _WORD))
    return state


def _splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


def permute(positions: Int64Array, num: int, seed: int, epoch: int) -> Int64Array:
    """Where each position of an epoch leads.

    Args:
        positions: int64 `[n]`, each in 0…num−1.
        num: how many windows there are, 1 to 2^62.
        seed, epoch: the key; each pair gives its own permutation.

    Returns:
        int64 `[n]`, windows in 0…num−1; over all positions each window comes once.
    """
    assert 1 <= num <= 1 << 62, num
    bits = max(1, (num - 1).bit_length())
    rounds = _ROUNDS_SMALL if bits <= _SMALL_BITS else _ROUNDS
    words = [(mix(seed, epoch, 2 * r), mix(seed, epoch, 2 * r + 1) | 1) for r in range(rounds)]
    windows = np.empty(len(positions), np.int64)
    walk(positions, np.uint64(num), bits, np.array(words, np.uint64), windows)
    return windows
