"""`tapeline ingest`: from market data files to a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tapeline.cli.output import Json, print_json, progress_bar, say


def ingest(
    tape: Annotated[
        Path | None, typer.Argument(help="An order-by-order CSV file, plain or .gz.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The store's folder.")] = Path("store"),
    synthetic: Annotated[
        int | None, typer.Option(help="Instead of a file: this many sessions of the seeded market.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the synthetic market.")] = 0,
    instrument: Annotated[
        str | None, typer.Option(help="Name of the instrument; default: the file's name.")
    ] = None,
    fmt: Annotated[str, typer.Option("--format", help="mmap, npy or csv.")] = "mmap",
    replace: Annotated[bool, typer.Option("--replace", help="Write over a store.")] = False,
    as_json: Json = False,
) -> None:
    """Read market data, put it on a half-second grid, and write it as a store.

    Example: tapeline ingest orders.csv.gz --instrument BTCUSD --out stores/btcusd
    """
    from tapeline.errors import TapeError
    from tapeline.store import Shards, write_shards
    from tapeline.tape import read_orders, synthetic_sessions

    if (tape is None) == (synthetic is None):
        raise TapeError(
            "ingest",
            expected="a file or --synthetic N",
            found="both" if tape else "neither",
            fix="Give one of the two",
        )
    report = None
    if tape is None:
        sessions = synthetic_sessions(synthetic or 0, seed, instrument=instrument or "SYN")
    else:
        name = instrument or tape.name.split(".")[0]
        with progress_bar(f"Reading {tape.name}") as progress:
            sessions, report = read_orders(tape, instrument=name, progress=progress)
        say(str(report))
    write_shards(sessions, out, fmt, replace=replace)
    shards = Shards(out, fmt)
    say(f"{shards.folder}: {len(shards)} sessions, {int(shards.offsets[-1]):,} rows")
    if as_json:
        print_json(
            {
                "store": str(out),
                "format": fmt,
                "sessions": len(shards),
                "rows": int(shards.offsets[-1]),
                "fingerprint": shards.fingerprint,
                "tape": report.as_dict() if report else None,
            }
        )
