"""The timer of a CUDA stream: on a stream that is made up, and on a real one where there is one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tapeline.attempt import observer
from tapeline.clock import FakeClock, SystemClock
from tapeline.ledger import Ledger, account_of
from tapeline.runs import RunFolder
from tapeline.training.timer import StreamTimer, timer_of
from tapeline.world import World

S = 10**9


@dataclass(frozen=True)
class FakeEvent:
    stream: Stream
    at_ns: int

    def query(self):
        return self.stream.clock.monotonic_ns() >= self.at_ns

    def elapsed_time(self, end_event):
        assert self.query() and end_event.query(), "the real one raises an error"
        return (end_event.at_ns - self.at_ns) * self.stream.rate / 1e6


class Stream:
    """Does what it is given in order; its clock runs `rate` times as fast as the host's."""

    def __init__(self, clock, rate=1.0):
        self.clock, self.rate, self.free_ns, self.events = clock, rate, 0, []

    def work(self, ns):
        self.free_ns = max(self.free_ns, self.clock.monotonic_ns()) + ns

    def put(self):
        self.events.append(FakeEvent(self, max(self.free_ns, self.clock.monotonic_ns())))
        return self.events[-1]

    def steps(self):
        """When the steps were really done."""
        at_ns = [event.at_ns for event in self.events]
        return list(zip(at_ns[::2], at_ns[1::2], strict=True))


def timed(rate=1.0):
    clock = FakeClock(monotonic_ns=7 * S)
    stream = Stream(clock, rate)
    return clock, stream, StreamTimer(stream.put, clock)


def step(stream, timer, ns):
    timer.step_begins()
    stream.work(ns)
    timer.step_ends()


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50), st.booleans()), max_size=30),
)
def test_steps_are_placed_where_they_were_whether_the_host_is_ahead_or_late(steps):
    clock, stream, timer = timed()
    found = []
    for host_ns, work_ns, reads in steps:
        clock.advance(host_ns)
        step(stream, timer, work_ns)
        if reads:
            found += timer.finished()
            assert all(end_ns <= clock.monotonic_ns() for _, end_ns in found)
    clock.advance(S)
    found += timer.finished()
    assert found == stream.steps()
    assert list(timer.finished()) == []


def test_a_step_is_told_only_once_it_is_done_and_in_order():
    clock, stream, timer = timed()
    step(stream, timer, 100)
    stream.work(30)  # a validation between them
    step(stream, timer, 100)
    assert list(timer.finished()) == []
    clock.advance(99)
    assert list(timer.finished()) == []
    clock.advance(1)
    assert list(timer.finished()) == [(7 * S, 7 * S + 100)]
    clock.advance(130)
    assert list(timer.finished()) == [(7 * S + 130, 7 * S + 230)]


def test_a_clock_of_the_device_that_runs_fast_moves_no_step():
    clock, stream, timer = timed(rate=1 + 1e-3)
    found = []
    for _ in range(1000):
        step(stream, timer, S // 10)
        clock.advance(S)
        found += timer.finished()
    true = stream.steps()
    assert len(found) == 1000
    assert [begin_ns for begin_ns, _ in found] == [begin_ns for begin_ns, _ in true]
    assert found[-1][1] - true[-1][1] == pytest.approx(S // 10 * 1e-3)
    busy, stream_of_busy, timer = timed(rate=1 + 1e-3)
    for _ in range(10):
        step(stream_of_busy, timer, S)
    busy.advance(10 * S)
    assert list(timer.finished())[-1][1] <= busy.monotonic_ns()


def test_a_device_that_never_answers_takes_no_more_memory():
    clock, stream, timer = timed()
    for _ in range(3000):
        step(stream, timer, S)
    assert len(stream.events) == 2 * 1024
    clock.advance(3000 * S)
    assert list(timer.finished()) == stream.steps()
    step(stream, timer, S)  # and it goes on
    clock.advance(S)
    assert list(timer.finished()) == stream.steps()[-1:]


def test_an_end_without_a_begin_is_no_step():
    clock, stream, timer = timed()
    timer.step_ends()
    clock.advance(S)
    assert list(timer.finished()) == stream.events == []


def test_a_run_books_what_its_device_did_beside_the_host(tmp_path, monkeypatch):
    clock = FakeClock(wall_ns=10**18)
    stream, asked = Stream(clock), []

    def timer(device, of):
        asked.append(device)
        return StreamTimer(stream.put, of)

    monkeypatch.setattr(observer, "timer_of", timer)
    run = RunFolder(tmp_path, clock)
    device = torch.device("cuda", 1)
    with observer.Observer(
        run, World(), attempt=1, first=0, clock=clock, began_ns=0, restored_ns=0, device=device
    ) as seen:
        for number in range(1, 12):
            seen.ledger.switch("data")
            clock.advance(100)
            seen.ledger.switch("compute")
            stream.work(80)
            clock.advance(10)
            seen.ledger.step_done(number)
    job = account_of(tmp_path).job
    assert asked == [device]
    assert (job.device_ns, job.overlap_ns) == (10 * 80, 10 * 70)  # the last is still in flight


def test_a_cpu_has_no_timer():
    assert timer_of(torch.device("cpu"), SystemClock()) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_on_a_real_device(tmp_path):
    device, clock = torch.device("cuda", 0), SystemClock()
    x = torch.rand(2048, 2048, device=device)
    torch.cuda.synchronize()
    timer = timer_of(device, clock)
    began_ns = clock.monotonic_ns()
    with Ledger(tmp_path, device=timer) as ledger:
        for number in range(1, 21):
            ledger.switch("data")
            ledger.switch("compute")
            for _ in range(10):
                x = torch.nn.functional.normalize(x @ x)
            if number % 10 == 0:
                x.sum().item()
            ledger.step_done(number)
        torch.cuda.synchronize()
        ledger.step_done(21)
    job = account_of(tmp_path).job
    assert 0 < job.device_ns <= clock.monotonic_ns() - began_ns
    assert 0 <= job.overlap_ns <= job.device_ns
