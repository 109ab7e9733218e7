"""A run as trackers see one."""

from __future__ import annotations

import json

import pytest
from helpers_runs import COMMIT, new_record, write_run

from tapeline.clock import FakeClock
from tapeline.errors import RunError
from tapeline.runs import RunFolder
from tapeline.runs.view import view_of


@pytest.fixture
def run(tmp_path):
    record = new_record("data.augment=[{name='noise', arguments={std=0.1}}]")
    record["config"]["checkpoint"]["durable"] = "s3://id:hunter2@host/x"  # by older rules
    return RunFolder(write_run(tmp_path / "run", record), FakeClock())


def test_params_are_every_setting_by_its_key(run):
    view = view_of(run)
    assert (view.name, view.identity) == ("r", "r, begun 2026-01-01")
    assert view.params["training.batch"] == 16
    assert view.params["data.normalise"] is True
    assert view.params["data.augment"] == '[{"arguments":{"std":0.1},"name":"noise"}]'
    assert "training.clip_norm" not in view.params
    assert view.params["checkpoint.durable"] == "s3://***@host/x"


def test_tags_tell_code_data_machine_and_end(run):
    tags = view_of(run).tags
    assert (tags["commit"], tags["code"], tags["data"]) == (COMMIT, "clean", "f1")
    assert (tags["driver"], tags["ranks"], tags["lives"], tags["end"]) == (
        *("550.54", "1", "1", "finished"),
    )
    assert "container" not in tags
    assert "hunter2" not in json.dumps(tags)


def test_metrics_have_each_step_once(run):
    metrics = view_of(run).metrics
    assert metrics["loss"].steps.tolist() == list(range(1, 41))
    assert metrics["validation/mse"].values.tolist() == [0.5]


def test_artifacts_are_the_record_lives_the_report_and_checkpoints_with_their_hashes(run):
    (run.path / "report.html").write_text("page")
    saved = run.checkpoints_path / "step-00000007"
    saved.mkdir(parents=True)
    files = {"state.safetensors": {"xxh3_128": "h", "bytes": 12}}
    (saved / "manifest.json").write_text(json.dumps({"files": files}))
    damaged = run.checkpoints_path / "step-00000009"
    damaged.mkdir()
    (damaged / "manifest.json").write_text("{")
    told = [(one.name, one.num_bytes, one.xxh3_128) for one in view_of(run).artifacts]
    record = (run.path / "run.json").stat().st_size
    assert told == [
        ("run.json", record, None),
        ("attempts.jsonl", (run.path / "attempts.jsonl").stat().st_size, None),
        ("report.html", 4, None),
        ("checkpoints/step-00000007/state.safetensors", 12, "h"),
    ]


def test_no_run_is_told(tmp_path):
    with pytest.raises(RunError, match="expected the folder of a run"):
        view_of(RunFolder(tmp_path, FakeClock()))
