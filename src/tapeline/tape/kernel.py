"""The replay, compiled; over 400 lines because numba's cache is blind to a change in another file.

The rules are told in `replay`, those of rows in `grid`.

`orders` and `levels` apply the events of a block from one on and stop early, with a code, when
something is to be done that isn't theirs: the caller does it and calls again from the same event.
`advance` takes rows alone. What is kept from call to call stands in the arrays of `book.Book`,
`book.Orders` and `replay.Grid`.

Importing this imports numba, which takes a second.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from tapeline.compiled import compiled
from tapeline.tape.blocks import CLEARED, CREATED, DELETED, REDUCED
from tapeline.tape.book import (
    ASK,
    BID,
    BILLIONTHS,
    BORN,
    EARLY_DELETE,
    EMPTY,
    ID,
    IS_ASK,
    IS_BID,
    KIND,
    PLACED_NS,
    PRICE,
    UNITS,
    WHOLE,
)
from tapeline.tape.grid import CROSSED, GOOD, KEEP, LOCKED, MAX_ROWS, ONE_SIDED

# Codes: why a call returned.
DONE, ROWS_FULL, LEVELS_FULL, ORDERS_FULL, EVICT, TOO_MANY_ROWS = range(6)

# Places in `Grid.now`.
(
    NEXT_NS,  # the next instant without a row; never, outside sessions
    STEP_NS,
    LAST_NS,  # time of the last event
    NUM_EVENTS,  # of the session
    NUM_SINCE_ROW,
    NUM_ROWS,  # that wait to be fetched
    HAS_HELD,
    BAD_SINCE_NS,  # meaningful while the book is bad, and never before the session
    CROSSED_SINCE_NS,  # meaningful while the book is crossed
    STALE_NS,  # of two orders that cross so long one is evicted; -1: none
    EVICTED_NS,  # the instant that the book was last tidied for
    IS_WHOLE,  # no update is half applied
) = range(12)

# Places in `Grid.counted`, and the names that `report.Counts` has for them.
COUNTED = (
    "states",
    "states_crossed",
    "states_locked",
    "states_one_sided",
    "rows_held",
    "deletes_unknown",
    "deletes_before_create",
    "changes_unknown",
    "creates_repeated",
    "orders_without_price",
    "orders_without_size",
)
(
    _STATES,
    _CROSSED,
    _LOCKED,
    _ONE_SIDED,
    _ROWS_HELD,
    _DELETES_UNKNOWN,
    _DELETES_EARLY,
    _CHANGES_UNKNOWN,
    _CREATES_REPEATED,
    _WITHOUT_PRICE,
    _WITHOUT_SIZE,
) = range(len(COUNTED))

_EARLY_DELETE_NS = 10 * 10**9
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_U27, _U30, _U31 = np.uint64(27), np.uint64(30), np.uint64(31)


@numba.njit(inline="always")
def _place_of(keys: Any, side: Any, num: Any, key: Any) -> Any:
    """The first of `num` rising keys that isn't below `key`; sought from the end, where most is."""
    low, high, step = 0, num, 1
    while step <= num:
        if keys[side, num - step] < key:
            low = num - step + 1
            break
        high = num - step
        step *= 2
    while low < high:
        middle = (low + high) // 2
        if keys[side, middle] < key:
            low = middle + 1
        else:
            high = middle
    return low


@numba.njit(inline="always")
def _move(keys: Any, sizes: Any, side: Any, source: Any, target: Any) -> None:
    keys[side, target] = keys[side, source]
    sizes[side, target, 0] = sizes[side, source, 0]
    sizes[side, target, 1] = sizes[side, source, 1]


@numba.njit(forceinline=True)
def _put(book: Any, side: Any, price: Any, whole: Any, billionths: Any, is_added: Any) -> None:
    """Make the total at a price this size, or add to it; a level of size zero goes."""
    keys, sizes, nums = book.keys, book.sizes, book.nums
    num = nums[side]
    key = price if side == BID else -price
    at = _place_of(keys, side, num, key)
    is_there = at < num and keys[side, at] == key
    if is_there and is_added:
        whole, billionths = sizes[side, at, 0] + whole, sizes[side, at, 1] + billionths
    if whole == 0 and billionths == 0:
        if is_there:
            for i in range(at, num - 1):
                _move(keys, sizes, side, i + 1, i)
            nums[side] = num - 1
        return
    if not is_there:
        for i in range(num, at, -1):
            _move(keys, sizes, side, i - 1, i)
        nums[side] = num + 1
    keys[side, at], sizes[side, at, 0], sizes[side, at, 1] = key, whole, billionths


@numba.njit(inline="always")
def _kind(book: Any) -> Any:
    bids, asks = book.nums[BID], book.nums[ASK]
    if bids == 0 or asks == 0:
        return ONE_SIDED
    spread = book.keys[BID, bids - 1] + book.keys[ASK, asks - 1]  # an ask's key is minus its price
    return GOOD if spread < 0 else LOCKED if spread == 0 else CROSSED


@numba.njit(inline="always")
def _is_crossed(book: Any) -> Any:
    kind = _kind(book)
    return kind in (LOCKED, CROSSED)


@numba.njit
def _copy_top(book: Any, grid: Any, row: Any) -> None:
    """The first levels; where there are fewer, the last price is repeated with size zero."""
    depth = grid.prices.shape[1]
    for side in range(2):
        num = book.nums[side]
        grid.nums[row, side] = min(num, depth)
        sign = 1 if side == BID else -1
        for level in range(depth if num else 0):
            at = num - 1 - level
            grid.prices[row, level, side] = sign * book.keys[side, max(at, 0)]
            grid.sizes[row, level, side, 0] = book.sizes[side, at, 0] if at >= 0 else 0
            grid.sizes[row, level, side, 1] = book.sizes[side, at, 1] if at >= 0 else 0


@numba.njit
def _take_row(book: Any, grid: Any, instant_ns: Any) -> None:
    now = grid.now
    row, held = now[NUM_ROWS], len(grid.times_ns) - 1
    kind = _kind(book)
    limit_ns = grid.limits_ns[kind]
    since_ns, is_blank = now[LAST_NS], False
    if limit_ns == KEEP:
        _copy_top(book, grid, row)
    else:
        since_ns = now[BAD_SINCE_NS]
        is_blank = not now[HAS_HELD] or instant_ns - since_ns > limit_ns
        if is_blank:
            grid.nums[row] = 0
        else:
            grid.prices[row], grid.sizes[row] = grid.prices[held], grid.sizes[held]
            grid.nums[row] = grid.nums[held]
            grid.counted[_ROWS_HELD] += 1
    has_both = grid.nums[row, BID] > 0 and grid.nums[row, ASK] > 0
    grid.times_ns[row], grid.since_ns[row] = instant_ns, since_ns
    grid.marks[row] = kind if is_blank else GOOD if has_both else ONE_SIDED
    now[NUM_ROWS] = row + 1


@numba.njit
def _take_rows(book: Any, grid: Any, time_ns: Any) -> Any:
    now = grid.now
    now[NUM_SINCE_ROW] = 0
    if (time_ns - 1 - now[NEXT_NS]) // now[STEP_NS] >= MAX_ROWS:
        return TOO_MANY_ROWS
    while now[NEXT_NS] < time_ns:
        instant_ns = now[NEXT_NS]
        crossed_ns = instant_ns - now[CROSSED_SINCE_NS] if _is_crossed(book) else -1
        if crossed_ns >= now[STALE_NS] >= 0 and now[EVICTED_NS] != instant_ns:
            return EVICT
        if now[NUM_ROWS] == len(grid.times_ns) - 1:
            return ROWS_FULL
        _take_row(book, grid, instant_ns)
        now[NEXT_NS] += now[STEP_NS]
    return DONE


@numba.njit(inline="always")
def _advance(book: Any, grid: Any, time_ns: Any) -> Any:
    """Take the rows of the instants before `time_ns`; a code other than `DONE` if it can't."""
    return DONE if grid.now[NEXT_NS] >= time_ns else _take_rows(book, grid, time_ns)


@numba.njit(inline="always")
def _begin_event(grid: Any, time_ns: Any) -> None:
    grid.now[LAST_NS] = time_ns
    grid.now[NUM_EVENTS] += 1
    grid.now[NUM_SINCE_ROW] += 1


@numba.njit(inline="always")
def _hold(book: Any, grid: Any) -> None:
    """Remember the book as it is, if good: the event in hand may be the end of that.

    What the book was before the session's first event is not the session's.
    """
    if grid.now[NUM_EVENTS] > 1 and grid.limits_ns[_kind(book)] == KEEP:
        _copy_top(book, grid, len(grid.times_ns) - 1)
        grid.now[HAS_HELD] = 1
        grid.now[BAD_SINCE_NS] = grid.now[LAST_NS]


@numba.njit(inline="always")
def _clear(book: Any, grid: Any) -> None:
    """Empty the book; what was remembered isn't known to have been followed by what comes."""
    book.nums[:] = 0
    grid.now[HAS_HELD] = 0
    grid.now[BAD_SINCE_NS] = grid.now[LAST_NS]


@numba.njit(inline="always")
def _count_state(book: Any, grid: Any) -> None:
    kind = _kind(book)
    grid.counted[_STATES] += 1
    if kind != GOOD:
        grid.counted[
            _CROSSED if kind == CROSSED else _LOCKED if kind == LOCKED else _ONE_SIDED
        ] += 1


# Rows of arrays are named by array and number below: a view of one would be counted, atomically.


@numba.njit(inline="always")
def _home_of(array: Any, row: Any, first: Any, mask: Any) -> Any:
    """The slot where the search for an id begins. Zeros at its end don't matter."""
    mixed = np.uint64(0)
    for i in range(first, array.shape[1]):
        if array[row, i]:
            mixed = (mixed ^ np.uint64(array[row, i])) * _MIX_1
            mixed = (mixed ^ (mixed >> _U30)) * _MIX_2
            mixed ^= mixed >> _U27
    return np.int64((mixed ^ (mixed >> _U31)) & np.uint64(mask))


@numba.njit(forceinline=True)
def _find(slots: Any, ids: Any, row: Any, first: Any) -> Any:
    """The slot of the id `ids[row, first:]`, or the empty one where it would go."""
    mask = len(slots) - 1
    at = _home_of(ids, row, first, mask)
    while slots[at, KIND] != EMPTY:
        is_same = True
        for i in range(slots.shape[1] - ID):
            is_same &= slots[at, ID + i] == ids[row, first + i]
        if is_same:
            break
        at = (at + 1) & mask
    return at


@numba.njit(forceinline=True)
def _forget(orders: Any, at: Any) -> None:
    """Empty a slot, and move up what was put behind it because it was taken."""
    slots, mask = orders.slots, len(orders.slots) - 1
    after = at
    while True:
        after = (after + 1) & mask
        if slots[after, KIND] == EMPTY:
            break
        home = _home_of(slots, after, ID, mask)
        if (after - home) & mask >= (after - at) & mask:
            for i in range(slots.shape[1]):
                slots[at, i] = slots[after, i]
            at = after
    slots[at, KIND] = EMPTY
    orders.nums[0] -= 1


@numba.njit(inline="always")
def _is_order(slots: Any, at: Any) -> Any:
    return slots[at, KIND] in (IS_BID, IS_ASK)


@numba.njit(inline="always")
def _rests(slots: Any, at: Any) -> Any:
    return slots[at, WHOLE] > 0 or slots[at, BILLIONTHS] > 0


@numba.njit(forceinline=True)
def _add(book: Any, slots: Any, at: Any, whole: Any, billionths: Any) -> None:
    """Add a size to the level of an order."""
    side = BID if slots[at, KIND] == IS_BID else ASK
    _put(book, side, slots[at, PRICE], whole, billionths, True)


@numba.njit
def _take_off(book: Any, slots: Any, at: Any) -> None:
    """Take what an order has at its level off the book."""
    if _rests(slots, at):
        _add(book, slots, at, -slots[at, WHOLE], -slots[at, BILLIONTHS])


@numba.njit(forceinline=True)
def _new_slot(orders: Any, at: Any, ids: Any, row: Any) -> None:
    slots, nums = orders.slots, orders.nums
    if slots[at, KIND] == EMPTY:
        for i in range(ids.shape[1]):
            slots[at, ID + i] = ids[row, i]
        nums[0] += 1
    slots[at, BORN] = nums[1]
    nums[1] += 1


@numba.njit(forceinline=True)
def _delete(book: Any, orders: Any, grid: Any, time_ns: Any, ids: Any, row: Any) -> None:
    slots = orders.slots
    at = _find(slots, ids, row, 0)
    if _is_order(slots, at):
        _take_off(book, slots, at)
        _forget(orders, at)
        return
    grid.counted[_DELETES_UNKNOWN] += 1
    _new_slot(orders, at, ids, row)
    slots[at, KIND], slots[at, PLACED_NS] = EARLY_DELETE, time_ns


@numba.njit(forceinline=True)
def _reduce(book: Any, orders: Any, grid: Any, ids: Any, sizes: Any, row: Any) -> None:
    """Take a size off an order; one with nothing left is forgotten."""
    slots = orders.slots
    at = _find(slots, ids, row, 0)
    if not _is_order(slots, at):
        grid.counted[_DELETES_UNKNOWN] += 1
        return
    whole, billionths = slots[at, WHOLE] - sizes[row, 0], slots[at, BILLIONTHS] - sizes[row, 1]
    if billionths < 0:
        whole, billionths = whole - 1, billionths + UNITS
    if whole < 0 or (whole == 0 and billionths == 0):
        _take_off(book, slots, at)
        _forget(orders, at)
        return
    _add(book, slots, at, whole - slots[at, WHOLE], billionths - slots[at, BILLIONTHS])
    slots[at, WHOLE], slots[at, BILLIONTHS] = whole, billionths


@numba.njit(forceinline=True)
def _set(book: Any, orders: Any, grid: Any, events: Any, row: Any) -> None:
    """Put an order where a create or a change says."""
    times_ns, ids, actions, are_bids, prices, sizes, have_price, _ = events
    slots, counted = orders.slots, grid.counted
    time_ns, price = times_ns[row], prices[row]
    at = _find(slots, ids, row, 0)
    if slots[at, KIND] == EARLY_DELETE and time_ns - slots[at, PLACED_NS] <= _EARLY_DELETE_NS:
        counted[_DELETES_UNKNOWN] -= 1
        counted[_DELETES_EARLY] += 1
        _forget(orders, at)
        return
    is_known = _is_order(slots, at)
    is_sized = sizes[row, 0] > 0 or sizes[row, 1] > 0
    if actions[row] == CREATED:
        counted[_CREATES_REPEATED] += is_known
        counted[_WITHOUT_PRICE] += not have_price[row]
        counted[_WITHOUT_SIZE] += have_price[row] and not is_sized
    else:
        counted[_CHANGES_UNKNOWN] += not is_known
    kind = IS_BID if are_bids[row] else IS_ASK
    if is_known:
        _take_off(book, slots, at)
        if _rests(slots, at) and slots[at, KIND] == kind and slots[at, PRICE] == price:
            time_ns = slots[at, PLACED_NS]  # one that keeps its side and price keeps its age
    else:
        _new_slot(orders, at, ids, row)
    slots[at, KIND], slots[at, PRICE], slots[at, PLACED_NS] = kind, price, time_ns
    slots[at, WHOLE] = sizes[row, 0] if have_price[row] else 0
    slots[at, BILLIONTHS] = sizes[row, 1] if have_price[row] else 0
    if _rests(slots, at):
        _add(book, slots, at, slots[at, WHOLE], slots[at, BILLIONTHS])


@compiled
def advance(book: Any, grid: Any, time_ns: Any) -> Any:
    """Take the rows of the instants before `time_ns`; a code."""
    return _advance(book, grid, time_ns)


@compiled
def take_off(book: Any, slots: Any, at: Any) -> None:
    """Take what an order has at its level off the book; the order itself is left."""
    _take_off(book, slots, at)


@compiled
def rehash(old: Any, new: Any, now_ns: Any) -> None:
    """Fill an empty table with another's orders, and with early deletes that still matter."""
    for at in range(len(old.slots)):
        kind = old.slots[at, KIND]
        is_over = kind == EARLY_DELETE and now_ns - old.slots[at, PLACED_NS] > _EARLY_DELETE_NS
        if kind != EMPTY and not is_over:
            to = _find(new.slots, old.slots, at, ID)
            for i in range(old.slots.shape[1]):
                new.slots[to, i] = old.slots[at, i]
            new.nums[0] += 1
    new.nums[1] = old.nums[1]


@compiled
def orders(events: Any, first: Any, book: Any, table: Any, grid: Any) -> Any:
    """Apply events of orders from `first` on; a code, and the event to go on with."""
    times_ns, ids, actions, are_bids, prices, sizes, have_price, are_last = events
    now, nums, keys = grid.now, book.nums, book.keys
    for i in range(first, len(times_ns)):
        if max(nums[0], nums[1]) == keys.shape[1]:
            return LEVELS_FULL, i
        if table.nums[0] * 2 >= len(table.slots):
            return ORDERS_FULL, i
        time_ns, action, is_last = times_ns[i], actions[i], are_last[i]
        code = _advance(book, grid, time_ns)
        if code != DONE:
            return code, i
        _begin_event(grid, time_ns)
        crosses = False
        if action < DELETED and have_price[i]:  # created or changed
            other, key = (ASK, prices[i]) if are_bids[i] else (BID, -prices[i])
            crosses = nums[other] > 0 and key + keys[other, nums[other] - 1] >= 0
        if crosses and not _is_crossed(book):
            now[CROSSED_SINCE_NS] = time_ns
        if now[IS_WHOLE] and (not is_last or crosses or nums[0] < 2 or nums[1] < 2):
            _hold(book, grid)
        if action == CLEARED:
            _clear(book, grid)
            table.slots[:, KIND] = EMPTY
            table.nums[0] = 0
        elif action == REDUCED:
            _reduce(book, table, grid, ids, sizes, i)
        elif action == DELETED:
            _delete(book, table, grid, time_ns, ids, i)
        else:
            _set(book, table, grid, events, i)
        now[IS_WHOLE] = is_last
        if is_last:
            _count_state(book, grid)
    return DONE, len(times_ns)


@compiled
def levels(events: Any, first: Any, book: Any, grid: Any) -> Any:
    """Apply events of levels from `first` on; a code, and the event to go on with."""
    times_ns, are_clears, are_bids, prices, sizes = events
    now = grid.now
    for i in range(first, len(times_ns)):
        if max(book.nums[0], book.nums[1]) == book.keys.shape[1]:
            return LEVELS_FULL, i
        time_ns = times_ns[i]
        if time_ns != now[LAST_NS]:
            if not now[IS_WHOLE]:
                _count_state(book, grid)
                now[IS_WHOLE] = 1
            code = _advance(book, grid, time_ns)
            if code != DONE:
                return code, i
            _begin_event(grid, time_ns)
            _hold(book, grid)
        now[IS_WHOLE] = 0
        if are_clears[i]:
            _clear(book, grid)
        else:
            side = BID if are_bids[i] else ASK
            _put(book, side, prices[i], sizes[i, 0], sizes[i, 1], False)
    return DONE, len(times_ns)


@compiled
def count_state(book: Any, grid: Any) -> None:
    """Count the book as a state."""
    _count_state(book, grid)
