"""Which checkpoint is resumed from: over tiers and ranks, in the line of lives, not tainted."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeline.checkpoint.resume import Candidate, Choice, PassedOver, TaintJournal, choose
from tapeline.errors import RunError
from tapeline.files import read_journal


def candidate(step: int, attempt: int = 1, **changes) -> Candidate:
    about = {"identity": f"{step}.{attempt}", "run": "r", "tier": "local", "place": f"p/{step}"}
    return Candidate(step, attempt, **about | changes)


def chosen(*listed: list[Candidate], starts=None, tainted=None) -> Choice:
    return choose(listed, run="r", starts=starts or {1: 0}, tainted=tainted or {})


def reasons(choice: Choice) -> dict[int, str]:
    return {one.step: one.reason for one in choice.passed_over}


def test_the_highest_step_that_verifies_is_chosen():
    listed = [candidate(10), candidate(30, fault="cut short"), candidate(20), candidate(9)]
    assert chosen(listed) == Choice(
        20, "20.1", ("p/20",), (PassedOver(30, "30.1", "rank 0: cut short"),)
    )


def test_without_any_a_run_begins_anew():
    assert chosen([], []) == Choice(0, None, (), ())
    assert chosen([candidate(5, fault="torn")]).step == 0


def test_every_rank_must_have_it():
    shared, local = candidate(10), candidate(20, place="node 0")
    choice = chosen([shared, local], [shared])
    assert (choice.step, choice.places) == (10, ("p/10", "p/10"))
    assert reasons(choice) == {20: "rank 1 doesn't have it"}
    choice = chosen([shared, local], [shared, dataclasses.replace(local, fault="a flipped byte")])
    assert reasons(choice) == {20: "rank 1: a flipped byte"}


def test_the_local_tier_is_read_where_it_verifies_and_the_durable_one_elsewhere():
    local = candidate(10, place="disk")
    durable = candidate(10, tier="durable", place="s3://b/10")
    damaged = dataclasses.replace(local, fault="a flipped byte")
    choice = chosen([durable, local], [damaged, durable], [durable])
    assert choice == Choice(10, "10.1", ("disk", "s3://b/10", "s3://b/10"), ())


def test_a_newer_durable_one_wins_over_an_older_local_one():
    choice = chosen([candidate(10), candidate(20, tier="durable", place="s3://b/20")])
    assert (choice.step, choice.places) == (20, ("s3://b/20",))


def test_a_stale_higher_step_of_another_run_never_wins():
    choice = chosen([candidate(90, run="other"), candidate(80, attempt=7), candidate(10)])
    assert choice.step == 10
    assert reasons(choice) == {
        90: "it is of run other, not of r",
        80: "it is of attempt 7, which this run never had",
    }


def test_what_a_later_life_gave_up_is_out_of_the_line():
    starts = {1: 0, 2: 20, 3: 20}
    listed = [candidate(20, 1), candidate(40, 1), candidate(30, 2), candidate(20, 2), candidate(10)]
    choice = chosen(listed, starts=starts)
    assert (choice.step, choice.identity) == (20, "20.2")
    assert reasons(choice) == {
        40: "attempt 2 began again from step 20: what attempt 1 saved beyond that was given up",
        30: "attempt 3 began again from step 20: what attempt 2 saved beyond that was given up",
    }


def test_a_step_saved_by_two_lives_is_of_the_later_one():
    choice = chosen([candidate(20, 1), candidate(20, 2)], starts={1: 0, 2: 10})
    assert choice.identity == "20.2"


def test_a_tainted_one_is_passed_over_in_words():
    choice = chosen([candidate(10), candidate(20)], tainted={"20.1": "tainted: it failed twice"})
    assert (choice.step, reasons(choice)) == (10, {20: "tainted: it failed twice"})


candidates = st.builds(  # an identity is of one run: attempt 4 is another run's
    lambda step, attempt, **about: candidate(step, attempt, run="rrrs"[attempt - 1], **about),
    st.integers(1, 6),
    st.integers(1, 4),
    tier=st.sampled_from(["local", "durable"]),
    place=st.sampled_from(["p", "q"]),
    fault=st.sampled_from([None, None, "torn"]),
)
ranks = st.lists(st.lists(candidates, max_size=12), min_size=1, max_size=4)
histories = st.fixed_dictionaries({1: st.just(0), 2: st.integers(0, 6), 3: st.integers(0, 6)})
taints = st.dictionaries(st.sampled_from(["3.1", "5.2", "6.3"]), st.just("tainted"))


@given(ranks, histories, taints)
def test_nothing_better_is_left_out_and_what_is_chosen_can_be_used(listed, starts, tainted):
    choice = choose(listed, run="r", starts=starts, tainted=tainted)

    def usable(identity: str) -> bool:
        everywhere = all(
            any(one.identity == identity and one.fault is None and one.run == "r" for one in rank)
            for rank in listed
        )
        step, attempt = map(int, identity.split("."))
        in_line = all(start >= step for number, start in starts.items() if number > attempt)
        return everywhere and in_line and identity not in tainted

    identities = {one.identity for rank in listed for one in rank}
    best = max(filter(usable, identities), key=lambda i: [*map(int, i.split("."))], default=None)
    assert choice.identity == best
    assert len(choice.places) == (len(listed) if best else 0)
    assert choice.step == (int(best.split(".")[0]) if best else 0)
    assert all(one.step >= choice.step for one in choice.passed_over)


@given(ranks, histories, st.randoms())
def test_the_order_of_a_listing_does_not_matter(listed, starts, generator):
    shuffled = [generator.sample(rank, len(rank)) for rank in listed]
    assert choose(shuffled, run="r", starts=starts, tainted={}) == choose(
        listed, run="r", starts=starts, tainted={}
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "taint.jsonl"


def resume(path: Path, attempt: int, identity: str = "a", step: int = 100) -> TaintJournal:
    """What a new process does."""
    journal = TaintJournal(path, within_steps=5)
    journal.resumed(identity, step=step, attempt=attempt)
    return journal


def test_two_resumes_that_failed_taint_and_one_does_not(path: Path):
    assert TaintJournal(path, within_steps=5).tainted() == {}
    resume(path, 2).step_done(104)
    assert TaintJournal(path, within_steps=5).tainted() == {}
    resume(path, 3)
    assert TaintJournal(path, within_steps=5).tainted() == {
        "a": "tainted: the resumes in attempts 2, 3 failed within 5 steps"
    }


def test_a_resume_that_came_far_enough_clears_what_came_before(path: Path):
    resume(path, 2)
    survivor = resume(path, 3)
    for step in range(101, 120):
        survivor.step_done(step)
    resume(path, 4)
    assert TaintJournal(path, within_steps=5).tainted() == {}
    assert [line["event"] for line in read_journal(path)] == [
        *("resumed", "resumed", "survived", "resumed")
    ]


def test_a_preempted_resume_is_no_failure(path: Path):
    for attempt in (2, 3, 4):
        journal = resume(path, attempt)
        journal.release()
        journal.release()
    assert TaintJournal(path, within_steps=5).tainted() == {}


def test_other_checkpoints_are_not_tainted_along(path: Path):
    for attempt, identity in enumerate("abab", start=2):
        resume(path, attempt, identity)
    resume(path, 6, "c")
    assert TaintJournal(path, within_steps=5).tainted().keys() == {"a", "b"}


def test_a_torn_line_is_no_resume_and_hides_none(path: Path):
    resume(path, 2)
    with path.open("ab") as stream:
        stream.write(b'{"event":"resu')
    resume(path, 3)
    assert TaintJournal(path, within_steps=5).tainted().keys() == {"a"}


def test_a_damaged_journal_is_an_error(path: Path):
    resume(path, 2)
    path.write_bytes(b"nonsense\n" + path.read_bytes())
    with pytest.raises(RunError, match=r"taint\.jsonl, line 1: expected a record in JSON"):
        TaintJournal(path, within_steps=5).tainted()


def test_end_to_end_a_poisoned_checkpoint_is_left_after_two_tries(path: Path):
    listed = [candidate(10), candidate(20)]
    starts, seen = {1: 0}, []
    for attempt in (2, 3, 4):
        journal = TaintJournal(path, within_steps=5)
        choice = chosen(listed, starts=starts, tainted=journal.tainted())
        starts[attempt] = choice.step
        seen.append(choice.step)
        assert choice.identity is not None
        journal.resumed(choice.identity, step=choice.step, attempt=attempt)
    assert seen == [20, 20, 10]
