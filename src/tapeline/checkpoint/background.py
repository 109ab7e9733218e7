"""One piece of work at a time, in a thread; its failure waits until it is asked for.

The thread is not a daemon: an interpreter that ends, by its last line, an exception or Ctrl-C,
waits for it, so a write that was begun is finished.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs work in a thread, never two at once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether work is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Begin work; what was begun before must have ended."""
        assert not self.busy, "two pieces of work at once"
        thread = threading.Thread(target=self._run, args=(work,), name=self._name, daemon=False)
        self._thread = thread
        thread.start()

    def wait(self) -> None:
        """Return when no work is in progress."""
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
        self._thread = None

    def raise_failure(self) -> None:
        """Raise what ended the work, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._failure = error
