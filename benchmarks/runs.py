"""How long it takes to list and to find among many runs, with an index and on the first look.

    python benchmarks/runs.py [--quick] [--json]

The runs are copies of one record under names, seeds and figures of their own; nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

from tapeline.clock import SystemClock
from tapeline.config import RunConfig
from tapeline.files import Journal
from tapeline.machine import Machine
from tapeline.runs import MetricsJournal, RunFolder, record
from tapeline.runs.choosing import GOOD, chosen, like_it
from tapeline.runs.index import indexed

_ORIGINALS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    num_runs = 1_000 if arguments.quick else 10_000
    with tempfile.TemporaryDirectory() as temporary:
        _make(Path(temporary, "runs"), num_runs)
        rows = _measure(Path(temporary, "runs"), Path(temporary, "index.sqlite"), num_runs)
    machine = Machine.here()
    if arguments.json:
        print(json.dumps({"machine": machine.as_dict(), "rows": rows}, indent=2))
        return
    print(machine)
    for row in rows:
        print(f"{row['case']}  {row['subject']:12} {row['value']:.3f} s")


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
            metrics.validation(20, {"mse": number / _ORIGINALS, "skill": 0.5 - number / _ORIGINALS})
        originals.append(run.path)
    for number in range(num_runs - _ORIGINALS):
        shutil.copytree(originals[number % _ORIGINALS], root / f"copy-{number}")


def _measure(root: Path, place: Path, num_runs: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []

    def timed(subject: str, begun: float) -> None:
        value = time.perf_counter() - begun
        case = f"{num_runs} runs"
        rows.append({"case": case, "subject": subject, "metric": "s", "value": value, "unit": "s"})

    begun = time.perf_counter()
    indexed(root, place=place)
    timed("first index", begun)
    for _ in range(3):
        begun = time.perf_counter()
        chosen(indexed(root, place=place).summaries, ["how=finished"], "validation.mse")
        timed("list", begun)
        begun = time.perf_counter()
        runs = indexed(root, place=place).summaries
        like_it(runs[0], runs, GOOD)
        timed("find", begun)
    return rows


if __name__ == "__main__":
    main()
