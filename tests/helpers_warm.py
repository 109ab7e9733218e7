"""`python` and `tapeline` for scripts, without the seconds that their imports take.

`with tools(folder):` puts both into a folder for PATH. What they run are processes of their own,
forked from one that has imported torch and the package and has done nothing else. What is sent to
the process in front (signals, SIGKILL too) goes to the one behind, before anything that is asked
for later starts. Where such a process starts Python in turn, it forks: a true child, to be killed
and waited for. Python itself takes over where an option or a variable is meant for its start, for
libraries when loaded, or to be found by (a supervisor finds its ranks by theirs). Linux only.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path

_READ_AT_START = (
    *("PYTHON", "MKL_", "OPENBLAS_", "NUMBA_", "KMP_", "ATEN_", "LD_", "TORCH"),
    "TAPELINE_SUPERVISED",
)
_ONE_THREAD = dict.fromkeys(("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
_NEEDS_AN_EXTRA = ("tapeline.export", "tapeline.search", "tapeline.project.template", "__main__")
_FRONT = """\
#!{python} -IS
import json, os, signal, socket, sys

words = {words} + sys.argv[1:]
read = {{k: v for k, v in os.environ.items() if k.startswith({prefixes})}}
read = {{**{one}, **read}}
plain = words[:1] != ["-P"] and words[:1] or words[1:2]
if read != {read} or not plain or (plain[0].startswith("-") and plain[0] != "-m"):
    os.execv({python!r}, [{python!r}, *words])
line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
line.connect({address!r})
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: line.send(bytes([number])))
asked = {{"words": words, "cwd": os.getcwd(), "environment": dict(os.environ)}}
socket.send_fds(line, [json.dumps(asked).encode()], [0, 1, 2])
code = int(line.recv(16) or 1)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@contextlib.contextmanager
def tools(folder: Path) -> Iterator[Path]:
    """The folder with `python` and `tapeline`, as long as the block lasts."""
    address = f"\0tapeline-tests-{os.getpid()}-{id(folder)}"
    read = _read_at_start(os.environ)
    for name, words in (("python", []), ("tapeline", ["-m", "tapeline"])):
        shown = {
            "python": sys.executable,
            "words": words,
            "one": _ONE_THREAD,
            "prefixes": _READ_AT_START,
        }
        (folder / name).write_text(_FRONT.format(read=read, address=address, **shown))
        (folder / name).chmod(0o755)
    with subprocess.Popen(
        [sys.executable, "-P", __file__, address.replace("\0", "@")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, **_ONE_THREAD},
    ) as server:
        assert server.stdout.readline() == b"ready\n"
        yield folder
        server.stdin.close()


class _Server:
    """Forks a process for each that asks, and tells it the end."""

    def __init__(self, address: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(address)
        self._listener.listen(64)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        self._lines: dict[socket.socket, int] = {}  # to the pid behind
        self._ends: dict[int, socket.socket] = {}  # of a pidfd

    def serve(self) -> None:
        while True:
            ready = {key.fileobj for key, _ in self._selector.select()}
            for end in ready & self._ends.keys():
                self._ended(end)
            for line in ready & self._lines.keys():  # those that have gone before those that come
                self._told(line)
            if sys.stdin in ready:
                return  # with all of them
            if self._listener in ready:
                self._start(self._listener.accept()[0])

    def _start(self, line: socket.socket) -> None:
        message, descriptors, _, _ = socket.recv_fds(line, 1 << 20, 3)
        parent = os.getpid()
        pid = os.fork() if message else None
        if pid == 0:
            die_with_parent(parent)
            os.setsid()
            asked = json.loads(message)
            _become(asked["words"], asked["cwd"], asked["environment"], descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if pid is None:  # killed before it could ask
            line.close()
            return
        end = os.pidfd_open(pid)
        self._lines[line], self._ends[end] = pid, line
        self._selector.register(line, selectors.EVENT_READ)
        self._selector.register(end, selectors.EVENT_READ)

    def _told(self, line: socket.socket) -> None:
        number = line.recv(1)
        os.kill(self._lines[line], number[0] if number else signal.SIGKILL)
        if not number:
            end = next(end for end, its in self._ends.items() if its is line)
            os.waitid(os.P_PIDFD, end, os.WEXITED | os.WNOWAIT)
            self._ended(end)

    def _ended(self, end: int) -> None:
        line = self._ends.pop(end)
        _, status = os.waitpid(self._lines.pop(line), 0)
        for file in (line, end):
            self._selector.unregister(file)
        with contextlib.suppress(BrokenPipeError):
            line.send(str(os.waitstatus_to_exitcode(status)).encode())
        line.close()
        os.close(end)


class _Popen(subprocess.Popen):
    """Forks where Python itself would be started anew."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        words, environment = list(map(str, args)), dict(env or os.environ)
        if words[0] != sys.executable or not _is_plain(words[1:], environment) or pass_fds:
            given = (args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
            return super()._execute_child(*given)
        _, _, _, *pipes = rest
        here = [pipes[number] for number in (0, 3, 5)]  # its standard input, output, error
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if not self.pid:
            if preexec_fn:
                preexec_fn()
            if rest[14]:
                os.setsid()
            _become(words[1:], cwd, environment, here)
        self._child_created = True
        self._close_pipe_fds(*pipes[:6])
        return None


def _is_plain(words: list[str], environment: dict[str, str]) -> bool:
    first = next((word for word in words if word != "-P"), "-")
    return _read_at_start(environment) == _read_at_start(os.environ) and (
        first == "-m" or not first.startswith("-")
    )


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    read = {name: text for name, text in environment.items() if name.startswith(_READ_AT_START)}
    return {**_ONE_THREAD, **read}


def _become(words: list[str], cwd: str | None, environment: dict, descriptors: list[int]) -> None:
    """Turn this fork into the process that was asked for, and run it to its end."""
    gc.freeze()  # whatever has a descriptor that is closed here stays
    code = 1
    try:
        _enter(cwd, environment, descriptors)
        _run([word for word in words if word != "-P"], words[0] == "-P")
        code = 0
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        code = -signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)


def _enter(cwd: str | None, environment: dict, descriptors: list[int]) -> None:
    for number, descriptor in enumerate(descriptors):
        if descriptor != -1:
            os.dup2(descriptor, number)
    os.closerange(3, 1 << 12)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.chdir(cwd or ".")
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(environment)
    if (wanted := os.environ.get("OMP_NUM_THREADS")) != threads:
        torch.set_num_threads(int(wanted or os.cpu_count()))
    np.random.seed()  # noqa: NPY002  a user's model draws from it
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    subprocess.Popen = _Popen


def _run(words: list[str], safe_path: bool) -> None:
    if words[0] == "-m":
        name = words[1]
        sys.argv = [name, *words[2:]]
        sys.path = [*([] if safe_path else [str(Path.cwd())]), *_PATH]
        if not hasattr(sys.modules.get(name), "__path__"):
            sys.modules.pop(name, None)  # runpy warns of a module that runs twice
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path = [*([] if safe_path else [str(Path(words[0]).resolve().parent)]), *_PATH]
        runpy.run_path(words[0], run_name="__main__")


def _import_all() -> None:
    for module in pkgutil.walk_packages(tapeline.__path__, "tapeline."):
        if not module.name.startswith(_NEEDS_AN_EXTRA) and "__main__" not in module.name:
            importlib.import_module(module.name)
    ready()
    gc.freeze()  # a collection in a fork would copy the pages of all that was imported


if __name__ == "__main__":
    import numpy as np
    import torch

    import tapeline
    from tapeline.readiness import ready
    from tapeline.supervise.processes import die_with_parent

    _PATH = [*sys.path]
    _import_all()
    its = _Server(sys.argv[1].replace("@", "\0"))
    print("ready", flush=True)
    its.serve()
