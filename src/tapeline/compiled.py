"""Functions compiled by numba: without the interpreter lock, kept on disk where there is a place.

Importing this imports numba, which takes a second: modules that do so are imported when needed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Any:
    """`function` compiled at its first call; kept on disk where numba finds a place for it."""
    compiler = partial(numba.njit, nogil=True, boundscheck=False)
    try:
        return compiler(cache=True)(function)
    except RuntimeError as error:
        if "no locator" not in str(error):
            raise
    # One text and one line for all functions, so that it is said once.
    warnings.warn(
        "tapeline compiles its loops anew in each process, which takes seconds: neither its own "
        "folder nor the home folder can be written to. Set NUMBA_CACHE_DIR to a folder that can.",
        RuntimeWarning,
        stacklevel=1,
    )
    return compiler()(function)
