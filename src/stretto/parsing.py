"""Reading a strategy from text: what `repr` writes, and recipes by name, with or without parentheses (`plain_calls.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stretto import recipes
from stretto.aggregate.gossip import GRAPHS
from stretto.aggregate.hierarchy.elastic import Elastic
from stretto.errors import ConfigurationError
from stretto.plain_calls import CallReader
from stretto.strategy import ANSWERS, Strategy
from stretto.sync.delay_compensation import DelayCompensation
from stretto.sync.local_sgd import OUTER


def parse(text: str, *, extra: Mapping[str, Callable[..., Any]] | None = None) -> Strategy:
    """The strategy that `text` describes: `Strategy(...)`, a recipe such as `ddp()`, or the name of one. `extra` adds names of
    your own (codecs, say).

    >>> parse("Strategy(schedule=WaitFree())").schedule
    WaitFree()
    """
    if not isinstance(text, str):
        raise ConfigurationError(f"parse({text!r}): give the text of a strategy, for instance 'Strategy(schedule=WaitFree())'.")
    example = "Strategy(compress=ErrorFeedback(Sign())), or ddp()"
    reader = CallReader({**_names(), **(extra or {})}, "strategy", example, bare=recipes.by_name())
    value = reader.read(text)
    if not isinstance(value, Strategy):
        raise reader.unreadable(text, f"it describes {value!r}, which is not a Strategy")
    return value


def _names() -> dict[str, Callable[..., Any]]:
    answers = {kind.__name__: kind for kinds in ANSWERS.values() for kind in kinds}
    parts = {kind.__name__: kind for kind in (DelayCompensation, Elastic, *GRAPHS, *OUTER)}
    return {"Strategy": Strategy, **parts, **answers, **recipes.by_name()}
