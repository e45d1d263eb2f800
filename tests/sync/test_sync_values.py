"""The answers to `sync=` as values: equal by content, hashable, read back from their text, and refused with what to write."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from stretto.errors import ConfigurationError
from stretto.parsing import parse
from stretto.strategy import Strategy
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.backup_workers import BackupWorkers
from stretto.sync.delay_compensation import DelayCompensation
from stretto.sync.soft_sync import SoftSync
from stretto.sync.stale_synchronous import StaleSynchronous

KINDS = {kind.__name__: kind for kind in (StaleSynchronous, Asynchronous, DelayCompensation, SoftSync, BackupWorkers)}
VALUES = [
    StaleSynchronous(0),
    StaleSynchronous(3),
    Asynchronous(),
    Asynchronous(staleness_aware=True),
    Asynchronous(delay_compensation=DelayCompensation(0.04)),
    Asynchronous(staleness_aware=True, delay_compensation=DelayCompensation(2.0, decay=0.95)),
    DelayCompensation(0),
    DelayCompensation(2.0, decay=0.0),
    SoftSync(1),
    BackupWorkers(2),
]


def read_back(text: str) -> Any:
    """By the parser of strategies: what it is given last it hands to `keep`."""
    kept: list[Any] = []

    def keep(value: Any) -> Strategy:
        kept.append(value)
        return Strategy()

    parse(f"keep({text})", extra={**KINDS, "keep": keep})
    return kept[0]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_the_text_of_a_value_reads_back(value: Any) -> None:
    again = read_back(repr(value))
    assert again == value and hash(again) == hash(value) and again is not value


def test_values_differ_by_what_they_say() -> None:
    assert len(set(VALUES)) == len(VALUES)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_cannot_be_changed(value: Any) -> None:
    with pytest.raises((FrozenInstanceError, AttributeError, TypeError)):
        value.bound = 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StaleSynchronous(-1), ["bound=-1", "StaleSynchronous(3)"]),
        (lambda: StaleSynchronous(True), ["bound=True", "StaleSynchronous(3)"]),
        (lambda: StaleSynchronous(1.0), ["bound=1.0", "StaleSynchronous(3)"]),  # type: ignore[arg-type]
        (lambda: StaleSynchronous(math.inf), ["bound=inf", "Asynchronous()"]),  # type: ignore[arg-type]
        (lambda: SoftSync(0), ["n=0", "SoftSync(1)"]),
        (lambda: SoftSync("2"), ["n='2'", "SoftSync(2)"]),  # type: ignore[arg-type]
        (lambda: BackupWorkers(0), ["spare=0", "Synchronous()"]),
        (lambda: BackupWorkers(None), ["spare=None", "BackupWorkers(1)"]),  # type: ignore[arg-type]
        (lambda: Asynchronous(1), ["staleness_aware=1", "Asynchronous(staleness_aware=True)"]),  # type: ignore[arg-type]
        (lambda: Asynchronous(delay_compensation=0.04), ["0.04", "DelayCompensation(0.04)"]),  # type: ignore[arg-type]
        (lambda: DelayCompensation(-0.1), ["strength=-0.1", "DelayCompensation(0.04)"]),
        (lambda: DelayCompensation(math.nan), ["strength=nan", "DelayCompensation(0.04)"]),
        (lambda: DelayCompensation(True), ["strength=True", "DelayCompensation(0.04)"]),
        (lambda: DelayCompensation(2.0, 1.0), ["decay=1.0", "decay=0.95"]),
        (lambda: DelayCompensation(2.0, "0.95"), ["decay='0.95'", "decay=0.95"]),  # type: ignore[arg-type]
    ],
)
def test_a_value_that_means_nothing_is_refused_with_what_to_write(make: Any, words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert all(word in str(caught.value) for word in words) and "Write" in str(caught.value)
