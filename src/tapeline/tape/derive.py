"""Columns computed once, at ingest: what a model would otherwise compute again for every window.

Covers the usual ones of an order book and any `module:function`. Each has a version, which stands
in the store's index beside its name. A value that needs the row before is undefined on the first
row of a run of valid rows; such a row is marked, for a made-up 0 would be a move that never was.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tapeline.errors import TapeError
from tapeline.session import Session
from tapeline.tape.report import Counts

Column = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Derivation:
    """One or several columns as a function of a session.

    Attributes:
        name: of it, and of its column unless it gives several.
        version: changes whenever the numbers do.
        compute: from a session to a column `[rows]`, or to columns by name; NaN where undefined.
    """

    name: str
    version: str
    compute: Callable[[Session], Column | dict[str, Column]]


def derivations(names: Sequence[str]) -> list[Derivation]:
    """The derivations of these names: of the known ones, or `module:function`.

    The version of a function is the hash of its source, so another source is another version.

    Raises:
        TapeError: a name isn't known, or the function can't be imported.
    """
    return [_KNOWN[name] if name in _KNOWN else _imported(name) for name in names]


def derive(
    sessions: Iterable[Session], wanted: Sequence[Derivation], counts: Counts | None = None
) -> Iterator[Session]:
    """The same sessions with the derived columns behind their own.

    Args:
        sessions: what to derive from.
        wanted: what to derive.
        counts: where to count, by column, the rows that are marked because it is undefined there;
            of several such columns the first is told.

    Raises:
        TapeError: a session lacks a column that is needed, or a function raises or gives something
            else than finite-or-NaN numbers, one for each row.
    """
    for session in sessions:
        derived = _derived(session, wanted)
        if counts is not None:
            _count_undefined(session, derived, counts)
        yield derived


def _count_undefined(session: Session, derived: Session, counts: Counts) -> None:
    left = np.ones(len(session), np.bool_) if session.valid is None else session.valid
    for number in range(len(session.columns), len(derived.columns)):
        undefined = left & np.isnan(derived.values[:, number])
        left = left & ~undefined
        counts.undefine(derived.columns[number], int(np.count_nonzero(undefined)))


def _computed(derivation: Derivation, session: Session) -> dict[str, Column]:
    try:
        found = derivation.compute(session)
        columns = found if isinstance(found, dict) else {derivation.name: found}
        return {name: np.asarray(column, np.float64) for name, column in columns.items()}
    except TapeError:
        raise
    except Exception as error:  # whatever a user's function may raise
        said = str(error).partition("\n")[0]
        raise TapeError(
            f"derived column {derivation.name} of session {session.key}",
            expected=f"numbers from {derivation.name}",
            found=f"{type(error).__name__}: {said}" if said else type(error).__name__,
            fix=f"Correct {derivation.name}: it is given a session and returns a column or more "
            "by name",
        ) from error


def _derived(session: Session, wanted: Sequence[Derivation]) -> Session:
    added: dict[str, Column] = {}
    for derivation in wanted:
        for name, column in _computed(derivation, session).items():
            if np.shape(column) != (len(session),) or name in (*session.columns, *added):
                raise TapeError(
                    f"derived column {name} of session {session.key}",
                    expected=f"a new column of shape [{len(session)}]",
                    found=f"shape {list(np.shape(column))}"
                    if np.shape(column) != (len(session),)
                    else "a name that is there already",
                    fix=f"Correct what {derivation.name} returns",
                )
            added[name] = column
    values = np.column_stack([session.values, *added.values()]).astype(np.float32)
    valid = np.ones(len(session), np.bool_) if session.valid is None else session.valid
    return replace(
        session,
        values=values,
        columns=(*session.columns, *added),
        valid=valid & ~np.isnan(values).any(axis=1),
        derived={**session.derived, **{d.name: d.version for d in wanted}},
    )


def _column(session: Session, name: str) -> npt.NDArray[np.float64]:
    if name not in session.columns:
        raise TapeError(
            f"session {session.key}",
            expected=f"a column `{name}` to derive from",
            found=f"{', '.join(session.columns[:6])}…",
            fix="Derive it from a book, or name a function of your own",
        )
    column: npt.NDArray[np.float64] = session.values[:, session.columns.index(name)].astype(
        np.float64
    )
    return column


def _best(session: Session) -> tuple[npt.NDArray[np.float64], ...]:
    """Bid price, bid size, ask price, ask size of the first level, relative to the origin."""
    names = ("bid_price_1", "bid_size_1", "ask_price_1", "ask_size_1")
    return tuple(_column(session, name) for name in names)


def _ratio(above: npt.NDArray[Any], below: npt.NDArray[Any]) -> Column:
    """NaN where there is nothing to divide by."""
    ratio: Column = np.divide(above, below, out=np.full(len(above), np.nan), where=below != 0)
    return ratio


def _spread(session: Session) -> Column:
    """Best ask minus best bid, in price units."""
    bid, _, ask, _ = _best(session)
    return ask - bid


def _imbalance(session: Session) -> Column:
    """(bid size − ask size) / (bid size + ask size) at the first level, −1 to 1."""
    _, bid_size, _, ask_size = _best(session)
    return _ratio(bid_size - ask_size, bid_size + ask_size)


def _microprice(session: Session) -> Column:
    """The mid weighted by the opposite sizes, relative to the origin, in price units."""
    bid, bid_size, ask, ask_size = _best(session)
    return _ratio(bid * ask_size + ask * bid_size, bid_size + ask_size)


def _log_return(session: Session) -> Column:
    """log(mid) minus log(mid) of the row before; from prices with their origin, in float64."""
    mid = session.origin + _column(session, "mid")
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.log(mid)
    return np.diff(np.where(np.isfinite(logs), logs, np.nan), prepend=np.nan)


def _order_flow_imbalance(session: Session) -> Column:
    """What was added to the bid and taken from the ask since the row before, in size units.

    Cont, Kukanov and Stoikov 2014, "The price impact of order book events", equation (1), between
    rows instead of between events.
    """
    bid, bid_size, ask, ask_size = _best(session)
    flow = np.full(len(session), np.nan)
    flow[1:] = (
        (bid[1:] >= bid[:-1]) * bid_size[1:]
        - (bid[1:] <= bid[:-1]) * bid_size[:-1]
        - (ask[1:] <= ask[:-1]) * ask_size[1:]
        + (ask[1:] >= ask[:-1]) * ask_size[:-1]
    )
    flow[1:][np.isnan(bid[:-1]) | np.isnan(bid[1:])] = np.nan
    return flow


_KNOWN: Final = {
    name: Derivation(name, "1", compute)
    for name, compute in (
        ("spread", _spread),
        ("imbalance", _imbalance),
        ("microprice", _microprice),
        ("log_return", _log_return),
        ("order_flow_imbalance", _order_flow_imbalance),
    )
}


def _imported(name: str) -> Derivation:
    module, colon, function = name.partition(":")
    try:
        if not colon:
            raise AttributeError("no such name")
        compute = getattr(importlib.import_module(module), function)
        source = inspect.getsource(compute)
    except (ImportError, AttributeError, OSError, TypeError) as error:
        raise TapeError(
            f"derived column {name}",
            expected=f"one of {', '.join(_KNOWN)}, or an importable module:function",
            found=str(error),
            fix="Correct the name, or run from the folder that holds the module",
        ) from None
    return Derivation(name, hashlib.sha256(source.encode()).hexdigest()[:16], compute)
