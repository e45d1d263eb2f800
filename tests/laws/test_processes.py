"""A few of the laws where they count: real processes, the real wire."""

from __future__ import annotations

import pytest

from laws.strategies import RING
from laws.workers import compile_in_every_way, disagree, learn, learn_compressed, lose_rank_1
from preloaded import Preloaded
from stretto.aggregate.all_reduce import AllReduce
from stretto.errors import WorkerFailed
from stretto.launching.spawn import launch
from stretto.schedule.orders import Buckets
from stretto.strategy import Strategy

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
AWKWARD = ["mlp", "unused on some ranks", "sparse embeddings", "checkpointed re-entrant", "three dtypes", "accumulating"]


def test_laws_2_and_3_hold_for_three_processes(preloaded: Preloaded) -> None:
    results = preloaded.launch(learn, 3, AWKWARD, repr(Strategy()), 30, timeout_s=200)
    for name in AWKWARD:
        assert len(set(results[0][name])) == 30
        assert results[0][name] == results[1][name] == results[2][name]


def test_laws_2_and_3_hold_for_the_torch_backends_own_all_reduce(preloaded: Preloaded) -> None:
    names = ["mlp", "unused on some ranks", "three dtypes"]
    strategy = Strategy(aggregate=AllReduce("native"), schedule=Buckets(bytes=256))
    results = preloaded.launch(learn, 2, names, repr(strategy), 10, "gloo", timeout_s=200)
    assert all(len(set(results[0][name])) == 10 and results[0][name] == results[1][name] for name in names)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_law_3_holds_for_compressed_gradients_between_processes(size: int, preloaded: Preloaded) -> None:
    compressions = ["ErrorFeedback(Sign(64))", "ErrorFeedback(TopK(0.1))", "ErrorFeedback(PowerSGD(2))", "Float16()", "Int8(32)"]
    texts = [f"Strategy(compress={text}, schedule=WaitFree())" for text in compressions]
    texts.append(f"Strategy(aggregate={RING!r}, compress=Int8(32))")  # quantised hops
    results = preloaded.launch(learn_compressed, size, texts, 5, timeout_s=200)
    for text in texts:
        assert len(set(results[0][text])) == 5
        assert all(result[text] == results[0][text] for result in results)


def test_law_3_holds_for_summed_payloads_through_the_torch_backend(preloaded: Preloaded) -> None:
    texts = [f"Strategy(aggregate=AllReduce('native'), compress={text})" for text in ("Float16()", "ErrorFeedback(PowerSGD(2))")]
    results = preloaded.launch(learn_compressed, 2, texts, 5, "gloo", timeout_s=200)
    assert all(results[0][text] == results[1][text] and len(set(results[0][text])) == 5 for text in texts)


def test_law_10_holds_for_three_processes(preloaded: Preloaded) -> None:
    messages = preloaded.launch(disagree, 3)
    assert len(set(messages)) == 1 and "parameter weight: (4, 3) float32" in messages[0]


def test_a_worker_that_is_killed_ends_the_training_of_all_and_is_named(preloaded: Preloaded) -> None:
    with pytest.raises(WorkerFailed) as failed:  # launch itself reports the one that died
        preloaded.launch(lose_rank_1, 3)
    assert failed.value.rank == 1 and "SIGKILL" in str(failed.value)


@pytest.mark.slow
def test_compiled_models_are_synchronised() -> None:
    launch(
        compile_in_every_way,
        2,
        ["whole, before", "whole, after", "in place, before", "in place, after", "per block"],
        timeout_s=250,
    )
