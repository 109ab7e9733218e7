"""A run for Prometheus: served on request, or as a text file for the node exporter.

Each scrape looks at the run's files, so what is given is never older than the scrape. What isn't
known is left out, since unknown isn't 0, and `tapeline_run_healthy` says 0 of a run that is stuck,
dead or can't be seen. Names don't collide with those of a supervisor's own text file.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tapeline.clock import Clock
from tapeline.errors import ExportError
from tapeline.ledger.phases import NS_PER_S
from tapeline.runs import RunFolder
from tapeline.runs.live import LiveRun, LiveView
from tapeline.runs.view import view_of

_OF_RECORD = ("commit", "code", "data", "config_hash")
_END_SEEN_S = 60.0  # a few of the usual intervals between scrapes


class RunCollector(Collector):
    """Looks at a run at each scrape.

    Args:
        clock: for the ages of heartbeats and the time of the look.

    Attributes:
        registry: of its own; nothing of this process is in it.
        seen: the run at the last scrape.
        end_seen: set once a scrape was told that the run has ended.

    Raises:
        RunError: the folder isn't a run's.
    """

    def __init__(self, run: Path, clock: Clock) -> None:
        self._name = str(run.absolute())
        self._view = LiveView(run, clock)
        self.seen = self._view.look()
        self._clock = clock
        self._tags = view_of(RunFolder(run, clock)).tags
        self.end_seen = threading.Event()
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def describe(self) -> list[Metric]:
        """Nothing beforehand: a run needn't be looked at to be registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The run now.

        Raises:
            RunError: a line of its journals is damaged.
        """
        self.seen = seen = self._view.look()
        yield self._gauge(
            "info", "What the run is.", {k: self._tags[k] for k in _OF_RECORD if k in self._tags}
        )
        yield from self._of_job(seen)
        yield from self._of_ranks(seen)
        yield self._gauge(
            "export_timestamp_seconds",
            "When the run was looked at, since 1970.",
            {},
            self._clock.wall_ns() / NS_PER_S,
        )
        if seen.ended:
            self.end_seen.set()

    def look(self) -> LiveRun:
        """The run now, outside of any scrape."""
        return self._view.look()

    def _of_job(self, seen: LiveRun) -> Iterator[Metric]:
        account = seen.account
        yield self._gauge("state", "What it does, in a word.", {"state": seen.state})
        for name, text, value in (
            ("healthy", "Whether it runs, or has finished.", seen.healthy),
            ("ended", "Whether nothing more is to come.", seen.ended),
            ("steps", "Steps that all ranks have done.", seen.step),
            ("target_steps", "Steps that it is to do.", seen.target),
            ("loss", "Of the last step journalled.", seen.losses[-1][1] if seen.losses else None),
            ("goodput_ratio", "Useful time over all time.", account.goodput if account else None),
            ("ettr_ratio", "Neither lost nor startup.", account.ettr if account else None),
            (
                "redone_steps",
                "Done for nothing, all ranks.",
                account.job.redone_steps if account else None,
            ),
            ("account_known", "Whether the ledgers could be read.", account is not None),
        ):
            yield self._gauge(name, text, {}, value)
        for name, text, count in (
            ("attempts", "Lives that have begun.", len(seen.lives)),
            ("restarts", "Lives after the first.", max(0, len(seen.lives) - 1)),
        ):
            counted = CounterMetricFamily(f"tapeline_run_{name}", text, labels=["run"])
            counted.add_metric([self._name], count)
            yield counted
        found = CounterMetricFamily(
            "tapeline_run_findings", "What watchers saw.", labels=["run", "watcher"]
        )
        for watcher, number in Counter(one["watcher"] for one in seen.findings).items():
            found.add_metric([self._name, watcher], number)
        yield found

    def _of_ranks(self, seen: LiveRun) -> Iterator[Metric]:
        open_life = bool(seen.lives) and "how" not in seen.lives[-1]
        for name, text, values in (
            ("rank_steps", "Steps done in the last life.", {r.rank: r.step for r in seen.ranks}),
            (
                "heartbeat_age_seconds",
                "Since the rank came forward, while no end is told.",
                {r.rank: r.age_s for r in seen.ranks if open_life},
            ),
            ("rank_alive", "Whether its process is there.", {r.rank: r.lives for r in seen.ranks}),
            (
                "samples_per_second",
                "Windows a second, while it lives.",
                {r.rank: r.samples_per_s for r in seen.ranks},
            ),
        ):
            family = GaugeMetricFamily(f"tapeline_run_{name}", text, labels=["run", "rank"])
            for rank, value in values.items():
                if value is not None:
                    family.add_metric([self._name, str(rank)], float(value))
            yield family
        buckets = GaugeMetricFamily(
            "tapeline_run_bucket_seconds",
            "Time of all lives, by what it was worth; a rollback turns useful into lost.",
            labels=["run", "rank", "bucket"],
        )
        for account in seen.account.ranks if seen.account else ():
            for bucket, spent_ns in account.times.buckets_ns.items():
                buckets.add_metric([self._name, str(account.rank), bucket], spent_ns / NS_PER_S)
        yield buckets

    def _gauge(
        self, name: str, text: str, labels: Mapping[str, str], value: float | None = 1.0
    ) -> Metric:
        family = GaugeMetricFamily(f"tapeline_run_{name}", text, labels=["run", *labels])
        if value is not None:
            family.add_metric([self._name, *labels.values()], float(value))
        return family

    def write(self, path: Path) -> None:
        """Write what a scrape would be given to a text file, aside and renamed."""
        write_to_textfile(str(path), self.registry)


class Served:
    """A run behind HTTP, until `close`.

    Args:
        host, port: where it listens; port 0 takes a free one.

    Raises:
        ExportError: it can't listen there.
    """

    def __init__(self, collector: RunCollector, host: str, port: int) -> None:
        self._collector = collector
        try:
            self._server, self._thread = start_http_server(
                port, addr=host, registry=collector.registry
            )
        except (OSError, OverflowError) as error:
            raise ExportError(
                f"--host {host} --port {port}",
                expected="an address to listen on",
                found=str(error),
                fix="Choose another port with --port, or --port 0 for a free one",
            ) from None
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def wait_for_end_seen(self) -> None:
        """Wait until a scrape has seen that the run has ended, but not for ever."""
        self._collector.end_seen.wait(_END_SEEN_S)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
