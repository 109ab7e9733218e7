"""Sessions: one layout whatever came in, and a refusal of what doesn't fit together."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from tapeline.errors import StoreError
from tapeline.session import Session, SessionKey, as_session

KEY = SessionKey("BTCUSD", "2015-04-30")
WHERE = "session BTCUSD/2015-04-30"


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def refused(where: str, message: str):
    return pytest.raises(StoreError, match=f"^{re.escape(f'{where}: {message}')}$")


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (SessionKey("ES"), "ES"),
        (SessionKey("ES", "2024-03-01"), "ES/2024-03-01"),
        (SessionKey("ES", "2024-03-01", 2), "ES/2024-03-01/2"),
        (SessionKey("ES", segment=2), "ES/2"),
    ],
)
def test_a_key_reads_as_a_path(key: SessionKey, text: str) -> None:
    assert str(key) == text


def test_keys_sort_by_instrument_date_segment() -> None:
    keys = [SessionKey("A", "2", 1), SessionKey("A", "10"), SessionKey("A", "2"), SessionKey("B")]
    assert sorted(keys) == [keys[1], keys[2], keys[0], keys[3]]


@settings(deadline=None, max_examples=60)
@given(
    nps.arrays(
        st.sampled_from(["<f4", ">f4", "<f8", ">f8", "<f2", "<i4", ">i8", "<u1", "?"]),
        nps.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=6),
    ),
    st.sampled_from([1, -1, 2, -2]),
    st.sampled_from([1, -1]),
    st.booleans(),
)
def test_any_numbers_in_any_layout_become_native_float32_rows(
    array: np.ndarray, row_step: int, column_step: int, fortran: bool
) -> None:
    given_ = (np.asfortranarray(array) if fortran else array)[::row_step, ::column_step]
    values = Session(KEY, given_).values
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = np.array(given_.tolist(), given_.dtype.newbyteorder("=")).astype(np.float32)
    np.testing.assert_array_equal(values, wanted)  # NaN at the same places too
    assert values.dtype == np.dtype("=f4")
    assert values.flags.c_contiguous


def test_float32_rows_keep_every_bit_and_are_not_copied() -> None:
    values = np.array([[-0.0, 1e-45], [3.4028235e38, np.nan]], np.float32)
    session = Session(KEY, values)
    assert np.shares_memory(session.values, values)
    np.testing.assert_array_equal(bits(session.values), bits(values))


def test_what_float32_cannot_hold_becomes_infinite_without_a_warning() -> None:
    values = Session(KEY, np.array([[1e39, -1e300, 1.797e308]])).values
    np.testing.assert_array_equal(values, [[np.inf, -np.inf, np.inf]])


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (np.zeros(3), "ndarray of shape [3]"),
        (np.zeros((2, 3, 4)), "ndarray of shape [2, 3, 4]"),
        (np.float32(3.0), "ndarray of shape []"),
        ([], "ndarray of shape [0]"),
        (None, "ndarray of shape []"),
        ([[1.0], [2.0, 3.0]], "rows of different lengths"),
    ],
)
def test_a_plain_array_of_another_shape_is_refused(value: object, found: str) -> None:
    with refused(
        "session array-7",
        f"expected values of shape [rows, columns], found {found}. "
        "Give a two-dimensional array, one row per instant.",
    ):
        as_session(value, 7)


def test_a_list_is_no_array_of_a_session_but_a_plain_array_may_be_one() -> None:
    with refused(
        WHERE,
        "expected values of shape [rows, columns], found list of shape [1, 2]. "
        "Give a two-dimensional array, one row per instant.",
    ):
        Session(KEY, [[1.0, 2.0]])  # type: ignore[arg-type]
    session = as_session([[1, 2], [3, 4]], 7)
    assert session.key == SessionKey("array-7")
    assert session.columns == ("c0", "c1")
    assert (session.times, session.age_ns, session.valid, session.origin) == (None, None, None, 0.0)
    assert len(session) == 2


def test_a_session_passes_through() -> None:
    session = Session(KEY, np.zeros((1, 1)))
    assert as_session(session, 3) is session


@pytest.mark.parametrize("rows", [0, 3])
def test_values_without_columns_are_refused(rows: int) -> None:
    with refused(
        WHERE,
        f"expected at least one column, found shape [{rows}, 0]. "
        "Give an array with a column for each quantity.",
    ):
        Session(KEY, np.zeros((rows, 0)))


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (np.array([["1.5"]]), "<U3"),
        (np.array([[1.5]], object), "object"),
        (np.array([[1 + 2j]]), "complex128"),
        (np.array([["2015-04-30"]], "datetime64[ns]"), "datetime64[ns]"),
    ],
)
def test_what_is_not_a_number_is_refused(values: np.ndarray, dtype: str) -> None:
    with refused(
        WHERE, f"expected numbers, found dtype {dtype}. Convert the values to numbers first."
    ):
        Session(KEY, values)


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        (("a",), "1 names, 1 distinct"),
        (("a", "a"), "2 names, 1 distinct"),
        ("abc", "3 names, 3 distinct"),
    ],
)
def test_column_names_must_be_as_many_as_columns_and_distinct(columns, found: str) -> None:
    with refused(
        WHERE, f"expected 2 distinct column names, found {found}. Give each column one name."
    ):
        Session(KEY, np.zeros((1, 2)), columns)


@pytest.mark.parametrize("origin", [np.nan, np.inf, -np.inf])
def test_an_origin_that_is_no_price_is_refused(origin: float) -> None:
    with refused(
        f"{WHERE}, origin",
        f"expected a finite price, found {origin}. "
        "Take the origin from a row whose price is known, or 0.",
    ):
        Session(KEY, np.zeros((1, 1)), origin=origin)


@pytest.mark.parametrize("name", ["times", "age_ns"])
@pytest.mark.parametrize(
    ("beside", "found"),
    [
        (np.zeros(2), "float64 of shape [2]"),
        (np.zeros(3, np.int64), "int64 of shape [3]"),
        (np.zeros((2, 1), np.int64), "int64 of shape [2, 1]"),
        (np.zeros(2, np.int32), "int32 of shape [2]"),
        (np.zeros(2, np.uint64), "uint64 of shape [2]"),
        (np.zeros(2, "datetime64[ns]"), "datetime64[ns] of shape [2]"),
        (5, "int64 of shape []"),
    ],
)
def test_times_and_ages_are_int64_one_per_row(name: str, beside: object, found: str) -> None:
    with refused(
        f"{WHERE}, {name}",
        f"expected int64 of shape [2], found {found}. Give one entry of that type per row.",
    ):
        Session(KEY, np.zeros((2, 1)), **{name: beside})


@pytest.mark.parametrize(
    ("valid", "found"),
    [(np.ones(3, np.bool_), "bool of shape [3]"), (np.ones(2, np.int8), "int8 of shape [2]")],
)
def test_valid_is_bool_one_per_row(valid: np.ndarray, found: str) -> None:
    with refused(
        f"{WHERE}, valid",
        f"expected bool of shape [2], found {found}. Give one entry of that type per row.",
    ):
        Session(KEY, np.zeros((2, 1)), valid=valid)


@pytest.mark.parametrize("dtype", [">i8", "<i8", np.longlong])
def test_times_of_any_byte_order_and_stride_become_native(dtype) -> None:
    times = np.array([30, -1, 20, -1, 10, -1]).astype(dtype)[::2][::-1]
    session = Session(KEY, np.zeros((3, 1)), times=times, age_ns=times)
    for beside in (session.times, session.age_ns):
        assert beside is not None
        assert beside.dtype.newbyteorder("=") == beside.dtype == np.int64
        assert beside.flags.c_contiguous
        assert beside.tolist() == [10, 20, 30]


def test_a_step_back_in_time_names_its_row() -> None:
    with refused(
        f"{WHERE}, row 2",
        "expected times that never step back, found 4 ns after 5 ns. "
        "Sort the rows by time before making a session of them.",
    ):
        Session(KEY, np.zeros((4, 1)), times=np.array([5, 5, 4, 3]))


@settings(deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=8))
@example([-(2**63), 2**63 - 1])
@example([2**63 - 1, -(2**63)])
def test_times_are_taken_exactly_when_sorted(times: list[int]) -> None:
    """Over the whole of int64, where a difference of two times wraps."""
    array = np.array(times, np.int64)
    if times == sorted(times):
        assert Session(KEY, np.zeros((len(times), 1)), times=array).times is not None
    else:
        with pytest.raises(StoreError, match="never step back"):
            Session(KEY, np.zeros((len(times), 1)), times=array)


def test_a_session_is_frozen() -> None:
    session = Session(KEY, np.zeros((1, 1)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        session.origin = 2.0  # type: ignore[misc]
