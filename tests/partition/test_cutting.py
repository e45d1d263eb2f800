"""Where models are cut: the balanced cut against all cuts there are, and cuts by name."""

from __future__ import annotations

import random
import re
from itertools import combinations, pairwise

import pytest
import torch
from torch import Tensor, nn

from stretto import ConfigurationError
from stretto.partition.cutting import balanced, by_name
from stretto.partition.layers import Layer, check_composition, layers_of
from stretto.partition.measuring import measure


def all_cuts(count: int, pieces: int) -> list[list[int]]:
    return [[0, *places, count] for places in combinations(range(1, count), pieces - 1)]


@pytest.mark.parametrize("seed", range(30))
def test_no_cut_is_better_than_the_balanced_one(seed: int) -> None:
    drawn = random.Random(seed)
    count = drawn.randint(1, 9)
    costs = [drawn.choice([0.0, 1.0, 2.0, drawn.random() * 10]) for _ in range(count)]
    trainable = [drawn.random() < 0.7 for _ in range(count)]
    for pieces in range(1, count + 2):
        legal = [
            bounds for bounds in all_cuts(count, pieces) if all(any(trainable[begin:end]) for begin, end in pairwise(bounds))
        ]
        found = balanced(costs, trainable, pieces)
        if not legal:
            assert found is None
            continue
        assert found in legal
        slowest = [max(sum(costs[begin:end]) for begin, end in pairwise(bounds)) for bounds in legal]
        assert max(sum(costs[begin:end]) for begin, end in pairwise(found)) == pytest.approx(min(slowest))


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 3))


def test_layers_are_found_within_sequentials() -> None:
    assert [layer.name for layer in layers_of(plain(), None)] == ["0", "1.0", "1.1", "2"]


def test_a_cut_by_name_begins_at_that_layer() -> None:
    layers = layers_of(plain(), None)
    assert by_name(layers, ["1", "2"]) == [0, 1, 3, 4]
    with pytest.raises(ConfigurationError, match="'7' is no layer. The layers are, in order, 0, 1.0, 1.1, 2"):
        by_name(layers, ["7"])
    with pytest.raises(ConfigurationError, match="the piece of 1.1 has no parameters to train"):
        by_name(layers, ["1.1", "2"])
    with pytest.raises(ConfigurationError, match="pieces begin one after the other"):
        by_name(layers, ["2", "1.0"])


class Tree(nn.Module):
    """Not a sequence, but its forward is one; with `skips` it is none."""

    def __init__(self, *, skips: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x + first if self.skips else x


def test_layers_of_any_model_may_be_named() -> None:
    layers = layers_of(Tree(), ["first", "blocks"])
    assert [layer.name for layer in layers] == ["first", "blocks.0", "blocks.1", "blocks.2"]
    model = Tree()
    check_composition(model, layers_of(model, ["first", "blocks"]), torch.ones(2, 3))
    assert model.training


def test_a_skip_connection_around_layers_is_refused() -> None:
    model = Tree(skips=True)
    with pytest.raises(ConfigurationError, match=r"its forward does more than calling them \(a skip connection"):
        check_composition(model, layers_of(model, ["first", "blocks"]), torch.ones(2, 3))


def test_a_model_that_is_no_sequence_must_say_its_layers() -> None:
    with pytest.raises(ConfigurationError, match=re.escape('Write layers=["embedding", "blocks", "head"]')):
        layers_of(Tree(), None)
    with pytest.raises(ConfigurationError, match="first.weight, first.bias are in none of its layers"):
        layers_of(Tree(), ["blocks"])
    with pytest.raises(ConfigurationError, match="'last' is no module of this Tree, which has 'first', 'blocks'"):
        layers_of(Tree(), ["first", "last"])


class Wide(nn.Module):
    """Takes much longer than a layer beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(300):
            x = (x @ self.weight).tanh()
        return x


def test_measured_times_tell_slow_layers_and_change_nothing() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), nn.ReLU(inplace=True), Wide(), nn.Linear(3, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    times = measure(
        [Layer(str(number), layer) for number, layer in enumerate(model)], torch.randn(4, 3, generator=torch.Generator())
    )
    assert max(times) == times[3] and min(times) > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state) and all(p.grad is None for p in model.parameters())
