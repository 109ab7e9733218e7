"""Derived columns: what they hold, where they are undefined, and which version they are of."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from tapeline.errors import TapeError
from tapeline.session import Session, SessionKey
from tapeline.store import Shards, append_shards, write_shards
from tapeline.tape import Counts, derivations, derive, synthetic_sessions
from tapeline.tape.report import listed

COLUMNS = ("mid", "bid_price_1", "bid_size_1", "ask_price_1", "ask_size_1")


def book(*rows, origin=100.0, valid=None):
    """A session of (bid, bid size, ask, ask size), prices relative to the origin."""
    values = np.array([[(b + a) / 2, b, bs, a, s] for b, bs, a, s in rows], np.float32)
    mask = None if valid is None else np.array(valid)
    return Session(SessionKey("X"), values, COLUMNS, valid=mask, origin=origin)


def column(session, *names):
    (made,) = derive([session], derivations(names))
    return made, made.values[:, made.columns.index(names[-1])]


def test_values_by_hand():
    session = book((0, 3, 1, 1), (0, 4, 1, 1), (1, 2, 2, 5))
    assert column(session, "spread")[1].tolist() == [1, 1, 1]
    assert column(session, "imbalance")[1].tolist() == pytest.approx([0.5, 0.6, -3 / 7])
    assert column(session, "microprice")[1].tolist() == pytest.approx([0.75, 0.8, 9 / 7])
    made, returns = column(session, "log_return")
    assert returns[1:].tolist() == pytest.approx([0.0, np.log(101.5 / 100.5)])
    assert np.isnan(returns[0])
    assert made.valid.tolist() == [False, True, True]


def test_order_flow_imbalance_by_hand():
    """Bid grows by 1; then bid and ask move up: all of the new bid in, all of the old ask gone."""
    session = book((0, 3, 1, 1), (0, 4, 1, 1), (1, 2, 2, 5))
    flow = column(session, "order_flow_imbalance")[1]
    assert np.isnan(flow[0])
    assert flow[1:].tolist() == [4 - 3 - 1 + 1, 2 + 1]


def test_nothing_reaches_over_a_marked_row():
    session = book((0, 3, 1, 1), (np.nan, np.nan, np.nan, np.nan), (0, 4, 1, 1), (0, 5, 1, 1))
    made, returns = column(session, "log_return")
    assert np.isnan(returns).tolist() == [True, True, True, False]
    assert made.valid.tolist() == [False, False, False, True]


def test_an_empty_level_is_undefined_not_zero():
    made, imbalance = column(book((0, 0, 1, 0), (0, 1, 1, 1)), "imbalance")
    assert np.isnan(imbalance[0])
    assert made.valid.tolist() == [False, True]


def test_several_and_their_versions_in_the_store(tmp_path):
    wanted = derivations(["spread", "log_return"])
    sessions = list(derive(synthetic_sessions(2), wanted))
    write_shards(sessions, tmp_path, "mmap")
    shards = Shards(tmp_path)
    assert shards.columns[-2:] == ("spread", "log_return")
    assert shards.index.derived == {"spread": "1", "log_return": "1"}
    assert shards.session(1).derived == {"spread": "1", "log_return": "1"}
    assert shards.index.sessions[0].invalid == [(0, 1)]
    mids = shards.index.sessions[0].origin + synthetic_sessions(1)[0].values[:, 0].astype(float)
    assert shards.values(0)[1:, -1] == pytest.approx(np.diff(np.log(mids)), abs=1e-9)


def test_another_version_is_not_appended(tmp_path):
    first, second = derive(synthetic_sessions(2), derivations(["spread"]))
    append_shards([first], tmp_path, "mmap")
    object.__setattr__(second, "derived", {"spread": "2"})
    with pytest.raises(
        ValueError, match=r"expected spread 1, as SYN/2024-01-01 has, found spread 2"
    ):
        append_shards([second], tmp_path, "mmap")


def test_a_function_of_ones_own(tmp_path, monkeypatch):
    module = tmp_path / "my_columns.py"
    module.write_text("def doubled(session):\n    return {'a': session.values[:, 0] * 2}\n")
    monkeypatch.syspath_prepend(tmp_path)
    (made,) = derive([book((0, 3, 1, 1))], derivations(["my_columns:doubled"]))
    assert made.columns[-1] == "a"
    assert made.values[0, -1] == 1.0
    version = made.derived["my_columns:doubled"]
    module.write_text("def doubled(session):\n    return {'a': session.values[:, 0] * 3}\n")
    del sys.modules["my_columns"]
    assert derivations(["my_columns:doubled"])[0].version != version


@pytest.mark.parametrize(
    ("name", "found"),
    [("spred", "no such name"), ("no_module:f", "No module named"), ("math:nothing", "nothing")],
)
def test_unknown_names(name, found):
    with pytest.raises(TapeError) as caught:
        derivations([name])
    assert found in caught.value.found
    assert caught.value.expected.startswith("one of spread, imbalance, microprice")


def test_what_does_not_fit():
    with pytest.raises(TapeError, match="expected a column `bid_price_1` to derive from"):
        list(
            derive(
                [Session(SessionKey("X"), np.zeros((2, 1), np.float32))], derivations(["spread"])
            )
        )
    with pytest.raises(TapeError, match="found a name that is there already"):
        list(derive([book((0, 3, 1, 1))], derivations(["spread", "spread"])))


def raises(session):
    raise ZeroDivisionError("no size")


def nothing(session):
    return None


def several(session):
    """The first is undefined in row 1, the second in rows 1 and 2."""
    first, second = np.zeros((2, len(session)))
    first[1:2], second[1:3] = np.nan, np.nan
    return {"first": first, "second": second}


def test_a_function_that_raises_is_told_with_what_it_raised():
    (wanted,) = derivations([f"{__name__}:raises"])
    with pytest.raises(TapeError) as caught:
        list(derive([book((0, 3, 1, 1))], [wanted]))
    assert str(caught.value) == (
        f"derived column {__name__}:raises of session X: expected numbers from {__name__}:raises, "
        f"found ZeroDivisionError: no size. Correct {__name__}:raises: it is given a session and "
        "returns a column or more by name."
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(TapeError, match=r"found shape \[\]"):
        list(derive([book((0, 3, 1, 1))], derivations([f"{__name__}:nothing"])))


def test_rows_marked_by_a_derived_column_are_counted_once_and_by_column():
    counts = Counts(rows=4, rows_crossed=1)
    session = book(*[(0, 3, 1, 1)] * 4, valid=[True, True, True, False])
    (made,) = derive([session], derivations([f"{__name__}:several"]), counts)
    assert made.valid.tolist() == [True, False, False, False]
    assert counts.rows_undefined == {"first": 1, "second": 1}
    assert counts.rows_marked == 3
    assert listed(counts.marked()) == " (1 crossed, 1 without first, 1 without second)"
