"""How long it takes to list and to find among many runs, with an index and on the first look.

    python benchmarks/runs.py [--quick] [--json]

The runs are copies of one record under names, seeds and figures of their own; nothing is trained.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Row, Samples, main

from tapeline.clock import SystemClock
from tapeline.config import RunConfig
from tapeline.files import Journal
from tapeline.runs import MetricsJournal, RunFolder, record
from tapeline.runs.choosing import GOOD, chosen, like_it
from tapeline.runs.index import indexed

_ORIGINALS = 100


def _make(root: Path, num_runs: int) -> None:
    about = record(RunConfig.model_validate({"data": {"store": "store"}}), {}, SystemClock())
    originals = []
    for number in range(_ORIGINALS):
        config = {**about["config"], "name": f"run-{number}", "seed": number}
        run = RunFolder(root / f"run-{number}", SystemClock())
        run.create({**about, "config": config})
        with Journal(run.attempts_path) as journal:
            journal.append({"attempt": 1, "from_step": 0}, {"attempt": 1, "how": "finished"})
        with MetricsJournal(run.metrics_path(0), 1) as metrics:
            metrics.losses(20, [1 / step for step in range(1, 21)])
            metrics.validation(
                20, {"loss": number / _ORIGINALS, "skill": 0.5 - number / _ORIGINALS}
            )
        originals.append(run.path)
    for number in range(num_runs - _ORIGINALS):
        shutil.copytree(originals[number % _ORIGINALS], root / f"copy-{number}")


def measure(quick: bool) -> list[Row]:
    """All rows."""
    samples = Samples()
    num_runs = 1_000 if quick else 10_000

    def timed(subject: str, work: Callable[[], object]) -> None:
        begun = time.perf_counter()
        work()
        samples.add(f"{num_runs:,} runs", subject, "s", time.perf_counter() - begun, "s")

    with tempfile.TemporaryDirectory() as temporary:
        root, place = Path(temporary, "runs"), Path(temporary, "index.sqlite")
        _make(root, num_runs)

        def runs() -> list[dict[str, Any]]:
            return indexed(root, place=place).summaries

        def find() -> None:
            found = runs()
            like_it(found[0], found, GOOD)

        timed("first index", runs)
        for _ in range(3):
            timed("list", lambda: chosen(runs(), ["how=finished"], "validation.loss"))
            timed("find", find)
    return samples.rows("s", ())


if __name__ == "__main__":
    main(__doc__, measure)
