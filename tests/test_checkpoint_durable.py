"""Durable copies at a path, in memory and in an object store: the same behaviour at each."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
import s3fs
from helpers_checkpoint import Run, files_of
from helpers_s3 import s3_server

from tapeline.checkpoint import load_state, save_state, state_sha256
from tapeline.checkpoint.drain import Drain
from tapeline.checkpoint.durable import MARKER, DurableTier
from tapeline.checkpoint.retain import Retention
from tapeline.errors import CheckpointError
from tapeline.files import ASIDE
from tapeline.testing import Crash, Fault, FaultyDisk, FaultyObjects

METADATA = {
    "config_hash": "c0",
    "data_fingerprint": "d1",
    "code": {"commit": "abc", "dirty": False},
}


@pytest.fixture(scope="module")
def s3():
    """A server that speaks S3, and a client of it that every URL below leads to."""
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        for key, value in server.environment.items():
            patch.setenv(key, value)
        s3fs.S3FileSystem.clear_instance_cache()
        yield fsspec.filesystem("s3")
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(params=["path", "memory", "s3"])
def root(request, tmp_path: Path) -> str:
    bucket = f"bucket-{abs(hash(request.node.name)):x}"
    if request.param == "path":
        return str(tmp_path / "elsewhere" / "run")
    if request.param == "s3":
        request.getfixturevalue("s3").mkdir(bucket)
    return f"{request.param}://{bucket}/run"


@pytest.fixture(scope="module")
def states():
    return [Run(seed=1).train(steps).capture() for steps in (1, 2)]


@pytest.fixture
def commits(tmp_path: Path, states) -> list[Path]:
    return [
        save_state(tmp_path / "local" / f"step-{s.step:08d}", s, metadata=METADATA) for s in states
    ]


def store_of(root: str) -> tuple[Any, str]:
    return fsspec.url_to_fs(root)


def damage(root: str, name: str, change) -> None:
    filesystem, path = store_of(root)
    filesystem.pipe_file(f"{path}/{name}", change(filesystem.cat_file(f"{path}/{name}")))


def flipped(data: bytes) -> bytes:
    changed = bytearray(data)
    changed[len(data) // 2] ^= 1
    return bytes(changed)


def test_a_copy_comes_back_as_the_checkpoint_it_was(root: str, commits, states, tmp_path: Path):
    tier = DurableTier(root)
    assert tier.steps() == []
    markers = [tier.copy(folder) for folder in commits]
    again = DurableTier(root)
    assert again.steps() == [2, 1]
    assert [again.verify(step) for step in (1, 2)] == markers
    assert markers[1].metadata == METADATA
    assert markers[1].total_bytes == sum(f.stat().st_size for f in files_of(commits[1]))
    fetched = again.fetch(2, tmp_path / "back" / "step-00000002")
    assert state_sha256(load_state(fetched, expect=METADATA)) == state_sha256(states[1])
    assert {f.name: f.read_bytes() for f in files_of(fetched)} == {
        f.name: f.read_bytes() for f in files_of(commits[1])
    }


def test_copying_again_changes_nothing_even_when_the_state_was_saved_again(
    root: str, commits, states
):
    tier = DurableTier(root)
    first = tier.copy(commits[0])
    filesystem, path = store_of(root)
    before = {name: filesystem.cat_file(name) for name in filesystem.find(path)}
    assert tier.copy(commits[0]) == first
    shutil.rmtree(commits[0])
    save_state(commits[0], states[0], metadata=METADATA)  # another time in its manifest
    assert tier.copy(commits[0]) == first
    filesystem.invalidate_cache()
    assert {name: filesystem.cat_file(name) for name in filesystem.find(path)} == before


def test_other_content_under_the_same_step_is_an_error_with_both_hashes(root: str, commits):
    tier = DurableTier(root)
    first = tier.copy(commits[0])
    shutil.rmtree(commits[0])
    save_state(commits[0], Run(seed=7).train(1).capture())
    with pytest.raises(CheckpointError) as error:
        tier.copy(commits[0])
    assert error.value.where == f"{root}/step-00000001"
    assert error.value.expected.startswith("content with sha256 ")
    assert first.content_sha256 not in error.value.expected
    assert error.value.found == first.content_sha256
    assert error.value.fix == "Copy to another root: a durable copy is never overwritten"
    assert tier.verify(1) == first


def test_the_one_who_loses_a_race_takes_the_other_copy_or_is_told(root: str, commits, monkeypatch):
    tier = DurableTier(root)
    theirs = DurableTier(root).copy(commits[0])
    looked: list[int] = []
    really = DurableTier._marker

    def late(self, step: int):
        looked.append(step)
        return None if len(looked) == 1 else really(self, step)

    monkeypatch.setattr(DurableTier, "_marker", late)
    assert tier.copy(commits[0]) == theirs
    assert len(looked) == 2


@pytest.mark.parametrize("name", ["rank-0.safetensors", "manifest.json"])
def test_every_damage_is_found_by_verify_and_fetch(root: str, commits, tmp_path: Path, name: str):
    tier = DurableTier(root)
    marker = tier.copy(commits[0])
    entry = marker.files[name]
    for change in (flipped, lambda data: data[:-1], lambda data: data + b"x"):
        good = (commits[0] / name).read_bytes()
        damage(root, f"step-00000001/{name}", change)
        with pytest.raises(CheckpointError) as error:
            tier.verify(1)
        assert error.value.where == f"{root}/step-00000001/{name}"
        assert error.value.expected == f"{entry.bytes:,} bytes with sha256 {entry.sha256}"
        assert error.value.found.startswith(f"{len(change(good)):,} bytes with ")
        assert error.value.fix == "It is damaged. Use another step"
        with pytest.raises(CheckpointError, match="It is damaged"):
            tier.fetch(1, tmp_path / "back")
        assert not (tmp_path / "back").exists()
        damage(root, f"step-00000001/{name}", lambda _, good=good: good)
    filesystem, path = store_of(root)
    filesystem.rm(f"{path}/step-00000001/{name}")
    with pytest.raises(CheckpointError, match=r"found nothing\. It is damaged"):
        tier.verify(1)


@pytest.mark.parametrize(
    "change",
    [
        flipped,
        lambda _: b"",
        lambda _: b"[1]",
        lambda _: b"{}",
        lambda data: data.replace(b" ", b"\t", 1),
    ],
)
def test_a_damaged_marker_is_found(root: str, commits, change):
    tier = DurableTier(root)
    tier.copy(commits[0])
    damage(root, f"step-00000001/{MARKER}", change)
    for action in (lambda: tier.verify(1), lambda: tier.copy(commits[0])):
        with pytest.raises(CheckpointError) as error:
            action()
        assert str(error.value) == (
            f"{root}/step-00000001/{MARKER}: expected the marker of step 1 as it was written, "
            "found other bytes. It is damaged. Use another step."
        )


def test_a_marker_of_another_step_is_damage(root: str, commits):
    tier = DurableTier(root)
    marker = tier.copy(commits[0])
    tier.copy(commits[1])
    damage(root, f"step-00000002/{MARKER}", lambda _: marker.render())
    with pytest.raises(CheckpointError, match="expected the marker of step 2 as it was written"):
        tier.marker(2)


def test_a_step_without_a_copy_is_named(root: str):
    with pytest.raises(CheckpointError) as error:
        DurableTier(root).fetch(7, Path("unused"))
    assert str(error.value) == (
        f"{root}/step-00000007/{MARKER}: expected a marker, found none: the step was not copied, "
        "or not to its end. Use another step."
    )


def test_a_damaged_checkpoint_is_not_copied(root: str, commits):
    file = commits[0] / "rank-0.safetensors"
    file.write_bytes(flipped(file.read_bytes()))
    with pytest.raises(CheckpointError) as error:
        DurableTier(root).copy(commits[0])
    assert error.value.where == str(file)
    assert error.value.fix == "It is damaged, and was not copied. Copy another checkpoint"
    file.unlink()
    with pytest.raises(CheckpointError, match="found 0 with"):
        DurableTier(root).copy(commits[0])
    assert DurableTier(root).steps() == []


def test_tags_stay_where_they_are(root: str, commits):
    tier = DurableTier(root)
    for folder in commits:
        tier.copy(folder)
    tier.tag(1, "paper-v1.0")
    tier.tag(1, "paper-v1.0")
    tier.tag(2, "best")
    assert DurableTier(root).tags() == {"best": 2, "paper-v1.0": 1}
    with pytest.raises(CheckpointError) as error:
        tier.tag(2, "paper-v1.0")
    assert error.value.where == f"{root}, tag paper-v1.0"
    assert tier.marker(2).content_sha256 in error.value.expected
    assert json.loads(error.value.found) == {
        "step": 1,
        "content_sha256": tier.marker(1).content_sha256,
    }
    assert tier.tags()["paper-v1.0"] == 1
    with pytest.raises(CheckpointError, match="the step was not copied"):
        tier.tag(3, "none")
    damage(root, "tags/best.json", lambda _: b"[]")
    with pytest.raises(CheckpointError, match="expected a tag's record, found b'\\[\\]'"):
        tier.tags()


@pytest.mark.parametrize("tag", ["", "../x", "a/b", ".x", "x" * 101, "a b"])
def test_a_tag_is_a_plain_name(tmp_path: Path, tag: str):
    with pytest.raises(CheckpointError) as error:
        DurableTier(tmp_path).tag(1, tag)
    assert str(error.value) == (
        f"tag: expected letters, digits, `.`, `_` and `-`, up to 100, found {tag!r}. "
        "Choose another name."
    )


def test_an_occupied_folder_is_not_fetched_into(root: str, commits, tmp_path: Path):
    tier = DurableTier(root)
    tier.copy(commits[0])
    with pytest.raises(CheckpointError) as error:
        tier.fetch(1, commits[1])
    assert str(error.value) == (
        f"{commits[1]}: expected a new or empty folder, and room in it, found other files. "
        "Choose another folder."
    )
    with FaultyDisk(tmp_path, Fault("full_disk", 1)), pytest.raises(CheckpointError) as error:
        tier.fetch(1, tmp_path / "back")
    assert error.value.found == "No space left on device"
    assert not (tmp_path / "back").exists()


def faulty(root: str, *faults: Fault) -> FaultyDisk | FaultyObjects:
    if "://" in root:
        return FaultyObjects(store_of(root)[0], *faults)
    return FaultyDisk(Path(root), *faults)


def empty(root: str) -> None:
    filesystem, path = store_of(root)
    filesystem.invalidate_cache()
    if filesystem.exists(path):
        filesystem.rm(path, recursive=True)


def num_operations(root: str, commit: Path) -> int:
    DurableTier(root).copy(commit)
    empty(root)  # folders above the root stay
    with faulty(root) as place:
        DurableTier(root).copy(commit)
    empty(root)
    return len(place.operations)


@pytest.mark.parametrize("kind", ["crash", "io_error"])
def test_a_copy_cut_short_anywhere_is_none_and_is_made_good(root: str, commits, kind):
    count, left = num_operations(root, commits[0]), []
    assert count >= 3
    for number in range(count):
        tier = DurableTier(root)
        with faulty(root, Fault(kind, number)) as place:
            with contextlib.suppress(Crash, CheckpointError):
                tier.copy(commits[0])
            assert place.struck
        left.append(tier.steps())
        for step in tier.steps():
            tier.verify(step)
        assert tier.verify(tier.copy(commits[0]).step)
        empty(root)
    assert left[0] == []
    if kind == "crash":  # an error may be of no consequence, such as one of making what is there
        assert left == sorted(left)


def test_a_full_place_says_so(root: str, commits):
    with faulty(root, Fault("full_disk")), pytest.raises(CheckpointError) as error:
        DurableTier(root).copy(commits[0])
    assert error.value.where == root
    assert error.value.expected == "a place for durable copies that can be read and written"
    assert "No space left on device" in error.value.found
    assert DurableTier(root).steps() == []


def test_a_file_that_did_not_arrive_whole_gets_no_marker(root: str, commits):
    size = (commits[0] / "rank-0.safetensors").stat().st_size
    with faulty(root, Fault("truncated", 0, "*rank-0*")), pytest.raises(CheckpointError) as error:
        DurableTier(root).copy(commits[0])
    assert error.value.where == f"{root}/step-00000001/rank-0.safetensors"
    assert error.value.expected == f"{size:,} bytes"
    assert error.value.found.endswith(" after the copy")
    assert DurableTier(root).steps() == []


def test_a_bit_that_flips_on_the_way_is_found_by_verify(root: str, commits):
    tier = DurableTier(root)
    with faulty(root, Fault("bit_flip", 0, "*rank-0*")):
        tier.copy(commits[0])
    with pytest.raises(CheckpointError, match=r"rank-0\.safetensors: expected .* sha256"):
        tier.verify(1)


def test_a_url_nothing_can_open_is_refused():
    with pytest.raises(CheckpointError) as error:
        DurableTier("nonsense://x")
    assert str(error.value) == (
        "nonsense://x: expected a URL that fsspec can open, such as s3://bucket/prefix, found "
        'Protocol not known: nonsense. Correct it, or `pip install "tapeline[remote]"`.'
    )


def test_a_bucket_that_isnt_there_is_told(s3, commits):
    with pytest.raises(CheckpointError) as error:
        DurableTier("s3://no-such-bucket/run").copy(commits[0])
    assert str(error.value) == (
        "s3://no-such-bucket/run: expected a place for durable copies that can be read and "
        "written, found no such bucket or container. Check the address, the room, the permissions "
        "and the network."
    )


def test_the_drain_copies_in_order_and_never_holds_up_the_loop(tmp_path: Path, commits):
    tier, gate, done = DurableTier(tmp_path / "far"), threading.Event(), []
    really = tier.copy
    tier.copy = lambda folder: (gate.wait(), really(folder))[1]  # type: ignore[method-assign]
    with contextlib.closing(Drain(tier, lambda folder, _: done.append(folder))) as drain:
        for folder in commits:
            drain.submit(folder)
        assert drain.pending == tuple(commits)
        assert done == []
        gate.set()
    assert done == commits
    assert sorted(tier.steps()) == [n for n, _ in enumerate(commits, start=1)]
    assert drain.pending == ()


def test_a_failed_copy_is_raised_once_at_a_boundary_and_stops_no_other(tmp_path: Path, commits):
    copied = threading.Event()
    drain = Drain(DurableTier(tmp_path / "far"), lambda *_: copied.set())
    drain.submit(tmp_path / "gone")
    drain.submit(commits[0])
    assert copied.wait(60)
    with pytest.raises(CheckpointError, match="gone: expected a checkpoint folder, found nothing"):
        drain.raise_failure()
    drain.raise_failure()
    drain.submit(tmp_path / "gone, too")
    with pytest.raises(CheckpointError, match="gone, too"):
        drain.close()
    assert drain.pending == ()
    assert DurableTier(tmp_path / "far").steps() == [1]


def test_a_checkpoint_deleted_while_it_is_copied_is_told(tmp_path: Path, commits, monkeypatch):
    tier = DurableTier(tmp_path / "far")
    really = DurableTier._existing

    def delete_meanwhile(self, marker):
        shutil.rmtree(commits[0])
        return really(self, marker)

    monkeypatch.setattr(DurableTier, "_existing", delete_meanwhile)
    with pytest.raises(CheckpointError) as error:
        tier.copy(commits[0])
    assert str(error.value) == (
        f"{commits[0] / 'rank-0.safetensors'}: expected a checkpoint that stays while it is copied,"
        " found nothing: it was deleted meanwhile. Keep checkpoints from being deleted before they "
        "are copied."
    )


def test_a_folder_without_permission_is_told(tmp_path: Path, commits, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    with pytest.raises(CheckpointError, match="found Permission denied"):
        DurableTier(tmp_path / "far").copy(commits[0])
    assert DurableTier(tmp_path / "far").steps() == []


def line_of_copies(folder: Path, metrics: dict[int, float | None]) -> list[Path]:
    """Committed checkpoints of these steps, each with its metric."""
    run, made = Run(seed=1), []
    for step, metric in metrics.items():
        state = run.train(step - run.num_steps).capture()
        metadata = {**METADATA, "metric": metric}
        made.append(save_state(folder / f"step-{step:08d}", state, metadata=metadata))
    return made


def test_copies_stay_for_ever_unless_a_rule_says_how_many(root: str, tmp_path: Path):
    folders = line_of_copies(tmp_path / "run", {1: 0.5, 2: 0.9, 3: 0.8, 4: 0.7, 5: None})
    tier = DurableTier(root)
    for folder in folders:
        tier.copy(folder)
    tier.tag(2, "paper")
    assert tier.retire() == []
    assert tier.steps() == [5, 4, 3, 2, 1]
    keeping = DurableTier(root, Retention(last=2, best=1))
    assert keeping.retire() == [3]
    assert keeping.retire() == []
    assert keeping.steps() == [5, 4, 2, 1]
    for step in keeping.steps():
        keeping.verify(step)
    filesystem, path = store_of(root)
    filesystem.invalidate_cache()
    assert not [name for name in filesystem.find(path) if "step-00000003" in name]


def test_no_copy_goes_for_the_sake_of_one_that_does_not_read_back(root: str, tmp_path: Path):
    first, second, third = line_of_copies(tmp_path / "run", {1: None, 2: None, 3: None})
    tier = DurableTier(root, Retention(last=1))
    tier.copy(first)
    with faulty(root, Fault("bit_flip", 0, "*rank-0*")):
        tier.copy(second)
    with pytest.raises(CheckpointError, match=r"step-00000002/rank-0\.safetensors: expected"):
        tier.retire()
    assert tier.steps() == [2, 1]
    assert tier.retire() == []  # the newest that counts is the first one now
    tier.copy(third)
    assert tier.retire() == [1, 2]
    assert tier.verify(3)


def test_a_deletion_cut_short_anywhere_leaves_whole_copies(root: str, tmp_path: Path):
    folders = line_of_copies(tmp_path / "run", {1: None, 2: None, 3: None})

    def filled() -> DurableTier:
        tier = DurableTier(root, Retention(last=1))
        for folder in folders:
            tier.copy(folder)
        return tier

    tier = filled()
    with faulty(root) as place:
        assert tier.retire() == [1, 2]
    count = len(place.operations)
    assert count >= 4
    for number in range(count):
        empty(root)
        tier = filled()
        with faulty(root, Fault("crash", number)), contextlib.suppress(Crash, CheckpointError):
            tier.retire()
        left = DurableTier(root).steps()
        assert left[0] == 3
        for step in left:
            tier.verify(step)
        DurableTier(root, Retention(last=1)).retire()
        assert DurableTier(root).steps() == [3]


@pytest.mark.parametrize("what", ["copy", "deletion"])
def test_what_was_cut_short_anywhere_is_swept_once_it_is_old(root: str, tmp_path: Path, what: str):
    first, second = line_of_copies(tmp_path / "run", {1: None, 2: None})
    elsewhere = tmp_path / "another run"  # the local one of step 1 has gone
    elsewhere.mkdir()
    filesystem, path = store_of(root)

    def files() -> list[str]:
        filesystem.invalidate_cache()
        return sorted(name.removeprefix(path) for name in filesystem.find(path))

    number, struck = 0, True
    while struck:
        tier = DurableTier(root, Retention(last=1))
        if what == "deletion":
            tier.copy(first)
            tier.copy(second)
        work = tier.retire if what == "deletion" else lambda tier=tier: tier.copy(first)
        with faulty(root, Fault("crash", number)) as place:
            with contextlib.suppress(Crash, CheckpointError):
                work()
            struck = bool(place.struck)
        tier.sweep(elsewhere)  # nothing newer is there, or what went is older than the newest
        DurableTier(root).copy(second)
        there = files()
        tier.sweep(first.parent)  # as if it were in flight
        assert files() == there
        tier.sweep(elsewhere)
        left = {name.split("/")[-2] for name in files()}
        assert left == {f"step-{step:08d}" for step in tier.steps()}
        assert not [name for name in files() if ASIDE in name]
        for step in tier.steps():
            tier.verify(step)
        empty(root)
        number += 1
    assert number > 3


def test_a_place_that_is_no_folder_is_not_taken_for_an_empty_one(tmp_path: Path):
    (tmp_path / "far").touch()
    with pytest.raises(CheckpointError) as error:
        DurableTier(tmp_path / "far").steps()
    assert str(error.value) == (
        f"{tmp_path / 'far'}: expected a place for durable copies that can be read and written, "
        "found Not a directory. Check the address, the room, the permissions and the network."
    )


def test_a_copy_that_cannot_be_listed_is_told(tmp_path: Path, commits, monkeypatch):
    tier = DurableTier(tmp_path / "far")
    tier.copy(commits[0])
    really = os.scandir

    def scandir(path):
        if Path(path).name == "step-00000001":
            raise PermissionError(13, os.strerror(13), str(path))
        return really(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(CheckpointError, match=r"far: expected .* found Permission denied"):
        tier.steps()


def test_copies_that_a_run_passed_over_push_nothing_out(tmp_path: Path):
    first, second, third = line_of_copies(tmp_path / "run", {1: None, 2: None, 3: None})
    tier = DurableTier(tmp_path / "far", Retention(last=1))
    tier.copy(first)
    tier.copy(third)
    tier.resumed_from(1)
    tier.copy(second)
    assert tier.retire() == [1]
    assert tier.steps() == [3, 2]
    tier.copy(third)  # done again, with the same bits
    assert tier.retire() == [2]


def test_the_drain_keeps_to_the_rule(tmp_path: Path):
    folders = line_of_copies(tmp_path / "run", {1: None, 2: None, 3: None})
    tier = DurableTier(tmp_path / "far", Retention(last=2))
    with contextlib.closing(Drain(tier, lambda *_: None)) as drain:
        for folder in folders:
            drain.submit(folder)
    assert tier.steps() == [3, 2]
    assert sorted(path.name for path in (tmp_path / "far").iterdir()) == [
        "step-00000002",
        "step-00000003",
    ]


def test_a_copy_that_goes_while_it_is_tagged_is_told(tmp_path: Path, commits, monkeypatch):
    tier = DurableTier(tmp_path / "far")
    tier.copy(commits[0])
    really = tier._tags.add

    def add(tag, fields):
        really(tag, fields)
        shutil.rmtree(tmp_path / "far" / "step-00000001")

    monkeypatch.setattr(tier._tags, "add", add)
    with pytest.raises(CheckpointError, match="expected a marker, found none"):
        tier.tag(1, "late")
