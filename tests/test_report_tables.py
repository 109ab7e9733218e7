"""Tables and numbers: how they read, and what a terminal or a pipe gets."""

from __future__ import annotations

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeline.report import (
    Table,
    format_bytes,
    format_count,
    format_ms,
    format_number,
    format_percent,
    print_table,
)

HASH = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.0110, "0.0110"),
        (1.15, "1.15"),
        (9.996, "10.0"),
        (-2.5, "-2.50"),
        (11_700_000.4, "11,700,000"),
        (1.4e-7, "1.40e-07"),
        (math.nan, "NaN"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
    ],
)
def test_numbers_keep_three_significant_digits(value, text):
    assert format_number(value) == text


@given(st.floats(1e-4, 1e12))
def test_a_formatted_number_is_within_half_a_unit_of_its_third_digit(value):
    assert float(format_number(value).replace(",", "")) == pytest.approx(value, rel=5.1e-3)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1.00 kB"),
        (999_999, "1.00 MB"),
        (1_496_320, "1.50 MB"),
        (1_918_800_000, "1.92 GB"),
        (5 * 10**18, "5,000 PB"),
    ],
)
def test_bytes_are_in_powers_of_a_thousand(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_other_units():
    assert format_ms(0.0614) == "0.0614 ms"
    assert format_count(1140) == "1,140"
    shares = (0, 0.059, 0.0996, 0.44, 1, math.nan)
    assert [format_percent(s) for s in shares] == ["0 %", "5.9 %", "10 %", "44 %", "100 %", "NaN %"]


def test_columns_of_numbers_are_told_from_text_and_hashes():
    table = Table(
        ["case", "rows", "time", "share", "hash", "date", "note"],
        [
            ["csv", 1140, "2.06 ms", "44 %", HASH, "2026-05-01", None],
            ["npy", None, "1,310 s", "5.9 %", "12345abc" * 8, "2026-05-02", "3 of 4"],
        ],
    )
    assert table.numeric() == [False, True, True, True, False, False, False]
    assert Table(["a", "b"], []).numeric() == [False, False]


def test_a_row_of_another_length_is_our_fault():
    with pytest.raises(AssertionError, match="row 1 of 'sizes' has 1 cells for 2 columns"):
        Table(["a", "b"], [[1, 2], [3]], "sizes")


def test_a_pipe_gets_whole_cells_and_aligned_numbers(capsys):
    long = "x" * 200
    print_table(Table(["case", "rows"], [[long, 7], [HASH, 1140], ["none", None]], "Sizes"))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "Sizes"
    assert any(long in line for line in lines)
    ends = {len(line) for line in lines if line.endswith(("7", "1,140", "–"))}
    assert len(ends) == 1


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_folded_cells_and_none_of_a_names_escapes(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")  # 80 columns, no styles
    stream = _Terminal()
    print_table(Table(["hash \x1b[2J"], [[HASH * 2], ["[bold]\x1b]0;owned\x07"]]), stream)
    text = stream.getvalue()
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "".join(line.strip() for line in text.splitlines()).count(HASH) == 2
    assert "\x1b[2J" not in text
    assert "\x07" not in text
    assert "[bold]�]0;owned�" in text
