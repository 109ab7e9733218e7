"""Places that ranks are not started on for a while: those that fail again and again.

A place is `host:slot`, a slot one device (or one share) of a machine. k failures within a window
put it in quarantine, with a reason and an expiry; afterwards it is on probation, when one failure
puts it back for twice as long. Kept in one JSON file, and told in the words of Slurm and
Kubernetes. Does not cover who failed first (`signals.triage` says that).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tapeline.errors import RunError
from tapeline.files import atomic_write

_S = 1_000_000_000


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
    """The places of a run, read from a file and kept in it.

    Args:
        path: the file; it need not be there.
        rule: when and for how long.

    Raises:
        RunError: the file isn't one of these.
    """

    def __init__(self, path: Path, rule: Rule) -> None:
        self._path = path
        self._rule = rule
        try:
            known = json.loads(path.read_text()) if path.exists() else {}
            self.places = {name: Place(**place) for name, place in known.items()}
        except (ValueError, TypeError, AttributeError):
            raise RunError(
                path,
                expected="places with their failures, as a supervisor writes them",
                found="something else",
                fix="Restore the file, or remove it to lift every quarantine",
            ) from None

    def failed(self, name: str, reason: str, now_ns: int) -> bool:
        """Count a failure against a place; whether that puts it in quarantine."""
        place = self.places.setdefault(name, Place())
        since_ns = now_ns - int(self._rule.window_s * _S)
        place.failed_ns = [ns for ns in place.failed_ns if ns > since_ns] + [now_ns]
        enough = len(place.failed_ns) >= self._rule.failures or self.on_probation(name, now_ns)
        if enough and place.until_ns <= now_ns:
            self.put(name, reason, now_ns)
            return True
        self._write()
        return False

    def put(self, name: str, reason: str, now_ns: int) -> None:
        """Put a place in quarantine."""
        again = self.on_probation(name, now_ns)
        place = self.places.setdefault(name, Place())
        place.times = place.times + 1 if again else 1
        place.until_ns = now_ns + int(self._rule.expiry_s * _S) * 2 ** (place.times - 1)
        place.failed_ns, place.reason = [], reason
        self._write()

    def on_probation(self, name: str, now_ns: int) -> bool:
        """Whether its quarantine ended a short while ago."""
        place = self.places.get(name)
        return bool(
            place
            and place.until_ns
            and place.until_ns <= now_ns <= place.until_ns + int(self._rule.probation_s * _S)
        )

    def out(self, now_ns: int) -> dict[str, str]:
        """The places in quarantine, with the reason of each."""
        return {n: p.reason for n, p in sorted(self.places.items()) if p.until_ns > now_ns}

    def _write(self) -> None:
        content = {name: asdict(place) for name, place in sorted(self.places.items())}
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
