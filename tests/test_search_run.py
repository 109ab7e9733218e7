"""A search over real runs: paused, promoted to the same bits, retrained, told and drawn."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers_search import RUNGS, Walk, new_search
from typer.testing import CliRunner

from tapeline.cli import app
from tapeline.clock import SystemClock
from tapeline.config import RunConfig
from tapeline.errors import RunError, StoreError
from tapeline.plan.seeds import winners_curse
from tapeline.report.figures import svg
from tapeline.report.search_figures import history_figure, parallel_figure, rungs_figure
from tapeline.run import start
from tapeline.runs import RunFolder
from tapeline.search.folder import SearchFolder
from tapeline.search.journal import SearchJournal
from tapeline.search.result import Final, Result, Spent, TrialRow, result_of
from tapeline.search.worker import Worker
from tapeline.store import write_shards
from tapeline.tape import synthetic_sessions

BASE = """
[data]
store = "store"
[windows]
length = 4
horizon = 3
[training]
steps = 8
batch = 16
[validation]
every = 3
[model]
arguments = { hidden = 4 }
"""
SPACE = """
base = "base.toml"
name = "small"
budget_steps = 8
lease_s = 5.0
[space]
training.learning_rate = { log = [1e-4, 1e-2] }
[rungs]
min_steps = 4
eta = 2
[finals]
picks = 1
seeds = 2
"""


@pytest.fixture
def workplace(tmp_path):
    write_shards(synthetic_sessions(1, rows=200), tmp_path / "store", "mmap")
    (tmp_path / "base.toml").write_text(BASE)
    (tmp_path / "space.toml").write_text(SPACE)
    return tmp_path


def test_a_search_of_real_runs_from_the_command_to_its_figures(workplace, warm_python):
    out = workplace / "found"
    command = ["search", str(workplace / "space.toml"), "--out", str(out), "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["is_over"]
    assert found["rungs"] == [4, 8]
    assert found["reached"] == [1, 1]
    assert found["spent"]["trials"]["kept_steps"] == 8
    assert found["spent"]["finals"]["kept_steps"] == 16
    assert [one["state"] for one in found["trials"]] == ["full run"]
    (final,) = found["finals"]
    assert list(final["by_seed"]) == ["1", "2"], "seed 0 is what the search has seen"
    for name in ("history", "rungs", "parallel"):
        assert (out / f"{name}.svg").exists()
        assert (out / f"{name}.png").exists()

    # Paused and promoted, a trial has the bits of a run without a stop.
    promoted = out / "trials" / str(final["trial"])
    lives = RunFolder(promoted, SystemClock()).attempts()
    assert [(life["how"], life["step"]) for life in lives] == [("stopped", 4), ("finished", 8)]
    values = next(one for one in found["trials"] if one["number"] == final["trial"])["values"]
    config = RunConfig.load(
        workplace / "base.toml", [f"{key}={value!r}" for key, value in values.items()]
    )
    whole = start(config, workplace / "whole")
    assert RunFolder(promoted, SystemClock()).losses() == dict(enumerate(whole.losses, start=1))
    assert RunFolder(promoted, SystemClock()).validations()[8] == whole.validation

    # The same command again has nothing left to do; the journal tells the same once more.
    again = CliRunner().invoke(app, ["search", "show", str(out), "--verify", "--json"])
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout) == found
    assert "every decision is that of their replay" in again.stderr
    shown = CliRunner().invoke(app, ["search", "show", str(out)])
    assert "planned:" in shown.output
    assert "on 2 fresh seeds" in shown.output


def test_a_configuration_that_cannot_be_trained_is_a_trial_that_failed_and_says_why(workplace):
    text = SPACE.replace(
        "training.learning_rate = { log = [1e-4, 1e-2] }",
        'model.factory = { choice = ["nowhere:model", "nobody:model"] }',
    )
    (workplace / "space.toml").write_text(text.replace("[rungs]\nmin_steps = 4\neta = 2\n", ""))
    out = workplace / "failed"
    command = ["search", str(workplace / "space.toml"), "--out", str(out)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1, done.output
    trials = result_of(SearchFolder.open(out)).trials
    assert "no trial came to a figure" in done.stderr
    assert trials[0].state == "failed"
    assert trials[0].reason.startswith("model.factory")


def test_without_a_store_no_trial_is_begun(workplace):
    (workplace / "base.toml").write_text(BASE.replace('"store"', '"gone"'))
    command = ["search", str(workplace / "space.toml"), "--out", str(workplace / "s")]
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, StoreError)
    assert str(done.exception).startswith(f"{workplace / 'gone'}: expected a store in ")
    assert not (workplace / "s").exists()


def test_a_search_that_is_interrupted_says_how_to_go_on(workplace, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tapeline.search.conduct.conduct", interrupted)
    command = ["search", str(workplace / "space.toml"), "--out", str(workplace / "s")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 130
    assert done.stderr.endswith(
        "stopped, and what runs was saved: give the same command again to go on\n"
    )


def test_other_settings_in_the_same_folder_are_refused(tmp_path):
    new_search(tmp_path / "s")
    new_search(tmp_path / "s", workers=7)  # how many do the work is nobody's business
    with pytest.raises(RunError) as caught:
        new_search(tmp_path / "s", seed=1)
    assert str(caught.value) == (
        f"{tmp_path / 's'}: expected the search as it began, found other settings in its file or "
        "its base. Give the changed one another folder with --out, or undo the change."
    )
    with pytest.raises(RunError, match="other settings in its file or its base"):
        new_search(tmp_path / "s", steps=28)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "file").touch()
    with pytest.raises(RunError, match="expected a place for a new search, or one that goes on"):
        new_search(tmp_path / "s")
    with pytest.raises(RunError, match=r"expected the folder of a search, with search\.json"):
        SearchFolder.open(tmp_path)
    (tmp_path / "s" / "search.json").write_text("[]")
    with pytest.raises(RunError, match=r"with search\.json, found one that can't be read"):
        SearchFolder.open(tmp_path / "s")


def test_a_search_begun_by_many_at_once_is_one(tmp_path):
    config = new_search(tmp_path / "other").config
    with ThreadPoolExecutor(8) as several:
        begun = list(
            several.map(lambda _: SearchFolder.begin(tmp_path / "s", config, None), range(8))
        )
    assert len({one.identity for one in begun}) == 1
    assert [list(one.journal().new_entries()) for one in begun] == [[]] * 8


def test_a_beginning_that_was_cut_short_is_begun_again(tmp_path):
    search = new_search(tmp_path / "s")
    (search.path / "search.json").unlink()
    (search.path / "base.toml").unlink()
    assert new_search(tmp_path / "s").base_file.exists()


def test_a_result_in_the_middle_says_what_is_under_way(tmp_path):
    search = new_search(tmp_path / "s")
    journal: SearchJournal = search.journal()
    journal.append({"kind": "ask", "worker": "a"})
    journal.append({"kind": "ask", "worker": "b"})
    journal.append({"kind": "give back", "lease": 1, "worker": "b", "died": False})
    found = result_of(search)
    assert not found.is_over
    assert [one.state for one in found.trials] == ["running", "to be run"]
    assert found.rest["given_back"] == {"died": 0, "stopped": 1}


def test_what_a_search_of_walks_came_to(tmp_path):
    search = new_search(tmp_path / "s", budget_steps=200, metric="validation.skill")
    Worker(search, Walk, poll_s=0.0).work()
    found = result_of(search)
    best = found.ranked()[0]
    assert best.number == found.finals[0].trial
    full = [one.value for one in found.trials if one.state == "full run"]
    assert best.value == max(value for value in full if math.isfinite(value))
    assert found.planned.gpu_hours <= 200
    assert found.as_dict()["direction"] == "maximize"
    json.dumps(found.as_dict(), allow_nan=False)


def result(full: list[float], by_seed: dict[int, float], direction: str) -> Result:
    from tapeline.runs.spread import spread_of

    rows = tuple(TrialRow(n, {}, {27: value}, "full run", None) for n, value in enumerate(full))
    best = max(full) if direction == "maximize" else min(full)
    final = Final(0, best, by_seed, spread_of(list(by_seed.values())))
    spent = Spent(0, 0, 0.0, 0.0)
    rest = {"rungs": list(RUNGS)}
    return Result("", ("loss", direction), True, rows, (final,), (spent, spent), None, rest)


@pytest.mark.parametrize(("direction", "sign"), [("minimize", 1), ("maximize", -1)])
def test_the_overstatement_is_told_as_measured_and_as_expected(direction, sign):
    full = [sign * value for value in (1.0, 2.0, 3.0, 4.0)]
    seeds = {1: sign * 1.4, 2: sign * 1.6}
    measured, expected = result(full, seeds, direction).overstated()
    assert measured == pytest.approx(0.5)
    noise, spread = math.sqrt(0.02), math.sqrt(5 / 3 - 0.02)
    assert expected == pytest.approx(winners_curse(4, noise / spread).overstated * spread)
    assert result(full[:2], seeds, direction).overstated() is None


def test_figures_hold_what_they_are_given_and_the_same_twice():
    curves = {0: {3: 1.0, 9: 0.5, 27: 0.4}, 1: {3: 2.0}, 2: {3: math.nan}}
    ranked = [{"a": 1.0, "b": "x"}, {"a": 100.0, "b": "y"}]
    figures = [
        lambda: history_figure(curves, RUNGS, "loss", "minimize", "note"),
        lambda: rungs_figure(curves, "loss", 0, "note"),
        lambda: parallel_figure(ranked, "note"),
    ]
    for figure in figures:
        assert svg(figure(), "a") == svg(figure(), "a")
    (axes,) = figures[0]().axes
    assert axes.get_legend_handles_labels()[1] == [
        "left at step 3",
        "left at step 9",
        "full run",
        "best full run",
    ]
    assert [text.get_text() for text in figures[2]().axes[0].texts] == [
        *("1", "3.16", "10", "31.6", "100"),
        *("x", "y"),
    ]
