"""Telling somebody: a command, a webhook, and gauges for Prometheus.

An alert of one kind is sent at most once per cool-down, with how many were held back. One that
can't be delivered is told on standard error and stops nothing. Does not cover who is to be told:
that is the command's or the webhook's part.
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tapeline.clock import Clock, utc

_TIMEOUT_S = 10.0
_NS_PER_S = 1_000_000_000


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
    """

    say: Callable[[str], None]
    clock: Clock
    command: str | None = None
    webhook: str | None = None
    cooldown_s: float = 300.0
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
            self._run(self.command, body)
        if self.webhook:
            self._post(self.webhook, body)
        return True

    def _run(self, command: str, body: str) -> None:
        try:
            done = subprocess.run(
                command,
                shell=True,
                env={**os.environ, "TAPELINE_ALERT": body},
                stdout=subprocess.DEVNULL,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            self.say(f"the alert command failed: {error}")
            return
        if done.returncode:
            self.say(f"the alert command failed with exit code {done.returncode}")

    def _post(self, url: str, body: str) -> None:
        request = urllib.request.Request(
            url, body.encode(), {"Content-Type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S):
                pass
        except (urllib.error.URLError, OSError, ValueError) as error:
            self.say(f"the alert webhook failed: {error}")


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
