"""Shards: one conformance class for every format, then what only the front of the store does."""

from __future__ import annotations

import pickle
import re
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from tapeline.errors import StoreError
from tapeline.session import Session, SessionKey
from tapeline.store import EVERY_FORMAT, FORMATS, Shards, write_shards

COLUMNS = ("mid", "bid, best", 'ask "best"')
ODD = np.array(
    [
        [-0.0, 0.0, 1.0],
        [1e-45, -1e-45, 1.1754942e-38],  # denormals: the smallest and the largest
        [1.1754944e-38, -3.4028235e38, 3.4028235e38],
        [16777217.0, 0.1, 1 / 3],
        [61686.12, 1e-7, 123456789.0],
    ],
    np.float32,
)


def bits(array: np.ndarray) -> list[int]:
    return np.ascontiguousarray(array).view(np.uint32).ravel().tolist()


def session(name: str = "A", rows: int = 4, **changes) -> Session:
    values = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3) / 7
    times = 2**60 + 500_000_000 * np.arange(rows, dtype=np.int64) + 1
    arguments = {
        "key": SessionKey(name, "2015-04-30", 1),
        "values": values,
        "columns": COLUMNS,
        "times": times,
        "age_ns": np.arange(rows, dtype=np.int64) * 2**40 + 1,
        "valid": np.arange(rows) % 3 != 1,
        "origin": 61686.1,
    }
    return Session(**{**arguments, **changes})


def same(one: Session, other: Session) -> bool:
    """Equal in every field, bit for bit; `valid=None` means that all rows are."""

    def fields(s: Session) -> tuple:
        valid = [True] * len(s) if s.valid is None else s.valid.tolist()
        beside = [None if a is None else a.tolist() for a in (s.times, s.age_ns)]
        return (s.key, s.values.shape, bits(s.values), s.columns, *beside, valid, s.origin)

    return fields(one) == fields(other)


def refused(where: object, message: str):
    return pytest.raises(StoreError, match=f"^{re.escape(f'{where}: {message}')}$")


@pytest.mark.parametrize("fmt", EVERY_FORMAT)
class TestEveryFormat:
    """What holds for a store whatever format it lies in."""

    def test_sessions_come_back_as_they_were_written(self, tmp_path: Path, fmt: str) -> None:
        written = [
            session("A"),
            session("B", rows=1, origin=-0.0, valid=None),
            session("C", rows=700),
        ]
        assert write_shards(iter(written), tmp_path, fmt) == tmp_path / fmt
        shards = Shards(tmp_path, fmt)
        assert (len(shards), shards.fmt, shards.columns) == (3, fmt, COLUMNS)
        assert shards.keys == [s.key for s in written]
        assert (shards.lengths.tolist(), shards.offsets.tolist()) == ([4, 1, 700], [0, 4, 5, 705])
        assert (shards.lengths.dtype, shards.offsets.dtype) == (np.int64, np.int64)
        assert all(map(same, shards.sessions(), written))
        assert shards.verify() == []

    def test_the_matrix_is_all_rows_in_order_and_read_only(self, tmp_path: Path, fmt: str) -> None:
        written = [session("A"), session("B", rows=2)]
        write_shards(written, tmp_path, fmt)
        shards = Shards(tmp_path, fmt)
        assert bits(shards.mm) == bits(np.concatenate([s.values for s in written]))
        assert (shards.mm.dtype, shards.mm.flags.c_contiguous) == (np.float32, True)
        assert np.shares_memory(shards.values(1), shards.mm)
        with pytest.raises(ValueError, match="read-only"):
            shards.mm[0, 0] = 1
        with pytest.raises(ValueError, match="read-only"):
            shards.values(0)[0, 0] = 1

    @pytest.mark.parametrize("odd", [ODD, np.full((3, 3), -0.0, np.float32)])
    def test_odd_floats_keep_every_bit(self, tmp_path: Path, fmt: str, odd) -> None:
        write_shards([odd], tmp_path, fmt)
        assert bits(Shards(tmp_path, fmt).mm) == bits(odd)

    def test_nan_and_infinity_are_refused_and_named(self, tmp_path: Path, fmt: str) -> None:
        values = ODD.copy()
        values[2, 1] = values[4, 0] = np.inf
        values[3, 2] = np.nan
        with refused(
            "session A/2015-04-30/1, row 2, column bid, best",
            "expected finite values, found inf, the first of 3 such rows. "
            'Mend the values, or keep windows off such rows with nan="mark".',
        ):
            write_shards([session(rows=5, values=values, valid=None)], tmp_path / "s", fmt)
        assert list(tmp_path.iterdir()) == []

    def test_marked_rows_may_hold_anything(self, tmp_path: Path, fmt: str) -> None:
        payload = np.array([0x7FC01234, 0xFFC00000, 0x7F800001], np.uint32).view(np.float32)
        values = np.array([[1, 2, 3], payload, [np.inf, -np.inf, np.nan], [4, 5, 6]], np.float32)
        write_shards([session(values=values, valid=None)], tmp_path, fmt, nan="mark")
        shards = Shards(tmp_path, fmt)
        assert shards.valid(0).tolist() == [True, False, False, True]
        assert shards.verify() == []
        nan = 0x7FC00000  # one NaN for all, or fingerprints would depend on the format
        assert bits(shards.mm)[3:9] == [nan, nan, nan, 0x7F800000, 0xFF800000, nan]
        already = session(values=values, valid=np.array([True, False, False, False]))
        write_shards([already], tmp_path / "t", fmt)  # refuses only what isn't marked
        assert Shards(tmp_path / "t").valid(0).tolist() == [True, False, False, False]

    @pytest.mark.parametrize("rows", [[0], [0, 0], [0, 2], [2, 0], [2, 0, 3], [1]])
    def test_sessions_without_rows_are_kept(self, tmp_path: Path, fmt: str, rows) -> None:
        written = [session(str(i), rows=n) for i, n in enumerate(rows)]
        write_shards(written, tmp_path, fmt)
        shards = Shards(tmp_path, fmt)
        assert shards.lengths.tolist() == rows
        assert shards.mm.shape == (sum(rows), 3)
        assert all(map(same, shards.sessions(), written))
        assert shards.verify() == []

    @pytest.mark.parametrize("rows", [[0, 2], [2, 0]])
    def test_a_session_without_rows_must_have_the_same_columns(
        self, tmp_path: Path, fmt: str, rows: list[int]
    ) -> None:
        odd = session("B", rows=rows[1], columns=("mid", "x", "y"))
        with refused(
            "session B/2015-04-30/1",
            'expected the 3 columns of A/2015-04-30/1: mid, bid, best, ask "best", '
            "found 3: mid, x, y. Write sessions of other columns to a store of their own.",
        ):
            write_shards([session("A", rows=rows[0]), odd], tmp_path / "s", fmt)
        assert list(tmp_path.iterdir()) == []

    def test_plain_arrays_of_any_layout_give_the_same_store(self, tmp_path: Path, fmt: str) -> None:
        layouts = {
            "plain": ODD,
            "big-endian": ODD.astype(">f4"),
            "float64": ODD.astype(np.float64),
            "columns first": np.asfortranarray(ODD),
            "negative stride": np.ascontiguousarray(ODD[::-1, ::-1])[::-1, ::-1],
            "every second": np.repeat(ODD, 2, axis=0)[::2],
            "list": ODD.tolist(),
        }
        prints = set()
        for name, array in layouts.items():
            write_shards([array, array], tmp_path / name, fmt)
            shards = Shards(tmp_path / name, fmt)
            assert bits(shards.mm) == 2 * bits(ODD)
            assert shards.keys == [SessionKey("array-0"), SessionKey("array-1")]
            assert (shards.times(0), shards.age_ns(0)) == (None, None)
            assert shards.columns == ("c0", "c1", "c2")
            prints.add(shards.fingerprint)
        assert len(prints) == 1

    def test_times_of_another_byte_order_come_back(self, tmp_path: Path, fmt: str) -> None:
        times = np.array([1, 2**62, 2**63 - 1])
        given_ = session(rows=3, times=times.astype(">i8"), age_ns=times[::-1])
        write_shards([given_], tmp_path, fmt)
        shards = Shards(tmp_path)
        beside = [shards.times(0), shards.age_ns(0)]
        assert [array.tolist() for array in beside] == [times.tolist(), times[::-1].tolist()]
        assert {array.dtype for array in beside} == {np.dtype(np.int64)}

    @pytest.mark.parametrize("beside", [("times",), ("age_ns",), ()])
    def test_a_store_may_lack_times_or_ages(self, tmp_path: Path, fmt: str, beside) -> None:
        lacking = {name: None for name in ("times", "age_ns") if name not in beside}
        written = [session("A", **lacking), session("B", rows=0, **lacking)]
        write_shards(written, tmp_path, fmt)
        assert all(map(same, Shards(tmp_path, fmt).sessions(), written))
        other = session("C")
        names = ", ".join(["values", *beside])
        with refused(
            "session C/2015-04-30/1",
            f"expected {names}, as A/2015-04-30/1 has, found values, times, age_ns. "
            "Give all sessions times and ages, or none.",
        ):
            write_shards([*written, other], tmp_path / "s", fmt)

    def test_a_store_can_be_written_from_a_store(self, tmp_path: Path, fmt: str) -> None:
        write_shards([session("A"), session("B", rows=0)], tmp_path / "a", "mmap")
        first = Shards(tmp_path / "a")
        write_shards(first.sessions(), tmp_path / "b", fmt)
        assert Shards(tmp_path / "b").fingerprint == first.fingerprint

    @settings(deadline=None, max_examples=15)
    @given(
        blocks=st.lists(
            nps.arrays(
                np.float32,
                st.tuples(st.integers(0, 5), st.just(2)),
                elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
            ),
            min_size=1,
            max_size=4,
        )
    )
    def test_any_finite_float32_comes_back(self, tmp_path_factory, fmt: str, blocks) -> None:
        root = tmp_path_factory.mktemp("store")
        write_shards(blocks, root, fmt)
        shards = Shards(root, fmt)
        assert bits(shards.mm) == bits(np.concatenate(blocks))
        assert shards.lengths.tolist() == [len(block) for block in blocks]
        assert shards.verify() == []

    def test_the_size_is_that_of_all_files(self, tmp_path: Path, fmt: str) -> None:
        write_shards([session("A"), session("B")], tmp_path, fmt)
        files = [p.stat().st_size for p in (tmp_path / fmt).rglob("*") if p.is_file()]
        assert Shards(tmp_path, fmt).bytes == sum(files)

    def test_a_pickled_store_opens_itself_again(self, tmp_path: Path, fmt: str) -> None:
        write_shards([np.ones((50_000, 3), np.float32)], tmp_path, fmt)
        shards = Shards(tmp_path, fmt)
        sent = pickle.dumps(shards)
        assert len(sent) < 1_000  # a pickled mapping would be all of its bytes
        received = pickle.loads(sent)
        assert (received.fmt, bits(received.mm)) == (fmt, bits(shards.mm))

    def test_keys_must_differ(self, tmp_path: Path, fmt: str) -> None:
        with refused(
            "session A/2015-04-30/1",
            "expected a key that no other session has, "
            "found the same instrument, date and segment twice. "
            "Number the segments of a date, or drop the repeated session.",
        ):
            write_shards([session("A"), session("B"), session("A")], tmp_path / "s", fmt)
        assert list(tmp_path.iterdir()) == []

    def test_no_sessions_is_refused(self, tmp_path: Path, fmt: str) -> None:
        with refused(
            tmp_path / "s",
            "expected at least one session, found none. "
            "Check that the input holds rows, and what the reader's report says was dropped.",
        ):
            write_shards([], tmp_path / "s", fmt)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, FileExistsError])
    def test_an_error_of_the_source_passes_through_and_leaves_nothing(
        self, tmp_path: Path, fmt: str, kind: type[BaseException]
    ) -> None:
        def source():
            yield session("A")
            raise kind("of the source")

        with pytest.raises(kind, match="of the source"):
            write_shards(source(), tmp_path / "x" / "s", fmt)
        assert list(tmp_path.iterdir()) == []

    def test_an_occupied_place_is_refused_and_left_alone(self, tmp_path: Path, fmt: str) -> None:
        write_shards([session("A")], tmp_path, fmt)
        before = Shards(tmp_path, fmt).fingerprint
        with refused(
            tmp_path / fmt,
            "expected a place for new shards, found files already there. "
            "Choose another folder, or replace them with `--replace` (`replace=True`).",
        ):
            write_shards([session("B")], tmp_path, fmt)
        assert Shards(tmp_path, fmt).fingerprint == before

    def test_replacing_keeps_the_old_until_the_new_is_whole(self, tmp_path: Path, fmt: str) -> None:
        write_shards([session("A")], tmp_path, fmt)
        write_shards([session("B")], tmp_path, fmt, replace=True)
        assert Shards(tmp_path, fmt).keys == [SessionKey("B", "2015-04-30", 1)]
        with pytest.raises(StoreError):
            write_shards([session("C"), session("C")], tmp_path, fmt, replace=True)
        assert Shards(tmp_path, fmt).keys == [SessionKey("B", "2015-04-30", 1)]
        assert [p.name for p in tmp_path.iterdir()] == [fmt]

    def test_a_store_that_is_replaced_can_still_be_read(self, tmp_path: Path, fmt: str) -> None:
        write_shards([session("A", rows=3)], tmp_path, fmt)
        shards = Shards(tmp_path, fmt)
        before = bits(shards.mm)
        write_shards(shards.sessions(), tmp_path, fmt, replace=True)
        write_shards([session("B")], tmp_path, fmt, replace=True)
        assert bits(shards.mm) == before


# the fingerprint


def fingerprint(root: Path, *sessions: Session, fmt: str = "mmap") -> str:
    return Shards(write_shards(sessions, root, fmt, replace=True).parent, fmt).fingerprint


def test_all_formats_have_one_fingerprint(tmp_path: Path) -> None:
    nan = session("B", values=np.full((4, 3), np.nan), valid=np.zeros(4, np.bool_))
    assert len({fingerprint(tmp_path, session(), nan, fmt=fmt) for fmt in EVERY_FORMAT}) == 1


def changed(name: str, row: int) -> np.ndarray:
    array = getattr(session(), name).copy()
    array[row] = ~array[row] if name == "valid" else np.nextafter(array[row], 9, dtype=array.dtype)
    return array


CHANGES = {
    "a value": {"values": changed("values", 2)},
    "the sign of a zero": {"values": np.where(session().values == 0, -0.0, session().values)},
    "the instrument": {"key": SessionKey("B", "2015-04-30", 1)},
    "the date": {"key": SessionKey("A", "2015-05-01", 1)},
    "the segment": {"key": SessionKey("A", "2015-04-30", 2)},
    "the origin": {"origin": np.nextafter(61686.1, 0)},
    "a time": {"times": session().times - np.array([1, 0, 0, 0])},
    "an age": {"age_ns": session().age_ns + np.array([0, 0, 0, 1])},
    "no times": {"times": None},
    "no ages": {"age_ns": None},
    "a mark": {"valid": changed("valid", 3)},
    "a column's name": {"columns": ("mid", "b", "c")},
}


def test_a_fingerprint_changes_with_anything_in_a_session(tmp_path: Path) -> None:
    prints = {what: fingerprint(tmp_path, session(**change)) for what, change in CHANGES.items()}
    prints["nothing"] = fingerprint(tmp_path, session())
    assert len(set(prints.values())) == len(CHANGES) + 1
    assert prints["nothing"] == fingerprint(tmp_path, session())


def test_a_fingerprint_changes_with_order_and_cuts(tmp_path: Path) -> None:
    a, b = session("A"), session("B")
    assert fingerprint(tmp_path, a, b) != fingerprint(tmp_path, b, a)
    assert fingerprint(tmp_path, a, b) != fingerprint(tmp_path, a)
    half = [Session(SessionKey(f"array-{i}"), ODD[i : i + 1]) for i in range(2)]
    whole = Session(SessionKey("array-0"), ODD[:2])
    assert fingerprint(tmp_path, *half) != fingerprint(tmp_path, whole)


# the front


def test_the_fastest_format_there_is_opened(tmp_path: Path) -> None:
    for fmt in reversed(EVERY_FORMAT):
        write_shards([ODD], tmp_path, fmt)
        assert Shards(tmp_path).fmt == fmt
    assert EVERY_FORMAT == ("mmap", "npy", "zarr", "csv")
    assert FORMATS == ("mmap", "npy", "csv")  # what needs no extra
    assert Shards(str(tmp_path), "csv").fmt == "csv"


@pytest.mark.parametrize(
    ("there", "fmt", "said"),
    [
        (
            [],
            None,
            "expected a store in mmap or npy or zarr or csv format, found no store. "
            "Make one with `tapeline ingest` or `write_shards`.",
        ),
        (
            [],
            "npy",
            "expected a store in npy format, found no store. "
            "Make one with `tapeline ingest` or `write_shards`.",
        ),
        (
            ["npy", "csv"],
            "mmap",
            "expected a store in mmap format, found one in npy, csv. "
            "Convert it with `tapeline store convert {root} --to mmap`.",
        ),
    ],
)
def test_a_store_that_is_not_there_is_told(tmp_path: Path, there, fmt, said: str) -> None:
    for name in there:
        write_shards([ODD], tmp_path, name)
    with refused(tmp_path, said.format(root=tmp_path)):
        Shards(tmp_path, fmt)


def test_an_unknown_format_is_refused_for_reading_and_writing(tmp_path: Path) -> None:
    write_shards([ODD], tmp_path, "npy")
    with refused(
        "format 'parquet'",
        "expected one of mmap, npy, zarr, csv, found another name. Choose mmap for training.",
    ):
        write_shards([ODD], tmp_path, "parquet")
    with refused(
        "format 'parquet'",
        "expected one of mmap, npy, zarr, csv, found another name. Choose mmap for training.",
    ):
        Shards(tmp_path, "parquet")


def test_an_unknown_nan_policy_is_refused(tmp_path: Path) -> None:
    with refused(
        "nan='drop'",
        "expected one of refuse, mark, found another name. "
        "Refuse rows that aren't finite, or mark them invalid.",
    ):
        write_shards([ODD], tmp_path / "s", "mmap", nan="drop")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_store_cannot_lie_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("kept")
    with refused(
        tmp_path / "s" / "mmap",
        f"expected a folder that can be made and written to, found a file, {tmp_path / 's'}. "
        "Choose another folder, or change its permissions.",
    ):
        write_shards([ODD], tmp_path / "s", "mmap")
    assert (tmp_path / "s").read_text() == "kept"


@pytest.mark.parametrize("name", ["time_ns", "age_ns"])
def test_csv_refuses_the_column_names_it_needs_itself(tmp_path: Path, name: str) -> None:
    given_ = session(columns=("mid", "a", name))
    write_shards([given_], tmp_path, "mmap")
    with refused(
        "session A/2015-04-30/1",
        "expected columns other than time_ns and age_ns, which CSV needs itself, "
        f"found a column named {name}. Rename the column, or use the mmap or npy format.",
    ):
        write_shards([given_], tmp_path, "csv")


def test_a_column_is_found_by_name_or_refused(tmp_path: Path) -> None:
    write_shards([ODD], tmp_path, "mmap")
    shards = Shards(tmp_path)
    assert shards.column("c2") == 2
    with refused(
        tmp_path / "mmap",
        "expected one of its 3 columns (c0, c1, c2), found `mid`. Name one of the store's columns; "
        "`columns` lists them.",
    ):
        shards.column("mid")
    write_shards([np.ones((2, 41))], tmp_path / "wide", "mmap")
    with refused(
        tmp_path / "wide" / "mmap",
        "expected one of its 41 columns (c0, c1, c2, c3, …), found `c400`. Write `c40`, the "
        "nearest.",
    ):
        Shards(tmp_path / "wide").column("c400")


def test_the_rows_of_a_mapped_session_are_a_plain_array(tmp_path: Path) -> None:
    """Slicing a memmap costs a microsecond more, a window at a time."""
    write_shards([ODD], tmp_path, "mmap")
    shards = Shards(tmp_path)
    assert type(shards.values(0)) is np.ndarray
    assert np.shares_memory(shards.values(0), shards.mm)


def test_sessions_of_other_columns_are_refused_with_both_lists_shortened(tmp_path: Path) -> None:
    with refused(
        "session array-1",
        "expected the 6 columns of array-0: c0, c1, c2, c3, …, found 2: c0, c1. "
        "Write sessions of other columns to a store of their own.",
    ):
        write_shards([np.zeros((1, 6)), np.zeros((1, 2))], tmp_path, "npy")


def test_sessions_are_read_one_at_a_time(tmp_path: Path) -> None:
    made: list[weakref.ref[np.ndarray]] = []
    most = 0

    def source():
        nonlocal most
        for _ in range(6):
            block = np.ones((10, 2), np.float32)
            made.append(weakref.ref(block))
            most = max(most, sum(ref() is not None for ref in made))
            yield block
            del block

    write_shards(source(), tmp_path, "mmap")
    assert most <= 3  # the first, the last and the one being made
