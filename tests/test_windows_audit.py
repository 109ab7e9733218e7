"""The audit: every row starts a window or is lost for one reason, and the numbers add up."""

import json
from functools import partial

import numpy as np
import pytest
from helpers_index import HORIZONS, by_hand, check_refused, grids, stored
from helpers_windows import arrays, listed, session
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeline import cli
from tapeline.errors import WindowError
from tapeline.session import Session
from tapeline.windows import RowPolicy, WindowIndex
from tapeline.windows.audit import REASONS


def adds_up(audit):
    lost = sum(audit.lost.values())
    return (audit.windows + lost == audit.rows).all() and all(
        (count >= 0).all() for count in audit.lost.values()
    )


def counted(windows, num_sessions):
    return [sum(s == number for s, _ in windows) for number in range(num_sessions)]


@settings(max_examples=80)
@given(
    grids(),
    st.integers(1, 5),
    HORIZONS,
    st.integers(1, 4),
    st.sampled_from(["all", "any"]),
    st.data(),
)
def test_each_row_is_counted_once_under_its_reason(
    new_store, sessions, T, horizons, stride, targets, data
):
    num = len(sessions)
    chosen = data.draw(st.lists(st.integers(0, num - 1), min_size=1, unique=True))
    reach = T + (max(horizons) if targets == "all" else min(horizons))
    whole = [([True] * len(mask), None) for mask, _ in sessions]
    marked = [(mask, None) for mask, _ in sessions]
    kept = by_hand(sessions, T, reach, stride, 10, chosen)
    make = partial(
        WindowIndex,
        new_store(stored(sessions)),
        T,
        horizons,
        stride,
        sessions=chosen,
        targets=targets,
        policy=RowPolicy(max_gap_ns=10),
    )
    if not kept:
        check_refused(make)
        return
    audit = make().audit()
    assert adds_up(audit)
    assert audit.rows.tolist() == [len(mask) for mask, _ in sessions]
    assert audit.windows.tolist() == counted(kept, num)
    stages = [
        counted(windows, num)
        for windows in (
            by_hand(whole, T, reach, chosen=chosen),
            by_hand(marked, T, reach, chosen=chosen),
            by_hand(sessions, T, reach, 1, 10, chosen),
            kept,
        )
    ]
    for reason, before, after in zip(
        ("invalid_rows", "gap", "stride"), stages[:-1], stages[1:], strict=True
    ):
        assert audit.lost[reason].tolist() == [b - a for b, a in zip(before, after, strict=True)]
    for s, (mask, _) in enumerate(sessions):
        rows, long = len(mask), len(mask) >= reach
        assert audit.lost["not_selected"][s] == (0 if s in chosen else rows)
        assert audit.lost["too_short"][s] == (rows if s in chosen and not long else 0)
        assert audit.lost["window_tail"][s] == (T - 1 if s in chosen and long else 0)
        assert audit.lost["horizon_tail"][s] == (reach - T if s in chosen and long else 0)
    read = {(s, start + i) for s, start in kept for i in range(T)}
    assert audit.rows_read.tolist() == counted(read, num)


@settings(max_examples=80)
@given(
    grids(least_rows=18),
    st.tuples(st.integers(1, 5), st.integers(1, 4)),
    st.integers(1, 3),
    st.floats(0.2, 0.7),
    st.integers(0, 60),
)
def test_the_parts_of_a_split_say_where_the_others_went(
    new_store, sessions, shape, stride, share, embargo
):
    store = new_store(stored(sessions))
    index = WindowIndex(store, *shape, stride, policy=RowPolicy(max_gap_ns=10))
    try:
        parts = index.split(train=share, validation="rest", embargo_ns=embargo)
        without = index.split(train=share, validation="rest")
    except WindowError as error:
        assert "expected at least one window" in str(error)
        return
    train, validation = (part.audit() for part in parts.values())
    assert adds_up(train)
    assert adds_up(validation)
    whole = index.audit()
    for reason in REASONS:
        if reason not in ("other_part", "purge", "embargo"):
            assert train.totals()[reason] == validation.totals()[reason] == whole.totals()[reason]
    later = set(listed(without["validation"]))
    assert train.totals()["embargo"] == 0
    assert validation.totals()["embargo"] == len(later - set(listed(parts["validation"])))
    # what crosses the cut is lost to both sides; the rest lies in one of them
    crossing = set(listed(index)) - set(listed(parts["train"])) - later
    assert train.totals()["purge"] == validation.totals()["purge"] == len(crossing)
    assert train.totals()["other_part"] == len(later)
    assert validation.totals()["other_part"] == parts["train"].num_windows


def test_rows_that_are_too_old_are_a_reason_of_their_own(new_store):
    ages = np.zeros(40, np.int64)
    ages[[10, 20]] = 6  # row 20 is marked too, and counted there
    day = session(0, 40, valid=np.arange(40) != 20)
    store = new_store([Session(day.key, day.values, age_ns=ages, valid=day.valid)])
    audit = WindowIndex(store, 3, 2, policy=RowPolicy(max_age_ns=5)).audit()
    assert adds_up(audit)
    lost = {reason: number for reason, number in audit.totals().items() if number}
    assert lost == {"window_tail": 2, "horizon_tail": 2, "invalid_rows": 5, "stale_rows": 5}


def test_a_part_is_split_again_and_still_adds_up():
    index = WindowIndex.from_lengths([100, 100], 5, 2, 2)
    first = index.split(train=0.8, validation="rest")["train"]
    again = first.split(train=0.3, validation=0.3)["validation"]
    audit = again.audit()
    assert adds_up(audit)
    assert listed(again) == [(0, s) for s in range(60, 94, 2)] + [(1, s) for s in range(0, 14, 2)]


def test_sessions_without_a_window_are_named(new_store):
    audit = WindowIndex(new_store(arrays(0, 1, 6, 40)), 5, 2, sessions=[0, 1, 2, 3]).audit()
    values = audit.as_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["sessions"] == [
        {"session": "array-0", "rows": 0, "rows_read": 0, "windows": 0, "lost": {}},
        {"session": "array-1", "rows": 1, "rows_read": 0, "windows": 0, "lost": {"too_short": 1}},
        {"session": "array-2", "rows": 6, "rows_read": 0, "windows": 0, "lost": {"too_short": 6}},
        {
            "session": "array-3",
            "rows": 40,
            "rows_read": 38,
            "windows": 34,
            "lost": {"window_tail": 4, "horizon_tail": 2},
        },
    ]
    assert (values["rows"], values["rows_read"], values["windows"]) == (47, 38, 34)
    assert values["lost"] == dict.fromkeys(REASONS, 0) | {
        "too_short": 7,
        "window_tail": 4,
        "horizon_tail": 2,
    }


def test_lengths_alone_are_named_by_number():
    assert WindowIndex.from_lengths([40, 2], 5, 2).audit().sessions == ("0", "1")


@pytest.fixture
def windows_of(monkeypatch, capsys):
    """Run `tapeline store windows`; returns exit code, standard output and error."""

    def run(store, *arguments):
        command = ["tapeline", "store", "windows", str(store.root), *map(str, arguments)]
        monkeypatch.setattr("sys.argv", command)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


def test_the_command_prints_what_the_audit_says(new_store, windows_of):
    store = new_store(stored([([True] * 30, None), ([True] * 9 + [False] + [True] * 20, None)]))
    shape = ("--length", 5, "--horizon", 2, "--horizon", 4, "--stride", 3)
    code, out, err = windows_of(store, *shape, "--json")
    assert (code, err) == (0, "")
    index = WindowIndex(store, 5, (2, 4), 3)
    assert json.loads(out) == {"store": str(store.root), **index.audit().as_dict()}
    code, out, err = windows_of(store, *shape)
    assert code == 0
    assert f"{index.num_windows} windows" in err
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert any("stride" in line and REASONS["stride"] in line for line in lines)
    assert any("instrument-1" in line for line in lines)
    assert not any("embargo" in line for line in lines)  # only what was lost is listed
    any_target = WindowIndex(store, 5, (2, 4), targets="any")
    assert (
        json.loads(windows_of(store, *shape[:6], "--any-target", "--json")[1])["windows"]
        == any_target.num_windows
    )


def test_the_command_shows_an_example(new_store, windows_of):
    code, out, _ = windows_of(new_store(arrays(40)), "--help")
    assert code == 0
    assert "Example: tapeline store windows" in " ".join(out.split())


def test_the_command_audits_chosen_sessions(new_store, windows_of):
    store = new_store(arrays(40, 50))
    _, out, _ = windows_of(
        store, "--length", 5, "--horizon", 2, "--instrument", "array-1", "--json"
    )
    assert json.loads(out) == {
        "store": str(store.root),
        **WindowIndex(store, 5, 2, sessions=[1]).audit().as_dict(),
    }


def test_the_command_says_when_there_is_no_window(new_store, windows_of):
    code, out, err = windows_of(new_store(arrays(20)))
    assert (code, out) == (2, "")
    assert "found 20 in the longest of 1. Shorten T or horizon" in err
