"""The page of a run, written from its folder alone."""

import json
import re
import shutil
from pathlib import Path

import pytest
from helpers_report import EVIL, write_page_run
from typer.testing import CliRunner

from tapeline import run as runs
from tapeline.cli import app
from tapeline.config import RunConfig
from tapeline.ledger import Ledger, account_of
from tapeline.report.run_page import run_page
from tapeline.report.seen import SeenRun
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


def report(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def headings_of(path):
    return re.findall(r"<h2>(.*?)</h2>", path.read_text())


def test_the_page_tells_the_account_and_escapes_what_comes_from_outside(trained):
    result = report(trained, "--price-per-hour", "2.5")
    assert result.exit_code == 0, result.output
    assert "useful" in result.stdout and "startup" in result.stdout
    page = (trained / "report.html").read_text()
    assert headings_of(trained / "report.html") == [
        "Where the time went",
        "Attempts",
        "Loss",
        "Against simple predictors",
        "Signals",
        "Where a step&#39;s time goes",
        "How long steps took",
        "Diagnosis",
        "Windows",
        "Settings",
        "All settings",
        "Code",
        "Data",
        "Environment",
        "Variables and packages",
    ]
    assert "&lt;script&gt;" in page
    assert "<script" not in page
    assert not re.search(r'(?:src|href)="(?!data:|#)', page)
    assert page.count('role="img" aria-label="') == 2 + 4  # bars and figures


def test_json_gives_the_same_figures_from_one_account(trained, tmp_path, monkeypatch):
    from tapeline import diagnosis

    def again(*_, **__):
        raise AssertionError("the account was computed twice")

    monkeypatch.setattr(diagnosis, "account_of", again)
    out = tmp_path / "page.html"
    result = report(trained, "--out", out, "--json")
    told = json.loads(result.stdout)
    job = told["account"]["job"]
    assert sum(job["buckets_ns"].values()) == job["wall_ns"]
    assert job["kept_steps"] == 12
    assert told["attempts"][0]["how"] == "finished"
    assert told["problems"] == []
    assert out.exists()


def test_what_cannot_be_read_is_left_out_and_told(trained, tmp_path):
    folder = Path(shutil.copytree(trained, tmp_path / "copy"))
    shutil.rmtree(folder / "ledger")
    result = report(folder)
    assert result.exit_code == 1
    assert result.stdout == ""
    told = (
        f"{folder}/ledger: expected a ledger, as `tapeline train` or `Ledger` writes it, found no "
        "ledger of any rank. Give the folder of a run that keeps one."
    )
    assert f"left out: {told}\n" in result.stderr
    headings = headings_of(folder / "report.html")
    assert "Where the time went" not in headings
    assert {"Attempts", "Loss", "Windows"} <= {*headings}
    assert "no ledger of any rank" in (folder / "report.html").read_text()


def test_a_folder_that_is_no_run_is_a_sentence(tmp_path):
    result = report(tmp_path)
    assert "expected the folder of a run, with run.json" in str(result.exception)


def test_a_timeline_tells_ranks_kills_downtime_saves_and_stalls(tmp_path):
    run = write_page_run(tmp_path / "run", ranks=8, lives=((0, 30), (20, 40)))
    seen = SeenRun.read(run)
    sections = {section.heading: section for section in run_page(seen).sections}
    attempts = sections["Attempts"]
    assert attempts.alt == "2 attempts of 8 ranks over time; killed: attempt 1."
    texts = [text.get_text() for text in attempts.figure.axes[0].get_legend().get_texts()]
    assert texts[-4:] == ["nobody ran", "checkpoint", "stalled", "killed"]
    assert attempts.table.texts()[0][:5] == ["1", "0", "–", "8", "killed"]
    assert "10 steps were done again" in sections["Loss"].text
    assert len(sections["How long steps took"].table.rows) == 8
    assert [row[3] for row in sections["Findings"].table.rows] == [30, 40]
    shares = [share for _, _, share in seen_row(seen).pieces]
    assert all(sum(share.values()) == pytest.approx(1) for share in shares)
    account = seen.account.ranks[0].times
    drawn_s = sum(
        (end - begin) * share.get("lost", 0) for begin, end, share in seen_row(seen).pieces
    )
    row = seen_row(seen)
    down_s = sum(end - begin for begin, end in (*row.unnoticed, *row.down))
    assert drawn_s + down_s == pytest.approx(account.buckets_ns["lost"] / 1e9)


def seen_row(seen):
    from tapeline.report.run_times import timeline_row

    return timeline_row(seen.account, seen.ledgers, seen.account.ranks[0])


@pytest.mark.parametrize(
    "options",
    [
        {"lives": ((0, 1),)},
        {"validates": False},
        {"ended": False},
        {"lives": tuple((first, first + 12) for first in range(0, 28, 2))},
        {"name": EVIL, "told": EVIL, "ranks": 20},
    ],
    ids=["one step", "no validation", "no end", "fourteen lives", "hostile, twenty ranks"],
)
def test_every_run_has_a_page(tmp_path, options):
    run = write_page_run(tmp_path / "run", **options)
    result = report(run)
    assert result.exit_code == 0, result.output
    page = (run / "report.html").read_text()
    assert "<script" not in page
    assert "nan" not in re.sub(r"<[^>]*>", "", page).lower().split()


def test_a_run_that_ended_before_its_first_step_has_a_page(tmp_path):
    run = write_page_run(tmp_path / "run")
    (run / "attempts.jsonl").unlink()
    shutil.rmtree(run / "ledger")
    shutil.rmtree(run / "metrics")
    result = report(run)
    assert result.exit_code == 1
    assert "it ended before its first step" in result.stderr
    assert "none yet" in (run / "report.html").read_text()


def test_losses_that_are_not_finite_are_told_and_leave_gaps(tmp_path):
    run = write_page_run(tmp_path / "run")
    path = run / "metrics" / "rank-0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if "losses" in line:
            line["losses"][3:5] = ["nan", "inf"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sections = {one.heading: one for one in run_page(SeenRun.read(run)).sections}
    assert "8 losses are not finite and leave gaps." in sections["Loss"].text


def test_a_plan_of_the_run_stands_beside_what_was_measured(tmp_path):
    run = write_page_run(tmp_path / "run")
    decision = {
        "at_step": 10,
        "num_steps": 10,
        "costs": {"blocking_s": 0.5, "write_s": 0.0, "slowdown": 0.0, "step_s": 0.5},
        "mtbf": {"low_s": 100.0, "middle_s": 1000.0, "high_s": None},
    }
    (run / "intervals.jsonl").write_text(json.dumps(decision) + "\n")
    sections = {one.heading: one for one in run_page(SeenRun.read(run)).sections}
    rows = {row[0]: row for row in sections["Planned against measured"].table.texts()}
    assert rows["checkpoint"][1] == "10 %"
    assert rows["useful"][1] == "–"


def test_runs_side_by_side_tell_what_changed(tmp_path):
    one = write_page_run(tmp_path / "one", ranks=2)
    two = write_page_run(tmp_path / "two", lives=((0, 30), (20, 40)), name=EVIL)
    result = report(one, two, "--json", "--price-per-hour", "2")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert list(told["runs"]) == ["one", "two"]
    assert {"ranks", "lives"} <= {change["what"] for change in told["diffs"][0]["changes"]}
    page = one / "comparison.html"
    assert headings_of(page) == [
        "What they came to",
        "Where the time went",
        "Losses",
        "What changed: two",
    ]
    assert "<script" not in page.read_text()
    assert "two: the same bits in all 40 steps" in page.read_text()
    printed = report(one, two).stdout
    assert "loss, mean of the last steps" in printed
    assert re.search(r"attempts +1 +2 ", printed)


def test_seeds_beside_the_first_run_make_a_band(tmp_path):
    folders = [write_page_run(tmp_path / f"seed-{seed}", seed=seed) for seed in range(4)]
    result = report(folders[0], folders[1])
    assert result.exit_code == 0, result.output
    page = (folders[0] / "comparison.html").read_text()
    assert "The band is what 2 other seeds of the first run do" in page


def test_runs_of_one_name_are_told_apart(tmp_path):
    for place in "ab":
        write_page_run(tmp_path / place / "run", lives=((0, 10),))
    told = json.loads(report(tmp_path / "a" / "run", tmp_path / "b" / "run", "--json").stdout)
    assert list(told["runs"]) == [str(tmp_path / place / "run") for place in "ab"]


def test_a_ledger_without_a_run_has_a_page(tmp_path):
    for steps in (range(1, 8), range(4, 10)):
        with Ledger(tmp_path, from_step=steps[0] - 1) as ledger:
            for step, _ in zip(steps, ledger.batches(steps), strict=True):
                ledger.step_done(step)
    result = report(tmp_path, "--price-per-hour", "2.5")
    assert result.exit_code == 0, result.output
    assert "useful" in result.stdout and "money" in result.stdout
    assert headings_of(tmp_path / "report.html") == [
        "Where the time went",
        "Attempts",
        "Where a step&#39;s time goes",
        "How long steps took",
    ]
    told = json.loads(report(tmp_path, "--json").stdout)
    assert told["account"] == account_of(tmp_path).as_dict()
    found = CliRunner().invoke(app, ["diagnose", str(tmp_path)])
    assert str(found.exception).endswith(
        "Give the folder that `tapeline train` made; of a ledger alone, `tapeline report`."
    )
