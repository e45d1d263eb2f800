"""Sums and means of gradients: their order, their weights, and softsync's formula."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
import torch

from aggregate.parameter_server.optimizers import gradient
from stretto.aggregate.parameter_server.gradient_sum import GradientSum
from stretto.aggregate.parameter_server.range_state import RangeState
from stretto.aggregate.parameter_server.shard_optimizer import OptimizerSpec
from stretto.errors import MalformedPayload

SIZE = 1000


def test_a_total_is_added_in_the_order_of_the_calls() -> None:
    total = GradientSum(SIZE)
    for step in (2, 0, 1):
        total.add(gradient(step))
    assert total.count == 3 and total.weight == 3
    assert np.array_equal(total.take_total(), (gradient(2) + gradient(0)) + gradient(1))


def test_a_mean_divides_by_the_sum_of_weights() -> None:
    total = GradientSum(SIZE)
    total.add(gradient(0), weight=0.5)
    total.add(gradient(1), weight=2.0)
    total.add(gradient(2))
    expected = (0.5 * gradient(0).astype(np.float64) + 2.0 * gradient(1) + gradient(2)) / 3.5
    np.testing.assert_allclose(total.take_mean(), expected, rtol=1e-5, atol=1e-6)


def test_the_mean_of_one_gradient_is_that_gradient() -> None:
    total = GradientSum(SIZE)
    total.add(gradient(0))
    assert np.array_equal(total.take_mean(), gradient(0))


def test_what_was_taken_or_cleared_is_not_in_the_next_sum() -> None:
    total = GradientSum(SIZE)
    for end in (total.take_total, total.take_mean, total.clear):
        total.add(gradient(0), weight=3.0)
        end()
        assert total.count == 0 and total.weight == 0
    total.add(gradient(1))
    assert np.array_equal(total.take_total(), gradient(1))


def test_what_was_taken_stays_as_it_is_while_somebody_holds_it() -> None:
    total, held = GradientSum(SIZE), []
    for step in range(3):
        total.add(gradient(step))
        held.append(total.take_total().data.cast("B"))
    assert [bytes(each) for each in held] == [gradient(step).tobytes() for step in range(3)]


@pytest.mark.parametrize(
    ("pushed", "weight"),
    [
        (np.zeros(SIZE - 1, np.float32), 1.0),
        (np.zeros(SIZE, np.float64), 1.0),
        (np.zeros((SIZE, 1), np.float32), 1.0),
        (np.zeros(SIZE, np.float32), 0.0),
        (np.zeros(SIZE, np.float32), -1.0),
        (np.zeros(SIZE, np.float32), math.nan),
        (np.zeros(SIZE, np.float32), math.inf),
        (np.zeros(SIZE, np.float32), 1e30),
        (np.zeros(SIZE, np.float32), 1e-30),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused_and_not_counted(pushed: np.ndarray, weight: float) -> None:
    total = GradientSum(SIZE)
    total.add(gradient(0))
    with pytest.raises(MalformedPayload):
        total.add(pushed, weight)
    assert total.count == 1 and np.array_equal(total.take_total(), gradient(0))


def test_adding_takes_no_memory() -> None:
    size = 1 << 18
    total, one = GradientSum(size), np.frombuffer(bytes(4 * size), np.float32)
    tracemalloc.start()
    for _ in range(3):
        for weight in (1.0, 1.0, 0.5):
            total.add(one, weight)
        total.take_mean()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 * size // 8


def test_infinities_and_overflows_pass_without_a_warning() -> None:
    total = GradientSum(2)
    for weight in (1.0, 1.0, 2.0):
        total.add(np.array([3e38, math.inf], np.float32), weight)
    assert np.isinf(total.take_mean()).all()


def softsync(optimizer: OptimizerSpec, staleness: list[int]) -> RangeState:
    state, total = RangeState(torch.zeros(SIZE), optimizer), GradientSum(SIZE)
    for step, tau in enumerate(staleness):
        total.add(gradient(step), 1 / max(tau, 1))
    scale = total.weight / total.count
    state.apply(total.take_mean(), {}, lr_scale=scale)
    return state


def test_a_mean_at_the_rate_of_weight_over_count_is_the_update_of_softsync() -> None:
    staleness = [0, 1, 2, 5]
    expected = -0.1 / 4 * sum(gradient(step).astype(np.float64) / max(tau, 1) for step, tau in enumerate(staleness))
    state = softsync(OptimizerSpec("SGD", {"lr": 0.1}), staleness)
    np.testing.assert_allclose(np.frombuffer(state.value(), np.float32), expected, rtol=1e-4, atol=1e-6)


def test_under_adam_stale_gradients_move_less_too() -> None:
    adam = OptimizerSpec("Adam", {"lr": 0.1})
    fresh = np.frombuffer(softsync(adam, [1, 1]).value(), np.float32)
    stale = np.frombuffer(softsync(adam, [4, 4]).value(), np.float32)
    np.testing.assert_allclose(stale, fresh / 4, rtol=1e-3)
