"""A trial as a run: started or gone on with in a process of its own, to a rung and no further.

Covers the commands and what came of them, read from the run's own folder. The processes are
`tapeline train` and `tapeline resume`, and end with whoever started them.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tapeline.config import RunConfig
from tapeline.errors import RunError
from tapeline.runs import RunFolder
from tapeline.runs.folder import RECORD
from tapeline.search.schedule import Job, Rules
from tapeline.search.space import SearchConfig, Values
from tapeline.supervise.processes import die_with_parent

_LAST_LOSSES = 50


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a job.

    Attributes:
        value: of the metric at the rung; nan if the run diverged or failed.
        reason: why there is none.
    """

    value: float
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Stretch:
    """One job, as a run in a folder.

    Attributes:
        base: what trials are laid over.
        base_file: where that stands, beside the trials.
        job: what is to be done.
        values: of the settings that are searched.
    """

    config: SearchConfig
    rules: Rules
    base: RunConfig
    base_file: Path
    job: Job
    values: Values

    @property
    def folder(self) -> Path:
        """The run's."""
        return run_folder(self.base_file.parent, self.job, self.base.seed)

    @property
    def to_step(self) -> int:
        """Where it ends."""
        return self.rules.rungs[self.job.rung]

    def is_busy(self) -> bool:
        """Whether another process still trains this run."""
        if not self.folder.exists():
            return False
        try:
            with RunFolder(self.folder).locked():
                return False
        except RunError:
            return True

    def start(self) -> subprocess.Popen[bytes]:
        """Begin the run, or go on with it; what the process says goes to a file beside it."""
        until = f"stop.after={0 if self.to_step == self.rules.rungs[-1] else self.to_step}"
        if (self.folder / RECORD).exists():
            words, settings = ["resume", str(self.folder)], [until]
        else:
            words = ["train", str(self.base_file), "--out", str(self.folder)]
            settings = [*self._settings(), until]
        argv = [*words, *(word for one in settings for word in ("--set", one))]
        said = self.folder.with_name(f"{self.folder.name}.log")
        said.parent.mkdir(parents=True, exist_ok=True)
        parent = os.getpid()
        with said.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "tapeline", *argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509  no threads here
            )

    def outcome(self, code: int | None) -> Outcome | None:
        """What came of it; None if the run should be gone on with.

        Args:
            code: exit code of the process; None if none was started yet.
        """
        run = RunFolder(self.folder)
        lives = run.attempts()
        last = lives[-1] if lives else {}
        how, step = last.get("how"), last.get("step", 0)
        if how in ("finished", "stopped") and step >= self.to_step:
            return self._judged(run)
        if how in ("failed", "stopped") and code is not None:
            return Outcome(math.nan, last["evidence"])
        if code is not None and code > 0 and how != "preempted":
            return Outcome(math.nan, self._last_words())
        return None

    def _judged(self, run: RunFolder) -> Outcome:
        if self.config.metric == "loss":
            losses = run.losses()
            steps = range(max(1, self.to_step - _LAST_LOSSES + 1), self.to_step + 1)
            found = [losses[step] for step in steps if step in losses]
            value = sum(found) / len(found) if found else math.nan
        else:
            figures = run.validations().get(self.to_step, {})
            value = float(figures.get(self.config.metric.removeprefix("validation."), math.nan))
        reason = None if math.isfinite(value) else f"no finite {self.config.metric}"
        return Outcome(value if math.isfinite(value) else math.nan, reason)

    def _last_words(self) -> str:
        text = self.folder.with_name(f"{self.folder.name}.log").read_text(errors="replace")
        lines = text.strip().splitlines()
        return lines[-1].removeprefix("tapeline: ") if lines else "it said nothing"

    def _settings(self) -> list[str]:
        """What a new run has of its own, on top of the base."""
        base, job = self.base, self.job
        first = self.rules.rungs[0]
        own = {
            "name": f"{base.name}-{self.folder.name}",
            "seed": base.seed + (0 if job.seed is None else 1 + job.seed),
            "data.store": base.data.store,
            "model.folder": base.model.folder,
            "validation.every": (first if first % base.validation.every else base.validation.every),
        }
        if base.data.cache:
            own["data.cache"] = base.data.cache
        if base.checkpoint.durable:
            place = base.checkpoint.durable.rstrip("/")
            own["checkpoint.durable"] = f"{place}/{self.folder.parent.name}/{self.folder.name}"
        if base.checkpoint.notice_file:
            own["checkpoint.notice_file"] = base.checkpoint.notice_file
        return [f"{key}={json.dumps(one)}" for key, one in {**own, **self.values}.items()]


def run_folder(folder: Path, job: Job, seed: int) -> Path:
    """Where the run of a job lies: trials/N, or finals/N/seed-S."""
    if job.seed is None:
        return folder / "trials" / str(job.trial)
    return folder / "finals" / str(job.trial) / f"seed-{seed + 1 + job.seed}"
