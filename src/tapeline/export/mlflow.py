"""A run for an MLflow server, which goes on with it where an earlier export stopped.

The server is asked which of its runs this is, by a tag, and how far it has each metric; nothing is
kept beside the run. What it has stays: of a step that was sent and then done again by a later
life, it holds the first value. Of large files it gets names, sizes and hashes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from tapeline.errors import ExportError
from tapeline.export.tracking import Progress, Sent
from tapeline.runs.live import FINAL
from tapeline.runs.view import RunView

_RUN_TAG = "tapeline.run"
# The server's own limits, of its release 2.
_BATCH_METRICS, _BATCH_PARAMS = 1000, 100
_LONGEST_VALUE = 5000
_NO_KEY = re.compile(r"[^\w\-. :/]")
_NS_PER_MS = 1_000_000
_RUNS_ON = ("running", "stale", "broken", "unknown", "not begun")


class MlflowServer:
    """Sends a run to a tracking server.

    Args:
        uri: of the server, or of anything else that MLflow takes.
        experiment: its name; made if it isn't there.
        run_id: what the run is found by.

    Attributes:
        where: the run's page.
    """

    def __init__(self, uri: str, experiment: str, run_id: str) -> None:
        self.where = uri
        self._uri, self._experiment, self._tag = uri, experiment, run_id
        self._run_id = ""
        self._sent = Sent()
        with self._told():
            self._client = MlflowClient(tracking_uri=uri)
        self._listed: list[dict[str, Any]] = []

    def send(self, view: RunView, state: str, progress: Progress) -> int:
        """Send what the server lacks."""
        view = replace(view, metrics={_key(name): one for name, one in view.metrics.items()})
        with self._told():
            if not self._run_id:
                self._find(view)
                self._describe(view)
            number = self._values(view, progress)
            self._state(view, state)
            self._files(view)
        return number

    def close(self) -> None:
        """Nothing is held open."""

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except MlflowException as error:
            # It counts as sent what may not have arrived: the server is asked again.
            self._run_id, self._sent = "", Sent()
            raise ExportError(
                f"--uri {self._uri}",
                expected="an MLflow server that takes the run",
                found=str(error).partition("\n")[0][:200],
                fix="Start one with `mlflow server`, or give another --uri",
            ) from None

    def _find(self, view: RunView) -> None:
        client = self._client
        there = client.get_experiment_by_name(self._experiment)
        experiment = there.experiment_id if there else client.create_experiment(self._experiment)
        runs = client.search_runs([experiment], f"tags.`{_RUN_TAG}` = '{self._tag}'")
        if runs:
            run = runs[0]
            held = run.to_proto().data.metrics
            self._sent = Sent({metric.key: (metric.step, 0) for metric in held})
        else:
            began_ms = min((int(ends[0]) for _, ends in view.times.values()), default=0)
            run = client.create_run(
                experiment,
                start_time=began_ms // _NS_PER_MS,
                run_name=view.name,
                tags={_RUN_TAG: self._tag},
            )
        self._run_id = run.info.run_id
        self.where = f"{self._uri}/#/experiments/{experiment}/runs/{self._run_id}"

    def _describe(self, view: RunView) -> None:
        params = [
            Param(_key(key), str(value)[:_LONGEST_VALUE]) for key, value in view.params.items()
        ]
        for first in range(0, len(params), _BATCH_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + _BATCH_PARAMS])

    def _values(self, view: RunView, progress: Progress) -> int:
        news = self._sent.news(view)
        done, total = 0, sum(map(len, news.values()))
        metrics = (
            Metric(name, value, time_ns // _NS_PER_MS, step)
            for name, series in news.items()
            for step, value, time_ns in view.timed(series)
        )
        while batch := list(itertools.islice(metrics, _BATCH_METRICS)):
            self._client.log_batch(self._run_id, metrics=batch)
            done += len(batch)
            progress(done, total)
        return done

    def _state(self, view: RunView, state: str) -> None:
        last_ms = max((int(ends[-1]) for _, ends in view.times.values()), default=0) // _NS_PER_MS
        last_step = max((int(one.steps[-1]) for one in view.metrics.values()), default=0)
        tags = {f"tapeline.{key}": value[:_LONGEST_VALUE] for key, value in view.tags.items()}
        tags["tapeline.state"] = state
        if commit := view.tags.get("commit"):
            tags["mlflow.source.git.commit"] = commit
        self._client.log_batch(
            self._run_id,
            metrics=[
                Metric(f"run/{name}", value, last_ms, last_step)
                for name, value in view.summary.items()
            ],
            tags=[RunTag(key, value) for key, value in tags.items()],
        )
        if state in _RUNS_ON:
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            word = {"failed": "FAILED"} | dict.fromkeys(FINAL, "FINISHED")
            self._client.set_terminated(self._run_id, word.get(state, "KILLED"), last_ms)

    def _files(self, view: RunView) -> None:
        """The files that aren't a checkpoint's, when they have changed; a list of all."""
        listed = [one.as_dict() for one in view.artifacts]
        for one, about in zip(view.artifacts, listed, strict=True):
            if not one.in_checkpoint and about not in self._listed:
                self._client.log_artifact(self._run_id, str(one.path))
        if listed != self._listed:
            self._client.log_text(self._run_id, json.dumps(listed, indent=1), "files.json")
        self._listed = listed


def _key(name: str) -> str:
    """A name with what the server doesn't take replaced."""
    return _NO_KEY.sub("_", name)
