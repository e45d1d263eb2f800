"""A few of the laws where they count: real processes, the real wire."""

from __future__ import annotations

import pytest

from laws.workers import compile_in_every_way, disagree, learn, lose_rank_1
from stretto.aggregate.all_reduce import AllReduce
from stretto.errors import WorkerFailed
from stretto.job.in_process import launch
from stretto.schedule.orders import Buckets
from stretto.strategy import Strategy

pytestmark = pytest.mark.processes
AWKWARD = ["mlp", "unused on some ranks", "sparse embeddings", "checkpointed re-entrant", "three dtypes", "accumulating"]


def test_laws_2_and_3_hold_for_three_processes() -> None:
    results = launch(learn, 3, AWKWARD, repr(Strategy()), 30, timeout_s=100)
    for name in AWKWARD:
        assert len(set(results[0][name])) == 30
        assert results[0][name] == results[1][name] == results[2][name]


def test_laws_2_and_3_hold_for_the_torch_backends_own_all_reduce() -> None:
    names = ["mlp", "unused on some ranks", "three dtypes"]
    strategy = Strategy(aggregate=AllReduce("native"), schedule=Buckets(bytes=256))
    results = launch(learn, 2, names, repr(strategy), 10, "gloo", timeout_s=100)
    assert all(len(set(results[0][name])) == 10 and results[0][name] == results[1][name] for name in names)


def test_law_10_holds_for_three_processes() -> None:
    messages = launch(disagree, 3, timeout_s=60)
    assert len(set(messages)) == 1 and "parameter weight: (4, 3) float32" in messages[0]


def test_a_worker_that_is_killed_ends_the_training_of_all_and_is_named() -> None:
    with pytest.raises(WorkerFailed) as failed:  # launch itself reports the one that died
        launch(lose_rank_1, 3, timeout_s=60)
    assert failed.value.rank == 1 and "SIGKILL" in str(failed.value)


@pytest.mark.slow
def test_compiled_models_are_synchronised() -> None:
    launch(
        compile_in_every_way,
        2,
        ["whole, before", "whole, after", "in place, before", "in place, after", "per block"],
        timeout_s=110,
    )
