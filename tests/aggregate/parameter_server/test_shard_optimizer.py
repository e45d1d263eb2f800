"""Optimizers as data: the list is that of torch, what is not in it is refused, and slices are updated as the whole tensor is."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from aggregate.parameter_server.optimizers import CASES, IDS, SIZE, STEPS, gradient, options_at, spec, start, torch_optimizer
from stretto import LAMB
from stretto.aggregate.parameter_server.range_state import RangeState
from stretto.aggregate.parameter_server.shard_optimizer import COMPUTED_ELSEWHERE, ELEMENTWISE, OptimizerSpec, spec_of
from stretto.errors import ConfigurationError, MalformedPayload


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


# -- the list -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_the_list_has_all_options_that_torch_has(name: str) -> None:
    optimizer = torch_optimizer(name, {}, parameter())
    assert set(optimizer.defaults) - set(COMPUTED_ELSEWHERE) == set(ELEMENTWISE[name].options)


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_the_list_has_the_state_that_torch_keeps(name: str, options: dict[str, Any]) -> None:
    trained, kind = parameter(), ELEMENTWISE[name]
    optimizer = torch_optimizer(name, options, trained)
    trained.grad = torch.ones(3)
    optimizer.step()
    state: dict[str, Tensor] = optimizer.state[trained]
    asked_for = {vector for option, vector in kind.optional.items() if options.get(option)}
    lazy = set(kind.lazy) if options.get("momentum") else set()
    assert {key for key, value in state.items() if value.ndim == 0} == set(kind.scalars)
    assert {key for key, value in state.items() if value.ndim} == set(kind.vectors) | asked_for | lazy


def test_every_optimizer_of_the_list_is_tested_and_every_other_of_torch_is_known() -> None:
    assert {name for name, _ in CASES} == set(ELEMENTWISE)
    others = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and name not in ELEMENTWISE
    }
    assert others == {"Optimizer", "LBFGS", "SparseAdam", "Adafactor", "Muon"}


# -- slices ---------------------------------------------------------------------------------------------------------------


def trained(name: str, options: dict[str, Any], cuts: list[int]) -> Tensor:
    """By torch itself, on slices between these places."""
    out = []
    for begin, end in zip(cuts, cuts[1:], strict=False):
        part = nn.Parameter(start()[begin:end].clone())
        optimizer = torch_optimizer(name, options, part)
        for step in range(STEPS):
            optimizer.param_groups[0].update(options_at(step, options))
            part.grad = torch.from_numpy(gradient(step)[begin:end].copy())
            optimizer.step()
        out.append(part.detach())
    return torch.cat(out)


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_slices_get_the_bits_of_the_whole_tensor(name: str, options: dict[str, Any]) -> None:
    whole = trained(name, options, [0, SIZE])
    assert torch.equal(whole, trained(name, options, [0, 37, 500, 513, SIZE]))
    assert torch.equal(whole, trained(name, options, [0, 1, 8, 24, 64, 999, SIZE]))
    assert not torch.equal(whole, start())


def test_an_optimizer_that_reads_a_whole_tensor_would_be_noticed() -> None:
    whole = trained("Adafactor", {"lr": 0.1}, [0, SIZE])
    assert not torch.equal(whole, trained("Adafactor", {"lr": 0.1}, [0, 500, SIZE]))


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_no_optimizer_writes_to_a_gradient_or_keeps_it(name: str, options: dict[str, Any]) -> None:
    state, memory = RangeState(start(), spec(name, options)), gradient(0).copy()
    seen = memory.view()
    seen.flags.writeable = False
    twin = RangeState(start(), spec(name, options))
    for step in range(3):
        np.copyto(memory, gradient(step))
        state.apply(seen, {})
        twin.apply(gradient(step), {})
        assert np.array_equal(memory, gradient(step))
        memory.fill(math.nan)  # the wire receives the next message there
    assert bytes(state.value()) == bytes(twin.value()) and state.export() == twin.export()


# -- from the user's optimizer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_a_spec_travels_and_builds_the_same_optimizer(name: str, options: dict[str, Any]) -> None:
    mine = torch_optimizer(name, options, parameter())
    sent = msgspec.msgpack.encode(spec_of(mine))
    built = msgspec.msgpack.decode(sent, type=OptimizerSpec).build(parameter())
    assert type(built) is type(mine)
    assert {k: v for k, v in built.defaults.items() if k not in COMPUTED_ELSEWHERE} == {
        k: v for k, v in mine.defaults.items() if k not in COMPUTED_ELSEWHERE
    }


def test_how_a_worker_would_compute_stays_there() -> None:
    plain = spec_of(torch.optim.Adam([parameter()], lr=0.1))
    assert spec_of(torch.optim.Adam([parameter()], lr=0.1, foreach=True)) == plain
    assert spec_of(torch.optim.Adam([parameter()], lr=0.1, fused=True)) == plain
    assert spec_of(torch.optim.Adam([parameter()], lr=0.1, differentiable=True)) == plain
    assert spec_of(torch.optim.Adam([parameter()], lr=0.1, capturable=True)) == plain


def test_a_rate_that_is_a_tensor_is_read_as_a_number() -> None:
    optimizer = torch.optim.Adam([parameter()], lr=torch.tensor(0.25), betas=(torch.tensor(0.5), torch.tensor(0.75)))
    made = spec_of(optimizer)
    assert made.options["lr"] == 0.25 and made.options["betas"] == (0.5, 0.75)
    optimizer.param_groups[0]["lr"].fill_(0.125)
    assert made.options_of(optimizer.param_groups[0])["lr"] == 0.125


def test_the_options_of_a_step_are_those_that_a_scheduler_has_set() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=0.1, momentum=0.9)
    scheduler = OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    made = spec_of(optimizer)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
        options = made.options_of(optimizer.param_groups[0])
        assert options["lr"] == scheduler.get_last_lr()[0] and set(options) == set(ELEMENTWISE["SGD"].options)
        assert made.fault_in(options) is None


class MySGD(torch.optim.SGD):
    pass


@pytest.mark.parametrize("make", [MySGD, LAMB, torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.SparseAdam])
def test_an_optimizer_that_is_not_in_the_list_is_refused(make: Any) -> None:
    optimizer = make([parameter()], lr=0.1)
    with pytest.raises(ConfigurationError) as caught:
        spec_of(optimizer)
    text = str(caught.value)
    assert type(optimizer).__name__ in text and "torch.optim.SGD" in text and "Synchronous()" in text
    assert ("subclass of SGD" in text) == (make is MySGD)


def test_a_class_of_somebody_else_with_a_known_name_is_refused() -> None:
    impostor = type("SGD", (torch.optim.SGD,), {})
    with pytest.raises(ConfigurationError, match="subclass of SGD"):
        spec_of(impostor([parameter()], lr=0.1))


def test_a_rate_that_has_become_infinite_is_an_error_on_the_worker() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    made = spec_of(optimizer)
    optimizer.param_groups[0]["lr"] = math.inf
    with pytest.raises(ConfigurationError, match="lr=inf is not a number from 0"):
        made.options_of(optimizer.param_groups[0])


# -- what arrives -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("Evil", {}, "Evil"),
        ("Optimizer", {}, "Optimizer"),
        ("lr_scheduler", {}, "lr_scheduler"),
        ("SGD", {"lr": math.nan}, "lr=nan"),
        ("SGD", {"lr": 1e300}, "lr=1e"),
        ("SGD", {"lr": -1.0}, "lr=-1.0"),
        ("SGD", {"lr": (0.1, 0.2)}, "lr="),
        ("SGD", {"lr": True}, "lr=True"),
        ("SGD", {"nesterov": 1.0}, "nesterov=1.0"),
        ("SGD", {"foreach": True}, "foreach"),
        ("SGD", {"params": 1.0}, "params"),
        ("SGD", {"lr": 0.1, "nesterov": True}, "Nesterov"),
        ("Adam", {"betas": 0.9}, "betas=0.9"),
        ("Adam", {"betas": (0.9, 1.0)}, "betas="),
        ("Adam", {"betas": (0.9, math.inf)}, "betas="),
        ("Rprop", {"etas": (1.2, 0.5)}, "etas="),
    ],
)
def test_a_spec_that_torch_would_not_have_is_refused_also_when_it_is_decoded(name: str, options: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        OptimizerSpec(name, options)
    sent = msgspec.msgpack.encode({"name": name, "options": options})
    with pytest.raises(msgspec.ValidationError, match=words):
        msgspec.msgpack.decode(sent, type=OptimizerSpec)


def test_a_spec_with_other_types_is_refused_when_it_is_decoded() -> None:
    for options in ({"lr": "0.1"}, {"lr": None}, {"betas": [0.9]}, {"betas": [0.9, 0.9, 0.9]}, {"lr": {"a": 1.0}}, [1.0]):
        sent = msgspec.msgpack.encode({"name": "Adam", "options": options})
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(sent, type=OptimizerSpec)


def test_torch_would_stop_in_the_middle_of_an_update_where_a_beta_is_one_in_float32() -> None:
    options = {"betas": (0.99999999, 0.999), "momentum_decay": 1e6}
    trained = parameter()
    optimizer = torch_optimizer("NAdam", options, trained)
    trained.grad = torch.ones(3)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert optimizer.state[trained]["exp_avg_sq"].any()  # and its state has changed
    with pytest.raises(ConfigurationError, match="betas="):
        spec_of(optimizer)


def test_whole_numbers_are_numbers() -> None:
    sent = msgspec.msgpack.encode({"name": "Adam", "options": {"lr": 1, "betas": [0, 0]}})
    made = msgspec.msgpack.decode(sent, type=OptimizerSpec)
    assert made.options == {"lr": 1.0, "betas": (0.0, 0.0)}
    made.build(parameter())


NUMBERS = st.floats(width=64, allow_nan=True) | st.sampled_from([0.0, 1.0, 0.5, 1e18, 1e-300, 0.9999999, -1.0])
VALUES = st.booleans() | NUMBERS | st.tuples(NUMBERS, NUMBERS) | st.integers(-(10**30), 10**30)


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
@settings(max_examples=10)
@given(data=st.data())
def test_options_that_are_accepted_never_stop_an_update_in_the_middle(name: str, options: Any, data: st.DataObject) -> None:
    kind, made = ELEMENTWISE[name], spec(name, options)
    state = RangeState(start(5), made)
    for step in range(2):
        drawn = {option: data.draw(VALUES) for option in data.draw(st.sets(st.sampled_from(sorted(kind.options)), max_size=4))}
        good = {option: value for option, value in drawn.items() if made.fault_in({option: value}) is None}
        before = state.export()
        try:
            state.apply(gradient(step, 5), good)
        except MalformedPayload as refused:
            assert "to go on with" in str(refused) and state.export() == before
