"""Advice: the golden numbers, what is unknown, and that nothing exceeds what its part takes."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeline.clock import FakeClock
from tapeline.ledger import Ledger
from tapeline.plan.accelerator import Link
from tapeline.plan.advice import Known, Lever, Spent, advise
from tapeline.runs import MachineFigures, MetricsJournal, RunFolder

LINK = Link(4e6, 25e9, 5e-6)


def levers(spent: Spent, known: Known) -> dict[str, Lever]:
    return {one.name: one for one in advise(spent, known)}


@pytest.mark.parametrize(
    ("data_ms", "compute_ms", "speedup"), [(0.74, 1.17, 1.44), (0.27, 1.10, 1.67)]
)
def test_halved_compute(data_ms, compute_ms, speedup):
    found = levers(Spent(data_ms, compute_ms), Known(2.0, looped=True))
    assert found["faster device"].speedup == pytest.approx(speedup, abs=5e-3)
    assert found["faster device"].limit == pytest.approx((data_ms + compute_ms) / data_ms)


def test_each_lever_with_its_numbers_the_most_first():
    known = Known(
        2.0, link=LINK, looped=True, gathered_data_ms=0.27, bf16_compute_ms=1.3, saves=False
    )
    found = advise(Spent(0.74, 1.17), known)
    assert [(one.name, one.state) for one in found] == [
        ("prefetch", "possible"),
        ("faster device", "possible"),
        ("gather", "possible"),
        ("second device", "possible"),
        ("bfloat16", "possible"),
        ("async checkpoint", "unknown"),
    ]
    assert [one.formula for one in found] == [
        "1.91 / (1.17 compute) = 1.63",
        "1.91 / (0.74 data + 0.585 compute) = 1.44",
        "1.91 / (0.27 data + 1.17 compute) = 1.33",
        "1.91 / (0.74 data + 0.585 compute + 0.17 communication) = 1.28",
        "1.91 / (0.74 data + 1.3 compute) = 0.94",
        "no checkpoint was saved here: ask a run, `tapeline advise RUN`",
    ]


def test_what_is_unknown_stays_unknown():
    found = levers(Spent(0.74, 1.17), Known(2.0, looped=True, saves=False))
    unknown = {name: one for name, one in found.items() if one.state == "unknown"}
    assert set(unknown) == {"gather", "bfloat16", "second device", "async checkpoint"}
    assert all(one.speedup is None for one in unknown.values())
    assert found["async checkpoint"].limit is None
    assert unknown["bfloat16"].limit == pytest.approx(1.91 / 0.74)  # which needs no measurement


def test_what_is_in_use_is_no_lever():
    known = Known(2.0, prefetch=True, bfloat16=True, in_background=True)
    found = levers(Spent(0.1, 1.0, checkpoint=0.2), known)
    for name in ("gather", "prefetch", "bfloat16", "async checkpoint"):
        assert (found[name].state, found[name].speedup) == ("in use", None)
    assert found["no wait for data"].speedup == pytest.approx(1.3 / 1.2)


def test_a_loader_that_is_waited_for_is_not_outrun():
    spent = Spent(3.0, 1.0, 0.5)
    found = levers(spent, Known(10.0, prefetch=True, loader_ms=4.5, link=LINK))
    assert found["faster device"].speedup == pytest.approx(1.0)
    assert found["faster device"].limit == pytest.approx(1.0)
    assert found["no wait for data"].speedup == pytest.approx(3.0)


def test_more_devices_pay_for_what_their_ring_takes_longer():
    found = levers(Spent(0.0, 4.0, 1.0), Known(2.0, num_devices=2, link=Link(1e9, 1e12, 0.0)))
    assert found["4 devices"].formula.startswith("5 / (2 compute + 1.5 communication)")


def test_a_step_of_nothing_but_its_part_has_no_limit():
    assert levers(Spent(0.0, 1.0), Known(2.0))["faster device"].limit is None


milliseconds = st.floats(0, 1e6)


@given(
    st.builds(Spent, milliseconds, st.floats(1e-6, 1e6), milliseconds, milliseconds, milliseconds),
    st.builds(
        Known,
        st.floats(1, 1e6),
        link=st.builds(Link, st.floats(1, 1e12), st.floats(1e3, 1e12), st.floats(0, 1)),
        prefetch=st.booleans(),
        looped=st.booleans(),
        gathered_data_ms=st.just(0.0),
    ),
)
def test_no_lever_gives_more_than_the_part_it_shortens(spent, known):
    found = advise(spent, known)
    for one in found:
        if one.speedup is not None:
            assert one.speedup > 0
            assert one.limit is None or one.speedup <= one.limit * (1 + 1e-9)
    gains = [one.speedup for one in found if one.speedup is not None]
    assert gains == sorted(gains, reverse=True)
    assert all(math.isfinite(gain) for gain in gains)


def ledger_of_a_run(path, *, data_ns, num_steps=10, **record):
    """A run's folder with steps of so much data, 1 ms of compute and 0.5 ms of checkpoint each."""
    clock = FakeClock()
    training = {"batch": 256, "precision": "float32"}
    head = {"format": "tapeline run", "version": 1}
    RunFolder(path, clock).create({**head, "config": {"training": training}, **record})
    with Ledger(path, clock=clock) as ledger:
        for step in range(1, num_steps + 1):
            ledger.switch("data")
            clock.advance(data_ns)
            ledger.switch("compute")
            clock.advance(1_000_000)
            ledger.step_done(step)
            with ledger.span("checkpoint"):
                clock.advance(500_000)
        ledger.switch("startup")


def test_a_run_is_advised_from_its_ledger_and_its_record(tapeline, tmp_path):
    ledger_of_a_run(tmp_path / "run", data_ns=20_000, num_parameters=56_769)
    code, out, err = tapeline("advise", "run", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["model"]["step_ms"] == pytest.approx(1.52)
    by_name = {one["name"]: one for one in found["model"]["levers"]}
    assert by_name["faster device"]["speedup"] == pytest.approx(1.52 / 1.02)
    assert by_name["async checkpoint"]["speedup"] == pytest.approx(1.52 / 1.02)
    assert by_name["prefetch"]["state"] == "in use"
    assert by_name["bfloat16"]["state"] == "unknown"
    assert found["inputs"]["parameters"] == {
        "value": 56_769.0,
        "source": "measured",
        "detail": "run, its record",
    }
    assert found["inputs"]["link_gb_per_s"]["source"] == "default"


def test_advice_is_printed_with_the_decision_and_drawn(tapeline, tmp_path):
    ledger_of_a_run(tmp_path / "run", data_ns=2_000_000)
    code, out, err = tapeline("advise", "run", "--bf16-compute-ms", 0.5, "--plot", "levers")
    assert (code, err) == (0, "figure: levers.svg, levers.png\n")
    assert "Before buying: no wait for data, 2.33 × at most (a loader as fast as" in out
    assert "Bought: no device gives a tenth." in out
    assert "A step of 3.5 ms: 2 data + 1 compute + 0.5 checkpoint." in out
    assert "takes 3 ms a batch and works alongside" in out
    assert "3.5 / (1 compute + 0.5 checkpoint) = 2.33" in out
    assert "the number of parameters isn't known: give --parameters" in out
    assert (tmp_path / "levers.png").exists()


def test_a_loader_that_nobody_waits_for_is_known_from_the_runs_metrics(tapeline, tmp_path):
    ledger_of_a_run(tmp_path / "run", data_ns=20_000)
    for rank, batch_s in enumerate((3e-4, 8e-4)):
        with MetricsJournal(RunFolder(tmp_path / "run", FakeClock()).metrics_path(rank), 1) as one:
            for step in (1, 2, 3):
                one.machine(step, MachineFigures(batch_s=batch_s))
    found = json.loads(tapeline("advise", "run", "--json")[1])
    assert found["inputs"]["loader_ms"] == {
        "value": pytest.approx(0.8),
        "source": "measured",
        "detail": "run, median of 6 readings, of the slowest rank",
    }
    by_name = {one["name"]: one for one in found["model"]["levers"]}
    # 1 ms of compute becomes 0.5, and the loader's 0.8 ms are waited for.
    assert by_name["faster device"]["speedup"] == pytest.approx(1.52 / (0.3 + 0.5 + 0.5))
    out = tapeline("advise", "run")[1]
    assert "The loader takes 0.8 ms a batch and works alongside: no device makes steps" in out


def test_a_run_without_steps_is_refused(tapeline, tmp_path):
    RunFolder(tmp_path / "run", FakeClock()).create({"format": "tapeline run", "version": 1})
    assert tapeline("advise", "run") == (
        2,
        "",
        "tapeline: run: expected a run whose ledger has steps, found no step in it. Train it for "
        "some steps, or use `tapeline bench --advice`.\n",
    )


def test_bench_advises_from_what_it_measured(tapeline):
    code, out, err = tapeline("bench", "--repetitions", 3, "--advice", "--plot", "bench", "--json")
    assert code == 0
    assert "figure: bench-advice.svg, bench-advice.png" in err
    found = json.loads(out)
    looped = {one["name"]: one for one in found["advice"]["mmap looped"]}
    rows = {row["case"]: row for row in found["rows"]}
    before, after = (
        rows[case]["load_ms"] + rows[case]["batch_ms"] for case in ("mmap looped", "mmap gathered")
    )
    compute_ms = rows["mmap looped"]["compute_ms"]
    assert looped["gather"]["speedup"] == pytest.approx(
        (before + compute_ms) / (after + compute_ms)
    )
    assert looped["bfloat16"]["speedup"] == pytest.approx(
        (before + compute_ms) / (before + rows["mmap looped"]["compute_bf16_ms"])
    )
    assert found["num_parameters"] == 56_769
    gathered = {one["name"]: one for one in found["advice"]["mmap gathered"]}
    assert gathered["gather"]["state"] == "in use"
