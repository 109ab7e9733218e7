"""What changed between two runs: each planted change is found and first among noise."""

from __future__ import annotations

import copy
import subprocess
from pathlib import Path

import pytest
from helpers_runs import CODE, losses_of, new_record, write_life, write_run

from tapeline.clock import FakeClock
from tapeline.errors import RunError
from tapeline.runs import RunFolder
from tapeline.runs.checkout import code_record
from tapeline.runs.diff import RunFacts, changes_between, diff_runs
from tapeline.runs.facts import NOISE

ANYONE = ("-c", "user.name=anyone", "-c", "user.email=anyone@localhost")


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *ANYONE, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "code"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "net.py").write_text("a = 1\nb = 2\n")
    (folder / "README.md").write_text("hello\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def noisy(record: dict) -> dict:
    """The same run elsewhere and later: everything differs that doesn't matter."""
    record = copy.deepcopy(record)
    config = record["config"]
    config["name"], record["created"] = "another", "2026-03-03"
    config["log_every"], config["checkpoint"]["every"] = 7, 13
    config["data"]["store"] = record["data"]["store"] = "/elsewhere"
    config["validation"]["every"] = 33
    environment = record["environment"]
    environment["system"] |= {"host": "b", "kernel": "Linux 6.9", "distribution": "Debian 13"}
    environment["packages"]["rich"] = "15.0"
    environment["command"] = ["tapeline", "train", "other.toml"]
    environment["variables"]["LANG"] = "C"
    record["machine"] |= {"cores": 4, "memory_gib": 32.0, "load_1min": 9.0}
    readme = {"status": "M", "bytes": 3, "sha256": "r"}
    record["code"] = {**record["code"], "state": "dirty"}
    record["code"]["files"] = {**record["code"]["files"], "README.md": readme}
    return record


def default_changed(record):
    record["config"]["training"]["optimizer"] = "sgd"


def override_of_an_argument(record):
    record["config"]["model"]["arguments"] = {"hidden": 99}
    record["given"] = [*record["given"], "model.arguments"]


def overridden(record):
    record["config"]["training"]["learning_rate"] = 0.1
    record["given"] = [*record["given"], "training.learning_rate"]


def package_changed(record):
    record["environment"]["packages"]["torch"] = "2.14.0"
    record["environment"]["torch"] |= {"version": "2.14.0", "git": "h"}
    record["determinism"]["torch"] = record["machine"]["versions"]["torch"] = "2.14.0"


def other_snapshot(record):
    record["data"] |= {"fingerprint": "f2", "rows": 901, "training_fingerprint": "t2"}
    record["data"]["normaliser"] = {"mean": [0.0, 1.1], "std": [1.0, 2.0]}


def other_split(record):
    record["config"]["validation"]["fraction"] = 0.3
    record["data"] |= {"training_fingerprint": "t2", "training_windows": 400}
    record["data"]["normaliser"] = {"mean": [0.0, 1.1], "std": [1.0, 2.0]}


def other_windows_of_the_same_split(record):
    record["data"] |= {"training_fingerprint": "t2", "training_windows": 400}


def other_normaliser(record):
    record["data"]["normaliser"] = {"mean": [0.0, 1.1], "std": [1.0, 2.0]}


def other_threads(record):
    record["config"]["training"]["threads"] = record["determinism"]["threads"] = 4
    record["environment"]["torch"]["threads"] = 4
    record["given"] = [*record["given"], "training.threads"]


def other_driver(record):
    record["environment"]["driver"] = "560.1"


def other_seed(record):
    record["config"]["seed"] = record["seeds"]["run"] = 5
    record["given"] = [*record["given"], "seed"]


def other_source(record):
    record["sources"]["model.factory"]["sha256"] = "s2"


def other_processor(record):
    record["machine"]["processor"] = "Xeon"
    record["determinism"]["cpu_capability"] = "AVX2"


@pytest.mark.parametrize(
    ("plant", "what", "why"),
    [
        (default_changed, "training.optimizer", "neither run gave it: the default has changed"),
        (overridden, "training.learning_rate", ""),
        (override_of_an_argument, "model.arguments.hidden", ""),
        (package_changed, "environment.packages.torch", "kernels of another version"),
        (other_snapshot, "data.fingerprint", "other rows"),
        (other_split, "validation.fraction", "neither run gave it: the default has changed"),
        (
            *(other_windows_of_the_same_split, "data.training_fingerprint"),
            "other windows to train on: another split",
        ),
        (other_normaliser, "data.normaliser.mean", "inputs are scaled otherwise"),
        (other_threads, "training.threads", ""),
        (other_driver, "environment.driver", ""),
        (other_seed, "seed", ""),
        (other_source, "source of model.factory", "its content differs"),
        (
            *(other_processor, "machine.processor"),
            "another instruction set may sum in another order",
        ),
    ],
)
def test_a_planted_change_is_first_among_noise(plant, what, why):
    before = new_record()
    after = noisy(before)
    plant(after)
    changes = changes_between(RunFacts(before), RunFacts(after))
    assert (changes[0].what, changes[0].why) == (what, why)
    assert changes[0].weight > NOISE
    others = [change for change in changes[1:] if change.what != "data.normaliser.std"]
    assert [change.what for change in others if change.weight > NOISE] == []


def code_of(record, checkout):
    return {**record, "code": code_record(checkout)}


def test_a_dirty_file_is_first_among_noise(checkout):
    before = code_of(new_record(), checkout)
    (checkout / "net.py").write_text("a = 3\nb = 2\n")
    changes = changes_between(RunFacts(before), RunFacts(noisy(code_of(new_record(), checkout))))
    assert (changes[0].what, changes[0].why) == ("net.py", "1 hunk")
    assert str(changes[0].before).startswith("as in ")
    assert str(changes[0].after).startswith("changed, ")
    assert [change.what for change in changes[1:] if change.weight > NOISE] == []


def test_an_untracked_module_is_first_among_noise(checkout):
    (checkout / "helper.py").write_text("x = 1\n")
    before = code_of(new_record(), checkout)
    (checkout / "helper.py").write_text("x = 2\n")
    changes = changes_between(RunFacts(before), RunFacts(noisy(code_of(new_record(), checkout))))
    assert changes[0].what == "helper.py"
    assert str(changes[0].before).startswith("untracked, ")
    assert changes[0].before != changes[0].after
    assert [change.what for change in changes[1:] if change.weight > NOISE] == []


def test_between_commits_each_file_counts_by_itself(checkout):
    before = code_of(new_record(), checkout)
    (checkout / "net.py").write_text("a = 3\n" + "# same\n" * 9 + "b = 4\n")
    (checkout / "README.md").write_text("bye\n")
    git(checkout, "commit", "-aqm", "second")
    changes = changes_between(RunFacts(before), RunFacts(noisy(code_of(new_record(), checkout))))
    assert changes[0].what == "net.py"
    assert [change.what for change in changes if change.weight > NOISE] == ["net.py"]
    assert {"commit", "README.md"} <= {change.what for change in changes}


def test_commits_that_arent_at_hand_are_told(tmp_path):
    before, after = new_record(), new_record()
    after["code"] = {**CODE, "commit": "b" * 40, "folder": str(tmp_path)}
    (change,) = changes_between(RunFacts(before), RunFacts(after))
    assert (change.what, change.weight) == ("commit", 75)
    assert change.why == "the commits aren't at hand, so their files can't be compared"


def test_git_that_failed_is_not_the_same_as_clean():
    before, after = new_record(), new_record()
    after["code"] = {**CODE, "state": "unknown", "commit": None, "problem": "git failed"}
    changes = changes_between(RunFacts(before), RunFacts(after))
    assert ("state", "clean", "unknown") in {(c.what, c.before, c.after) for c in changes}


def test_other_checkouts_and_submodules_are_compared():
    before, after = new_record(), new_record()
    before["other_code"] = [{"of": "library", **CODE}]
    changed = {"status": "??", "bytes": 1, "sha256": "x"}
    module = {"path": "m", "commit": "c" * 40, "state": "clean"}
    after["other_code"] = [
        {"of": "library", **CODE, "files": {"lib.py": changed}, "submodules": [module]}
    ]
    found = {c.what: c.weight for c in changes_between(RunFacts(before), RunFacts(after))}
    assert found == {"library: lib.py": 75, "library: submodule m": 75}


def resumed(path: Path, record: dict, *, run: str, digest: str) -> Path:
    """A run with a second life from the checkpoint of step 20."""
    write_run(path, record)
    origin = {"step": 20, "run": run, "attempt": 1, "contract": {}, "files": {"state": digest}}
    write_life(path, 2, {"origin": origin}, from_step=20)
    return path


def facts(path: Path) -> RunFacts:
    return RunFacts.read(RunFolder(path, FakeClock()))


def test_a_checkpoint_of_another_lineage_is_first_among_noise(tmp_path):
    before = new_record()
    after = noisy(before)
    own, other = "r, begun 2026-01-01", "another, begun 2026-03-03"
    a = facts(resumed(tmp_path / "a", before, run=own, digest="1"))
    same = facts(resumed(tmp_path / "same", after, run=other, digest="1"))
    assert [c.what for c in changes_between(a, same) if c.weight > NOISE] == []
    state = facts(resumed(tmp_path / "state", after, run=other, digest="2"))
    first = changes_between(a, state)[0]
    assert (first.what, first.why) == ("state at step 20", "resumed from another state")
    foreign = facts(resumed(tmp_path / "foreign", after, run="x, begun then", digest="1"))
    first = changes_between(a, foreign)[0]
    assert (first.what, first.after) == ("life 2 of the second", "x, begun then")
    assert first.why == "it began from a checkpoint of another run"


def test_what_changed_between_the_lives_of_a_run_is_told(tmp_path):
    record = new_record()
    a, b = write_run(tmp_path / "a", record), write_run(tmp_path / "b", record)
    later = {"environment": copy.deepcopy(record["environment"]), "origin": {"step": 20}}
    later["environment"]["driver"] = "560.1"
    write_life(b, 2, later, from_step=20)
    changes = changes_between(facts(a), facts(b))
    assert changes[0].what == "life 2 of the second: environment.driver"
    assert (changes[0].before, changes[0].after) == ("550.54", "560.1")
    assert {change.what for change in changes} == {changes[0].what, "lives"}


def test_equal_runs_have_no_changes(tmp_path):
    a, b = (write_run(tmp_path / name, new_record()) for name in "ab")
    found = diff_runs(a, b)
    assert found.changes == ()
    assert found.divergence.first_difference is None
    assert found.divergence.compared == 40


def test_the_step_at_which_losses_leave_the_seed_band_is_told(tmp_path):
    changed = losses_of(0)
    changed[24] += 1e-9
    changed[29:] = [loss + 1.0 for loss in changed[29:]]
    a = write_run(tmp_path / "a", new_record())
    b = write_run(tmp_path / "b", new_record("training.batch=8"), losses=changed)
    seeds = [write_run(tmp_path / f"s{s}", new_record(f"seed={s}")) for s in range(1, 6)]
    found = diff_runs(a, b, seeds)
    assert found.changes[0].what == "training.batch"
    assert (found.divergence.first_difference, found.divergence.leaves_band) == (25, 30)
    assert found.divergence.num_replicates == 5


def test_a_folder_that_is_no_run_is_told(tmp_path):
    a = write_run(tmp_path / "a", new_record())
    with pytest.raises(RunError, match=r"expected the folder of a run, with run\.json"):
        diff_runs(a, tmp_path / "none")
