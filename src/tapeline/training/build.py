"""A model and its optimiser from their configuration; what is wrong with them told beforehand."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from typing import Any

import numpy as np
import torch
from torch import nn

from tapeline.config import ModelConfig, TrainingConfig
from tapeline.errors import ConfigError, TapelineError
from tapeline.training.determinism import keyed_draws, refusal, refused_operations
from tapeline.training.objective import SQUARED_ERROR, Objective
from tapeline.training.precision import check_trainable
from tapeline.training.step import predict
from tapeline.windows import BatchSource, WindowIndex

_INITIALISATION = (2**63, 0)  # keys the first weights; steps are keyed by one small number


def build_model(
    config: ModelConfig, num_inputs: int, num_outputs: int, seed: int, device: str
) -> nn.Module:
    """The model that `factory(num_inputs, **arguments)` returns, its first weights keyed by seed.

    Args:
        config: names the factory; its module may lie in `folder`.
        num_inputs: T · columns of a window.
        num_outputs: of the model; given to a factory with a parameter of this name.
        seed: of the run.
        device: where the model is put, as torch names it.

    Raises:
        ConfigError: the factory can't be imported or called, or the device isn't there.
    """
    where = f"model.factory = {config.factory}"
    factory = _imported(config, where)
    arguments = dict(config.arguments)
    try:
        signature = inspect.signature(factory)
        if "num_outputs" in signature.parameters:
            arguments.setdefault("num_outputs", num_outputs)
        signature.bind(num_inputs, **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            where,
            expected="a callable that takes num_inputs and model.arguments",
            found=str(error),
            fix="Correct model.arguments, or the callable's parameters",
        ) from None
    with keyed_draws(torch.device("cpu"), seed, *_INITIALISATION):
        try:
            model = factory(num_inputs, **arguments)
        except Exception as error:
            raise _failed(where, "a model", error) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            where,
            expected="a callable that returns a torch module",
            found=type(model).__name__,
            fix="Return an nn.Module",
        )
    return _on_device(model, device)


def build_optimizer(config: TrainingConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimiser that the configuration names, over all parameters.

    Raises:
        TrainingError: the model has no parameters to train in float32.
    """
    check_trainable(model)
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    optimizer: torch.optim.Optimizer = kinds[config.optimizer](
        model.parameters(),
        lr=config.scaled_learning_rate,
        weight_decay=config.weight_decay,
        fused=config.fused or None,
    )
    return optimizer


def check_output(
    model: nn.Module,
    source: BatchSource,
    index: WindowIndex,
    seed: int,
    objective: Objective = SQUARED_ERROR,
) -> None:
    """Try the model on two windows, so that one that can't work is told before a run begins.

    Weights that the model makes here, since it first had to see an input, are keyed by the seed.

    Raises:
        TrainingError: its output isn't of the shape that the objective asks for, there is nothing
            to train in float32, or operations of its forward pass don't repeat: each is named.
        ConfigError: it raises.
    """
    check_trainable(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    x, y = map(torch.from_numpy, source.batch(*index.locate(np.zeros(2, np.int64))))
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), keyed_draws(device, seed, *_INITIALISATION):
            refused = refused_operations(lambda: predict(model, x.to(device), y, objective))
    except TapelineError:
        raise
    except Exception as error:
        where = f"model {type(model).__name__}"
        raise _failed(where, "an output for two windows", error) from error
    finally:
        model.train(was_training)
    if refused:
        raise refusal(model, refused)


def _imported(config: ModelConfig, where: str) -> Any:
    module, _, name = config.factory.partition(":")
    if config.folder is not None and config.folder not in sys.path:
        sys.path.append(config.folder)  # behind everything: a file there must not hide a package
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            where,
            expected="an importable `package.module:callable`",
            found=str(error),
            fix="Install the package, or set model.folder to where the module lies",
        ) from None
    except Exception as error:
        raise _failed(where, "a module that can be imported", error) from error
    if not hasattr(found, name):
        raise ConfigError(
            where,
            expected=f"a callable of module {module}",
            found=f"none named {name}",
            fix="Correct the name behind the colon",
        )
    return getattr(found, name)


def _on_device(model: nn.Module, device: str) -> nn.Module:
    try:
        place = torch.device(device)
        torch.zeros(1, device=place).item()  # `meta` has no numbers, `cuda` may not be there
        return model.to(place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(
            f"training.device = {device}",
            expected="a device that this torch can compute on, such as cpu or cuda",
            found=str(error).splitlines()[0],
            fix="Take cpu, or install a torch that supports the device",
        ) from None


def _failed(where: str, expected: str, error: Exception) -> ConfigError:
    """An error in the user's own code, with the line it was raised on."""
    frames = traceback.extract_tb(error.__traceback__)
    own = f" at {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    return ConfigError(
        where,
        expected=expected,
        found=f"{type(error).__name__}{own}: {error}",
        fix="Correct the model",
    )
