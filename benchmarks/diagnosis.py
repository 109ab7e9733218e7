"""How often `tapeline diagnose` tells a planted cause, and how often it accuses a healthy run.

    python benchmarks/diagnosis.py [--quick] [--json]

Each cause in `planted.py` is tried 20 times (twice if quick) on a real run of one or two ranks.
`told` counts the trials in which the first verdict is the planted cause and names its rank; what
was said instead goes to standard error.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from pathlib import Path

from harness import Row, main
from planted import PLANTS, Bed

from tapeline.diagnosis import diagnose


def measure(quick: bool) -> list[Row]:
    """A row for each cause."""
    trials = 2 if quick else 20
    told = dict.fromkeys(PLANTS, 0)
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["tapeline.cli", "tapeline.run"])
    with tempfile.TemporaryDirectory() as folder:
        bed = Bed(Path(folder), server)
        for trial in range(trials):
            for name, plant in PLANTS.items():
                run, end = bed.grow(plant, f"{name.replace(' ', '-')}-{trial}")
                try:
                    first = diagnose(run).verdicts[0]
                finally:
                    end()
                told[name] += plant.told_by(first)
                if not plant.told_by(first):
                    print(f"{name}, trial {trial}: {first}", file=sys.stderr)
    return [
        Row(name, "tapeline", "told", number, f"of {trials}", number, number, 1)
        for name, number in told.items()
    ]


if __name__ == "__main__":
    main(__doc__, measure)
