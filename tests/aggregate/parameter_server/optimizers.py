"""Every optimizer that runs on servers, with options that use all of its formulas, and options that change from step to step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stretto.aggregate.parameter_server.shard_optimizer import OptimizerSpec, OptionValue

CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01, "maximize": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.01, "maximize": True}),
    ("AdamW", {"lr": 0.01, "betas": (0.8, 0.99)}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.01, "initial_accumulator_value": 0.1}),
    ("Adadelta", {"lr": 1.0, "rho": 0.95, "weight_decay": 0.01}),
    ("Adamax", {"lr": 0.01, "weight_decay": 0.01}),
    ("NAdam", {"lr": 0.01, "weight_decay": 0.01}),
    ("NAdam", {"lr": 0.01, "weight_decay": 0.01, "decoupled_weight_decay": True}),
    ("RAdam", {"lr": 0.01, "weight_decay": 0.01}),
    ("RMSprop", {"lr": 0.01, "weight_decay": 0.01}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    ("Rprop", {"lr": 0.01, "etas": (0.4, 1.3)}),
    ("ASGD", {"lr": 0.1, "t0": 3.0, "weight_decay": 0.01}),
]
IDS = [f"{name}-{'-'.join(options)}" for name, options in CASES]
SIZE = 1000
STEPS = 10


def spec(name: str, options: dict[str, Any]) -> OptimizerSpec:
    return OptimizerSpec(name, options)


def torch_optimizer(name: str, options: dict[str, Any], parameter: nn.Parameter) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)([parameter], **options)
    return optimizer


def start(size: int = SIZE) -> Tensor:
    return torch.randn(size, dtype=torch.float32, generator=torch.Generator().manual_seed(size))


def gradient(step: int, size: int = SIZE) -> NDArray[np.float32]:
    """Of a different size in each step, and in an array that cannot be written, as a wire's."""
    values = torch.randn(size, dtype=torch.float32, generator=torch.Generator().manual_seed(1000 + step)) * 10.0 ** (step % 3 - 1)
    return np.frombuffer(values.numpy().tobytes(), np.float32)


def options_at(step: int, options: dict[str, Any]) -> dict[str, OptionValue]:
    """A rate that falls, a weight decay that grows, and momenta that change, as schedulers do."""
    changed: dict[str, OptionValue] = {"lr": options["lr"] * 0.9**step}
    if "weight_decay" in options:
        changed["weight_decay"] = options["weight_decay"] * (1 + step)
    if "momentum" in options:
        changed["momentum"] = 0.9 - 0.01 * step
    if "betas" in options:
        changed["betas"] = (0.8 + 0.01 * step, 0.99)
    return changed
