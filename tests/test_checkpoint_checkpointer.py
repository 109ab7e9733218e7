"""The checkpoints of a run: which is newest, which stay, what is told about the others."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import threading
from pathlib import Path

import pytest
from helpers_checkpoint import Run, files_of
from hypothesis import given
from hypothesis import strategies as st

from tapeline.checkpoint import (
    Checkpointer,
    Shelf,
    State,
    read_manifest,
    state_sha256,
    verify,
)
from tapeline.checkpoint.drain import Drain
from tapeline.checkpoint.durable import DurableTier, Marker
from tapeline.checkpoint.retain import Held, Retention, to_delete
from tapeline.checkpoint.save import commit_source, save_state
from tapeline.clock import FakeClock
from tapeline.errors import CheckpointError


def state_at(step: int) -> State:
    run = Run(seed=step)
    run.num_steps = step
    return run.capture()


def save(checkpoints: Checkpointer, step: int) -> Path:
    """Save, and finish what is done behind the loop."""
    path = checkpoints.save(state_at(step))
    checkpoints.wait()
    assert path is not None
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_saves_keeps_the_last_and_loads_the_newest(tmp_path: Path):
    checkpoints = Checkpointer(tmp_path / "a" / "b", keep=2)
    for step in (5, 10, 15):
        path = save(checkpoints, step)
        assert path == checkpoints.folder / f"step-{step:08d}"
    assert names(checkpoints.folder) == ["step-00000010", "step-00000015"]
    loaded = Checkpointer(checkpoints.folder).load()
    assert (loaded.path, loaded.skipped) == (path, ())
    assert state_sha256(loaded.state) == state_sha256(state_at(15))


def test_the_highest_step_is_newest_whatever_names_and_times_say(tmp_path: Path):
    checkpoints = Checkpointer(tmp_path)
    for step in (99_999_999, 100_000_000):
        save(checkpoints, step)
    os.utime(tmp_path / "step-100000000", (0, 0))
    assert checkpoints.newest().path == tmp_path / "step-100000000"


def test_damaged_ones_are_passed_over_with_reasons(tmp_path: Path):
    checkpoints = Checkpointer(tmp_path, keep=9)
    paths = [save(checkpoints, step) for step in (1, 2, 3, 4, 5)]
    flip(paths[1] / "rank-0.safetensors")
    (paths[2] / "rank-0.safetensors").unlink()
    (paths[3] / "manifest.json").unlink()
    shutil.rmtree(paths[4])
    shutil.copytree(paths[0], paths[4])
    loaded = checkpoints.load()
    assert loaded.path == paths[0]
    assert [skipped.path for skipped in loaded.skipped] == paths[:0:-1]
    reasons = [skipped.reason for skipped in loaded.skipped]
    assert reasons[0] == (
        f"{paths[4]}: expected step 5, as the folder's name says, found step 1 in the manifest. "
        "Rename the folder to its own step."
    )
    assert "found none: the save was not finished" in reasons[1]
    assert f"{paths[2] / 'rank-0.safetensors'}: expected a file of" in reasons[2]
    assert f"{paths[1] / 'rank-0.safetensors'}: expected content with" in reasons[3]
    assert checkpoints.newest() == Checkpointer(tmp_path).newest()
    assert checkpoints.newest().skipped == loaded.skipped


def test_nothing_to_load_is_an_error(tmp_path: Path):
    checkpoints = Checkpointer(tmp_path / "run")
    assert checkpoints.newest().path is None
    with pytest.raises(CheckpointError) as error:
        checkpoints.load()
    assert str(error.value) == (
        f"{tmp_path / 'run'}: expected a checkpoint that verifies, found no checkpoint. "
        "Start the run from its beginning in another folder."
    )
    flip(save(checkpoints, 1) / "manifest.json")
    with pytest.raises(CheckpointError, match=r"found 1 that don't, the newest: .*manifest\.json"):
        checkpoints.load()


def test_the_newest_of_another_run_is_refused_not_passed_over(tmp_path: Path):
    save(Checkpointer(tmp_path, metadata={"run": "a"}), 1)
    save(Checkpointer(tmp_path, metadata={"run": "b"}), 2)
    checkpoints = Checkpointer(tmp_path)
    assert checkpoints.load(expect={"run": "b"}).state.step == 2
    with pytest.raises(CheckpointError) as error:
        checkpoints.load(expect={"run": "a"})
    assert (error.value.expected, error.value.found) == ("'a'", "'b'")
    assert error.value.where == f"{tmp_path / 'step-00000002'}, run"


def test_a_repeated_step_is_replaced(tmp_path: Path):
    checkpoints = Checkpointer(tmp_path)
    path = save(checkpoints, 1)
    run = Run(seed=7)
    run.num_steps = 1
    assert Checkpointer(tmp_path).save(run.capture()) == path
    assert state_sha256(checkpoints.load().state) == state_sha256(run.capture())
    assert {file.name for file in files_of(tmp_path)} == {"manifest.json", *verify(path).files}


@pytest.mark.parametrize("name", ["manifest.json", "rank-0.safetensors"])
def test_a_damaged_step_is_replaced_when_the_run_comes_by_again(tmp_path: Path, name: str):
    checkpoints = Checkpointer(tmp_path)
    save(checkpoints, 1)
    flip(save(checkpoints, 3) / name)
    resumed = Checkpointer(tmp_path, keep=2)
    assert resumed.load().state.step == 1
    save(resumed, 2)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    save(resumed, 3)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    assert resumed.newest().skipped == ()


def test_damaged_ones_do_not_count(tmp_path: Path):
    checkpoints = Checkpointer(tmp_path, keep=2)
    save(checkpoints, 1)
    flip(save(checkpoints, 2) / "rank-0.safetensors")
    save(Checkpointer(tmp_path, keep=2), 3)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    save(Checkpointer(tmp_path, keep=2), 4)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_a_step_behind_a_good_one_is_refused(tmp_path: Path):
    checkpoints = Checkpointer(tmp_path)
    save(checkpoints, 5)
    with pytest.raises(CheckpointError) as error:
        save(Checkpointer(tmp_path), 4)
    assert str(error.value) == (
        f"{tmp_path / 'step-00000004'}: expected a step beyond every checkpoint of the run, "
        "found step 5 here already. "
        "Resume from the newest checkpoint, or save into another folder."
    )
    assert names(tmp_path) == ["step-00000005"]


def test_nothing_is_deleted_when_the_new_one_does_not_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    checkpoints = Checkpointer(tmp_path, keep=1, background_from_bytes=0)
    save(checkpoints, 1)

    def bad_disk(path, source, about):
        manifest = commit_source(path, source, about)
        flip(path / "rank-0.safetensors")
        return manifest

    monkeypatch.setattr("tapeline.checkpoint.checkpointer.commit_source", bad_disk)
    with pytest.raises(CheckpointError, match="expected content with"):
        save(checkpoints, 2)
    assert checkpoints.load().state.step == 1


def test_leftovers_are_swept_and_other_names_are_not(tmp_path: Path):
    in_flight = ".aside-step-00000009.0123"
    for name in (".aside-step-00000007.0123", in_flight, "step-7", "notes"):
        (tmp_path / name).mkdir()
    checkpoints = Checkpointer(tmp_path)
    assert checkpoints.newest().path is None
    save(checkpoints, 8)
    assert names(tmp_path) == [in_flight, "notes", "step-00000008", "step-7"]


def test_entries_tell_what_the_manifests_say(tmp_path: Path):
    clock = FakeClock(wall_ns=1_000)
    checkpoints = Checkpointer(tmp_path, metadata={"code": {"dirty": True}}, clock=clock)
    assert checkpoints.entries() == []
    save(checkpoints, 1)
    clock.advance(500)
    path = save(checkpoints, 2)
    (save(checkpoints, 3) / "manifest.json").unlink()
    entries = checkpoints.entries()
    assert [(e.step, e.created_ns) for e in entries] == [(2, 1_500), (1, 1_000)]
    assert entries[0].path == path
    assert entries[0].num_bytes == read_manifest(path).total_bytes
    assert entries[0].metadata == {"code": {"dirty": True}}


def test_keeping_none_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError) as error:
        Checkpointer(tmp_path, keep=0)
    assert str(error.value) == "keep: expected at least 1, found 0. Keep one checkpoint or more."


steps = st.sets(st.integers(0, 30), max_size=8)


@given(steps, steps, st.integers(1, 5))
def test_retention_keeps_the_newest_verified(verified: set[int], others: set[int], keep: int):
    others -= verified
    held = [Held(step, verified=step in verified) for step in verified | others]
    deleted = to_delete(held, Retention(last=keep))
    left = verified - set(deleted)
    assert left == set(sorted(verified)[-keep:])
    assert set(deleted) - verified == {step for step in others if left and step < min(left)}


def test_the_best_and_the_tagged_stay(tmp_path: Path):
    checkpoints = Checkpointer(tmp_path, keep=Retention(last=1, best=1))
    for step, metric in ((1, 3.0), (2, 2.0), (3, None), (4, 2.5), (5, 9.0)):
        checkpoints.save(state_at(step), metadata={"metric": metric})
        if step == 1:
            Shelf(tmp_path).tag(1, "first")
    checkpoints.wait()
    kept = ["step-00000001", "step-00000002", "step-00000005"]
    assert names(tmp_path) == [*kept, "tags"]
    assert Shelf(tmp_path).tags() == {"first": 1}
    with pytest.raises(CheckpointError, match="expected a checkpoint folder, found nothing"):
        Shelf(tmp_path).tag(3, "gone")


def test_a_metric_that_is_not_finite_is_none(tmp_path: Path):
    run = Run(seed=1)
    with Checkpointer(tmp_path, keep=Retention(last=1, best=1)) as checkpoints:
        for metric in (0.5, math.nan, math.inf, -math.inf):
            checkpoints.save(run.train(1).capture(), metadata={"metric": metric})
        metrics = {entry.step: entry.metadata["metric"] for entry in checkpoints.entries()}
    assert metrics == {1: 0.5, 4: None}


@pytest.mark.parametrize("value", [math.nan, object(), {"a": {1, 2}}])
def test_metadata_that_json_cannot_hold_is_refused(tmp_path: Path, value):
    state = Run(seed=1).train(1).capture()
    with Checkpointer(tmp_path / "run") as checkpoints, pytest.raises(CheckpointError) as error:
        checkpoints.save(state, metadata={"note": value})
    assert str(error.value).startswith("metadata: expected what JSON can hold, found ")
    assert str(error.value).endswith(". Leave it out, or turn it into finite numbers and text.")
    with pytest.raises(CheckpointError, match=r"^metadata: expected what JSON can hold"):
        save_state(tmp_path / "one", state, metadata={"note": value})
    assert not files_of(tmp_path)


def test_what_was_passed_over_neither_stands_in_the_way_nor_counts(tmp_path: Path):
    for step in (5, 10, 15):
        save(Checkpointer(tmp_path), step)
    checkpoints = Checkpointer(tmp_path, keep=2)
    checkpoints.resumed_from(5)
    save(checkpoints, 7)
    assert names(tmp_path) == [f"step-{step:08d}" for step in (5, 7, 10, 15)]
    save(checkpoints, 15)
    save(checkpoints, 16)
    assert names(tmp_path) == ["step-00000015", "step-00000016"]
    with pytest.raises(CheckpointError, match="found step 16 here already"):
        save(checkpoints, 12)


def test_what_waits_for_the_drain_is_not_deleted(tmp_path: Path):
    copying, go_on = threading.Event(), threading.Event()

    class SlowTier(DurableTier):
        def copy(self, folder: Path) -> Marker:
            copying.set()
            assert go_on.wait(30)
            return super().copy(folder)

    tier = SlowTier(tmp_path / "far")
    with contextlib.closing(Drain(tier, lambda *_: None)) as drain:
        checkpoints = Checkpointer(tmp_path / "near", keep=1, drain=drain)
        checkpoints.save(state_at(1), durable=True)
        assert copying.wait(30)
        save(checkpoints, 2)
        assert names(tmp_path / "near") == ["step-00000001", "step-00000002"]
        go_on.set()
    assert tier.steps() == [1]
    save(checkpoints, 3)
    assert names(tmp_path / "near") == ["step-00000003"]
