"""The page of a run, written from its folder alone."""

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tapeline import run as runs
from tapeline.cli import app
from tapeline.config import RunConfig
from tapeline.tape import synthetic_sessions


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    from tapeline.store import write_shards

    folder = tmp_path_factory.mktemp("page")
    write_shards(synthetic_sessions(2), folder / "<script>", "mmap")
    config = RunConfig.from_mapping(
        {
            "name": "page",
            "data": {"store": str(folder / "<script>")},
            "model": {"arguments": {"hidden": 4}},
            "training": {"steps": 12, "batch": 32},
            "checkpoint": {"every": 6},
        },
        where="test",
    )
    runs.start(config, folder / "run")
    return folder / "run"


def test_the_page_tells_the_account_and_escapes_what_comes_from_outside(trained):
    result = CliRunner().invoke(app, ["report", str(trained), "--price-per-hour", "2.5"])
    assert result.exit_code == 0, result.output
    assert "useful" in result.stdout and "startup" in result.stdout
    page = (trained / "report.html").read_text()
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings == [
        "Where the time went",
        "Attempts",
        "Loss",
        "Steps",
        "What was noticed",
        "Windows",
        "The run",
    ]
    assert "&lt;script&gt;" in page
    assert "<script" not in page
    assert not re.search(r'(?:src|href)="(?!data:|#)', page)
    assert page.count('role="img" aria-label="') == page.count('class="drawing"') == 3


def test_json_gives_the_same_figures(trained, tmp_path):
    out = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["report", str(trained), "--out", str(out), "--json"])
    told = json.loads(result.stdout)
    job = told["account"]["job"]
    assert sum(job["buckets_ns"].values()) == job["wall_ns"]
    assert job["kept_steps"] == 12
    assert told["attempts"][0]["how"] == "finished"
    assert out.exists()


def test_a_run_without_ledgers_is_a_sentence(trained, tmp_path):
    folder = Path(shutil.copytree(trained, tmp_path / "copy"))
    shutil.rmtree(folder / "ledger")
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert "no ledger of any rank" in str(result.exception)
