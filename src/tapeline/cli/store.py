"""`tapeline store`: what is in a store, whether it is whole, and in which formats."""

from __future__ import annotations

import itertools
from typing import Annotated

import typer

from tapeline.cli.output import Json, print_json, say

app = typer.Typer(
    help="Look at, verify and convert stores. Example: tapeline store info stores/market",
    no_args_is_help=True,
)
Root = Annotated[str, typer.Argument(help="The store's folder, or a URL such as s3://bucket/btc.")]
Format = Annotated[
    str | None, typer.Option("--format", help="mmap, npy, zarr or csv; default: fastest.")
]


@app.command()
def info(root: Root, fmt: Format = None, as_json: Json = False) -> None:
    """Say what a store holds.

    Example: tapeline store info stores/btcusd
    """
    from tapeline.report import Table, print_table
    from tapeline.store import open_reader
    from tapeline.tape.report import counted

    reader = open_reader(root, fmt)
    index = reader.index
    rows: list[list[str | int | float | None]] = [
        [
            str(entry.key),
            entry.rows,
            sum(stop - start for start, stop in entry.invalid),
            entry.origin,
        ]
        for entry in index.sessions
    ]
    if as_json:
        print_json(
            {
                "store": root,
                "format": index.fmt,
                "bytes": reader.bytes,
                "columns": index.columns,
                "made": index.made,
                "derived": index.derived,
                "rows": index.num_rows,
                "fingerprint": index.fingerprint(),
                "sessions": [
                    dict(zip(("session", "rows", "invalid_rows", "origin"), row, strict=True))
                    for row in rows
                ],
            }
        )
        return
    say(
        f"{reader.place}: {counted(len(rows), 'session')}, {counted(index.num_rows, 'row')} of "
        f"{counted(len(index.columns), 'column')}, {reader.bytes:,} bytes"
    )
    caption = f"{reader.place}, fingerprint {index.fingerprint()}"
    print_table(Table(["session", "rows", "rows no window touches", "origin"], rows, caption))


@app.command()
def windows(
    root: Root,
    length: Annotated[int, typer.Option(help="Rows in a window.")] = 20,
    horizon: Annotated[
        list[int] | None,
        typer.Option(help="Rows from a window to its target, 10 by default; may be repeated."),
    ] = None,
    stride: Annotated[int, typer.Option(help="Rows from one start to the next.")] = 1,
    any_target: Annotated[
        bool, typer.Option("--any-target", help="Count windows that lack longer horizons' targets.")
    ] = False,
    instrument: Annotated[
        list[str] | None, typer.Option(help="Only sessions of this one; may be repeated.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Count the windows of a store, and say why other rows start none.

    Example: tapeline store windows stores/btcusd --length 100 --horizon 10 --horizon 50
    """
    import numpy as np

    from tapeline.report import Table, print_table
    from tapeline.report.tables import Cell
    from tapeline.store import Shards
    from tapeline.windows import REASONS, WindowIndex, select

    shards = Shards(root)
    sessions = select(shards, instruments=instrument) if instrument else None
    index = WindowIndex(
        shards,
        length,
        horizon or 10,
        stride,
        sessions=sessions,
        targets="any" if any_target else "all",
    )
    audit = index.audit()
    if as_json:
        print_json({"store": str(root), **audit.as_dict()})
        return
    say(f"{shards.folder}: {index.num_windows:,} windows of {int(audit.rows.sum()):,} rows")
    lost = {reason: total for reason, total in audit.totals().items() if total}
    why: list[list[Cell]] = [[reason, total, REASONS[reason]] for reason, total in lost.items()]
    print_table(Table(["reason", "rows that start no window", "why"], why, "counted once each"))
    numbers = np.stack([audit.rows, audit.windows, *(audit.lost[reason] for reason in lost)])
    rows: list[list[Cell]] = [
        [name, *row] for name, row in zip(audit.sessions, numbers.T.tolist(), strict=True)
    ]
    print_table(Table(["session", "rows", "windows", *lost], rows, str(shards.folder)))


@app.command()
def verify(root: Root, fmt: Format = None, as_json: Json = False) -> None:
    """Read every byte and compare it with the hashes in the index; exit 2 if one differs.

    Example: tapeline store verify stores/btcusd
    """
    from tapeline.errors import StoreError
    from tapeline.store import open_reader
    from tapeline.tape.report import counted

    reader = open_reader(root, fmt)
    found = reader.verify()
    if as_json:
        print_json({"store": root, "format": reader.index.fmt, "damaged": found})
    if found:
        raise StoreError(
            reader.place,
            expected="the bytes that were written",
            found=f"{len(found)} parts that differ, the first: {found[0]}",
            fix="Copy the store again, or write it anew from its source",
        )
    say(f"{reader.place}: {counted(len(reader.index.sessions), 'session')} verified")


@app.command()
def convert(
    root: Root,
    to: Annotated[str, typer.Option(help="mmap, npy, zarr or csv.")],
    fmt: Format = None,
    out: Annotated[
        str | None, typer.Option(help="The store to write to; default: the same one.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Write over that format.")] = False,
) -> None:
    """Write the sessions of a store in another format, beside the one that is there or elsewhere.

    One session is in memory at a time, so that a store may be larger than memory.

    Example: tapeline store convert stores/btcusd --to zarr --out s3://bucket/btcusd
    """
    from tapeline.store import stream_sessions, write_shards
    from tapeline.tape.report import counted

    numbers = itertools.count(1)
    sessions = (session for session, _ in zip(stream_sessions(root, fmt), numbers, strict=False))
    folder = write_shards(sessions, out or root, to, replace=replace)
    say(f"{folder}: {counted(next(numbers) - 1, 'session')}")


@app.command()
def join(
    root: Root,
    fmt: Annotated[str, typer.Option("--format", help="mmap, npy, zarr or csv.")] = "mmap",
) -> None:
    """Join the parts that array jobs wrote under a store; joining them again changes nothing.

    The last part to be complete does this by itself. This is for when it was interrupted.

    Example: tapeline store join stores/btcusd
    """
    from tapeline.store import join_parts

    say(f"{join_parts(root, fmt)}: joined")
