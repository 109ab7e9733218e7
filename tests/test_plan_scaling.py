"""Scaling laws: published numbers, laws that are known, bands that hold, and what is refused."""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeline.errors import TapelineError
from tapeline.plan.scaling import PUBLISHED, Proxy, allocate, parse_proxy
from tapeline.plan.scaling_fit import fit_law, plan_scaling

SIZES = (1.0, 2.0, 3.0, 5.0, 7.0, 10.0)


def law(hours: float) -> float:
    return 0.05 + 0.02 * hours**-0.4


def plan_of(losses, full: float = 100.0, sizes=SIZES, max_ratio: float = 10.0):
    proxies = [Proxy(size, float(loss)) for size, loss in zip(sizes, losses, strict=True)]
    return plan_scaling(proxies, full, max_ratio=max_ratio, price_per_hour=2.5)


@pytest.mark.parametrize(
    ("published", "parameters", "ratio"),
    [(PUBLISHED[0], 32.2e9, 92.6), (PUBLISHED[1], 72.2e9, 18.4)],
)
def test_the_published_laws_split_a_compute_as_published(published, parameters, ratio):
    found = allocate(5.76e23, published)
    assert found.parameters == pytest.approx(parameters, rel=2e-3)
    assert found.tokens_per_parameter == pytest.approx(ratio, rel=1e-3)
    assert 6 * found.parameters * found.tokens == pytest.approx(5.76e23)
    n, d = found.parameters, found.tokens
    for factor in (0.9, 1.1):  # no other split of that compute is better
        other = published.floor + published.a_factor / (n * factor) ** published.a_power
        other += published.b_factor / (d / factor) ** published.b_power
        assert other > found.loss


def test_a_law_that_is_known_is_found_again():
    fit = fit_law(np.array(SIZES), np.array([law(size) for size in SIZES]))
    assert fit.floor == pytest.approx(0.05, abs=1e-4)
    assert fit.power == pytest.approx(0.4, rel=0.01)
    assert fit.residual < 1e-5
    plan = plan_of([law(size) for size in SIZES])
    assert plan.full.loss == pytest.approx(law(100.0), abs=1e-5)
    assert plan.full.gain == pytest.approx(law(10.0) - law(100.0), rel=1e-3)
    assert plan.gain_is_told
    assert plan.full.cost == 250.0
    assert [one.gpu_hours for one in plan.reaches] == [10, 20, 40, 80, 100]


def test_a_band_holds_the_next_run_about_as_often_as_it_says():
    generator = np.random.default_rng(1)
    held = 0
    for _ in range(60):
        losses = [law(size) + 2e-4 * generator.standard_normal() for size in SIZES]
        full = plan_of(losses).full
        held += full.low <= law(100.0) + 2e-4 * generator.standard_normal() <= full.high
    assert held >= 51  # of 60; nominally 57, and 51 has a chance below 1 % at 95 %


def test_a_noisy_gain_is_not_told():
    generator = np.random.default_rng(2)
    losses = [law(size) + 0.003 * generator.standard_normal() for size in SIZES]
    plan = plan_of(losses)
    assert not plan.gain_is_told
    assert plan.full.gain_low < 0 or abs(plan.left_out.error) >= plan.full.gain


def test_the_largest_size_is_left_out_with_all_its_seeds():
    sizes = (*SIZES, 10.0)
    losses = [*(law(size) for size in SIZES), law(10.0) + 0.001]
    left = plan_of(losses, sizes=sizes).left_out
    assert left.ratio == pytest.approx(10 / 7)
    assert left.actual == pytest.approx(law(10.0) + 0.0005)
    assert left.predicted == pytest.approx(law(10.0), abs=1e-5)
    assert left.error == pytest.approx(0.0005, abs=1e-5)


def test_bands_widen_away_from_what_was_measured():
    generator = np.random.default_rng(3)
    plan = plan_of([law(size) + 1e-4 * generator.standard_normal() for size in SIZES])
    widths = [one.high - one.low for one in plan.reaches]
    assert widths == sorted(widths)
    assert all(one.low <= one.loss <= one.high for one in plan.reaches)


@pytest.mark.parametrize(
    ("sizes", "losses", "full", "told"),
    [
        (
            (1.0, 2.0, 3.0, 3.0, 4.0),
            (5.0, 4.0, 3.0, 3.1, 2.0),
            10.0,
            "--proxy: expected proxies of 5 sizes or more, found 4. Run more, from 1 to 10 % of "
            "the full run's compute.",
        ),
        (
            SIZES,
            tuple(law(size) for size in SIZES),
            101.0,
            "--full-gpu-hours 101: expected 10 times the largest proxy's 10 at most, found 10.1 "
            "times. Run a proxy of 10.1 GPU-hours or more, or raise --max-ratio, knowing that "
            "nothing there was measured.",
        ),
        (
            SIZES,
            tuple(law(size) for size in SIZES),
            5.0,
            "--full-gpu-hours 5: expected no less than the largest proxy's 10, found less. Give "
            "the hours of the run that the proxies stand for.",
        ),
        (
            SIZES,
            (1.0, 1.1, 1.2, 1.3, 1.4, 1.5),
            100.0,
            "--proxy: expected losses that fall with compute, found none that do. Look at the "
            "proxies first: a law would only hide that larger ones are no better.",
        ),
    ],
)
def test_what_the_proxies_cannot_tell_is_refused(sizes, losses, full, told):
    with pytest.raises(TapelineError) as error:
        plan_of(losses, full, sizes)
    assert str(error.value) == told


@pytest.mark.parametrize("text", ["", "3", "3:", ":3", "0:1", "-1:1", "nan:1", "1:inf", "a:b"])
def test_a_proxy_that_is_none_is_refused(text):
    with pytest.raises(TapelineError) as error:
        parse_proxy(text)
    assert str(error.value) == (
        f"--proxy {text}: expected GPU_HOURS:LOSS, hours above 0 and a loss within a million of "
        "0, found something else. Give what one proxy took and reached, such as 3.5:0.0527."
    )
    assert parse_proxy("3.5:-1e-3") == Proxy(3.5, -1e-3)


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 100), min_size=5, max_size=12, unique=True),
    st.floats(0.01, 1e6),
    st.floats(-1e3, 1e3),
    st.floats(1e-3, 1e3),
    st.floats(0.05, 2.5),
    st.floats(1, 10),
)
def test_any_plan_of_a_falling_law_is_whole(parts, unit, floor, above, power, ratio):
    sizes = [part * unit for part in parts]
    losses = [floor + above * (part / max(parts)) ** -power for part in parts]
    plan = plan_of(losses, max(sizes) * ratio, sizes, max_ratio=11.0)
    for one in plan.reaches:
        assert all(math.isfinite(number) for number in astuple(one))
        assert one.low <= one.loss <= one.high
        assert one.gain >= 0
        assert one.cost == pytest.approx(one.gpu_hours * 2.5)
    assert plan.fit.residual >= 0


@pytest.fixture
def printed(tapeline):
    """What the verb returns: exit code, standard output and error."""
    return functools.partial(tapeline, "plan", "scaling")


GIVEN = [part for size in SIZES for part in ("--proxy", f"{size}:{law(size):.6f}")]


def test_the_verb_says_what_the_full_run_must_be_worth(tmp_path, printed):
    plot = tmp_path / "law"
    code, out, err = printed("--full-gpu-hours", "100", *GIVEN, "--plot", str(plot))
    assert (code, err) == (0, f"figure: {plot}.svg, {plot}.png\n")
    text = " ".join(out.split())
    assert "The full run would lower the loss by 0.0048" in text
    assert "for 250: it pays if that is worth 250 or more" in text
    assert plot.with_suffix(".svg").stat().st_size > 1000


def test_the_verb_in_json(printed):
    code, out, _ = printed("--full-gpu-hours", "50", *GIVEN, "--flops", "5.76e23", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["model"]["reaches"][-1]["gpu_hours"] == 50
    assert found["model"]["proxies"][0] == {"gpu_hours": 1.0, "loss": 0.07}
    assert len(found["model"]["published"]) == 2
    assert found["inputs"]["max_ratio"]["source"] == "default"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            (),
            "tapeline: --proxy: expected proxies, or --flops for the published laws, found "
            "neither. Give five proxies or more, such as --proxy 3.5:0.0527.\n",
        ),
        (
            GIVEN,
            "tapeline: --full-gpu-hours: expected a number, found none. Give it: what the full run "
            "takes, in GPU-hours.\n",
        ),
        (
            ("--flops", "5.76e23", "--plot", "x"),
            "tapeline: --plot: expected proxies to draw, found none. Give --proxy, or leave it "
            "out.\n",
        ),
    ],
)
def test_what_is_missing_is_told(arguments, told, printed):
    assert printed(*arguments) == (2, "", told)


def test_the_verb_imports_no_torch():
    code = (
        "import sys\n"
        "from tapeline.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-c", code, "plan", "scaling", "--full-gpu-hours", "50", *GIVEN]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
