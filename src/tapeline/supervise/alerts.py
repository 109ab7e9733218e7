"""Telling somebody: a command, a webhook, and gauges for Prometheus.

An alert of one kind is sent at most once per cool-down, with how many were held back. Each is
delivered by a process of its own, which is ended if it takes too long: whoever sends never waits.
One that can't be delivered is told on standard error and stops nothing. Does not cover who is to be
told: that is the command's or the webhook's part.

    python -m tapeline.supervise.alerts     posts TAPELINE_ALERT to TAPELINE_WEBHOOK
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tapeline.clock import Clock, utc
from tapeline.supervise.processes import die_with_parent

_POLL_S, _REAP_S = 0.02, 1.0
_NS_PER_S = 1_000_000_000
_POST = (sys.executable, "-m", "tapeline.supervise.alerts")


@dataclass(slots=True)
class _Delivery:
    """One under way.

    Attributes:
        what: is used for it.
        child: the process.
        due_s: by the monotonic clock, when it is ended; never again once it was.
    """

    what: str
    child: subprocess.Popen[str]
    due_s: float


@dataclass(slots=True)
class Alerts:
    """Where alerts go.

    Args:
        say: told of every alert that is sent, or held back with other words than the one before
            of its kind; and of failures to deliver.
        clock: for the cool-down and the time in an alert.
        command: a shell command, with the alert as JSON in TAPELINE_ALERT.
        webhook: a URL that gets it by POST.
        cooldown_s: between two of one kind.
        longest_s: that a delivery may take.
    """

    say: Callable[[str], None]
    clock: Clock
    command: str | None = None
    webhook: str | None = None
    cooldown_s: float = 300.0
    longest_s: float = 10.0
    _under_way: list[_Delivery] = field(default_factory=list)
    _sent_ns: dict[str, int] = field(default_factory=dict)
    _held: dict[str, int] = field(default_factory=dict)
    _said: dict[str, str] = field(default_factory=dict)

    def send(self, kind: str, text: str) -> bool:
        """Send an alert; whether it went out, which within the cool-down it doesn't."""
        now_ns, before_ns = self.clock.monotonic_ns(), self._sent_ns.get(kind)
        cools = before_ns is not None and now_ns - before_ns < self.cooldown_s * _NS_PER_S
        if not cools or text != self._said[kind]:
            self.say(text)
            self._said[kind] = text
        if cools:
            self._held[kind] = self._held.get(kind, 0) + 1
            return False
        self._sent_ns[kind] = now_ns
        held = self._held.pop(kind, 0)
        wall = utc(self.clock.wall_ns())
        body = json.dumps({"kind": kind, "text": text, "time": wall, "held_back": held})
        if self.command:
            self._start("command", ("/bin/sh", "-c", self.command), {"TAPELINE_ALERT": body})
        if self.webhook:
            named = {"TAPELINE_ALERT": body, "TAPELINE_WEBHOOK": self.webhook}
            self._start("webhook", _POST, named)
        return True

    def look(self) -> None:
        """Tell how deliveries went, and end those that take too long; to be called often."""
        for delivery in [*self._under_way]:
            child, what = delivery.child, f"the alert {delivery.what}"
            code = child.poll()
            if code is not None:
                self._under_way.remove(delivery)
                with child:  # closes what it said
                    said = child.stderr.read().strip() if child.stderr else ""
                if code and math.isfinite(delivery.due_s):
                    self.say(f"{what} failed" + (f": {said}" if said else f", exit code {code}"))
            elif time.monotonic() > delivery.due_s:
                delivery.due_s = math.inf
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                self.say(f"{what} failed: it took longer than {self.longest_s:g} s, and was ended")

    def close(self) -> None:
        """Wait for what is under way; not longer than it may take."""
        deadline_s = time.monotonic() + self.longest_s + _REAP_S
        while self._under_way and time.monotonic() < deadline_s:
            self.look()
            time.sleep(_POLL_S)

    def _start(self, what: str, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        parent = os.getpid()
        try:
            child = subprocess.Popen(
                argv,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE if argv is _POST else None,
                text=True,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509  no threads here
            )
        except OSError as error:
            self.say(f"the alert {what} failed: {error}")
            return
        self._under_way.append(_Delivery(what, child, time.monotonic() + self.longest_s))


def _post() -> None:
    """Deliver one alert to a webhook, as its own process; ends it with why that failed."""
    body, url = os.environ["TAPELINE_ALERT"], os.environ["TAPELINE_WEBHOOK"]
    try:
        request = urllib.request.Request(
            url, body.encode(), {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request):
            pass
    except (urllib.error.URLError, OSError, ValueError) as error:
        sys.exit(str(error))


def write_gauges(path: Path, run: str, gauges: Mapping[str, float | None]) -> None:
    """Write gauges as a text file for Prometheus' node exporter (its textfile collector).

    Args:
        path: ends with .prom.
        run: the label.
        gauges: by name; one without a value is left out, since unknown isn't 0.
    """
    label = run.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    lines = []
    for name, value in gauges.items():
        if value is not None:
            lines += [f"# TYPE tapeline_{name} gauge", f'tapeline_{name}{{run="{label}"}} {value}']
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text("\n".join(lines) + "\n")
    temporary.replace(path)


if __name__ == "__main__":
    _post()
