"""Precisions and batches held against seed noise: what is the same, what isn't, what broke off."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tapeline.cli import app
from tapeline.config import RunConfig
from tapeline.errors import ConfigError, RunError
from tapeline.prove import BatchRow, BatchSweep, compare_precision, sweep_batch
from tapeline.prove.precision import judge
from tapeline.prove.variants import Variant
from tapeline.report.seed_figures import seed_band_figure
from tapeline.runs.spread import compare
from tapeline.store import write_shards
from tapeline.tape import synthetic_sessions

MODELS = '''
import torch
from torch import nn

class Shifted(nn.Module):
    """Computes something else in a lower precision."""
    def forward(self, x):
        return x if x.dtype == torch.float32 else x + 100

class Overflow(nn.Module):
    """Finite in float32 alone."""
    def forward(self, x):
        return x if x.dtype == torch.float32 else x * float("inf")

def net(num_inputs, part="Identity"):
    kind = globals().get(part) or getattr(nn, part)
    return nn.Sequential(nn.Linear(num_inputs, 8), nn.ReLU(), nn.Linear(8, 1), kind())
'''
CONFIG = """
name = "tiny"
seed = 5
[data]
store = "store"
[model]
factory = "trial_models:net"
[training]
steps = 20
batch = 16
learning_rate = 0.003
[validation]
fraction = 0.5
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trials")
    write_shards(synthetic_sessions(2, rows=500), folder / "store", "mmap")
    (folder / "trial_models.py").write_text(MODELS)
    (folder / "tiny.toml").write_text(CONFIG)
    return folder


def tapeline(workplace, *words, sets=()):
    settings = [word for setting in sets for word in ("--set", setting)]
    verb, *rest = words
    return CliRunner().invoke(
        app, [verb, str(workplace / "tiny.toml"), *map(str, rest), *settings, "--json"]
    )


def replicas(*curves, steps=None, failures=None):
    length = len(curves[0])
    return Variant(
        steps or tuple(range(10, 10 * length + 1, 10)), dict(enumerate(curves)), failures or {}
    )


# Precision


def test_bfloat16_that_costs_nothing_is_the_same(workplace):
    out = workplace / "same"
    done = tapeline(workplace, "compare-precision", "--seeds", 3, "--out", out)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["same"] is True
    assert found["outside"] == []
    assert found["runs"]["float32"]["evaluated_at"] == list(range(2, 21, 2))
    curves = {name: runs["curves"] for name, runs in found["runs"].items()}
    assert curves["float32"].keys() == curves["bfloat16"].keys() == {"5", "6", "7"}
    assert curves["float32"] != curves["bfloat16"]
    assert found["last"]["how"] == "paired"
    assert found["sentence"].startswith("Same within the seed band (±")
    for kind in ("svg", "png"):
        assert (out / f"precision.{kind}").stat().st_size > 5000
    record = json.loads((out / "bfloat16-seed-6" / "run.json").read_text())
    assert record["config"]["training"]["precision"] == "bfloat16"
    assert record["config"]["seed"] == 6


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ("Shifted", "Not the same: bfloat16 leaves the seed band (±"),
        ("Overflow", "Not the same: bfloat16 broke off with 3 of 3 seeds: step 1: expected a "),
    ],
)
def test_bfloat16_that_ruins_a_model_is_told(workplace, part, told):
    sets = (f'model.arguments={{part = "{part}"}}', "training.steps=10")
    done = tapeline(
        workplace, "compare-precision", "--seeds", 3, "--out", workplace / part, sets=sets
    )
    assert done.exit_code == 1, done.output
    found = json.loads(done.stdout)
    assert found["same"] is False
    assert found["sentence"].startswith(told)
    assert found["outside"][-1] == 10
    if part == "Overflow":
        assert found["runs"]["bfloat16"]["curves"]["5"][-1] is None
        assert found["runs"]["bfloat16"]["failures"].keys() == {"5", "6", "7"}
    assert (workplace / part / "precision.svg").exists()


# With 3 seeds of sd 1 around 10, t(0.975, 2) · √(1 + 1/3) = 4.968 is the band's half width.
NOISE = (9.0, 10.0, 11.0)


@pytest.mark.parametrize(("shift", "same"), [(0.0, True), (4.9, True), (5.0, False), (-5.0, False)])
def test_the_band_is_where_the_next_seed_would_fall(shift, same):
    reference = replicas(*([v, v] for v in NOISE))
    other = replicas(*([v, v + shift] for v in NOISE))
    found = judge("bfloat16", reference, other)
    assert found.same is same
    assert found.outside == (() if same else (20,))
    low, high = found.limits()[1]
    assert (low, high) == pytest.approx((10 - 4.968, 10 + 4.968), abs=1e-3)
    assert found.last is not None
    assert found.last.difference == pytest.approx(shift)


@given(
    curves=st.lists(st.lists(st.floats(0.1, 10), min_size=3, max_size=3), min_size=2, max_size=6)
)
def test_a_run_against_itself_is_the_same(curves):
    assert judge("bfloat16", replicas(*curves), replicas(*curves)).same


def test_a_reference_that_breaks_off_cannot_judge():
    broken = replicas([1.0, math.inf], [1.0, math.inf], [1.0, 1.0])
    with pytest.raises(RunError, match="two runs or more with a finite figure, found 1 of 3"):
        judge("bfloat16", broken, replicas([1.0, 1.0]))


def test_a_curve_that_breaks_off_can_be_drawn():
    curves = {"float32": [[1.0, 2.0], [2.0, 3.0]], "bfloat16": [[1.0, math.inf]]}
    figure = seed_band_figure((10, 20), curves, [(0.0, 3.0), (1.0, 4.0)], "note")
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert labels == ["seed band of float32", "float32, mean of seeds", "bfloat16, mean of seeds"]


# Batches


def test_larger_batches_are_trained_at_equal_samples_and_equal_steps(workplace):
    out = workplace / "batches"
    done = tapeline(
        workplace,
        *("sweep-batch", "--factors", "2", "--seeds", 3, "--lr-rescale", "sqrt", "--out", out),
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["base"]["batch"], found["base"]["steps"]) == (16, 20)
    rows = [(row["batch"], row["effort"], row["steps"]) for row in found["rows"]]
    assert rows == [(32, "equal samples", 10), (32, "equal steps", 20)]
    assert all(row["against"]["confidence"] == pytest.approx(0.975) for row in found["rows"])
    assert [sentence.split(":")[0] for sentence in found["sentences"]] == [
        "equal samples",
        "equal steps",
    ]
    for kind in ("svg", "png"):
        assert (out / f"batch.{kind}").stat().st_size > 5000
    run = out / "batch-32,-equal-samples-seed-5" / "run.json"
    training = json.loads(run.read_text())["config"]["training"]
    wanted = {"batch": 32, "steps": 10, "lr_rescale": "sqrt", "base_batch": 16, "warmup_steps": 1}
    assert {name: training[name] for name in wanted} == wanted


def sweep(base, larger, failures=None):
    before = replicas(*([value] for value in base))
    after = replicas(*([value] for value in larger), failures=failures)
    against = None if failures else compare(before.best(), after.best())
    rows = [BatchRow(32, 10, "equal samples", after, against)]
    rows.append(BatchRow(32, 20, "equal steps", after, against))
    return BatchSweep(before, 16, 20, tuple(rows), "none")


@pytest.mark.parametrize(
    ("larger", "verdict", "sentence"),
    [
        (
            (0.91, 0.92, 0.87),
            "better",
            "equal steps: batch 32 improves the validation error by 10.0 % over 16, at 2 × the "
            "compute.",
        ),
        (
            (1.11, 1.12, 1.07),
            "worse",
            "equal steps: no larger batch is seen to improve the model over 16.",
        ),
        (
            (0.91, 1.12, 0.94),
            "no difference seen",
            "equal steps: no larger batch is seen to improve the model over 16; 764 seeds would "
            "tell whether the 1.0 % of batch 32 are real.",
        ),
    ],
)
def test_what_seeds_say_of_a_batch(larger, verdict, sentence):
    found = sweep((1.0, 1.02, 0.98), larger)
    assert {row.verdict for row in found.rows} == {verdict}
    assert found.sentences()[1] == sentence


def test_a_batch_that_breaks_off_is_no_candidate():
    found = sweep((1.0, 1.1), (0.1, math.inf), {1: "step 3"})
    assert {row.verdict for row in found.rows} == {"broke off"}
    assert found.sentences()[0].endswith("no larger batch is seen to improve the model over 16.")
    assert found.as_dict()["rows"][0]["curves"] == {"0": [0.1], "1": [None]}


def test_the_lowest_error_of_a_run_counts():
    found = replicas([3.0, 1.0, 2.0], [2.0, 4.0, math.inf])
    assert found.best() == {0: 1.0, 1: 2.0}
    assert found.at(-1) == {0: 2.0, 1: math.inf}


# What is refused


def test_trials_that_cannot_be_judged_are_refused(workplace):
    def config(*overrides):
        return RunConfig.load(workplace / "tiny.toml", overrides)

    out = workplace / "refused"

    def swept(*overrides, factors=(2,), **options):
        sweep_batch(config(*overrides), factors, 2, out, print, **options)

    with pytest.raises(ConfigError) as caught:
        compare_precision(config("validation.fraction=0.0"), "bfloat16", 2, out, print)
    assert str(caught.value) == (
        "validation.fraction: expected a share of the data to judge by, found 0. Set "
        "validation.fraction, such as 0.2."
    )
    with pytest.raises(ConfigError) as caught:
        swept(factors=(2, 16))
    assert str(caught.value) == (
        "training.steps: expected at least 32, two with the largest batch, found 20. Train more "
        "steps, or sweep smaller batches."
    )
    own = ("training.lr_rescale=sqrt", "training.base_batch=8", "training.warmup_steps=2")
    with pytest.raises(ConfigError, match="none, where the sweep rescales the learning rate"):
        swept(*own, lr_rescale="linear")
    (workplace / "mine").mkdir()
    (workplace / "mine" / "precious").touch()
    with pytest.raises(RunError, match=r"expected a new folder, or that of an earlier trial"):
        compare_precision(config(), "bfloat16", 2, workplace / "mine", print)
    assert (workplace / "mine" / "precious").exists()


def test_a_model_that_cannot_begin_is_no_finding(workplace):
    settings = RunConfig.load(workplace / "tiny.toml", ["model.arguments={part = 'Flatten2'}"])
    with pytest.raises(ConfigError, match=r"model\.factory = trial_models:net"):
        compare_precision(settings, "bfloat16", 2, workplace / "nothing", print)


@pytest.mark.parametrize("factors", ["1,2", "x", "0"])
def test_factors_that_are_none_are_refused(workplace, factors):
    done = tapeline(workplace, "sweep-batch", "--factors", factors)
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith("--factors: expected ")
