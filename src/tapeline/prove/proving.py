"""`tapeline prove`: a run without a stop, and the same under real kills on changing ranks.

Both are `tapeline train` and `tapeline resume` in processes of their own. Only settings that leave
a run's bits alone are changed: how often it is logged and saved, how much is kept and where.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tapeline.attempt.parts import check_ranks
from tapeline.config import RunConfig
from tapeline.errors import ConfigError, RunError
from tapeline.files import Journal, atomic_write, sha256_json
from tapeline.prove.cause import MANY_THREADS, ONE_THREAD, determinism_cost_of, find_causes
from tapeline.prove.certificate import NAMES, Certificate, Life
from tapeline.prove.killing import Kill, kill_at, last_step, plan_kills, ranks_of_life, watch
from tapeline.prove.parting import final_hashes, first_parting, journalled
from tapeline.prove.processes import Command
from tapeline.prove.room import make_room
from tapeline.runs import RunFolder
from tapeline.world import World

Say = Callable[[str], None]
Progress = Callable[[int, int], None]
CERTIFICATE, KILLS = "certificate.json", "kills.jsonl"
_SAVES_PER_LIFE = 4


@dataclass(frozen=True, slots=True)
class Trial:
    """What is to be proved, and how hard it is tried.

    Attributes:
        overrides: `key=value` settings on top of it.
        ranks: numbers of ranks; the uninterrupted run has the first, lives take them in turn.
        seed: of the moments.
        every: steps between checkpoints; None takes four in each life. The fewer, the nearer the
            tensor that is named lies to where the runs part.
    """

    config: Path
    overrides: tuple[str, ...]
    kills: int
    ranks: tuple[int, ...]
    seed: int = 0
    every: int | None = None

    def settings(self) -> RunConfig:
        """The configuration.

        Raises:
            ConfigError: it is wrong, or can't be trained on so many ranks, or has no room for the
                kills.
        """
        config = RunConfig.load(self.config, self.overrides)
        for size in self.ranks:
            check_ranks(config.training, World(0, size))
        if config.training.steps < 2 * (self.kills + 1):
            raise ConfigError(
                "training.steps",
                expected=f"at least {2 * (self.kills + 1)}, for {self.kills} kills between them",
                found=str(config.training.steps),
                fix="Train more steps, or kill less often",
            )
        return config


def prove(trial: Trial, out: Path, say: Say, progress: Progress | None = None) -> Certificate:
    """Train twice, once under kills, and compare everything.

    Args:
        out: folder for both runs, the journal of kills and `certificate.json`; what an earlier
            proof left there is replaced.
        say: told what is being done.
        progress: called with the steps done and in all.

    Raises:
        ConfigError: the configuration is wrong.
        RunError: `out` holds something else, or the uninterrupted run didn't reach its end.
    """
    config = trial.settings()
    make_room(out, "proof")
    return _Proof(trial, config, out, say, progress).certificate()


class _Proof:
    def __init__(
        self, trial: Trial, config: RunConfig, out: Path, say: Say, progress: Progress | None
    ) -> None:
        self._trial = trial
        self._config = config
        self._steps = config.training.steps
        self._out = out
        self._say = say
        self._progress = progress
        self._whole, self._killed = out / "whole", out / "killed"
        self._lives: list[Life] = []

    def certificate(self) -> Certificate:
        """Do both runs and compare them."""
        ranks = self._trial.ranks[0]
        self._say(f"uninterrupted, on {_ranks(ranks)}: {self._steps:,} steps")
        with self._train(self._whole, ranks, MANY_THREADS) as command:
            watch(command, self._whole, until=self._steps, progress=self._tell(0))
            contract = command.data()["contract"]
        failure = self._under_kills()
        record = RunFolder(self._whole).record()
        found = Certificate(
            self._subject(record),
            contract,
            {"determinism": record["determinism"], "machine": record["machine"]},
            tuple(self._lives),
            self._hashes(),
            parting=first_parting(self._whole, self._killed),
            failure=failure,
        )
        if found.holds:
            found = replace(found, determinism_cost=determinism_cost_of(self._whole))
        else:
            self._say("they part; looking for the cause")
            equal = found.parting.equal_up_to if found.parting else 0
            causes = find_causes(self._whole, self._killed, equal)
            found = replace(found, causes=tuple(causes))
        atomic_write(self._out / CERTIFICATE, json.dumps(found.as_dict(), indent=2) + "\n")
        return found

    def _under_kills(self) -> str | None:
        """The other run, life by life; returns what one ended with that should have gone on."""
        trial = self._trial
        kills = plan_kills(trial.kills, trial.ranks, self._steps, trial.seed)
        for number, kill in enumerate(kills):
            whom = "all ranks" if len(kill.victims) == kill.ranks else f"rank {kill.victims[0]}"
            self._say(
                f"life {number + 1}, on {_ranks(kill.ranks)}: SIGKILL to {whom} at step "
                f"{kill.at_step:,}"
            )
            if failure := self._live(number, kill):
                return failure
        number = len(kills)
        self._say(f"life {number + 1}, on {_ranks(ranks_of_life(number, trial.ranks))}: to the end")
        return self._live(number, None)

    def _live(self, number: int, kill: Kill | None) -> str | None:
        """One life, to its kill or to the end."""
        ranks = ranks_of_life(number, self._trial.ranks)
        threads = MANY_THREADS if number % 2 else ONE_THREAD
        before = len(RunFolder(self._killed).attempts())
        victims: tuple[int, ...] = ()
        failure = None
        progress = self._tell(self._steps)
        with self._begin(number, ranks, threads) as command:
            try:
                if kill:
                    self._journal({"life": number + 1, "planned": asdict(kill)})
                    killed = kill_at(
                        command,
                        self._killed,
                        at_step=kill.at_step,
                        later=kill.later,
                        victims=kill.victims,
                        progress=progress,
                    )
                    self._journal({"life": number + 1, "killed": asdict(killed)})
                    victims = kill.victims
                else:
                    watch(command, self._killed, until=self._steps, progress=progress)
                    command.data()
            except RunError:
                if not any(code for code in command.wait()):
                    raise  # it reached its end before the kill: nothing was shown
                failure = f"life {number + 1}, {_ranks(ranks)}: {command.last_line()}"
        lives = RunFolder(self._killed).attempts()
        self._lives.append(
            Life(
                ranks,
                threads,
                lives[-1]["from_step"] if len(lives) > before else None,
                "failed" if failure else "killed" if kill else "finished",
                last_step(self._killed),
                victims,
            )
        )
        return failure

    def _begin(self, number: int, ranks: int, threads: int) -> Command:
        if number == 0:
            return self._train(self._killed, ranks, threads)
        return Command("resume", str(self._killed), "--json", ranks=ranks, threads=threads)

    def _train(self, run: Path, ranks: int, threads: int) -> Command:
        words = [*self._trial.overrides, *self._neutral(run)]
        settings = [word for setting in words for word in ("--set", setting)]
        file, out = str(self._trial.config), str(run)
        return Command(
            "train", file, "--out", out, "--json", *settings, ranks=ranks, threads=threads
        )

    def _neutral(self, run: Path) -> list[str]:
        """Settings that show more of a run and leave its bits alone."""
        saves = _SAVES_PER_LIFE * (self._trial.kills + 1)
        every = self._trial.every or max(1, self._steps // saves)
        out = self._out.absolute()
        found = {
            "checkpoint.every": every,
            "checkpoint.keep": self._steps // every + 2,
            "checkpoint.notice_file": json.dumps(str(out / "nobody-writes-this")),
            "log_every": min(self._config.log_every, max(1, self._steps // 100)),
        }
        if self._config.checkpoint.durable:
            found["checkpoint.durable"] = json.dumps(str(out / f"durable-{run.name}"))
        return [f"{key}={value}" for key, value in found.items()]

    def _journal(self, record: dict[str, Any]) -> None:
        with Journal(self._out / KILLS) as journal:
            journal.append(record)

    def _tell(self, before: int) -> Callable[[int], None]:
        def tell(step: int) -> None:
            if self._progress:
                self._progress(before + step, 2 * self._steps)

        return tell

    def _subject(self, record: dict[str, Any]) -> dict[str, Any]:
        return {
            "name": self._config.name,
            "steps": self._steps,
            "config_hash": record["config_hash"],
            "data_fingerprint": record["data"]["fingerprint"],
            "ranks": self._trial.ranks[0],
            "threads": MANY_THREADS,
        }

    def _hashes(self) -> dict[str, tuple[str, str | None]]:
        whole, killed = _ends(self._whole, self._steps), _ends(self._killed, self._steps)
        return {name: (value, killed.get(name)) for name, value in whole.items()}


def _ends(run: Path, steps: int) -> dict[str, str]:
    """Hashes of the state at the end, and of everything journalled; nothing of an unended run."""
    if not (run / "checkpoints" / f"step-{steps:08d}").is_dir():
        return {}
    parts = final_hashes(run, steps)
    losses = journalled(run).snapshot.series["loss"]
    validations = RunFolder(run).validations().items()
    texts = {str(step): repr(figures) for step, figures in validations}  # nan has a text too
    return {
        **{NAMES.get(part, part): value for part, value in parts.items()},
        "losses": hashlib.sha256(losses.values.tobytes()).hexdigest(),
        "validation": sha256_json(texts),
    }


def _ranks(number: int) -> str:
    return f"{number} rank" + ("s" if number > 1 else "")
