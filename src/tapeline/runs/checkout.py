"""The code of a run: the state of git checkouts, what differs from their commits, and sources.

"Not a repository" and "git failed" are told apart from "clean": a record that guesses is worse
than none. What differs is kept as one patch that `git apply` takes, within a bound of bytes; what
isn't in it is named with the reason. Files that are named like keys are never read.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tapeline.runs.secrecy import is_secret_file, without_credentials, without_secrets

DIFF_BYTES = 256 << 10
_MOST_FILES = 1000
_MOST_HASHED_BYTES = 16 << 20
_GIT_LIMIT_S = 10.0
_FILE_OF = re.compile(r"^diff --git (?:\"?a/.*?\"? )\"?b/(.*?)\"?$", re.MULTILINE)


def code_state(folder: Path) -> dict[str, Any]:
    """The state of the git checkout that `folder` is in.

    Returns:
        `state`: "clean", "dirty", "not a repository" or "unknown"; `commit` or None; `changed`
        and `untracked`: how many files, untracked ones count as dirty, but for those that runs
        wrote; `problem`: what git said where the state is unknown.
    """
    return _asked(folder)[0]


def code_record(folder: Path, diff_bytes: int = DIFF_BYTES) -> dict[str, Any]:
    """The state of a checkout as `code_state` has it, and what is needed to have the code again.

    Args:
        folder: anywhere in the checkout.
        diff_bytes: the most of the patch that is kept.

    Returns:
        Beyond the state: `folder` and `remote` of the checkout; `files`, each that differs from
        the commit with its git status, size and sha256; `diff`, the patch from the commit, with
        untracked files as new ones; `left_out`, files that the patch lacks, each with the reason;
        `submodules`, each with commit and state.
    """
    found, lines = _asked(folder)
    if found["state"] not in ("clean", "dirty"):
        return found
    try:
        top = Path(git(folder, "rev-parse", "--show-toplevel").stdout.rstrip("\n"))
        remote = git(folder, "config", "--get", "remote.origin.url").stdout.strip()
        files = {path: _file(top, status, path) for status, path in lines[:_MOST_FILES]}
        diff, left_out = _patch(top, found["commit"], files, diff_bytes) if files else ("", {})
        for _, path in lines[_MOST_FILES:]:
            left_out[path] = f"there are more than {_MOST_FILES} such files"
        submodules = _submodules(top)
    except (OSError, subprocess.TimeoutExpired) as error:
        return found | {"state": "unknown", "problem": f"git could not be asked: {error}"}
    return found | {
        "folder": str(top),
        "remote": without_credentials(remote) or None,
        "files": files,
        "diff": diff,
        "left_out": left_out,
        "submodules": submodules,
    }


def code_elsewhere(folders: dict[str, Path], known: dict[str, Any]) -> list[dict[str, Any]]:
    """The records of checkouts other than the `known` one, each once.

    Args:
        folders: by what lies in them, such as "model" or the name of an editable install.
        known: the record of the working folder's checkout.
    """
    seen = {known.get("folder")}
    found = []
    for of, folder in folders.items():
        top = _top(folder)
        if top is None or top in seen:
            continue
        seen.add(top)
        found.append({"of": of, **code_record(Path(top))})
    return found


def source_of(reference: str, folder: Path | None) -> dict[str, Any] | None:
    """The source file of a `module:callable`, found without importing it; None if there is none.

    Returns:
        `file`, `sha256`, and `package`: whether it is part of an installed package.
    """
    module = reference.partition(":")[0]
    relative = Path(*module.split("."))
    if folder:
        for path in (folder / relative.with_suffix(".py"), folder / relative / "__init__.py"):
            if path.is_file():
                return {"file": str(path), "sha256": sha256_of(path), "package": False}
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None or not spec.origin or not Path(spec.origin).is_file():
        return None
    file = Path(spec.origin)
    return {"file": str(file), "sha256": sha256_of(file), "package": True}


def sections_of(diff: str) -> dict[str, str]:
    """A patch by file."""
    found = {}
    for section in re.split(r"^(?=diff --git )", diff, flags=re.MULTILINE):
        if match := _FILE_OF.match(section):
            found[match[1]] = section
    return found


def _asked(folder: Path) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The state, and (status, path) of each file that differs."""
    found: dict[str, Any] = {
        "state": "unknown",
        "commit": None,
        "changed": None,
        "untracked": None,
        "problem": None,
    }
    try:
        inside = git(folder, "rev-parse", "--is-inside-work-tree", "--show-toplevel")
        if inside.returncode != 0:
            missing = "not a git repository" in inside.stderr
            found["state"] = "not a repository" if missing else "unknown"
            found["problem"] = None if missing else inside.stderr.strip()
            return found, []
        status = git(folder, "status", "--porcelain", "-z", "--untracked-files=all", "--no-renames")
        head = git(folder, "rev-parse", "HEAD")
    except (OSError, subprocess.TimeoutExpired) as error:
        return found | {"problem": f"git could not be asked: {error}"}, []
    if status.returncode != 0:
        return found | {"problem": status.stderr.strip()}, []
    lines = [(entry[:2], entry[3:]) for entry in status.stdout.split("\0") if entry]
    top = Path(inside.stdout.partition("\n")[2].rstrip("\n"))
    runs: dict[Path, bool] = {}
    lines = [(m, path) for m, path in lines if m != "??" or not _is_of_a_run(top / path, top, runs)]
    untracked = sum(mark == "??" for mark, _ in lines)
    return {
        "state": "dirty" if lines else "clean",
        "commit": head.stdout.strip() if head.returncode == 0 else None,
        "changed": len(lines) - untracked,
        "untracked": untracked,
        "problem": None if head.returncode == 0 else "no commit yet",
    }, lines


def _is_of_a_run(file: Path, top: Path, known: dict[Path, bool]) -> bool:
    """Whether a file lies in the folder of a run."""
    folder = file.parent
    if folder not in known:
        known[folder] = (folder / "run.json").exists() or (
            folder != top and top in folder.parents and _is_of_a_run(folder, top, known)
        )
    return known[folder]


def _file(top: Path, status: str, path: str) -> dict[str, Any]:
    """A file that differs; of one that is gone, or looks secret, or is no file, nothing more."""
    file = top / path
    found: dict[str, Any] = {"status": status.strip(), "bytes": None, "sha256": None}
    if file.is_file() and not file.is_symlink() and not is_secret_file(file.name):
        found["bytes"] = file.stat().st_size
        if found["bytes"] <= _MOST_HASHED_BYTES:  # more than that is data, and takes long
            found["sha256"] = sha256_of(file)
    return found


def _patch(
    top: Path, commit: str | None, files: dict[str, dict[str, Any]], diff_bytes: int
) -> tuple[str, dict[str, str]]:
    """The patch from the commit, and the files that it lacks."""
    left_out: dict[str, str] = {}
    wanted = []
    for path, about in files.items():
        if is_secret_file(Path(path).name):
            left_out[path] = "its name looks like that of a key"
        elif (about["bytes"] or 0) > diff_bytes:
            left_out[path] = f"it has {about['bytes']:,} bytes"
        else:
            wanted.append(path)
    untracked = [path for path in wanted if files[path]["status"] == "??"]
    kept: list[str] = []
    size = 0
    sections = sections_of(_diff(top, commit, wanted, untracked)) if wanted else {}
    for path, section in sorted(sections.items(), key=lambda one: len(one[1])):
        harmless = without_secrets(section)
        if harmless != section:
            left_out[path] = "it holds what looks like a secret, replaced in the patch"
        if (size := size + len(harmless.encode())) > diff_bytes:
            left_out[path] = f"the patch would have more than {diff_bytes:,} bytes"
        else:
            kept.append(harmless)
    for path in wanted:
        if path not in sections and path not in left_out and files[path]["bytes"] is not None:
            left_out[path] = "git shows no difference"
    return "".join(kept), left_out


def _diff(top: Path, commit: str | None, paths: Sequence[str], untracked: Sequence[str]) -> str:
    """`git diff` with untracked files as new ones; on a copy of the index, nothing is touched."""
    git_dir = Path(git(top, "rev-parse", "--absolute-git-dir").stdout.rstrip("\n"))
    common = git(top, "rev-parse", "--path-format=absolute", "--git-common-dir").stdout.rstrip("\n")
    with tempfile.TemporaryDirectory() as temporary:
        index = Path(temporary, "index")
        if (git_dir / "index").exists():
            # With its time: git tells by it which files may have changed since without a trace.
            shutil.copy2(git_dir / "index", index)
        extra = {
            "GIT_INDEX_FILE": str(index),
            "GIT_OBJECT_DIRECTORY": temporary,
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(Path(common, "objects")),
        }
        if untracked:
            names = "\0".join(untracked)
            add = ("add", "--intent-to-add", "--pathspec-from-file=-", "--pathspec-file-nul")
            git(top, *add, extra=extra, text_in=names)
        against = [commit] if commit else []
        done = git(
            top,
            *("-c", "core.quotePath=false", "diff", "--binary", "--no-renames", "--no-ext-diff"),
            *("--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/"),
            *(*against, "--", *(f":(literal){path}" for path in paths)),
            extra=extra,
        )
    return done.stdout


def _submodules(top: Path) -> list[dict[str, Any]]:
    if not (top / ".gitmodules").exists():
        return []
    states = {" ": "clean", "-": "not there", "+": "another commit", "U": "in conflict"}
    found = []
    for line in git(top, "submodule", "status", "--recursive").stdout.splitlines():
        commit, path = line[1:].split(" ")[:2]
        state = states.get(line[0], "unknown")
        inside = code_state(top / path) if state in ("clean", "another commit") else {}
        if inside.get("state") == "dirty":
            state = "dirty"
        found.append({"path": path, "commit": commit, "state": state})
    return found


def _top(folder: Path) -> str | None:
    try:
        done = git(folder, "rev-parse", "--show-toplevel")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def git(
    folder: Path,
    *arguments: str,
    extra: dict[str, str] | None = None,
    text_in: str | None = None,
    limit_s: float | None = _GIT_LIMIT_S,
) -> subprocess.CompletedProcess[str]:
    """Run git in a folder; whether it succeeded is for the caller to see.

    Args:
        arguments: after `git`.
        limit_s: the longest it may take.

    Raises:
        OSError: there is no git.
        subprocess.TimeoutExpired: it took longer.
    """
    return subprocess.run(
        ["git", "-C", str(folder), *arguments],
        capture_output=True,
        encoding="utf-8",
        errors="surrogateescape",
        input=text_in,
        check=False,
        timeout=limit_s,
        # Its messages are read, so they must be in English; and a status that writes is a writer.
        env={**os.environ, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", **(extra or {})},
    )


def commits_differ(folder: Path, before: str, after: str) -> dict[str, int] | None:
    """The files that differ between two commits, each with its hunks; None if git can't say."""
    try:
        done = git(folder, "diff", "--no-color", "--no-ext-diff", "-U0", before, after)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return hunks_of(sections_of(done.stdout).items())


def hunks_of(sections: Iterable[tuple[str, str]]) -> dict[str, int]:
    """How many hunks each file of a patch has; 1 where it is binary or only its mode changed."""
    return {path: max(1, len(re.findall(r"^@@ ", text, re.MULTILINE))) for path, text in sections}
