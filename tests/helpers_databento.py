"""Files as Databento writes them: DBN, CSV and Parquet of the same records."""

from __future__ import annotations

import csv
import datetime as dt
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tapeline.tape.readers.databento_records import MBO, UNDEFINED_PRICE, mbp

T0 = 1_609_146_088 * 10**9  # 2020-12-28 09:01:28 UTC
LAST, SNAPSHOT, TOB, BAD_BOOK = 128, 32, 64, 4
UNITS = 10**9
MBO_COLUMNS = ["order_id", "price", "size"]


def book(
    recv: int,
    bids: list[tuple[float, int]],
    asks: list[tuple[float, int]],
    *,
    levels: int = 10,
    **fields: Any,
) -> np.ndarray:
    """One record with the book after it; `recv` in nanoseconds after `T0`."""
    record = np.zeros(1, mbp(levels))
    record["rtype"], record["length"] = (1 if levels == 1 else 10), record.itemsize // 4
    record["ts_recv"] = record["ts_event"] = T0 + recv
    record["action"], record["side"], record["flags"] = b"A", b"N", LAST
    record["price"] = UNDEFINED_PRICE
    record["publisher_id"], record["instrument_id"] = 2, 7
    for side, quotes in (("bid", bids), ("ask", asks)):
        record["levels"][f"{side}_px"] = UNDEFINED_PRICE
        for level, (price, size) in enumerate(quotes):
            record["levels"][f"{side}_px"][0, level] = round(price * UNITS)
            record["levels"][f"{side}_sz"][0, level] = size
            record["levels"][f"{side}_ct"][0, level] = 1
    return with_fields(record, fields)


def order(recv: int, action: str, order_id: int = 0, **fields: Any) -> np.ndarray:
    """One record of an order; `recv` in nanoseconds after `T0`."""
    record = np.zeros(1, MBO)
    record["rtype"], record["length"] = 160, record.itemsize // 4
    record["ts_recv"] = record["ts_event"] = T0 + recv
    record["action"], record["side"], record["flags"] = action.encode(), b"N", LAST
    record["price"], record["order_id"] = UNDEFINED_PRICE, order_id
    record["publisher_id"], record["instrument_id"] = 1, 7
    return with_fields(record, fields)


def with_fields(record: np.ndarray, fields: dict[str, Any]) -> np.ndarray:
    for name, value in fields.items():
        if name == "price":
            value = round(value * UNITS)
        record[name] = value.encode() if isinstance(value, str) else value
    return record


def write_dbn(
    path: Path,
    records: np.ndarray,
    *,
    schema: str | None = "mbp-10",
    version: int = 3,
    packed: bool = True,
    ts_out: bool = False,
    between: bytes = b"",
) -> Path:
    """`between` stands before the last record."""
    dbn = pytest.importorskip("databento_dbn", reason="the extra `markets` isn't installed")
    day = dt.date(2020, 12, 28)
    interval = SimpleNamespace(start_date=day, end_date=day + dt.timedelta(1), symbol="7")
    metadata = dbn.Metadata(
        dataset="TEST.BOOK",
        start=T0,
        stype_in=dbn.SType.RAW_SYMBOL,
        stype_out=dbn.SType.INSTRUMENT_ID,
        schema=None if schema is None else dbn.Schema.from_str(schema),
        symbols=["XYZ"],
        mappings=[SimpleNamespace(raw_symbol="XYZ", intervals=[interval])],
        ts_out=ts_out,
        version=version,
    )
    cut = []
    for record in records:
        data = record.tobytes()
        if ts_out:
            data = bytes([data[0] + 2]) + data[1:] + (T0 + 1).to_bytes(8, "little")
        cut.append(data)
    cut.insert(len(cut) - 1, between)
    content = bytes(metadata.encode()) + b"".join(cut)
    path.write_bytes(pa.compress(content, codec="zstd", asbytes=True) if packed else content)
    return path


def table_of(records: np.ndarray) -> dict[str, list[Any]]:
    """The records as columns, in Databento's order, prices and times as integers."""
    names = ["ts_recv", "ts_event", "rtype", "publisher_id", "instrument_id", "action", "side"]
    if "levels" not in (records.dtype.names or ()):
        names += MBO_COLUMNS
    table = {name: records[name].tolist() for name in [*names, "flags", "sequence"]}
    for name in ("action", "side"):
        table[name] = [letter.decode() for letter in table[name]]
    if "levels" in (records.dtype.names or ()):
        for level in range(records["levels"].shape[1]):
            for part in ("bid_px", "ask_px", "bid_sz", "ask_sz", "bid_ct", "ask_ct"):
                table[f"{part}_{level:02}"] = records["levels"][part][:, level].tolist()
    return {**table, "symbol": ["XYZ"] * len(records)}


def is_price(name: str) -> bool:
    return name == "price" or "_px_" in name


def write_csv(
    path: Path,
    records: np.ndarray,
    *,
    pretty: bool = True,
    index: bool = False,
    reverse: bool = False,
    without: str = "",
) -> Path:
    table = table_of(records)
    table.pop(without, None)
    if pretty:
        for name, values in table.items():
            if name.startswith("ts_"):
                table[name] = [f"{np.datetime64(value, 'ns')}Z" for value in values]
            elif is_price(name):
                table[name] = [
                    "" if value == UNDEFINED_PRICE else f"{value // UNITS}.{value % UNITS:09}"
                    for value in values
                ]
    names = list(table)[::-1] if reverse else list(table)
    if index:
        table[""] = list(range(len(records)))
        names.insert(0, "")
    with path.open("w", newline="") as stream:
        lines = csv.writer(stream, lineterminator="\n")
        lines.writerow(names)
        lines.writerows(zip(*(table[name] for name in names), strict=True))
    return path


def write_parquet(path: Path, records: np.ndarray, prices: str = "float") -> Path:
    columns: dict[str, pa.Array] = {}
    for name, values in table_of(records).items():
        if name.startswith("ts_"):
            columns[name] = pa.array(values).cast(pa.timestamp("ns", "UTC"))
        elif is_price(name) and prices != "integer":
            written = [
                None if value == UNDEFINED_PRICE else Decimal(value).scaleb(-9) for value in values
            ]
            exact = pa.array(written, pa.decimal128(38, 9))
            columns[name] = exact.cast(pa.float64()) if prices == "float" else exact
        else:
            columns[name] = pa.array(values)
    pq.write_table(pa.table(columns), path)
    return path
