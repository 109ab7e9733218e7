"""Places that ranks are not started on for a while: those that fail again and again.

A place is `host:slot`, a slot one device (or one share) of a machine. k failures within a window
put it in quarantine, with a reason and an expiry; afterwards it is on probation, when one failure
puts it back for twice as long. Kept in one JSON file, and told in the words of Slurm and
Kubernetes. Who changes the file reads it again and holds a lock, so that a person may change it
while a supervisor runs. Does not cover who failed first (`signals.triage` says that).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tapeline.errors import RunError
from tapeline.files import atomic_write

_S = 1_000_000_000
FILE = Path("supervise", "quarantine.json")  # in the run's folder
State = Literal["out", "probation", "watched"]


@dataclass(frozen=True, slots=True)
class Rule:
    """When a place is put in quarantine, and for how long.

    Attributes:
        failures: as many.
        window_s: within so long.
        expiry_s: of the first quarantine; the n-th in a row lasts 2^(n−1) times as long.
        probation_s: how long after it one failure is enough.
    """

    failures: int = 3
    window_s: float = 86_400.0
    expiry_s: float = 14_400.0
    probation_s: float = 86_400.0


@dataclass(slots=True)
class Place:
    """What is known of one place; times by the wall clock, since 1970.

    Attributes:
        failed_ns: its failures in the window.
        until_ns: when its quarantine ends; 0 if it never was in one.
        times: quarantines in a row.
        reason: of the last.
    """

    failed_ns: list[int] = field(default_factory=list)
    until_ns: int = 0
    times: int = 0
    reason: str = ""


class Quarantine:
    """The places of a run, in a file.

    Args:
        path: the file; it need not be there, its folder must.
        rule: when and for how long.

    Raises:
        RunError: the file isn't one of these; also of every method.
    """

    def __init__(self, path: Path, rule: Rule) -> None:
        self._path = path
        self._rule = rule
        self.places()  # a file that isn't one is told before a run begins

    def places(self) -> dict[str, Place]:
        """What is known of each place, by name."""
        try:
            known = json.loads(self._path.read_text()) if self._path.exists() else {}
            return {name: Place(**place) for name, place in sorted(known.items())}
        except (ValueError, TypeError, AttributeError):
            raise RunError(
                self._path,
                expected="places with their failures, as a supervisor writes them",
                found="something else",
                fix="Restore the file, or remove it to lift every quarantine",
            ) from None

    def failed(self, name: str, reason: str, now_ns: int) -> bool:
        """Count a failure against a place; whether that puts it in quarantine."""
        with self._change() as places:
            place = places.setdefault(name, Place())
            since_ns = now_ns - int(self._rule.window_s * _S)
            place.failed_ns = [ns for ns in place.failed_ns if ns > since_ns] + [now_ns]
            state = self.state(place, now_ns)
            enough = len(place.failed_ns) >= self._rule.failures or state == "probation"
            out = enough and state != "out"
            if out:
                self._put(place, reason, now_ns)
        return out

    def put(self, name: str, reason: str, now_ns: int) -> None:
        """Put a place in quarantine; from now on, if it is in one.

        Raises:
            RunError: that is no name of a place.
        """
        if not re.fullmatch(r"[^\s:]+:\d+", name):
            raise RunError(
                "place",
                expected="host:slot, such as node7:0",
                found=repr(name),
                fix="See `tapeline quarantine list` for those that are known",
            )
        with self._change() as places:
            self._put(places.setdefault(name, Place()), reason, now_ns)

    def forget(self, name: str) -> None:
        """Lift the quarantine of a place, and forget its failures.

        Raises:
            RunError: nothing is known of it.
        """
        with self._change() as places:
            if places.pop(name, None) is None:
                raise RunError(
                    name,
                    expected=f"one of the places {', '.join(places)}" if places else "a place",
                    found="none of that name",
                    fix="See `tapeline quarantine list`",
                )

    def state(self, place: Place, now_ns: int) -> State:
        """Whether it is out, was a short while ago, or neither."""
        if place.until_ns > now_ns:
            return "out"
        probation = now_ns - place.until_ns <= int(self._rule.probation_s * _S)
        return "probation" if place.until_ns and probation else "watched"

    def out(self, now_ns: int) -> dict[str, str]:
        """The places in quarantine, with the reason of each."""
        return {n: p.reason for n, p in self.places().items() if p.until_ns > now_ns}

    def _put(self, place: Place, reason: str, now_ns: int) -> None:
        again = self.state(place, now_ns) == "probation"
        place.times = place.times + 1 if again else 1
        place.until_ns = now_ns + int(self._rule.expiry_s * _S) * 2 ** (place.times - 1)
        place.failed_ns, place.reason = [], reason

    @contextlib.contextmanager
    def _change(self) -> Iterator[dict[str, Place]]:
        """The places, kept as the block leaves them if it ends well."""
        with self._path.with_name(f".{self._path.stem}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            places = self.places()
            yield places
            content = {name: asdict(place) for name, place in sorted(places.items())}
            atomic_write(self._path, json.dumps(content, indent=1))


def hosts(places: Iterable[str]) -> list[str]:
    """The machines that places are on."""
    return sorted({name.rpartition(":")[0] for name in places})


def slurm_exclude(places: Iterable[str]) -> str:
    """For `sbatch --exclude`: the machines, between commas; nothing where there is none."""
    return ",".join(hosts(places))


def kubernetes_affinity(places: Iterable[str]) -> dict[str, Any]:
    """For `spec.affinity` of a pod: not on these machines; empty where there is none."""
    if not (names := hosts(places)):
        return {}
    wanted = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": names}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [wanted]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
