"""Whole runs with several horizons and with classes: the same bits, and what is said of them."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from helpers_ranks import Command

from tapeline.checkpoint import Shelf
from tapeline.clock import FakeClock
from tapeline.config import RunConfig
from tapeline.errors import ConfigError, TrainingError
from tapeline.report.baselines import about_last_moves, against_baselines, in_words
from tapeline.run import start
from tapeline.runs import RunFolder
from tapeline.store import write_shards
from tapeline.tape import synthetic_sessions

MODEL = '''
import time
import torch

class Slow(torch.nn.Module):
    """A step takes long enough to be met in the middle of a run."""

    def forward(self, x):
        time.sleep(0.002)
        return x

def noisy(num_inputs, num_outputs):
    return torch.nn.Sequential(
        Slow(),
        torch.nn.Linear(num_inputs, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(8, num_outputs),
    )

def one_output(num_inputs):
    return torch.nn.Linear(num_inputs, 1)
'''
CONFIG = """
[data]
store = "store"
[windows]
length = 6
horizon = [3, 8]
[model]
factory = "targets_model:noisy"
[training]
objective = "direction"
dead_zone = 0.004
steps = 28
batch = 32
lanes = 2
[validation]
every = 14
fraction = 0.4
[checkpoint]
every = 7
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("targets")
    write_shards(synthetic_sessions(2, rows=500), folder / "store", "mmap")
    (folder / "targets_model.py").write_text(MODEL)
    (folder / "run.toml").write_text(CONFIG)
    return folder


def command(workplace: Path, world_size: int, run: Path, *argv: object) -> Command:
    argv = argv or ("train", workplace / "run.toml", "--out", run)
    return Command(world_size, *argv, "--json", folder=workplace)


def result_of(run: Path, printed: dict) -> dict:
    """Everything that must be equal, whatever the ranks did."""
    folder = RunFolder(run, FakeClock())
    validations = folder.validations()
    return {"parts": printed["part_sha256"], "losses": folder.losses(), "found": validations}


@pytest.fixture(scope="module")
def whole(workplace) -> dict:
    """The run that one process did without a stop."""
    run = workplace / "whole"
    return result_of(run, command(workplace, 1, run).done())


def test_directions_have_the_same_bits_on_any_ranks_and_through_a_kill(workplace, whole):
    run = workplace / "two"
    assert result_of(run, command(workplace, 2, run).done()) == whole
    run = workplace / "moved"
    life = command(workplace, 2, run)
    life.when(lambda: any(step >= 7 for step in Shelf(run / "checkpoints").steps()))
    life.signal(signal.SIGKILL)
    assert result_of(run, command(workplace, 1, run, "resume", run).done()) == whole


def test_a_run_is_shown_beside_simple_predictors(tapeline, workplace, whole):
    run = workplace / "whole"
    last = whole["found"][28]
    code, out, err = tapeline("runs", "show", run)
    assert code == 0
    assert "the training frequencies" in out
    assert in_words(last) in err.replace("\n", " ")
    told = json.loads(tapeline("runs", "show", run, "--json")[1])["evaluation"]
    assert told == last
    assert set(told["horizons"][0]) >= {"accuracy", "balanced_accuracy_last_move"}
    code, _, _ = tapeline("report", run, "--out", "page.html")
    assert code == 0
    page = Path("page.html").read_text()
    assert "Against simple predictors" in page
    assert in_words(last) in page
    assert "At 8 it is over 5, all that a window holds." in page


def new_run(workplace: Path, name: str, *overrides: str) -> dict:
    config = RunConfig.load(workplace / "run.toml", overrides)
    return start(config, workplace / name).validation


CHANGE = ("training.objective=change", "training.dead_zone=0", "training.steps=4")


def test_a_run_for_changes_at_several_horizons_loses_windows_to_the_longest(workplace):
    found = new_run(workplace, "changes", *CHANGE)
    assert [one["horizon"] for one in found["horizons"]] == [3, 8]
    record = json.loads((workplace / "changes" / "run.json").read_text())
    assert record["data"]["audit"]["training"]["lost"]["horizon_tail"] == 8 * 2
    assert record["data"]["training_windows"] + record["data"]["validation_windows"] < 2 * 487


def test_a_list_of_one_horizon_is_the_run_of_that_one(workplace):
    runs = [new_run(workplace, n, *CHANGE, f"windows.horizon={v}") for n, v in HORIZON.items()]
    assert runs[0] == runs[1]
    a, b = (RunFolder(workplace / name, FakeClock()).losses() for name in HORIZON)
    assert a == b


HORIZON = {"one": "5", "list": "[5]"}


def test_outputs_of_another_number_are_told_before_a_run_begins(workplace):
    with pytest.raises(TrainingError) as error:
        new_run(workplace, "wrong", "model.factory=targets_model:one_output")
    assert str(error.value) == (
        "model Linear: expected an output of shape [2, 6] for 2 windows, found shape [2, 1]. "
        "Let the model end in 6 outputs per window."
    )
    assert not (workplace / "wrong").exists()


def test_a_dead_zone_without_classes_is_told(workplace):
    with pytest.raises(ConfigError) as error:
        new_run(workplace, "zone", "training.objective=change")
    assert str(error.value).endswith(
        "key `training`: expected objective direction with dead_zone, "
        "found objective = 'change', dead_zone = 0.004. Correct the section."
    )


# In words


def test_equal_is_not_better_and_each_figure_is_named():
    one = {
        "horizon": 5,
        "last_move_rows": 5,
        "cross_entropy": 0.9,
        "cross_entropy_frequencies": 1.0,
        "accuracy": 0.5,
        "accuracy_frequencies": 0.5,
        "accuracy_last_move": 0.6,
        "balanced_accuracy": 0.4,
        "balanced_accuracy_frequencies": 1 / 3,
        "balanced_accuracy_last_move": 0.4,
    }
    found = {"windows": 1200, "horizons": [one]}
    assert in_words(found) == (
        "Horizon 5: better than the training frequencies in cross entropy and balanced accuracy, "
        "not in accuracy; not better than the last move."
    )
    table = against_baselines(found)
    assert table.caption == "on 1,200 windows held out"
    assert table.texts() == [
        ["5", "the model", "0.9", "50.0 %", "40.0 %"],
        ["5", "the training frequencies", "1", "50.0 %", "33.3 %"],
        ["5", "the last move", "–", "60.0 %", "40.0 %"],
    ]
    assert about_last_moves(found).endswith("up to the window's last.")


def test_changes_are_better_or_not():
    one = {"horizon": 3, "last_move_rows": 3, "mse": 1.0, "mse_zero": 2.0, "mse_last_move": 1.0}
    assert in_words({"horizons": [one, {**one, "horizon": 8, "mse": 3.0}]}) == (
        "Horizon 3: better than no change; not better than the last move. "
        "Horizon 8: not better than no change; not better than the last move."
    )
