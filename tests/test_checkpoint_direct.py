"""Bytes between memory and disk: the same as by plain files, whatever the size and the disk."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest
import torch
import xxhash

from tapeline.checkpoint import direct
from tapeline.checkpoint.direct import hash_file, host_memory, read_hashed, write_hashed

BLOCK = 4096
CHUNK = direct._CHUNK_BYTES
SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 999_999, 1_000_000, CHUNK, CHUNK + 1, 2 * CHUNK - 1]


def content(size: int) -> tuple[torch.Tensor, bytes]:
    memory = host_memory(size)
    memory.random_(0, 256, generator=torch.Generator().manual_seed(size))
    return memory, memory[:size].numpy().tobytes()


def write(path: Path, memory: torch.Tensor, size: int) -> str:
    with path.open("xb") as stream:
        return write_hashed(stream.fileno(), memory, size).whole


@pytest.fixture(params=["direct", "refused", "short"])
def system(request, monkeypatch: pytest.MonkeyPatch) -> str:
    """The machine as it is; a file system without direct access; calls that do half their work."""
    if request.param == "refused":

        def refuse(descriptor: int, command: int, argument: int = 0) -> int:
            if command == fcntl.F_SETFL:
                raise OSError(errno.EINVAL, "Invalid argument")
            return 0

        monkeypatch.setattr(fcntl, "fcntl", refuse)
    if request.param == "short":
        really_write, really_read = os.write, os.preadv
        step = 128 * BLOCK
        monkeypatch.setattr(os, "write", lambda to, data: really_write(to, data[:step]))
        monkeypatch.setattr(os, "preadv", lambda f, v, at: really_read(f, [v[0][:step]], at))
    return request.param


@pytest.mark.parametrize("size", SIZES)
def test_written_and_read_as_by_plain_files(tmp_path: Path, system: str, size: int):
    memory, expected = content(size)
    digest = write(tmp_path / "x", memory, size)
    assert digest == xxhash.xxh3_128_hexdigest(expected)
    assert (tmp_path / "x").read_bytes() == expected
    read, found = read_hashed(tmp_path / "x", size)
    assert (read.numpy().tobytes(), found) == (expected, digest)
    assert hash_file(tmp_path / "x", size) == digest


def test_memory_is_whole_aligned_pages():
    for size in SIZES:
        memory = host_memory(size)
        assert memory.data_ptr() % BLOCK == 0
        assert len(memory) % BLOCK == 0
        assert len(memory) >= max(1, size)


@pytest.mark.parametrize("size", [10, CHUNK + 1])
def test_a_file_that_became_shorter_is_an_error(tmp_path: Path, size: int):
    memory, _ = content(size)
    write(tmp_path / "x", memory, size)
    for read in (read_hashed, hash_file):
        with pytest.raises(OSError):
            read(tmp_path / "x", 2 * size + 2 * CHUNK)
