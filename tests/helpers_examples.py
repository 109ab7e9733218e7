"""Examples as modules, and processes of their own that may be killed."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import runpy
import signal
import sys
import warnings
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from tapeline.readiness import ready

EXAMPLES = Path(__file__).parents[1] / "examples"
_ready = functools.cache(ready)  # once here, and not in each child


def load_example(name: str) -> ModuleType:
    spec = spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def output_of(name: str, *arguments: object) -> str:
    """What an example prints as a command: to be called in a child."""
    sys.argv = [name, *map(str, arguments)]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return said.getvalue()


def in_child(work: Callable[[], object]) -> object:
    """What `work` returns in a process of its own, as JSON; None if that was killed."""
    _ready()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        warnings.simplefilter("ignore")  # others' own, about what this machine lacks
        try:
            os.write(writing, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        said = stream.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == (0 if said else -signal.SIGKILL)
    return json.loads(said) if said else None


def flip(file: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
