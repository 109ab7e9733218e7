"""The house of docs/design.md, held by reading the source: floors, imports, ceilings.

A checker takes the source as `{path relative to the package: text}` and returns one sentence per
violation, so that each is tried on a small planted house before it is trusted with the real one.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import pytest

import tapeline

Source = dict[str, str]

FLOORS = (
    (
        "errors",
        "files",
        "clock",
        "compiled",
        "world",
        "machine",
        "configfile",
        "config",
        "session",
        "reliability",
        "quantiles",
        "words",
    ),
    ("tape", "store"),
    ("windows", "checkpoint", "ledger", "signals", "testing"),
    ("training", "supervise", "plan", "runs"),
    ("attempt",),
    ("run", "budget", "ingest", "doctor", "diagnosis", "project", "readiness", "repeat"),
    ("search", "report", "prove", "export"),
    ("tours",),
    ("cli",),
    ("", "__main__"),  # the package's own face, and `python -m tapeline`
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
GROUND = FLOORS[0]
TORCH_FREE_ROOMS = {*GROUND, "tape", "store", "ledger", "signals", "supervise", "plan", "runs"}
TORCH_FREE_MODULES = {"runs/record.py"}
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_LOOP_LINES, MAX_PARAMETERS = 400, 60, 120, 8


def room_of(path: str) -> str:
    """The package or module directly under `tapeline` that a file belongs to."""
    first = PurePosixPath(path).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imports_of(path: str, text: str) -> Iterator[tuple[ast.stmt, str]]:
    """Every import statement of a file, wherever it stands, with the dotted name it brings in."""
    package = ["tapeline", *PurePosixPath(path).parent.parts]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node, f"{base}.{alias.name}") for alias in node.names)


def own_rooms(path: str, text: str) -> Iterator[tuple[ast.stmt, str]]:
    """The imports of our own, each with the room it reaches into."""
    for node, name in imports_of(path, text):
        parts = name.split(".")
        if parts[0] == "tapeline":
            room = parts[1] if len(parts) > 1 else ""
            yield node, room if room in FLOOR else ""


def functions_of(text: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def unknown_rooms(source: Source) -> list[str]:
    return [f"{path}: no floor" for path in source if room_of(path) not in FLOOR]


def imports_up_or_sideways(source: Source) -> list[str]:
    found = []
    for path, text in source.items():
        here = room_of(path)
        if here not in FLOOR:
            continue  # told by `unknown_rooms`
        for node, room in own_rooms(path, text):
            ground = here in GROUND and room in GROUND
            if room != here and FLOOR[room] >= FLOOR[here] and not ground:
                found.append(f"{path}:{node.lineno}: {here} imports {room or 'tapeline'}")
    return found


def ground_cycles(source: Source) -> list[str]:
    graph = {
        room: {r for _, r in own_rooms(f"{room}.py", source.get(f"{room}.py", ""))} & {*GROUND}
        for room in GROUND
    }
    found = []

    def walk(trail: list[str]) -> None:
        for room in sorted(graph[trail[-1]]):
            if room == trail[0]:
                found.append(" -> ".join([*trail, room]))
            elif room not in trail:
                walk([*trail, room])

    for room in GROUND:
        walk([room])
    return found


def torch_imports(source: Source) -> list[str]:
    return [
        f"{path}:{node.lineno}: imports {name}"
        for path, text in source.items()
        if room_of(path) in TORCH_FREE_ROOMS or path in TORCH_FREE_MODULES
        for node, name in imports_of(path, text)
        if "torch" in name.split(".")
    ]


def _statements(node: ast.stmt) -> Iterator[ast.stmt]:
    return (n for n in ast.walk(node) if isinstance(n, ast.stmt))


def late_imports(source: Source) -> list[str]:
    found = []
    for path, text in source.items():
        if room_of(path) == "cli" or PurePosixPath(path).name == "__init__.py":
            continue
        inside = {n.lineno for f in functions_of(text) for s in f.body for n in _statements(s)}
        found += [
            f"{path}:{node.lineno}: late import of {room or 'tapeline'}"
            for node, room in own_rooms(path, text)
            if node.lineno in inside
        ]
    return found


def long_files(source: Source) -> list[str]:
    return [
        f"{path}: {lines} lines"
        for path, text in source.items()
        if (lines := text.count("\n")) > MAX_FILE_LINES
        and not re.search(rf"over {MAX_FILE_LINES} lines because \w", text.partition("\n")[0])
    ]


def long_functions(source: Source) -> list[str]:
    return [
        f"{path}:{node.lineno}: {node.name} has {lines} lines"
        for path, text in source.items()
        for node in functions_of(text)
        if (lines := (node.end_lineno or 0) - node.lineno + 1)
        > (MAX_LOOP_LINES if path == "train/loop.py" else MAX_FUNCTION_LINES)
    ]


def wide_constructors(source: Source) -> list[str]:
    """Too many parameters, written out or made by `@dataclass` from fields without a default.

    Pydantic models are filled by key from files and are not counted.
    """
    found = []
    for path, text in source.items():
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.ClassDef):
                continue
            if any("dataclass" in ast.unparse(d) for d in node.decorator_list):
                count = sum(isinstance(s, ast.AnnAssign) and s.value is None for s in node.body)
            else:
                count = sum(
                    len([*a.posonlyargs, *a.args, *a.kwonlyargs]) - 1
                    for s in node.body
                    if isinstance(s, ast.FunctionDef) and s.name == "__init__"
                    for a in [s.args]
                )
            if count > MAX_PARAMETERS:
                found.append(f"{path}:{node.lineno}: {node.name} takes {count} parameters")
    return found


def unannotated_returns(source: Source) -> list[str]:
    return [
        f"{path}:{node.lineno}: {node.name} has no return type"
        for path, text in source.items()
        for node in functions_of(text)
        if node.returns is None
    ]


def missing_docstrings(source: Source) -> list[str]:
    return [f"{path}: no docstring" for path, text in source.items() if not _docstring(text)]


def _docstring(text: str) -> str | None:
    return ast.get_docstring(ast.parse(text))


def stdlib_names(source: Source) -> list[str]:
    """Files and packages, at any depth, named like a module of the standard library."""
    return [
        f"{path}: `{part}` is a module of the standard library"
        for path in source
        for part in PurePosixPath(path).with_suffix("").parts
        if part in sys.stdlib_module_names and part != "__main__"
    ]


CHECKERS: tuple[Callable[[Source], list[str]], ...] = (
    unknown_rooms,
    imports_up_or_sideways,
    ground_cycles,
    torch_imports,
    late_imports,
    long_files,
    long_functions,
    wide_constructors,
    unannotated_returns,
    missing_docstrings,
    stdlib_names,
)


@pytest.fixture(scope="module")
def house() -> Source:
    root = Path(tapeline.__file__).parent
    return {p.relative_to(root).as_posix(): p.read_text() for p in sorted(root.rglob("*.py"))}


@pytest.mark.parametrize("checker", CHECKERS, ids=lambda c: c.__name__)
def test_the_house_stands(house: Source, checker: Callable[[Source], list[str]]) -> None:
    assert checker(house) == []


def test_the_whole_house_is_read(house: Source) -> None:
    assert {"__init__.py", "errors.py", "store/write.py", "cli/__init__.py"} <= set(house)


@pytest.mark.parametrize(
    ("path", "text", "told"),
    [
        ("store/a.py", "import tapeline.windows.index", "store/a.py:1: store imports windows"),
        ("store/a.py", "from tapeline.tape import x", "store/a.py:1: store imports tape"),
        ("store/a.py", "from tapeline import tape", "store/a.py:1: store imports tape"),
        ("store/a.py", "from ..tape import x", "store/a.py:1: store imports tape"),
        ("store/a.py", "from .. import tape", "store/a.py:1: store imports tape"),
        ("store/a.py", "from tapeline import Shards", "store/a.py:1: store imports tapeline"),
        ("store/a.py", "import tapeline", "store/a.py:1: store imports tapeline"),
        ("store/a.py", "if X:\n    import tapeline.cli", "store/a.py:2: store imports cli"),
        ("store/a.py", "def f():\n    import tapeline.cli", "store/a.py:2: store imports cli"),
        ("run.py", "import tapeline.budget", "run.py:1: run imports budget"),
        ("budget.py", "from .run import start", "budget.py:1: budget imports run"),
        ("report/page.py", "import tapeline.tours", "report/page.py:1: report imports tours"),
        ("config.py", "from tapeline.store import x", "config.py:1: config imports store"),
    ],
)
def test_an_import_up_or_sideways_is_found(path: str, text: str, told: str) -> None:
    assert imports_up_or_sideways({path: text}) == [told]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("store/a.py", "from tapeline.store.b import x"),
        ("store/a.py", "from . import b"),
        ("store/a.py", "from .b import x"),
        ("store/a.py", "from ..errors import StoreError"),
        ("store/a.py", "import tapelines.cli, numpy"),
        ("cli/a.py", "from tapeline.run import start"),
        ("config.py", "from tapeline.errors import ConfigError"),
        ("__init__.py", "from tapeline.cli import main"),
        ("__main__.py", "from tapeline.cli import main"),
    ],
)
def test_an_import_down_or_at_home_is_allowed(path: str, text: str) -> None:
    assert imports_up_or_sideways({path: text}) == []


def test_a_cycle_on_the_ground_is_found() -> None:
    source = {
        "errors.py": "from tapeline.files import f",
        "files.py": "from tapeline import config",
        "config.py": "import tapeline.errors",
        "world.py": "import tapeline.errors",
    }
    assert ground_cycles(source) == [
        "errors -> files -> config -> errors",
        "files -> config -> errors -> files",
        "config -> errors -> files -> config",
    ]
    del source["errors.py"]
    assert ground_cycles(source) == []


@pytest.mark.parametrize(
    ("path", "text", "told"),
    [
        ("tape/a.py", "import torch", ["tape/a.py:1: imports torch"]),
        ("store/a.py", "import torch.nn as nn", ["store/a.py:1: imports torch.nn"]),
        ("plan/a.py", "from torch import nn", ["plan/a.py:1: imports torch.nn"]),
        ("ledger/a.py", "def f():\n    import torch", ["ledger/a.py:2: imports torch"]),
        (
            "supervise/a.py",
            "from safetensors.torch import save",
            ["supervise/a.py:1: imports safetensors.torch.save"],
        ),
        ("runs/record.py", "import torch", ["runs/record.py:1: imports torch"]),
        ("config.py", "import torch", ["config.py:1: imports torch"]),
        ("train/a.py", "import torch", []),
        ("store/a.py", "import torchless", []),
    ],
)
def test_a_torch_import_is_found_where_it_may_not_be(path: str, text: str, told: list[str]) -> None:
    assert torch_imports({path: text}) == told


def test_a_late_import_of_our_own_is_found_outside_cli_and_init() -> None:
    late = "def f():\n    def g():\n        from tapeline.store import Shards"
    source = {"run.py": late, "cli/a.py": late, "__init__.py": late, "store/__init__.py": late}
    assert late_imports(source) == ["run.py:3: late import of store"]
    assert late_imports({"run.py": "def f():\n    import os\nimport tapeline.store"}) == []


def test_a_long_file_is_found_unless_its_first_line_says_why() -> None:
    body = "x = 1\n" * 400
    assert long_files({"run.py": body}) == []
    assert long_files({"run.py": body + "y = 2\n"}) == ["run.py: 401 lines"]
    assert long_files({"run.py": '"""A table, over 400 lines because it is one."""\n' + body}) == []
    assert long_files({"run.py": '"""Over 400 lines."""\n' + body}) == ["run.py: 401 lines"]


def test_a_long_function_is_found() -> None:
    def function(lines: int) -> str:
        return "class C:\n    def f(self):\n" + "        x = 1\n" * (lines - 1)

    assert long_functions({"run.py": function(60)}) == []
    assert long_functions({"run.py": function(61)}) == ["run.py:2: f has 61 lines"]
    assert long_functions({"train/loop.py": function(120)}) == []
    assert long_functions({"train/loop.py": function(121)}) == ["train/loop.py:2: f has 121 lines"]


def test_a_wide_constructor_is_found() -> None:
    def written(count: int) -> str:
        names = ", ".join(f"a{i}" for i in range(count - 1))
        return f"class C:\n    def __init__(self, {names}, *, last): ..."

    def generated(count: int) -> str:
        fields = "".join(f"    a{i}: int\n" for i in range(count))
        return f"@dataclass(frozen=True)\nclass C:\n    x: int = 0\n{fields}"

    assert wide_constructors({"run.py": written(8)}) == []
    assert wide_constructors({"run.py": written(9)}) == ["run.py:1: C takes 9 parameters"]
    assert wide_constructors({"run.py": generated(8)}) == []
    assert wide_constructors({"run.py": generated(9)}) == ["run.py:2: C takes 9 parameters"]


def test_a_missing_return_type_is_found_at_any_depth() -> None:
    text = "def f() -> None:\n    async def g(): ...\nclass C:\n    def h(self): ..."
    assert sorted(unannotated_returns({"run.py": text})) == [
        "run.py:2: g has no return type",
        "run.py:4: h has no return type",
    ]


def test_a_missing_docstring_is_found() -> None:
    assert missing_docstrings({"run.py": "# only a comment\nx = 1"}) == ["run.py: no docstring"]
    assert missing_docstrings({"run.py": '"""What it covers."""'}) == []


def test_a_name_of_the_standard_library_is_found_at_any_depth() -> None:
    assert stdlib_names({"store/csv.py": "", "signal/a.py": "", "__main__.py": ""}) == [
        "store/csv.py: `csv` is a module of the standard library",
        "signal/a.py: `signal` is a module of the standard library",
    ]


def test_a_room_without_a_floor_is_found() -> None:
    assert unknown_rooms({"attic/a.py": "", "helpers.py": "", "store/a.py": ""}) == [
        "attic/a.py: no floor",
        "helpers.py: no floor",
    ]


def test_rooms_without_torch_load_without_it() -> None:
    """What the imports say, seen in a real process: nothing they reach brings torch in."""
    rooms = sorted(r for r in TORCH_FREE_ROOMS if (Path(tapeline.__file__).parent / r).is_dir())
    modules = [*(f"tapeline.{room}" for room in [*rooms, *GROUND]), "tapeline.runs.record"]
    script = f"import sys, {', '.join(modules)}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
