"""Hooks that do not keep alive what they call.

torch holds the hooks of a tensor in C++, beyond the sight of Python's garbage collector: an engine that hangs on its parameters'
hooks, and holds these parameters, would stay until the process ends. So what hangs on tensors refers to its engine weakly. The
engine is the model's and the optimizer's, who hold it where the collector sees it.

Invariant: what a hook is given beside the tensor must not lead to the engine or to a parameter: numbers, say, and not buckets.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, cast

from torch import Tensor
from torch.utils.hooks import RemovableHandle


def weakly(method: Callable[..., None], *arguments: int | str) -> Callable[[Tensor], None]:
    """A function of a tensor that calls `method(*arguments, tensor)` for as long as the method's owner is there."""
    bound = cast(MethodType, method)
    owner: weakref.ref[Any] = weakref.ref(bound.__self__)
    function = bound.__func__

    def hook(tensor: Tensor) -> None:
        if (alive := owner()) is not None:
            function(alive, *arguments, tensor)

    return hook


def take_off(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
