"""Watchers: what is planted in a run's metrics is seen where it is, a healthy run has nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeline.clock import FakeClock
from tapeline.errors import ConfigError
from tapeline.signals import WATCHERS, Action, Series, Snapshot, Watch, examine

SEEDS = range(20)
STEPS, EVERY = 1000, 10  # steps, and steps between two readings of what is read at intervals
EVERY_STEP = ("loss", "grad_norm")


def rate(step: int) -> float:
    """A schedule: warm-up, then a cosine."""
    return 1e-3 * min(1.0, step / 50) * 0.5 * (1 + math.cos(math.pi * step / STEPS))


def healthy(seed: int) -> dict[str, np.ndarray]:
    """By name: values of steps 1 to 1000, or of each tenth of them."""
    random = np.random.default_rng(seed)
    steps = np.arange(1, STEPS + 1)
    readings = steps[EVERY - 1 :: EVERY]
    n = len(readings)
    warm = 4e9 * (1 - np.exp(-readings / 60))
    return {
        "loss": (0.05 + 0.9 * np.exp(-steps / 120)) * random.lognormal(0, 0.25, STEPS),
        "grad_norm": (0.2 + np.exp(-steps / 200)) * random.lognormal(0, 0.4, STEPS),
        "learning_rate": np.array([rate(int(s)) for s in readings]),
        "samples_per_s": 5000 * random.lognormal(0, 0.05, n),
        "rss_bytes": warm + 1e7 * random.random(n),
        "device_bytes": 2e9 + 1e8 * random.random(n),
        "utilisation": np.clip(random.normal(0.9, 0.04, n), 0, 1),
    }


def snapshot(metrics: Mapping[str, np.ndarray], resumes: tuple[int, ...] = ()) -> Snapshot:
    series = {}
    for name, values in metrics.items():
        by = 1 if name in EVERY_STEP else EVERY
        steps = np.arange(by, by * len(values) + 1, by)
        series[name] = Series(steps, np.asarray(values, float), np.ones(len(values), np.int64))
    return Snapshot(series, resumes)


def seen(metrics: Mapping[str, np.ndarray], resumes: tuple[int, ...] = ()) -> list[str]:
    return [f.watcher for f in examine(snapshot(metrics, resumes), schedule=rate)]


def incrementally(metrics: Mapping[str, np.ndarray], **options) -> list:
    """The same through a `Watch`, ten steps at a time."""
    watch = Watch(schedule=rate, every_s=0, **options)
    found = []
    for at in range(STEPS // EVERY):
        rows = {
            name: values[at * EVERY : (at + 1) * EVERY] if name in EVERY_STEP else values[at]
            for name, values in metrics.items()
        }
        found += watch.observe((at + 1) * EVERY, rows)
    return found


def planted(kind: str, seed: int) -> tuple[dict[str, np.ndarray], int]:
    """Metrics with something planted, and the step at which it is."""
    random = np.random.default_rng(seed + 1000)
    metrics = healthy(seed)
    at = int(random.integers(300, 700))
    reading = at // EVERY
    ramp = np.arange(len(metrics["samples_per_s"]))
    match kind:
        case "non_finite":
            metrics[str(random.choice(EVERY_STEP))][at - 1 :] = random.choice([np.nan, np.inf])
        case "loss_spike":
            metrics["loss"][at - 1 : at + 2] *= 20
        case "gradient_spike":
            metrics["grad_norm"][at - 1] *= 60
        case "gradient_collapse":
            metrics["grad_norm"][at - 1 :] *= 1e-5
        case "flat":
            metrics["loss"] = 0.7 * random.lognormal(0, 0.1, STEPS)
            at = 1
        case "off_schedule":
            metrics["learning_rate"][reading - 1 :] *= 1.01
            at = reading * EVERY
        case "throughput":
            metrics["samples_per_s"][reading:] *= 0.6
        case "memory_growth":
            metrics["rss_bytes"] = 4e9 + 4e7 * ramp + 1e7 * random.random(len(ramp))
            at = EVERY
        case "utilisation_sawtooth":
            metrics["utilisation"] = np.where(ramp % 8 < 4, 0.95, 0.3)
            metrics["utilisation"] += random.normal(0, 0.03, len(ramp))
            at = EVERY
    return metrics, at


KINDS = [*(set(WATCHERS) - {"resume_spike"}), "off_schedule"]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_what_is_planted_is_seen_where_it_is(kind: str):
    right = 0
    for seed in SEEDS:
        metrics, at = planted(kind, seed)
        found = [f for f in examine(snapshot(metrics), schedule=rate) if f.watcher == kind]
        slack = 50 if kind == "throughput" else 0
        right += bool(found) and at <= found[0].step + slack and found[0].step <= at + slack
    assert right >= 19


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_watch_tells_it_once(kind: str):
    """However long it lasts."""
    right = 0
    for seed in SEEDS[:2]:
        metrics, at = planted(kind, seed)
        found = [f for f in incrementally(metrics) if f.watcher == kind]
        # Flat and drifts are known only after a while, and then from the first step they show on.
        right += len(found) == 1 and found[0].step <= at + 50
    assert right == 2


def test_a_healthy_run_has_nothing():
    assert [seen(healthy(seed)) for seed in SEEDS] == [[]] * len(SEEDS)
    assert [incrementally(healthy(seed)) for seed in SEEDS[:3]] == [[]] * 3


def test_a_healthy_resume_has_nothing():
    assert [seen(healthy(seed), (500, 800)) for seed in SEEDS] == [[]] * len(SEEDS)


@pytest.mark.parametrize("factor", [2.5, 20.0])
def test_a_spike_at_a_resume_points_at_the_checkpoint(factor: float):
    """Whether it stands out at once, or only as a shift of all the steps after it."""
    right = 0
    for seed in SEEDS:
        metrics = healthy(seed)
        metrics["loss"][500:540] *= factor
        found = examine(snapshot(metrics, (500,)))
        names = [f.watcher for f in found]
        right += "resume_spike" in names
        told = next((f for f in found if f.watcher == "resume_spike"), None)
        if told:
            assert (told.step, told.last_step) == (501, 505)
            assert told.severity == "error"
            assert told.means.startswith("the checkpoint of step 500")
    assert right >= 19


def test_a_loss_that_stays_high_after_a_resume_is_told_as_one_thing():
    metrics = healthy(0)
    metrics["loss"][500:] *= 20
    history = snapshot({"loss": metrics["loss"][:500]})
    assert seen(metrics, (500,)) == ["resume_spike"]
    watch = Watch(history, from_step=500, every_s=0)
    found = [watch.observe(s, {"loss": metrics["loss"][s - 10 : s]}) for s in range(510, 701, 10)]
    assert [[f.watcher for f in new] for new in found] == [["resume_spike"]] + [[]] * 19


def test_a_gradient_spike_at_a_resume_is_told_too():
    metrics = healthy(0)
    metrics["grad_norm"][501] *= 60
    assert seen(metrics, (500,)) == ["gradient_spike"]


def test_a_spike_elsewhere_is_no_resume_spike():
    metrics = healthy(0)
    metrics["loss"][599] *= 30
    assert seen(metrics, (500,)) == ["loss_spike"]


def test_non_finite_values_hide_nothing_else():
    """A single nan must not blind the baseline of what comes after it."""
    metrics = healthy(0)
    metrics["loss"][600] = np.nan
    metrics["loss"][640] *= 30
    assert seen(metrics) == ["non_finite", "loss_spike"]


def test_which_came_first_is_told():
    metrics = healthy(0)
    metrics["grad_norm"][600:] = np.inf
    metrics["loss"][601:] = np.nan
    (finding,) = examine(snapshot(metrics))
    assert (finding.step, finding.last_step, finding.severity) == (601, 1000, "error")
    assert finding.seen == (
        "gradient norm inf at step 601, at 400 steps in all; loss nan at step 602, at 399 steps in "
        "all"
    )


def test_values_that_are_not_positive_have_spikes_too():
    metrics = {"loss": healthy(0)["loss"] - 0.5}
    metrics["loss"][599] += 30
    assert seen(metrics) == ["loss_spike"]


def test_a_loss_that_never_moves_is_flat():
    assert seen({"loss": np.full(STEPS, 0.25)}) == ["flat"]
    assert seen({"loss": np.zeros(STEPS)}) == ["flat"]


def test_a_run_that_is_seen_from_its_middle_is_not_called_flat():
    values = np.full(500, 0.25)
    series = Series(np.arange(501, 1001), values, np.ones(500, np.int64))
    assert examine(Snapshot({"loss": series})) == []


def test_a_fall_at_once_and_a_slow_one_are_told_apart():
    for seed in SEEDS:
        metrics = healthy(seed)
        at_once, slowly = (metrics["samples_per_s"].copy() for _ in range(2))
        at_once[60:] *= 0.6
        slowly *= np.linspace(1, 0.55, len(slowly))
        (finding,) = examine(snapshot({"samples_per_s": at_once}))
        assert "at once" in finding.seen
        assert abs(finding.step - 600) <= 50
        (finding,) = examine(snapshot({"samples_per_s": slowly}))
        assert "bit by bit" in finding.seen


def test_a_single_slow_interval_is_no_change_of_throughput():
    metrics = healthy(0)
    metrics["samples_per_s"][[50, 70]] *= 0.1
    assert seen(metrics) == []


def test_memory_that_levels_off_or_is_freed_again_does_not_grow():
    ramp = np.arange(100.0)
    for values in (4e9 + 1e9 * (1 - np.exp(-ramp / 15)), 4e9 + 1e8 * (ramp % 20)):
        assert seen({"rss_bytes": values}) == []
    (finding,) = examine(snapshot({"device_bytes": 4e9 + 2**20 * 10 * ramp}))
    assert finding.seen == (
        "memory of the device grew from 3,815 to 4,565 MiB, 1,010.1 MiB per 1,000 steps, and goes "
        "on"
    )


def test_actions_are_chosen_by_watcher():
    metrics = healthy(0)
    metrics["loss"][600:] = np.nan
    metrics["grad_norm"][300] *= 100
    chosen = {"non_finite": Action.HALT, "loss_spike": Action.ROLLBACK}
    found = examine(snapshot(metrics), actions=chosen)
    assert {f.watcher: f.action for f in found} == {
        "non_finite": Action.HALT,
        "gradient_spike": Action.LOG,
    }
    assert found[0].as_dict()["action"] == "log"
    for watching in (examine, Watch):
        with pytest.raises(ConfigError) as caught:
            watching(Snapshot(), actions={"nan": Action.HALT})
        assert str(caught.value) == (
            "watcher: expected one of non_finite, resume_spike, loss_spike, gradient_spike, "
            "gradient_collapse, flat, throughput, memory_growth, utilisation_sawtooth, "
            "off_schedule, found 'nan'. Name one."
        )


def test_a_watch_goes_on_from_the_history_of_earlier_lives():
    metrics = healthy(0)
    history = snapshot({"loss": metrics["loss"][:560]})  # sixty of them are given up
    watch = Watch(history, from_step=500, every_s=0)
    assert watch.observe(510, {"loss": 20 * metrics["loss"][500:510]})[0].watcher == "resume_spike"
    watch = Watch(history, from_step=500, every_s=0)
    assert watch.observe(510, {"loss": metrics["loss"][500:510]}) == []


def test_a_run_that_goes_back_forgets_what_it_gave_up():
    metrics = healthy(0)
    watch = Watch(every_s=0)
    watch.observe(500, {"loss": metrics["loss"][:500]})
    (finding,) = watch.observe(510, {"loss": 30 * metrics["loss"][500:510]})
    assert finding.watcher == "loss_spike"
    assert watch.observe(480, {"loss": metrics["loss"][470:480]}) == []
    (finding,) = watch.observe(520, {"loss": np.append(metrics["loss"][480:519], 99.0)})
    assert (finding.watcher, finding.step) == ("loss_spike", 520)


def test_what_went_away_and_comes_again_is_told_again():
    metrics = healthy(0)
    for at in (300, 304, 900):
        metrics["loss"][at] *= 40
    assert [f.step for f in incrementally(metrics)] == [301, 901]


def test_a_watch_looks_once_a_second_but_finds_nan_at_once():
    clock = FakeClock()
    watch = Watch(clock=clock, actions={"non_finite": Action.HALT})
    metrics = healthy(0)
    metrics["loss"][300] *= 40
    metrics["loss"][330] = np.nan
    found = {}
    for step in range(10, 400, 10):
        found[step] = watch.observe(step, {"loss": metrics["loss"][step - 10 : step]})
        clock.advance(25_000_000)
    found = {step: [(f.watcher, f.step, f.action) for f in new] for step, new in found.items()}
    assert {step: new for step, new in found.items() if new} == {
        340: [("non_finite", 331, "halt")],
    }
    assert [(f.watcher, f.step) for f in watch.look()] == [("loss_spike", 301)]
    assert watch.look() == []


def test_a_watch_looks_at_a_bounded_window(monkeypatch):
    """What a look costs must not grow with the run."""
    lengths = []

    def spy(snapshot: Snapshot, since: int) -> list:
        lengths.append(max(len(s) for s in snapshot.series.values()))
        return []

    monkeypatch.setattr("tapeline.signals.watch.WATCHERS", {"spy": spy})
    watch = Watch(every_s=0)
    for step in range(10, 20_001, 10):
        watch.observe(step, {"loss": np.ones(10), "rss_bytes": 1.0})
    watch.observe(30_000, {"loss": np.ones(10_000)})
    assert max(lengths) == 512


@given(st.lists(st.integers(1, 1200), min_size=1, max_size=8), st.integers(0, 2**32 - 1))
def test_a_window_holds_the_last_values_whatever_the_pieces(sizes: list[int], seed: int):
    values = np.random.default_rng(seed).lognormal(0, 0.1, sum(sizes))
    kept: list[Series] = []

    def spy(snapshot: Snapshot, since: int) -> list:
        series = snapshot["loss"]
        kept.append(Series(series.steps.copy(), series.values.copy(), series.attempts))
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tapeline.signals.watch.WATCHERS", {"spy": spy})
        watch = Watch(every_s=0)
        done = 0
        for size in sizes:
            watch.observe(done + size, {"loss": values[done : done + size]})
            done += size
            assert kept[-1].values.tolist() == values[:done][-512:].tolist()
            assert kept[-1].steps.tolist() == list(range(1, done + 1))[-512:]


@given(
    st.dictionaries(
        st.sampled_from(["loss", "grad_norm", "samples_per_s", "rss_bytes", "utilisation"]),
        st.lists(st.floats(), max_size=260).map(np.array),
    ),
    st.lists(st.integers(0, 260), max_size=3).map(tuple),
)
def test_no_values_break_a_watcher(metrics: dict[str, np.ndarray], resumes: tuple[int, ...]):
    for finding in examine(snapshot(metrics, resumes)):
        assert 1 <= finding.step <= finding.last_step
        assert finding.seen
        assert finding.means
