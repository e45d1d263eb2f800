"""One range on a server: torch's own updates, rates that are scaled, values that are lent, delay compensation, and bytes."""

from __future__ import annotations

import gc
import math
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from aggregate.parameter_server.optimizers import CASES, IDS, SIZE, STEPS, gradient, options_at, spec, start, torch_optimizer
from stretto.aggregate.parameter_server.range_format import LENGTH
from stretto.aggregate.parameter_server.range_state import RangeState
from stretto.aggregate.parameter_server.shard_optimizer import OptimizerSpec
from stretto.errors import ConfigurationError, MalformedPayload
from stretto.sync.delay_compensation import DelayCompensation

SGD = OptimizerSpec("SGD", {"lr": 0.1})
ADAM = OptimizerSpec("Adam", {"lr": 0.1})
CONSTANT = DelayCompensation(0.04)
ADAPTIVE = DelayCompensation(2.0, decay=0.95)


def values_of(state: RangeState) -> NDArray[np.float32]:
    return np.frombuffer(bytes(state.value()), np.float32)


def floats(*numbers: float) -> NDArray[np.float32]:
    return np.array(numbers, np.float32)


# -- updates -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_updates_have_the_bits_of_torch_while_options_change(name: str, options: dict[str, Any]) -> None:
    state = RangeState(start(), spec(name, options))
    parameter = nn.Parameter(start())
    optimizer = torch_optimizer(name, options, parameter)
    for step in range(STEPS):
        changed = options_at(step, options)
        state.apply(gradient(step), changed)
        optimizer.param_groups[0].update(changed)
        parameter.grad = torch.from_numpy(gradient(step).copy())
        optimizer.step()
        assert np.array_equal(values_of(state), parameter.detach().numpy())


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_ranges_that_were_cut_from_a_tensor_have_the_bits_of_the_whole(name: str, options: dict[str, Any]) -> None:
    cuts = [0, 3, 250, 251, SIZE]
    whole = RangeState(start(), spec(name, options))
    parts = [RangeState(start()[a:b], spec(name, options)) for a, b in zip(cuts, cuts[1:], strict=False)]
    for step in range(STEPS):
        whole.apply(gradient(step), options_at(step, options))
        for part, a, b in zip(parts, cuts, cuts[1:], strict=False):
            part.apply(gradient(step)[a:b], options_at(step, options))
    assert np.array_equal(np.concatenate([values_of(part) for part in parts]), values_of(whole))


def test_options_are_those_of_one_update() -> None:
    state = RangeState(torch.zeros(1), SGD)
    state.apply(floats(1), {"lr": 1.0})
    state.apply(floats(1), {})
    assert values_of(state) == pytest.approx(-1.1)


def test_without_an_optimizer_what_is_pushed_is_added() -> None:
    state = RangeState(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), None)
    state.apply(floats(1, 1, 1, 1), {})
    state.apply(floats(0, 0, 0, 1), {}, lr_scale=0.5)
    assert values_of(state).tolist() == [2, 3, 4, 5.5]


def test_a_range_of_no_elements_can_be_updated_sent_and_exported() -> None:
    for optimizer in (None, SGD, ADAM):
        state = RangeState(torch.zeros(0), optimizer)
        state.apply(np.empty(0, np.float32), {})
        state.install(memoryview(state.export()))
        assert state.value().nbytes == 0


def test_a_gradient_at_an_odd_address_counts_as_any_other() -> None:
    memory = bytearray(1 + 4 * SIZE)
    memory[1:] = gradient(0).tobytes()
    state, other = RangeState(start(), ADAM), RangeState(start(), ADAM)
    state.apply(np.frombuffer(bytes(memory), np.float32, offset=1), {})
    other.apply(gradient(0), {})
    assert state.export() == other.export()


def test_the_values_that_a_range_begins_with_stay_the_callers() -> None:
    given_values = start()
    before = given_values.clone()
    state = RangeState(given_values, SGD)
    state.apply(gradient(0), {})
    assert torch.equal(given_values, before)


# -- the rate is scaled, not the gradient ------------------------------------------------------------------------------


def moved(optimizer: OptimizerSpec, scale_of_rate: float, scale_of_gradient: float) -> float:
    state = RangeState(torch.zeros(1), optimizer)
    for _ in range(3):
        state.apply(floats(2 * scale_of_gradient), {}, lr_scale=scale_of_rate)
    return float(values_of(state)[0])


def test_a_smaller_gradient_does_nothing_under_adam_and_a_smaller_rate_does() -> None:
    assert moved(ADAM, 1, 0.25) == pytest.approx(moved(ADAM, 1, 1), rel=1e-5)
    assert moved(ADAM, 0.25, 1) == pytest.approx(0.25 * moved(ADAM, 1, 1), rel=1e-5)


def test_for_sgd_without_momentum_both_are_the_same() -> None:
    assert moved(SGD, 0.25, 1) == moved(SGD, 1, 0.25) == pytest.approx(0.25 * moved(SGD, 1, 1))


def test_the_rate_that_rides_with_a_gradient_is_scaled_too() -> None:
    state = RangeState(torch.zeros(1), SGD)
    state.apply(floats(1), {"lr": 0.5}, lr_scale=0.5)
    state.apply(floats(1), {"lr": 0.5})
    assert values_of(state)[0] == -0.75


@pytest.mark.parametrize("name", ["ASGD", "Rprop"])
def test_an_optimizer_that_keeps_its_rate_refuses_to_scale_it(name: str) -> None:
    state = RangeState(start(), spec(name, {"lr": 0.1}))
    assert not spec(name, {}).obeys_rate and SGD.obeys_rate
    with pytest.raises(MalformedPayload, match="keeps a rate in its state"):
        state.apply(gradient(0), {}, lr_scale=0.5)
    state.apply(gradient(0), {})
    twin = RangeState(start(), spec(name, {"lr": 0.1}))
    twin.install(memoryview(state.export()))
    state.apply(gradient(1), {})
    twin.apply(gradient(1), {"lr": 0.0001})
    assert np.array_equal(values_of(state), values_of(twin))  # the reason: the rate of this update was not read in it


# -- what is refused leaves everything as it was -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pushed", "options", "scale", "words"),
    [
        (np.zeros(3, np.float32), {}, 1.0, "a range of 4 elements"),
        (np.zeros(5, np.float32), {}, 1.0, "a range of 4 elements"),
        (np.zeros(4, np.float64), {}, 1.0, "float64"),
        (np.zeros((2, 2), np.float32), {}, 1.0, "shape"),
        (np.zeros(4, np.float32), {"lr": math.nan}, 1.0, "lr=nan"),
        (np.zeros(4, np.float32), {"lr": "0.1"}, 1.0, "lr=0.1 is not a number"),
        (np.zeros(4, np.float32), {"unknown": 1.0}, 1.0, "unknown"),
        (np.zeros(4, np.float32), {"amsgrad": True}, 1.0, "max_exp_avg_sq"),
        (np.zeros(4, np.float32), {}, math.nan, "lr_scale"),
        (np.zeros(4, np.float32), {}, 1.5, "lr_scale"),
        (np.zeros(4, np.float32), {}, -0.5, "lr_scale"),
    ],
)
def test_a_bad_push_is_refused_and_changes_nothing(pushed: Any, options: Any, scale: float, words: str) -> None:
    state = RangeState(start(4), ADAM)
    state.apply(gradient(0, 4), {})
    before = state.export()
    with pytest.raises(MalformedPayload, match=words):
        state.apply(pushed, options, lr_scale=scale)
    assert state.export() == before


def test_without_an_optimizer_what_is_assigned_takes_the_place_of_the_old_and_readers_keep_theirs() -> None:
    state = RangeState(torch.arange(3.0), None)
    before = state.value()
    state.apply(np.full(3, 7, np.float32), {"assign": True})
    state.apply(np.ones(3, np.float32), {"assign": False})
    assert np.frombuffer(state.value(), np.float32).tolist() == [8, 8, 8]
    assert np.frombuffer(before, np.float32).tolist() == [0, 1, 2]
    with pytest.raises(MalformedPayload, match="has assign, a flag, and no others"):
        state.apply(np.ones(3, np.float32), {"assign": 2.0})


def test_options_without_an_optimizer_are_refused() -> None:
    with pytest.raises(MalformedPayload, match="without an optimizer"):
        RangeState(start(4), None).apply(gradient(0, 4), {"lr": 0.1})


def test_state_that_an_option_needs_may_begin_in_the_first_update_only() -> None:
    state = RangeState(start(4), spec("RMSprop", {"lr": 0.1}))
    state.apply(gradient(0, 4), {"momentum": 0.9})
    state.apply(gradient(1, 4), {"momentum": 0.0})
    state.apply(gradient(1, 4), {"momentum": 0.5})
    with pytest.raises(MalformedPayload, match="no grad_avg"):
        state.apply(gradient(2, 4), {"centered": True})


def test_ranges_of_other_types_and_compensated_sums_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="float16"):
        RangeState(torch.zeros(3, dtype=torch.float16), SGD)
    with pytest.raises(ConfigurationError, match="without an optimizer"):
        RangeState(torch.zeros(3), None, delay_compensation=CONSTANT)


# -- values are lent ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [None, SGD, ADAM])
def test_a_value_that_somebody_holds_does_not_change(optimizer: OptimizerSpec | None) -> None:
    state = RangeState(start(), optimizer)
    held = []
    for step in range(4):
        held.append((state.value(), bytes(state.value())))
        state.apply(gradient(step), {})
    assert all(bytes(value) == copy for value, copy in held)
    assert len({copy for _, copy in held}) == 4


def test_a_part_of_a_value_keeps_all_of_it() -> None:
    state = RangeState(start(), SGD)
    part = np.frombuffer(state.value()[8:16], np.float32)
    before = part.copy()
    gc.collect()
    state.apply(gradient(0), {})
    assert np.array_equal(part, before) and not np.array_equal(part, values_of(state)[2:4])


def test_a_value_cannot_be_written() -> None:
    with pytest.raises(TypeError):
        RangeState(start(), SGD).value()[0] = 1


def test_pulls_and_updates_copy_nothing_unless_an_old_value_is_held() -> None:
    state, num_bytes = RangeState(torch.zeros(1 << 18), SGD), 4 << 18
    pushed = np.ones(1 << 18, np.float32)

    def most_taken_by(*, held: bool) -> int:
        tracemalloc.start()
        values = [state.value() for _ in range(3)]
        if not held:
            values.clear()
        state.apply(pushed, {})
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert most_taken_by(held=False) < num_bytes // 4
    assert num_bytes <= most_taken_by(held=True) < 1.25 * num_bytes


# -- delay compensation ------------------------------------------------------------------------------------------------


def two_workers(compensation: DelayCompensation | None, optimizer: OptimizerSpec) -> RangeState:
    """Both pull; one pushes twice, so that the other's gradients are stale."""
    state = RangeState(start(), optimizer, delay_compensation=compensation)
    for step in range(STEPS):
        for worker in (0, 1):
            state.pulled_by(worker)
        state.apply(gradient(3 * step), {}, worker=0)
        state.apply(gradient(3 * step + 1), {}, worker=1)
        state.apply(gradient(3 * step + 2), {}, worker=0)
    return state


@pytest.mark.parametrize("optimizer", [SGD, ADAM])
@pytest.mark.parametrize("decay", [None, 0.95])
def test_strength_zero_is_asynchronous_bit_by_bit(optimizer: OptimizerSpec, decay: float | None) -> None:
    plain = values_of(two_workers(None, optimizer))
    assert np.array_equal(values_of(two_workers(DelayCompensation(0.0, decay), optimizer)), plain)
    assert not np.array_equal(values_of(two_workers(DelayCompensation(0.04, decay), optimizer)), plain)


@pytest.mark.parametrize("compensation", [CONSTANT, ADAPTIVE])
def test_a_gradient_of_the_current_values_is_applied_as_it_came(compensation: DelayCompensation) -> None:
    state, plain = RangeState(start(), SGD, delay_compensation=compensation), RangeState(start(), SGD)
    for step in range(STEPS):
        state.pulled_by(7)
        state.apply(gradient(step), {}, worker=7)
        plain.apply(gradient(step), {})
    assert np.array_equal(values_of(state), values_of(plain))


def test_a_gradient_of_the_current_values_may_be_too_large_for_its_square() -> None:
    state = RangeState(torch.zeros(2), SGD, delay_compensation=CONSTANT)
    state.pulled_by(0)
    state.apply(floats(1e30, -1e30), {}, worker=0)
    np.testing.assert_allclose(values_of(state), [-1e29, 1e29], rtol=1e-6)


@pytest.mark.parametrize("compensation", [CONSTANT, ADAPTIVE])
def test_gradients_of_nobody_and_of_workers_that_are_forgotten_are_applied_as_they_came(compensation: DelayCompensation) -> None:
    state, plain = RangeState(start(), SGD, delay_compensation=compensation), RangeState(start(), SGD)
    for worker in (None, 3, 4):
        state.pulled_by(4)
        state.apply(gradient(0), {})
        plain.apply(gradient(0), {})
        state.forget(4)
        state.apply(gradient(1), {}, worker=worker)
        plain.apply(gradient(1), {})
    assert np.array_equal(values_of(state), values_of(plain))


def test_the_constant_form_is_that_of_the_paper() -> None:
    state = RangeState(torch.tensor([1.0, -2.0]), SGD, delay_compensation=DelayCompensation(0.5))
    w = np.array([1.0, -2.0])
    state.pulled_by(0)
    backup = w.copy()
    for g in (np.array([3.0, 1.0]), np.array([-2.0, 4.0])):
        w = w - 0.1 * (g + 0.5 * g * g * (w - backup))
        state.apply(g.astype(np.float32), {}, worker=0)
    np.testing.assert_allclose(values_of(state), w, rtol=1e-6)


def test_the_adaptive_form_is_that_of_the_paper() -> None:
    state = RangeState(torch.tensor([1.0, -2.0]), SGD, delay_compensation=DelayCompensation(2.0, decay=0.9))
    w, mean_square = np.array([1.0, -2.0]), np.zeros(2)
    state.pulled_by(0)
    backup = w.copy()
    for g in (np.array([3.0, 1.0]), np.array([-2.0, 4.0]), np.array([0.5, 0.0])):
        mean_square = 0.9 * mean_square + (1 - 0.9) * g * g
        w = w - 0.1 * (g + 2.0 / np.sqrt(mean_square + 1e-7) * g * g * (w - backup))
        state.apply(g.astype(np.float32), {}, worker=0)
    np.testing.assert_allclose(values_of(state), w, rtol=1e-5)


def test_on_a_quadratic_a_stale_gradient_becomes_the_fresh_one_where_its_square_is_the_curvature() -> None:
    """f = h/2 (w - c)^2 has g = h (w - c) and the curvature h. At w_k = c + 1 / sqrt(lambda h), lambda g^2 = h."""
    h, c, strength = np.array([0.5, 2.0, 8.0]), np.array([1.0, -1.0, 0.0]), 0.25
    pulled = c + 1 / np.sqrt(strength * h)
    state = RangeState(torch.from_numpy(pulled.astype(np.float32)), SGD, delay_compensation=DelayCompensation(strength))
    state.pulled_by(0)
    other = np.array([0.3, -0.7, 0.2])
    state.apply(other.astype(np.float32), {"lr": 1.0})
    w = pulled - other
    stale, fresh = h * (pulled - c), h * (w - c)
    state.apply(stale.astype(np.float32), {"lr": 0.1}, worker=0)
    np.testing.assert_allclose(values_of(state), w - 0.1 * fresh, rtol=1e-5)


def test_workers_that_have_the_same_version_share_it() -> None:
    state = RangeState(start(), SGD, delay_compensation=CONSTANT)
    sizes = []
    for worker in range(4):
        state.pulled_by(worker)
    sizes.append(len(state.export()))  # all have the current values
    state.apply(gradient(0), {}, worker=0)
    sizes.append(len(state.export()))  # all have the values before
    state.pulled_by(0)
    state.apply(gradient(1), {}, worker=0)
    sizes.append(len(state.export()))  # one has others
    assert [round(size / (4 * SIZE)) for size in sizes] == [1, 2, 3]


# -- as bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
@pytest.mark.parametrize("updates", [0, 1, 4])
def test_what_was_exported_goes_on_with_the_same_bits(name: str, options: dict[str, Any], updates: int) -> None:
    state = RangeState(start(), spec(name, options))
    for step in range(updates):
        state.apply(gradient(step), options_at(step, options))
    copy = RangeState(torch.zeros_like(start()), spec(name, options))
    copy.apply(gradient(20), {})  # what it had before is gone
    copy.install(memoryview(state.export()))
    for step in range(updates, updates + 3):
        state.apply(gradient(step), options_at(step, options))
        copy.apply(gradient(step), options_at(step, options))
    assert copy.export() == state.export()


@pytest.mark.parametrize("compensation", [CONSTANT, ADAPTIVE])
def test_what_workers_hold_is_exported_too(compensation: DelayCompensation) -> None:
    state = two_workers(compensation, ADAM)
    state.pulled_by(1)
    copy = RangeState(torch.zeros(SIZE), ADAM, delay_compensation=compensation)
    copy.install(memoryview(state.export()))
    for step, worker in enumerate((0, 1, 0, 1)):
        for each in (state, copy):
            each.apply(gradient(step), {}, worker=worker)
    assert copy.export() == state.export()


def test_what_was_installed_is_a_copy() -> None:
    state = two_workers(ADAPTIVE, ADAM)
    memory = bytearray(state.export())
    copy = RangeState(torch.zeros(SIZE), ADAM, delay_compensation=ADAPTIVE)
    copy.install(memoryview(memory))
    memory[:] = bytes(len(memory))
    assert copy.export() == state.export()


def test_a_value_that_somebody_holds_survives_an_install() -> None:
    state = RangeState(start(), SGD)
    held, before = state.value(), bytes(state.value())
    state.install(memoryview(RangeState(torch.zeros(SIZE), SGD).export()))
    state.apply(gradient(0), {})
    assert bytes(held) == before


def test_the_size_of_an_export_is_that_of_values_and_state() -> None:
    for optimizer, num_arrays in ((SGD, 1), (spec("SGD", {"lr": 0.1, "momentum": 0.9}), 2), (ADAM, 3)):
        state = RangeState(start(), optimizer)
        state.apply(gradient(0), {})
        assert num_arrays * 4 * SIZE < len(state.export()) < num_arrays * 4 * SIZE + 300


def test_scalars_keep_their_bits_where_torch_computes_in_float64() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        test_what_was_exported_goes_on_with_the_same_bits("NAdam", {"lr": 0.01}, 4)
    finally:
        torch.set_default_dtype(torch.float32)


def header_of(data: bytes) -> dict[str, Any]:
    (length,) = LENGTH.unpack_from(data)
    header: dict[str, Any] = msgspec.msgpack.decode(data[LENGTH.size : LENGTH.size + length])
    return header


def with_header(data: bytes, **changes: Any) -> bytes:
    (length,) = LENGTH.unpack_from(data)
    header = msgspec.msgpack.encode({**header_of(data), **changes})
    return LENGTH.pack(len(header)) + header + data[LENGTH.size + length :]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 2}, "format 2"),
        ({"size": 5}, "5 elements"),
        ({"size": 1 << 60}, "elements"),
        ({"optimizer": "SGD"}, "optimizer SGD"),
        ({"optimizer": None}, "optimizer None"),
        ({"scalars": {}}, "scalars"),
        ({"scalars": {"step": math.nan}}, "step of its optimizer is nan"),
        ({"scalars": {"step": -1.0}}, "step of its optimizer is -1.0"),
        ({"scalars": {"step": 1.0, "more": 1.0}}, "scalars"),
        ({"vectors": ["exp_avg"]}, "vectors"),
        ({"vectors": ["exp_avg", "exp_avg"]}, "vectors"),
        ({"vectors": ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]}, "bytes follow"),
        ({"vectors": ["exp_avg", "exp_avg_sq", "__class__"]}, "vectors"),
        ({"has_mean_square": False}, "delay compensation"),
        ({"num_backups": 3}, "3 backups"),
        ({"num_backups": -1}, "-1 backups"),
        ({"num_backups": 0}, "a version that is not among"),
        ({"workers": {-1: 0, 0: 1, 1: 1}}, "a version"),
        ({"workers": {0: 1, 1: 2}, "num_backups": 2}, "bytes follow"),
        ({"unknown": 1}, "cannot be read"),
        ({"size": "4"}, "cannot be read"),
    ],
)
def test_bytes_that_no_export_gives_are_refused_and_change_nothing(changes: dict[str, Any], words: str) -> None:
    state = RangeState(start(4), ADAM, delay_compensation=ADAPTIVE)
    for worker in (0, 1):
        state.pulled_by(worker)
    state.apply(gradient(0, 4), {}, worker=0)
    good = state.export()
    assert header_of(good)["workers"] == {0: 1, 1: 1} and with_header(good) == good
    with pytest.raises(MalformedPayload, match=words):
        state.install(memoryview(with_header(good, **changes)))
    assert state.export() == good


def test_an_export_of_other_settings_is_refused() -> None:
    compensated = RangeState(start(4), SGD, delay_compensation=CONSTANT)
    compensated.pulled_by(0)
    with pytest.raises(MalformedPayload, match="delay compensation"):
        RangeState(start(4), SGD).install(memoryview(compensated.export()))
    with pytest.raises(MalformedPayload, match="optimizer SGD"):
        RangeState(start(4), None).install(memoryview(compensated.export()))


def random_bytes_for(state: RangeState) -> st.SearchStrategy[bytes]:
    good = state.export()
    cut = st.integers(0, len(good) - 1).map(lambda length: good[:length])
    changed = st.tuples(st.integers(0, len(good) - 1), st.integers(1, 255)).map(
        lambda change: good[: change[0]] + bytes([good[change[0]] ^ change[1]]) + good[change[0] + 1 :]
    )
    return st.binary(max_size=200) | cut | changed | st.binary(min_size=1, max_size=9).map(lambda more: good + more)


FUZZED = RangeState(start(4), ADAM, delay_compensation=ADAPTIVE)
FUZZED.pulled_by(0)
FUZZED.apply(gradient(0, 4), {}, worker=0)


@given(data=random_bytes_for(FUZZED))
def test_any_bytes_are_installed_as_a_whole_or_refused(data: bytes) -> None:
    state = RangeState(torch.zeros(4), ADAM, delay_compensation=ADAPTIVE)
    before = state.export()
    try:
        state.install(memoryview(data))
    except MalformedPayload:
        assert state.export() == before
    state.apply(gradient(0, 4), {}, worker=0)


def test_tensors_that_need_gradients_or_lie_apart_are_copied() -> None:
    apart: Tensor = nn.Parameter(torch.arange(6.0).view(2, 3)).t()
    assert values_of(RangeState(apart, SGD)).tolist() == [0, 3, 1, 4, 2, 5]
