"""The synthetic market: seeded order-book sessions, each a function of its arguments alone.

A session opens at 14:30 UTC on its own business day. Its first thirty seconds are warm-up and cut,
so 1,140 half-second rows are what is left of ten minutes. Every number is drawn by position from
Philox4x64 under a key hashed from (seed, session, instrument): no generator is shared, so a session
is the same bits whatever else is made, and a longer session begins with the rows of a shorter one.
The arithmetic is on integers up to one correctly rounded division by 100 or 200, so the bits don't
depend on the processor either.

What there is to learn: a slow order-flow pressure leans on the sizes of the book and moves the mid
over the following rows. What there isn't: single orders, trades, a clock that skips, missing rows,
crossed books, seasonality within the day, or instruments that move together.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import numpy as np
import numpy.typing as npt

from tapeline.errors import TapeError
from tapeline.session import Float32Array, Int64Array, Session, SessionKey
from tapeline.tape.grid import book_columns

Int32Array = npt.NDArray[np.int32]
Uint8Array = npt.NDArray[np.uint8]

INSTRUMENT: Final = "SYN"
TICKS_PER_UNIT: Final = 100
INTERVAL_NS: Final = 500_000_000
WARM_UP_ROWS: Final = 60

_MARKET_VERSION: Final = (
    "tapeline-synthetic-1"  # part of every key: a changed market is another one
)
_FIRST_OPEN: Final = datetime(2024, 1, 1, 14, 30, tzinfo=UTC)  # a Monday
_MAX_SESSIONS: Final = 15_000  # fifty-seven years of business days
_MAX_ROWS: Final = 24 * 3_600 * 2 - WARM_UP_ROWS  # or a session would run into the next one
_MAX_DEPTH: Final = 1_000  # levels lie at most 3 ticks apart, so every price stays positive

# Rows of the book drawn at a time: what they need stays in the processor's cache.
_CHUNK: Final = 1_024
_BOOK_COUNTER: Final = 1 << 192  # the book's half of the counter, far from the flow's

# By regime: calm, trending, volatile.
_SWITCH_IN_256: Final = 4  # a regime lasts 64 rows on average
_TREND: Final = np.array([0, 320, 0], np.int32)
_VOLATILITY: Final = np.array([3, 4, 6], np.int32)
_THICKNESS: Final = np.array([14, 10, 6], np.int32)
_TWO_TICKS_IN_64: Final = np.array([10, 20, 40], np.int32)
_THREE_TICKS_IN_64: Final = np.array([0, 1, 6], np.int32)

_PUSH_ROWS: Final = 16
_DECAY_ROWS: Final = 32
_MAX_PRESSURE: Final = 1_920
_BAND_TICKS: Final = 256  # prices turn round this far from the instrument's level


@dataclass(frozen=True, slots=True)
class _Flow:
    """What drives the book, one entry per row: int32 `[rows]`, and the ages in int64."""

    bid: Int32Array  # the best, in ticks from the instrument's level
    spread: Int32Array  # in ticks
    pressure: Int32Array  # -_MAX_PRESSURE..+_MAX_PRESSURE; positive pushes prices up
    thickness: Int32Array
    age_ns: Int64Array


def synthetic_sessions(
    num: int = 8,
    seed: int = 0,
    *,
    rows: int = 1_140,
    instrument: str = INSTRUMENT,
    depth: int = 10,
) -> list[Session]:
    """The first `num` sessions of a seeded market, on consecutive business days.

    To stream more than memory holds, make them one at a time with `synthetic_session`.

    Raises:
        TapeError: `num`, `rows` or `depth` is out of range.
    """
    _check("num", num, 0, _MAX_SESSIONS)
    return [
        synthetic_session(number, seed, rows=rows, instrument=instrument, depth=depth)
        for number in range(num)
    ]


def synthetic_session(
    number: int,
    seed: int = 0,
    *,
    rows: int = 1_140,
    instrument: str = INSTRUMENT,
    depth: int = 10,
) -> Session:
    """Session `number` (from 0) of a seeded market.

    `values` is float32 `[rows, 1 + 4·depth]` in the order of `book_columns`. Prices are multiples
    of 0.01 relative to the session's `origin`, its opening price; sizes are positive whole
    multiples of the instrument's lot. `times` lie on a 500 ms grid and `age_ns` below 500 ms.

    `SYN` trades in lots of 1 within 2.56 of 100. Another name is another market, with a lot of its
    own, within 2.56 of one of sixty levels from 150 to 3,100.

    Raises:
        TapeError: `number`, `rows` or `depth` is out of range.
    """
    _check("number", number, 0, _MAX_SESSIONS - 1)
    _check("rows", rows, 0, _MAX_ROWS)
    _check("depth", depth, 1, _MAX_DEPTH)
    label = f"{_MARKET_VERSION}/{seed}/{number}/{instrument}"
    digest = hashlib.sha256(label.encode()).digest()
    key = int.from_bytes(digest[:16], "little")
    opening = int.from_bytes(digest[16:18], "little") % 128 - 64
    level, lot = _level_and_lot(instrument)

    flow = _flow(key, opening, rows)
    values = np.empty((rows, 1 + 4 * depth), np.float32)
    best = np.stack([flow.bid, flow.bid + flow.spread]) - np.int32(opening)
    np.divide(best.sum(axis=0), 2 * TICKS_PER_UNIT, out=values[:, 0], dtype=np.float32)
    for start, draws in zip(range(0, rows, _CHUNK), _book_draws(key, depth), strict=False):
        chunk = slice(start, start + _CHUNK)
        draws = draws[..., : rows - start]
        # A view [chunk, level, (bid price, bid size, ask price, ask size)] of the columns.
        book = values[chunk, 1:].reshape(-1, depth, 4)
        _write_prices(book, best[:, chunk], draws[0])
        _write_sizes(book, flow.pressure[chunk], flow.thickness[chunk], draws[1], lot)

    weeks, weekday = divmod(int(number), 5)
    opens = _FIRST_OPEN + timedelta(weeks=weeks, days=weekday)
    first_ns = int(opens.timestamp()) * 1_000_000_000 + WARM_UP_ROWS * INTERVAL_NS
    return Session(
        SessionKey(instrument, opens.date().isoformat()),
        values,
        columns=book_columns(depth),
        times=first_ns + np.arange(rows, dtype=np.int64) * INTERVAL_NS,
        age_ns=flow.age_ns,
        origin=(level + opening) / TICKS_PER_UNIT,
        made={"step_s": f"{INTERVAL_NS / 1e9:g}"},
    )


def _check(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int | np.integer) or not low <= value <= high:
        raise TapeError(
            f"synthetic market, {name}",
            expected=f"a whole number from {low:,} to {high:,}",
            found=repr(value),
            fix=f"Give {name} in that range",
        )


def _level_and_lot(instrument: str) -> tuple[int, int]:
    """The price level in ticks and the lot. Levels lie further apart than two bands reach."""
    distance = zlib.crc32(instrument.encode()) ^ zlib.crc32(INSTRUMENT.encode())
    if distance == 0:
        return 100 * TICKS_PER_UNIT, 1
    return (150 + 50 * (distance % 60)) * TICKS_PER_UNIT, 2 + distance // 60 % 15


def _flow(key: int, opening: int, rows: int) -> _Flow:
    """One 64-bit word a row, by its bytes: switch, regime and spread, shock, 3 × noise, 2 × age."""
    words = np.random.Philox(key=key).random_raw(WARM_UP_ROWS + rows).astype("<u8", copy=False)
    octets = words.view(np.uint8).reshape(-1, 8)

    # A Markov chain over (regime, direction): at a switch, one of the other regimes.
    switch = octets[:, 0] < _SWITCH_IN_256
    bits = octets[:, 1].astype(np.int32)
    regime = np.cumsum(switch * (1 + (bits & 1)), dtype=np.int32) % 3
    direction = 1 - 2 * (np.cumsum(switch * (bits >> 1 & 1), dtype=np.int32) & 1)

    # Odd numbers in -255..255, so that nothing drifts.
    shock, *noises = 2 * octets[:, 2:6].T.astype(np.int32) - 255
    # A shock pushes for 16 rows, then is taken back half as hard over 32: impact is transient.
    before = np.zeros(_PUSH_ROWS + _DECAY_ROWS, np.int32)
    total = np.cumsum(np.append(before, shock), dtype=np.int32)
    pushed = total[_PUSH_ROWS + _DECAY_ROWS :]
    pressure = 2 * pushed - 3 * total[_DECAY_ROWS:-_PUSH_ROWS] + total[: -_PUSH_ROWS - _DECAY_ROWS]
    pressure += direction * _TREND[regime]
    np.clip(pressure, -_MAX_PRESSURE, _MAX_PRESSURE, out=pressure)

    # The pressure of a row moves the price of the next: what the book shows comes first.
    move = 4 * sum(noises[1:], noises[0])
    move[1:] += pressure[:-1]
    move = (move * _VOLATILITY[regime] + 1_024) >> 11
    centre, slope = _reflect(opening + np.cumsum(move, dtype=np.int32))

    chance = bits >> 2
    spread = np.int32(1) + (chance < _TWO_TICKS_IN_64[regime])
    spread += chance < _THREE_TICKS_IN_64[regime]
    age = np.ascontiguousarray(octets[:, 6:]).view("<u2")[:, 0].astype(np.int64)
    kept = slice(WARM_UP_ROWS, None)
    return _Flow(
        bid=(centre - (spread >> 1))[kept],
        spread=spread[kept],
        pressure=(slope * pressure)[kept],
        thickness=_THICKNESS[regime[kept]],
        age_ns=age[kept] * INTERVAL_NS >> 16,
    )


def _reflect(position: Int32Array) -> tuple[Int32Array, Int32Array]:
    """Fold a free walk into the band: where it is then, and -1 where up and down are exchanged."""
    phase = (position + _BAND_TICKS) & (4 * _BAND_TICKS - 1)
    falling = phase >= 2 * _BAND_TICKS
    folded = np.where(falling, 4 * _BAND_TICKS - 1 - phase, phase) - _BAND_TICKS
    return folded, np.int32(1) - 2 * falling.astype(np.int32)


def _book_draws(key: int, depth: int) -> Iterator[Uint8Array]:
    """Random bytes `[gap or size, side, level, row]` of one chunk after another, without end."""
    generator = np.random.Philox(key=key, counter=_BOOK_COUNTER)
    while True:
        words = generator.random_raw(4 * depth * _CHUNK // 8).astype("<u8", copy=False)
        yield words.view(np.uint8).reshape(2, 2, depth, _CHUNK)


def _write_prices(book: Float32Array, best: Int32Array, draws: Uint8Array) -> None:
    """Fill the prices of `book` `[rows, level, 4]`: levels lie one tick apart, sometimes 2 or 3."""
    gaps = (draws < 40).view(np.uint8) + (draws < 8).view(np.uint8)
    gaps += np.uint8(1)
    bid, ask = best.astype(np.float32)
    for level in range(book.shape[1]):
        book[:, level, 0] = bid / np.float32(TICKS_PER_UNIT)
        book[:, level, 2] = ask / np.float32(TICKS_PER_UNIT)
        bid -= gaps[0, level]
        ask += gaps[1, level]


def _write_sizes(
    book: Float32Array, pressure: Int32Array, thickness: Int32Array, draws: Uint8Array, lot: int
) -> None:
    """Fill the sizes of `book` `[rows, level, 4]`, more on the side the pressure comes from.

    The lean is strongest at the best price; there is more to trade further down.
    """
    level = np.arange(book.shape[1], dtype=np.int32)[:, None]
    base = np.minimum(4 + level, 12)
    lean = base * np.maximum(8 - level, 1) * (thickness * pressure)
    middle = base * (thickness << 14)
    for side, mean in enumerate((middle + lean, middle - lean)):
        size = (mean * (draws[side] + np.int32(32)) >> 20) + 1
        size *= lot
        for number in range(book.shape[1]):
            book[:, number, 2 * side + 1] = size[number]
