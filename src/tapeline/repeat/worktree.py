"""The code of a record, put back: each checkout at its commit in a worktree of its own, patched.

The user's checkouts are left as they are: `git worktree` only notes the new folders, and they are
removed afterwards.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tapeline.errors import RunError
from tapeline.runs.checkout import git, sha256_of
from tapeline.runs.facts import lost_code


class Recreated:
    """Where the record's folders lie now.

    Args:
        moved: the recorded top folder of each checkout, and its worktree.
    """

    def __init__(self, moved: Mapping[str, Path]) -> None:
        self._moved = dict(moved)

    def place(self, recorded: str) -> Path:
        """The place of a recorded path: in a worktree if it is there, else where it was."""
        for top in sorted(self._moved, key=len, reverse=True):
            if recorded == top or recorded.startswith(f"{top}/"):
                there = self._moved[top] / recorded[len(top) + 1 :]
                if there.exists():  # what is ignored isn't, such as a virtual environment
                    return there
        return Path(recorded)

    def import_folders(self, record: Mapping[str, Any]) -> list[Path]:
        """Where the packages of editable installs are imported from."""
        origins = record["environment"].get("origins", {}).values()
        roots = [
            self.place(origin["url"].removeprefix("file://"))
            for origin in origins
            if origin["editable"]
        ]
        return [folder for root in roots for folder in (root / "src", root) if folder.is_dir()]


@contextlib.contextmanager
def recreated(record: Mapping[str, Any]) -> Iterator[Recreated]:
    """Put the code of a record back, for as long as the block lasts.

    Raises:
        RunError: a checkout's code isn't in the record, or its commit or repository isn't here, or
            what is put back isn't what the record says.
    """
    checkouts = [
        code
        for code in (record["code"], *record.get("other_code", ()))
        if code["state"] != "not a repository"
    ]
    for code in checkouts:
        _check_complete(code)
    with tempfile.TemporaryDirectory(prefix="tapeline-rerun-") as temporary:
        moved: dict[str, Path] = {}
        try:
            for number, code in enumerate(checkouts):
                folder = Path(temporary, str(number))
                _add(code, folder)
                moved[code["folder"]] = folder
                if code["diff"]:
                    _checked(folder, "apply", "--whitespace=nowarn", "-", text_in=code["diff"])
            again = Recreated(moved)
            _check_sources(record, again)
            yield again
        finally:
            for top, folder in moved.items():
                git(Path(top), "worktree", "remove", "--force", str(folder), limit_s=None)


def _check_complete(code: Mapping[str, Any]) -> None:
    lost = ", ".join(f"{path} ({why})" for path, why in lost_code(code).items())
    if code["state"] == "unknown":
        lost = f"all of it: {code['problem']}"
    elif not code["commit"]:
        lost = "all of it: there was no commit"
    if lost:
        raise RunError(
            f"the code of the run in {code.get('folder') or 'its working folder'}",
            expected="all of it in the record",
            found=f"missing: {lost}",
            fix="`tapeline audit` says what can still be claimed; commit before training",
        )


def _add(code: Mapping[str, Any], folder: Path) -> None:
    top, commit = Path(code["folder"]), code["commit"]
    words = ("worktree", "add", "--detach", str(folder), commit)
    done = git(top, *words, limit_s=None) if top.is_dir() else None
    if done is None or done.returncode:
        why = done.stderr.strip().splitlines()[-1] if done else "no folder"
        remote = f" from {code['remote']}" if code.get("remote") else ""
        raise RunError(
            top,
            expected=f"a checkout that has commit {commit}",
            found=why,
            fix=f"Clone or fetch it{remote}, to this folder",
        )
    if code.get("submodules"):
        _checked(folder, "submodule", "update", "--init", "--recursive")


def _check_sources(record: Mapping[str, Any], again: Recreated) -> None:
    for source in filter(None, record.get("sources", {}).values()):
        file = again.place(source["file"])
        try:
            digest = sha256_of(file)
        except OSError as error:
            digest = error.strerror or "unreadable"
        if digest != source["sha256"]:
            raise RunError(
                source["file"],
                expected=f"the source that was trained, sha256 {source['sha256'][:16]}",
                found=digest[:40],
                fix="Restore the file as it was; the record only holds its hash",
            )


def _checked(folder: Path, *arguments: str, text_in: str | None = None) -> None:
    done = git(folder, *arguments, text_in=text_in, limit_s=None)
    if done.returncode:
        raise RunError(
            f"git {arguments[0]} in {folder}",
            expected="the code as it was recorded",
            found=(done.stderr.strip().splitlines() or ["a failure"])[-1],
            fix="Look whether the repository is whole, with `git fsck`",
        )
