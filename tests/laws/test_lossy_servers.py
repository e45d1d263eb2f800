"""The laws for codecs with servers that sum: those of `test_lossy.py`, and what servers promise beyond them.

Law 3 is asked of every codec, and each of the other laws of a few, not always the same ones. The product is marked `slow`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from laws.strategies import COMPRESSIONS
from laws.test_lossy import (
    FEEDBACK,
    IN_RANK_ORDER,
    check_conservation,
    check_resuming,
    check_that_a_bad_round_leaves_no_trace,
    steps_of,
    strategy_of,
    together,
)
from stretto.aggregate.parameter_server import ParameterServer
from stretto.aggregate.parameter_server.encoding import refusal
from stretto.compress.codec import Codec, Compression
from stretto.schedule.orders import Buckets, WaitFree
from stretto.strategy import Schedule, Strategy

SERVED = [one for one in COMPRESSIONS if refusal(one, steps=False) is None]
REMEMBERED = [one for one in FEEDBACK if one in SERVED]
SPLIT = [one for one in SERVED if isinstance(inner := getattr(one, "codec", one), Codec) and inner.splits]
SMALL = Buckets(bytes=2000, first_bytes=200)
SIZES = [pytest.param(size, marks=[pytest.mark.slow] if size not in (3,) else []) for size in (1, 2, 3, 4, 7)]


def on_servers(compression: Compression, schedule: Schedule = SMALL, shards: int = 2, replicas: int = 0) -> Strategy:
    return Strategy(aggregate=ParameterServer(shards=shards, replicas=replicas), compress=compression, schedule=schedule)


def one_in(several: int, compressions: Sequence[Compression], first: int = 0) -> list[Any]:
    """All of them; quick is one in several, from `first` on."""
    return [
        pytest.param(one, id=repr(one), marks=[pytest.mark.slow] if number % several != first else [])
        for number, one in enumerate(compressions)
    ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("compression", SERVED, ids=repr)
def test_law_3_all_replicas_hold_the_same_bits_after_every_step(compression: Compression, size: int) -> None:
    runs = together(on_servers(compression), size)
    assert len(set(runs[0][0])) == steps_of(size)  # the steps did change something
    for digests, _ in runs[1:]:
        assert digests == runs[0][0]


@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("compression", one_in(3, SPLIT))
def test_servers_give_the_bits_of_a_two_phase_exchange_among_workers(compression: Compression, size: int) -> None:
    """A server does with its ranges what a worker does with its blocks, whatever the ranges are."""
    among_workers = together(strategy_of(compression, SMALL), size, IN_RANK_ORDER if size == 3 else "ring")
    assert together(on_servers(compression), size)[0][0] == among_workers[0][0]


@pytest.mark.parametrize("compression", one_in(6, SERVED))
def test_law_4_neither_buckets_nor_the_number_of_servers_change_anything(compression: Compression) -> None:
    """Nor does a copy."""
    other = together(on_servers(compression, WaitFree(), shards=3, replicas=1), 3)
    assert other[0][0] == together(on_servers(compression), 3)[0][0]


@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4, 7))])
@pytest.mark.parametrize("compression", one_in(2, REMEMBERED))
def test_law_5_error_feedback_conserves_on_workers_and_servers_together(compression: Compression, size: int) -> None:
    check_conservation(on_servers(compression), size)


@pytest.mark.parametrize("compression", one_in(6, SERVED, 2))
def test_law_9_what_was_saved_resumes_with_the_same_bits(compression: Compression, tmp_path: Any) -> None:
    check_resuming(on_servers(compression), 3, "ring", tmp_path)


@pytest.mark.parametrize("compression", one_in(6, SERVED, 4))
def test_a_round_with_a_bad_gradient_leaves_no_trace_on_servers_either(compression: Compression) -> None:
    check_that_a_bad_round_leaves_no_trace(on_servers(compression), 3)
