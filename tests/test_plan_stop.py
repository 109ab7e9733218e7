"""Kill criteria: bands that stop good runs as rarely as they say, and a judge without memory."""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
import tomllib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeline.clock import SystemClock
from tapeline.errors import TapelineError
from tapeline.plan.job import Job
from tapeline.plan.stop import (
    Criteria,
    Look,
    Rules,
    judge,
    plan_stop,
    trailing_mean,
)
from tapeline.quantiles import student_below
from tapeline.runs import MetricsJournal, RunFolder

JOB = Job(100.0, 8, 2.0)
RULES = Rules(num_looks=9, window=10, patience=2, false_stops=0.05)
STEPS = 200


def curve(generator: np.random.Generator, offset: float = 0.0) -> dict[int, float]:
    """A falling loss with batch noise, and a level and a pace of its own as seeds have."""
    level, pace = 0.002 * generator.standard_normal(), 0.01 * generator.standard_normal()
    steps = np.arange(1, STEPS + 1)
    losses = 0.05 + offset + level + 0.05 * steps ** -(0.4 + pace)
    noisy = losses + 0.002 * generator.standard_normal(STEPS)
    return dict(zip(steps.tolist(), noisy.tolist(), strict=True))


def references(num: int, seed: int = 1) -> dict[str, dict[int, float]]:
    generator = np.random.default_rng(seed)
    return {f"run-{n}": curve(generator) for n in range(num)}


def test_the_band_is_the_upper_end_for_one_more_run():
    runs = references(5)
    plan = plan_stop(runs, STEPS, RULES, None, JOB)
    assert [row.step for row in plan.band] == [20 * n for n in range(1, 10)]
    alpha = 2 * 0.05 / 9
    assert plan.chance_outside == alpha
    for row in plan.band:
        means = [trailing_mean(losses, row.step, 10) for losses in runs.values()]
        assert row.mean == pytest.approx(np.mean(means))
        assert row.sd == pytest.approx(np.std(means, ddof=1))
        t = (row.most - row.mean) / (row.sd * math.sqrt(1 + 1 / 5))
        assert student_below(t, 4) == pytest.approx(1 - alpha, abs=1e-9)
        assert row.left == pytest.approx(1 - row.step / STEPS)
        assert row.saved == pytest.approx(row.left * 1600)
    assert plan.criteria.looks == tuple(Look(row.step, row.most) for row in plan.band)


def test_runs_like_the_references_are_stopped_no_more_often_than_stated():
    generator = np.random.default_rng(7)
    stopped = 0
    for _ in range(300):
        runs = {str(n): curve(generator) for n in range(5)}
        criteria = plan_stop(runs, STEPS, RULES, None, JOB).criteria
        stopped += judge(criteria, curve(generator), STEPS) is not None
    assert stopped <= 15 + 3 * math.sqrt(15)  # 5 % of 300, and three standard errors


def test_a_run_that_goes_wrong_is_stopped():
    criteria = plan_stop(references(8), STEPS, RULES, None, JOB).criteria
    bad = curve(np.random.default_rng(9), offset=0.03)
    found = judge(criteria, bad, STEPS)
    assert found is not None
    assert found.step == 40
    assert found.why.startswith("above the references' band at 2 looks in a row: at step 40 the ")


def test_more_references_make_a_narrower_band():
    few, many = (plan_stop(references(n), STEPS, RULES, None, JOB).band for n in (3, 30))
    assert np.mean([row.most - row.mean for row in many]) < 0.5 * np.mean(
        [row.most - row.mean for row in few]
    )


FLAT = dict.fromkeys(range(1, 101), 1.0)


def test_a_target_is_missed_or_met():
    criteria = Criteria(window=5, patience=2, target=Look(50, 0.9))
    assert judge(criteria, FLAT, 49) is None
    found = judge(criteria, FLAT, 50)
    assert (found.step, found.why) == (
        50,
        "target missed: at step 50 the mean loss of 5 steps is 1, not 0.9",
    )
    better = FLAT | dict.fromkeys(range(46, 51), 0.9)
    assert judge(criteria, better, 100) is None


def test_patience_is_of_looks_in_a_row():
    looks = tuple(Look(step, 0.5) for step in (10, 20, 30, 40))
    criteria = Criteria(window=1, patience=2, looks=looks)
    assert judge(criteria, FLAT | {20: 0.5, 40: 0.5}, 100) is None
    assert judge(criteria, FLAT | {20: 0.5}, 100).step == 40
    assert judge(criteria, FLAT, 19) is None
    assert judge(criteria, FLAT, 20).step == 20


def test_a_loss_that_is_no_number_is_above_and_one_that_is_lost_says_nothing():
    looks = tuple(Look(step, 2.0) for step in (10, 20, 30))
    criteria = Criteria(window=2, patience=2, looks=looks, target=Look(40, 2.0))
    assert judge(criteria, FLAT | {9: math.nan, 19: math.inf}, 100).step == 20
    assert judge(criteria, FLAT | {40: math.nan}, 100).step == 40
    gone = {step: loss for step, loss in FLAT.items() if step not in (19, 20)}
    assert judge(criteria, gone | {10: math.nan, 30: math.nan}, 100).step == 30


@given(
    st.dictionaries(st.integers(1, 60), st.floats(allow_nan=True), max_size=60),
    st.lists(st.tuples(st.integers(1, 60), st.floats(-5, 5)), max_size=6, unique_by=lambda p: p[0]),
    st.integers(1, 10),
    st.integers(1, 3),
)
def test_the_judge_says_the_same_however_often_it_is_asked(losses, looks, window, patience):
    looks = tuple(Look(*pair) for pair in sorted(looks))
    criteria = Criteria(window, patience, looks[1:], looks[0] if looks else None)
    final = judge(criteria, losses, 60)
    for step in range(1, 61):
        seen = {one: loss for one, loss in losses.items() if one <= step}
        now = judge(criteria, seen, step)
        assert now == (final if final and final.step <= step else None)
        if final and final.step == step:
            assert criteria.is_due(step)


def test_the_chance_to_miss_a_target_is_that_of_the_references():
    runs = references(6)
    means = sorted(trailing_mean(losses, 60, 10) for losses in runs.values())
    plan = plan_stop(runs, STEPS, RULES, Look(60, float(np.mean(means))), JOB)
    assert plan.target.chance_missed == pytest.approx(0.5)
    assert plan.target.num_missed == sum(mean > np.mean(means) for mean in means)
    easy = plan_stop(runs, STEPS, RULES, Look(60, means[-1] + 1), JOB).target
    assert (easy.num_missed, easy.num_references) == (0, 6)
    assert easy.chance_missed < 1e-6
    alone = plan_stop({}, STEPS, RULES, Look(60, 0.05), JOB)
    assert alone.target.chance_missed is None
    assert alone.target.saved == pytest.approx(0.7 * 1600)
    assert alone.band == ()


@pytest.mark.parametrize(
    ("runs", "steps", "rules", "target", "told"),
    [
        (
            references(2),
            STEPS,
            RULES,
            None,
            "--reference: expected 3 runs or more, found 2. Train the reference with more seeds: "
            "fewer don't tell how far seeds stray.",
        ),
        (
            dict.fromkeys("abc", FLAT),
            100,
            Rules(9, 5, 2, 0.05),
            None,
            "--reference: expected runs that differ, by their seeds, found the same loss in all at "
            "step 10. Give runs of different seeds: these don't tell how far seeds stray.",
        ),
        (
            references(3),
            STEPS,
            Rules(9, 21, 2, 0.05),
            None,
            "--window 21: expected no more than the 20 steps up to the first look, found more. "
            "Lower it or --looks.",
        ),
        (
            references(3),
            1000,
            RULES,
            None,
            "run-0, step 300: expected losses that are numbers in the 10 steps up to it, found "
            "none. Give references that ran so far and didn't diverge, or lower --steps.",
        ),
        (
            references(3) | {"bad": FLAT | {15: math.nan}},
            STEPS,
            RULES,
            None,
            "bad, step 20: expected losses that are numbers in the 10 steps up to it, found nan. "
            "Give references that ran so far and didn't diverge, or lower --steps.",
        ),
        (
            {},
            STEPS,
            RULES,
            Look(200, 0.1),
            "--by-step 200: expected a step before the last, 200, found one that saves nothing. "
            "Lower it, or raise --steps.",
        ),
    ],
)
def test_what_tells_nothing_is_refused(runs, steps, rules, target, told):
    with pytest.raises(TapelineError) as error:
        plan_stop(runs, steps, rules, target, JOB)
    assert str(error.value) == told


@pytest.fixture
def printed(tapeline):
    """What the verb returns: exit code, standard output and error."""
    return functools.partial(tapeline, "plan", "stop")


@pytest.fixture
def runs(tmp_path):
    """Folders of three runs with losses in their journals."""
    for name, losses in references(3).items():
        run = RunFolder(tmp_path / name, SystemClock())
        run.create({"format": "tapeline run", "version": 1})
        with MetricsJournal(run.metrics_path(0), attempt=1) as journal:
            journal.losses(STEPS, list(losses.values()))
    return tmp_path


def test_the_verb_reads_runs_and_prints_a_section(runs, printed):
    given_runs = [part for n in range(3) for part in ("--reference", f"run-{n}")]
    target = ("--target-loss", "0.08", "--by-step", "100", "--window", "10")
    code, out, err = printed(*given_runs, *target, "--plot", "band")
    assert (code, err) == (0, "figure: band.svg, band.png\n")
    section = tomllib.loads(out[out.index("[stop]") :])["stop"]
    plan = plan_stop(references(3), STEPS, RULES, Look(100, 0.08), JOB)
    assert section["window"] == 10
    assert section["patience"] == 2
    assert section["target"] == [100, 0.08]
    for (step, most), look in zip(section["looks"], plan.criteria.looks, strict=True):
        assert step == look.step
        assert most == pytest.approx(look.most, rel=1e-8)
    found = json.loads(printed(*given_runs, "--window", "10", "--json")[1])
    assert found["inputs"]["steps"]["value"] == STEPS
    assert found["model"]["references"] == ["run-0", "run-1", "run-2"]
    assert found["model"]["target"] is None
    assert tomllib.loads(found["model"]["section"])["stop"]["looks"] == section["looks"]


def test_the_verb_says_that_a_target_alone_is_unproven(tmp_path, printed):
    target = ("--target-loss", "-0.5", "--by-step", "400", "--steps", "1000")
    code, out, _ = printed(*target)
    assert code == 0
    assert "Without references nothing says how many good runs miss the target" in out
    assert out.endswith("target = [400, -0.5]\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            (),
            "--reference: expected reference runs, or --target-loss and --by-step, found neither. "
            "Give three runs or more, or a loss to reach by a step.",
        ),
        (
            ("--target-loss", "1"),
            "--target-loss and --by-step: expected both, found one of them. Give the other too.",
        ),
        (
            ("--target-loss", "1", "--by-step", "5"),
            "--steps: expected a number, found none. Give it: steps of the whole run.",
        ),
        (
            ("--target-loss", "1e9", "--by-step", "5", "--steps", "10"),
            "--target-loss: expected a number -1e+06 or more, 1e+06 at most, found 1e+09. Correct "
            "it: a loss that the run must have reached.",
        ),
        (
            ("--target-loss", "1", "--by-step", "5", "--steps", "10", "--plot", "x"),
            "--plot: expected references to draw, found none. Give --reference, or leave it out.",
        ),
    ],
)
def test_what_is_missing_is_told(tmp_path, arguments, told, printed):
    assert printed(*arguments) == (2, "", f"tapeline: {told}\n")


def test_a_run_without_losses_is_refused(tmp_path, printed):
    run = RunFolder(tmp_path / "empty", SystemClock())
    run.create({"format": "tapeline run", "version": 1})
    code, _, err = printed("--reference", "empty")
    assert (code, err) == (
        2,
        "tapeline: empty: expected a run with losses in its journal, found none. Give one that "
        "has done some steps.\n",
    )


def test_the_verb_imports_no_torch(runs):
    code = (
        "import sys\n"
        "from tapeline.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    asked = ["plan", "stop", *(part for n in range(3) for part in ("--reference", f"run-{n}"))]
    command = [sys.executable, "-c", code, *asked, "--window", "10"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=runs)
    assert (done.returncode, done.stderr) == (0, "")
