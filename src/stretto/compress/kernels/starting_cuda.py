"""Starting kernels that Triton has compiled, faster than Triton does.

At every call Triton works out anew which of its compiled variants fits the arguments, and whether anything that a kernel refers
to has changed. A call of a codec that starts one kernel took the host 65 microseconds so, and takes 42 with what is here (4 MB,
H200). A variant for CUDA depends on little: the constants; of a tensor, its type and whether it begins at a multiple of 16 bytes;
of a number, whether it fits into 32 bits (`numbers` are not looked at otherwise). So it is kept under these, and started as
Triton's own tutorials start what they have compiled themselves. For other GPUs it depends on more; there, and with versions of
Triton that this was not tried with, Triton finds it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

Grid = tuple[int, ...]
TRIED = triton.__version__.startswith("3.6.") and torch.version.hip is None


class Kernel:
    """`kernel[grid](tensors and numbers, CONSTANT=..., num_warps=...)`: constants by name, and behind all others, as declared."""

    def __init__(self, function: Callable[..., None], numbers: Sequence[str]) -> None:
        self._function, self._numbers = triton.jit(function, do_not_specialize=numbers), numbers
        self._variants: dict[tuple[Any, ...], tuple[CompiledKernel, list[Any]]] = {}
        self._device = torch.cuda.current_device if torch.cuda.is_available() else int  # none: Triton's interpreter
        self._compiling = threading.Lock()

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        return partial(self._start, grid)

    def _start(self, grid: Grid, *arguments: Tensor | float, **constants: Any) -> None:
        key = (self._device(), *constants.items(), *map(_kind, arguments))
        known = self._variants.get(key)
        if known is None:
            self._compile(key, grid, arguments, constants)
            return
        variant, values = known
        variant[(*grid, 1, 1)[:3]](*arguments, *values)

    def _compile(self, key: tuple[Any, ...], grid: Grid, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """And start it."""
        for name, argument in zip(self._function.arg_names, arguments, strict=False):
            assert name in self._numbers or not isinstance(argument, int), f"{name}: Triton would compile for some of its values"
        with self._compiling:  # Triton itself fails if two threads start a new variant at once
            variant = self._function[grid](*arguments, **constants)
        if TRIED and isinstance(variant, CompiledKernel):  # the interpreter has none
            names = self._function.arg_names[len(arguments) :]
            self._variants[key] = variant, [constants[name] for name in names]


def _kind(argument: Tensor | float) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return type(argument), -(2**31) <= argument < 2**31


def kernel(*numbers: str) -> Callable[[Callable[..., None]], Kernel]:
    """To decorate what runs on the GPU. `numbers`: its arguments that are neither tensors nor constants."""
    return partial(Kernel, numbers=numbers)
