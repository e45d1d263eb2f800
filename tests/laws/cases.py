"""Awkward models, each with a batch and a loss such that the mean over equal shards is the loss of the whole batch.

A new model is one more entry of `CASES`, and all laws apply to it. `step` does what a training loop does up to, and without, the
optimizer's step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from stretto.distributing import find_engine, no_sync, synchronize

BATCH = 84  # divisible by every world size
WIDTH = 6

Step = Callable[[nn.Module, Tensor, int], None]  # model, this worker's share, the number of the step
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.complex128: 1e-12}


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def plain_step(model: nn.Module, x: Tensor, number: int) -> None:
    torch.autograd.backward(loss_of(model, x))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """A mean over samples."""
    loss: Tensor = (model(x) - x.sum(1, keepdim=True).sin()).pow(2).mean()
    return loss


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    step: Step = plain_step
    optimizer: Callable[[nn.Module], Optimizer] = sgd
    dtype: torch.dtype = torch.float32  # of the data
    options: dict[str, Any] = field(default_factory=dict)  # of distribute

    def batch(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64).to(self.dtype)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 9), nn.Tanh(), nn.Linear(9, 1))


class FrozenTiedScalar(nn.Module):
    """A frozen layer, one weight used in two places, parameters without dimensions and without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.frozen(self.first(x).tanh()).tanh()).tanh()
        out: Tensor = self.last(hidden * self.scale) + self.empty.sum()
        return out


class Mixed(nn.Module):
    """Three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(WIDTH, 8).bfloat16()
        self.middle = nn.Linear(WIDTH, 8)
        self.high = nn.Linear(8, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.low(x.bfloat16()).double() * 0.1 + self.middle(x.float()).double()
        out: Tensor = self.high(hidden.tanh())
        return out


class LowOnly(nn.Module):
    """Nothing in float32 or better: the notes need a bucket of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(WIDTH, 1).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.low(x.bfloat16()).to(x.dtype)
        return out


class Experts(nn.Module):
    """Each sample goes to one of four experts, so a share of the batch may leave some unused; one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(4))
        self.never = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 1)
        chosen = (x[:, 0] * 1.4).abs().long().clamp(max=3)  # expert 3 is rare, and absent in some steps
        for number, expert in enumerate(self.experts):
            if (mine := chosen == number).any():
                out = out.index_put((mine.nonzero().flatten(),), expert(x[mine]))
        return out


class TakingTurns(nn.Module):
    """Another layer is left out in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, 1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for number, layer in enumerate(self.layers):
            if number != self.calls % 3:
                x = layer(x).tanh()
        out: Tensor = self.last(x)
        return out


class Words(nn.Module):
    """Embeddings with sparse gradients; beside them a dense layer."""

    def __init__(self, dense: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 4, sparse=True)
        self.bag = nn.EmbeddingBag(20, 4, mode="sum", sparse=True)
        self.last = nn.Linear(4, 1) if dense else None

    def forward(self, x: Tensor) -> Tensor:
        numbers = (x.abs() * 10).long()
        hidden = self.words(numbers.clamp(max=49)).mean(1) + self.bag(numbers.clamp(max=19))
        out: Tensor = self.last(hidden) if self.last is not None else hidden.mean(1, keepdim=True)
        return out


class Pictures(nn.Module):
    """Convolutions whose weights lie in memory channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 5, 3, padding=1)
        self.last = nn.Linear(5, 1)
        for layer in (self.first, self.second):
            layer.weight.data = layer.weight.data.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        picture = x.repeat(1, 8).reshape(len(x), 3, 4, 4).to(memory_format=torch.channels_last)
        out: Tensor = self.last(self.second(self.first(picture).tanh()).tanh().mean((2, 3)))
        return out


class Checkpointed(nn.Module):
    """Activation checkpointing; one layer is in two segments, so its gradient comes in two parts, the second one late."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(WIDTH, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.between = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        hidden = checkpoint(lambda h: self.shared(h).tanh(), hidden, use_reentrant=self.reentrant)
        hidden = checkpoint(lambda h: self.between(h).tanh(), hidden, use_reentrant=self.reentrant)
        hidden = checkpoint(lambda h: self.shared(h).tanh(), hidden, use_reentrant=self.reentrant)
        out: Tensor = self.last(hidden)
        return out


class Complex(nn.Module):
    """A parameter of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH, 2, dtype=torch.complex128) * 0.3)
        self.last = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last((x.to(torch.complex128) @ self.turn).abs())
        return out


def accumulating(model: nn.Module, x: Tensor, number: int) -> None:
    """Three parts; only the last backward synchronises. `no_sync` is nothing in the reference, which is not distributed."""
    distributed = "_stretto_engine" in model.__dict__
    for place, part in enumerate(x.chunk(3)):
        with no_sync(model) if distributed and place < 2 else nullcontext():
            _backward_of_part(model, part, len(x))


def accumulating_to_the_end(model: nn.Module, x: Tensor, number: int) -> None:
    """All parts without synchronising; what has been accumulated is combined by `synchronize`."""
    distributed = "_stretto_engine" in model.__dict__
    for part in x.chunk(3):
        with no_sync(model) if distributed else nullcontext():
            _backward_of_part(model, part, len(x))
    if distributed:
        synchronize(model)


def part_by_part(model: nn.Module, x: Tensor, number: int) -> None:
    """The layers are called one by one, so the model's own forward never runs."""
    out = x
    for layer in model.children():
        out = layer(out)
    torch.autograd.backward(functional.mse_loss(out, x.sum(1, keepdim=True).sin()))


def several_backwards(model: nn.Module, x: Tensor, number: int) -> None:
    for part in x.chunk(2):
        _backward_of_part(model, part, len(x))


def _backward_of_part(model: nn.Module, part: Tensor, whole: int) -> None:
    loss: Tensor = loss_of(model, part) * (len(part) / whole)
    torch.autograd.backward(loss)


def two_forwards(model: nn.Module, x: Tensor, number: int) -> None:
    loss: Tensor = loss_of(model, x) + 0.5 * loss_of(model, -x)
    torch.autograd.backward(loss)


def gradient_penalty(model: nn.Module, x: Tensor, number: int) -> None:
    x = x.requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.pow(2).mean() + (slope.norm(dim=1) - 1).pow(2).mean()).backward()


def whole_checkpointed(model: nn.Module, x: Tensor, number: int) -> None:
    x = x.requires_grad_()  # re-entrant checkpointing needs an input that wants a gradient
    out = checkpoint(model, x, use_reentrant=True)
    (out - x.detach().sum(1, keepdim=True).sin()).pow(2).mean().backward()


def whole_checkpointed_twice(model: nn.Module, x: Tensor, number: int) -> None:
    x = x.requires_grad_()
    once = checkpoint(model, x, use_reentrant=True)
    twice = checkpoint(model, x * once, use_reentrant=True)
    loss: Tensor = functional.mse_loss(twice, once.detach())
    torch.autograd.backward(loss)


def clipped(model: nn.Module, x: Tensor, number: int) -> None:
    plain_step(model, x, number)
    if (engine := find_engine(model)) is not None:
        engine.settle()  # as optimizer.synchronize() does
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def kept_zeros(model: nn.Module, x: Tensor, number: int) -> None:
    """The loop's zero_grad() would set None: here gradients stay, as zeros, and autograd adds to them in place."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    plain_step(model, x, number)


CASES = [
    Case("mlp", mlp),
    Case("float64 and AdamW", lambda: mlp().double(), optimizer=adamw, dtype=torch.float64),
    Case("frozen, tied, 0-d, empty", FrozenTiedScalar),
    Case("three dtypes", Mixed),
    Case("bfloat16 only", LowOnly),
    Case("complex", lambda: Complex().double(), dtype=torch.float64),
    Case("unused on some ranks", lambda: Experts().double(), dtype=torch.float64),
    Case("unused in turns, AdamW", lambda: TakingTurns().double(), optimizer=adamw, dtype=torch.float64),
    Case("sparse embeddings", lambda: Words().double(), dtype=torch.float64),
    Case("only sparse embeddings", lambda: Words(dense=False).double(), dtype=torch.float64),
    Case("channels-last", Pictures),
    Case("checkpointed", lambda: Checkpointed(False)),
    Case("checkpointed re-entrant", lambda: Checkpointed(True)),
    Case("whole model checkpointed", mlp, step=whole_checkpointed),
    Case("whole model checkpointed twice", mlp, step=whole_checkpointed_twice),
    Case("accumulating", mlp, step=accumulating),
    Case("accumulating, then synchronized", mlp, step=accumulating_to_the_end),
    Case("part by part", mlp, step=part_by_part),
    Case("several backwards", mlp, step=several_backwards),
    Case("two forwards", mlp, step=two_forwards),
    Case("gradient penalty", lambda: mlp().double(), step=gradient_penalty, dtype=torch.float64),
    Case("clipped", mlp, step=clipped),
    Case("zeros kept", mlp, step=kept_zeros),
]
BY_NAME = {case.name: case for case in CASES}
