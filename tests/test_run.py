"""A run: started, killed at any moment, resumed to the same bits; refused where it is another."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers_ranks import FORKS

from tapeline.checkpoint import load_state, part_sha256
from tapeline.clock import FakeClock
from tapeline.config import RunConfig
from tapeline.errors import CheckpointError, ConfigError, RunError, StoreError, TrainingError
from tapeline.run import resume, start
from tapeline.runs import RunFolder
from tapeline.store import Shards, append_shards, write_shards
from tapeline.tape import synthetic_sessions
from tapeline.training.determinism import determinism_record

MODEL = '''
import torch

def noisy(num_inputs):
    """Dropout draws, batch normalisation has buffers: both must survive a kill."""
    return torch.nn.Sequential(
        torch.nn.Linear(num_inputs, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(16, 1),
    )

def not_a_module(num_inputs):
    return 3

def raises(num_inputs):
    raise KeyError("weights")

def two_outputs(num_inputs):
    return torch.nn.Linear(num_inputs, 2)

def fails_forward(num_inputs):
    return torch.nn.Linear(num_inputs + 1, 1)

def no_parameters(num_inputs):
    return torch.nn.Identity()
'''


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_shards(synthetic_sessions(3, rows=300), folder / "store", "mmap")
    (folder / "noisy_model.py").write_text(MODEL)
    (folder / "broken_syntax.py").write_text("def net(:")
    yield folder
    sys.path.remove(str(folder))


def config_of(workplace: Path, *overrides: str) -> RunConfig:
    values = {
        "data": {"store": str(workplace / "store")},
        "model": {"factory": "noisy_model:noisy", "folder": str(workplace)},
        "training": {
            "steps": 60,
            "batch": 32,
            "optimizer": "adamw",
            "schedule": "cosine",
            "warmup_steps": 5,
            "clip_norm": 1.0,
            "accumulate": 2,
        },
        "validation": {"every": 25},
        "checkpoint": {"every": 7, "keep": 2},
        "log_every": 5,
    }
    return RunConfig.from_mapping(values, "test", overrides)


@pytest.fixture(scope="module")
def whole(workplace):
    """The uninterrupted run that every other one must equal."""
    return start(config_of(workplace), workplace / "whole")


def test_a_run_writes_its_folder(workplace, whole):
    folder = RunFolder(workplace / "whole", FakeClock())
    record = folder.record()
    assert record["config_hash"] == config_of(workplace).hash()
    assert record["data"]["sessions"] == 3
    assert record["data"]["rows"] == 900
    assert record["machine"]["versions"]["torch"]
    (life,) = folder.attempts()
    assert life["how"] == "finished"
    assert (life["from_step"], life["step"]) == (0, 60)
    assert list(folder.losses()) == list(range(1, 61))
    assert list(folder.validations()) == [25, 50, 60]
    assert sorted(path.name for path in folder.checkpoints_path.iterdir()) == [
        "step-00000056",
        "step-00000060",
    ]
    assert whole.steps == 60
    assert whole.losses == list(folder.losses().values())
    assert whole.validation == folder.validations()[60]


def test_the_same_configuration_gives_the_same_bits(workplace, whole):
    again = start(config_of(workplace, "name='again'", "log_every=60"), workplace / "again")
    assert again.part_sha256 == whole.part_sha256
    assert again.losses == whole.losses


@pytest.mark.parametrize("steps", [14, 15, 16])
def test_no_profile_outlives_a_life(workplace, steps):
    """A life may end within the step that is profiled; torch crashed as the process exited."""
    config = config_of(workplace, f"training.steps={steps}")
    start(config, workplace / f"profiled-{steps}")
    assert not torch.autograd._profiler_enabled()


def test_another_seed_gives_other_bits(workplace, whole):
    other = start(config_of(workplace, "seed=1"), workplace / "other-seed")
    assert other.state_sha256 != whole.state_sha256


def test_an_augmented_run_resumes_to_the_same_bits(workplace, whole):
    """Draws are keyed by position: what a run is varied by doesn't depend on its lives."""
    augment = "data.augment=[{name='noise', arguments={std=0.1}}, {name='column_dropout', "
    augment += "arguments={share=0.1}}]"
    plain = start(config_of(workplace, augment), workplace / "augmented")
    assert plain.state_sha256 != whole.state_sha256
    run = killed_at(workplace, "augmented-killed", 30, augment)
    assert resume(run).part_sha256 == plain.part_sha256


@pytest.mark.parametrize("lanes", [1, 8])
def test_a_run_in_float16_resumes_with_its_loss_scale(workplace, whole, lanes):
    settings = ("training.precision=float16", "training.accumulate=1", f"training.lanes={lanes}")
    plain = start(config_of(workplace, *settings), workplace / f"float16-{lanes}")
    assert plain.state_sha256 != whole.state_sha256
    saved = load_state(plain.folder / "checkpoints" / "step-00000060").values["extra"]
    assert saved["loss_scaler"]["scale"] < 2**16  # steps were left out
    run = killed_at(workplace, f"float16-killed-{lanes}", 30, *settings)
    assert resume(run).part_sha256 == plain.part_sha256


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_fused_optimizer_resumes_to_the_same_bits(workplace, whole, optimizer):
    settings = (f"training.optimizer={optimizer}", "training.fused=true", "training.accumulate=1")
    settings += ("training.lanes=8", "training.precision=float16")
    plain = start(config_of(workplace, *settings), workplace / f"fused-{optimizer}")
    assert plain.state_sha256 != whole.state_sha256
    run = killed_at(workplace, f"fused-killed-{optimizer}", 30, *settings)
    assert resume(run).part_sha256 == plain.part_sha256


def test_validating_and_saving_differently_changes_no_bit(workplace, whole):
    other = start(
        config_of(workplace, "validation.every=1", "checkpoint.every=60"), workplace / "often"
    )
    assert other.state_sha256 == whole.state_sha256


def live(values, run, begun):
    """What a process does that trains `run` from where it stands, on a slow disk."""
    fsync = os.fsync

    def slow_fsync(descriptor):  # a save takes long enough to be met in the middle
        time.sleep(0.004)
        fsync(descriptor)

    os.fsync = slow_fsync
    config = RunConfig.from_mapping(values, "test")
    begun.set()
    resume(run) if (run / "run.json").exists() else start(config, run)


def begin_life(workplace, run):
    """A process that has begun to train `run`."""
    begun = FORKS.Event()
    values = config_of(workplace).model_dump(mode="json")
    process = FORKS.Process(target=live, args=(values, run, begun))
    process.start()
    assert begun.wait(60)
    return process


def saving(run: Path) -> bool:
    """Whether an unfinished checkpoint lies in the run."""
    return any(run.glob("checkpoints/.aside-*"))


def test_twenty_kills_at_random_moments_end_in_the_same_bits(workplace, whole):
    """Real processes, real SIGKILLs: every other one inside a save, the rest anywhere."""
    moments = random.Random(20)
    run = workplace / "killed"
    kills = inside_a_save = 0
    while kills < 20:
        life = begin_life(workplace, run)
        if kills % 2:
            time.sleep(moments.uniform(0.0, 0.2))
            deadline = time.monotonic() + 30
            while life.is_alive() and not saving(run) and time.monotonic() < deadline:
                time.sleep(0.0005)
        else:
            time.sleep(moments.uniform(0.0, 0.6))
        life.kill()
        life.join()
        if life.exitcode == -signal.SIGKILL:
            kills += 1
            inside_a_save += saving(run)
        else:  # it came to its end before: that must be the right one, and another run begins
            assert _state(run) == whole.part_sha256
            run.rename(workplace / f"finished-before-kill-{kills}")
    result = resume(run) if (run / "run.json").exists() else start(config_of(workplace), run)
    assert result.part_sha256 == whole.part_sha256
    assert result.losses == whole.losses
    assert inside_a_save >= 5
    ends = [life["how"] for life in RunFolder(run, FakeClock()).attempts()]
    assert ends.count("killed") == len(ends) - 1
    assert ends[-1] == "finished"


def _state(run: Path):
    newest = max((run / "checkpoints").iterdir())
    return part_sha256(load_state(newest))


def test_resuming_a_finished_run_does_nothing(workplace, whole):
    again = resume(workplace / "whole")
    assert again.from_step == 60
    assert again.state_sha256 == whole.state_sha256
    assert again.losses == whole.losses


def killed_at(workplace: Path, name: str, step: int, *overrides: str) -> Path:
    """A run whose newest checkpoint is of `step`, as a kill leaves it."""
    run = workplace / name

    class Stop(BaseException):
        pass

    def stop(done: int, _: int) -> None:
        if done == step:
            raise Stop

    with pytest.raises(Stop):
        start(config_of(workplace, *overrides), run, progress=stop)
    return run


def test_resume_after_a_failure_says_how_the_life_before_ended(workplace, whole):
    run = killed_at(workplace, "stopped", 30)
    result = resume(run)
    assert result.from_step == 28
    assert result.part_sha256 == whole.part_sha256
    first, second = RunFolder(run, FakeClock()).attempts()
    assert (first["how"], first["step"], first["evidence"]) == ("failed", 30, "Stop: ")
    assert (second["how"], second["from_step"]) == ("finished", 28)


def test_a_damaged_newest_checkpoint_is_passed_over_aloud(workplace, whole):
    run = killed_at(workplace, "damaged", 30)
    file = run / "checkpoints" / "step-00000028" / "rank-0.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    result = resume(run)
    assert result.from_step == 21
    (skipped,) = result.skipped
    assert skipped.path == file.parent
    assert "rank-0.safetensors" in skipped.reason
    assert result.part_sha256 == whole.part_sha256


def test_no_usable_checkpoint_is_an_error_and_nothing_is_begun(workplace):
    run = killed_at(workplace, "hopeless", 10)
    (run / "checkpoints" / "step-00000007" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="expected a checkpoint that verifies"):
        resume(run)
    assert len(RunFolder(run, FakeClock()).attempts()) == 1


def test_a_store_may_be_moved_and_converted_between_two_lives(workplace, whole, tmp_path):
    run = killed_at(workplace, "moved", 30)
    write_shards(synthetic_sessions(3, rows=300), tmp_path / "elsewhere", "npy")
    result = resume(run, [f"data.store={tmp_path / 'elsewhere'}"])
    assert result.part_sha256 == whole.part_sha256


def test_changed_bytes_are_noticed_before_a_resume(workplace, tmp_path):
    write_shards(synthetic_sessions(3, rows=300), tmp_path / "store", "mmap")
    moved = f"data.store={tmp_path / 'store'}"
    run = killed_at(workplace, "changed-bytes", 10, moved)
    values = tmp_path / "store" / "mmap" / "values.f32"
    content = bytearray(values.read_bytes())
    content[1000] ^= 1
    values.write_bytes(content)
    with pytest.raises(RunError, match="expected the bytes that the run was started on, found"):
        resume(run)
    assert resume(run, ["data.verify=false"]).steps == 60


def test_a_changed_record_is_noticed(workplace):
    run = killed_at(workplace, "changed-record", 10)
    record = json.loads((run / "run.json").read_text())
    record["data"]["normaliser"]["mean"][0] += 1.0
    (run / "run.json").write_text(json.dumps(record))
    with pytest.raises(RunError, match="expected the record as it was written, by its hash"):
        resume(run)


def test_a_run_is_trained_by_one_process_at_a_time(workplace):
    run = killed_at(workplace, "twice", 10)
    with RunFolder(run, FakeClock()).locked(), pytest.raises(RunError) as caught:
        resume(run)
    assert str(caught.value) == (
        f"{run}: expected a run that no other process trains, found one that is being trained "
        "now. Wait until that process ends, or stop it."
    )
    assert len(RunFolder(run, FakeClock()).attempts()) == 1
    assert resume(run).steps == 60


def test_a_finished_run_that_lost_its_metrics_is_still_finished(workplace):
    run = workplace / "without-metrics"
    start(config_of(workplace), run)
    (run / "metrics" / "rank-0.jsonl").unlink()
    assert resume(run).as_dict()["loss_last_50"] is None


def test_other_data_is_refused(workplace, tmp_path):
    run = killed_at(workplace, "other-data", 10)
    write_shards(synthetic_sessions(3, seed=1, rows=300), tmp_path / "other", "mmap")
    with pytest.raises(RunError, match="expected the data of the run, fingerprint") as caught:
        resume(run, [f"data.store={tmp_path / 'other'}"])
    assert caught.value.fix == "Resume with the data it was started on, or start another run"


def test_sessions_that_are_appended_later_change_nothing(workplace, whole, tmp_path):
    store = tmp_path / "store"
    write_shards(synthetic_sessions(3, rows=300), store, "mmap")
    run = killed_at(workplace, "appended", 20, f"data.store={store}")
    assert append_shards(synthetic_sessions(5, rows=300), store, "mmap") == 2
    assert len(Shards(store)) == 5
    result = resume(run)
    assert result.part_sha256 == whole.part_sha256
    assert result.validation == whole.validation
    write_shards(synthetic_sessions(2, rows=300), tmp_path / "fewer", "mmap")
    said = "expected the 3 sessions that the run was started on, found none of "
    with pytest.raises(RunError, match=said):
        resume(run, [f"data.store={tmp_path / 'fewer'}"])


def test_a_change_of_platform_between_two_lives_is_told_and_stays_recorded(
    workplace, whole, monkeypatch
):
    assert whole.contract.startswith("bit-exact at this world size, 1 rank, ")
    run = killed_at(workplace, "other-platform", 20)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "ANOTHER")
    assert determinism_record()["cpu_capability"] == "ANOTHER"

    class Stop(BaseException):
        pass

    def stop(done: int, _: int) -> None:
        if done == 40:
            raise Stop

    with pytest.warns(RuntimeWarning, match="no longer keeps its contract"), pytest.raises(Stop):
        resume(run, progress=stop)
    monkeypatch.undo()
    with pytest.warns(RuntimeWarning, match="no longer keeps its contract"):
        result = resume(run)  # on the first platform again, with what the other has computed
    assert result.contract.startswith("statistical from step 14 on: cpu_capability ")
    assert result.contract.endswith(" → ANOTHER")
    assert RunFolder(run, FakeClock()).record()["contract"]["text"] == whole.contract


def test_an_override_that_would_make_it_another_run_is_refused(workplace):
    run = killed_at(workplace, "overridden", 10)
    for override in ("training.learning_rate=0.5", "training.threads=2", "training.batch=64"):
        with pytest.raises(RunError) as caught:
            resume(run, [override])
        assert str(caught.value) == (
            f"{run}: expected settings that leave the run's computation alone, found "
            f"{override}. Start another run with them, using `tapeline train`."
        )
    assert resume(run, ["checkpoint.keep=5"]).steps == 60


def test_a_place_that_is_taken_is_refused(workplace, whole):
    with pytest.raises(RunError) as caught:
        start(config_of(workplace), workplace / "whole")
    assert str(caught.value) == (
        f"{workplace / 'whole'}: expected a place for a new run, found files already there. "
        f"Resume it with `tapeline resume {workplace / 'whole'}`, or choose another folder."
    )


def test_resuming_what_is_no_run(tmp_path):
    with pytest.raises(RunError) as caught:
        resume(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: expected the folder of a run, with run.json, found No such file or "
        "directory. Give the folder that `tapeline train` made."
    )
    (tmp_path / "run.json").write_text('{"format": "something else"}')
    with pytest.raises(RunError, match="expected the record of a run, version 1"):
        resume(tmp_path)


@pytest.mark.parametrize(
    ("override", "kind", "message"),
    [
        ("data.target=mud", StoreError, "found `mud`"),
        ("data.store=nowhere", StoreError, "found no store"),
        ("windows.length=400", None, "expected a session with at least 410 valid rows"),
        ("model.factory=noisy_model:nothing", ConfigError, "found none named nothing"),
        ("model.factory=no_such_module:net", ConfigError, "No module named 'no_such_module'"),
        ("model.factory=noisy_model:not_a_module", ConfigError, "expected a callable that returns"),
        ("model.arguments={depth=3}", ConfigError, "unexpected keyword argument 'depth'"),
        ("data.augment=[{name='blur'}]", None, "expected noise, scaling, column_dropout, or an"),
        ("data.augment=[{name='noise'}]", None, "expected arguments std, found"),
        ("model.factory=noisy_model:raises", ConfigError, "KeyError at "),
        ("model.factory=noisy_model:two_outputs", TrainingError, "found shape [2, 2]"),
        ("model.factory=noisy_model:fails_forward", ConfigError, "RuntimeError at "),
        ("model.factory=noisy_model:no_parameters", TrainingError, "parameters to train"),
        ("model.factory=broken_syntax:net", ConfigError, "SyntaxError"),
        ("training.device=gpu", ConfigError, "expected a device that this torch can compute on"),
        ("training.device=meta", ConfigError, "expected a device that this torch can compute on"),
        ("training.threads=100000", ConfigError, "key `training.threads`"),
        ("training.learning_rate=1e38", ConfigError, "key `training.learning_rate`"),
        ("validation.fraction=0.99", None, "split, train: expected at least one window"),
        ("training.accumulate=5", ConfigError, "expected accumulate to divide batch"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    workplace, tmp_path, override, kind, message
):
    with pytest.raises(kind or ValueError) as caught:
        start(config_of(workplace, override), tmp_path / "run")
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(workplace):
    with pytest.raises(TrainingError, match=r"expected a finite loss, found (nan|inf)"):
        start(
            config_of(
                workplace,
                "training.optimizer='sgd'",
                "training.learning_rate=1e30",
                "training.schedule='constant'",
                "training.clip_norm=1e30",
                "checkpoint.every=1",
            ),
            workplace / "diverged",
        )
    (life,) = RunFolder(workplace / "diverged", FakeClock()).attempts()
    assert life["how"] == "failed"
    assert "finite loss" in life["evidence"]


def test_metrics_survive_a_torn_last_line(workplace, whole):
    run = killed_at(workplace, "torn", 30)
    journal = run / "metrics" / "rank-0.jsonl"
    with journal.open("ab") as stream:
        stream.write(b'{"attempt":1,"step":30,"los')
    result = resume(run)
    assert result.losses == whole.losses
    assert all(json.loads(line) for line in journal.read_text().splitlines())
