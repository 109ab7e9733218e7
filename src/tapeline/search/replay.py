"""A search as its journal tells it: the same entries in the same order, the same decisions.

    ask        a worker wants a job; the entry's place is the lease of what it gets
    begin      what it got, as it read it, and for a new trial the configuration it chose
    end        the metric, or why there is none
    give back  the worker was told to stop, or was found dead by another one

What comes under a lease that was given back is void: the job is somebody else's by then. The
decisions themselves are `schedule`'s and `suggest`'s; nothing here looks at a clock or a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from tapeline.search.journal import Entry
from tapeline.search.schedule import MOST_DEATHS, Job, Rules, Schedule
from tapeline.search.space import SearchConfig, Values
from tapeline.search.suggest import Trial, suggest


class Replay:
    """The state after some entries."""

    def __init__(self, config: SearchConfig, rules: Rules) -> None:
        self.config = config
        self.rules = rules
        self.schedule = Schedule(rules)
        self.trials: dict[int, Trial] = {}
        self.owners: dict[int, str] = {}  # worker by lease, of what runs
        self.num_given_back = {"died": 0, "stopped": 0}

    def apply(self, place: int, entry: Entry) -> None:
        """Take in the next entry."""
        kind = entry["kind"]
        if kind == "ask":
            if job := self.schedule.assign(place):
                self.owners[place] = entry["worker"]
                self.trials.setdefault(job.trial, Trial(job.trial))
            return
        lease = entry["lease"]
        if lease not in self.owners:
            return
        if kind == "begin":
            self.trials[self.schedule.running[lease].trial].values = entry["values"]
        elif kind == "end":
            self._end(lease, entry)
        elif kind == "give back":
            self._give_back(lease, died=entry["died"])

    def suggested(self, job: Job) -> Values:
        """The configuration of a job's trial; chosen now, if it wasn't yet."""
        full = self.rules.rungs[-1]
        values = self.trials[job.trial].values
        return values or suggest(self.config, self.trials.values(), job.trial, full)

    def _end(self, lease: int, entry: Entry) -> None:
        del self.owners[lease]
        job = self.schedule.running[lease]
        value = math.nan if entry["value"] is None else float(entry["value"])
        self._note(job, value, entry.get("reason"))
        score = -value if self.config.direction == "maximize" else value
        self.schedule.end(lease, score)

    def _give_back(self, lease: int, *, died: bool) -> None:
        del self.owners[lease]
        self.num_given_back["died" if died else "stopped"] += 1
        if failed := self.schedule.give_back(lease, died=died):
            self._note(failed, math.nan, f"whoever ran it died {MOST_DEATHS} times")

    def _note(self, job: Job, value: float, reason: str | None) -> None:
        if job.seed is None:
            trial = self.trials[job.trial]
            trial.results[self.rules.rungs[job.rung]] = value
            trial.reason = reason


def departures(config: SearchConfig, rules: Rules, entries: Iterable[Entry]) -> list[str]:
    """Where workers did something else than a sequential replay of the journal decides.

    Args:
        entries: in their order, from the first one.
    """
    replay = Replay(config, rules)
    found = []
    decided: dict[int, tuple[Job, Values]] = {}
    for place, entry in enumerate(entries):
        replay.apply(place, entry)
        if entry["kind"] == "ask" and (job := replay.schedule.running.get(place)):
            decided[place] = (job, replay.suggested(job))
        elif entry["kind"] == "begin":
            did = (Job(**entry["job"]), entry["values"])
            if did != decided.get(entry["lease"]):
                found.append(f"entry {place}: {did}, not {decided.get(entry['lease'])}")
    return found
