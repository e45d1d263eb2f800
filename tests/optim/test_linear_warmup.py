"""Linear scaling with warm-up: the rate at every step, what follows it, and resuming."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler as torch_schedulers
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from stretto.errors import ConfigurationError
from stretto.optim.linear_warmup import LinearWarmUp

Make = Callable[[Optimizer], LRScheduler]

AFTER: dict[str, Make] = {
    "cosine": lambda o: torch_schedulers.CosineAnnealingLR(o, T_max=12, eta_min=0.001),
    "steps": lambda o: torch_schedulers.MultiStepLR(o, [3, 7], gamma=0.1),
    "exponential": lambda o: torch_schedulers.ExponentialLR(o, gamma=0.9),
    "lambda": lambda o: torch_schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
    "polynomial": lambda o: torch_schedulers.PolynomialLR(o, total_iters=10, power=2),
    "starts lower": lambda o: torch_schedulers.LinearLR(o, start_factor=0.25, total_iters=4),
    "chained": lambda o: torch_schedulers.ChainedScheduler(
        [torch_schedulers.ExponentialLR(o, gamma=0.9), torch_schedulers.StepLR(o, 4)], optimizer=o
    ),
    "sequence": lambda o: torch_schedulers.SequentialLR(
        o, [torch_schedulers.ConstantLR(o, factor=0.5, total_iters=2), torch_schedulers.ExponentialLR(o, 0.8)], milestones=[3]
    ),
}


def sgd(*rates: float) -> torch.optim.SGD:
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=1.0, momentum=0.9)


def rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def advance(optimizer: Optimizer, scheduler: LRScheduler, steps: int) -> list[list[float]]:
    """The rates that `steps` optimizer steps are made with."""
    seen = []
    for _ in range(steps):
        seen.append(rates(optimizer))
        optimizer.step()
        scheduler.step()
    return seen


@settings(max_examples=40, deadline=None)
@given(scale=st.floats(0.1, 256), steps=st.integers(0, 30), base=st.floats(1e-4, 10))
def test_the_rate_climbs_on_a_line_and_then_stays(scale: float, steps: int, base: float) -> None:
    optimizer = sgd(base, base / 2)
    seen = advance(optimizer, LinearWarmUp(optimizer, scale=scale, steps=steps), steps + 5)
    for t, (first, second) in enumerate(seen):
        part = t / steps if t < steps else 1.0
        assert first == pytest.approx(base + part * (scale * base - base), rel=1e-12)
        assert second == pytest.approx(first / 2)
    assert all(first == base * scale for first, _ in seen[steps:])  # exactly
    assert seen[0][0] == (base if steps else base * scale)


def alone(make: Make, steps: int, *base: float) -> list[list[float]]:
    optimizer = sgd(*base)
    return advance(optimizer, make(optimizer), steps)


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("kind", AFTER)
def test_afterwards_it_is_the_other_schedule_times_the_scale(kind: str, steps: int) -> None:
    optimizer = sgd(0.1, 0.02)
    after = AFTER[kind](optimizer)
    seen = advance(optimizer, LinearWarmUp(optimizer, scale=8, steps=steps, after=after), steps + 11)
    expected = alone(AFTER[kind], 11, 0.1, 0.02)
    for ours, theirs in zip(seen[steps:], expected, strict=True):
        assert ours == [8 * rate for rate in theirs]
    if steps:
        assert seen[0] == expected[0]  # it climbs from where the other schedule begins


def rebuilt(kind: str | None, optimizer: Optimizer, scale: float = 8) -> LinearWarmUp:
    return LinearWarmUp(optimizer, scale=scale, steps=5, after=AFTER[kind](optimizer) if kind else None)


@pytest.mark.parametrize("order", ["optimizer, schedulers, load", "schedulers, optimizer, load", "schedulers, load, optimizer"])
@pytest.mark.parametrize("at", [0, 3, 5, 9])
@pytest.mark.parametrize("kind", [None, "cosine", "steps", "chained"])
def test_saved_and_loaded_it_goes_on_with_the_same_bits(kind: str | None, at: int, order: str) -> None:
    optimizer = sgd(0.1, 0.02)
    scheduler = rebuilt(kind, optimizer)
    advance(optimizer, scheduler, at)
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), scheduler.state_dict()], file)
    expected = advance(optimizer, scheduler, 10)

    file.seek(0)
    of_optimizer, of_scheduler = torch.load(file, weights_only=False)  # MultiStepLR keeps a Counter
    optimizer = sgd(0.1, 0.02)
    if order == "optimizer, schedulers, load":
        optimizer.load_state_dict(of_optimizer)
    scheduler = rebuilt(kind, optimizer)
    if order == "schedulers, optimizer, load":
        optimizer.load_state_dict(of_optimizer)
    scheduler.load_state_dict(of_scheduler)
    if order == "schedulers, load, optimizer":
        optimizer.load_state_dict(of_optimizer)
    assert scheduler.get_last_lr() == expected[0]
    assert advance(optimizer, scheduler, 10) == expected


def test_its_state_is_plain_numbers_and_lists() -> None:
    optimizer = sgd(0.1)
    scheduler = rebuilt(None, optimizer)
    advance(optimizer, scheduler, 3)
    assert scheduler.state_dict() == {"step": 3, "unscaled": [0.1], "after": None}


def test_resumed_with_another_scale_it_has_the_rate_that_this_means() -> None:
    optimizer = sgd(0.1)
    scheduler = rebuilt("cosine", optimizer, scale=8)
    advance(optimizer, scheduler, 9)
    state, eight = scheduler.state_dict(), rates(optimizer)[0]
    optimizer = sgd(0.1)
    scheduler = rebuilt("cosine", optimizer, scale=4)
    scheduler.load_state_dict(state)
    assert rates(optimizer)[0] == pytest.approx(eight / 2)


def test_made_again_over_a_loaded_optimizer_it_starts_from_the_base_rate() -> None:
    optimizer = sgd(0.1)
    advance(optimizer, rebuilt(None, optimizer), 9)
    resumed = sgd(0.7)
    resumed.load_state_dict(optimizer.state_dict())  # at 0.8 now
    rebuilt(None, resumed)
    assert rates(resumed) == [0.1]


def test_a_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=rate)
    after = torch_schedulers.ExponentialLR(optimizer, gamma=0.5)
    scheduler = LinearWarmUp(optimizer, scale=4, steps=2, after=after)
    assert advance(optimizer, scheduler, 5) == [[0.5], [1.25], [2.0], [1.0], [0.5]]
    assert optimizer.param_groups[0]["lr"] is rate
    scheduler.load_state_dict(scheduler.state_dict())
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == 0.25


def test_sgd_of_torch_needs_no_momentum_correction() -> None:
    """Its steps under warm-up are those of the folded form with the factor new rate / old rate."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    scheduler = LinearWarmUp(optimizer, scale=8, steps=4)
    v, w, last = 0.0, 0.0, 0.1
    for gradient in [1.0, -2.0, 0.5, 3.0, 1.0, -1.0]:
        rate = rates(optimizer)[0]
        v = 0.9 * v * rate / last + rate * gradient
        w, last = w - v, rate
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        scheduler.step()
        assert weight.item() == pytest.approx(w, rel=1e-12)


def test_a_sequence_of_torch_may_contain_it() -> None:
    optimizer = sgd(0.1)
    warm_up = LinearWarmUp(optimizer, scale=4, steps=3)
    decay = torch_schedulers.LambdaLR(optimizer, lambda step: 4 * 0.5**step)
    seen = advance(optimizer, torch_schedulers.SequentialLR(optimizer, [warm_up, decay], milestones=[3]), 6)
    assert [rate for (rate,) in seen] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.2, 0.1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 0, "steps": 3}, "scale=0: .* above 0"),
        ({"scale": float("inf"), "steps": 3}, "scale=inf"),
        ({"scale": 2, "steps": -1}, r"steps=-1\): it is a number of optimizer steps"),
        ({"scale": 2, "steps": 2.5}, r"steps=2.5"),
        ({"scale": 2, "steps": True}, r"steps=True"),
        ({"scale": 2, "steps": 3, "after": 7}, r"after=int"),
    ],
)
def test_what_cannot_work_is_refused_and_changes_no_rate(options: dict[str, Any], message: str) -> None:
    optimizer = sgd(0.1)
    with pytest.raises(ConfigurationError, match=message):
        LinearWarmUp(optimizer, **options)
    assert rates(optimizer) == [0.1]


def test_other_schedulers_that_cannot_follow_are_refused() -> None:
    optimizer = sgd(0.1)
    with pytest.raises(ConfigurationError, match="ReduceLROnPlateau.*without a metric"):
        LinearWarmUp(optimizer, scale=2, steps=3, after=torch_schedulers.ReduceLROnPlateau(optimizer))
    with pytest.raises(ConfigurationError, match="of another optimizer"):
        LinearWarmUp(optimizer, scale=2, steps=3, after=AFTER["cosine"](sgd(0.1)))
    with pytest.raises(ConfigurationError, match="is a torch optimizer"):
        LinearWarmUp("sgd", scale=2, steps=3)  # type: ignore[arg-type]


def test_jumps_and_new_groups_and_other_states_are_refused() -> None:
    optimizer = sgd(0.1)
    scheduler = rebuilt(None, optimizer)
    with pytest.raises(ConfigurationError, match=r"step\(7\): it counts optimizer steps"):
        scheduler.step(7)
    with pytest.raises(ConfigurationError, match="has none to follow after the warm-up, and one when"):
        scheduler.load_state_dict(rebuilt("cosine", sgd(0.1)).state_dict())
    with pytest.raises(ConfigurationError, match="has 1 parameter groups, and had 2 when this state was saved"):
        scheduler.load_state_dict(rebuilt(None, sgd(0.1, 0.2)).state_dict())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ConfigurationError, match="has 2 parameter groups, and had 1 when this scheduler was made"):
        scheduler.step()
