"""`tapeline plan`: what its verbs print, from which inputs, without torch, and what they refuse."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import pytest


@pytest.fixture
def plan(tapeline):
    """Run one verb of `tapeline plan`; returns exit code, output, errors."""
    return functools.partial(tapeline, "plan")


@pytest.fixture
def answer(plan):
    """The JSON document of one verb."""

    def run(*arguments: object) -> dict:
        code, out, err = plan(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return run


def test_checkpoint_by_default_is_the_scenario_of_the_books(answer):
    found = answer("checkpoint")
    assert found["inputs"]["mtbf_hours"] == {"value": 6.0, "source": "default", "detail": ""}
    expected = [(180, 2788.5, 0.162), (22.5, 985.9, 0.079), (2.25, 311.8, 0.048)]
    for one, (blocking_s, interval_s, overhead) in zip(
        found["model"]["strategies"], expected, strict=True
    ):
        assert one["blocking_s"] == pytest.approx(blocking_s)
        assert one["interval_s"] == pytest.approx(interval_s, abs=0.05)
        assert one["overhead"] == pytest.approx(overhead, abs=5e-4)
    assert found["model"]["best"] == "8 shards, asynchronous"


def test_checkpoint_prints_inputs_with_their_source_and_names_the_model(plan):
    code, out, err = plan("checkpoint", "--mtbf-hours", "12")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert ["mtbf_hours", "12", "given"] in rows
    assert ["checkpoint_seconds", "180", "default"] in rows
    assert "Model, first order (Young 1974)" in out


def test_checkpoint_draws_its_figure(plan, tmp_path):
    code, _, err = plan("checkpoint", "--plot", "interval")
    assert (code, err) == (0, "figure: interval.svg, interval.png\n")


def test_a_number_out_of_range_is_refused_in_the_words_of_the_command_line(plan):
    assert plan("checkpoint", "--mtbf-hours", "-1") == (
        2,
        "",
        "tapeline: --mtbf-hours: expected a number above 0 and finite, found -1. Correct it: mean "
        "hours between failures that end the job.\n",
    )


PLAIN_VERBS = ["checkpoint", "spot", "goodput", "accelerator", "memory", "throughput", "search"]


def test_no_plan_imports_torch(tmp_path):
    code = (
        "import sys\n"
        "from tapeline.cli import main\n"
        "for verb in sys.argv[1:]:\n"
        "    sys.argv = ['tapeline', 'plan', verb, '--plot', verb]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code, verb\n"
        "    assert 'torch' not in sys.modules, verb\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *PLAIN_VERBS],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    for verb in PLAIN_VERBS:
        assert (tmp_path / f"{verb}.png").stat().st_size > 10_000
        figure = (tmp_path / f"{verb}.svg").read_text()
        assert "mathdefault" not in figure  # an exponent on a log axis


def test_checkpoint_by_classes(plan, answer):
    classes = ("--class", "process:6:2", "--class", "node:72:60", "--restart-minutes", "0")
    found = answer("checkpoint", *classes)["model"]
    assert [tier["every"] for tier in found["tiers"]] == [1, 19]
    assert found["single_overhead"] == pytest.approx(0.0776, abs=5e-5)
    assert found["classes"][1] == {"name": "node", "mtbf_s": 72 * 3600.0, "save_s": 60.0}
    code, out, _ = plan("checkpoint", *classes)
    assert code == 0
    assert "2 tiers lose 3.48 % of the time besides restarts" in out
    assert plan("checkpoint", *classes, "--mtbf-hours", "6") == (
        2,
        "",
        "tapeline: --class: expected failure classes in place of one MTBF and one checkpoint, "
        "found an option that belongs to those. Leave out --mtbf-hours, --failures, "
        "--exposure-hours, --checkpoint-seconds, --shards, --async-fraction, --write-slowdown, "
        "--jobs and --plot.\n",
    )


def test_checkpoint_confirms_its_intervals_by_simulation(answer):
    for arguments, num in (((), 3), (("--class", "a:6:2", "--class", "b:72:60"), 2)):
        found = answer("checkpoint", "--simulate", "2000", *arguments)["model"]["simulated"]
        assert len(found) == num
        for one in found:
            error = one["simulated"]["standard_error"]
            assert 0 < error < 0.01
            assert abs(one["simulated"]["mean"] - one["model"]) < 3 * error + 0.005  # first order


def test_checkpoint_from_counted_failures_tells_the_range(plan):
    code, out, _ = plan("checkpoint", "--failures", "3", "--exposure-hours", "18")
    assert code == 0
    assert "The MTBF was counted: 4.90 h, with 95 % confidence above 2.32 h." in out
    code, _, err = plan("checkpoint", "--failures", "3")
    assert (code, err) == (
        2,
        "tapeline: --exposure-hours: expected a number, found none. Give it: hours under which "
        "they were counted.\n",
    )


def test_checkpoint_says_when_an_interval_is_longer_than_the_run(plan, answer):
    once = "the best interval, {} s or more, is longer than the run: checkpoint once, at its end."
    assert answer("checkpoint", "--useful-hours", "0.5")["notes"][1:] == [
        f"one writer, synchronous: {once.format('2,789')}"
    ]
    assert answer("checkpoint", "--useful-hours", "0.05")["notes"] == [
        "one writer, synchronous, 8 shards, synchronous, 8 shards, asynchronous: "
        + once.format(312)
    ]
    assert "checkpoint once" not in plan("checkpoint")[1]


def test_checkpoint_says_what_other_jobs_do_to_the_interval(answer):
    *_, note = answer("checkpoint", "--jobs", "20")["notes"]
    assert note == (
        "That holds for a job alone: 20 jobs that save at once, every 450 s, lose 7.0 % of their "
        "time; in turn, every 450 s, 5.0 % (8 shards, asynchronous)."
    )


def test_memory_takes_a_run_and_a_device(answer, run):
    found = answer("memory", "--from-run", "run", "--device", "l4")["inputs"]
    assert found["parameters"] == {
        "value": 56_897,
        "source": "measured",
        "detail": "run, its record",
    }
    assert (found["memory_gb"]["value"], found["memory_gb"]["source"]) == (24, "printed")


@pytest.fixture
def run(tmp_path):
    """A run folder with what plans read: a record, two lives and the saves' costs."""
    from tapeline.clock import SystemClock
    from tapeline.runs import RunFolder

    folder = RunFolder(tmp_path / "run", SystemClock())
    folder.create({"format": "tapeline run", "version": 1, "num_parameters": 56_897})
    lives = [
        {"attempt": 1, "started": "2026-01-01T00:00:00Z", "from_step": 0},
        {"attempt": 1, "how": "killed", "evidence": "no end was recorded"},
        {"attempt": 2, "started": "2026-01-01T10:00:00Z", "from_step": 100},
        {"attempt": 2, "ended": "2026-01-02T10:00:00Z", "how": "finished", "step": 9},
    ]
    folder.attempts_path.write_text("".join(json.dumps(line) + "\n" for line in lives))
    return folder


def test_numbers_of_a_run_are_measured_and_what_isnt_there_is_said(answer, run):
    found = answer("checkpoint", "--from-run", "run", "--restart-minutes", "1")["inputs"]
    assert found["failures"]["value"] == 1
    assert found["exposure_hours"] == {
        "value": 24.0,
        "source": "measured",
        "detail": "run, lives with a recorded end",
    }
    assert found["checkpoint_seconds"] == {
        "value": 180.0,
        "source": "default",
        "detail": "run: saves weren't timed (checkpoint.every isn't auto)",
    }
    assert found["restart_minutes"]["source"] == "given"
    run.attempts_path.write_text(run.attempts_path.read_text().replace("killed", "preempted"))
    found = answer("checkpoint", "--from-run", "run")["inputs"]
    assert found["mtbf_hours"] == {
        "value": 6.0,
        "source": "default",
        "detail": "run: no failure in 24 h, which is too little to tell",
    }
    costs = {"blocking_s": 1.0, "write_s": 4.0, "slowdown": 0.05, "step_s": 0.5}
    (run.path / "intervals.jsonl").write_text(json.dumps({"costs": costs}) + "\n")
    found = answer("checkpoint", "--from-run", "run")["inputs"]
    assert found["checkpoint_seconds"]["value"] == 5.0
    assert found["async_fraction"]["value"] == 0.2
    assert found["write_slowdown"]["value"] == 0.05


def test_a_folder_that_is_no_run_is_refused(plan):
    code, _, err = plan("checkpoint", "--from-run", "nowhere")
    assert code == 2
    assert err.startswith("tapeline: nowhere: expected the folder of a run, with run.json")


def test_spot_says_take_it_only_with_the_number_that_decides(plan, answer):
    found = answer("spot")["model"]
    assert found["take_spot"] is True
    way = found["ways"][2]
    assert way["spot"]["cost_per_useful_hour"] == pytest.approx(1 / way["spot"]["efficiency"])
    assert plan("spot")[1].splitlines()[-1] == (
        "Take spot (1.10 a useful hour against 2.63 on demand, 8 shards, asynchronous). It pays "
        "while interruptions are 0.138 h or more apart on average, or its price stays below 2.38."
    )
    assert plan("spot", "--spot-price-per-hour", "2.4")[1].splitlines()[-1] == (
        "Stay on demand (2.65 a useful hour against 2.63 on demand, 8 shards, asynchronous). Spot "
        "would pay once interruptions are 4.97 h or more apart on average, or its price stays "
        "below 2.38."
    )
    assert plan("spot", "--spot-price-per-hour", "3")[1].splitlines()[-1] == (
        "Stay on demand: spot is no cheaper by the hour (3.31 a useful hour against 2.63 on "
        "demand, 8 shards, asynchronous)."
    )


def test_accelerator_gives_no_percentage_of_an_unknown_device(plan, answer):
    code, out, _ = plan("accelerator", "--flops-per-step", "1e9", "--device", "cpu")
    assert code == 0
    assert out.splitlines()[-1] == "No share of the peak: cpu isn't in the table."
    assert "makes a step 1.44 × faster" in out
    found = answer("accelerator", "--flops-per-step", "1e9", "--device", "NVIDIA L4")["model"]
    assert found["peak_share"] == pytest.approx(1e9 / 1.91e-3 / 121e12)


def test_memory_against_a_device_names_the_data_sheet(plan, answer):
    found = answer("memory", "--device", "h200-sxm")
    assert found["inputs"]["memory_gb"] == {
        "value": 141.0,
        "source": "printed",
        "detail": "NVIDIA H200, NVIDIA H200 data sheet, 2024",
    }
    assert found["model"]["shard_over"] == 2
    code, out, _ = plan("memory", "--activation-gb", "90")
    assert code == 0
    assert out.splitlines()[-1].startswith("No sharding helps: activations and one layer alone")
    assert plan("memory", "--parameters", "1000")[1].splitlines()[-1].startswith("It fits on one")
    code, _, err = plan("memory", "--device", "toaster")
    assert code == 2
    assert err.endswith(", found toaster. Give --memory-gb in its place.\n")


def live(folder, clock, from_step, to_step):
    """One life of a run by a clock: a second of startup, then steps of 2 ms data, 8 ms compute."""
    from tapeline.ledger import Ledger

    with Ledger(folder.path, from_step=from_step, clock=clock) as ledger:
        clock.advance(1_000_000_000)
        for step in range(from_step + 1, to_step + 1):
            ledger.switch("data")
            clock.advance(2_000_000)
            ledger.switch("compute")
            clock.advance(8_000_000)
            ledger.step_done(step)
        with ledger.span("checkpoint"):
            clock.advance(1_000_000_000)


@pytest.fixture
def with_ledger(run):
    """That run with a ledger of two lives of 100 steps, 58 s apart."""
    from tapeline.clock import FakeClock

    clock = FakeClock(wall_ns=1_800_000_000_000_000_000)
    live(run, clock, 0, 100)
    clock.advance(58_000_000_000)
    live(run, clock, 100, 200)
    return run


def test_the_ledger_of_a_run_gives_steps_and_restarts(answer, with_ledger):
    found = answer("accelerator", "--from-run", "run")
    assert found["inputs"]["data_ms"] == {
        "value": pytest.approx(2.0),
        "source": "measured",
        "detail": "run, mean over 200 steps in the ledger",
    }
    assert found["inputs"]["compute_ms"]["value"] == pytest.approx(8.0)
    assert found["model"]["speedup"] == pytest.approx(10 / 6)
    found = answer("checkpoint", "--from-run", "run")
    assert found["inputs"]["restart_minutes"]["value"] == pytest.approx(59 / 60)


def test_compare_puts_a_plan_beside_the_account(plan, answer, with_ledger, tmp_path):
    (tmp_path / "plan.json").write_text(plan("goodput", "--json")[1])
    found = answer("compare", "run", "--plan", "plan.json")
    rows = {row["bucket"]: row for row in found["buckets"]}
    wall_s = 2 * (1 + 1 + 1) + 58
    assert found["planned_by"] == "plan.json, after"
    assert rows["useful"]["planned"] == pytest.approx(0.95, abs=5e-3)
    assert rows["useful"]["measured"] == pytest.approx(1.6 / wall_s)
    assert rows["starved"]["measured"] == pytest.approx(0.4 / wall_s)
    assert rows["checkpoint"]["measured"] == pytest.approx(2 / wall_s)
    assert rows["lost"]["hours"] == pytest.approx(59 / 3600)
    assert rows["startup"]["planned"] is None
    code, out, err = plan("compare", "run", "--plan", "plan.json", "--plot", "both")
    assert (code, err) == (0, "figure: both.svg, both.png\n")
    assert "planned (model)" in out
    assert "Planned: plan.json, after. Measured: the account of run" in " ".join(out.split())


def test_compare_takes_what_the_run_planned_itself(plan, answer, with_ledger):
    code, _, err = plan("compare", "run")
    assert (code, err) == (
        2,
        "tapeline: run: expected a plan, found none: the run chose no interval itself "
        "(checkpoint.every isn't auto). Give --plan, a file of what `tapeline plan goodput "
        "--json` printed.\n",
    )
    decision = {
        "at_step": 40,
        "num_steps": 200,
        "costs": {"blocking_s": 1.0, "write_s": 4.0, "slowdown": 0.25, "step_s": 0.1},
        "mtbf": {"low_s": 100.0, "middle_s": 1000.0, "high_s": None},
    }
    (with_ledger.path / "intervals.jsonl").write_text(json.dumps(decision) + "\n")
    rows = {row["bucket"]: row for row in answer("compare", "run")["buckets"]}
    assert rows["checkpoint"]["planned"] == pytest.approx(2 / 20)
    assert rows["lost"]["planned"] == pytest.approx((10 + 4) / 1000)
    assert rows["useful"]["planned"] is None


def test_compare_refuses_a_file_that_is_no_plan(plan, with_ledger, tmp_path):
    (tmp_path / "plan.json").write_text(plan("spot", "--json")[1])
    assert plan("compare", "run", "--plan", "plan.json")[2] == (
        "tapeline: plan.json: expected what `tapeline plan goodput --json` prints, found something "
        "else. Write it anew with that command.\n"
    )


def test_goodput_says_what_tuning_is_worth(plan):
    code, out, _ = plan("goodput")
    assert code == 0
    assert out.splitlines()[-1] == (
        "8 shards, asynchronous, the tuned loader: goodput 95 %, 353 h, 56,519: 201 h and 32,212 "
        "less."
    )
    worse = plan("goodput", "--tuned-loader-samples-per-second", "1000")[1]
    assert worse.splitlines()[-1].endswith("more.")


OWN_VERBS = [*PLAIN_VERBS, "compare", "scaling", "stop"]


@pytest.mark.parametrize("verb", OWN_VERBS)
def test_every_verb_shows_an_example(plan, verb):
    code, out, _ = plan(verb, "--help")
    assert code == 0
    assert f"Example: tapeline plan {verb}" in " ".join(out.split())


def test_an_mtbf_that_the_run_was_told_is_taken(answer, tmp_path):
    from tapeline.clock import SystemClock
    from tapeline.runs import RunFolder

    config = {"checkpoint": {"mtbf_hours": 2.5}}
    RunFolder(tmp_path / "told", SystemClock()).create(
        {"format": "tapeline run", "version": 1, "config": config}
    )
    found = answer("checkpoint", "--from-run", "told")
    assert found["inputs"]["mtbf_hours"] == {
        "value": 2.5,
        "source": "stated",
        "detail": "told, its configuration",
    }
