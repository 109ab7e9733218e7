"""Watchers over what is learnt: loss, gradient norm, learning rate.

Each takes a snapshot and `since`: only what steps after that one show is told. Non-finite values
are told by `non_finite` alone; every other watcher looks at what is finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapeline.signals import baseline
from tapeline.signals.baseline import BASELINE
from tapeline.signals.snapshot import Finding, Series, Snapshot

_SPIKE_SIGMAS, _SPIKE_RATIO = 8.0, 1.5  # far out, and large enough to matter
_JOIN_STEPS = 10  # spikes closer than this are one
_AFTER_RESUME = 5  # steps in which a spike is the resume's
_SHIFT_ERRORS, _SHIFT_RATIO = 4.0, 1.1  # of their median
_FLAT_STEPS, _FLAT_SIGMAS = 200, 3.0
_COLLAPSE_STEPS, _COLLAPSE_RATIO = 10, 1e-3
_SAME_RATE = 1e-6


def non_finite(snapshot: Snapshot, since: int = 0) -> Iterator[Finding]:
    """The first loss or gradient norm that is nan or infinite."""
    seen = []
    for name in ("loss", "grad_norm"):
        series = snapshot[name]
        bad = series[(series.steps > since) & ~np.isfinite(series.values)]
        if len(bad):
            seen.append((int(bad.steps[0]), int(bad.steps[-1]), name, bad))
    if not seen:
        return
    words = [
        f"{_NAMES[name]} {bad.values[0]} at step {first}"
        + (f", at {len(bad)} steps in all" if len(bad) > 1 else "")
        for first, _, name, bad in sorted(seen, key=lambda s: s[0])
    ]
    yield Finding(
        "non_finite",
        min(first for first, *_ in seen),
        max(last for _, last, *_ in seen),
        "; ".join(words),
        "an overflow (learning rate too high, no clipping, low precision) or a bad row in the data",
        "error",
    )


def loss_spike(snapshot: Snapshot, since: int = 0) -> Iterator[Finding]:
    """Losses far above the ones before."""
    yield from _spikes(
        "loss_spike",
        snapshot,
        "loss",
        since,
        "a batch unlike the others, a learning rate at the edge, or the start of a divergence",
    )


def gradient_spike(snapshot: Snapshot, since: int = 0) -> Iterator[Finding]:
    """Gradient norms far above the ones before."""
    yield from _spikes(
        "gradient_spike",
        snapshot,
        "grad_norm",
        since,
        "a batch unlike the others, or the start of a divergence: it usually comes before the "
        "loss; clipping bounds it",
    )


def gradient_collapse(snapshot: Snapshot, since: int = 0) -> Iterator[Finding]:
    """Gradients that are next to nothing, where before there were some."""
    series = snapshot["grad_norm"].finite()
    seen = int(np.searchsorted(series.steps, since, side="right"))
    start = max(BASELINE, seen - _COLLAPSE_STEPS)
    if len(series) < start + _COLLAPSE_STEPS:
        return
    judged = series[start:]
    before = baseline.medians(series.values, start)
    low = (before > 0) & (judged.values <= _COLLAPSE_RATIO * before)
    for part in _joined(judged, low):
        steps = judged.steps[part]
        if len(steps) >= _COLLAPSE_STEPS and steps[-1] > since:
            yield Finding(
                "gradient_collapse",
                int(steps[0]),
                int(steps[-1]),
                f"gradient norm {np.median(judged.values[part]):.3g} from step {steps[0]} on, "
                f"{before[part][0]:.3g} over the {BASELINE} before",
                "saturated or dead units, a loss that no longer depends on the weights, or an "
                "underflow in low precision",
                "warning",
            )


def flat(snapshot: Snapshot, since: int = 0) -> Iterator[Finding]:
    """A loss that has not fallen since the first step of the run."""
    series = snapshot["loss"]
    if len(series) < _FLAT_STEPS or series.steps[0] > 1:
        return
    series = series[:_FLAT_STEPS].finite()
    if len(series) < _FLAT_STEPS or series.steps[-1] <= since:
        return
    quarter = _FLAT_STEPS // 4
    first, last = (
        float(np.median(part)) for part in (series.values[:quarter], series.values[-quarter:])
    )
    error = math.sqrt(2) * baseline.median_error(baseline.noise(series.values), quarter)
    if first - last <= _FLAT_SIGMAS * error:
        yield Finding(
            "flat",
            int(series.steps[0]),
            int(series.steps[-1]),
            f"loss {first:.4g} over the first {quarter} steps, {last:.4g} over steps to "
            f"{series.steps[-1]}: no fall beyond {_FLAT_SIGMAS:g} standard errors of {error:.2g}",
            "a learning rate of almost zero, parameters that are frozen or not in the optimiser, "
            "or a target that the inputs say little about",
            "warning",
        )


def resume_spike(snapshot: Snapshot, since: int = 0) -> Iterator[Finding]:
    """A loss that jumps exactly where a life of the run began."""
    series = snapshot["loss"].finite()
    for resume in snapshot.resumes:
        if resume + _AFTER_RESUME <= since:
            continue
        cut = int(np.searchsorted(series.steps, resume, side="right"))
        after = series[cut : cut + _AFTER_RESUME]
        after = after[(after.steps <= resume + _AFTER_RESUME) & (after.steps > resume)]
        if cut < BASELINE or not len(after):
            continue
        values = np.concatenate([series.values[cut - BASELINE : cut], after.values])
        scaled, least = baseline.scale(values)
        median, sigma = baseline.center(scaled[:BASELINE], least)
        usual, now = (float(np.median(part)) for part in np.split(values, [BASELINE]))
        shift = np.median(scaled[BASELINE:]) - median
        peak = (scaled[BASELINE:].max() - median) / sigma
        shifted = (
            len(after) == _AFTER_RESUME
            and shift > _SHIFT_ERRORS * baseline.median_error(sigma, _AFTER_RESUME)
            and now - usual > (_SHIFT_RATIO - 1) * abs(usual)
        )
        leapt = peak > _SPIKE_SIGMAS and _is_large(after.values.max(), usual)
        if not (shifted or leapt):
            continue
        yield Finding(
            "resume_spike",
            int(after.steps[0]),
            int(after.steps[-1]),
            f"loss {now:.4g} over the {len(after)} steps after the resume at step {resume}, with "
            f"a peak of {after.values.max():.4g}; {usual:.4g} over the {BASELINE} before it",
            f"the checkpoint of step {resume}: state that was not saved or not restored "
            "(optimiser, schedule, order of the data, normaliser)",
            "error",
        )


def off_schedule(
    snapshot: Snapshot, since: int, schedule: Callable[[int], float]
) -> Iterator[Finding]:
    """Learning rates other than the schedule's.

    Args:
        since: only later steps are judged.
        schedule: step, counted from 1, to the rate it should have been done with.
    """
    series = snapshot["learning_rate"]
    series = series[series.steps > since]
    planned = np.array([schedule(int(step)) for step in series.steps], np.float64)
    wrong = ~np.isclose(series.values, planned, rtol=_SAME_RATE, atol=0.0)
    if wrong.any():
        bad, rate = series[wrong], float(planned[wrong][0])
        yield Finding(
            "off_schedule",
            int(bad.steps[0]),
            int(bad.steps[-1]),
            f"learning rate {bad.values[0]:.6g} at step {bad.steps[0]}, where the schedule has "
            f"{rate:.6g}; {len(bad)} of {len(series)} readings are off",
            "a schedule that counts other steps than the run (often by one after a resume), or "
            "one that is applied twice",
            "error",
        )


_NAMES = {"loss": "loss", "grad_norm": "gradient norm"}


def _spikes(
    watcher: str, snapshot: Snapshot, name: str, since: int, means: str
) -> Iterator[Finding]:
    series = snapshot[name].finite()
    seen = int(np.searchsorted(series.steps, since, side="right"))
    # From before `since`, so that what goes on is told from where it began.
    start = max(BASELINE, seen - BASELINE)
    if max(start, seen) >= len(series):
        return
    scaled, least = baseline.scale(series.values[start - BASELINE :])
    score, median = baseline.scores(scaled, BASELINE, least)
    high = score > _SPIKE_SIGMAS
    judged = series[start:]
    usual = np.exp(median) if series.values[start - BASELINE :].min() > 0 else median
    high &= _is_large(judged.values, usual)
    for part in _joined(judged, high):
        peak = int(np.argmax(np.where(part, judged.values, -np.inf)))
        steps = judged.steps[part]
        if steps[-1] <= since or (name == "loss" and _after_resume(steps, snapshot.resumes)):
            continue
        yield Finding(
            watcher,
            int(steps[0]),
            int(steps[-1]),
            f"{_NAMES[name]} {judged.values[peak]:.4g} at step {judged.steps[peak]}, "
            f"{usual[peak]:.4g} over the {BASELINE} before: {score[peak]:.0f} robust standard "
            "deviations" + (f"; {len(steps)} such steps" if len(steps) > 1 else ""),
            means,
            "warning",
        )


def _after_resume(steps: NDArray[np.int64], resumes: tuple[int, ...]) -> bool:
    """Whether a resume is in it: that is told by `resume_spike`."""
    return any(((steps > r) & (steps <= r + _AFTER_RESUME)).any() for r in resumes)


def _is_large(values: Any, usual: Any) -> Any:
    return values - usual > (_SPIKE_RATIO - 1) * np.abs(usual)


def _joined(series: Series, high: NDArray[np.bool_]) -> Iterator[NDArray[np.bool_]]:
    """The marked entries in groups of neighbours, each as a mask."""
    where = np.flatnonzero(high)
    if not len(where):
        return
    gaps = np.flatnonzero(np.diff(series.steps[where]) > _JOIN_STEPS) + 1
    for group in np.split(where, gaps):
        mask = np.zeros(len(series), bool)
        mask[group] = True
        yield mask
