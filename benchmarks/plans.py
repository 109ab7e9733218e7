"""How long a plan takes, from the command to its answer.

    python benchmarks/plans.py [--quick] [--json]

Each verb of `tapeline plan` that has defaults for all it asks, in a process of its own, and two
that simulate: the search under early noise, and the loader with a straggler among many ranks.
`cpu_s` is processor time, the start of Python and all imports included; `start` is a process that
does nothing but show the help.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from harness import Row, Samples, main

PLANS = ("checkpoint", "throughput", "search", "spot", "accelerator", "memory", "goodput")
COMMANDS = {
    "start": ["plan", "--help"],
    **{name: ["plan", name, "--json"] for name in PLANS},
    "search, early noise": ["plan", "search", "--early-noise", "1", "--json"],
    "throughput, 1,024 ranks": ["plan", "throughput", "--ranks", "1024", "--json"],
}


def cost_of(arguments: list[str]) -> tuple[float, float]:
    """Seconds that passed, and of processor time."""
    before, before_s = os.times(), time.perf_counter()
    command = [sys.executable, "-m", "tapeline", *arguments]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    after, passed_s = os.times(), time.perf_counter() - before_s
    cpu_s = after.children_user + after.children_system
    return passed_s, cpu_s - before.children_user - before.children_system


def measure(quick: bool) -> list[Row]:
    """All rows."""
    samples = Samples()
    for _ in range(3 if quick else 9):
        for subject, arguments in COMMANDS.items():
            passed_s, cpu_s = cost_of(arguments)
            samples.add("a plan", subject, "seconds", passed_s, "s")
            samples.add("a plan", subject, "cpu_s", cpu_s, "s")
    return samples.rows("seconds", ())


if __name__ == "__main__":
    main(__doc__, measure)
