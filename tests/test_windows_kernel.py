"""The compiled loops where numba has nowhere to keep them."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import tapeline

PROGRAM = (
    "import numpy as np, tapeline; from tapeline.windows import WindowSampler\n"
    "print(tapeline.__file__)\n"
    "print(np.sort(WindowSampler([40], batch=11).next()[1]).tolist())"
)
NOBODY = 65_534


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The package in a folder that nobody may write to."""
    if os.geteuid() or not shutil.which("setpriv"):
        pytest.skip("needs root and setpriv, to run as a user who can't write")
    folder = tmp_path / "installed"
    source = Path(tapeline.__file__).parent
    shutil.copytree(source, folder / "tapeline", ignore=shutil.ignore_patterns("__pycache__"))
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    above = [path for path in folder.parents if Path(tempfile.gettempdir()) in path.parents]
    for path in (folder, *above):  # to be entered, however deep the runner puts them
        path.chmod(path.stat().st_mode | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH)
    return folder


def run_as_nobody(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    identity = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    return subprocess.run(
        ["setpriv", *identity, sys.executable, "-c", PROGRAM],
        env={
            "PATH": os.environ["PATH"],
            "HOME": "/nonexistent",
            "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)]),
            **environment,
        },
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_read_only_installation_compiles_without_a_cache_and_says_so_once(installed):
    done = run_as_nobody(installed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        str(installed / "tapeline" / "__init__.py"),
        str(list(range(11))),
    ]
    assert done.stderr.count("RuntimeWarning") == 1
    assert "Set NUMBA_CACHE_DIR to a folder that can" in done.stderr


def test_a_folder_for_the_cache_is_used(installed, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o777)
    cache.chmod(0o777)
    done = run_as_nobody(installed, NUMBA_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert list(cache.rglob("*walk*.nbc"))
