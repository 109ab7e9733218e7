"""Criteria that end a run: pasted from `tapeline plan stop`, and held through kills."""

from __future__ import annotations

import tomllib

import pytest
from typer.testing import CliRunner

from tapeline.attempt.ending import Stopped
from tapeline.checkpoint import Shelf
from tapeline.cli import app
from tapeline.clock import SystemClock
from tapeline.config import RunConfig
from tapeline.errors import ConfigError, TrainingError
from tapeline.run import resume, start
from tapeline.runs import RunFolder
from tapeline.store import write_shards
from tapeline.tape import synthetic_sessions

STEPS = 60


def values(workplace, **more):
    return {
        "data": {"store": str(workplace / "store")},
        "windows": {"length": 4, "horizon": 3},
        "training": {"steps": STEPS, "batch": 16, "lanes": 2},
        "checkpoint": {"every": 15},
        "log_every": 7,
        **more,
    }


def config_of(workplace, *overrides, **more) -> RunConfig:
    return RunConfig.from_mapping(values(workplace, **more), "test", overrides)


def lives(run):
    return [(life["how"], life["from_step"]) for life in RunFolder(run, SystemClock()).attempts()]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped")
    write_shards(synthetic_sessions(2, rows=400), folder / "store", "mmap")
    return folder


@pytest.fixture(scope="module")
def section(workplace):
    """What `tapeline plan stop` prints for four references, as it would stand in a file."""
    arguments = ["plan", "stop", "--looks", "5", "--window", "8"]
    for seed in range(1, 5):
        folder = workplace / f"seed-{seed}"
        start(config_of(workplace, f"seed={seed}"), folder)
        arguments += ["--reference", str(folder)]
    printed = CliRunner().invoke(app, arguments)
    assert printed.exit_code == 0, printed.output
    return tomllib.loads(printed.output[printed.output.index("[stop]") :])["stop"]


BAD = "training.learning_rate=0.5"


@pytest.fixture(scope="module")
def stopped(workplace, section):
    run = workplace / "diverging"
    with pytest.raises(Stopped, match="above the references' band at 2 looks in a row") as caught:
        start(config_of(workplace, BAD, stop=section), run)
    assert caught.value.code == 1
    return run


def test_a_diverging_run_is_stopped_and_saved(stopped, section):
    (life,) = RunFolder(stopped, SystemClock()).attempts()
    assert life["how"] == "stopped"
    assert life["evidence"].startswith("above the references' band")
    assert life["step"] in [step for step, _ in section["looks"][1:]]
    assert max(Shelf(stopped / "checkpoints").steps()) == life["step"]
    assert not (stopped / "errors").exists()


def test_a_good_run_is_not(workplace, section):
    run = start(config_of(workplace, "seed=9", stop=section), workplace / "good")
    assert lives(run.folder) == [("finished", 0)]
    free = start(config_of(workplace, "seed=9"), workplace / "free")
    assert run.part_sha256 == free.part_sha256


@pytest.mark.parametrize("dies_at", [8, 17])
def test_the_verdict_is_the_same_after_a_kill(workplace, section, stopped, tmp_path, dies_at):
    class Killed(BaseException):
        pass

    def tell(done: int, _: int) -> None:
        if done == dies_at:
            raise Killed

    run = tmp_path / "killed"
    with pytest.raises(Killed):
        start(config_of(workplace, BAD, stop=section), run, progress=tell)
    with pytest.raises(Stopped) as caught:
        resume(run)
    (whole,) = RunFolder(stopped, SystemClock()).attempts()
    *_, last = RunFolder(run, SystemClock()).attempts()
    assert (last["how"], last["step"]) == ("stopped", whole["step"])
    assert caught.value.why == whole["evidence"] == last["evidence"]


def test_a_stopped_run_stays_stopped_until_told_otherwise(workplace, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(Stopped, match="target missed: at step 20 the mean loss of 50 steps is"):
        start(config_of(workplace, stop={"target": [20, 0.0]}), run)
    with pytest.raises(Stopped, match="target missed: at step 20"):
        resume(run)
    assert lives(run) == [("stopped", 0), ("stopped", 20)]
    went_on = resume(run, ["stop={}"])
    assert went_on.part_sha256 == start(config_of(workplace), tmp_path / "free").part_sha256


def test_a_loss_that_is_no_number_fails_the_run_and_saves_nothing_of_it(workplace, tmp_path):
    run = tmp_path / "run"
    wild = {"steps": STEPS, "batch": 16, "optimizer": "sgd", "learning_rate": 1e9}
    config = config_of(workplace, training=wild, stop={"target": [20, 0.0]})
    with pytest.raises(TrainingError, match=r"expected a finite loss, found (inf|nan)\. Lower"):
        start(config, run)
    assert lives(run) == [("failed", 0)]
    assert not Shelf(run / "checkpoints").steps()


def test_the_command_line_says_why_with_exit_code_1(workplace, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        f'[data]\nstore = "{workplace / "store"}"\n[windows]\nlength = 4\nhorizon = 3\n'
        "[training]\nsteps = 60\nbatch = 16\n[stop]\ntarget = [20, 0]\n"
    )
    done = CliRunner().invoke(app, ["train", str(file), "--out", str(tmp_path / "run")])
    assert done.exit_code == 1
    assert "tapeline: stopped and saved: target missed: at step 20" in done.output


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        ({"looks": [[0, 1.0]]}, "key `stop.looks.0.0`"),
        ({"looks": [[5]]}, "key `stop.looks.0.1`"),
        ({"target": 3}, "key `stop.target`"),
        ({"target": [5, float("nan")]}, "key `stop.target.1`"),
        ({"pacience": 3}, "Write `patience`, the nearest"),
    ],
)
def test_a_section_that_is_none_is_refused(workplace, stop, said):
    with pytest.raises(ConfigError) as caught:
        config_of(workplace, stop=stop)
    assert said in str(caught.value)


def test_criteria_are_no_part_of_what_decides_the_bits(workplace):
    config = config_of(workplace, stop={"target": [20, 0.5]})
    assert config.hash() == config_of(workplace).hash()
    assert config.resolved()["stop"]["target"] == [20, 0.5]


def test_a_life_that_was_to_end_after_a_step_goes_on_to_the_same_bits(workplace):
    whole = start(config_of(workplace), workplace / "whole")
    run = workplace / "paused"
    with pytest.raises(Stopped, match="this life was to end after step 20"):
        start(config_of(workplace, "stop.after=20"), run)
    with pytest.raises(Stopped, match="this life was to end after step 20"):
        resume(run)  # it is there already
    with pytest.raises(Stopped, match="after step 41"):
        resume(run, ["stop.after=41"])
    again = resume(run, ["stop.after=0"])
    assert again.state_sha256 == whole.state_sha256
    assert lives(run) == [("stopped", 0), ("stopped", 20), ("stopped", 20), ("finished", 41)]
