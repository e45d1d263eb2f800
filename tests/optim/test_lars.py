"""LARS: the card's rule, its bounds, and the momentum correction that comes from keeping the rate outside."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stretto.errors import ConfigurationError
from stretto.optim.lars import LARS, local_rate

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


def reference_step(w: Tensor, g: Tensor, v: Tensor, rate: float, beta: float) -> tuple[Tensor, Tensor]:
    """The card, with the rate folded into v."""
    adapted = w.ndim >= 2
    if not adapted:
        beta = 0.0
    ratio = 0.001 * w.norm() / (g.norm() + beta * w.norm() + 1e-8) if adapted else 1.0
    v = 0.9 * v + rate * ratio * (g + beta * w)
    return w - v, v


def test_twenty_steps_are_those_of_the_card() -> None:
    weights = parameters()
    expected = [(weight.detach().clone(), torch.zeros_like(weight)) for weight in weights]
    optimizer = LARS(weights, lr=0.7)
    for step in range(STEPS):
        moves = gradients(step, weights)
        expected = [reference_step(w, g, v, 0.7, 5e-4) for (w, v), g in zip(expected, moves, strict=True)]
        train(optimizer, weights, range(step, step + 1))
    for weight, (w, _) in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.detach(), w, rtol=1e-12, atol=1e-12)


def follow_the_card(rates: list[float], *, corrected: bool) -> list[Tensor]:
    """The card's rule with v multiplied by new rate / old rate whenever the rate has changed, or not."""
    weights = parameters()
    state = [(weight.detach().clone(), torch.zeros_like(weight)) for weight in weights]
    for step, rate in enumerate(rates):
        factor = rate / rates[step - 1] if corrected and step else 1.0
        state = [reference_step(w, g, v * factor, rate, 5e-4) for (w, v), g in zip(state, gradients(step, weights), strict=True)]
    return [w for w, _ in state]


def test_a_changed_rate_acts_as_momentum_correction_prescribes() -> None:
    rates = [0.1 * (1 + step) for step in range(8)] + [0.05] * 4
    weights = parameters()
    optimizer = LARS(weights, lr=rates[0])
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        train(optimizer, weights, range(step, step + 1))
    plain = follow_the_card(rates, corrected=False)
    for weight, right, wrong in zip(weights, follow_the_card(rates, corrected=True), plain, strict=True):
        torch.testing.assert_close(weight.detach(), right, rtol=1e-12, atol=1e-12)
        assert (right - wrong).abs().max() > 1e-6  # the factor matters here


def test_a_rate_of_zero_moves_nothing_and_loses_no_momentum() -> None:
    weights = parameters()
    optimizer = LARS(weights, lr=0.5)
    train(optimizer, weights, range(3))
    before = copy.deepcopy(weights)
    optimizer.param_groups[0]["lr"] = 0.0
    train(optimizer, weights, range(3, 4))
    assert all(torch.equal(a, b) for a, b in zip(weights, before, strict=True))
    assert all(optimizer.state[weight]["momentum_buffer"].abs().max() > 0 for weight in weights)


@settings(max_examples=50, deadline=None)
@given(
    exponents=st.tuples(st.integers(-6, 6), st.integers(-6, 6)),
    decay=st.sampled_from([0.0, 5e-4, 0.1, 10.0]),
    trust=st.sampled_from([1e-3, 0.02, 1.0]),
    eps=st.sampled_from([0.0, 1e-8]),
    seed=st.integers(0, 1000),
)
def test_no_contribution_is_longer_than_eta_times_the_weights(
    exponents: tuple[int, int], decay: float, trust: float, eps: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    w, g = (torch.randn(6, 4, generator=generator, dtype=torch.float64) * 10.0**e for e in exponents)
    step = local_rate(w, g, decay, trust, eps) * (g + decay * w)
    assert step.norm() <= trust * w.norm() * (1 + 1e-12)


def test_the_bound_is_reached_without_weight_decay() -> None:
    w, g = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    torch.testing.assert_close((local_rate(w, g, 0.0, 0.02, 0.0) * g).norm(), 0.02 * w.norm())


@pytest.mark.parametrize("scale", [2.0**-20, 0.5, 2.0**30])
def test_rescaled_gradients_give_the_same_bits_without_weight_decay(scale: float) -> None:
    one, other = parameters()[:2], parameters()[:2]
    train(LARS(one, lr=0.7, weight_decay=0.0, eps=0.0), one, range(5))
    train(LARS(other, lr=0.7, weight_decay=0.0, eps=0.0), other, range(5), scale)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.9, 0.01)])
def test_without_adaptation_it_is_sgd_to_the_bit(momentum: float, decay: float) -> None:
    one, other = parameters(torch.float32), parameters(torch.float32)
    train(LARS(one, lr=0.1, momentum=momentum, weight_decay=decay, adapt="none", decay="all"), one, range(STEPS))
    train(torch.optim.SGD(other, lr=0.1, momentum=momentum, weight_decay=decay, foreach=False), other, range(STEPS))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_by_default_biases_are_neither_adapted_nor_decayed() -> None:
    bias = nn.Parameter(torch.tensor([3.0, 4.0]))
    bias.grad = torch.tensor([1.0, -1.0])
    LARS([bias], lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(bias.detach(), torch.tensor([2.9, 4.1]))


def test_biases_can_be_adapted_and_decayed() -> None:
    bias = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
    bias.grad = torch.tensor([0.6, 0.8], dtype=torch.float64)
    LARS([bias], lr=2.0, weight_decay=0.5, trust_coefficient=0.1, eps=0.0, adapt="all", decay="all").step()
    # g + 0.5 w = 3.5 (0.6, 0.8); the ratio is 0.1 * 5 / (1 + 0.5 * 5)
    expected = torch.tensor([3.0, 4.0], dtype=torch.float64) - 2 * (0.5 / 3.5) * 3.5 * torch.tensor([0.6, 0.8])
    torch.testing.assert_close(bias.detach(), expected)


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_where_a_norm_is_zero_the_ratio_is_one(eps: float) -> None:
    one, zero = torch.ones(2, 2), torch.zeros(2, 2)
    assert local_rate(zero, one, 0.1, 0.001, eps) == 1
    assert local_rate(one, zero, 0.1, 0.001, eps) == 1
    assert local_rate(zero, zero, 0.0, 0.001, eps) == 1
    assert local_rate(one, one, 0.0, 0.001, 0.0) == 0.001


def test_weights_that_start_at_zero_move() -> None:
    weight = nn.Parameter(torch.zeros(3, 3))
    weight.grad = torch.ones(3, 3)
    LARS([weight], lr=0.1).step()
    torch.testing.assert_close(weight.detach(), torch.full((3, 3), -0.1))


def test_an_empty_parameter_does_no_harm() -> None:
    weight = nn.Parameter(torch.zeros(0, 3))
    weight.grad = torch.zeros(0, 3)
    LARS([weight], lr=0.1).step()
    assert weight.shape == (0, 3)


def test_a_parameter_without_gradient_stays_and_has_no_state() -> None:
    used, unused = parameters()[:2]
    before = unused.detach().clone()
    optimizer = LARS([used, unused], lr=0.1)
    used.grad = torch.ones_like(used)
    optimizer.step()
    assert torch.equal(unused, before) and unused not in optimizer.state


def test_options_may_differ_by_group() -> None:
    together, apart = parameters(), parameters()
    options: list[dict[str, Any]] = [{"lr": 0.3, "weight_decay": 0.1}, {"lr": 0.1, "momentum": 0.5, "adapt": "all"}]
    groups = [{"params": together[:2], **options[0]}, {"params": together[2:], **options[1]}]
    train(LARS(groups, lr=9.0), together, range(5))
    train(LARS(apart[:2], **options[0]), apart[:2], range(5))
    alone = LARS(apart[2:], **options[1])
    for step in range(5):
        for weight, gradient in zip(apart[2:], gradients(step, apart)[2:], strict=True):
            weight.grad = gradient
        alone.step()
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_saved_and_loaded_it_goes_on_with_the_same_bits(dtype: torch.dtype) -> None:
    whole = parameters(dtype)
    train(LARS(whole, lr=0.5), whole, range(STEPS))

    halves = parameters(dtype)
    first = LARS(halves, lr=0.5)
    train(first, halves, range(7))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = LARS(halves, lr=123.0)  # the options are part of the state
    second.load_state_dict(torch.load(file))
    train(second, halves, range(7, STEPS))
    assert all(torch.equal(a, b) for a, b in zip(whole, halves, strict=True))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_gradients_are_left_as_they_were(momentum: float) -> None:
    weights = parameters()
    optimizer = LARS(weights, lr=0.5, momentum=momentum)
    for step in range(3):
        train(optimizer, weights, range(step, step + 1))
        for weight, gradient in zip(weights, gradients(step, weights), strict=True):
            assert weight.grad is not None and torch.equal(weight.grad, gradient)


def test_gradients_may_live_in_memory_that_is_used_again() -> None:
    """As those of a distributed model do: views of one bucket."""
    one, other = parameters(), parameters()
    train(LARS(one, lr=0.5, momentum=0.9, weight_decay=0.0), one, range(4))
    optimizer = LARS(other, lr=0.5, momentum=0.9, weight_decay=0.0)
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
    train(LARS(half, lr=0.5), half, range(5))
    train(LARS(full, lr=0.5), full, range(5))
    for a, b in zip(half, full, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.detach().float(), b.detach(), rtol=0.03, atol=0.03)


def test_a_large_ratio_does_not_overflow_in_float16() -> None:
    """eta |w| / |g| is far above 65504, the largest float16, while the step it gives is small."""
    weight = nn.Parameter(torch.ones(8, 8, dtype=torch.float16))
    weight.grad = torch.full((8, 8), 1e-6, dtype=torch.float16)
    LARS([weight], lr=1.0, trust_coefficient=0.25, weight_decay=0.0, momentum=0.0).step()
    torch.testing.assert_close(weight.detach(), torch.full((8, 8), 0.75, dtype=torch.float16), rtol=2e-3, atol=0.0)


def test_a_gradient_that_is_not_finite_shows_in_the_weights() -> None:
    for bad in (float("nan"), float("inf")):
        weight = nn.Parameter(torch.ones(2, 2))
        weight.grad = torch.tensor([[bad, 0.0], [0.0, 1.0]])
        LARS([weight], lr=0.1).step()
        assert not weight.isfinite().all()


def test_a_closure_is_called_with_gradients_on() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = LARS([weight], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss: Any = weight.square().sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 4.0
    assert optimizer.step(closure) < 4.0


def test_hooks_of_torch_see_each_step_once() -> None:
    weights = parameters()
    optimizer = LARS(weights, lr=0.1)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(optimizer, weights, range(2))
    assert seen == ["before", "after"] * 2


def test_a_small_regression_converges() -> None:
    torch.manual_seed(1)
    x = torch.randn(256, 8)
    y = x @ torch.randn(8, 1) + 0.5
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = LARS(model.parameters(), lr=0.1, trust_coefficient=0.1)
    losses = []
    for step in range(150):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / 150) ** 2  # the paper's polynomial decay
        loss: Any = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.02 * losses[0]


def test_sparse_and_complex_gradients_are_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigurationError, match="LARS got a sparse gradient .*(4, 2)"):
        LARS(table.parameters(), lr=0.1).step()
    weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    weight.grad = torch.ones(2, dtype=torch.complex64)
    with pytest.raises(ConfigurationError, match="complex"):
        LARS([weight], lr=0.1).step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, "lr=-0.1: it must be a number, 0 or more and finite"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"lr": "0.1"}, "lr='0.1'"),
        ({"lr": True}, "lr=True"),
        ({"lr": 0.1, "momentum": 1.0}, "momentum=1.0: .* below 1"),
        ({"lr": 0.1, "weight_decay": float("inf")}, "weight_decay=inf"),
        ({"lr": 0.1, "trust_coefficient": 0}, "trust_coefficient=0: .* above 0"),
        ({"lr": 0.1, "eps": -1e-8}, "eps=-1e-08"),
        ({"lr": 0.1, "adapt": "some"}, "adapt='some'.*\n.*'matrices', 'all', 'none'"),
        ({"lr": 0.1, "decay": "none"}, "for none, weight_decay=0"),
    ],
)
def test_what_cannot_work_is_refused_in_the_constructor_and_in_a_group(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LARS(parameters(), **options)
    optimizer = LARS(parameters(), lr=0.1)
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
    optimizer = LARS(weights, lr=0.5)
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
    train(LARS(here, lr=0.5), here, range(3))
    for weight, other in zip(weights, here, strict=True):
        torch.testing.assert_close(weight.detach().cpu(), other.detach())
