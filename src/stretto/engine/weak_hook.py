"""Hooks that do not keep alive what they call.

torch holds the hooks of a tensor in C++, beyond the sight of Python's garbage collector: an engine that hangs on its parameters'
hooks, and holds these parameters, would stay until the process ends. So what hangs on tensors refers to its engine weakly. The
engine is the model's and the optimizer's, who hold it where the collector sees it.

A parameter may outlive them. At its next gradient the hook comes off, and says so if nobody else combines that gradient: whoever
trains on believes that somebody does.

Invariant: what a hook is given beside the tensor must not lead to the engine or to a parameter: numbers, say, and not buckets.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, cast

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from stretto.job import Job

log = logging.getLogger("stretto")


def weakly(
    method: Callable[..., None], *arguments: int | str, gone: Callable[[Tensor], None] | None = None
) -> Callable[[Tensor], None]:
    """A function of a tensor that calls `method(*arguments, tensor)` for as long as the method's owner is there, then `gone`."""
    bound = cast(MethodType, method)
    owner: weakref.ref[Any] = weakref.ref(bound.__self__)
    function = bound.__func__

    def hook(tensor: Tensor) -> None:
        if (alive := owner()) is not None:
            function(alive, *arguments, tensor)
        elif gone is not None:
            gone(tensor)

    hook.owner = owner  # type: ignore[attr-defined]
    return hook


def owners(parameter: Tensor) -> list[Any]:
    """Those whose methods are called with every gradient of this parameter."""
    hooks = parameter._post_accumulate_grad_hooks or {}
    found = (hook.owner() for hook in hooks.values() if hasattr(hook, "owner"))
    return [owner for owner in found if owner is not None]


def when_accumulated(parameter: Tensor, method: Callable[..., None], *arguments: int | str, orphan: Orphan) -> RemovableHandle:
    """Have `method(*arguments, parameter)` called with every gradient; when its owner is gone, `orphan(parameter)`, once."""
    mine: list[RemovableHandle] = []

    def gone(tensor: Tensor) -> None:
        take_off(mine)
        orphan(tensor)

    hook = weakly(method, *arguments, gone=gone)
    mine.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
    # After torch.utils.swap_tensors the table of hooks is still there, but autograd does not know it until it is set again.
    parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    return mine[0]


class Orphan:
    """A word, once for all parameters of an engine that is gone, when one of them has a gradient that nobody combines."""

    def __init__(self, job: Job) -> None:
        self._job = weakref.ref(job)
        self._said = False

    def __call__(self, parameter: Tensor) -> None:
        job = self._job()
        if self._said or job is None or job.closed or job.world_size == 1:
            return
        if any(engine.combines(parameter) for engine in job.engines):
            return
        self._said = True
        log.warning(
            "rank %d: a parameter of shape %s is trained on this worker alone from here on: neither the model nor the optimizer "
            "that it was distributed with is there any more. Hold on to one of them for as long as you train, or call "
            "distribute() with what you train now.",
            job.rank,
            tuple(parameter.shape),
        )


def take_off(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
