"""What arguments of compressions are asked in many places. `True` is a number to Python, and never meant as one."""

from __future__ import annotations

import math
from typing import Any

from stretto.errors import ConfigurationError


def is_number(value: Any) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def is_count(value: Any, least: int = 1) -> bool:
    """Whether it is a whole number, of at least so much."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check(is_right: bool, asked: object, name: str, why: str, instead: str) -> None:
    """Raise unless argument `name` of the compression that was asked for is right."""
    if not is_right:
        raise ConfigurationError(f"{type(asked).__name__}({name}={getattr(asked, name)!r}): {why}.\nWrite {instead}.")
