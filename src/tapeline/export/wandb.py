"""A run for Weights & Biases, offline: a folder for `wandb sync`, written anew by each export.

Nothing here talks to a network. The run's id is always the same, so that a later sync goes to the
same run. Steps stand in a column `step`, so that what is journalled late has its place. Of large
files it gets names, sizes and hashes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import wandb

from tapeline.export.tracking import Progress, Sent
from tapeline.ledger.phases import NS_PER_S
from tapeline.runs.view import RunView

_STEP = "step"


class WandbOffline:
    """Writes a run to a folder; what an earlier export of it wrote there is replaced.

    Args:
        folder: of any number of runs; `wandb/offline-run-…-ID` and `wandb/files-ID` are made in it.
        project: that a sync sends it to.

    Attributes:
        where: the folder of this run, once something was sent.
    """

    def __init__(self, folder: Path, project: str, run_id: str) -> None:
        self.where = str(folder)
        self._folder, self._project, self._id = folder, project, run_id
        self._run: Any = None
        self._sent = Sent()
        self._files: list[dict[str, Any]] = []

    def send(self, view: RunView, state: str, progress: Progress) -> int:
        """Write what is new, or all of it anew, where steps were done again."""
        if self._run is None or self._sent.take_back(view) is not None:
            self._begin(view)
        rows: dict[int, dict[str, float]] = defaultdict(dict)
        for name, series in self._sent.news(view).items():
            for step, value, time_ns in view.timed(series):
                rows[step][name] = value
                rows[step].setdefault("_timestamp", time_ns / NS_PER_S)  # rank 0's come first
        for done, step in enumerate(sorted(rows), 1):
            self._run.log({**rows[step], _STEP: step})
            progress(done, len(rows))
        self._run.summary.update({**view.summary, "state": state, "lives": len(view.begins)})
        self._artifacts(view)
        return sum(len(row) - 1 for row in rows.values())

    def close(self) -> None:
        """Finish the folder."""
        if self._run is not None:
            self._run.finish()
            wandb.teardown()

    def _begin(self, view: RunView) -> None:
        if self._run is not None:
            self._run.finish()
        for earlier in self._folder.glob(f"wandb/*-{self._id}"):
            shutil.rmtree(earlier)
        self._folder.mkdir(parents=True, exist_ok=True)
        # Files wait there for the sync, which else finds them on this machine alone.
        data = self._folder.absolute() / "wandb" / f"files-{self._id}"
        os.environ |= {"WANDB_DATA_DIR": str(data), "WANDB_CACHE_DIR": str(data / "cache")}
        self._sent, self._files = Sent(), []
        self._run = wandb.init(
            project=self._project,
            dir=str(self._folder),
            id=self._id,
            name=view.name,
            config={**view.params, "tags": dict(view.tags)},
            mode="offline",
            settings=wandb.Settings(
                console="off",
                disable_code=True,
                disable_git=True,
                quiet=True,
                silent=True,
                x_disable_meta=True,
                x_disable_stats=True,
            ),
        )
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)
        self.where = str(Path(self._run.dir).parent)

    def _artifacts(self, view: RunView) -> None:
        """The files that aren't a checkpoint's as one artifact, with a list of all."""
        listed = [one.as_dict() for one in view.artifacts]
        if listed == self._files:
            return
        artifact = wandb.Artifact(f"run-{self._id}", type="run")
        for one in view.artifacts:
            if not one.in_checkpoint:
                artifact.add_file(str(one.path), name=one.name)
        with artifact.new_file("files.json") as stream:
            stream.write(json.dumps(listed, indent=1))
        self._run.log_artifact(artifact)
        self._files = listed
