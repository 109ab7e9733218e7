"""What every test runs under: one torch thread, no deadlines, and stores on demand."""

import functools
import itertools
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
import typer.main
from helpers_warm import tools
from hypothesis import settings

from tapeline import cli
from tapeline.store import Shards, write_shards

# No deadlines: a machine's load is nobody's fault. The same cases each time, so that a commit which
# passed passes again;
# `pytest --hypothesis-profile=search` draws new ones.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None)
settings.load_profile("same")

# A shell's background job ignores SIGINT, and so would every process that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test cuts the power, so none can tell whether the disk was waited for; that it was asked to,
# and when, is what tests look at. Programs that a test starts and kills do wait for it.
os.fsync = os.fstat  # which fails as well where the descriptor is none

# A program makes its tree of verbs once, and so do the many that tests run in this process.
typer.main.get_command = functools.cache(typer.main.get_command)


def pytest_collection_finish():
    """Where tests fork ranks, what they are forked from gets ready meanwhile."""
    if ranks := sys.modules.get("helpers_ranks"):
        ranks.start_server()


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def new_store(tmp_path_factory):
    """A function that writes sessions to a folder of their own and opens it."""
    root = tmp_path_factory.mktemp("stores")
    numbers = itertools.count()

    def new(sessions, fmt="mmap", **options):
        folder = root / str(next(numbers))
        write_shards(sessions, folder, fmt, **options)
        return Shards(folder, fmt)

    return new


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """An environment in which `python` and `tapeline` are real processes that start at once."""
    with tools(tmp_path_factory.mktemp("tools")) as folder:
        rest = [str(Path(sys.executable).parent), os.environ["PATH"]]
        yield {**os.environ, "PATH": os.pathsep.join([str(folder), *rest]), "COLUMNS": "200"}


@pytest.fixture
def warm_python(warm, monkeypatch):
    """What is started by `sys.executable` is there at once too."""
    monkeypatch.setattr(sys, "executable", shutil.which("python", path=warm["PATH"]))


@pytest.fixture
def tapeline(monkeypatch, capsys, tmp_path):
    """Run one command in a folder of its own; returns exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tapeline", *map(str, arguments)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return int(ended.value.code or 0), out, err

    return run
