"""The index shows what the files say and reads what changed; conditions, sorting, good runs."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from helpers_runs import new_record, write_run

from tapeline.errors import ConfigError, RunError
from tapeline.runs.choosing import GOOD, Condition, chosen, like_it
from tapeline.runs.index import indexed
from tapeline.runs.summary import family, summary


@pytest.fixture
def root(tmp_path):
    """Three runs: two seeds of one configuration, deeper down, and another."""
    for seed in (0, 1):
        record = new_record(f"seed={seed}", name=f"seed-{seed}", created=f"2026-01-0{1 + seed}")
        write_run(tmp_path / "runs" / "replicates" / f"seed-{seed}", record, mse=0.5 + seed)
    other = new_record("training.batch=32", name="other", created="2026-01-09")
    write_run(tmp_path / "runs" / "other", other, how="open")
    return tmp_path / "runs"


@pytest.fixture
def place(tmp_path):
    return tmp_path / "cache" / "index.sqlite"


def named(runs) -> list[str]:
    return [run["name"] for run in runs]


def test_the_first_look_reads_all_the_next_reads_none(root, place):
    seen: list[tuple[int, int]] = []
    first = indexed(root, place=place, progress=lambda done, total: seen.append((done, total)))
    assert sorted(named(first.summaries)) == ["other", "seed-0", "seed-1"]
    assert (first.num_read, seen) == (3, [(1, 3), (2, 3), (3, 3)])
    again = indexed(root, place=place)
    assert again.num_read == 0
    assert again.summaries == first.summaries


def test_what_changed_is_read_again_and_what_is_gone_is_dropped(root, place):
    indexed(root, place=place)
    with (root / "other" / "attempts.jsonl").open("a") as file:
        file.write('{"attempt":1,"how":"finished","step":40}\n')
    write_run(root / "new", new_record(name="new"))
    (root / "replicates" / "seed-0").rename(root.parent / "elsewhere")
    found = indexed(root, place=place)
    assert found.num_read == 2
    by_name = {run["name"]: run for run in found.summaries}
    assert set(by_name) == {"other", "seed-1", "new"}
    assert by_name["other"]["how"] == "finished"


@pytest.mark.parametrize("content", [b"not a database" * 100, b""])
def test_a_damaged_index_is_made_anew(root, place, content):
    place.parent.mkdir()
    place.write_bytes(content)
    assert indexed(root, place=place).num_read == 3
    assert indexed(root, place=place).num_read == 0


def test_an_index_of_another_version_is_made_anew(root, place):
    indexed(root, place=place)
    with sqlite3.connect(place) as database:
        database.execute("UPDATE runs SET summary = '{}'")
        database.execute("PRAGMA user_version = 99")
    database.close()
    found = indexed(root, place=place)
    assert found.num_read == 3
    assert sorted(named(found.summaries)) == ["other", "seed-0", "seed-1"]


def test_an_index_that_cant_be_written_is_done_without(root, tmp_path):
    (tmp_path / "file").touch()
    found = indexed(root, place=tmp_path / "file" / "index.sqlite")
    assert (found.num_read, len(found.summaries)) == (3, 3)


def test_nothing_is_written_into_the_folder_of_runs(root, place):
    def files() -> list[tuple[Path, int]]:
        return sorted((p, p.stat().st_mtime_ns) for p in root.rglob("*"))

    before = files()
    indexed(root, place=place)
    assert files() == before


def test_a_damaged_run_is_listed_with_its_problem(root, place):
    record = json.loads((root / "other" / "run.json").read_text())
    (root / "other" / "run.json").write_text(json.dumps({**record, "created": "later"}))
    (broken,) = [run for run in indexed(root, place=place).summaries if run["problem"]]
    assert "expected the record as it was written" in broken["problem"]
    assert broken["path"] == str(root / "other")


def test_no_folder_is_told(tmp_path):
    with pytest.raises(RunError, match="expected a folder of runs, found no folder"):
        indexed(tmp_path / "none")


def test_a_summary_says_what_a_run_came_to(root):
    found = summary(root / "replicates" / "seed-1")
    assert (found["how"], found["step"], found["steps"], found["attempts"]) == (
        "finished",
        40,
        40,
        1,
    )
    assert found["validation"] == {"loss": 1.5, "mse": 1.5, "mse_zero": 1.0, "skill": -0.5}
    assert found["best_validation"] == 1.5
    assert found["loss"] == pytest.approx(0.28, abs=0.02)
    assert (found["goodput"], found["problem"]) == (None, None)
    assert summary(root / "other")["how"] == "open"


def test_a_loss_that_is_no_number_is_not_a_missing_one(tmp_path):
    run = write_run(tmp_path / "r", new_record(), losses=[1.0, float("nan")], mse=float("nan"))
    found = summary(run)
    assert (found["loss"], found["validation"]["mse"], found["best_validation"]) == (
        "nan",
        "nan",
        None,
    )
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_a_family_differs_in_its_seed_alone():
    one = family(new_record("seed=1", name="one"))
    assert one == family(new_record("seed=2", "log_every=3", name="two"))
    assert one != family(new_record("training.batch=8"))
    other = new_record()
    other["data"]["fingerprint"] = "f2"
    assert one != family(other)
    assert family({"config": {"name": "of another version"}}) is None


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("training.batch>=16", True),
        ("training.batch > 16", False),
        ("config.training.batch=16", True),
        ("name=r", True),
        ("name!=r", False),
        ("name~R", True),
        ("how=finished", True),
        ("validation.mse<0.6", True),
        ("data.normalise=true", True),  # of the configuration: the summary's `data` has no such key
        ("nothing.of.that=1", False),
        ("nothing.of.that!=1", False),
        ("name<3", False),
        ("training.optimizer='adam'", True),
    ],
)
def test_conditions(tmp_path, condition, holds):
    run = summary(write_run(tmp_path / "r", new_record()))
    assert Condition.parse(condition).holds(run) is holds


def test_what_is_no_condition_is_told():
    with pytest.raises(ConfigError, match="expected key, relation and value, such as"):
        Condition.parse("batch")


@pytest.mark.parametrize(
    ("where", "sort", "told"),
    [
        (["trainin.batch=8"], "loss", "Write `training.batch`, the nearest."),
        ([], "-losss", "Write `loss`, the nearest."),
        ([], "nothing", "See `tapeline runs show RUN`."),
    ],
)
def test_a_key_that_no_run_has_is_told(tmp_path, where, sort, told):
    runs = [summary(write_run(tmp_path / "r", new_record()))]
    with pytest.raises(ConfigError) as caught:
        chosen(runs, where, sort)
    key = where[0].partition("=")[0] if where else sort.removeprefix("-")
    assert str(caught.value) == (
        f"key `{key}`: expected one that runs are known by, found one that none of them has. {told}"
    )
    with pytest.raises(ConfigError, match="key `foo`"):
        like_it(runs[0], runs, same=["foo"])


def test_a_figure_that_no_run_has_yet_is_no_mistake():
    runs = [{"name": "a", "problem": None, "validation": {}}, {"problem": "damaged"}]
    assert named(chosen(runs[:1], ["validation.skill>0"], "validation.mse")) == []
    assert chosen(runs[1:], sort="created") == runs[1:]


def test_runs_are_sorted_those_without_a_number_last():
    runs = [{"name": n, "loss": v} for n, v in (("a", 2.0), ("b", "nan"), ("c", None), ("d", 1.0))]
    assert named(chosen(runs, sort="loss")) == ["d", "a", "b", "c"]
    assert named(chosen(runs, sort="-loss")) == ["a", "d", "b", "c"]
    assert named(chosen(runs, ["name!=a"], "-name")) == ["d", "c", "b"]


def test_the_last_good_run_like_this_one(tmp_path):
    def run(name, *overrides, created, mse=0.5, how="finished"):
        record = new_record(*overrides, name=name, created=created)
        return summary(write_run(tmp_path / name, record, mse=mse, how=how))

    runs = [
        run("bad", created="2026-02-01", mse=2.0),
        run("early", created="2026-01-01"),
        run("late", "training.batch=8", created="2026-01-20"),
        run("later-but-bad", created="2026-01-25", mse=1.2),
        run("other-windows", "windows.length=30", created="2026-01-26"),
        run("killed", created="2026-01-27", how="open"),
    ]
    assert named(like_it(runs[0], runs, GOOD)) == ["late", "early"]
    assert named(like_it(runs[0], runs, GOOD, ["training.batch"])) == ["early"]
    assert named(like_it(runs[0], runs, "validation.mse<0.1")) == []
    assert named(like_it(runs[0], runs)) == ["killed", "later-but-bad", "late", "early"]
