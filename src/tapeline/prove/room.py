"""The folder of a proof or a trial: new, or one that an earlier one of its kind filled."""

from __future__ import annotations

import shutil
from pathlib import Path

from tapeline.errors import RunError


def make_room(out: Path, kind: str) -> None:
    """Empty a folder that an earlier `kind` marked as its own; any other must be new or empty.

    Raises:
        RunError: it holds something else.
    """
    mark = out / f".tapeline-{kind}"
    if out.exists() and not mark.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(
            out,
            expected=f"a new folder, or that of an earlier {kind}",
            found=f"files that no {kind} wrote",
            fix="Give another folder with --out",
        )
    out.mkdir(parents=True, exist_ok=True)
    mark.touch()
    for path in out.iterdir():
        if path == mark:
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()
