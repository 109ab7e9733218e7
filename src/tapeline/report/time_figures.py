"""Where the time of a run went: one bar of buckets, and its attempts over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from tapeline.ledger import BUCKETS, RankAccount
from tapeline.report.style import COLOURS, SERIES, WIDTH_IN, legend_above, styled

_NS_PER_S = 1e9
_LEAST_SHARE_WITH_TEXT = 0.06
_LOOK = {
    "useful": (SERIES[2], ""),
    "starved": (SERIES[3], ""),
    "checkpoint": (SERIES[0], ""),
    "lost": (SERIES[1], ""),
    "startup": (COLOURS["muted"], ""),
    "evaluation": (SERIES[0], "///"),
    "other": (COLOURS["rule"], ""),
}


def goodput_figure(buckets_ns: Mapping[str, int]) -> Figure:
    """The time of a job as one bar, a part for each bucket that took any.

    Args:
        buckets_ns: nanoseconds by `ledger.BUCKETS`.
    """
    whole = sum(buckets_ns.values()) or 1
    with styled():
        figure = Figure(figsize=(WIDTH_IN, 1.6))
        axes = figure.subplots()
        left = 0.0
        for bucket in BUCKETS:
            share = buckets_ns[bucket] / whole
            if not share:
                continue
            hue, hatch = _LOOK[bucket]
            label = f"{bucket} {share:.1%}"
            axes.barh(0, share, left=left, color=hue, hatch=hatch, edgecolor="white", label=label)
            if share >= _LEAST_SHARE_WITH_TEXT:
                axes.text(left + share / 2, 0, f"{share:.0%}", ha="center", va="center")
            left += share
        axes.set_xlim(0, 1)
        axes.set_yticks([])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.grid(visible=False)
        legend_above(axes)
    return figure


def attempts_figure(ranks: Sequence[RankAccount]) -> Figure:
    """The lives of each rank over the time since its first began, cut into buckets in turn.

    Within a life the buckets are drawn by size, not in the order in which they came.
    """
    with styled():
        figure = Figure(figsize=(WIDTH_IN, 1.3 + 0.45 * len(ranks)))
        axes = figure.subplots()
        named: set[str] = set()
        for row, rank in enumerate(ranks):
            for life in rank.lives:
                left = life.begin_ns / _NS_PER_S
                for bucket in BUCKETS:
                    seconds = life.times.buckets_ns[bucket] / _NS_PER_S
                    if seconds:
                        hue, hatch = _LOOK[bucket]
                        label = None if bucket in named else bucket
                        named.add(bucket)
                        axes.barh(
                            row, seconds, left=left, height=0.6, color=hue, hatch=hatch, label=label
                        )
                        left += seconds
                ended = (life.begin_ns + life.lived_ns) / _NS_PER_S
                axes.plot([ended, ended], [row - 0.42, row + 0.42], color=COLOURS["ink"])
                axes.annotate(
                    f"{life.how or 'killed or living'}, step {life.step}",
                    (ended, row + 0.42),
                    fontsize=8,
                    ha="right",
                    va="bottom",
                )
        axes.set_yticks(range(len(ranks)), [f"rank {rank.rank}" for rank in ranks])
        axes.set_ylim(-0.6, len(ranks) - 0.1)
        axes.set_xlabel("time since the first attempt began (s)")
        axes.grid(visible=False, axis="y")
        legend_above(axes)
    return figure
