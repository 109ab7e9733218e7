"""Triage: every planted cause found in simulated jobs, none in healthy ones, and no guessing."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from helpers_signals import WALL_NS, Job, changed, ended, stopped_in_a_collective
from hypothesis import given
from hypothesis import strategies as st

from tapeline.signals import (
    Evidence,
    Exit,
    Heartbeat,
    Kernels,
    Limits,
    RankEvidence,
    StepTimes,
    Verdict,
    triage,
)

SEEDS = range(20)

RAISED = Exit(1, exception="ValueError: a bad row", time_ns=WALL_NS)
KILLED = Exit(signal=signal.SIGKILL, time_ns=WALL_NS)
SEGFAULT = Exit(signal=signal.SIGSEGV, time_ns=WALL_NS)
MUTE = Exit(3, time_ns=WALL_NS)

# What is planted, how, what is to be said of it first, and of which ranks.
Plant = Callable[[int], Evidence]
PLANTED: dict[str, tuple[Plant, str, tuple[int, ...]]] = {
    "slow loader": (lambda s: Job(data_s=0.03).play(s), "starvation", ()),
    "slow loader, alone": (lambda s: Job(ranks=1, data_s=0.02).play(s), "starvation", ()),
    "slow rank": (lambda s: Job(slow_rank=(2, 1.4)).play(s), "persistent straggler", (2,)),
    "slow rank of two": (
        lambda s: Job(ranks=2, slow_rank=(0, 1.4)).play(s),
        "persistent straggler",
        (0,),
    ),
    "slow loader of one rank": (
        lambda s: Job(slow_loader=(1, 0.03)).play(s),
        "persistent straggler",
        (1,),
    ),
    "slow loader of one rank, beside loaders that keep up": (
        lambda s: Job(slow_loader=(1, 0.03), batch_s=(0.02, 0.08, 0.02, 0.02)).play(s),
        "persistent straggler",
        (1,),
    ),
    "slow loaders of all ranks in step": (
        lambda s: Job(slow_loader=(1, 0.03), batch_s=(0.081, 0.083, 0.08, 0.081)).play(s),
        "starvation",
        (),
    ),
    "pauses here and there": (
        lambda s: Job(pauses=(0.1, 0.05)).play(s),
        "rotating straggler",
        (),
    ),
    "pauses on two ranks": (
        lambda s: Job(ranks=2, pauses=(0.3, 0.05)).play(s),
        "rotating straggler",
        (),
    ),
    "noisy ranks": (lambda s: Job(ranks=8, compute_cv=0.2).play(s), "rotating straggler", ()),
    "slow all-reduce": (lambda s: Job(collective_s=0.02).play(s), "communication-bound", ()),
    "slow all-reduce on a noisy machine": (
        lambda s: Job(collective_s=0.02, shared_cv=0.3).play(s),
        "communication-bound",
        (),
    ),
    "slow rank, by histograms": (
        lambda s: Job(slow_rank=(2, 1.4), aligned=False).play(s),
        "persistent straggler",
        (2,),
    ),
    "noisy ranks, by histograms": (
        lambda s: Job(ranks=8, compute_cv=0.2, aligned=False).play(s),
        "rotating straggler",
        (),
    ),
    "slow all-reduce, by histograms": (
        lambda s: Job(collective_s=0.02, aligned=False).play(s),
        "communication-bound",
        (),
    ),
    "synchronous slow checkpoint": (
        lambda s: Job(checkpoint_every=20, checkpoint_s=0.3).play(s),
        "checkpoint-bound",
        (),
    ),
    "tiny kernels": (
        lambda s: Job(kernels=Kernels(3000, 4.0, 0.3)).play(s),
        "small kernels",
        (),
    ),
    "a loop of many operations, and a large one": (
        lambda s: Job(kernels=Kernels(3000, 9000.0, 0.3)).play(s),
        "small kernels",
        (),
    ),
    "stopped in a collective": (
        lambda s: stopped_in_a_collective(Job().play(s), s % 4, s),
        "hang",
        (-1,),
    ),
    "raised": (lambda s: ended(Job().play(s), s % 4, RAISED, s), "crash", (-1,)),
    "killed": (lambda s: ended(Job().play(s), s % 4, KILLED, s), "crash", (-1,)),
    "segmentation fault": (lambda s: ended(Job().play(s), s % 4, SEGFAULT, s), "crash", (-1,)),
    "exit without a word": (lambda s: ended(Job().play(s), s % 4, MUTE, s), "crash", (-1,)),
    "gone without a trace": (lambda s: ended(Job().play(s), s % 4, Exit(), s), "crash", (-1,)),
}
HEALTHY = {
    "four ranks": Job(),
    "alone": Job(ranks=1),
    "two ranks": Job(ranks=2),
    "sixteen ranks, some noise": Job(ranks=16, compute_cv=0.03),
    "a busy machine": Job(compute_cv=0.06, pauses=(0.005, 0.05)),
    "a noisy machine": Job(shared_cv=0.3),
    "four ranks, by histograms": Job(aligned=False),
    "small kernels that keep busy": Job(kernels=Kernels(3000, 6.0, 0.9)),
    "few large kernels": Job(kernels=Kernels(20, 900.0, 0.7)),
    "pauses between few kernels": Job(kernels=Kernels(30, 900.0, 0.02)),
}


@functools.cache
def verdicts_on(name: str) -> list[tuple[Verdict, ...]]:
    """What is said of each seed."""
    return [triage(PLANTED[name][0](seed)) for seed in SEEDS]


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_is_diagnosed(name: str):
    _, kind, ranks = PLANTED[name]
    right = 0
    for seed, (first, *_) in zip(SEEDS, verdicts_on(name), strict=True):
        planted = (seed % 4,) if ranks == (-1,) else ranks
        right += first.kind == kind and first.ranks == planted
    assert right >= 19, name


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_diagnosed_on_a_healthy_job(name: str):
    kinds = [triage(HEALTHY[name].play(seed))[0].kind for seed in SEEDS]
    assert kinds == ["healthy"] * len(SEEDS)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_brings_no_other_cause_with_it(name: str):
    """A second verdict may only refine the first: one that contradicts it would mislead."""
    _, kind, _ = PLANTED[name]
    others = {v.kind for verdicts in verdicts_on(name) for v in verdicts} - {kind}
    allowed = {"starvation": {"rotating straggler"}}  # batches come late to each in turn
    assert others <= allowed.get(kind, set())


@pytest.mark.parametrize(
    ("name", "job", "share"),
    [
        ("starvation", Job(ranks=1, data_s=0.02), lambda e: e.ranks[0].shares["starved"]),
        ("checkpoint-bound", Job(checkpoint_every=20, checkpoint_s=0.3), lambda e: 0.22),
        ("persistent straggler", Job(slow_rank=(2, 1.4)), lambda e: 0.27),
        ("communication-bound", Job(collective_s=0.02), lambda e: 0.27),
        ("small kernels", Job(kernels=Kernels(3000, 4.0, 0.3)), lambda e: 0.7 * 0.94),
    ],
)
def test_the_ceiling_is_what_mending_it_gives(name: str, job: Job, share):
    """Against the share in the simulation itself: 20 of 72 ms, 20 of 74 ms and so on."""
    evidence = job.play(7)
    verdict = triage(evidence)[0]
    assert verdict.kind == name
    assert verdict.ceiling == pytest.approx(share(evidence), abs=0.04)
    assert verdict.speedup == pytest.approx(1 / (1 - verdict.ceiling))


def test_what_mending_a_straggler_gives_is_seen_in_the_mended_job():
    sick, mended = Job(slow_rank=(2, 1.4)), Job()
    verdict = triage(sick.play(3))[0]

    def step_s(job: Job) -> float:
        windows = job.play(3).ranks[0].windows
        return float(np.mean([w.own_s.mean() + w.wait_s for w in windows]))

    assert verdict.ceiling == pytest.approx(1 - step_s(mended) / step_s(sick), abs=0.02)


def test_a_hang_says_who_is_waited_for():
    verdict = triage(stopped_in_a_collective(Job(ranks=3).play(0), 1, 0))[0]
    assert verdict.ranks == (1,)
    assert verdict.evidence[-1] == "it hangs in a collective: rank 1 is stopped by a signal"
    assert verdict.change == "Continue it with SIGCONT, or end it"
    assert verdict.ceiling is None
    assert verdict.speedup is None


def hanging(*beats: tuple[int, str, float], **fields: object) -> Evidence:
    ranks = (RankEvidence(i, heartbeat=Heartbeat(*b), **fields) for i, b in enumerate(beats))
    return Evidence(len(beats), tuple(ranks))


def test_the_rank_that_is_behind_is_waited_for():
    waiting = ("communication", 100.0)
    evidence = hanging((50, *waiting), (50, "compute", 100.0), (50, *waiting))
    verdict = triage(evidence)[0]
    assert (verdict.kind, verdict.ranks) == ("hang", (1,))
    assert (
        verdict.evidence[-1] == "it hangs in a collective: rank 1 is still in compute after step 50"
    )
    verdict = triage(hanging((50, *waiting), (49, *waiting)))[0]
    assert verdict.ranks == (1,)


def test_a_hang_in_which_nobody_is_behind_blames_nobody():
    verdict = triage(hanging((50, "communication", 100.0), (50, "communication", 99.0)))[0]
    assert (verdict.kind, verdict.ranks) == ("hang", ())
    assert verdict.evidence[-1] == "it hangs in a collective: no rank is behind another"


def test_a_rank_that_waits_for_a_disk_is_told():
    evidence = hanging((50, "data", 100.0), process_state="D")
    verdict = triage(evidence)[0]
    assert verdict.ranks == (0,)
    assert verdict.evidence[-1] == (
        "it hangs outside any collective that was recorded: rank 0 is in an uninterruptible wait, "
        "for a disk or a network filesystem"
    )


def test_a_rank_that_ended_while_others_wait_is_told():
    evidence = changed(hanging(*[(50, "communication", 100.0)] * 3), 2, exit=Exit(0))
    verdict = triage(evidence)[0]
    assert (verdict.kind, verdict.ranks) == ("hang", (2,))
    assert verdict.change == "Give every rank the same number of steps"


def test_a_long_checkpoint_is_no_hang():
    """Limits are per phase, else a heartbeat would end long checkpoints and long start-ups."""
    for phase in ("startup", "restore", "checkpoint", "evaluation"):
        assert triage(hanging((50, phase, 300.0)))[0].kind == "unknown"
    assert triage(hanging((50, "compute", 300.0)))[0].kind == "hang"
    patient = Limits(stuck_else_s=1000.0)
    assert triage(hanging((50, "compute", 300.0)), patient)[0].kind == "unknown"


def test_ranks_that_the_supervisor_ended_are_judged_as_they_stood():
    evidence = stopped_in_a_collective(Job(ranks=3).play(0), 2, 0)
    for rank in range(3):
        end = Exit(signal=signal.SIGKILL, time_ns=WALL_NS, by_supervisor=True)
        evidence = changed(evidence, rank, exit=end)
    verdict = triage(evidence)[0]
    assert (verdict.kind, verdict.ranks) == ("hang", (2,))


def test_of_ranks_that_lost_another_and_one_that_was_slow_to_end_the_latter_failed_first():
    evidence = Job(ranks=3).play(0)
    lost = Exit(code=2, exception="RuntimeError: gloo: Connection closed by peer", time_ns=WALL_NS)
    for rank in (0, 2):
        evidence = changed(evidence, rank, exit=lost)
    slow = Exit(signal=signal.SIGKILL, time_ns=WALL_NS + 10**9, by_supervisor=True)
    verdict = triage(changed(evidence, 1, exit=slow))[0]
    assert (verdict.kind, verdict.ranks) == ("crash", (1,))
    assert verdict.evidence[0].startswith("rank 1 had not ended when the supervisor ended it")
    assert "2 more: torn down" in verdict.evidence


def test_a_run_that_the_supervisor_ended_while_it_moved_was_torn_down():
    evidence = changed(
        hanging((50, "compute", 0.1)),
        0,
        exit=Exit(signal=signal.SIGKILL, by_supervisor=True),
    )
    verdict = triage(evidence)[0]
    assert verdict.kind == "crash"
    assert verdict.change.startswith("Look at who sent the signal")


def test_a_crash_names_the_first_and_the_last_step():
    evidence = Job(ranks=3).play(0)
    for rank, step in enumerate((301, 300, 301)):
        beat = Heartbeat(step, "compute", 5.0)
        evidence = changed(evidence, rank, heartbeat=beat)
    evidence = changed(evidence, 1, exit=RAISED)
    evidence = changed(evidence, 0, exit=Exit(signal=signal.SIGTERM, time_ns=WALL_NS - 1))
    verdict = triage(evidence)[0]
    assert verdict.evidence == (
        "rank 1 raised ValueError: a bad row, after step 300, in compute, at "
        "2023-11-14T22:13:20.000000000Z",
        "1 more: torn down",
        "1 still there, waiting or not yet ended",
        "last step completed by all: 300",
    )


def test_nanoseconds_order_two_failures_on_one_host_and_not_on_two():
    def both(host: str) -> Evidence:
        return Evidence(
            2,
            (
                RankEvidence(0, host="a", exit=replace(RAISED, time_ns=WALL_NS + 1)),
                RankEvidence(1, host=host, exit=RAISED),
            ),
        )

    assert triage(both("a"))[0].ranks == (1,)
    verdict = triage(both("b"))[0]
    assert verdict.ranks == (1, 0)
    assert "the evidence doesn't order these 2 ranks" in verdict.evidence


def test_an_abort_by_a_watchdog_and_a_rank_that_says_nothing_are_not_ordered():
    evidence = Evidence(
        2,
        (
            RankEvidence(0, exit=Exit(signal=signal.SIGABRT, time_ns=WALL_NS)),
            RankEvidence(1, exit=Exit()),
        ),
    )
    assert set(triage(evidence)[0].ranks) == {0, 1}


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: [pair.cc:534] Connection closed by peer [127.0.0.1]:1027",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1",
        "RuntimeError: Timed out waiting 10000ms for recv operation to complete in all_reduce",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "KeyboardInterrupt: ",
    ],
)
def test_a_failure_that_others_bring_about_is_known_by_its_text(text: str):
    evidence = Evidence(
        2,
        (
            RankEvidence(0, exit=Exit(1, exception=text, time_ns=WALL_NS)),
            RankEvidence(1, exit=replace(RAISED, time_ns=WALL_NS + 10**9)),
        ),
    )
    assert triage(evidence)[0].ranks == (1,)


def test_one_rank_alone_has_no_other_that_failed_before_it():
    error = replace(RAISED, exception="ValueError: a row is bad. Drop it.")
    (alone,) = triage(changed(Job(ranks=1).play(0), 0, exit=error))
    assert alone.evidence[0].startswith("rank 0 raised ValueError: a row is bad. Drop it, after")
    assert alone.refuted_by == "another account of its end, in its own log or in the kernel's"
    among = triage(changed(Job(ranks=2).play(0), 0, exit=error))[0]
    assert among.refuted_by.startswith("an earlier failure of another rank")


def test_a_zombie_is_gone():
    verdict = triage(changed(hanging((5, "compute", 1.0)), 0, process_state="Z"))[0]
    assert verdict.kind == "crash"
    assert verdict.evidence[0] == "rank 0 is gone without a trace, after step 5, in compute"


@pytest.mark.parametrize("code", [0, 75])
def test_an_orderly_end_is_no_crash(code: int):
    evidence = Job(ranks=2).play(0)
    for rank in range(2):
        beat = Heartbeat(300, "other", 86400.0)
        evidence = changed(evidence, rank, exit=Exit(code), heartbeat=beat)
    assert [v.kind for v in triage(evidence)] == ["healthy"]


def test_a_dead_run_still_says_why_it_was_slow():
    evidence = ended(Job(data_s=0.03).play(0), 1, KILLED, 0)
    assert [v.kind for v in triage(evidence)][:2] == ["crash", "starvation"]


BLIND: dict[str, tuple[dict[str, object], str]] = {
    "heartbeat": ({"heartbeat": None}, "not seen: the heartbeat of 1 of 3 ranks"),
    "ledger": ({"shares": None}, "not seen: enough steps in the ledger of 1 of 3 ranks"),
    "windows": (
        {"windows": ()},
        "not seen: step times apart from the wait in collectives of 1 of 3 ranks",
    ),
    "wait": (
        {"windows": (StepTimes(np.ones(5), None),) * 6},
        "not seen: step times apart from the wait in collectives of 1 of 3 ranks",
    ),
    "few windows": (
        {"windows": (StepTimes(np.full(5, 0.051), 0.001),) * 2},
        "not seen: more than 2 of 5 windows of step times",
    ),
}


@pytest.mark.parametrize("what", BLIND)
def test_blind_is_not_healthy(what: str):
    fields, told = BLIND[what]
    (verdict,) = triage(changed(Job(ranks=3).play(0), 1, **fields))
    assert verdict.kind == "unknown"
    assert told in verdict.evidence


def test_a_missing_rank_and_a_missing_profile_are_not_healthy():
    evidence = Job(ranks=3).play(0)
    (verdict,) = triage(replace(evidence, ranks=evidence.ranks[:2]))
    assert verdict.evidence[0] == "not seen: any trace of 1 of 3 ranks"
    for rank in range(3):
        evidence = changed(evidence, rank, kernels=None)
    (verdict,) = triage(evidence)
    assert verdict.evidence[0] == "not seen: a profile of the kernels"
    (verdict,) = triage(Evidence(2))
    assert verdict.kind == "unknown"


def test_time_without_a_name_is_unknown():
    evidence = Job(ranks=1).play(0)
    shares = dict(evidence.ranks[0].shares) | {"useful": 0.6, "other": 0.37}
    (verdict,) = triage(changed(evidence, 0, shares=shares))
    assert verdict.kind == "unknown"
    assert verdict.evidence[0] == "37 % of the time since startup is in no bucket that has a name"


def test_a_straggler_by_its_loader_says_so():
    verdict = triage(Job(slow_loader=(1, 0.03)).play(0))[0]
    assert (
        verdict.change == "Look at that rank's loader: its disk, its cores, its share of the files"
    )
    assert "it waits for data" in verdict.evidence[-1]


def test_loaders_that_are_all_slow_blame_no_rank():
    """Only the last one's wait is seen: the others read on while they wait for that rank."""
    behind = Job(slow_loader=(1, 0.03), batch_s=(0.081, 0.083, 0.08, 0.081))
    (verdict,) = triage(behind.play(0))
    assert verdict.ranks == ()
    assert "some rank waits for data, and the others for that rank" in verdict.evidence[0]
    assert verdict.evidence[1] == (
        "their loaders take 80 to 83 ms for a batch, about as long as a step: they read on while "
        "they wait, and none would keep up by itself"
    )
    unknown = changed(behind.play(0), 3, batch_s=None)
    assert triage(unknown)[0].kind == "persistent straggler"
    unwaited = replace(behind, slow_loader=None, compute_s=0.08).play(0)
    assert triage(unwaited)[0].kind == "healthy"  # as fast as the steps, and not waited for


def test_a_verdict_as_a_document():
    document = triage(Job(data_s=0.03).play(0))[0].as_dict()
    assert document["kind"] == "starvation"
    assert document["speedup"] == pytest.approx(1 / (1 - document["ceiling"]))
    assert {"ranks", "evidence", "refuted_by", "change"} <= set(document)


exits = st.none() | st.builds(
    Exit,
    code=st.none() | st.integers(0, 255),
    signal=st.none() | st.integers(1, 64),
    exception=st.none() | st.text(max_size=20),
    time_ns=st.none() | st.integers(0, 2**62),
    by_supervisor=st.booleans(),
)
shares = st.none() | st.dictionaries(
    st.sampled_from(["useful", "starved", "checkpoint", "other"]), st.floats(0, 1)
)
windows = st.lists(
    st.builds(
        StepTimes,
        st.lists(st.floats(1e-6, 1e3), min_size=0, max_size=4).map(np.array),
        st.none() | st.floats(0, 1e3),
    ),
    max_size=6,
).map(tuple)
ranks = st.builds(
    RankEvidence,
    rank=st.just(0),
    host=st.sampled_from(["", "a"]),
    heartbeat=st.none()
    | st.builds(
        Heartbeat,
        st.integers(0, 100),
        st.sampled_from(["data", "communication", "checkpoint"]),
        st.floats(0, 1e4),
    ),
    exit=exits,
    process_state=st.none() | st.sampled_from("RSDTtZX"),
    shares=shares,
    windows=windows,
    batch_s=st.none() | st.floats(0, 1e3),
    kernels=st.none() | st.builds(Kernels, st.floats(1, 1e4), st.floats(0.1, 1e4), st.floats(0, 1)),
)


@given(st.lists(ranks, max_size=4), st.integers(1, 4), st.booleans())
def test_any_evidence_gets_a_verdict_that_is_whole(
    found: list[RankEvidence], num_ranks: int, aligned: bool
):
    numbered = tuple(replace(r, rank=i) for i, r in enumerate(found[:num_ranks]))
    verdicts = triage(Evidence(num_ranks, numbered, aligned))
    assert verdicts
    for verdict in verdicts:
        assert verdict.evidence
        assert verdict.refuted_by
        assert verdict.change
        assert verdict.ceiling is None or 0 <= verdict.ceiling <= 1
        assert set(verdict.ranks) <= set(range(num_ranks))
    gains = [v.ceiling for v in verdicts if v.ceiling is not None]
    assert gains == sorted(gains, reverse=True)  # what mending returns the most comes first
    kinds = [v.kind for v in verdicts]
    assert len(set(kinds)) == len(kinds)
    if "healthy" in kinds:
        assert kinds == ["healthy"]
        assert len(numbered) == num_ranks
