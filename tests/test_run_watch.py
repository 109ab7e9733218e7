"""What a run writes down of itself, and what becomes of what its watchers find."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest

from tapeline.attempt import Data, Parts
from tapeline.attempt.course import Course, PassedOver
from tapeline.checkpoint import Shelf
from tapeline.clock import SystemClock
from tapeline.config import RunConfig, WatchConfig
from tapeline.errors import TrainingError
from tapeline.files import read_journal
from tapeline.ledger import account_of, read_heartbeat
from tapeline.run import RunResult, resume, start
from tapeline.runs import RunFolder, read_metrics
from tapeline.signals import WATCHERS
from tapeline.store import write_shards
from tapeline.tape import synthetic_sessions
from tapeline.windows import Loader, Shuffled, WindowIndex
from tapeline.world import World

MODEL = '''
import torch

class Burst(torch.nn.Module):
    """Batches whose first window begins with one of some values spoil what they teach."""

    def __init__(self, factor, marks):
        super().__init__()
        self.factor, self.marks = factor, set(marks)

    def forward(self, x):
        mark = round(float(x[0, 0]), 4)
        return x * self.factor if self.training and mark in self.marks else x

def spoilt(num_inputs, factor=1.0, marks=(), dropout=0.2):
    return torch.nn.Sequential(
        Burst(factor, marks),
        torch.nn.Linear(num_inputs, 8),
        torch.nn.ReLU(),
        torch.nn.Dropout(dropout),
        torch.nn.Linear(8, 1),
    )
'''
STEPS, BATCH = 90, 16
BAD = (52, 53)  # steps whose batches are spoilt


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watched")
    write_shards(synthetic_sessions(2, rows=400), folder / "store", "mmap")
    (folder / "spoilt_model.py").write_text(MODEL)
    yield folder
    sys.path.remove(str(folder))


def config_of(workplace: Path, *overrides: str) -> RunConfig:
    values = {
        "data": {"store": str(workplace / "store")},
        "windows": {"length": 4, "horizon": 3},
        "model": {"factory": "spoilt_model:spoilt", "folder": str(workplace)},
        "training": {"steps": STEPS, "batch": BATCH, "optimizer": "sgd", "clip_norm": 1.0},
        "validation": {"every": 1000},
        "checkpoint": {"every": 20, "keep": 9},
        "log_every": 5,
    }
    return RunConfig.from_mapping(values, "test", overrides)


@pytest.fixture(scope="module")
def marks(workplace) -> list[float]:
    """The first number of the batch of each step, by which a model knows it again."""
    data = Data.open(config_of(workplace), normaliser=None)
    batches = iter(data.loader(World(), "cpu"))
    return [round(float(next(batches)[0][0, 0]), 4) for _ in range(STEPS + 10)]


def spoilt(workplace: Path, marks: list[float], factor: float, *overrides: str) -> RunConfig:
    chosen = [marks[step - 1] for step in BAD]
    assert sum(mark in chosen for mark in marks) == len(BAD), "marks that stand for one batch each"
    arguments = f"model.arguments={{factor={factor},marks={chosen}}}"
    return config_of(workplace, arguments, *overrides)


def lives(run: Path) -> list[tuple[str, int]]:
    return [(life["how"], life["from_step"]) for life in RunFolder(run, SystemClock()).attempts()]


def test_a_run_writes_down_its_time_its_machine_and_what_it_learnt(workplace):
    result = start(config_of(workplace), workplace / "plain")
    account = account_of(result.folder)
    assert account.job.kept_steps == STEPS
    for phase in ("startup", "data", "compute", "checkpoint", "evaluation", "other"):
        assert account.job.phases_ns[phase] > 0, phase
    beat = read_heartbeat(result.folder / "heartbeat" / "rank-0")
    assert beat is not None
    assert (beat.attempt, beat.step) == (1, STEPS)
    metrics = read_metrics(result.folder / "metrics" / "rank-0.jsonl")
    for name in ("loss", "grad_norm", "step_s"):  # clipping finds each step's norm
        assert metrics.snapshot[name].steps.tolist() == list(range(1, STEPS + 1)), name
    assert metrics.snapshot["learning_rate"].steps.tolist() == list(range(5, STEPS + 1, 5))
    for name in ("samples_per_s", "rss_bytes", "utilisation", "batch_s"):
        assert metrics.snapshot[name].steps[-1] == STEPS, name
    assert "collective_wait_s" not in metrics.snapshot.series
    assert metrics.profile
    assert 0 < metrics.profile["busy"] <= 1
    assert not (result.folder / "errors").exists()


def test_without_clipping_the_norm_is_that_of_each_readings_last_step(workplace):
    config = config_of(workplace, "training.lanes=2", "training.clip_norm=1e9")
    clipped = read_metrics(start(config, workplace / "wide").folder / "metrics" / "rank-0.jsonl")
    free = config_of(workplace, "training.lanes=2").model_copy(deep=True)
    free = free.model_copy(
        update={"training": free.training.model_copy(update={"clip_norm": None})}
    )
    plain = read_metrics(start(free, workplace / "free").folder / "metrics" / "rank-0.jsonl")
    norms, all_norms = plain.snapshot["grad_norm"], clipped.snapshot["grad_norm"]
    assert norms.steps.tolist() == list(range(5, STEPS + 1, 5))
    assert norms.values == pytest.approx(all_norms.values[4::5], rel=1e-5)


def test_the_learning_rate_and_the_norm_are_those_of_the_step(workplace):
    schedule = ("training.schedule=cosine", "training.warmup_steps=10", "training.clip_norm=1e-3")
    run = start(config_of(workplace, *schedule), workplace / "scheduled").folder
    metrics = read_metrics(run / "metrics" / "rank-0.jsonl").snapshot
    series = metrics["learning_rate"]
    rates = dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))
    assert rates[5] == pytest.approx(0.5e-3)
    assert rates[10] == pytest.approx(1e-3)
    assert rates[50] == pytest.approx(0.5e-3 * (1 + math.cos(math.pi * 39 / 80)))
    assert metrics["grad_norm"].values.min() > 1e-3, "the norm is taken before clipping"
    assert not (run / "findings.jsonl").exists(), "on its schedule"


def test_a_life_that_raises_leaves_its_exception_and_its_last_losses(workplace, marks):
    run = workplace / "raised"
    with pytest.raises(TrainingError, match="step 52: expected a finite loss, found inf"):
        start(spoilt(workplace, marks, 1e30), run)
    first, *rest = (run / "errors" / "rank-0.txt").read_text().splitlines()
    told = json.loads(first)
    assert told["exception"].startswith("TrainingError: step 52: expected a finite loss")
    assert (told["attempt"], told["step"]) == (1, 55)
    assert rest[0].startswith("Traceback")
    assert lives(run) == [("failed", 0)]
    metrics = read_metrics(run / "metrics" / "rank-0.jsonl").snapshot
    assert metrics["loss"].steps[-1] == 55
    assert not math.isfinite(metrics["loss"].values[51])
    assert [one["watcher"] for one in read_journal(run / "findings.jsonl")] == ["non_finite"]


def test_findings_are_logged_and_change_nothing(workplace, marks):
    run = start(spoilt(workplace, marks, 1e3), workplace / "logged").folder
    # At most one look a second: what a short run showed is looked at when it ends.
    found = {one["watcher"]: one for one in read_journal(run / "findings.jsonl")}
    assert found["loss_spike"]["step"] == BAD[0]
    assert found["loss_spike"]["action"] == "log"
    assert lives(run) == [("finished", 0)]


def test_a_watcher_can_halt_a_run(workplace, marks):
    run = workplace / "halted"
    said = "step 52, watcher loss_spike: expected nothing that halts the run, found loss "
    with pytest.raises(TrainingError, match=said):
        start(spoilt(workplace, marks, 1e3, "watch.loss_spike=halt"), run)
    assert lives(run) == [("failed", 0)]


def without(batches: list[PassedOver], config: RunConfig, run: Path) -> RunResult:
    """The run that was told beforehand what to pass over."""
    with mock.patch("tapeline.attempt.life.read_passed_over", lambda *_: batches):
        return start(config, run)


@pytest.mark.parametrize(
    ("factor", "watcher", "last"), [(1e3, "loss_spike", BAD[1]), (1e30, "non_finite", 55)]
)
def test_a_rollback_gives_the_run_that_never_met_those_batches(
    workplace, marks, factor, watcher, last
):
    config = spoilt(workplace, marks, factor, f"watch.{watcher}=rollback", "checkpoint.every=7")
    result = start(config, workplace / f"rolled-back-{watcher}")
    run = result.folder
    assert lives(run) == [("rolled back", 0), ("finished", 49)]
    (line,) = read_journal(run / "passed_over.jsonl")
    passed_over = PassedOver(**line)
    assert passed_over.step == BAD[0]
    assert passed_over.begin == (BAD[0] - 1) * BATCH
    assert passed_over.end == last * BATCH
    assert passed_over.why.startswith(watcher)
    assert account_of(run).job.redone_steps == 55 - 49
    expected = without([passed_over], config, workplace / f"by-hand-{watcher}")
    assert result.part_sha256 == expected.part_sha256
    assert result.losses == expected.losses


@pytest.fixture(scope="module")
def rolled_back(workplace, marks) -> tuple[RunConfig, RunResult]:
    """A run that rolled back once, of a spike."""
    config = spoilt(workplace, marks, 1e3, "watch.loss_spike=rollback", "checkpoint.every=7")
    return config, start(config, workplace / "rolled-back")


@pytest.mark.parametrize("dies_at", [0, 51, 55, 60])
def test_a_run_that_was_rolled_back_and_killed_is_the_same_run(
    rolled_back, dies_at, tmp_path, monkeypatch
):
    """Killed before the next life begins, on the way to the batches, and behind them."""
    config, whole = rolled_back
    run = tmp_path / "killed"
    lives_begun = []

    class Killed(BaseException):
        pass

    def build(data, world):
        lives_begun.append(1)
        if dies_at == 0 and len(lives_begun) == 2:
            raise Killed
        return built(data, world)

    def tell(done: int, _: int) -> None:
        if len(lives_begun) == 2 and done == dies_at:
            raise Killed

    built = Parts.build
    monkeypatch.setattr(Parts, "build", staticmethod(build))
    with pytest.raises(Killed):
        start(config, run, progress=tell)
    monkeypatch.undo()
    result = resume(run)
    assert result.part_sha256 == whole.part_sha256
    assert result.losses == whole.losses
    assert len(read_journal(run / "passed_over.jsonl")) == 1


def test_what_was_passed_over_outlives_the_loss_of_its_journal(rolled_back, tmp_path):
    _, whole = rolled_back
    run = Path(shutil.copytree(whole.folder, tmp_path / "run"))
    (run / "passed_over.jsonl").unlink()
    shelf = Shelf(run / "checkpoints")
    for step in (70, 77, 84, 90):
        shutil.rmtree(shelf.path(step))
    assert resume(run).part_sha256 == whole.part_sha256
    assert resume(run).from_step == STEPS


def test_a_rollback_has_its_limits(workplace, marks, tmp_path):
    rollback = ("watch.loss_spike=rollback", "checkpoint.every=45")
    with pytest.raises(TrainingError, match=r"but that was done 1 times \(watch.rollbacks\)"):
        start(
            # Looked at after each step: each of the two batches is met by itself.
            spoilt(workplace, marks, 1e3, *rollback, "watch.rollbacks=1", "log_every=1"),
            tmp_path / "often",
        )
    assert lives(tmp_path / "often") == [("rolled back", 0), ("failed", 45)]
    late = (*rollback, "log_every=30", "checkpoint.keep=1", "checkpoint.every=58")
    with pytest.raises(
        TrainingError, match="to roll back, but the oldest checkpoint is of step 58"
    ):
        start(spoilt(workplace, marks, 1e3, *late), tmp_path / "late")


def test_a_rollback_before_the_first_checkpoint_begins_anew(workplace, marks, tmp_path):
    config = spoilt(workplace, marks, 1e3, "watch.loss_spike=rollback", "checkpoint.every=80")
    result = start(config, tmp_path / "run")
    assert lives(result.folder) == [("rolled back", 0), ("finished", 0)]


def test_a_state_that_is_about_to_be_rolled_back_is_not_saved(workplace, marks, tmp_path):
    config = spoilt(workplace, marks, 1e30, "watch.non_finite=rollback", "checkpoint.every=1")
    result = start(config, tmp_path / "run")
    assert lives(result.folder) == [("rolled back", 0), ("finished", 51)]


def test_positions_count_what_was_passed_over_before(new_store):
    store = new_store(synthetic_sessions(1, rows=200))
    loader = Loader(store, WindowIndex(store, 4, 3), Shuffled(0), 8)
    course = Course(loader, 0, [PassedOver(1, 3, 16, 32, ""), PassedOver(2, 3, 32, 40, "")])
    # Steps 1 and 2 take positions 0 and 8; step 3 comes after all that was passed over.
    assert [course.position_of(step) for step in (1, 2, 3, 4)] == [0, 8, 40, 48]
    batches = course.batches()
    for position in (8, 16, 48, 56):
        next(batches)
        assert loader.position == position
    batches.close()


def test_the_configuration_names_the_watchers_there_are():
    assert {*WatchConfig().actions()} == {*WATCHERS, "off_schedule"}
