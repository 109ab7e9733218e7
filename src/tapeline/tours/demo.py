"""`tapeline demo`: a real tape to a trained model, killed on the way, ending in the same bits."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tapeline.budget import all_formats, measure_budget
from tapeline.errors import RunError
from tapeline.files import atomic_write
from tapeline.prove.killing import resume_to_end, train_and_kill, train_to_end
from tapeline.report import Table, format_count, format_ms, format_number
from tapeline.report.page import write_page
from tapeline.store import Shards, write_shards
from tapeline.tape import demo_tape, read_orders, synthetic_sessions
from tapeline.tours.demo_page import demo_page
from tapeline.windows import WindowIndex

_STEPS, _CHECKPOINT_EVERY = 400, 50
_MARK = ".tapeline-demo"
_MADE_HERE = ("store", "runs", "demo.toml", "demo.json", "report.html")
_CONFIG = f"""\
name = "demo"

[data]
store = "store"
target = "mid"

[windows]
length = 20
horizon = 10

[model]
arguments = {{ hidden = 16 }}

[training]
steps = {_STEPS}
batch = 256
learning_rate = 3e-5
optimizer = "adamw"
weight_decay = 0.1

[validation]
fraction = 0.2
every = 100

[checkpoint]
every = {_CHECKPOINT_EVERY}
"""


@dataclass(frozen=True, slots=True)
class Demo:
    """What the demo found.

    Attributes:
        figures: everything, as JSON can hold it; also in `demo.json`.
        table: the main figures.
        page: the self-contained report.
    """

    figures: dict[str, Any]
    table: Table
    page: Path


def run_demo(out: Path, tape: Path | None, say: Callable[[str], None]) -> Demo:
    """Run the main job; under three minutes on two cores.

    Args:
        out: folder for everything; what an earlier demo left there is replaced.
        tape: an order-by-order CSV; by default the half hour of BTC/USD in the data package.
        say: told what is being done.

    Raises:
        RunError: `out` holds something that isn't a demo's.
        TapeError: the tape can't be read.
    """
    _make_room(out)
    say("1/6 reading the tape")
    about = _ingest(out / "store", tape, say)
    say("2/6 measuring the time budget")
    all_formats(out / "store")
    budget = measure_budget(out / "store", repetitions=30)
    config = out / "demo.toml"
    config.write_text(_CONFIG)
    # Any moment will do; which one it was is told, so it may as well be a different one each time.
    at_step = random.SystemRandom().randrange(_CHECKPOINT_EVERY + 1, _STEPS - _CHECKPOINT_EVERY)
    say(f"3/6 training, until SIGKILL at step {at_step}")
    killed = train_and_kill(config, out / "runs" / "killed", at_step=at_step)
    say("4/6 resuming")
    resumed = resume_to_end(out / "runs" / "killed")
    say("5/6 the same training uninterrupted")
    uninterrupted = train_to_end(config, out / "runs" / "uninterrupted")
    say("6/6 the page")
    figures = {
        "bitwise_equal": resumed["state_sha256"] == uninterrupted["state_sha256"],
        "state_sha256": {
            "killed_and_resumed": resumed["state_sha256"],
            "uninterrupted": uninterrupted["state_sha256"],
        },
        "killed": asdict(killed),
        "resumed_from_step": resumed["from_step"],
        "steps": resumed["steps"],
        "tape": about,
        "validation": resumed["validation"],
        "budget": budget.as_dict(),
        "report": str(out / "report.html"),
    }
    atomic_write(out / "demo.json", json.dumps(figures, indent=2))
    table = _table(figures)
    write_page(out / "report.html", demo_page(out, figures, table, budget))
    return Demo(figures, table, out / "report.html")


def _make_room(out: Path) -> None:
    """Delete an earlier demo; only a folder that a demo marked as its own is touched."""
    if out.exists() and not (out / _MARK).exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(
            out,
            expected="a new folder, or that of an earlier demo",
            found="files that no demo wrote",
            fix="Give another folder with --out",
        )
    out.mkdir(parents=True, exist_ok=True)
    (out / _MARK).touch()
    for name in _MADE_HERE:
        path = out / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _ingest(store: Path, tape: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Write the store, and say what is in it."""
    path = tape or demo_tape()
    report = None
    if path is None:
        say("""    the data package isn't installed (`pip install "tapeline[demo]"`):""")
        say("    this is the synthetic market instead")
        sessions = synthetic_sessions(3)
    else:
        instrument = path.name.split(".")[0] if tape else "BTCUSD"
        sessions, report = read_orders(path, instrument=instrument)
    write_shards(sessions, store, "mmap")
    shards = Shards(store)
    first, last = WindowIndex(shards), shards.session(0)
    mids = [
        shards.index.sessions[s].origin + shards.values(s)[shards.valid(s), 0].astype(np.float64)
        for s in range(len(shards))
    ]
    return {
        "source": "synthetic market" if report is None else report.source,
        "instrument": last.key.instrument,
        "sessions": len(shards),
        "rows": int(shards.offsets[-1]),
        "windows": first.num_windows,
        "mid_lowest": min(float(m.min()) for m in mids),
        "mid_highest": max(float(m.max()) for m in mids),
        "report": None if report is None else report.as_dict(),
    }


def _table(figures: dict[str, Any]) -> Table:
    tape, validation = figures["tape"], figures["validation"]
    hashes = figures["state_sha256"]
    gathered = next(r for r in figures["budget"]["rows"] if r["case"] == "mmap gathered")
    ratios = figures["budget"]["ratios"]
    rows: list[list[str]] = [
        ["tape", f"{tape['instrument']}, {format_count(tape['rows'])} rows of half a second"],
        ["mid price", f"{tape['mid_lowest']:,} to {tape['mid_highest']:,}"],
        ["windows of 20 + 10 rows", format_count(tape["windows"])],
        ["a gathered batch of 256", format_ms(gathered["batch_ms"])],
        ["window by window", f"{format_number(ratios['window loop / gather'])} times as long"],
        ["killed", f"SIGKILL after step {figures['killed']['after_step']}"],
        ["resumed from step", format_count(figures["resumed_from_step"])],
        ["state, killed and resumed", hashes["killed_and_resumed"]],
        ["state, uninterrupted", hashes["uninterrupted"]],
        ["the same bits", "yes" if figures["bitwise_equal"] else "NO"],
        [
            "validation error / predicting no change",
            f"{validation['mse']:.4g} / {validation['mse_zero']:.4g}",
        ],
    ]
    return Table(
        columns=["what", "found"],
        rows=rows,
        caption=f"{figures['steps']} steps on {figures['budget']['machine']['processor']}",
    )
