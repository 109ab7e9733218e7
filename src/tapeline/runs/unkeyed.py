"""Draws and readings in a model's source that no seed of the run reaches, found without running it.

Covers the module of the model and what it imports from its own folder. A search in source text
can't see what a library does inside; `tapeline prove` tries it out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Seeded at the start of a run, but not part of its state: a resume draws other numbers.
_GLOBAL = ("numpy.random.", "random.")
# Never seeded.
_FRESH = (
    *("os.urandom", "uuid.uuid1", "uuid.uuid4", "random.SystemRandom", "secrets."),
    *("time.time", "time.time_ns", "datetime.datetime.now", "torch.seed", "torch.initial_seed"),
)
# With a seed of their own they are what that seed makes them; without one, never the same.
_MAKERS = ("numpy.random.default_rng", "numpy.random.RandomState", "random.Random")
_HARMLESS = ("numpy.random.Generator", "numpy.random.Philox", "numpy.random.SeedSequence")


@dataclass(frozen=True, slots=True)
class Draw:
    """A draw that isn't keyed.

    Attributes:
        where: file and line.
        call: its full name.
        seeded: whether the process's seeding at the start of a run reaches it.
    """

    where: str
    call: str
    seeded: bool


def unkeyed_draws(source: Path) -> list[Draw]:
    """The draws in a module and in those of its folder that it imports.

    A file that is gone or can't be parsed has none: the run's record tells of that by its hash.
    """
    found: list[Draw] = []
    seen: set[Path] = set()
    left = [source]
    while left:
        path = left.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue
        names = _names(tree)
        found += [
            Draw(f"{path.name}:{line}", call, seeded) for line, call, seeded in _calls(tree, names)
        ]
        left += [
            file
            for module in {name.partition(".")[0] for name in names.values()}
            if (file := source.parent / f"{module}.py").is_file()
        ]
    return sorted(found, key=lambda draw: draw.where)


def _names(tree: ast.AST) -> dict[str, str]:
    """What each imported name stands for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                short = alias.asname or alias.name.partition(".")[0]
                found[short] = alias.name if alias.asname else short
        elif isinstance(node, ast.ImportFrom):
            base = f"{node.module}." if node.module else ""
            found |= {a.asname or a.name: f"{base}{a.name}" for a in node.names}
    return found


def _calls(tree: ast.AST, names: dict[str, str]) -> Iterator[tuple[int, str, bool]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        first, *rest = ast.unparse(node.func).split(".")
        name = ".".join([names.get(first, ""), *rest])
        if name.startswith(_HARMLESS):
            continue
        if name in _MAKERS:
            if not (node.args or node.keywords):
                yield node.lineno, name, False
        elif name.startswith(_FRESH):
            yield node.lineno, name, False
        elif name.startswith(_GLOBAL):
            yield node.lineno, name, True
