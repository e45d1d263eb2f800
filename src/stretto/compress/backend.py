"""One function in up to three implementations, of which each device gets the fastest that runs there.

    reference   plain torch, for every device; tests compare the others with it
    cpu         compiled by Numba, for tensors on the CPU
    cuda        compiled by Triton, for tensors on a GPU

All of them take the same arguments and give the same result. Kernels are named here and imported when they are first wanted:
Numba takes a second to import, and Triton comes with torch's CUDA builds alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from stretto.compress.kernels import compiling

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Backend(Generic[P, R]):
    """`cpu`, `cuda`: "module.function" of `stretto.compress.kernels`, where there is a kernel."""

    reference: Callable[P, R]
    cpu: str | None = None
    cuda: str | None = None

    def on(self, device: torch.device) -> Callable[P, R]:
        """The fastest implementation for tensors on `device` that this machine can run."""
        if device.type == "cpu" and self.cpu is not None and compiling.has_numba():
            return _kernel(self.cpu)
        if device.type == "cuda" and self.cuda is not None and compiling.has_triton():
            return _kernel(self.cuda)
        return self.reference

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> R:
        """On the device of the first argument."""
        return self.on(arguments[0].device)(*arguments, **named)  # type: ignore[attr-defined]


def accelerated(cpu: str | None = None, cuda: str | None = None) -> Callable[[Callable[P, R]], Backend[P, R]]:
    """To decorate a function in plain torch that has kernels beside it."""
    return lambda reference: Backend(reference, cpu, cuda)


@cache
def _kernel(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(".")
    found: Callable[..., Any] = getattr(import_module(f"stretto.compress.kernels.{module}"), function)
    return found
