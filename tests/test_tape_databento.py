"""Databento's books in each of their spellings: twins of the real samples, and their facts."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from conformance_tape import TapeConformance, assert_same
from helpers_databento import (
    BAD_BOOK,
    T0,
    UNITS,
    book,
    write_csv,
    write_dbn,
    write_parquet,
)

from tapeline.errors import TapeError
from tapeline.tape import Calendar, GridOptions, Policy, detect, read_tape
from tapeline.tape.readers import text
from tapeline.tape.readers.base import Source
from tapeline.tape.readers.databento import DatabentoOptions, DatabentoReader
from tapeline.tape.readers.databento_dbn import DbnFile
from tapeline.tape.readers.databento_records import (
    MBO,
    UNDEFINED_PRICE,
    Spelling,
    mbp,
)
from tapeline.tape.report import Counts

SAMPLES = Path(__file__).parents[2] / "shared" / "samples" / "databento"
EVERY = GridOptions(step_ns=None, depth=2)
MS = 10**6

# A thin market before its open: one-sided at first, then an order far off, then trading.
BOOKS = np.concatenate(
    [
        book(297_109_209, [(502, 2)], []),
        book(297_205_224, [(512.01, 1), (502, 2)], []),
        book(580_223_478, [(512.01, 1), (502, 2)], [(539, 17)]),
        book(900 * MS, [(512.01, 1), (510.01, 1), (502, 2)], [(539, 17)]),
        book(1_400 * MS, [(512.01, 1), (510.01, 1)], [(538.5, 3), (539, 17)]),
        book(1_400 * MS, [(512.01, 2), (510.01, 1)], [(538.5, 3), (539, 17)]),
        book(2_100 * MS, [(512.01, 2), (510.01, 1)], [(538.4, 3), (539, 17)]),
        book(2_600 * MS, [(512.02, 2), (510.01, 1)], [(538.4, 3), (539, 17)]),
        book(3_300 * MS, [(512.03, 2), (510.01, 1)], [(538.3, 3), (539, 17)]),
        book(4_000 * MS, [(512.03, 5), (510.01, 1)], [(538.3, 3), (539, 17)]),
    ]
)


class TestDbn(TapeConformance):
    reader = "databento"
    is_text = False

    def write(self, folder: Path) -> list[Path]:
        return [write_dbn(folder / "xyz.dbn.zst", BOOKS)]


class TestPlainDbn(TapeConformance):
    reader = "databento"
    is_text = False

    def write(self, folder: Path) -> list[Path]:
        return [write_dbn(folder / "xyz.dbn", BOOKS, packed=False)]


class TestPrettyCsv(TapeConformance):
    reader = "databento"

    def write(self, folder: Path) -> list[Path]:
        return [write_csv(folder / "xyz.csv", BOOKS, index=True, reverse=True)]


class TestRawCsv(TapeConformance):
    reader = "databento"

    def write(self, folder: Path) -> list[Path]:
        return [write_csv(folder / "xyz.csv", BOOKS, pretty=False)]


class TestParquet(TapeConformance):
    reader = "databento"
    is_text = False

    def write(self, folder: Path) -> list[Path]:
        return [write_parquet(folder / "xyz.parquet", BOOKS)]


def rows_of(path: Path, **given):
    """The session of each state, and the report."""
    tape = read_tape(path, **{"grid": EVERY, **given})
    (session,) = tape
    return session, tape.report


def refusal(path: Path, **given) -> str:
    with pytest.raises(TapeError) as error:
        list(read_tape(path, format="databento", **given))
    return str(error.value).replace(str(path.parent), "DIR")


def test_all_spellings_give_the_same_numbers(tmp_path):
    paths = [
        write_dbn(tmp_path / "a.dbn.zst", BOOKS),
        write_csv(tmp_path / "pretty.csv", BOOKS),
        write_csv(tmp_path / "raw.csv", BOOKS, pretty=False),
        write_csv(tmp_path / "reverse.csv", BOOKS, index=True, reverse=True),
        *(
            write_parquet(tmp_path / f"{prices}.parquet", BOOKS, prices)
            for prices in ("float", "decimal", "integer")
        ),
    ]
    expected, report = rows_of(paths[0])
    assert expected.key.instrument == "XYZ"
    assert (expected.times - T0).tolist() == (BOOKS["ts_recv"].astype(np.int64) - T0).tolist()
    assert expected.valid.tolist() == [False, False] + [True] * 8
    assert expected.origin == 512.01
    assert expected.values[2].tolist() == pytest.approx(
        [13.495, 0, 1, 26.99, 17, -10.01, 2, 26.99, 0]
    )
    assert report.detected == {
        "schema": "mbp-10",
        "clock": "ts_recv",
        "instrument_id": "7",
        "publisher_id": "2",
    }
    details = [{}] + [{"prices": p, **u} for p, u in [
        ("decimal", {}), ("integer", {"time_unit": "ns"}), ("decimal", {}), ("decimal", {}),
        ("decimal", {}), ("integer", {}),
    ]]  # fmt: skip
    for path, detail in zip(paths, details, strict=True):
        session, other = rows_of(path)
        assert_same([session], [expected])
        assert other.counts == report.counts
        assert other.detected == report.detected | detail


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("ts_out", [True, False])
def test_versions_give_the_same_numbers(tmp_path, version, packed, ts_out):
    path = write_dbn(tmp_path / "x.dbn", BOOKS, version=version, packed=packed, ts_out=ts_out)
    assert detect(path).name == "databento"
    expected, _ = rows_of(write_csv(tmp_path / "x.csv", BOOKS))
    assert_same([rows_of(path)[0]], [expected])


def test_the_dtypes_are_those_of_the_package(tmp_path):
    dbn = pytest.importorskip("databento_dbn", reason="the extra `markets` isn't installed")
    for ours, theirs in ((MBO, dbn.MBOMsg), (mbp(1), dbn.MBP1Msg), (mbp(10), dbn.MBP10Msg)):
        flat = []
        for name, (kind, offset) in ours.fields.items():
            if name != "levels":
                flat.append((name, kind, offset))
                continue
            for level in range(kind.shape[0]):
                for part, (of, at) in kind.base.fields.items():
                    place = offset + level * kind.base.itemsize + at
                    flat.append((f"{part}_{level:02}", of, place))
        other = np.dtype(theirs._dtypes)
        assert flat == [(name, *other.fields[name][:2]) for name in other.names]


@pytest.mark.parametrize("version", [1, 2, 3])
def test_the_decoder_of_the_package_reads_the_same(tmp_path, version):
    dbn = pytest.importorskip("databento_dbn", reason="the extra `markets` isn't installed")
    path = write_dbn(tmp_path / "x.dbn", BOOKS, version=version, packed=False)
    assert_decoded_alike(dbn, path, path.read_bytes())


def assert_decoded_alike(dbn, path: Path, content: bytes) -> None:
    decoder = dbn.DBNDecoder()
    decoder.write(content)
    theirs = [record for record in decoder.decode() if not isinstance(record, dbn.Metadata)]
    file = DbnFile(path, Source([path], Counts()), Spelling("ts_recv", None, None, None))
    ours = np.concatenate(list(file.records()))
    assert len(ours) == len(theirs) > 0
    for name in ("ts_recv", "ts_event", "publisher_id", "instrument_id", "sequence", "price"):
        assert ours[name].tolist() == [getattr(record, name) for record in theirs]
    for part in ("bid_px", "ask_px", "bid_sz", "ask_sz"):
        expected = [[getattr(level, part) for level in record.levels] for record in theirs]
        assert ours["levels"][part].tolist() == expected


def test_bytes_may_be_cut_anywhere(tmp_path, monkeypatch):
    path = write_dbn(tmp_path / "x.dbn.zst", BOOKS)
    expected, report = rows_of(path)
    for size in (1, 367, 368, 369, 1_000):
        monkeypatch.setattr(text, "BLOCK_BYTES", size)
        session, other = rows_of(path)
        assert_same([session], [expected])
        assert other == report


def test_top_of_book(tmp_path):
    books = np.concatenate([book(n, [(5.5, n + 1)], [(6, 1)], levels=1) for n in range(3)])
    for path in (
        write_dbn(tmp_path / "x.dbn", books, schema="mbp-1"),
        write_csv(tmp_path / "x.csv", books),
    ):
        session, report = rows_of(path, grid=GridOptions(step_ns=None, depth=1))
        assert session.values[:, 2].tolist() == [1, 2, 3]
        assert report.detected["schema"] == "mbp-1"
        assert report.counts.rows_thin == 0


def test_files_continue_each_other(tmp_path):
    paths = [
        write_dbn(tmp_path / "1.dbn.zst", BOOKS[:6]),
        write_dbn(tmp_path / "2.dbn", BOOKS[6:], packed=False, version=1, ts_out=True),
    ]
    expected, _ = rows_of(write_dbn(tmp_path / "x.dbn", BOOKS))
    assert_same(list(read_tape(paths, grid=EVERY)), [expected])
    other = write_dbn(tmp_path / "3.dbn", book(1, [], [], levels=1), schema="mbp-1")
    with pytest.raises(TapeError, match="expected mbp-10, as the first file has, found mbp-1"):
        list(read_tape([paths[0], other]))


def test_an_undefined_book_has_no_mid(tmp_path):
    books = np.concatenate(
        [
            book(43_768_035, [], [], ts_event=T0 + 32_750_003, flags=130),
            *(book(309_957_922, [], [], ts_event=T0 + 2_731_000 + n, flags=0) for n in range(3)),
        ]
    )
    path = write_dbn(tmp_path / "x.dbn.zst", books)
    assert refusal(path) == (
        "DIR/x.dbn.zst: expected data for one valid row or more, found 4 records, 0 events outside "
        "every session and 0 rows, none of them valid. Check the file and the sessions, or lower "
        "step_ns (`--set step_s=…`)."
    )
    # With a market behind it, the rows before are marked.
    books = np.concatenate([books, book(400 * MS, [(77.5, 1)], [(77.6, 1)])])
    for path in (write_dbn(tmp_path / "y.dbn", books), write_csv(tmp_path / "y.csv", books)):
        session, report = rows_of(path)
        assert session.valid.tolist() == [False, False, True]
        assert np.isnan(session.values[:2]).all()
        assert session.values[2, 0] + session.origin == pytest.approx(77.55)
        assert report.counts.states_one_sided == 2
        assert report.counts.other == {"books in the middle of an event, left out": 2}
        assert report.counts.times_stepped_back == 0
        session, report = rows_of(path, options={"clock": "ts_event"})
        assert session.times[0] == T0 + 32_750_003, "no row is earlier than what stood before it"
        assert report.counts.times_stepped_back == 1


def test_a_book_within_an_event_is_no_state(tmp_path):
    books = np.concatenate(
        [
            book(0, [(5, 1)], [(6, 1)]),
            book(1 * MS, [(7, 1)], [(6, 1)], flags=0),  # an aggressor, before its fill
            book(1 * MS, [(5, 1)], [(6.5, 1)]),
            book(2 * MS, [(5, 1)], [(6.6, 1)], flags=0),  # whose end touches no level of the file
            book(3 * MS, [(5, 1)], [(6.7, 1)]),
            book(3 * MS, [(5, 1)], [(6.8, 1)]),
        ]
    )
    session, report = rows_of(write_dbn(tmp_path / "x.dbn", books))
    assert ((session.times - T0) // MS).tolist() == [0, 1, 2, 3, 3]
    assert report.counts.states_crossed == 0
    assert report.counts.other == {"books in the middle of an event, left out": 1}


def test_a_book_after_a_gap_is_taken_as_empty(tmp_path):
    books = np.concatenate([BOOKS, book(5_000 * MS, [(5, 1)], [(6, 1)], flags=128 | BAD_BOOK)])
    session, report = rows_of(write_dbn(tmp_path / "x.dbn", books))
    assert not session.valid[-1]
    assert report.counts.other == {"books after a gap in the channel, taken as empty": 1}


def test_a_stub_quote_is_counted_and_kept(tmp_path):
    books = np.concatenate(
        [
            book(0, [(9.45, 1)], [(17.16, 1), (2147.48, 1)]),
            book(1, [(9.45, 1)], [(2147.48, 1)]),
            book(2, [], [(2147.48, 1)]),
            book(3, [(9.45, 1)], [(17.16, 1)]),
            book(4, [(9.45, 1), (0.01, 5)], [(17.16, 1)]),
        ]
    )
    session, report = rows_of(write_csv(tmp_path / "x.csv", books, index=True))
    asks = session.values[:, 3].astype(float) + session.origin
    assert asks[:2].tolist() == pytest.approx([17.16, 2147.48])
    assert session.valid.tolist() == [True, True, False, True, True]
    assert report.counts.other == {
        "books with a price 10 times off the other side, kept: stub quotes?": 3
    }


def test_several_instruments_are_a_choice(tmp_path):
    both = np.concatenate([BOOKS, BOOKS])
    both["instrument_id"][::2] = 9
    both["publisher_id"][[0, 3]] = 1, 4
    path = write_dbn(tmp_path / "x.dbn", both)
    assert refusal(path) == (
        "DIR/x.dbn: expected records of one instrument and publisher, found 9 of publisher 1, 7 "
        "(XYZ) of publisher 2, 9 of publisher 2 and 7 (XYZ) of publisher 4. Choose with "
        "instrument_id and publisher_id."
    )
    session, report = rows_of(path, options={"instrument_id": 7, "publisher_id": 2})
    assert session.key.instrument == "XYZ"
    assert report.counts.states == 9
    assert report.counts.other == {
        "records of another publisher_id, left out": 2,
        "records of another instrument_id, left out": 9,
    }
    assert report.detected["instrument_id"] == "7"


def test_dbz_is_refused(tmp_path):
    path = tmp_path / "x.dbz"
    path.write_bytes(b"P*M\x18\x90\x00\x00\x00DBZ\x01" + bytes(200))
    assert detect(path).name == "databento"
    assert refusal(path) == (
        "DIR/x.dbz: expected DBN of version 1, 2 or 3, found DBZ, the format before it. Request "
        "the data from Databento again, or convert the file with a release of its command `dbn` "
        "that still reads DBZ."
    )


def test_other_schemas_are_refused_and_live_files_must_be_told(tmp_path):
    path = write_dbn(tmp_path / "x.dbn", BOOKS, schema="trades")
    assert refusal(path) == (
        "DIR/x.dbn: expected records of schema mbo, mbp-1 or mbp-10, found schema trades. Request "
        "one of them from Databento."
    )
    path = write_dbn(tmp_path / "live.dbn", BOOKS, schema=None)
    assert "found no word on the schema, as in a live file. Say which, with schema." in refusal(
        path
    )
    expected, _ = rows_of(write_csv(tmp_path / "x.csv", BOOKS))
    assert_same([rows_of(path, options={"schema": "mbp-10"})[0]], [expected])


def test_records_of_other_kinds_are_counted(tmp_path, monkeypatch):
    heartbeat = bytes([6, 23]) + bytes(22)  # a SystemMsg is of another length
    path = write_dbn(tmp_path / "x.dbn", BOOKS, between=heartbeat * 2)
    expected, _ = rows_of(write_csv(tmp_path / "x.csv", BOOKS))
    for size in (1 << 20, 100):
        monkeypatch.setattr(text, "BLOCK_BYTES", size)
        session, report = rows_of(path)
        assert_same([session], [expected])
        assert report.counts.other["records of other kinds, left out"] == 2


def test_damaged_dbn_is_refused(tmp_path, monkeypatch):
    path = write_dbn(tmp_path / "x.dbn", BOOKS, between=bytes([1, 23, 0, 0]))
    assert refusal(path) == (
        "DIR/x.dbn: expected records of 16 bytes or more, found one of 4. Fetch the file again: it "
        "is damaged."
    )
    path = write_dbn(tmp_path / "x.dbn", BOOKS, packed=False)
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    assert refusal(path) == (
        "DIR/x.dbn: expected whole records up to the end, found 268 bytes of a record of 368. "
        "Fetch the file again: it may be cut short."
    )
    path.write_bytes(content[:60])
    assert re.match(
        r"DIR/x.dbn: expected DBN of version 1, 2 or 3, found version 3, of which databento-dbn "
        r"says: .+\. Fetch the file again if it is damaged, or update databento-dbn\.",
        refusal(path),
    )
    path.write_bytes(content[:3] + b"\x09" + content[4:])
    assert "found version 9" in refusal(path)
    path.write_bytes(content)
    monkeypatch.setitem(sys.modules, "databento_dbn", None)
    assert refusal(path) == (
        "DIR/x.dbn: expected the packages of the extra `markets`, found no databento_dbn. Install "
        'them with `pip install "tapeline[markets]"`.'
    )


def test_what_cannot_be_read_is_left_out_and_counted(tmp_path):
    books = BOOKS.copy()
    books["ts_recv"][4] = 2**64 - 1
    path = write_dbn(tmp_path / "x.dbn", books)
    assert refusal(path).startswith(
        "DIR/x.dbn, line 5: expected at most 0.1000 % of the lines to be unreadable, found 1 of "
        "10, the first being `ts_recv 18446744073709551615`."
    )
    _, report = rows_of(path, max_unreadable_share=0.1)
    assert (report.counts.lines_read, report.counts.lines_unreadable) == (10, 1)
    assert report.counts.states == 9

    path = write_csv(tmp_path / "x.csv", BOOKS)
    lines = path.read_text().splitlines()
    lines[5] = lines[5].replace("538.5", "x")
    lines[6] = lines[6].replace(",128,", ",-1,")
    path.write_text("\n".join(lines))
    assert "line 6: expected at most" in refusal(path)
    _, report = rows_of(path, max_unreadable_share=0.2)
    assert (report.counts.lines_read, report.counts.lines_unreadable) == (10, 2)

    books["ts_recv"][4] = 0
    path = write_parquet(tmp_path / "x.parquet", books)
    assert "x.parquet, line 5: expected at most" in refusal(path)
    _, report = rows_of(path, max_unreadable_share=0.1)
    assert (report.counts.lines_read, report.counts.lines_unreadable) == (10, 1)


def test_a_column_that_is_missing_is_named(tmp_path):
    path = write_csv(tmp_path / "x.csv", BOOKS, without="flags")
    assert detect(path).name == "table"
    assert "found no flags among" in refusal(path)
    path = write_csv(tmp_path / "x.csv", BOOKS, without="ts_recv")
    assert detect(path).name == "databento"
    assert "found no ts_recv among" in refusal(path)
    session, _ = rows_of(path, options={"clock": "ts_event"})
    assert len(session) == 10


@pytest.mark.parametrize(
    ("prices", "option", "mid"),
    [
        (("502", "504"), None, 503.0),
        (("502000000000", "504000000000"), None, 503.0),
        (("5020000", "5040000"), None, 0.00503),
        (("5020000", "5040000"), "decimal", 5_030_000.0),
    ],
)
def test_prices_without_a_point(tmp_path, prices, option, mid):
    path = write_csv(tmp_path / "x.csv", book(0, [(5, 1)], [(6, 1)]))
    bid, ask = prices
    path.write_text(path.read_text().replace("5.000000000", bid).replace("6.000000000", ask))
    session, _ = rows_of(path, options={"prices": option})
    assert session.values[0, 0] + session.origin == pytest.approx(mid)


def test_a_level_needs_a_price_and_a_size(tmp_path):
    books = np.concatenate([book(n, [(5, 1)], [(6, 1), (7, 1), (8, 1)]) for n in range(4)])
    books["levels"]["ask_px"][1:, 1] = UNDEFINED_PRICE
    books["levels"]["ask_sz"][2, 0] = 0
    books["levels"]["ask_sz"][3, 0] = 2**32 - 1
    for path in (
        write_dbn(tmp_path / "x.dbn", books),
        write_csv(tmp_path / "x.csv", books),
        write_csv(tmp_path / "raw.csv", books, pretty=False),
        write_parquet(tmp_path / "x.parquet", books),
    ):
        session, report = rows_of(path)
        assert session.valid.tolist() == [True, True, False, False]
        assert session.values[:2, 7:].tolist() == [[2, 1], [1, 0]]
        assert report.counts.states_one_sided == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("clock", "clock: expected ts_recv or ts_event, found 'x'. Give one of them."),
        ("schema", "schema: expected mbo, mbp-1 or mbp-10, found 'x'. Give one of them."),
        ("prices", "prices: expected decimal or integer, found 'x'. Give one of them."),
    ],
)
def test_an_option_that_is_no_word_is_refused(tmp_path, name, message):
    path = write_csv(tmp_path / "x.csv", BOOKS)
    assert refusal(path, options={name: "x"}) == message


def sample(name: str) -> Path:
    if not SAMPLES.exists():
        pytest.skip(f"the real market files aren't at {SAMPLES}")
    if name.endswith(".zst"):
        pytest.importorskip("databento_dbn", reason="the extra `markets` isn't installed")
    return SAMPLES / name


def states_of(path: Path):
    reader = DatabentoReader(Source([path], Counts()), DatabentoOptions())
    blocks = [block for block in reader.blocks() if len(block.times_ns)]
    joined = blocks[0]
    for block in blocks[1:]:
        joined = block.after(joined)
    return joined


@pytest.mark.samples
def test_the_four_spellings_of_nvda():
    expected, report = rows_of(sample("XNAS.ITCH.NVDA.mbp-10.dbn.zst"))
    assert report.instrument == "NVDA"
    assert (report.first_ns, report.last_ns) == (1609146088297109209, 1609146101004661045)
    for kind in ("pretty.csv", "raw-ints.csv", "parquet"):
        session, other = rows_of(sample(f"converted.NVDA.mbp-10.{kind}"))
        assert_same([session], [expected])
        assert other.counts == report.counts
    states = states_of(sample("XNAS.ITCH.NVDA.mbp-10.dbn.zst"))
    assert (states.sizes == 0).sum(axis=(0, 1)).tolist() == [32, 38]
    prices = states.prices[states.sizes > 0]
    assert (prices.min(), prices.max()) == (502 * UNITS, 539 * UNITS)
    assert report.counts.states_one_sided == 2


@pytest.mark.samples
def test_the_undefined_books_of_brn():
    path = sample("IFEU.IMPACT.BRN.mbp-10.dbn.zst")
    assert "found 4 records" in refusal(path)
    assert "none of them valid" in refusal(path)
    file = DbnFile(path, Source([path], Counts()), Spelling("ts_recv", None, None, None))
    (records,) = file.records()
    assert (records["levels"]["bid_px"] == UNDEFINED_PRICE).all()
    assert (records["levels"]["ask_px"] == UNDEFINED_PRICE).all()
    assert records["action"].tolist() == [b"T"] * 4
    assert np.count_nonzero(np.diff(records["ts_event"].astype(np.int64)) < 0) == 1
    assert np.count_nonzero(np.diff(records["ts_recv"].astype(np.int64)) == 0) == 2


@pytest.mark.samples
def test_tfm_and_esh1():
    session, _ = rows_of(sample("NDEX.IMPACT.TFM.mbp-10.dbn.zst"))
    assert session.origin == 27.52
    assert session.values[0, 3] + session.origin == pytest.approx(28.07)
    states = states_of(sample("GLBX.MDP3.ESH1.mbp-10.dbn.zst"))
    assert (states.sizes > 0).all()
    assert states.prices[:, 0].tolist() == [[3702_250_000_000, 3702_750_000_000]] * 4
    expected, _ = rows_of(sample("ESH1.mbp-10.v1.dbn.zst"))
    assert len(expected) == 2
    for version in (2, 3):
        session, _ = rows_of(sample(f"ESH1.mbp-10.v{version}.dbn.zst"))
        assert_same([session], [expected])
    assert "found DBZ, the format before it" in refusal(sample("ESH1.mbp-10.legacy.dbz"))


@pytest.mark.samples
@pytest.mark.parametrize("name", ["XNAS.ITCH.NVDA", "IFEU.IMPACT.BRN", "GLBX.MDP3.ESH1"])
def test_the_decoder_of_the_package_reads_the_samples_the_same(name):
    path = sample(f"{name}.mbp-10.dbn.zst")
    dbn = pytest.importorskip("databento_dbn", reason="the extra `markets` isn't installed")
    with text.open_stream(path) as (_, stream):
        assert_decoded_alike(dbn, path, bytes(stream.read()))


@pytest.mark.samples
def test_a_day_of_arl():
    path = sample("XNAS.ITCH.ARL.20250717.mbp-10.csv")
    keep = Policy(one_sided="keep")
    session, report = rows_of(path, grid=GridOptions(step_ns=None), policy=keep)
    assert report.counts.lines_read == 3_928
    assert report.counts.other == {
        "books in the middle of an event, left out": 574,
        "books with a price 10 times off the other side, kept: stub quotes?": 2,
    }
    assert (report.first_ns, report.last_ns) == (1752735909035627674, 1752785279252055411)
    values = session.values.astype(float)
    assert np.isnan(values[:, 1]).sum() == 3, "without a bid"
    assert np.isnan(values[:, 3]).sum() == 5, "without an ask"
    asks = values[:, 3] + session.origin
    assert np.isclose(asks, 2147.48, atol=1e-3).sum() == 2


@pytest.mark.samples
def test_the_regular_session_of_arl():
    pytest.importorskip("pandas_market_calendars", reason="the extra `markets` isn't installed")
    path, step_ns = sample("XNAS.ITCH.ARL.20250717.mbp-10.csv"), 500 * MS
    opens_ns = 1_752_759_000 * 10**9
    session, _ = rows_of(
        path, sessions=Calendar("XNYS"), grid=GridOptions(step_ns=None, max_age_s=None)
    )
    seen = np.unique((session.times - opens_ns) // step_ns)
    assert (len(seen), seen[-1]) == (1_157, 46_799)
    session, report = rows_of(path, sessions=Calendar("XNYS"), grid=GridOptions(max_age_s=None))
    assert len(session) == 46_800
    fresh = session.valid & (session.age_ns < step_ns)
    assert fresh.sum() == 1_156, "the row of the last half-second would be the close's"
    assert report.counts.rows_marked == report.counts.rows_before_first == 1
