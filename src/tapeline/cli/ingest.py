"""`tapeline ingest`: from market data files to a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tapeline.cli.output import Json, print_json, progress_bar, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tapeline.ingest import IngestConfig, Ingested

READER_OPTIONS = (
    "databento: instrument_id, publisher_id, clock, schema, prices, time_unit; "
    "hftbacktest: from_empty; lobster: date; orders: time_unit, zone, tick; "
    "table: time, columns, prices, time_unit, time_format, zone, stamp, interval_s; "
    "tardis: clock, time_unit"
)
SetWithOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="KEY=VALUE, as told above; or options.NAME=VALUE, an option of the file's reader, "
        f"such as options.zone=UTC; may be repeated. The readers' are: {READER_OPTIONS}.",
    ),
]


def ingest(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Market data files; each is a tape of its own.")
    ] = None,
    store: Annotated[
        str, typer.Option("--out", help="The store, a folder or a URL; new sessions are appended.")
    ] = "store",
    continues: Annotated[
        bool, typer.Option("--continues", help="The files continue each other: one tape.")
    ] = False,
    instrument: Annotated[
        str | None, typer.Option(help="Name of the instrument; default: as the files say.")
    ] = None,
    sessions: Annotated[
        str, typer.Option(help="utc, gap:SECONDS, hours:HH:MM-HH:MM@ZONE or calendar:NAME.")
    ] = "utc",
    reader: Annotated[
        str | None, typer.Option(help="Name of the format; default: by content.")
    ] = None,
    overrides: SetWithOptions = None,
    synthetic: Annotated[
        int | None, typer.Option(help="Instead of files: sessions of the seeded market.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the seeded market.")] = 0,
    fmt: Annotated[str, typer.Option("--format", help="mmap, npy, csv or zarr.")] = "mmap",
    jobs: Annotated[int, typer.Option(min=1, help="Processes that read the tapes.")] = 1,
    part: Annotated[
        str | None, typer.Option(help="I/N: only this share, for array jobs; the last one joins.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Write over the store.")] = False,
    as_json: Json = False,
) -> None:
    """Read market data, put it on a regular grid, and append it to a store.

    Reading the same files again changes nothing. --set sets step_s, depth, max_age_s, age_column,
    crossed, locked, one_sided, hold_s, stale_cross_s, pre, post, night_from, weekends,
    max_unreadable_share, max_lifted_share, max_unclear_share and derive.

    Example: tapeline ingest orders.csv.gz --instrument BTCUSD --out stores/btcusd
    """
    from tapeline.ingest import IngestConfig, check_out
    from tapeline.store.place import folder_of, is_remote

    out = store if is_remote(store) else folder_of(store)
    of_files = (continues, sessions != "utc", reader, overrides, jobs > 1, part)
    _check_source(files, synthetic, of_files)
    check_out(out, fmt)
    if synthetic is not None:
        _synthetic(synthetic, seed, instrument or "SYN", out, fmt, replace=replace)
        _print(out, fmt, None, as_json)
        return
    given = {"reader": reader, "instrument": instrument, "sessions": sessions}
    config = IngestConfig.from_mapping(given, "tapeline ingest", overrides or [])
    tapes = [files or []] if continues else [[file] for file in files or []]
    done = _ingest(tapes, out, fmt, config, jobs, part, replace=replace)
    say("\n".join(map(str, done.reports)))
    if done.is_complete:
        _print(out, fmt, done, as_json)
    else:
        say(f"part {part} of {out} is written; other parts are missing")


_OF_FILES = ("--continues", "--sessions", "--reader", "--set", "--jobs", "--part")


def _check_source(
    files: list[Path] | None, synthetic: int | None, of_files: Sequence[object]
) -> None:
    """Refuse two sources or none, and options of `_OF_FILES` that would do nothing."""
    from tapeline.errors import TapeError

    if bool(files) == (synthetic is not None):
        raise TapeError(
            "ingest",
            expected="files or --synthetic N",
            found="both" if files else "neither",
            fix="Give one of the two",
        )
    if synthetic is not None and any(of_files):
        raise TapeError(
            "ingest --synthetic",
            expected="no option that is about files",
            found=", ".join(name for name, one in zip(_OF_FILES, of_files, strict=True) if one),
            fix="Leave it out",
        )


def _ingest(
    tapes: Sequence[Sequence[Path]],
    out: Path | str,
    fmt: str,
    config: IngestConfig,
    jobs: int,
    part: str | None,
    *,
    replace: bool,
) -> Ingested:
    from tapeline.errors import TapeError
    from tapeline.ingest import distinct, ingest, ingest_parallel, ingest_part

    if (jobs > 1) + (part is not None) + replace > 1:
        raise TapeError(
            "ingest",
            expected="at most one of --jobs, --part and --replace",
            found="more",
            fix="Remove the store first, instead of --replace",
        )
    reading = config.reading([file for files in tapes for file in files])
    tapes = distinct(tapes, reading)
    if part is not None:
        number, _, num_parts = part.partition("/")
        if not (number.isdecimal() and num_parts.isdecimal()):
            raise TapeError(
                f"--part {part}",
                expected="I/N, such as 3/16",
                found=part,
                fix="Count parts from 1",
            )
        with progress_bar("Reading") as progress:
            return ingest_part(
                tapes, out, fmt, reading, int(number), int(num_parts), progress=progress
            )
    with progress_bar("Reading") as progress:
        if jobs > 1:
            return ingest_parallel(tapes, out, fmt, reading, jobs, progress=progress)
        return ingest(tapes, out, fmt, reading, replace=replace, progress=progress)


def _synthetic(
    num: int, seed: int, instrument: str, out: Path | str, fmt: str, *, replace: bool
) -> None:
    from tapeline.store import append_shards, write_shards
    from tapeline.tape import synthetic_sessions

    made = synthetic_sessions(num, seed, instrument=instrument)
    if replace:
        write_shards(made, out, fmt, replace=True)
    else:
        append_shards(made, out, fmt)


def _print(out: Path | str, fmt: str, done: Ingested | None, as_json: bool) -> None:
    from tapeline.store import Shards
    from tapeline.tape.report import counted

    shards = Shards(out, fmt)
    marked = sum(b - a for entry in shards.index.sessions for a, b in entry.invalid)
    rows = counted(int(shards.offsets[-1]), "row")
    say(f"{shards.folder}: {counted(len(shards), 'session')}, {rows}, {marked:,} of them marked")
    if as_json:
        print_json(
            {
                "store": str(out),
                "format": fmt,
                "sessions": len(shards),
                "rows": int(shards.offsets[-1]),
                "rows_marked": marked,
                "fingerprint": shards.fingerprint,
                "tapes": [report.as_dict() for report in done.reports] if done else [],
            }
        )
