"""`tapeline store`: what is in a store, whether it is whole, and in which formats."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tapeline.cli.output import Json, print_json, say

app = typer.Typer(help="Look at, verify and convert stores.", no_args_is_help=True)
Root = Annotated[Path, typer.Argument(help="The store's folder.")]
Format = Annotated[str | None, typer.Option("--format", help="mmap, npy or csv; default: fastest.")]


@app.command()
def info(root: Root, fmt: Format = None, as_json: Json = False) -> None:
    """Say what a store holds.

    Example: tapeline store info stores/btcusd
    """
    from tapeline.report import Table, print_table
    from tapeline.store import Shards

    shards = Shards(root, fmt)
    rows: list[list[str | int | float | None]] = [
        [
            str(entry.key),
            entry.rows,
            sum(stop - start for start, stop in entry.invalid),
            entry.origin,
        ]
        for entry in shards.index.sessions
    ]
    if as_json:
        print_json(
            {
                "store": str(root),
                "format": shards.fmt,
                "bytes": shards.bytes,
                "columns": list(shards.columns),
                "rows": int(shards.offsets[-1]),
                "fingerprint": shards.fingerprint,
                "sessions": [
                    dict(zip(("session", "rows", "invalid_rows", "origin"), row, strict=True))
                    for row in rows
                ],
            }
        )
        return
    say(
        f"{shards.folder}: {len(shards)} sessions, {int(shards.offsets[-1]):,} rows of "
        f"{len(shards.columns)} columns, {shards.bytes:,} bytes"
    )
    caption = f"{shards.folder}, fingerprint {shards.fingerprint}"
    print_table(Table(["session", "rows", "rows no window touches", "origin"], rows, caption))


@app.command()
def verify(root: Root, fmt: Format = None, as_json: Json = False) -> None:
    """Read every byte and compare it with the hashes in the index; exit 2 if one differs.

    Example: tapeline store verify stores/btcusd
    """
    from tapeline.errors import StoreError
    from tapeline.store import Shards

    shards = Shards(root, fmt)
    found = shards.verify()
    if as_json:
        print_json({"store": str(root), "format": shards.fmt, "damaged": found})
    if found:
        raise StoreError(
            shards.folder,
            expected="the bytes that were written",
            found=f"{len(found)} parts that differ, the first: {found[0]}",
            fix="Copy the store again, or write it anew from its source",
        )
    say(f"{shards.folder}: {len(shards)} sessions verified")


@app.command()
def convert(
    root: Root,
    to: Annotated[str, typer.Option(help="mmap, npy or csv.")],
    replace: Annotated[bool, typer.Option("--replace", help="Write over that format.")] = False,
) -> None:
    """Write the sessions of a store in another format, beside the one that is there.

    Example: tapeline store convert stores/btcusd --to csv
    """
    from tapeline.store import Shards, write_shards

    shards = Shards(root)
    folder = write_shards(shards.sessions(), root, to, replace=replace)
    say(f"{folder}: {len(shards)} sessions, {Shards(root, to).bytes:,} bytes")
