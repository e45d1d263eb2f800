"""Values made of tensors, taken apart and put together again: what goes from one stage to the next, without pickle.

A *tree* is a tensor, a plain value (None, bool, int, float, str), or a tuple, list or dict of trees. It travels as its *shape*,
which msgpack can hold, and its tensors in order. Anything else is refused, with its place in the value: a class would have to be
looked up by name where it arrives.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any, Final

import torch
from torch import Tensor

from stretto.errors import ConfigurationError

PLAIN: Final = (NoneType, bool, int, float, str)
TENSOR, VALUE, TUPLE, LIST, DICT = range(5)
MOST_DEEP: Final = 64
Shape = list[Any]  # [TENSOR], [VALUE, value], [TUPLE or LIST, *shapes], [DICT, keys, *shapes]


def take_apart(tree: Any, what: str) -> tuple[Shape, list[Tensor]]:
    """The shape of a tree, and its tensors in order. `what` is named if it is none."""
    tensors: list[Tensor] = []
    return _shape_of(tree, what, tensors, 0), tensors


def _shape_of(tree: Any, where: str, tensors: list[Tensor], depth: int) -> Shape:
    kind = type(tree)
    if isinstance(tree, Tensor):
        if tree.layout is not torch.strided:
            raise ConfigurationError(f"{where} is a {tree.layout} tensor, which cannot go to another stage. Write .to_dense().")
        tensors.append(tree)
        return [TENSOR]
    if kind in PLAIN:
        return [VALUE, tree]
    if kind in (tuple, list) and depth < MOST_DEEP:
        parts = [_shape_of(each, f"{where}[{number}]", tensors, depth + 1) for number, each in enumerate(tree)]
        return [TUPLE if kind is tuple else LIST, *parts]
    if kind in (dict, OrderedDict) and depth < MOST_DEEP and all(type(key) in (str, int) for key in tree):
        return [DICT, list(tree), *(_shape_of(each, f"{where}[{key!r}]", tensors, depth + 1) for key, each in tree.items())]
    raise ConfigurationError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}: what goes from one stage of a pipeline to the next is "
        f"made of tensors, plain values (None, bool, int, float, str), tuples, lists and dicts with keys of text or numbers.\n"
        f"Let the layer before the cut return one of these: the fields of the {kind.__name__} as a tuple or dict, say."
    )


def put_together(shape: Shape, tensors: list[Tensor]) -> Any:
    """The reverse. What came from another process is checked."""
    rest = iter(tensors)
    tree = _tree_of(shape, rest, 0)
    if next(rest, None) is not None:
        raise ValueError("more tensors than the shape has places for")
    return tree


def _tree_of(shape: Shape, rest: Iterator[Tensor], depth: int) -> Any:
    if not isinstance(shape, list) or not shape or depth > MOST_DEEP:
        raise ValueError("not the shape of a tree")
    match shape:
        case [0]:
            if (tensor := next(rest, None)) is None:
                raise ValueError("fewer tensors than the shape has places for")
            return tensor
        case [1, value] if type(value) in PLAIN:
            return value
        case [2, *parts]:
            return tuple(_tree_of(each, rest, depth + 1) for each in parts)
        case [3, *parts]:
            return [_tree_of(each, rest, depth + 1) for each in parts]
        case [4, list(keys), *parts] if len(keys) == len(parts) and all(type(key) in (str, int) for key in keys):
            return {key: _tree_of(each, rest, depth + 1) for key, each in zip(keys, parts, strict=True)}
    raise ValueError("not the shape of a tree")


def changed(tree: Any, change: Callable[[Tensor], Tensor], what: str = "the value") -> Any:
    """The same tree with other tensors in it."""
    shape, tensors = take_apart(tree, what)
    return put_together(shape, [change(tensor) for tensor in tensors])
