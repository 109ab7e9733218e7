"""Commands as forked processes: as real to a signal as started ones, and their imports are done."""

import os
import runpy
import subprocess
import sys

from helpers_ranks import FORKS


class Forked:
    """What `tapeline.prove` needs of a Popen."""

    def __init__(self, arguments, environment, output):
        self._process = FORKS.Process(
            target=_run, args=(list(arguments), dict(environment), output)
        )
        self._process.start()
        self.pid = self._process.pid

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("forked", timeout)
        return self._process.exitcode

    def kill(self):
        self._process.kill()


def _run(arguments, environment, output):
    for end, number in ((".out", 1), (".err", 2)):
        os.dup2(os.open(output.with_suffix(end), os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments
    sys.stdout, sys.stderr = (os.fdopen(os.dup(n), "w", buffering=1) for n in (1, 2))
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
