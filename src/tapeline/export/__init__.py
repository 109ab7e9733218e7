"""Export: a run as Prometheus and trackers see it, fed from its journals by a process beside it.

Covers sending what the files tell, once or while the run goes on. The training knows nothing of
it. Does not cover what a run is to a tracker (`runs.view`), nor reading it live (`runs.live`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tapeline.errors import ExportError


@contextlib.contextmanager
def needed(target: str, package: str, extra: str) -> Iterator[None]:
    """Around the import of a package that only one target needs.

    Raises:
        ExportError: it isn't installed; the sentence names the extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ExportError(
            f"--to {target}",
            expected=f"the package {package.replace('_', '-')}",
            found="none installed",
            fix=f'Install it with `pip install "tapeline[{extra}]"`',
        ) from None
