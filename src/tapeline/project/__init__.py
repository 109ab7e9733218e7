"""`tapeline new`: a project that trains on its first day, to be changed from there.

The template lies beside this module as the files it becomes. Nothing in a project depends on it
afterwards.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from string import Template

from tapeline.errors import RunError
from tapeline.files import atomic_folder

_HIDDEN = {"gitignore": ".gitignore"}  # a hidden file would be left out of a package


def create(folder: Path) -> list[Path]:
    """Make `folder` a project of that name: configuration, model, test, README.

    Returns:
        The files, relative to `folder`.

    Raises:
        RunError: the name is none that Python and a shell both take, or the folder is in use.
    """
    name = folder.name
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        raise RunError(
            "the project's name",
            expected="a letter, then letters, digits, - or _",
            found=repr(name),
            fix="Choose another name",
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(
            folder, expected="a new folder", found="one in use", fix="Choose another name"
        )
    made = []
    with atomic_folder(folder) as aside:
        template = resources.files(__package__) / "template"
        # An installer compiles what it puts in place, the template's code too: a folder beside it.
        for file in sorted((f for f in template.iterdir() if f.is_file()), key=str):
            path = Path(_HIDDEN.get(file.name, file.name))
            text = Template(file.read_text(encoding="utf-8")).substitute(name=name)
            (aside / path).write_text(text, encoding="utf-8")
            made.append(path)
    return made
