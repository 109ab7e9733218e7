"""Who runs what next: asynchronous halving that pauses trials, resumes and promotes them.

Pure, without a clock: what is decided follows from the order of calls alone, so that whoever makes
the same calls decides the same. A search of full runs is a ladder of one rung.

Source: Li et al. 2020, arXiv 1810.05934, algorithm 2. Differences: a trial goes on from where it
was paused; a rung cuts only once it has the least number of peers; what isn't a number is behind
everything that is, counts as a peer, and never goes on; and the budget's end leaves room for one
full run, so that no search ends without one.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

MOST_DEATHS = 5  # of whoever ran a job; after that the job counts as failed


@dataclass(frozen=True, slots=True)
class Rules:
    """What a search goes by.

    Attributes:
        rungs: steps at which trials are compared, ascending; the last one is a full run.
        eta: one in so many goes on from a rung.
        min_peers: results that a rung needs before any trial goes on from it.
        budget_steps: in all, finals left out.
        most_trials: that can be made; None for any number.
        picks: best trials that are trained again in the end.
        seeds: of each pick.
    """

    rungs: tuple[int, ...]
    eta: int
    min_peers: int
    budget_steps: int
    most_trials: int | None
    picks: int
    seeds: int


@dataclass(frozen=True, slots=True)
class Job:
    """One stretch of one run.

    Attributes:
        trial: its number, from 0.
        rung: whose step it goes to.
        seed: which of a final's seeds, from 0; None for a trial itself.
    """

    trial: int
    rung: int
    seed: int | None = None


class Schedule:
    """The state of a search, as far as its decisions depend on it.

    A job is given out under a lease, any whole number that names it, and ends once.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.running: dict[int, Job] = {}
        self.scores: list[dict[int, float]] = [{} for _ in rules.rungs]  # by trial, less is better
        self.finals: dict[int, dict[int, float]] = {}  # scores by trial and seed
        self.num_trials = 0
        self.spent_steps = 0  # of trials, with what is running
        self._promoted: list[set[int]] = [set() for _ in rules.rungs]
        self._returned: list[Job] = []
        self._deaths: Counter[Job] = Counter()
        self._final_jobs: list[Job] | None = None

    def added_steps(self, rung: int) -> int:
        """Steps from the rung below to a rung."""
        return self.rules.rungs[rung] - (self.rules.rungs[rung - 1] if rung else 0)

    def next_job(self) -> Job | None:
        """What would be given out now; None if nothing is, at least until a job ends."""
        if self._returned:
            return self._returned[0]
        if self._final_jobs is None:
            job = self._promotion() or self._fresh()
            if job or self.running:
                return job
            return self._last_climb() or next(iter(self._finals_due()), None)
        return next(iter(self._final_jobs), None)

    @property
    def is_over(self) -> bool:
        """Whether nothing runs and nothing is left to do."""
        return not self.running and self.next_job() is None

    def assign(self, lease: int) -> Job | None:
        """Give out the next job under a lease, if there is one."""
        job = self.next_job()
        if job is None:
            return None
        if self._returned:
            self._returned.pop(0)
        elif job.seed is not None:
            if self._final_jobs is None:
                self._final_jobs = self._finals_due()
            self._final_jobs.pop(0)
        else:
            self.spent_steps += self.added_steps(job.rung)
            if job.rung:
                self._promoted[job.rung - 1].add(job.trial)
            else:
                self.num_trials += 1
        self.running[lease] = job
        return job

    def give_back(self, lease: int, *, died: bool) -> Job | None:
        """Whoever ran a job was told to stop, or died: it is the next to be given out.

        Returns:
            The job, if it has now failed for having died too often.
        """
        job = self.running.pop(lease)
        self._deaths[job] += died
        if self._deaths[job] < MOST_DEATHS:
            self._returned.append(job)
            return None
        self._note(job, math.nan)
        return job

    def end(self, lease: int, score: float) -> None:
        """A job has come to its end.

        A run that failed has cost its whole stretch: a search in which all fail would have no end
        else.

        Args:
            lease: it was given out under.
            score: less is better; nan for a run that diverged or failed.
        """
        self._note(self.running.pop(lease), score)

    def best(self, number: int) -> list[tuple[int, int, float]]:
        """(trial, rung, score) of the best trials on the highest rung that has any."""
        for rung in range(len(self.scores) - 1, -1, -1):
            if found := [one for one in self.ranked(rung) if not math.isnan(one[1])]:
                return [(trial, rung, score) for trial, score in found[:number]]
        return []

    def ranked(self, rung: int) -> list[tuple[int, float]]:
        """(trial, score) of a rung, the best first; those that aren't numbers last, as equals."""

        def place(one: tuple[int, float]) -> tuple[bool, float, int]:
            trial, score = one
            return math.isnan(score), 0.0 if math.isnan(score) else score, trial

        return sorted(self.scores[rung].items(), key=place)

    def _note(self, job: Job, score: float) -> None:
        if job.seed is None:
            self.scores[job.rung][job.trial] = score
        else:
            self.finals.setdefault(job.trial, {})[job.seed] = score

    def _promotion(self) -> Job | None:
        for rung in range(len(self.rules.rungs) - 2, -1, -1):
            num = len(self.scores[rung])
            if num < self.rules.min_peers or not self._is_affordable(rung + 1):
                continue
            for trial, score in self.ranked(rung)[: num // self.rules.eta]:
                if trial not in self._promoted[rung] and not math.isnan(score):
                    return Job(trial, rung + 1)
        return None

    def _fresh(self) -> Job | None:
        most = self.rules.most_trials
        if not self._is_affordable(0) or (most is not None and self.num_trials >= most):
            return None
        return Job(self.num_trials, 0)

    def _last_climb(self) -> Job | None:
        """With nothing else to do and no full run yet: the best of the highest rung goes on."""
        *below, full = self.scores
        if all(map(math.isnan, full.values())):
            for rung in range(len(below) - 1, -1, -1):
                for trial, score in self.ranked(rung):
                    is_new = trial not in self._promoted[rung] and not math.isnan(score)
                    if is_new and self._is_affordable(rung + 1):
                        return Job(trial, rung + 1)
        return None

    def _is_affordable(self, rung: int) -> bool:
        """Whether the budget holds a stretch to a rung, and the way from there to one full run."""
        steps = self.rules.rungs
        reached = max([rung, *(r + 1 for r, going in enumerate(self._promoted) if going)])
        left = self.rules.budget_steps - self.spent_steps - self.added_steps(rung)
        return left >= steps[-1] - steps[reached]

    def _finals_due(self) -> list[Job]:
        top = len(self.rules.rungs) - 1
        return [
            Job(trial, top, seed)
            for trial, _, _ in self.best(self.rules.picks)
            for seed in range(self.rules.seeds)
        ]
