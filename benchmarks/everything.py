"""All benchmarks one after the other, and the page of what they measured.

    python benchmarks/everything.py [--full] [NAME ...]

Each runs in a process of its own, quick unless `--full`; its JSON is kept in `build/benchmarks`.
The page, `docs/benchmarks.md`, is drawn from what lies there, so that one can be measured again by
its name. Does not judge: a number without its machine and its load says nothing.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
MEASURED = ROOT / "build" / "benchmarks"
# Name, and what its section is called.
SECTIONS = {
    "end_to_end": "End to end",
    "loaders": "Loaders",
    "checkpoints": "Checkpoints",
    "parallel": "Lanes and ranks",
    "ledger": "Ledger",
    "recovery": "Recovery",
    "runs": "Many runs",
    "plans": "Plans",
}
HEAD = """# Benchmarks

Made by `make bench`; `make bench BENCH=--full` takes the long cases, `make bench BENCH=loaders` one
part again.

Each number is a median over repetitions that take turns with those of the other subjects; in
brackets the lowest and the highest. `ratio_to` is this subject's time over the other's: smaller is
better, and its range is that of the ratios within one repetition. The load is the mean number of
runnable processes in the last minute; well above what a benchmark itself keeps busy, times are too
long and their ranges wide.
"""


def run(name: str, *, full: bool) -> None:
    """Measure one, and keep its JSON once it is whole."""
    print(f"{name} …", file=sys.stderr, flush=True)
    command = [sys.executable, str(HERE / f"{name}.py"), "--json", *([] if full else ["--quick"])]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    json.loads(done.stdout)
    (MEASURED / f"{name}.json").write_bytes(done.stdout)


def number(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def cell(row: dict[str, Any] | None) -> str:
    """The median, and the range where there is one."""
    if row is None:
        return ""
    text = number(row["value"])
    if row["repetitions"] > 1:
        text += f" ({number(row['low'])} – {number(row['high'])})"
    return text


def tables(rows: list[dict[str, Any]]) -> str:
    """One for each case: a line for each subject, a column for each metric."""
    parts = []
    for case in dict.fromkeys(row["case"] for row in rows):
        here = {(row["subject"], row["metric"]): row for row in rows if row["case"] == case}
        metrics = list(dict.fromkeys(metric for _, metric in here))
        lines = [["subject", *(f"`{metric}`" for metric in metrics)], ["---"] * (len(metrics) + 1)]
        lines += [
            [f"`{subject}`", *(cell(here.get((subject, metric))) for metric in metrics)]
            for subject in dict.fromkeys(subject for subject, _ in here)
        ]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        parts.append(f"### {case}\n\n{table}")
    return "\n\n".join(parts)


def section(name: str, title: str, told: dict[str, Any]) -> str:
    """What was measured, where, under which load, and the numbers."""
    about = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text())) or ""
    first, _, rest = about.partition("\n\n")
    words = rest.partition("\n\n")[2].replace("\n", " ")
    machine = told["machine"]
    versions = ", ".join(f"{package} {number}" for package, number in machine["versions"].items())
    how = f"`python benchmarks/{name}.py{' --quick' if told['quick'] else ''}`"
    return (
        f"## {title}\n\n{first} {words}\n\n"
        f"{how} on {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB,"
        f" device {machine['device']}; Python {machine['python']}, {versions}; load "
        f"{machine['load_1min']:g} before, {machine['load_1min_after']:g} after.\n\n"
        f"{tables(told['rows'])}\n"
    )


def draw() -> Path:
    """Write the page of all that was measured."""
    parts = [HEAD]
    for name, title in SECTIONS.items():
        if (MEASURED / f"{name}.json").exists():
            told = json.loads((MEASURED / f"{name}.json").read_text())
            parts.append(section(name, title, told))
    page = ROOT / "docs" / "benchmarks.md"
    page.write_text("\n".join(parts))
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SECTIONS))
    parser.add_argument("--full", action="store_true", help="long cases, many repetitions")
    arguments = parser.parse_args()
    unknown = {*arguments.names} - {*SECTIONS}
    if unknown:
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}")
    MEASURED.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or SECTIONS:
        run(name, full=arguments.full)
    print(draw())


if __name__ == "__main__":
    main()
