"""Stores behind a URL: the same as in a folder, and every fault told. S3 is moto's server."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
import s3fs
import zarr
from helpers_s3 import Server, s3_server

from tapeline.errors import StoreError
from tapeline.session import Session, SessionKey
from tapeline.store import Shards, append_shards, stream_sessions, write_shards
from tapeline.store.place import Remote

COPY = "Copy the file again, or write the store again."


@pytest.fixture(scope="module")
def server():
    with s3_server() as running:
        yield running


def bucket_of(server: Server, monkeypatch: pytest.MonkeyPatch, name: str) -> str:
    for key, value in server.environment.items():
        monkeypatch.setenv(key, value)
    s3fs.S3FileSystem.clear_instance_cache()  # instances remember the endpoint they were made with
    fsspec.filesystem("s3").mkdir(name)
    return f"s3://{name}/some/prefix"


@pytest.fixture(params=["s3", "memory"])
def root(request, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"bucket-{abs(hash(request.node.name)):x}"
    if request.param == "memory":
        return f"memory://{name}/some/prefix"
    return bucket_of(request.getfixturevalue("server"), monkeypatch, name)


def session(name: str, rows: int = 4, add: float = 0.0, **changes) -> Session:
    arguments = {
        "key": SessionKey(name, "2024-01-02"),
        "values": np.arange(rows * 2, dtype=np.float32).reshape(rows, 2) / 7 - add,
        "columns": ("mid", "size"),
        "times": np.arange(rows) + 10**18,
        "age_ns": np.arange(rows) + 5,
        "valid": np.arange(rows) % 3 != 1,
        "origin": 61686.1,
    }
    return Session(**{**arguments, **changes})


def told(call) -> str:
    with pytest.raises(StoreError) as caught:
        call()
    return str(caught.value)


def objects(root: str) -> list[str]:
    fs, prefix = fsspec.url_to_fs(root)
    fs.invalidate_cache()
    return sorted(path[len(prefix) :] for path in fs.find(prefix))


def put(root: str, name: str, data: bytes) -> None:
    fs, prefix = fsspec.url_to_fs(root)
    fs.pipe_file(f"{prefix}/{name}", data)


def get(root: str, name: str) -> bytes:
    fs, prefix = fsspec.url_to_fs(root)
    return fs.cat_file(f"{prefix}/{name}")


def test_a_store_behind_a_url_is_the_same_store(tmp_path: Path, root: str) -> None:
    written = [session("A", 700), session("B", 0), session("C", valid=None)]
    assert write_shards(iter(written), f"{root}/", "zarr") == f"{root}/zarr"
    write_shards(written, tmp_path, "mmap")
    shards, local = Shards(root), Shards(tmp_path)
    assert (shards.fmt, shards.folder, shards.root) == ("zarr", f"{root}/zarr", root)
    assert shards.fingerprint == local.fingerprint
    assert shards.mm.tobytes() == local.mm.tobytes()
    for one, other in zip(shards.sessions(), stream_sessions(root), strict=True):
        for name in ("values", "times", "age_ns", "valid"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
    for number in range(3):
        assert shards.times(number).tolist() == local.times(number).tolist()
        assert shards.age_ns(number).tolist() == local.age_ns(number).tolist()
    assert shards.verify() == []
    assert shards.bytes == sum(len(get(root, name[1:])) for name in objects(root))


def test_another_process_opens_it_from_a_pickle(server, monkeypatch) -> None:
    root = bucket_of(server, monkeypatch, "pickled")
    write_shards([session("A", 50_000)], root, "zarr")
    shards = Shards(root)
    sent = pickle.dumps(shards)
    assert len(sent) < 1000
    script = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()).mm.sum(dtype='f8'))"
    said = subprocess.run(
        [sys.executable, "-c", script], input=sent, capture_output=True, check=True
    )
    assert float(said.stdout) == shards.mm.sum(dtype="f8")


def test_it_is_a_group_that_any_zarr_reader_opens(tmp_path: Path) -> None:
    write_shards([session("A", 200_000)], tmp_path, "zarr")
    group = zarr.open_group(tmp_path / "zarr" / "data", mode="r")
    ((name, inner),) = group.groups()
    assert re.fullmatch(r"session-00000-[0-9a-f]{16}", name)
    assert dict(inner.attrs) == {
        "instrument": "A",
        "date": "2024-01-02",
        "segment": 0,
        "origin": 61686.1,
        "columns": ["mid", "size"],
    }
    assert inner.metadata.zarr_format == 3
    assert (inner["values"].chunks, inner["values"].shards) == ((131072, 2), (262144, 2))
    assert inner["values"][...].tobytes() == session("A", 200_000).values.tobytes()
    assert inner["times"][5] == 10**18 + 5


def test_only_zarr_can_lie_behind_a_url(root: str) -> None:
    for fmt in ("mmap", "npy", "csv"):
        assert told(lambda fmt=fmt: write_shards([np.ones((2, 2))], root, fmt)) == (
            f"{root}/{fmt}: expected a folder on this machine for this format, found a URL. "
            "Use the zarr format there."
        )
    assert objects(root) == []
    write_shards([np.ones((2, 2))], root, "zarr")
    assert told(lambda: Shards(root, "mmap")) == (
        f"{root}: expected a store in mmap format, found one in zarr. "
        f"Convert it with `tapeline store convert {root} --to mmap`."
    )


def test_appending_behind_a_url(tmp_path: Path, root: str) -> None:
    assert append_shards([session("A")], root, "zarr") == 1
    before = Shards(root)
    assert append_shards([session("A"), session("B", 9)], root, "zarr") == 1
    there = objects(root)
    assert append_shards([session("A"), session("B", 9)], root, "zarr") == 0
    assert objects(root) == there
    write_shards([session("A"), session("B", 9)], tmp_path, "mmap")
    assert Shards(root).fingerprint == Shards(tmp_path).fingerprint
    assert Shards(root).verify() == []
    assert (len(before), before.times(0).tolist()) == (1, session("A").times.tolist())
    said = told(lambda: append_shards([session("C"), session("B")], root, "zarr"))
    assert said.startswith("session B/2024-01-02: expected what the store holds under that key, ")
    assert len(Shards(root)) == 2


def test_a_second_writer_is_found_out_at_its_commit(root: str) -> None:
    write_shards([session("A")], root, "zarr")

    def source():
        yield session("B")
        append_shards([session("C")], root, "zarr")

    refusal = (
        f"{root}/zarr: expected one writer at a time, found an index that another one wrote "
        "meanwhile. Start again: what the other one wrote is kept."
    )
    assert told(lambda: append_shards(source(), root, "zarr")) == refusal
    assert [key.instrument for key in Shards(root).keys] == ["A", "C"]
    assert Shards(root).verify() == []
    assert append_shards([session("B")], root, "zarr") == 1
    other = f"{root}-2"

    def source_of_a_new_one():
        yield session("B")
        write_shards([session("C")], other, "zarr")

    said = told(lambda: write_shards(source_of_a_new_one(), other, "zarr"))
    assert said == refusal.replace(root, other)
    assert [key.instrument for key in Shards(other).keys] == ["C"]
    assert Shards(other).verify() == []


def test_occupied_is_refused_and_replacing_deletes_the_old_last(root: str) -> None:
    write_shards([session("A"), session("B")], root, "zarr")
    before = objects(root)
    assert told(lambda: write_shards([session("C")], root, "zarr")) == (
        f"{root}/zarr: expected a place for new shards, found files already there. "
        "Choose another folder, or replace them with `--replace` (`replace=True`)."
    )
    with pytest.raises(StoreError):
        write_shards([session("C"), session("C")], root, "zarr", replace=True)
    assert Shards(root).verify() == []
    assert set(objects(root)) > set(before)  # what no index names may stay
    write_shards([session("B")], root, "zarr", replace=True)
    assert [key.instrument for key in Shards(root).keys] == ["B"]
    assert Shards(root).verify() == []
    assert len(objects(root)) == 1 + len(Shards(root).index.files)


@pytest.mark.parametrize("replace", [False, True])
def test_the_index_is_written_last_and_is_the_commit(root: str, monkeypatch, replace: bool) -> None:
    """The connection is lost at the n-th write, for every n."""
    write_shards([session("A")], root, "zarr")
    really_write = Remote.write
    for at in range(10):
        calls = []

        def write(self, files, calls=calls, at=at):
            calls.append(sorted(files))
            if len(calls) > at:
                raise ConnectionError
            really_write(self, files)

        monkeypatch.setattr(Remote, "write", write)
        try:
            if replace:
                write_shards([session("B"), session("C")], root, "zarr", replace=True)
            else:
                append_shards([session("B"), session("C")], root, "zarr")
        except ConnectionError:
            monkeypatch.setattr(Remote, "write", really_write)
            shards = Shards(root)
            assert [key.instrument for key in shards.keys] == ["A"]
            assert shards.verify() == []
        else:
            break
    assert (at, calls[-1]) == (3, ["index.json"])
    assert Shards(root).verify() == []


# faults


@pytest.fixture
def whole(root: str) -> tuple[str, str]:
    """A store, and the name of the object that holds the values of its second session."""
    write_shards([session("A"), session("B", 5000)], root, "zarr")
    (name,) = [n for n in objects(root) if re.search(r"session-00001.*/values/c/0/0$", n)]
    return root, name[1:]


def test_a_truncated_or_missing_object_is_told_at_open(whole) -> None:
    root, name = whole
    data = get(root, name)
    put(root, name, data[:-1])
    assert told(lambda: Shards(root)) == (
        f"{root}/{name}: expected {len(data):,} bytes, as the store's index says, "
        f"found {len(data) - 1:,} bytes. {COPY}"
    )
    fs, prefix = fsspec.url_to_fs(root)
    fs.rm_file(f"{prefix}/{name}")
    assert told(lambda: Shards(root)) == (
        f"{root}/{name}: expected {len(data):,} bytes, as the store's index says, "
        f"found no file. {COPY}"
    )


def test_a_changed_object_is_never_decoded(whole, tmp_path: Path) -> None:
    root, name = whole
    data = bytearray(get(root, name))
    data[len(data) // 2] ^= 1
    put(root, name, bytes(data))
    refusal = (
        f"{root}/{name}: expected the rows and columns that the store's index lists, "
        f"found bytes that differ from those written. {COPY}"
    )
    assert told(lambda: Shards(root)) == refusal
    assert told(lambda: Shards(root, cache=tmp_path)) == refusal
    assert list(tmp_path.rglob("*.f32")) == []


def test_an_object_that_goes_missing_after_open_is_told(whole) -> None:
    root, name = whole
    sessions = stream_sessions(root)
    next(sessions)
    fs, prefix = fsspec.url_to_fs(root)
    fs.rm_file(f"{prefix}/{name}")
    assert re.fullmatch(
        rf"{root}/zarr: expected the rows and columns that the store's index lists, "
        rf"found an object that can't be read: .*\. {COPY}",
        told(lambda: next(sessions)),
    )


def test_a_damaged_index_is_told(whole) -> None:
    root, _ = whole
    data = get(root, "zarr/index.json")
    put(root, "zarr/index.json", data[:-5])
    assert told(lambda: Shards(root)) == (
        f"{root}/zarr/index.json: expected an unchanged index of version 1, found damaged bytes. "
        "Write the store again with this version of tapeline."
    )


def test_no_store_is_told(root: str) -> None:
    assert told(lambda: Shards(f"{root}/nothing")) == (
        f"{root}/nothing: expected a store in zarr format, found no store. "
        "Make one with `tapeline ingest` or `write_shards`."
    )


def lost(root: str) -> str:
    return (
        rf"{root}/zarr: expected objects that can be (read|listed), found \w+: .+\. "
        r"Check the address, the credentials and the network, then start again\."
    )


def test_a_server_that_is_gone_is_told_and_what_was_fetched_is_kept(
    tmp_path: Path, monkeypatch
) -> None:
    """It dies in the middle of a download, comes back empty, and gets its store again."""
    written = [session(name, 500) for name in "ABCDE"]
    monkeypatch.setattr("tapeline.store.cache.COMMIT_BYTES", 1)
    really_read = Remote.read
    with s3_server() as server:
        root = bucket_of(server, monkeypatch, "lost")
        write_shards(written, root, "zarr")
        reads = []

        def read(self, names):
            reads.append(names[0])
            if sum("values" in name for name in reads) > 3:
                server.stop()
            return really_read(self, names)

        monkeypatch.setattr(Remote, "read", read)
        assert re.fullmatch(lost(root), told(lambda: Shards(root, cache=tmp_path)))
        assert re.fullmatch(lost(root), told(lambda: Shards(root, cache=tmp_path)))
    (mapped,) = tmp_path.glob("*.cached")
    assert [s.key.instrument for s in stream_sessions(mapped)] == ["A", "B", "C"]
    monkeypatch.setattr(Remote, "read", really_read)
    with s3_server() as server:
        root = bucket_of(server, monkeypatch, "lost")
        write_shards(written, root, "zarr")
        reads = []
        monkeypatch.setattr(
            Remote, "read", lambda self, names: reads.extend(names) or really_read(self, names)
        )
        shards = Shards(root, cache=tmp_path)
    assert shards.verify() == []
    assert shards.mm.tobytes() == b"".join(s.values.tobytes() for s in written)
    fetched = {name.split("-")[1] for name in reads if name.startswith("data/")}
    assert fetched == {"00003", "00004"}


# the extra


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch) -> None:
    write_shards([np.ones((2, 2))], tmp_path, "zarr")
    fix = 'Install them with `pip install "tapeline[remote]"`.'
    monkeypatch.setitem(sys.modules, "zarr", None)
    for call in (
        lambda: Shards(tmp_path),
        lambda: write_shards([np.ones((2, 2))], tmp_path / "t", "zarr"),
    ):
        assert re.fullmatch(
            r"zarr shards and stores behind a URL: expected the packages of the `remote` extra, "
            rf"found .*zarr.*\. {re.escape(fix)}",
            told(call),
        )
    assert not (tmp_path / "t").exists()
    monkeypatch.setitem(sys.modules, "fsspec", None)
    assert "`remote` extra, found import of fsspec" in told(lambda: Shards("s3://b/p"))


def test_a_protocol_that_needs_another_package_or_is_none(tmp_path: Path) -> None:
    assert "gcsfs" in told(lambda: Shards("gs://bucket/p"))
    assert told(lambda: Shards("nope://bucket/p")) == (
        "nope://bucket/p/zarr: expected a URL that fsspec knows, such as s3://bucket/prefix, "
        "found Protocol not known: nope. "
        "Correct the URL, or install the package of its protocol."
    )


def test_the_extra_is_imported_only_when_used(tmp_path: Path) -> None:
    script = (
        "import sys, numpy as np; from tapeline.store import *\n"
        "write_shards([np.ones((2, 2))], sys.argv[1], 'mmap'); Shards(sys.argv[1])\n"
        "print({'zarr', 'fsspec', 's3fs'} & set(sys.modules))"
    )
    said = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, check=True
    )
    assert said.stdout == b"set()\n"


def test_a_file_url_is_the_folder_it_names(tmp_path: Path) -> None:
    url = (tmp_path / "a store").as_uri()
    assert "%20" in url
    for fmt in ("zarr", "mmap"):
        write_shards([session("A")], url, fmt)
        assert append_shards([session("A"), session("B")], url, fmt) == 1
        for root in (url, tmp_path / "a store"):
            shards = Shards(root, fmt)
            assert (len(shards), shards.verify()) == (2, [])
    assert Shards(url).folder == tmp_path / "a store" / "mmap"
    assert [s.key.instrument for s in stream_sessions(url, "zarr")] == ["A", "B"]
