"""The order of windows: position → window, a pure function of (seed, epoch, position).

Covers `Shuffled`, `WithReplacement`, `Sequential` and, for data larger than memory, `Eras`. Does
not know where a window lies: that is the index's.

`Shuffled` is a keyed permutation of 0…n−1 in O(1) memory, our own and versioned: library shuffles
have changed between releases, and a run resumed under another order is another run.

Construction (version 1). On k-bit words, where 2^k is the smallest power of two ≥ n, one round is

    x ← (x + a)·m mod 2^k,   x ← x xor (x >> ⌈k/2⌉)        a and odd m from (seed, epoch, round)

Each step can be undone, so the whole is a bijection on 0…2^k−1. The product carries low bits up,
the shift brings high bits down. A result ≥ n is put through again until it is below n ("cycle
walking"), which keeps it a bijection on 0…n−1 and takes fewer than two passes on average.

`WithReplacement` (version 1) hashes (seed, epoch, position) with splitmix64 to k bits, again until
the word is below n: uniform without the bias of a remainder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tapeline.session import Int64Array
from tapeline.windows.index import whole
from tapeline.windows.kernel import walk

VERSION = 1
_WORD = (1 << 64) - 1
_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64
_ROUNDS = 6  # from here on, chi-square tests of pairs and differences see nothing at 20,000 keys
_ROUNDS_SMALL = 16  # on a few bits a round reaches few permutations, so it takes more of them
_SMALL_BITS = 8
_MAX_WINDOWS = 1 << 62


def mix(*words: int) -> int:
    """Hash integers into 64 bits; every word matters and so does its place (splitmix64 chain).

    Keys are mixed, never added: with `seed + epoch`, (s, e) would be (s + 1, e − 1).
    """
    state = 0x243F6A8885A308D3  # pi, so that mix(0) is nothing special
    for word in words:
        state = _splitmix(state ^ _splitmix(word & _WORD))
    return state


def _splitmix(x: int) -> int:
    x = (x + _GAMMA) & _WORD
    x = ((x ^ (x >> 30)) * _MIX_1) & _WORD
    x = ((x ^ (x >> 27)) * _MIX_2) & _WORD
    return x ^ (x >> 31)


class Draw(NamedTuple):
    """Consecutive positions as the kernel draws them: window i is `base` + draw(`first` + i).

    Attributes:
        positions: how many.
        first: the first of them.
        base: the window that is drawn as 0.
        num: size of the domain.
        bits: of the smallest power of two that is at least `num`; at least 1.
        keys: uint64 `[rounds, 2]`; without rounds each position is its own window.
        replace: each window is drawn for itself.
    """

    positions: int
    first: int
    base: int
    num: np.uint64
    bits: int
    keys: npt.NDArray[np.uint64]
    replace: bool


class Order(ABC):
    """Position → window. An order is a value: equal parameters are the same order for ever."""

    seed: int

    @property
    @abstractmethod
    def name(self) -> str:
        """What is drawn and by which version, but for the seed, as states hold it."""

    @abstractmethod
    def draws(self, num: int, epoch: int, start: int, stop: int) -> Iterator[Draw]:
        """The positions `start` to `stop` of an epoch of `num` windows, as the kernel draws."""

    def windows(
        self, num: int, epoch: int, start: int, stop: int, *, compiled: bool = True
    ) -> Int64Array:
        """The windows at positions `start` to `stop` of an epoch.

        Args:
            num: how many windows there are, 1 to 2^62.
            epoch: counted from 0.
            start, stop: 0 ≤ start ≤ stop ≤ num.
            compiled: draw in the kernel; otherwise in NumPy, for when it isn't loaded yet.

        Returns:
            int64 `[stop − start]`, each in 0…num−1.
        """
        assert 0 <= start <= stop <= num <= _MAX_WINDOWS, (start, stop, num)
        windows = np.empty(stop - start, np.int64)
        done = 0
        for draw in self.draws(num, epoch, start, stop):
            part = windows[done : done + draw.positions]
            words = np.arange(draw.first, draw.first + draw.positions, dtype=np.uint64)
            (walk if compiled else _walk)(words, *draw[3:], part)
            part += draw.base
            done += draw.positions
        return windows


@dataclass(frozen=True, slots=True)
class Shuffled(Order):
    """Every window once an epoch, in an order of each epoch's own."""

    seed: int = 0

    @property
    def name(self) -> str:
        """See `Order.name`."""
        return f"shuffled{VERSION}"

    def draws(self, num: int, epoch: int, start: int, stop: int) -> Iterator[Draw]:
        """See `Order.draws`."""
        yield _permuted(stop - start, start, 0, num, (self.seed, epoch))


@dataclass(frozen=True, slots=True)
class WithReplacement(Order):
    """Each position draws from all windows: an epoch is as many draws as there are windows."""

    seed: int = 0

    @property
    def name(self) -> str:
        """See `Order.name`."""
        return f"replacement{VERSION}"

    def draws(self, num: int, epoch: int, start: int, stop: int) -> Iterator[Draw]:
        """See `Order.draws`."""
        keys = _keys(1, self.seed, epoch)
        yield Draw(stop - start, start, 0, np.uint64(num), _bits(num), keys, True)


@dataclass(frozen=True, slots=True)
class Sequential(Order):
    """The windows as they lie in the store: for evaluation."""

    @property
    def seed(self) -> int:  # type: ignore[override]
        """Of what is drawn beside the order; there is nothing to choose."""
        return 0

    @property
    def name(self) -> str:
        """See `Order.name`."""
        return "sequential"

    def draws(self, num: int, epoch: int, start: int, stop: int) -> Iterator[Draw]:  # noqa: ARG002
        """See `Order.draws`."""
        yield Draw(stop - start, start, 0, np.uint64(num), _bits(num), _keys(0), False)


@dataclass(frozen=True, slots=True)
class Eras(Order):
    """Every window once an epoch, shuffled within eras of neighbouring windows.

    For data larger than memory: what is read within one era lies close together. The eras come in
    an order of each epoch's own; the last of them may be shorter, and is as long as it is.

    Args:
        seed: of the order.
        window_of_windows: windows in an era.

    Raises:
        WindowError: `window_of_windows` below 1.
    """

    seed: int = 0
    window_of_windows: int = 1 << 20

    def __post_init__(self) -> None:
        whole("window_of_windows", self.window_of_windows)

    @property
    def name(self) -> str:
        """See `Order.name`."""
        return f"eras{VERSION}/{self.window_of_windows}"

    def draws(self, num: int, epoch: int, start: int, stop: int) -> Iterator[Draw]:
        """See `Order.draws`."""
        size = self.window_of_windows
        last = (num - 1) // size
        missing = (last + 1) * size - num  # what the last era lacks
        short = position_of(last, last + 1, self.seed, epoch)
        position = start
        while position < stop:
            # As if the short era were whole: what it lacks is passed over once it is behind.
            behind = position + missing >= (short + 1) * size
            place = (position + missing * behind) // size
            begin = place * size - missing * behind
            era = window_at(place, last + 1, self.seed, epoch)
            length = size - missing * (era == last)
            count = min(stop, begin + length) - position
            yield _permuted(count, position - begin, era * size, length, (self.seed, epoch, era))
            position += count


def permute(positions: Int64Array, num: int, seed: int, epoch: int) -> Int64Array:
    """Where each position of an epoch leads in the order `Shuffled(seed)`.

    Args:
        positions: int64 `[n]`, each in 0…num−1.
        num: how many windows there are, 1 to 2^62.
        seed, epoch: the key; each pair gives its own permutation.

    Returns:
        int64 `[n]`, windows in 0…num−1; over all positions each window comes once.
    """
    assert 1 <= num <= _MAX_WINDOWS, num
    draw = _permuted(len(positions), 0, 0, num, (seed, epoch))
    windows = np.empty(len(positions), np.int64)
    walk(positions.astype(np.uint64), *draw[3:], windows)
    return windows


@lru_cache(maxsize=64)
def window_at(position: int, num: int, seed: int, epoch: int) -> int:
    """`permute` for one position."""
    draw = _permuted(1, 0, 0, num, (seed, epoch))
    window = np.empty(1, np.int64)
    _walk(np.array([position], np.uint64), *draw[3:], window)
    return int(window[0])


@lru_cache(maxsize=64)
def position_of(window: int, num: int, seed: int, epoch: int) -> int:
    """The inverse of `permute`: at which position of an epoch a window comes."""
    draw = _permuted(1, 0, 0, num, (seed, epoch))
    size, shift = 1 << draw.bits, (draw.bits + 1) // 2
    rounds = [(offset, pow(factor, -1, size)) for offset, factor in draw.keys.tolist()]
    word = window
    while True:
        for offset, inverse in reversed(rounds):
            word ^= word >> shift  # twice the shift is past the word's end: its own inverse
            word = (word * inverse - offset) % size
        if word < num:
            return word


def _walk(
    words: npt.NDArray[np.uint64],
    num: np.uint64,
    bits: int,
    keys: npt.NDArray[np.uint64],
    replace: bool,
    windows: Int64Array,
) -> None:
    """The kernel's `walk` in NumPy: the same windows, several times slower."""
    mask, shift = np.uint64((1 << bits) - 1), np.uint64((bits + 1) // 2)
    places = np.arange(len(words))
    if replace:
        words = (words ^ keys[0, 0]) * keys[0, 1]
    while len(words):
        if replace:
            words = words + np.uint64(_GAMMA)
            drawn = (words ^ (words >> np.uint64(30))) * np.uint64(_MIX_1)
            drawn = (drawn ^ (drawn >> np.uint64(27))) * np.uint64(_MIX_2)
            drawn = (drawn ^ (drawn >> np.uint64(31))) & mask
        else:
            for offset, factor in keys:
                words = ((words + offset) * factor) & mask
                words ^= words >> shift
            drawn = words
        there = drawn < num
        windows[places[there]] = drawn[there]
        places, words = places[~there], words[~there]


def _bits(num: int) -> int:
    return max(1, (num - 1).bit_length())


def _permuted(count: int, first: int, base: int, num: int, key: tuple[int, ...]) -> Draw:
    bits = _bits(num)
    rounds = _ROUNDS_SMALL if bits <= _SMALL_BITS else _ROUNDS
    return Draw(count, first, base, np.uint64(num), bits, _keys(rounds, *key), False)


@lru_cache(maxsize=256)
def _keys(rounds: int, *key: int) -> npt.NDArray[np.uint64]:
    """What to add and the odd factor of each round; kept, since it takes longer than a batch."""
    words = [(mix(*key, 2 * r), mix(*key, 2 * r + 1) | 1) for r in range(rounds)]
    return np.array(words, np.uint64).reshape(rounds, 2)
