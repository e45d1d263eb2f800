"""LAMB: the card's rule, steps as long as the rate says, and Adam where nothing is adapted."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stretto.errors import ConfigurationError
from stretto.optim.lamb import LAMB, trust_ratio

STEPS = 20


def parameters(dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[nn.Parameter]:
    """A matrix, a convolution's kernel, a bias, and a 0-d parameter."""
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype, device=device)) for shape in [(5, 3), (4, 2, 3, 3), (5,), ()]]


def gradients(step: int, like: list[nn.Parameter]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p) for p in like]


def train(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], steps: range, scale: float = 1.0) -> None:
    for step in steps:
        for weight, gradient in zip(weights, gradients(step, weights), strict=True):
            weight.grad = gradient * scale
        optimizer.step()


def test_twenty_steps_are_those_of_the_card() -> None:
    weights = parameters()
    expected = [weight.detach().clone() for weight in weights]
    moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in expected]
    for t in range(1, STEPS + 1):
        for i, g in enumerate(gradients(t - 1, weights)):
            w, (m, v) = expected[i], moments[i]
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            u = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6)
            if w.ndim >= 2:
                u = u + 0.01 * w
                u = u * w.norm() / u.norm()
            expected[i], moments[i] = w - 0.02 * u, (m, v)
    train(LAMB(weights, lr=0.02), weights, range(STEPS))
    for weight, right in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.detach(), right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_adaptation_and_weight_decay_it_is_adam(dtype: torch.dtype) -> None:
    one, other = parameters(dtype), parameters(dtype)
    train(LAMB(one, lr=0.01, betas=(0.8, 0.99), weight_decay=0.0, adapt="none"), one, range(STEPS))
    train(torch.optim.Adam(other, lr=0.01, betas=(0.8, 0.99), eps=1e-6), other, range(STEPS))
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a.detach(), b.detach())


def test_biases_are_adam_by_default() -> None:
    one, other = parameters(), parameters()
    train(LAMB(one, lr=0.01), one, range(STEPS))
    train(torch.optim.Adam(other, lr=0.01, eps=1e-6), other, range(STEPS))
    for a, b in zip(one, other, strict=True):
        assert torch.allclose(a, b, rtol=1e-10) == (a.ndim < 2)


@settings(max_examples=50, deadline=None)
@given(
    exponents=st.tuples(st.integers(-4, 4), st.integers(-3, 6)),
    decay=st.sampled_from([0.0, 0.01, 1.0]),
    lr=st.sampled_from([1e-3, 0.1, 1.0]),
    seed=st.integers(0, 1000),
)
def test_every_step_is_as_long_as_the_rate_times_the_weights(
    exponents: tuple[int, int], decay: float, lr: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = nn.Parameter(torch.randn(6, 4, generator=generator, dtype=torch.float64) * 10.0 ** exponents[0])
    optimizer = LAMB([weight], lr=lr, weight_decay=decay)
    for _ in range(3):
        before = weight.detach().clone()
        weight.grad = torch.randn(6, 4, generator=generator, dtype=torch.float64) * 10.0 ** exponents[1]
        optimizer.step()
        torch.testing.assert_close((weight.detach() - before).norm(), lr * before.norm(), rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("scale", [2.0**-6, 3.0, 2.0**30])
def test_rescaled_gradients_give_the_same_step_without_weight_decay(scale: float) -> None:
    one, other = parameters(), parameters()
    train(LAMB(one, lr=0.01, weight_decay=0.0, eps=1e-14), one, range(STEPS))
    train(LAMB(other, lr=0.01, weight_decay=0.0, eps=1e-14), other, range(STEPS), scale)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-9, atol=1e-9)


def test_norm_bounds_cut_what_the_step_is_scaled_to() -> None:
    u = torch.tensor([[3.0, 4.0]])
    for norm, phi in [(0.5, 1.0), (2.0, 2.0), (8.0, 5.0)]:
        assert trust_ratio(torch.tensor([[norm]]), u, (1.0, 5.0)) == phi / 5
        assert trust_ratio(torch.tensor([[norm]]), u, None) == norm / 5
    weight = nn.Parameter(torch.full((2, 2), 50.0))
    weight.grad = torch.ones(2, 2)
    LAMB([weight], lr=0.1, norm_bounds=(0.0, 10.0)).step()
    torch.testing.assert_close((50 - weight.detach()).norm(), torch.tensor(1.0), rtol=1e-4, atol=0.0)


def test_where_a_norm_is_zero_the_ratio_is_one() -> None:
    one, zero = torch.ones(2, 2), torch.zeros(2, 2)
    for bounds in (None, (0.5, 10.0)):
        assert trust_ratio(zero, one, bounds) == 1
        assert trust_ratio(one, zero, bounds) == 1
        assert trust_ratio(zero, zero, bounds) == 1
    assert trust_ratio(one, 2 * one, None) == 0.5


def test_zero_weights_move_and_zero_gradients_do_not_divide_by_zero() -> None:
    for fill, gradient, moved in [(0.0, 1.0, -0.1), (1.0, 0.0, 1.0)]:
        weight = nn.Parameter(torch.full((3, 3), fill))
        weight.grad = torch.full((3, 3), gradient)
        LAMB([weight], lr=0.1, weight_decay=0.0).step()
        torch.testing.assert_close(weight.detach(), torch.full((3, 3), moved))


def test_biases_can_be_adapted_and_decayed() -> None:
    start = torch.tensor([3.0, 4.0], dtype=torch.float64)
    bias = nn.Parameter(start.clone())
    bias.grad = torch.tensor([2.0, -2.0], dtype=torch.float64)
    LAMB([bias], lr=0.1, weight_decay=0.5, eps=1e-15, adapt="all", decay="all").step()
    u = torch.tensor([1.0, -1.0], dtype=torch.float64) + 0.5 * start  # the first direction of Adam is the sign
    torch.testing.assert_close(bias.detach(), start - 0.1 * 5 * u / u.norm())


def test_decay_without_adaptation_is_that_of_adamw() -> None:
    one, other = parameters(), parameters()
    train(LAMB(one, lr=0.01, weight_decay=0.1, adapt="none", decay="all"), one, range(1))
    train(torch.optim.AdamW(other, lr=0.01, weight_decay=0.1, eps=1e-6), other, range(1))
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a.detach(), b.detach())


def test_options_may_differ_by_group() -> None:
    weights = parameters()
    before = [weight.detach().clone() for weight in weights]
    groups: list[dict[str, Any]] = [{"params": weights[:1], "lr": 0.3}, {"params": weights[1:2]}]
    optimizer = LAMB(groups, lr=0.1)
    optimizer.add_param_group({"params": weights[2:3], "adapt": "all", "lr": 0.2})
    train(optimizer, weights[:3], range(1))
    for weight, start, lr in zip(weights, before[:3], [0.3, 0.1, 0.2], strict=False):
        torch.testing.assert_close((weight.detach() - start).norm(), lr * start.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_saved_and_loaded_it_goes_on_with_the_same_bits(dtype: torch.dtype) -> None:
    whole = parameters(dtype)
    train(LAMB(whole, lr=0.05), whole, range(STEPS))

    halves = parameters(dtype)
    first = LAMB(halves, lr=0.05)
    train(first, halves, range(7))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = LAMB(halves, lr=123.0)  # the options are part of the state
    second.load_state_dict(torch.load(file))
    train(second, halves, range(7, STEPS))
    assert all(torch.equal(a, b) for a, b in zip(whole, halves, strict=True))


def test_gradients_are_left_as_they_were() -> None:
    weights = parameters()
    optimizer = LAMB(weights, lr=0.05)
    for step in range(3):
        train(optimizer, weights, range(step, step + 1))
        for weight, gradient in zip(weights, gradients(step, weights), strict=True):
            assert weight.grad is not None and torch.equal(weight.grad, gradient)


def test_gradients_may_live_in_memory_that_is_used_again() -> None:
    """As those of a distributed model do: views of one bucket."""
    one, other = parameters(), parameters()
    train(LAMB(one, lr=0.05), one, range(4))
    optimizer = LAMB(other, lr=0.05)
    for weight in other:
        weight.grad = torch.empty_like(weight)
    for step in range(4):
        for weight, gradient in zip(other, gradients(step, other), strict=True):
            assert weight.grad is not None
            weight.grad.copy_(gradient)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_float32_within_its_rounding(dtype: torch.dtype) -> None:
    half, full = parameters(dtype), [nn.Parameter(weight.detach().float()) for weight in parameters(dtype)]
    train(LAMB(half, lr=0.05), half, range(5))
    train(LAMB(full, lr=0.05), full, range(5))
    for a, b in zip(half, full, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.detach().float(), b.detach(), rtol=0.05, atol=0.05)


def test_a_gradient_that_is_not_finite_shows_in_the_weights() -> None:
    for bad in (float("nan"), float("inf")):
        weight = nn.Parameter(torch.ones(2, 2))
        weight.grad = torch.tensor([[bad, 0.0], [0.0, 1.0]])
        LAMB([weight], lr=0.1).step()
        assert not weight.isfinite().all()


def test_a_closure_is_called_with_gradients_on() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = LAMB([weight], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss: Any = weight.square().sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 4.0
    assert optimizer.step(closure) < 4.0


def test_a_small_regression_converges() -> None:
    torch.manual_seed(1)
    x = torch.randn(256, 8)
    y = x @ torch.randn(8, 1) + 0.5
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = LAMB(model.parameters(), lr=0.05)
    losses = []
    for step in range(150):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 150)
        loss: Any = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.02 * losses[0]


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigurationError, match="LAMB got a sparse gradient .*(4, 2)"):
        LAMB(table.parameters()).step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, "lr=-0.1: it must be a number, 0 or more and finite"),
        ({"betas": 0.9}, r"betas=0.9\): two numbers are needed"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\]=1.0: .* below 1"),
        ({"betas": (-0.1, 0.9)}, r"betas\[0\]=-0.1"),
        ({"eps": 0.0}, "eps=0.0: .* above 0"),
        ({"weight_decay": -1}, "weight_decay=-1"),
        ({"norm_bounds": (1.0, 2.0, 3.0)}, "two numbers"),
        ({"norm_bounds": (5.0, 1.0)}, r"\(5.0, 1.0\)\): no norm lies between them.\n.*\(1.0, 5.0\)"),
        ({"norm_bounds": (-1.0, 1.0)}, r"norm_bounds\[0\]=-1.0"),
        ({"norm_bounds": (0.0, 0.0)}, r"norm_bounds\[1\]=0.0"),
        ({"adapt": None}, "adapt=None"),
        ({"decay": "none"}, "for none, weight_decay=0"),
    ],
)
def test_what_cannot_work_is_refused_in_the_constructor_and_in_a_group(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LAMB(parameters(), **options)
    optimizer = LAMB(parameters())
    with pytest.raises(ConfigurationError, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_the_host_never_waits_for_the_gpu() -> None:
    weights, here = parameters(device="cuda"), parameters()
    with torch.no_grad():
        for weight, other in zip(weights, here, strict=True):
            weight.copy_(other)  # cuda's random numbers are others
    moves = [gradients(step, weights) for step in range(3)]
    optimizer = LAMB(weights, lr=0.05, norm_bounds=(0.1, 3.0))
    try:
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="synchronizing"):
            weights[0].sum().item()  # it would be noticed
        for move in moves:
            for weight, gradient in zip(weights, move, strict=True):
                weight.grad = gradient
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    train(LAMB(here, lr=0.05, norm_bounds=(0.1, 3.0)), here, range(3))
    for weight, other in zip(weights, here, strict=True):
        torch.testing.assert_close(weight.detach().cpu(), other.detach())
