"""Accelerators and memory: golden numbers, sheets that print twice the dense figure, and bounds."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeline.errors import TapelineError
from tapeline.plan.accelerator import Link, Step, plan_accelerator
from tapeline.plan.devices import DEVICES, device_named
from tapeline.plan.memory import needs, plan_memory, transformer_activation_gb

LINK = Link(4e6, 25e9, 5e-6)


def plan(step: Step, link: Link = LINK, **more):
    return plan_accelerator(step, link, **{"faster": 2.0, "max_devices": 64, **more})


@pytest.mark.parametrize(
    ("data_ms", "compute_ms", "speedup"), [(0.74, 1.17, 1.44), (0.27, 1.10, 1.67)]
)
def test_halved_compute(data_ms, compute_ms, speedup):
    assert plan(Step(data_ms, compute_ms, False)).speedup == pytest.approx(speedup, abs=5e-3)


def test_halved_compute_behind_a_loader_that_works_alongside():
    assert plan(Step(0.74, 1.17, True)).speedup == pytest.approx(1.17 / 0.74)
    assert plan(Step(1.5, 1.17, True)).speedup == 1.0
    assert plan(Step(0.0, 1.17, False)).speedup == pytest.approx(2.0)
    assert plan(Step(0.0, 1.17, False)).limit is None


def test_a_ring_sends_and_receives_twice_its_share():
    link = Link(1e9, 1e9, 0.0)
    assert [link.all_reduce_ms(p) for p in (1, 2, 4, 8)] == [0.0, 1000.0, 1500.0, 1750.0]
    late = Link(1e-12, 1e9, 1e-3)
    assert late.all_reduce_ms(5) == pytest.approx(8.0)


def test_the_number_of_devices_past_which_communication_dominates():
    found = plan(Step(0.0, 8.0, False), Link(1e9, 1e12, 0.0))
    # 2 (p − 1)/p ms against 8/p ms: more from p = 5 on, so from 8 among the powers of two.
    assert found.dominated_from == 8
    assert found.by_devices[2].all_reduce_ms < found.by_devices[2].compute_ms
    assert plan(Step(0.0, 8.0, False), Link(1e3, 1e12, 0.0)).dominated_from is None


def test_many_devices_may_be_slower_than_few():
    found = plan(Step(0.74, 1.17, False))
    assert found.best_devices == 8
    assert found.by_devices[-1].step_ms > found.by_devices[3].step_ms
    assert [row.num_devices for row in found.by_devices] == [1, 2, 4, 8, 16, 32, 64]
    assert plan(Step(1.0, 1.0, False), max_devices=3).by_devices[-1].num_devices == 2


def test_a_share_of_the_peak_needs_a_device_that_is_known():
    step = Step(0.0, 1.0, False)
    h100 = device_named("NVIDIA H100 80GB HBM3")
    assert h100.name == "h100-sxm"
    assert plan(step, device=h100, flops_per_step=98.9e9).peak_share == pytest.approx(0.1)
    assert plan(step, device=device_named("cpu"), flops_per_step=98.9e9).peak_share is None
    assert plan(step, device=h100).peak_share is None
    with pytest.raises(TapelineError) as error:
        plan(step, device=h100, flops_per_step=1979e9)
    assert str(error.value) == (
        "--flops-per-step: expected no more than the 989 dense bfloat16 TFLOPS of h100-sxm, found "
        "1979 TFLOPS. Correct the operations, the time of a step or the device."
    )


def test_devices_give_the_dense_figure_with_its_source():
    for device in DEVICES:
        assert device.sparse_tflops == pytest.approx(2 * device.bf16_tflops, rel=0.02)
        assert "data sheet" in device.source
        assert device_named(device.name.upper()) is device
        assert device_named(device.reported) is device
    assert device_named("NVIDIA H300") is None


@given(st.floats(0, 1e6), st.floats(1e-6, 1e6), st.booleans(), st.floats(1, 1e6))
def test_no_accelerator_makes_data_faster(data_ms, compute_ms, overlapped, faster):
    found = plan(Step(data_ms, compute_ms, overlapped), faster=faster)
    assert 1 <= found.speedup <= faster * (1 + 1e-12)
    assert found.limit is None or found.speedup <= found.limit * (1 + 1e-12)
    assert 0 <= found.data_share < 1
    for row in found.by_devices:
        numbers = asdict(row).values()
        assert all(math.isfinite(number) and number >= 0 for number in numbers)
        assert row.step_ms >= data_ms
        assert row.efficiency <= 1 + 1e-12


ADAM = {"weight_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 8}


def test_sixteen_bytes_a_parameter_with_adam():
    found = needs(num_parameters=7_000_000_000, activation_gb=0.0, num_layers=32, **ADAM)
    assert found.state == pytest.approx(112.0)
    plan = plan_memory(found, memory_gb=80.0, free_share=0.1)
    assert not plan.fits_one
    assert plan.shard_over == 2  # 112/2 and a layer of 1.75 GB are below 72
    assert plan.by_devices[1] == (2, pytest.approx(57.75))


def test_the_fewest_devices_are_the_fewest():
    found = needs(num_parameters=70_000_000_000, activation_gb=10.0, num_layers=80, **ADAM)
    plan = plan_memory(found, memory_gb=80.0, free_share=0.1)
    assert found.sharded(plan.shard_over) <= plan.usable_gb < found.sharded(plan.shard_over - 1)


def test_what_fits_needs_no_sharding():
    found = needs(num_parameters=1_000_000, activation_gb=1.0, num_layers=2, **ADAM)
    plan = plan_memory(found, memory_gb=24.0, free_share=0.1)
    assert plan.fits_one
    assert plan.shard_over == 1


def test_activations_that_dont_fit_call_for_divided_layers():
    found = needs(num_parameters=7_000_000_000, activation_gb=90.0, num_layers=32, **ADAM)
    plan = plan_memory(found, memory_gb=80.0, free_share=0.1)
    assert plan.shard_over is None
    assert plan.divide_layers_over == 3  # 202 GB over 72


def test_activations_of_a_transformer():
    """GPT-3 of the paper: 96 layers of 12,288, 96 heads, 2,048 tokens, one sequence."""
    about = {"num_layers": 96, "width": 12288, "sequence": 2048, "micro_batch": 1}
    assert transformer_activation_gb(num_heads=96, **about) == pytest.approx(
        2048 * 12288 * 96 * (34 + 80) / 1e9
    )
    assert transformer_activation_gb(num_heads=0, **about) == pytest.approx(
        2048 * 12288 * 96 * 34 / 1e9
    )


@given(
    st.integers(1, 10**15),
    st.floats(0, 1e6),
    st.integers(1, 10**6),
    st.floats(1e-3, 1e6),
    st.floats(0, 0.9),
)
def test_any_memory_plan_is_whole(num_parameters, activation_gb, num_layers, memory_gb, free):
    found = needs(
        num_parameters=num_parameters,
        activation_gb=activation_gb,
        num_layers=num_layers,
        **ADAM,
    )
    plan = plan_memory(found, memory_gb=memory_gb, free_share=free)
    assert plan.fits_one == (plan.shard_over == 1)
    assert plan.divide_layers_over >= 1
    assert all(math.isfinite(size) and size > 0 for _, size in plan.by_devices)
    if plan.shard_over:
        assert found.sharded(plan.shard_over) <= plan.usable_gb * (1 + 1e-9)
