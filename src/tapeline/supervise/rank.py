"""One rank of an attempt: a small process that starts it, keeps its output, and notes its end.

    python -m tapeline.supervise.rank FOLDER PROGRAM ARGUMENT…

The rank is a fork of this process, made before anything heavy is imported, so that its exit code
or signal and its time are known to the nanosecond, which torchrun doesn't tell. In FOLDER, of the
attempt, there are for rank N `rank-N.json` (pid, then its end), `rank-N.out`, `rank-N.err`, and
`stacks-N.txt` after SIGUSR2, which ends the rank as it does any process, but not before it has
written its stacks. PROGRAM is a file, or the name of a module. If this process is killed, the
kernel ends the rank.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tapeline.supervise.processes import die_with_parent, publish

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def main(argv: list[str]) -> NoReturn:
    """Run one rank; ends as it does."""
    folder, command = Path(argv[0]), argv[1:]
    rank, parent = int(os.environ.get("RANK", "0")), os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    pid = fork_rank(folder, rank, command)
    die_with_parent(parent)

    def pass_on(number: int, _: FrameType | None) -> None:
        os.kill(pid, number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    _, status = os.waitpid(pid, 0)
    code = note_end(folder, rank, pid, status)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def fork_rank(folder: Path, rank: int, command: list[str]) -> int:
    """Start a rank as a child of this process.

    Args:
        folder: of the attempt.
        rank: its number.
        command: program and arguments.

    Returns:
        Its pid.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        publish(folder / f"rank-{rank}.json", {"pid": pid})
        return pid
    code = 1
    try:
        die_with_parent(parent)
        _become(folder, rank, command)
        code = 0
    except SystemExit as end:
        code = _code_of(end)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def note_end(folder: Path, rank: int, pid: int, status: int) -> int:
    """Publish how a rank ended.

    Args:
        folder, rank, pid: of the rank.
        status: as `waitpid` gives it.

    Returns:
        Its exit code; minus the number of the signal that ended it.
    """
    code = os.waitstatus_to_exitcode(status)
    publish(folder / f"rank-{rank}.json", {"pid": pid, "code": code, "ended_ns": time.time_ns()})
    return code


def _become(folder: Path, rank: int, command: list[str]) -> None:
    """Turn this fork into the rank, and run it to its end."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        descriptor = os.open(folder / f"rank-{rank}.{name}", flags, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(n), "w", buffering=1) for n in (1, 2))
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The file stays open for as long as the process lives: the handler writes to its descriptor.
    # Chained to the default, which ends the process: one that was stopped and goes on for its
    # stacks would otherwise do steps until it is killed, as if it had never hung.
    stacks = (folder / f"stacks-{rank}.txt").open("w")
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True, chain=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    program = command[0]
    sys.argv = [program, *command[1:]]
    if program.endswith(".py"):
        sys.path[0] = str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def _code_of(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    main(sys.argv[1:])
