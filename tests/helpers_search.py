"""Workers on a made-up surface instead of training."""

from __future__ import annotations

import math
from pathlib import Path

from tapeline.search.folder import SearchFolder
from tapeline.search.space import SearchConfig
from tapeline.search.trial import Outcome, Stretch
from tapeline.search.worker import Worker

SPACE = {
    "training": {"learning_rate": {"log": [1e-4, 1e-1]}},
    "model": {"arguments": {"hidden": {"integer": [1, 64]}}},
}
RUNGS = (3, 9, 27)


def new_search(folder: Path, *, steps: int = RUNGS[-1], storage: str | None = None, **changes):
    """A search on its folder; nothing has been done yet."""
    base = folder.parent / "base.toml"
    base.write_text(f'[data]\nstore = "nowhere"\n[training]\nsteps = {steps}\n')
    known = {
        "base": str(base),
        "space": SPACE,
        "budget_steps": 400,
        "lease_s": 1.0,
        "rungs": {"min_steps": RUNGS[0]},
        "finals": {"picks": 1, "seeds": 2},
    }
    config = SearchConfig.from_mapping({**known, **changes}, "test")
    return SearchFolder.begin(folder, config, storage)


class Walk:
    """A made-up run: three steps at each look, kept in a file; what it comes to is known."""

    def __init__(self, stretch: Stretch) -> None:
        self._stretch = stretch
        self._file = stretch.folder / "steps"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.touch()

    def is_busy(self) -> bool:
        return False

    def start(self) -> Walk:
        return self

    def poll(self) -> int | None:
        if self.done() >= self._stretch.to_step:
            return 0
        with self._file.open("a") as steps:
            steps.write("...")
        return None

    def terminate(self) -> None:
        pass

    def kill(self) -> None:
        pass

    def wait(self) -> int:
        return 0

    def done(self) -> int:
        return self._file.stat().st_size

    def outcome(self, code: int | None) -> Outcome | None:
        if self.done() < self._stretch.to_step:
            return None
        value = height(self._stretch.values)
        return Outcome(value, None if math.isfinite(value) else "it diverged")


def height(values) -> float:
    """Of the surface; a large learning rate diverges."""
    if values["training.learning_rate"] > 0.05:
        return math.nan
    rate = math.log10(values["training.learning_rate"]) + 2.5
    return rate**2 + (values["model.arguments.hidden"] / 64 - 0.3) ** 2


def work(folder: str) -> None:
    """What a worker's process does."""
    Worker(SearchFolder.open(Path(folder)), Walk, poll_s=0.05).work()
