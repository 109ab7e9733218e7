"""What the files of a run tell, read once for its page, through the rooms that wrote them.

Covers a run that lives, ended or died, and one of which a part is missing or damaged: that part
is left out and told. Measures nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tapeline.diagnosis import Diagnosis, diagnose
from tapeline.errors import TapelineError
from tapeline.files import read_journal
from tapeline.ledger import Account, RankLedger, account, read_attempts, read_ledgers
from tapeline.runs import Metrics, RunFolder, read_metrics
from tapeline.runs.summary import summary


@dataclass(frozen=True)  # without slots, for what is read when first asked for
class SeenRun:
    """A run as its files tell it.

    Attributes:
        record: what it was made of.
        account: where the time of all its lives went; None without ledgers that add up.
        diagnosis: the verdicts; None where too little can be read.
        problems: what couldn't be read, a sentence each.
    """

    run: RunFolder
    record: dict[str, Any]
    ledgers: list[RankLedger]
    account: Account | None
    diagnosis: Diagnosis | None
    metrics: list[Metrics]
    summary: dict[str, Any]
    problems: tuple[str, ...]

    @classmethod
    def read(
        cls,
        folder: Path,
        price_per_hour: float | None = None,
        progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> SeenRun:
        """Read a run.

        Args:
            price_per_hour: of one rank's accelerator; None leaves money out.
            progress: told how many journals of ranks were read, of how many.

        Raises:
            RunError: `folder` is no run, or one of its journals is damaged.
        """
        run = RunFolder(folder)
        record = run.record()
        paths = sorted((folder / "metrics").glob("rank-*.jsonl"), key=_rank)
        problems: list[str] = []
        ledgers, accounted = _account(folder, price_per_hour, problems)
        metrics = []
        for done, path in enumerate(paths, start=1):
            metrics.append(read_metrics(path))
            progress(done, len(paths))
        return cls(
            run=run,
            record=record,
            ledgers=ledgers,
            account=accounted,
            diagnosis=_diagnosis(folder, accounted, problems),
            metrics=metrics,
            summary=summary(folder),
            problems=tuple(dict.fromkeys(problems)),
        )

    @cached_property
    def lives(self) -> list[dict[str, Any]]:
        """Its attempts, each start with its end."""
        return self.run.attempts()

    @cached_property
    def findings(self) -> list[dict[str, Any]]:
        """Of the watchers, in all lives."""
        return read_journal(self.run.findings_path)

    @cached_property
    def checkpoints(self) -> list[int]:
        """Steps of the checkpoints that are kept."""
        manifests = self.run.checkpoints_path.glob("step-*/manifest.json")
        return sorted(int(path.parent.name.removeprefix("step-")) for path in manifests)

    @property
    def name(self) -> str:
        """Of the run."""
        return str(self.record["config"]["name"])

    @property
    def goes_on(self) -> bool:
        """Whether any of its processes is seen to live."""
        return self.diagnosis is not None and self.diagnosis.lives

    @property
    def crashed(self) -> bool:
        """Whether the last of its attempts ended without saying so, by the evidence."""
        return self.diagnosis is not None and self.diagnosis.verdicts[0].kind == "crash"

    def how(self, life: dict[str, Any]) -> str:
        """How a life ended, as far as that is known."""
        if "how" in life:
            return str(life["how"])
        if self.goes_on:
            return "goes on"
        return "crashed" if self.crashed else "not known: it was killed, or lives elsewhere"

    def as_dict(self) -> dict[str, Any]:
        """The figures of the page as JSON can hold them."""
        return {
            "run": str(self.run.path),
            "account": self.account and self.account.as_dict(),
            "diagnosis": self.diagnosis and self.diagnosis.as_dict(),
            "attempts": self.lives,
            "findings": self.findings,
            "checkpoints": self.checkpoints,
            "summary": self.summary,
            "record": self.record,
            "problems": list(self.problems),
        }


def _rank(path: Path) -> int:
    return int(path.stem.removeprefix("rank-"))


def _account(
    folder: Path, price_per_hour: float | None, problems: list[str]
) -> tuple[list[RankLedger], Account | None]:
    try:
        ledgers = read_ledgers(folder)
        return ledgers, account(ledgers, read_attempts(folder), price_per_hour=price_per_hour)
    except TapelineError as error:
        problems.append(str(error))
        return [], None


def _diagnosis(folder: Path, known: Account | None, problems: list[str]) -> Diagnosis | None:
    try:
        return diagnose(folder, account=known)
    except TapelineError as error:
        problems.append(str(error))
        return None
