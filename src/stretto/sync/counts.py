"""The check that all numbers of workers, clocks and gradients in answers to `sync=` have in common."""

from __future__ import annotations

from stretto.errors import ConfigurationError


def check_count(answer: str, field: str, value: object, *, least: int, meaning: str, instead: str) -> None:
    """Raise unless `value` is a whole number of at least `least`. `instead` says what to write."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(
            f"{answer}({field}={value!r}): that is {meaning}, a whole number of at least {least}.\nWrite {instead}."
        )
