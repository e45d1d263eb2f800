"""Which fast kernels this machine can run, and how they are compiled.

Numba compiles the CPU kernels at first use (about a second each) and keeps the result on disk beside the source, or in the user's
cache folder where the source may not be written to. Without Numba (`pip install 'stretto[kernels]'`) codecs use the torch
references, which give the same bytes in several passes. Triton comes with torch's CUDA builds.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar, cast

from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


@lru_cache(maxsize=1)
def has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


@lru_cache(maxsize=1)
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def runs_triton(tensor: Tensor) -> bool:
    """Whether a GPU kernel may take it."""
    return tensor.device.type == "cuda" and has_triton()


def compiled(function: F) -> F:
    """Compile a CPU kernel; it runs without the GIL, in the calling thread alone. Division by zero gives inf, as in torch."""
    from numba import njit  # a second to import: only where a kernel is wanted

    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    try:
        return cast(F, njit(cache=True, **options)(function))
    except RuntimeError:  # nowhere to keep it: compile anew in every process
        return cast(F, njit(**options)(function))
