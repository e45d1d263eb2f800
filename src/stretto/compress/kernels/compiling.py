"""Which fast kernels this machine can run, and how they are compiled.

Numba compiles the CPU kernels at first use (about a second each) and keeps the result on disk beside the source, or in the user's
cache folder where the source may not be written to. It is installed with stretto; where it is missing all the same, or cannot be
imported beside the numpy that is there, codecs use the torch references, which give the same bytes in several passes, and say so.
Triton comes with torch's CUDA builds.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

log = logging.getLogger("stretto")


@lru_cache(maxsize=1)
def has_numba() -> bool:
    """Whether CPU kernels can be compiled. A codec asks when it first has a tensor on the CPU; a "no" is logged then, once."""
    try:
        import numba  # noqa: F401
    except Exception as problem:  # not there, or not to be used with this numpy or this processor
        log.warning(
            "Numba cannot be imported (%s: %s), so codecs run in plain torch on the CPU, with the same result and 5 to 50 times "
            "slower: with 6 million parameters on one host a step took 339 ms instead of 64 with Int8(), 2173 instead of 65 with "
            "ErrorFeedback(Sign()), more than without compression. Write `pip install numba` in this environment.",
            type(problem).__name__,
            problem,
        )
        return False
    return True


@lru_cache(maxsize=1)
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def compiled(function: F) -> F:
    """Compile a CPU kernel; it runs without the GIL, in the calling thread alone. Division by zero gives inf, as in torch."""
    from numba import njit  # a second to import: only where a kernel is wanted

    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    try:
        return cast(F, njit(cache=True, **options)(function))
    except RuntimeError:  # nowhere to keep it: compile anew in every process
        return cast(F, njit(**options)(function))
