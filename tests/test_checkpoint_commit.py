"""The commit protocol under faults: every damage is found and named, every crash is survived."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
import xxhash
from helpers_checkpoint import DIED, REFUSED, SURVIVED, UNREACHED, Run, files_of, in_child

from tapeline.checkpoint import (
    Checkpointer,
    load_checkpoint,
    load_state,
    read_manifest,
    save_checkpoint,
    save_state,
    state_sha256,
    verify,
)
from tapeline.errors import CheckpointError
from tapeline.files import canonical_json

MANIFEST = "manifest.json"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_state(tmp_path / "c", Run(seed=1).train(2).capture())


def damage_found(folder: Path) -> CheckpointError:
    """The error of `load_state`; `verify` must agree."""
    with pytest.raises(CheckpointError) as loading:
        load_state(folder)
    with pytest.raises(CheckpointError) as verifying:
        verify(folder)
    assert loading.value.where == verifying.value.where
    return loading.value


def rewrite_manifest(folder: Path, **changes) -> None:
    """Change fields of a manifest and put the right hash over them, as a forger would."""
    fields = json.loads((folder / MANIFEST).read_text()) | changes
    del fields["manifest_xxh3_128"]
    fields["manifest_xxh3_128"] = xxhash.xxh3_128_hexdigest(canonical_json(fields).encode())
    (folder / MANIFEST).write_text(json.dumps(fields, indent=1, sort_keys=True) + "\n")


def test_the_folder_is_what_the_manifest_says(saved: Path):
    manifest = verify(saved)
    assert {file.name for file in files_of(saved)} == {MANIFEST, *manifest.files}
    assert manifest.files.keys() == {"rank-0.safetensors"}
    assert manifest.step == 2
    assert manifest.total_bytes == sum((saved / name).stat().st_size for name in manifest.files)


def test_tensors_are_read_by_the_safetensors_library(saved: Path):
    tensors = safetensors.torch.load_file(saved / "rank-0.safetensors")
    state = load_state(saved)
    assert tensors.keys() == state.tensors.keys()
    assert all(torch.equal(tensors[name], state.tensors[name]) for name in tensors)


@pytest.mark.parametrize("name", ["rank-0.safetensors", MANIFEST])
def test_every_truncation_is_found(saved: Path, name: str):
    whole = (saved / name).read_bytes()
    for size in {0, 1, len(whole) // 2, len(whole) - 1}:
        (saved / name).write_bytes(whole[:size])
        error = damage_found(saved)
        assert error.where == str(saved / name)
        assert error.fix == "It is damaged. Use another checkpoint"
        if name != MANIFEST:
            assert (error.expected, error.found) == (f"{len(whole):,} bytes", f"{size:,}")
    (saved / name).write_bytes(whole + b"\n")
    assert damage_found(saved).where == str(saved / name)


@pytest.mark.parametrize("name", ["rank-0.safetensors", MANIFEST])
def test_every_flipped_byte_is_found(saved: Path, name: str):
    whole = bytearray((saved / name).read_bytes())
    generator = random.Random(1)
    positions = range(len(whole))
    if name != MANIFEST:
        positions = [0, len(whole) - 1, *generator.sample(positions, 100)]
    for position in positions:
        flipped = whole.copy()
        flipped[position] ^= generator.randrange(1, 256)
        (saved / name).write_bytes(flipped)
        assert damage_found(saved).where == str(saved / name)


def test_a_flipped_byte_is_told_by_its_hash(saved: Path):
    file = saved / "rank-0.safetensors"
    data = bytearray(file.read_bytes())
    good = xxhash.xxh3_128_hexdigest(bytes(data))
    data[-1] ^= 1
    file.write_bytes(data)
    assert str(damage_found(saved)) == (
        f"{file}: expected content with xxh3-128 {good}, found "
        f"{xxhash.xxh3_128_hexdigest(bytes(data))}. It is damaged. Use another checkpoint."
    )


@pytest.mark.parametrize("blank", [b"\t", b"\r", b"\n"])
def test_a_flipped_blank_in_the_manifest_is_found(saved: Path, blank: bytes):
    text = (saved / MANIFEST).read_bytes()
    (saved / MANIFEST).write_bytes(text.replace(b"\n ", b"\n" + blank, 1))
    assert damage_found(saved).where == str(saved / MANIFEST)


@pytest.mark.parametrize("number", ["1e999999", "NaN", "-Infinity", "9" * 5000, "1.0"])
def test_a_number_that_became_another_is_found(saved: Path, number: str):
    text = (saved / MANIFEST).read_text()
    (saved / MANIFEST).write_text(text.replace('"step": 2', f'"step": {number}'))
    assert damage_found(saved).where == str(saved / MANIFEST)


def test_a_missing_file_is_named(saved: Path):
    name = "rank-0.safetensors"
    size = (saved / name).stat().st_size
    (saved / name).unlink()
    assert str(damage_found(saved)) == (
        f"{saved / name}: expected a file of {size:,} bytes, found nothing. Use another checkpoint."
    )


def test_without_a_manifest_there_is_no_checkpoint(saved: Path):
    (saved / MANIFEST).unlink()
    assert str(damage_found(saved)) == (
        f"{saved / MANIFEST}: expected a manifest, found none: the save was not finished. "
        "Use another checkpoint."
    )


def test_what_is_no_folder_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError) as error:
        load_state(tmp_path / "none")
    assert str(error.value) == (
        f"{tmp_path / 'none'}: expected a checkpoint folder, found nothing. "
        "Give the folder of a checkpoint."
    )
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="found a file"):
        load_state(tmp_path / "file")


@pytest.mark.parametrize(
    ("changes", "expected", "found"),
    [
        ({"version": 2}, "version 1", "version 2"),
        ({"format": "other"}, '"format": "tapeline checkpoint"', "something else"),
        ({"step": -1}, "a valid step", "Input should be greater than or equal to 0"),
        ({"files": {"../x": {"bytes": 1, "xxh3_128": ""}}}, None, "'../x'"),
        ({"files": {"/etc/x": {"bytes": 1, "xxh3_128": ""}}}, None, "'/etc/x'"),
        ({"files": {"rank-0.pkl": {"bytes": 1, "xxh3_128": ""}}}, None, "'rank-0.pkl'"),
    ],
)
def test_foreign_manifests_are_refused(saved: Path, changes, expected, found):
    rewrite_manifest(saved, **changes)
    error = damage_found(saved)
    assert error.where == str(saved / MANIFEST)
    assert error.expected == (expected or "names of data files in this folder")
    assert error.found == found


def forge(folder: Path, name: str, data: bytes) -> None:
    """Replace a data file and make the manifest agree."""
    (folder / name).write_bytes(data)
    files = json.loads((folder / MANIFEST).read_text())["files"]
    files[name] = {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    rewrite_manifest(folder, files=files)


def safetensors_of(header: object, body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def header_of(**field) -> dict:
    number = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | field
    return {"__metadata__": {"tapeline_values": "{}"}, "x": number}


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "a header that is longer than the file"),
        (b"\x80\x02}q\x00.", "a header that is longer than the file"),
        (b"\x09" + bytes(7) + b"{", "a header that is longer than the file"),
        (b"\x01" + bytes(7) + b"{", "Expecting property name"),
        (safetensors_of([]), "another header (TypeError"),
        (safetensors_of({}), "another header (KeyError: '__metadata__')"),
        (safetensors_of({"__metadata__": {"tapeline_values": "3"}}), "no values in the header"),
        (safetensors_of({"__metadata__": {"tapeline_values": "{}"}}), "parts []"),
        (safetensors_of(header_of()), "a tensor of shape [1] at bytes 0 to 4 of 0"),
        (safetensors_of(header_of(shape=[2]), bytes(4)), "a tensor of shape [2] at bytes 0 to 4"),
        (safetensors_of(header_of(data_offsets=[-4, 0]), bytes(4)), "at bytes -4 to 0 of 4"),
        (safetensors_of(header_of(data_offsets=[4, 0]), bytes(4)), "at bytes 4 to 0 of 4"),
        (safetensors_of(header_of(shape=[-1]), bytes(4)), "a tensor of shape [-1]"),
        (
            safetensors_of(header_of(shape="x"), bytes(4)),
            "a tensor of shape x at bytes 0 to 4 of 4",
        ),
        (safetensors_of(header_of(dtype="PKL"), bytes(4)), "another header (KeyError: 'PKL')"),
        (safetensors_of(header_of(more=1), bytes(4)), "another header (TypeError"),
    ],
)
def test_files_that_only_hash_right_are_refused(saved: Path, data: bytes, found: str):
    forge(saved, "rank-0.safetensors", data)
    with pytest.raises(CheckpointError, match="expected the content that tapeline writes") as error:
        load_state(saved)
    assert found in error.value.found


def test_a_second_data_file_is_refused(saved: Path):
    forge(saved, "rank-1.safetensors", safetensors_of({}))
    with pytest.raises(CheckpointError, match="found 2 data files"):
        load_state(saved)


def test_a_step_that_disagrees_with_the_manifest_is_refused(saved: Path):
    rewrite_manifest(saved, step=3)
    with pytest.raises(CheckpointError, match="found step 2 beside 3 in the manifest"):
        load_state(saved)


def test_metadata_of_another_run_is_refused_with_both_sides(tmp_path: Path):
    state = Run(seed=1).capture()
    folder = save_state(tmp_path / "c", state, metadata={"data_fingerprint": "aa", "run": "one"})
    assert state_sha256(load_state(folder, expect={"data_fingerprint": "aa"})) == state_sha256(
        state
    )
    with pytest.raises(CheckpointError) as error:
        load_state(folder, expect={"run": "one", "data_fingerprint": "bb"})
    assert str(error.value) == (
        f"{folder}, data_fingerprint: expected 'bb', found 'aa'. "
        "Resume what this checkpoint was made with, or start a run in another folder."
    )
    with pytest.raises(CheckpointError, match="found none recorded"):
        load_state(folder, expect={"config_hash": "x"})


def test_saving_again_replaces_and_leaves_nothing_behind(tmp_path: Path):
    for steps in (1, 2, 3):
        state = Run(seed=1).train(steps).capture()
        folder = save_state(tmp_path / "c", state)
        assert state_sha256(load_state(folder)) == state_sha256(state)
        assert {f.name for f in files_of(tmp_path)} == {MANIFEST, *read_manifest(folder).files}


def test_a_folder_with_other_files_is_not_touched(tmp_path: Path):
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError) as error:
        save_state(tmp_path, Run(seed=1).capture())
    assert str(error.value) == (
        f"{tmp_path}: expected a new folder, an empty one, or one that holds a checkpoint, "
        "found a folder with other files. Choose another path."
    )
    assert {f.name: f.read_text() for f in files_of(tmp_path)} == {
        "manifest.json": "{}",
        "notes.txt": "mine",
    }
    with pytest.raises(CheckpointError, match="found a file"):
        save_state(tmp_path / "notes.txt", Run(seed=1).capture())


def test_notes_beside_a_checkpoint_stay(saved: Path):
    (saved / "notes.txt").write_text("mine")
    save_state(saved, Run(seed=1).capture())
    assert (saved / "notes.txt").read_text() == "mine"


def die() -> None:
    os._exit(DIED)


def full_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


FAULTS = pytest.mark.parametrize(
    ("fault", "outcomes"),
    [(die, {DIED, UNREACHED}), (full_disk, {REFUSED, SURVIVED, UNREACHED})],
    ids=["die", "full_disk"],
)


@FAULTS
@pytest.mark.parametrize("first", [True, False], ids=["first", "again"])
def test_a_fault_at_any_operation_leaves_the_old_or_the_new(
    tmp_path: Path, fault, outcomes: set[int], first: bool
):
    old, new = (Run(seed=1).train(n).capture() for n in (1, 2))
    outcome, found, at_operation = None, set(), 0
    while outcome != UNREACHED:
        folder = tmp_path / str(at_operation) / "c"
        folder.parent.mkdir()
        if not first:
            save_state(folder, old)
        outcome = in_child(lambda f=folder: save_state(f, new), at_operation, fault)
        assert outcome in outcomes
        left = state_sha256(load_state(folder)) if not first or folder.exists() else None
        found.add(left)
        if outcome in (SURVIVED, UNREACHED):
            assert left == state_sha256(new)
        save_state(folder, new)  # and the next save cleans up
        assert {f.name for f in files_of(folder.parent)} == {MANIFEST, *verify(folder).files}
        assert state_sha256(load_state(folder)) == state_sha256(new)
        at_operation += 1
    assert at_operation > 8
    assert found == {None if first else state_sha256(old), state_sha256(new)}


@pytest.mark.parametrize("first", [True, False], ids=["first", "again"])
def test_a_full_disk_is_told_and_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
):
    folder, run = tmp_path / "c", Run(seed=1).train(1)
    if not first:
        save_checkpoint(folder, run.model, run.optimizer, run.sampler, 1)
    before = {file: file.read_bytes() for file in files_of(tmp_path)}
    monkeypatch.setattr(os, "fsync", lambda _: full_disk())
    with pytest.raises(CheckpointError) as error:
        save_checkpoint(folder, run.model, run.optimizer, run.sampler, 2)
    assert str(error.value) == (
        f"{folder}: expected room and permission to write a checkpoint, found No space left on "
        "device. Make room or choose another folder; earlier checkpoints are as they were."
    )
    assert {file: file.read_bytes() for file in files_of(tmp_path)} == before
    if not first:
        assert load_checkpoint(folder, run.model, run.optimizer, run.sampler) == 1


@FAULTS
@pytest.mark.parametrize("threshold", [0, 1_000_000], ids=["background", "in the loop"])
def test_a_fault_at_any_operation_of_a_checkpointer(
    tmp_path: Path, fault, outcomes: set[int], threshold: int
):
    states = {n: Run(seed=1).train(n).capture() for n in (1, 2, 3)}
    outcome, found, at_operation = None, set(), 0
    while outcome != UNREACHED:
        folder = tmp_path / str(at_operation)
        with Checkpointer(folder, keep=2) as checkpoints:
            for n in (1, 2):
                checkpoints.save(states[n])

        def save(folder=folder) -> None:
            with Checkpointer(folder, keep=2, background_from_bytes=threshold) as checkpoints:
                checkpoints.save(states[3])

        outcome = in_child(save, at_operation, fault)
        assert outcome in outcomes
        loaded = Checkpointer(folder).load()
        found.add(loaded.state.step)
        assert loaded.skipped == ()
        for path in folder.glob("step-*"):
            verify(path)  # a deletion that was cut short doesn't look like a damaged checkpoint
        assert state_sha256(loaded.state) == state_sha256(states[loaded.state.step])
        with Checkpointer(folder, keep=2) as checkpoints:
            checkpoints.save(states[3])
        assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000003"]
        at_operation += 1
    assert at_operation > 11
    assert found == {2, 3}


def test_a_write_that_the_kernel_cuts_short_is_told(tmp_path: Path):
    old, new = (Run(seed=1).train(n).capture() for n in (1, 2))
    folder = save_state(tmp_path / "c", old)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="found File too large"):
            save_state(folder, new)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert state_sha256(load_state(folder)) == state_sha256(old)
    assert {f.name for f in files_of(folder)} == {MANIFEST, *read_manifest(folder).files}


def saves_for_ever(root: Path) -> None:
    run = Run(seed=1)
    checkpoints = Checkpointer(root / "run", keep=2)
    if checkpoints.newest().path:
        run.restore(checkpoints.load().state)
    while True:
        run.train(1 if run.num_steps < 90 else 0)  # the schedule ends at 100
        save_state(root / "same", run.capture())
        checkpoints.save(run.capture())


def test_killed_at_random_moments_of_a_save_loop(tmp_path: Path):
    generator = random.Random(3)
    for _ in range(10):
        child = os.fork()
        if not child:
            try:
                saves_for_ever(tmp_path)
            finally:
                os._exit(1)
        time.sleep(generator.uniform(0.05, 0.3))
        while not any(tmp_path.glob("run/step-*/manifest.json")):
            time.sleep(0.01)
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        loaded = Checkpointer(tmp_path / "run").load()
        assert loaded.skipped == ()
        same = load_state(tmp_path / "same")
        assert same.step - loaded.state.step in (0, 1)
        straight = Run(seed=1).train(loaded.state.step)
        assert state_sha256(loaded.state) == state_sha256(straight.capture())
    assert loaded.state.step > 4
