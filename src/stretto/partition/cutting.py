"""Where a model is cut into pieces: by name, or so that the slowest stage takes the least time.

`balanced` is exact: a dynamic programme over all cuts of n layers into p pieces, each with some parameter to train, for the
least possible cost of the most expensive piece, and among those cuts the one whose costs have the least sum of squares. O(p
n^2), for n of at most hundreds. The cost of a layer is the time of its forward and backward where a sample was given
(`measuring.py`), or else the number of its parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from stretto.errors import ConfigurationError
from stretto.partition.layers import Layer

Bounds = list[int]  # piece i has the layers bounds[i] .. bounds[i+1]-1


def balanced(costs: Sequence[float], trainable: Sequence[bool], pieces: int) -> Bounds | None:
    """The best bounds; None if there are not enough layers with parameters."""
    count = len(costs)
    before = [0.0, *accumulate(costs)]
    num_trainable = [0, *accumulate(map(int, trainable))]
    best: list[tuple[float, float, Bounds] | None] = [None] * (count + 1)  # of the first so many layers, in the pieces so far
    best[0] = (0.0, 0.0, [0])
    for _ in range(pieces):
        following: list[tuple[float, float, Bounds] | None] = [None] * (count + 1)
        for end in range(1, count + 1):
            for begin in range(end):
                left = best[begin]
                if left is None or num_trainable[end] == num_trainable[begin]:
                    continue
                cost = before[end] - before[begin]
                candidate = (max(left[0], cost), left[1] + cost * cost)
                so_far = following[end]
                if so_far is None or candidate < so_far[:2]:
                    following[end] = (*candidate, [*left[2], end])
        best = following
    last = best[count]
    return None if last is None else last[2]


def by_name(layers: Sequence[Layer], first: Sequence[str]) -> Bounds:
    """Bounds from the names of the layers with which the second piece and those after it begin."""
    names = [layer.name for layer in layers]
    places = [_place(names, name) for name in first]
    bounds = [0, *places, len(layers)]
    if any(begin >= end for begin, end in pairwise(bounds)):
        raise ConfigurationError(
            f"cut={list(first)}: these layers are at places {places} of {len(layers)}; pieces begin one after the other, and the "
            f"first at the first layer, which is not named.\nName them in the order of the model: {', '.join(names)}."
        )
    for begin, end in pairwise(bounds):
        if not any(layer.has_parameters for layer in layers[begin:end]):
            raise ConfigurationError(
                f"cut={list(first)}: the piece of {', '.join(names[begin:end])} has no parameters to train, so its worker would "
                f"have no optimizer.\nCut elsewhere, or into fewer pieces."
            )
    return bounds


def _place(names: list[str], name: str) -> int:
    """The place of the layer with this name, or of the first layer below it: `blocks` stands for `blocks.0`."""
    for place, each in enumerate(names):
        if each == name or each.startswith(f"{name}."):
            return place
    raise ConfigurationError(f"cut: {name!r} is no layer. The layers are, in order, {', '.join(names)}. Write some of these.")


def too_few(layers: Sequence[Layer], stages: int, chunks: int) -> ConfigurationError:
    trainable = [layer.name for layer in layers if layer.has_parameters]
    what = f"{stages} stages" + (f" of {chunks} parts each" if chunks > 1 else "")
    return ConfigurationError(
        f"{what} for a model of {len(layers)} layers, {len(trainable)} of them with parameters to train "
        f"({', '.join(trainable[:8])}): each part needs one at least, for a stage without parameters has no optimizer.\n"
        f"Use fewer stages, or let layers be smaller modules: a pipeline is cut only between them."
    )
