"""What every test runs under: one torch thread, no deadlines, and stores on demand."""

import itertools

import pytest
import torch
from hypothesis import settings

from tapeline.store import Shards, write_shards

settings.register_profile("tapeline", deadline=None)  # this machine's load is nobody's fault
settings.load_profile("tapeline")


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
