"""A run at this moment as a terminal shows it: ranks, progress, loss, time, attempts, findings.

Covers the drawing alone: what is there to see is `runs.live`'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tapeline.report.tables import MISSING, format_number, format_percent, printable
from tapeline.runs.live import LiveRank, LiveRun

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH, _NARROW = 60, 80
_LAST_LIVES, _LAST_FINDINGS = 4, 4
# By bucket: what it is drawn with, and in the terminal's own colours, which suit its background.
_LOOKS = {
    "useful": ("█", "green"),
    "starved": ("▓", "yellow"),
    "checkpoint": ("▒", "blue"),
    "lost": ("░", "red"),
    "startup": ("╱", "cyan"),
    "evaluation": ("┼", "magenta"),
    "other": ("·", "bright_black"),
}
_STATES = {"running": "green", "finished": "green", "stopped": "green", "not begun": "yellow"}
_MOST_RANKS = 16
_SHOWN_SHARE = 0.005


def frame(seen: LiveRun, width: int = 100) -> RenderableType:
    """One frame of `tapeline watch`.

    Args:
        seen: the run.
        width: of the terminal, in characters; what doesn't fit into a narrow one is left out.
    """
    parts: list[RenderableType] = [_title(seen), _progress(seen, width)]
    if seen.ranks:
        parts += [Text(), _ranks(seen, width)]
    parts += [Text(), _loss(seen, width), _time(seen, width)]
    lives, runs = seen.lives[-_LAST_LIVES:], seen.state == "running"
    parts += [_life(life, goes_on=runs and life is lives[-1]) for life in lives]
    return Group(*parts, *_findings(seen))


def duration(seconds: float) -> str:
    """Seconds as people say them: 4.2 s, 3 min 05 s, 2 h 05 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def sparkline(values: Sequence[float], width: int = _WIDTH // 2) -> str:
    """Values as blocks between their least and their largest; × where one isn't finite.

    Where there are more than fit, each block is the mean of its share of them.
    """
    size = max(1, math.ceil(len(values) / width))
    means = [
        sum(part) / len(part)
        for part in (values[start : start + size] for start in range(0, len(values), size))
    ]
    finite = [value for value in means if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    half_span = high / 2 - low / 2  # of the whole, a float may hold no number
    top = len(_BLOCKS) - 1
    return "".join(
        _BLOCKS[round(top * ((value / 2 - low / 2) / half_span)) if half_span else 0]
        if math.isfinite(value)
        else "×"
        for value in means
    )


def _title(seen: LiveRun) -> Text:
    title = Text.assemble((printable(seen.name), "bold"), "  ", no_wrap=True, overflow="ellipsis")
    title.append(seen.state, _STATES.get(seen.state, "bold red"))
    if seen.lives:
        title.append(f"  attempt {seen.lives[-1]['attempt']}")
    return title.append("  supervised") if seen.supervised else title


def _progress(seen: LiveRun, width: int) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    told = f"step {seen.step:,} of {seen.target:,}"
    pace = left = ""
    if seen.pace_per_s and seen.eta_s is not None:
        pace = f"{format_number(seen.pace_per_s)} steps/s"
        left = f"{duration(seen.eta_s)} to go"
    if width < _NARROW:
        return Group(Text(told), *([Text(f"{pace}  {left}")] if pace else []))
    bar = ProgressBar(total=max(1, seen.target), completed=seen.step, width=_WIDTH // 2)
    grid.add_row(told, bar, pace, left)
    return grid


def _ranks(seen: LiveRun, width: int) -> RenderableType:
    ranks, told_end = seen.ranks, "how" in seen.lives[-1]
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    names = ("rank", "step", "heartbeat", "samples/s") if width >= _NARROW else ("rank", "step")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("phase", no_wrap=True)
    table.add_column("process", no_wrap=True)
    # Of many, the ones that are furthest behind.
    shown = sorted(ranks, key=lambda rank: (rank.lives is not False, rank.step or 0))[:_MOST_RANKS]
    for rank in sorted(shown, key=lambda rank: rank.rank):
        figures = (
            MISSING if rank.age_s is None else duration(rank.age_s),
            MISSING if rank.samples_per_s is None else format_number(rank.samples_per_s),
        )
        table.add_row(
            str(rank.rank),
            MISSING if rank.step is None else f"{rank.step:,}",
            *(figures if width >= _NARROW else ()),
            rank.phase or MISSING,
            _process(rank, told_end=told_end),
        )
    if len(ranks) > len(shown):
        return Group(table, Text(f"and {len(ranks) - len(shown)} more ranks"))
    return table


def _process(rank: LiveRank, *, told_end: bool) -> Text:
    if rank.lives is None:
        return Text("not seen from here", "yellow")
    if not rank.lives:
        return Text("ended") if told_end else Text("gone", "bold red")
    return Text("stale", "bold red") if rank.stale else Text("lives", "green")


def _loss(seen: LiveRun, width: int) -> Text:
    if not seen.losses:
        return Text("loss      none yet")
    values = [loss for _, loss in seen.losses]
    first, last = seen.losses[0][0], seen.losses[-1][0]
    tail = f"  steps {first:,} to {last:,}" if width >= _NARROW else ""
    most = min(_WIDTH // 2, max(1, width - (40 if tail else 22)))
    return Text.assemble(
        f"loss      {format_number(values[-1])}  ",
        (sparkline(values, most), "blue"),
        tail,
        no_wrap=True,
        overflow="ellipsis",
    )


def _time(seen: LiveRun, width: int) -> RenderableType:
    if seen.account is None:
        return Text(f"goodput   unknown: {printable(seen.problem or '')}")
    spent = seen.account.job.buckets_ns
    whole = sum(spent.values()) or 1
    bar, legend = Text("goodput   "), []
    bar.append(f"{format_percent(seen.account.goodput)}  ")
    most = max(1, min(_WIDTH, width - len(bar) - len(spent)))  # each may be rounded up
    for bucket, (glyph, hue) in _LOOKS.items():
        share = spent[bucket] / whole
        bar.append(glyph * round(most * share), hue)
        if share >= _SHOWN_SHARE:
            legend.append(Text.assemble((f"{glyph} ", hue), f"{bucket} {format_percent(share)}"))
    return Group(bar, Padding(Columns(legend, padding=(0, 2)), (0, 0, 0, 10)))


def _life(life: dict[str, object], *, goes_on: bool) -> Text:
    text = f"attempt   {life['attempt']} from step {life.get('from_step', MISSING)}"
    if "how" in life:
        at = f" at step {life['step']}" if "step" in life else ""
        text += f", {life['how']}{at}: {life.get('evidence', '')}"
    else:
        text += ", which goes on" if goes_on else ", no end is told"
    return Text(printable(text), overflow="ellipsis", no_wrap=True)


def _findings(seen: LiveRun) -> list[Text]:
    last = seen.findings[-_LAST_FINDINGS:]
    lines = [
        Text.assemble(
            (f"{one['watcher']:<9} ", "yellow"), printable(f"step {one['step']}: {one['seen']}")
        )
        for one in last
    ]
    if more := len(seen.findings) - len(last):
        lines.append(Text(f"and {more} findings before"))
    return lines or [Text("findings  none")]
