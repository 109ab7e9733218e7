"""The cache: the same bits, mapped; filled once, never half; bounded; shared by processes."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import helpers_checkpoint
import numpy as np
import pytest
import xxhash

from tapeline.errors import StoreError
from tapeline.files import canonical_json
from tapeline.session import Session, SessionKey
from tapeline.store import Shards, append_shards, write_shards
from tapeline.store.formats import ZarrReader
from tapeline.store.layout import StoreIndex
from tapeline.store.place import Folder, locked

ROWS = 100
RAW = ROWS * (4 * 3 + 8 + 8)  # bytes of one session


def session(name: str, add: float = 0.0) -> Session:
    values = np.arange(ROWS * 3, dtype=np.float32).reshape(ROWS, 3) / 7 + ord(name[0]) + add
    times = np.arange(ROWS) + 10**18
    valid = np.arange(ROWS) % 5 != 1
    values[~valid] = np.nan
    key = SessionKey(name, "2024-01-02")
    return Session(key, values, ("a", "b", "c"), times, np.arange(ROWS), valid, 3.5)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write_shards(map(session, "ABC"), tmp_path / "store", "zarr")
    return tmp_path / "store"


@pytest.fixture
def loads(monkeypatch) -> list[int]:
    """The sessions whose values are decoded, in order."""
    decoded: list[int] = []
    really_load = ZarrReader.load

    def load(self, number, name):
        if name == "values":
            decoded.append(number)
        return really_load(self, number, name)

    monkeypatch.setattr(ZarrReader, "load", load)
    return decoded


def told(call) -> str:
    with pytest.raises(StoreError) as caught:
        call()
    return str(caught.value)


def entry_of(cache: Path) -> Path:
    (entry,) = cache.iterdir()
    return entry


def test_a_cached_store_is_mapped_and_has_the_same_bits(store: Path, tmp_path: Path) -> None:
    plain, cached = Shards(store), Shards(store, cache=tmp_path / "cache")
    assert isinstance(cached.mm, np.memmap)
    assert not isinstance(plain.mm, np.memmap)
    assert cached.mm.tobytes() == plain.mm.tobytes()
    assert (cached.fingerprint, cached.fmt) == (plain.fingerprint, "zarr")
    assert (cached.folder, cached.bytes) == (plain.folder, plain.bytes)
    assert np.shares_memory(cached.values(1), cached.mm)
    for one, other in zip(cached.sessions(), plain.sessions(), strict=True):
        for name in ("values", "times", "age_ns", "valid"):
            assert getattr(one, name).tobytes() == getattr(other, name).tobytes()
    assert cached.verify() == []
    with pytest.raises(ValueError, match="read-only"):
        cached.mm[0, 0] = 1


@pytest.mark.parametrize("fmt", ["npy", "csv"])
def test_the_other_formats_can_be_cached_too(tmp_path: Path, fmt: str) -> None:
    write_shards(map(session, "ABC"), tmp_path / "s", fmt)
    cached = Shards(tmp_path / "s", cache=tmp_path / "cache")
    assert isinstance(cached.mm, np.memmap)
    assert cached.mm.tobytes() == Shards(tmp_path / "s").mm.tobytes()


def test_nothing_is_decoded_twice(store: Path, tmp_path: Path, loads) -> None:
    cache = tmp_path / "cache"
    first = Shards(store, cache=cache)
    assert loads == [0, 1, 2]
    assert Shards(store, cache=cache).mm.tobytes() == first.mm.tobytes()
    first.times(1)
    append_shards(map(session, "CDE"), store, "zarr")
    longer = Shards(store, cache=cache)
    assert loads == [0, 1, 2, 3, 4]  # the new ones only
    assert (len(first), len(longer)) == (3, 5)
    assert longer.mm[: 3 * ROWS].tobytes() == first.mm.tobytes()
    assert longer.verify() == first.verify() == []


def test_a_store_that_was_replaced_is_fetched_anew(store: Path, tmp_path: Path, loads) -> None:
    cache = tmp_path / "cache"
    first = Shards(store, cache=cache)
    before = first.mm.tobytes(), first.times(2).tolist()
    write_shards(map(session, "AXY"), store, "zarr", replace=True)
    second = Shards(store, cache=cache)
    assert loads == [0, 1, 2, 0, 1, 2]
    assert [key.instrument for key in second.keys] == ["A", "X", "Y"]
    assert second.verify() == []
    assert (first.mm.tobytes(), first.times(2).tolist()) == before  # mapped still


def test_a_pickled_store_opens_its_cache(store: Path, tmp_path: Path, loads) -> None:
    cached = Shards(store, cache=tmp_path / "cache", cache_bytes=10**6)
    sent = pickle.dumps(cached)
    assert len(sent) < 1000
    received = pickle.loads(sent)
    assert isinstance(received.mm, np.memmap)
    assert received.mm.tobytes() == cached.mm.tobytes()
    assert loads == [0, 1, 2]
    assert pickle.dumps(received) == sent


@pytest.mark.parametrize("damage", ["truncated", "deleted", "index", "note", "longer"])
def test_a_damaged_cache_is_filled_again(store: Path, tmp_path: Path, loads, damage: str) -> None:
    Shards(store, cache=tmp_path / "cache")
    folder = entry_of(tmp_path / "cache") / "mmap"
    content = (folder / "values.f32").read_bytes()
    if damage == "deleted":
        (folder / "times.i64").unlink()
    elif damage == "index":
        (folder / "index.json").write_bytes(b"{}")
    elif damage == "truncated":
        (folder / "values.f32").write_bytes(content[:-1])
    else:
        (folder / "values.f32").write_bytes(content + b"\0")
        (folder / "append.json").write_bytes(b"{}" if damage == "note" else b"")
    assert Shards(store, cache=tmp_path / "cache").verify() == []
    assert loads == [0, 1, 2, 0, 1, 2]


def test_a_flipped_byte_of_the_cache_is_found_by_verify(store: Path, tmp_path: Path) -> None:
    cached = Shards(store, cache=tmp_path / "cache")
    path = entry_of(tmp_path / "cache") / "mmap" / "values.f32"
    content = bytearray(path.read_bytes())
    content[ROWS * 12 + 3] ^= 1
    path.write_bytes(content)
    assert cached.verify() == [
        f"{path.parent}: session B/2024-01-02, values: the content differs from what was written"
    ]


def test_a_session_that_differs_from_its_hash_is_never_cached(store: Path, tmp_path: Path) -> None:
    """Its objects are as written, but it isn't what the index says: another program's work."""
    path = store / "zarr" / "index.json"
    index = json.loads(path.read_bytes())
    index.pop("xxh3")
    right = index["sessions"][1]["xxh3"]["times"]
    index["sessions"][1]["xxh3"]["times"] = "0" * 32
    index["xxh3"] = xxhash.xxh3_128_hexdigest(canonical_json(index).encode())
    old = next(p for p in (store / "zarr" / "data").iterdir() if "00001" in p.name)
    path.write_text(canonical_json(index))
    # the folder's name holds the hash of what the session should be
    said = told(lambda: Shards(store, cache=tmp_path / "cache"))
    assert said.startswith(f"{store / 'zarr' / 'data'}/session-00001-")
    assert said.endswith("found no Zarr array. Copy the file again, or write the store again.")
    entry = StoreIndex.load(Folder(store / "zarr"), "zarr").sessions[1]
    new = old.with_name(f"session-00001-{entry.digest(['a', 'b', 'c'])[:16]}")
    old.rename(new)
    index.pop("xxh3")
    index["files"] = {
        name.replace(old.name, new.name): value for name, value in index["files"].items()
    }
    index["xxh3"] = xxhash.xxh3_128_hexdigest(canonical_json(index).encode())
    path.write_text(canonical_json(index))
    assert told(lambda: Shards(store, cache=tmp_path / "cache")) == (
        f"{store / 'zarr'}, session B/2024-01-02, times: expected content {'0' * 32}, as the "
        f"index says, found content {right}. Write the store again from its source."
    )
    assert not list((tmp_path / "cache").rglob("*.i64"))


# the bound


def test_a_store_that_does_not_fit_the_bound_is_refused_before_it_is_fetched(
    store: Path, tmp_path: Path, loads
) -> None:
    cache = tmp_path / "cache"
    assert told(lambda: Shards(store, cache=cache, cache_bytes=3 * RAW - 1)) == (
        f"{cache}: expected room for the {3 * RAW:,} bytes of {store / 'zarr'}, decoded, "
        f"found {3 * RAW - 1:,} bytes of the bound. "
        "Allow more bytes, choose another folder, or split the store."
    )
    assert loads == []
    assert not cache.exists()
    assert Shards(store, cache=cache, cache_bytes=3 * RAW).verify() == []


def test_a_disk_that_is_too_small_is_told(store: Path, tmp_path: Path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr("tapeline.store.cache.shutil.disk_usage", lambda _: usage)
    assert "found 100 bytes on the disk. Allow more" in told(
        lambda: Shards(store, cache=tmp_path / "cache")
    )


def test_the_longest_unused_stores_are_deleted_to_make_room(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "mine").mkdir(parents=True)
    (cache / "mine" / "data").write_bytes(b"x" * 10**6)  # not the cache's: never counted or touched
    bound = 9 * RAW + 10_000  # three of three sessions, with their indexes
    opened = {}
    for number, name in enumerate("ABCD"):
        write_shards([session(name + i) for i in "123"], tmp_path / name, "zarr")
        if name == "D":
            Shards(tmp_path / "A", cache=cache, cache_bytes=bound)  # used again: B is the oldest
        opened[name] = Shards(tmp_path / name, cache=cache, cache_bytes=bound)
        for path in cache.glob("*.cached"):
            os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 10**9 * number))
    names = sorted(path.name[0] for path in cache.glob("*.cached"))
    assert names == ["A", "C", "D"]
    assert (cache / "mine" / "data").exists()
    assert opened["B"].verify() == []  # mapped still
    assert opened["B"].times(0) is not None


def test_a_store_that_is_being_filled_is_not_deleted(store: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    Shards(store, cache=cache)
    write_shards([session("X"), session("Y")], tmp_path / "other", "zarr")
    with locked(entry_of(cache)):
        said = told(lambda: Shards(tmp_path / "other", cache=cache, cache_bytes=4 * RAW))
    assert " bytes of the bound. Allow more bytes" in said
    assert len(Shards(tmp_path / "other", cache=cache, cache_bytes=4 * RAW)) == 2


# kills and company


def fill(store: Path, cache: Path):
    return lambda: Shards(store, cache=cache)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_filler_killed_at_any_file_operation_leaves_only_whole_sessions(
    store: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("tapeline.store.cache.COMMIT_BYTES", 1)
    plain = Shards(store)
    at, outcome = 0, None
    while outcome != helpers_checkpoint.UNREACHED:
        cache = tmp_path / str(at)
        outcome = helpers_checkpoint.in_child(fill(store, cache), at, die)
        shards = Shards(store, cache=cache)
        assert shards.verify() == []
        assert shards.mm.tobytes() == plain.mm.tobytes()
        assert [path.name for path in entry_of(cache).iterdir()] == ["mmap"]
        shutil.rmtree(cache)
        at += 1
    assert at > 20


FILLER = """
import sys
from tapeline.store import Shards, cache
from tapeline.store.formats import ZarrReader
cache.COMMIT_BYTES = 1
really_load = ZarrReader.load
def load(self, number, name):
    if name == "values":
        print(number, flush=True)
        sys.stdin.readline()
    return really_load(self, number, name)
ZarrReader.load = load
shards = Shards(sys.argv[1], cache=sys.argv[2])
print(shards.verify(), flush=True)
"""


def start_filler(store: Path, cache: Path) -> subprocess.Popen:
    arguments = [sys.executable, "-c", FILLER, str(store), str(cache)]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_killed_download_goes_on_where_it_was(store: Path, tmp_path: Path, loads) -> None:
    with start_filler(store, tmp_path / "cache") as filler:
        assert filler.stdin is not None
        assert filler.stdout is not None
        for number in range(2):
            assert filler.stdout.readline() == f"{number}\n"
            filler.stdin.write("\n")
            filler.stdin.flush()
        assert filler.stdout.readline() == "2\n"
        filler.send_signal(signal.SIGKILL)
    assert filler.returncode == -signal.SIGKILL
    assert Shards(store, cache=tmp_path / "cache").verify() == []
    assert loads == [2]


def test_processes_that_fill_one_cache_share_the_work(store: Path, tmp_path: Path) -> None:
    append_shards([session(f"Z{number}") for number in range(10)], store, "zarr")
    fillers = [start_filler(store, tmp_path / "cache") for _ in range(3)]
    for filler in fillers:  # all of them before waiting for any: whoever has the lock goes on
        assert filler.stdin is not None
        filler.stdin.write("\n" * 20)
        filler.stdin.flush()
    said = [filler.communicate()[0].split() for filler in fillers]
    assert [filler.returncode for filler in fillers] == [0, 0, 0]
    assert [words[-1] for words in said] == ["[]"] * 3
    decoded = sorted(int(word) for words in said for word in words[:-1])
    assert decoded == list(range(13))  # each session once, whoever did it
