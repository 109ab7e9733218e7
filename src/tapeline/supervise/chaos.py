"""Faults on purpose: a seeded schedule of what goes wrong, done to a supervised run from outside.

Covers: when and what (`schedule`, pure), and doing it to the ranks of a run (`Chaos`). Does not
cover what must hold afterwards: whoever calls compares bits, account and goodput.

    kill     SIGKILL of one rank
    stop     SIGSTOP of one rank: it hangs, and the others with it
    slow     one rank is stopped and continued for a while: nothing may be restarted for it
    full     no file that one rank writes may grow any more (RLIMIT_FSIZE), as on a full disk;
             a rank that only keeps its ledger and metrics goes on without
    corrupt  a bit of the newest checkpoint is changed, and one rank killed: it must not be used
"""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import psutil

from tapeline.ledger import heartbeat_path, read_attempts, read_heartbeat
from tapeline.supervise.processes import published

Kind = Literal["kill", "stop", "slow", "full", "corrupt"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_SLOW_S = 1.0
_STEPS = 12  # after a restart: it trains again, and its checkpoint has shown to be good


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault.

    Attributes:
        after_s: since the run has gone on from the fault before.
        kind: what.
        draw: 64 bits that choose the rank and the place.
    """

    after_s: float
    kind: Kind
    draw: int


def schedule(
    num: int, mtbf_s: float, seed: int, kinds: Sequence[Kind] = KINDS
) -> tuple[Strike, ...]:
    """Faults with exponential times between them, and each kind about equally often.

    Args:
        num: how many.
        mtbf_s: the mean time between two, while the run trains.
        seed: decides all of it.
        kinds: to choose from.
    """
    rng = random.Random(seed)
    strikes: list[Strike] = []
    while len(strikes) < num:
        strikes.extend(
            Strike(rng.expovariate(1 / mtbf_s), kind, rng.getrandbits(64))
            for kind in rng.sample(list(kinds), len(kinds))
        )
    return tuple(strikes[:num])


@dataclass(slots=True)
class Chaos:
    """Does faults to the newest attempt of a supervised run.

    Args:
        run: its folder.
        say: told of each.
    """

    run: Path
    say: Callable[[str], None]
    done: list[tuple[str, Strike]] = field(default_factory=list)
    _saved: list[str] = field(init=False, default_factory=list)

    def strike(self, strike: Strike) -> bool:
        """Do one fault; False if there was no rank to do it to."""
        pids = self.ranks()
        if not pids:
            return False
        rank = sorted(pids)[strike.draw % len(pids)]
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pids[rank])
            self._saved = _whole(self.run)
            what = _DO[strike.kind](self.run, process, strike.draw)
            self.done.append((self.attempt(), strike))
            self.say(f"{strike.kind} rank {rank}{what}")
            return True
        return False

    def ready(self) -> bool:
        """Whether the run has gone on from the last fault: every rank has done some steps."""
        attempt = self.attempt()
        if not attempt or (self.done and self.done[-1][0] == attempt and not self._survived()):
            return False
        pids = self.ranks()
        beats = [read_heartbeat(heartbeat_path(self.run, rank)) for rank in pids]
        if not beats or not all(
            b and b.pid == p for b, p in zip(beats, pids.values(), strict=True)
        ):
            return False
        steps = min(beat.step for beat in beats if beat)
        begun = max((a.from_step for a in read_attempts(self.run)[-1:]), default=steps)
        return steps >= begun + _STEPS

    def _survived(self) -> bool:
        """Whether the attempt that was struck last goes on nevertheless."""
        kind = self.done[-1][1].kind
        # Two: the first may have been under way when the disk became full.
        return kind == "slow" or (
            kind == "full" and len(set(_whole(self.run)) - set(self._saved)) > 1
        )

    def attempt(self) -> str:
        """The folder's name of the newest attempt; empty before the first."""
        return max((path.name for path in (self.run / "supervise").glob("attempt-*")), default="")

    def ranks(self) -> dict[int, int]:
        """The processes of the ranks that run now, by rank."""
        found = {}
        for path in (self.run / "supervise" / self.attempt()).glob("rank-*.json"):
            content = published(path)
            if content and "code" not in content:
                found[int(path.stem.partition("-")[2])] = int(content["pid"])
        return found


def _kill(_: Path, process: psutil.Process, __: int) -> str:
    process.kill()
    return ""


def _stop(_: Path, process: psutil.Process, __: int) -> str:
    process.suspend()
    return ""


def _slow(_: Path, process: psutil.Process, __: int) -> str:
    deadline = time.monotonic() + _SLOW_S
    while time.monotonic() < deadline:
        process.suspend()
        time.sleep(0.1)
        process.resume()
        time.sleep(0.05)
    return f" for {_SLOW_S:g} s"


def _full(_: Path, process: psutil.Process, __: int) -> str:
    limit = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (0, limit[1]))
    return ": its files can't grow"


def _corrupt(run: Path, process: psutil.Process, draw: int) -> str:
    # Stopped first: nothing newer may be saved between the damage and the kill.
    process.send_signal(signal.SIGSTOP)
    whole = _whole(run)
    told = ", no checkpoint yet"
    if len(whole) > 1:
        newest = run / "checkpoints" / whole[-1]
        files = sorted(path for path in newest.rglob("*") if path.is_file())
        path = files[draw % len(files)]
        place = draw // 7 % max(1, path.stat().st_size)
        with path.open("r+b") as stream:
            stream.seek(place)
            (byte,) = stream.read(1) or b"\0"
            stream.seek(place)
            stream.write(bytes([byte ^ (1 << draw % 8)]))
        told = f", {newest.name}/{path.name} changed at byte {place}"
    process.kill()
    return told


def _whole(run: Path) -> list[str]:
    """The folders of the checkpoints that were committed, in the order of their steps."""
    return sorted(path.parent.name for path in (run / "checkpoints").glob("step-*/manifest.json"))


_DO: dict[Kind, Callable[[Path, psutil.Process, int], str]] = {
    "kill": _kill,
    "stop": _stop,
    "slow": _slow,
    "full": _full,
    "corrupt": _corrupt,
}
