"""Watchers over what the machine does meanwhile: throughput, memory, utilisation.

Each takes a snapshot and `since`, and looks at the last `WINDOW` readings, one per logging
interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from tapeline.signals import baseline
from tapeline.signals.snapshot import Finding, Series, Snapshot
from tapeline.words import percent

WINDOW, _LEAST = 120, 40  # readings
_SMOOTH = 5  # readings: a single slow interval is no change
_FALL = 0.15  # of throughput
_FALL_SIGMAS = 4.0
_GROWTH = 0.05  # of memory, over the window
_STILL_GROWING = 0.5  # the last quarter's share of an even growth
_SWING = 0.3  # of utilisation, from low to high
_SWINGS = 4


def throughput(snapshot: Snapshot, since: int = 0) -> Iterator[Finding]:
    """A fall of samples per second: at once, or slowly.

    Which of the two is decided by what leaves the smaller squares: two levels or a line.
    """
    series = _window(snapshot, "samples_per_s", since)
    series = series[series.values > 0]
    if len(series) < _LEAST:
        return
    sigma = baseline.noise(np.log(series.values)) / math.sqrt(_SMOOTH)
    smooth = np.median(sliding_window_view(np.log(series.values), _SMOOTH), axis=1)
    steps = series.steps[_SMOOTH // 2 : _SMOOTH // 2 + len(smooth)]
    cut, level_fall, level_rest = _two_levels(smooth)
    line_fall, line_rest = _line(smooth)
    at_once = level_rest <= line_rest
    fall = level_fall if at_once else line_fall
    if fall < max(-math.log1p(-_FALL), _FALL_SIGMAS * sigma):
        return
    before, after = math.exp(smooth[:cut].mean()), math.exp(smooth[cut:].mean())
    if at_once:
        step, seen = int(steps[cut]), f"samples/s fell from {before:.4g} to {after:.4g} at once"
        means = (
            "something that changed at that moment: another process on the machine, a throttled "
            "or lost device, a slower disk or network"
        )
    else:
        step = int(steps[0])
        fell = percent(-math.expm1(-fall))
        seen = f"samples/s fell by {fell} bit by bit over {len(series)} readings"
        means = "a leak, growing state, a filling cache or disk, or heat"
    yield Finding("throughput", step, int(series.steps[-1]), seen, means, "warning")


def memory_growth(snapshot: Snapshot, since: int = 0) -> Iterator[Finding]:
    """Memory of the process or the device that grows and goes on growing."""
    for name, whose in (("rss_bytes", "the process"), ("device_bytes", "the device")):
        series = _window(snapshot, name, since)
        if len(series) < _LEAST:
            continue
        # The least of each quarter: what is freed again now and then does not grow.
        levels = np.array([part.min() for part in np.array_split(series.values, 4)])
        growth, each = levels[-1] - levels[0], np.diff(levels)
        if (
            (each <= 0).any()
            or growth < _GROWTH * levels[0]
            or each[-1] < _STILL_GROWING * growth / 3  # a warm-up levels off
        ):
            continue
        # Of steady growth the least is the first, and from quarter to quarter lie three of them.
        rate = growth / (0.75 * (series.steps[-1] - series.steps[0]))
        yield Finding(
            "memory_growth",
            int(series.steps[0]),
            int(series.steps[-1]),
            f"memory of {whose} grew from {levels[0] / 2**20:,.0f} to {levels[-1] / 2**20:,.0f} "
            f"MiB, {1000 * rate / 2**20:,.1f} MiB per 1,000 steps, and goes on",
            "a leak: losses or outputs kept with their graphs, a cache without a bound, a list "
            "that is only added to",
            "warning",
        )


def utilisation_sawtooth(snapshot: Snapshot, since: int = 0) -> Iterator[Finding]:
    """Utilisation that swings between high and low."""
    series = _window(snapshot, "utilisation", since)
    if len(series) < _LEAST:
        return
    low, high = (float(v) for v in np.quantile(series.values, [0.1, 0.9]))
    if high - low < _SWING:
        return
    # With a hysteresis of the middle half, so that noise around one level is no swing.
    third = (high - low) / 4
    states = np.where(series.values > high - third, 1, np.where(series.values < low + third, -1, 0))
    states = states[states != 0]
    swings = int(np.sum((states[1:] == 1) & (states[:-1] == -1)))
    if swings < _SWINGS:
        return
    period = (series.steps[-1] - series.steps[0]) / swings
    yield Finding(
        "utilisation_sawtooth",
        int(series.steps[0]),
        int(series.steps[-1]),
        f"utilisation swings between {percent(low)} and {percent(high)}, {swings} times in "
        f"{len(series)} readings, about every {period:.0f} steps",
        "a device that waits in turns: for the loader, for evaluations or checkpoints, or for "
        "other ranks",
        "note",
    )


def _window(snapshot: Snapshot, name: str, since: int) -> Series:
    """The last finite readings; none if the newest was judged before."""
    series = snapshot[name].finite()[-WINDOW:]
    return series if len(series) and series.steps[-1] > since else series[:0]


def _two_levels(values: NDArray[np.float64]) -> tuple[int, float, float]:
    """Where two levels fit best, how far the second is below the first, and the squares left."""
    n = len(values)
    cuts = np.arange(_SMOOTH, n - _SMOOTH)
    sums, squares = np.cumsum(values), np.cumsum(values**2)
    left = sums[cuts - 1] / cuts
    right = (sums[-1] - sums[cuts - 1]) / (n - cuts)
    rest = squares[-1] - cuts * left**2 - (n - cuts) * right**2
    best = int(np.argmin(rest))
    return int(cuts[best]), float(left[best] - right[best]), float(rest[best])


def _line(values: NDArray[np.float64]) -> tuple[float, float]:
    """How far a fitted line falls from end to end, and the squares left."""
    x = np.arange(len(values)) - (len(values) - 1) / 2
    slope = float(x @ values / (x @ x))
    rest = values - values.mean() - slope * x
    return -slope * (len(values) - 1), float(rest @ rest)
