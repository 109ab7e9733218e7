"""A configuration with k seeds, and a run again from its record, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from helpers_runs import new_record, write_run

from tapeline.clock import FakeClock
from tapeline.config import RunConfig
from tapeline.errors import ConfigError, RunError
from tapeline.repeat import replicate, rerun
from tapeline.repeat.replicate import with_seed
from tapeline.repeat.rerun import compare_runs, toml_of
from tapeline.repeat.worktree import Recreated, recreated
from tapeline.run import start
from tapeline.runs import RunFolder, record
from tapeline.runs.replicas import replicas_of, siblings
from tapeline.runs.summary import summary
from tapeline.store import write_shards
from tapeline.tape import synthetic_sessions

ANYONE = ("-c", "user.name=anyone", "-c", "user.email=anyone@localhost")


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *ANYONE, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout


class Trainer:
    """Trains nothing: the figure of a seed is a function of the seed."""

    def __init__(self, dies_at: int | None = None) -> None:
        self.started: list[int] = []
        self.resumed: list[str] = []
        self._dies_at = dies_at

    def start(self, config: RunConfig, folder: Path, progress) -> None:
        self.started.append(config.seed)
        progress(config.training.steps, config.training.steps)
        how = "failed" if config.seed == self._dies_at else "finished"
        about = {**new_record(), **record(config, {}, FakeClock())}
        write_run(folder, about, mse=1.0 + config.seed % 3, how=how)
        if how == "failed":
            raise KeyboardInterrupt

    def resume(self, folder: Path, progress) -> None:
        self.resumed.append(folder.name)
        with RunFolder(folder, FakeClock()).attempts_path.open("a") as file:
            file.write('{"attempt":2,"how":"finished","step":40}\n')


@pytest.fixture
def config(tmp_path):
    (tmp_path / "c.toml").write_text('seed = 3\n[data]\nstore = "s"\n[training]\nsteps = 40\n')
    return RunConfig.load(tmp_path / "c.toml")


def nothing(*_: int) -> None:
    """A progress that nobody watches."""


def test_seeds_are_runs_of_their_own_and_their_figures_are_told(config, tmp_path):
    trainer, seen = Trainer(), []
    found = replicate(
        config,
        tmp_path / "out",
        num_seeds=3,
        start=trainer.start,
        resume=trainer.resume,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert found.by_seed == {3: 1.0, 4: 2.0, 5: 3.0}
    assert seen == [(40, 120), (80, 120), (120, 120)]
    assert found.sentence == (
        "validation.loss over 3 seeds: 2 ± 2.5 (95 % interval for the mean); a next run falls "
        "within ± 5. Least to greatest, 1 to 3, holds a next run with a chance of 50 % only"
    )
    told = json.loads(json.dumps(found.as_dict()))
    assert told["by_seed"] == {"3": 1.0, "4": 2.0, "5": 3.0}
    assert told["spread"]["min_max_coverage"] == 0.5


def test_finished_seeds_are_kept_and_others_resumed(config, tmp_path):
    def again(trainer: Trainer, num_seeds: int, settings: RunConfig = config):
        return replicate(
            settings,
            tmp_path / "out",
            num_seeds=num_seeds,
            start=trainer.start,
            resume=trainer.resume,
            progress=nothing,
        )

    with pytest.raises(KeyboardInterrupt):
        again(Trainer(dies_at=4), 3)
    trainer = Trainer()
    assert len(again(trainer, 4).by_seed) == 4
    assert (trainer.started, trainer.resumed) == ([5, 6], ["seed-4"])
    other = config.model_copy(update={"windows": config.windows.model_copy(update={"length": 9})})
    with pytest.raises(RunError, match="expected this configuration with seed 3, found a run of"):
        again(Trainer(), 2, other)
    with pytest.raises(ConfigError, match="--seeds: expected two or more, found 1"):
        again(Trainer(), 1)


def test_replicates_share_no_place_of_durable_copies(config):
    saving = config.checkpoint.model_copy(update={"durable": "s3://host/x/"})
    config = config.model_copy(update={"checkpoint": saving})
    places = {with_seed(config, seed).checkpoint.durable for seed in (1, 2)}
    assert places == {"s3://host/x/seed-1", "s3://host/x/seed-2"}


def test_only_one_configuration_makes_replicates(tmp_path):
    write_run(tmp_path / "a", new_record("seed=1"), mse=0.5)
    write_run(tmp_path / "b", new_record("seed=2"), mse=0.6, how="open")
    found = replicas_of(tmp_path)
    assert (found.by_seed, found.unfinished) == ({1: 0.5}, (str(tmp_path / "b"),))
    assert replicas_of(tmp_path / "a", "validation.skill").by_seed == {1: 0.5}
    with pytest.raises(RunError, match=r"expected a figure validation\.auc, found None"):
        replicas_of(tmp_path, "validation.auc")
    write_run(tmp_path / "c", new_record("seed=2"))
    with pytest.raises(RunError, match="expected one run for each seed, found seeds 1, 2, 2"):
        replicas_of(tmp_path)
    write_run(tmp_path / "d", new_record("seed=3", "training.batch=8"))
    with pytest.raises(RunError, match="expected runs that differ in their seeds alone, found oth"):
        replicas_of(tmp_path)
    with pytest.raises(RunError, match="expected a run, or a folder of runs, found none"):
        replicas_of(tmp_path / "none")


def test_siblings_are_other_seeds_of_the_same(tmp_path):
    runs = [
        summary(write_run(tmp_path / str(n), new_record(*o), how=how))
        for n, (o, how) in enumerate(
            [
                (("seed=1",), "finished"),
                (("seed=2", "log_every=3"), "finished"),
                (("seed=3",), "open"),
                (("seed=4", "training.batch=8"), "finished"),
                (("seed=1",), "finished"),
            ]
        )
    ]
    assert [run["seed"] for run in siblings(runs[0], runs)] == [2]


def test_a_configuration_survives_toml(config):
    overrides = (
        "data.augment=[{name='noise', arguments={std=0.1, deep={a=[1, 2.5]}}}]",
        "training.clip_norm=1.0",
    )
    values = config.model_dump(mode="json")
    text = 'a "quote", é\n\x7f'
    values["model"]["arguments"] = {"text": text, "flag": True, "number": 1e-30, "odd key": 3}
    values = RunConfig.from_mapping(values, "test", overrides).resolved()
    read = tomllib.loads(toml_of(values))
    assert RunConfig.model_validate(read).resolved() == values


MODEL = """
import torch
from parts import WIDTH

def net(num_inputs):
    return torch.nn.Sequential(
        torch.nn.Linear(num_inputs, WIDTH), torch.nn.Dropout(0.3), torch.nn.Linear(WIDTH, 1)
    )
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a model in a checkout with a changed, an untracked and a secret file."""
    place = tmp_path_factory.mktemp("rerun")
    code = place / "code"
    code.mkdir()
    git(code, "init", "-q")
    (code / "rerun_net.py").write_text(MODEL)
    (code / "parts.py").write_text("WIDTH = 4\n")
    git(code, "add", "-A")
    git(code, "commit", "-qm", "first")
    (code / "rerun_net.py").write_text(MODEL.replace("0.3", "0.2"))
    (code / ".env").write_text("PASSWORD=x\n")
    write_shards(synthetic_sessions(2, rows=200), place / "store", "mmap")
    values = {
        "data": {"store": str(place / "store")},
        "model": {"factory": "rerun_net:net", "folder": str(code)},
        "training": {"steps": 30, "batch": 16},
        "validation": {"every": 15},
        "checkpoint": {"every": 10, "durable": str(place / "durable")},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(code)
        patch.setattr(sys.modules["tapeline.runs.record"], "editable_folders", lambda _: {})
        start(RunConfig.from_mapping(values, "test"), place / "run")
    for name in ("rerun_net", "parts"):
        del sys.modules[name]
    sys.path.remove(str(code))
    return place


def test_a_rerun_from_the_record_has_the_same_bits(trained, tmp_path):
    """The checkout has gone on meanwhile: another width, another dropout."""
    code = trained / "code"
    (code / "parts.py").write_text("WIDTH = 8\n")
    (code / "rerun_net.py").write_text("raise SystemExit\n")
    git(code, "commit", "-qam", "second")
    durable = sorted(trained.joinpath("durable").rglob("*"))
    before = git(code, "status", "--porcelain"), git(code, "rev-parse", "HEAD")
    said: list[str] = []
    found = rerun(trained / "run", tmp_path / "again", say=said.append)
    assert found.is_equal
    assert (found.steps_compared, found.state_step) == (30, 30)
    assert found.as_dict()["bitwise_equal"] is True
    assert len(said) == 3
    assert (git(code, "status", "--porcelain"), git(code, "rev-parse", "HEAD")) == before
    assert len(git(code, "worktree", "list").splitlines()) == 1
    assert sorted(trained.joinpath("durable").rglob("*")) == durable


def changed_record(trained: Path, tmp_path: Path, **code: object) -> Path:
    about = RunFolder(trained / "run", FakeClock()).record()
    about["code"] |= code
    RunFolder(tmp_path / "changed", FakeClock()).create(about)
    return tmp_path / "changed"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ({"left_out": {"net.py": "too long"}}, r"found missing: net\.py \(too long\)"),
        ({"state": "unknown", "problem": "timed out"}, "found missing: all of it: timed out"),
        ({"commit": None}, "found missing: all of it: there was no commit"),
        ({"commit": "0" * 40}, "expected a checkout that has commit 000"),
        ({"folder": "/nowhere/at/all"}, "expected a checkout that has commit .*, found no folder"),
        ({"diff": "diff --git a/x b/x\nnonsense"}, "expected the code as it was recorded, found"),
        ({"diff": ""}, "expected the source that was trained, sha256 .*, found"),
    ],
)
def test_code_that_cant_be_put_back_is_told(trained, tmp_path, code, told):
    path = changed_record(trained, tmp_path, **code)
    with pytest.raises(RunError, match=told):
        rerun(path, tmp_path / "again", say=nothing)
    assert not (tmp_path / "again").exists()
    assert len(git(trained / "code", "worktree", "list").splitlines()) == 1


def test_other_data_and_other_settings_are_refused(trained, tmp_path):
    write_shards(synthetic_sessions(2, rows=200, seed=5), tmp_path / "other", "mmap")
    with pytest.raises(RunError, match=r"expected the data of the run, found .* has fingerprint"):
        moved = [f"data.store={tmp_path / 'other'}"]
        rerun(trained / "run", tmp_path / "again", overrides=moved, say=nothing)
    with pytest.raises(RunError, match="expected settings that leave the run's computation alone"):
        rerun(trained / "run", tmp_path / "again", overrides=["seed=3"], say=nothing)
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "file").touch()
    with pytest.raises(RunError, match="expected a place for a new run"):
        rerun(trained / "run", tmp_path / "again", say=nothing)


def test_a_store_that_has_grown_is_not_trained_on_again(trained, tmp_path):
    write_shards(synthetic_sessions(3, rows=200), tmp_path / "grown", "mmap")
    told = r"expected the data of the run, found .* sessions and 1 that came later\. Re-run on"
    with pytest.raises(RunError, match=told):
        moved = [f"data.store={tmp_path / 'grown'}"]
        rerun(trained / "run", tmp_path / "again", overrides=moved, say=nothing)
    assert not (tmp_path / "again").exists()


def test_a_difference_is_told_with_its_step_and_parts(trained, tmp_path):
    config = RunConfig.from_mapping(
        RunFolder(trained / "run", FakeClock()).record()["config"],
        "test",
        ["seed=1", "model.factory=tapeline.training.models:perceptron", "checkpoint.durable=d"],
    )
    saving = config.checkpoint.model_copy(update={"durable": None})
    start(config.model_copy(update={"checkpoint": saving}), tmp_path / "other")
    found = compare_runs(trained / "run", tmp_path / "other")
    assert not found.is_equal
    assert (found.first_difference, found.state_step) == (1, 30)
    assert "model" in " ".join(found.parts_differing)
    assert found.validations_differ == (15, 30)


def test_without_a_common_checkpoint_nothing_is_called_equal(tmp_path):
    a, b = (write_run(tmp_path / name, new_record()) for name in "ab")
    found = compare_runs(a, b)
    assert (found.first_difference, found.state_step, found.is_equal) == (None, None, False)


def test_what_is_otherwise_here_is_told_beside(tmp_path):
    other = new_record()
    other["environment"]["packages"]["torch"] = "2.14.0"
    a, b = write_run(tmp_path / "a", new_record()), write_run(tmp_path / "b", other)
    assert compare_runs(a, b).surroundings == ("environment.packages.torch: 2.13.0 → 2.14.0",)


def test_packages_are_imported_from_the_worktree_of_their_checkout(tmp_path):
    (tmp_path / "new" / "src").mkdir(parents=True)
    again = Recreated({"/home/old": tmp_path / "new", "/home": tmp_path / "none"})
    origin = {"url": "file:///home/old", "editable": True, "commit": None}
    about = {"environment": {"origins": {"x": origin, "y": {**origin, "editable": False}}}}
    assert again.import_folders(about) == [tmp_path / "new" / "src", tmp_path / "new"]
    assert again.place("/home/old/.venv/lib/x.py") == Path("/home/old/.venv/lib/x.py")
    assert again.place("/home/older") == Path("/home/older")


def test_no_repository_is_nothing_to_put_back():
    about = new_record()
    about["code"] = {"state": "not a repository"}
    about["sources"] = {}
    with recreated(about) as again:
        assert again.place("/m") == Path("/m")
