"""The switch: what it sets, what it notices, what it costs; and the contracts that rest on it."""

import json

import pytest
import torch
from torch import nn

from tapeline.errors import TrainingError
from tapeline.training import (
    TrainStep,
    check_determinism,
    contract_of,
    loop,
    make_deterministic,
)
from tapeline.training.determinism import (
    determinism_cost,
    determinism_record,
    refused_operations,
)


@pytest.fixture(autouse=True)
def settings_put_back(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    precision = torch.get_float32_matmul_precision()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(precision)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that what was set here is undone


def test_the_switch_sets_everything_and_returns_the_record():
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    record = make_deterministic(threads=2)
    assert record == determinism_record()
    assert json.loads(json.dumps(record)) == record
    assert torch.are_deterministic_algorithms_enabled()
    wanted = {
        "deterministic_algorithms": True,
        "warn_only": False,
        "cublas_workspace": ":4096:8",
        "cudnn_benchmark": False,
        "cudnn_tf32": False,
        "matmul_precision": "highest",
        "matmul_tf32": False,
        "threads": 2,
        "torch": torch.__version__,
    }
    assert {name: record[name] for name in wanted} == wanted


def test_a_workspace_without_repeatable_results_is_refused(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert make_deterministic(1)["cublas_workspace"] == ":16:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(TrainingError) as error:
        make_deterministic(1)
    assert str(error.value) == (
        "environment variable CUBLAS_WORKSPACE_CONFIG: expected :4096:8 or :16:8, found ':0:0'. "
        "Unset it, or set it to one of them before the process starts."
    )


def test_another_number_of_threads_is_detected_and_said():
    record = make_deterministic(threads=1)
    check_determinism(record)
    torch.set_num_threads(2)
    with pytest.raises(TrainingError) as error:
        check_determinism(record)
    assert str(error.value) == (
        "determinism: expected threads 1, as recorded, found threads 2. "
        "Go back to what is recorded, or start another run: these bits would be others."
    )


def test_every_setting_that_differs_is_named():
    record = make_deterministic(threads=1)
    torch.use_deterministic_algorithms(False)
    with pytest.raises(TrainingError) as error:
        check_determinism({**record, "torch": "2.0"})
    assert error.value.expected == "deterministic_algorithms True, torch 2.0, as recorded"
    assert error.value.found == f"deterministic_algorithms False, torch {torch.__version__}"


def unrepeatable():
    """An operation that has no deterministic implementation on the CPU."""
    x = torch.zeros(4, requires_grad=True)
    torch.zeros(2, 2).put_(torch.tensor([0]), x[:1], accumulate=False)


def test_operations_that_refuse_are_listed_and_settings_put_back():
    make_deterministic(1)
    before = determinism_record()
    assert refused_operations(lambda: nn.Linear(2, 1)(torch.ones(3, 2)).sum().backward()) == []
    assert refused_operations(unrepeatable) == ["put_"]
    assert determinism_record() == before
    with pytest.raises(RuntimeError, match="deterministic"):
        unrepeatable()


class PutBack(torch.autograd.Function):
    """Refuses on the way back only."""

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, grad):
        return torch.zeros_like(grad).put_(torch.arange(grad.numel()), grad)


def test_an_operation_that_refuses_in_a_step_is_told_in_words():
    make_deterministic(1)
    model = nn.Linear(2, 1)
    model.register_forward_hook(lambda _, __, output: PutBack.apply(output))
    step = TrainStep(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(TrainingError) as error:
        loop(step, [(torch.ones(3, 2), torch.ones(3))], 0, 1)
    assert str(error.value) == (
        "model Linear: expected operations that repeat their bits, found put_, which torch can't "
        "promise that of. Write the model with others; the documentation of "
        "torch.use_deterministic_algorithms lists those that don't repeat."
    )


def test_the_cost_is_measured_in_turns_and_settings_put_back():
    make_deterministic(1)
    before = determinism_record()
    seen = []
    cost = determinism_cost(
        lambda: seen.append(torch.are_deterministic_algorithms_enabled()), repetitions=3
    )
    assert seen == [True, False] * 4
    assert cost["ratio"] == pytest.approx(cost["deterministic_ms"] / cost["free_ms"])
    assert determinism_record() == before


# Contracts


@pytest.mark.parametrize(
    ("strategy", "options", "scope", "text"),
    [
        (
            "lanes",
            {"num_lanes": 8, "world_size": 3},
            "across world sizes",
            "bit-exact across world sizes 1–8 on this platform and version",
        ),
        (
            "lanes",
            {"num_lanes": 1, "world_size": 1},
            "at this world size",
            "bit-exact at this world size, 1 rank, on this platform and version",
        ),
        (
            "ddp",
            {"num_lanes": 1, "world_size": 4},
            "at this world size",
            "bit-exact at this world size, 4 ranks, on this platform and version",
        ),
        (
            "fsdp2",
            {"num_lanes": 1, "world_size": 2},
            "at this world size",
            "bit-exact at this world size, 2 ranks, on this platform and version",
        ),
        (
            "lanes",
            {"num_lanes": 8, "world_size": 3, "deterministic": False},
            "statistical",
            "statistical: the same distribution, not the same bits",
        ),
    ],
)
def test_the_contract_of_a_configuration(strategy, options, scope, text):
    found = contract_of(strategy, threads=2, **options)
    assert (found.scope, found.text) == (scope, text)
    held = "" if scope == "statistical" else "this platform and version, with threads = 2"
    assert found.as_dict() == {"scope": scope, "text": text, "condition": held}
