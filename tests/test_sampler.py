"""The sampler: every epoch is shared out exactly, and goes on where it was left, with any number of workers."""

from __future__ import annotations

import doctest
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from stretto import sampler as module
from stretto.errors import ConfigurationError
from stretto.job.detect import Launch
from stretto.sampler import Sampler, order
from stretto.session import Job
from stretto.timeouts import Timeouts

SIZES = st.sampled_from([1, 2, 3, 4, 7])
LENGTHS = st.one_of(st.integers(0, 12), st.integers(0, 300))


def place(rank: int, size: int) -> Job:
    """A job of which only the numbers are looked at."""
    launch = Launch(
        rank=rank, world_size=size, local_rank=rank, local_world_size=size, rendezvous=None, secret=None, encrypt=False,
        launcher="stretto",
    )  # fmt: skip
    return Job(launch, [], None, Timeouts())


def samplers(length: int, size: int, **options: Any) -> list[Sampler]:
    return [Sampler(length, job=place(rank, size), **options) for rank in range(size)]


def take(sampler: Sampler, count: int) -> list[int]:
    """What a loop sees that stops after `count` samples."""
    seen = list(islice(sampler, count))
    sampler.consumed(len(seen))
    return seen


def test_what_the_docstrings_say() -> None:
    assert doctest.testmod(module).failed == 0


# ---------------------------------------------------------------- the order


def test_the_order_is_the_same_on_every_platform_and_in_every_version() -> None:
    assert order(8, epoch=1, seed=0).tolist() == [3, 5, 2, 7, 0, 6, 1, 4]
    assert order(5, epoch=3, seed=7).tolist() == [0, 4, 2, 3, 1]
    assert order(4, epoch=3, seed=7, shuffle=False).tolist() == [0, 1, 2, 3]


@given(length=LENGTHS, epoch=st.integers(0, 50), seed=st.integers(0, 2**63 - 1))
def test_an_order_is_a_permutation(length: int, epoch: int, seed: int) -> None:
    assert sorted(order(length, epoch, seed).tolist()) == list(range(length))


def test_epochs_and_seeds_give_different_orders_and_every_place_is_equally_likely() -> None:
    seen = {tuple(order(50, epoch, seed)) for epoch in range(20) for seed in range(20)}
    assert len(seen) == 400
    first = Counter(int(order(4, epoch, seed=3)[0]) for epoch in range(2000))
    assert all(400 < first[index] < 600 for index in range(4))


# ---------------------------------------------------------------- sharing


@given(length=LENGTHS, size=SIZES, seed=st.integers(0, 9))
def test_workers_share_an_epoch_with_no_sample_twice_or_never(length: int, size: int, seed: int) -> None:
    shares = [list(each) for each in samplers(length, size, seed=seed)]

    assert sorted(index for share in shares for index in share) == list(range(length))
    assert all(share == order(length, 0, seed)[rank::size].tolist() for rank, share in enumerate(shares))
    assert [len(each) for each in samplers(length, size)] == [len(share) for share in shares]


@given(length=LENGTHS, size=SIZES)
def test_drop_last_gives_all_workers_the_same_number_and_repeats_nothing(length: int, size: int) -> None:
    shares = [list(each) for each in samplers(length, size, drop_last=True)]

    assert [len(share) for share in shares] == [length // size] * size == [len(s) for s in samplers(length, size, drop_last=True)]
    assert max(Counter(index for share in shares for index in share).values(), default=1) == 1


@given(length=LENGTHS, size=SIZES)
def test_padding_gives_all_workers_the_same_number_and_leaves_nothing_out(length: int, size: int) -> None:
    shares = [list(each) for each in samplers(length, size, pad=True)]

    assert [len(share) for share in shares] == [-(-length // size)] * size == [len(s) for s in samplers(length, size, pad=True)]
    assert {index for share in shares for index in share} == set(range(length))


def test_each_iteration_is_the_next_epoch() -> None:
    one = samplers(20, 1, seed=5)[0]

    assert [list(one) for _ in range(3)] == [order(20, epoch, 5).tolist() for epoch in range(3)]
    one.set_epoch(1)
    assert list(one.follow(one)) == order(20, 1, 5).tolist()
    assert one.epoch == 2  # followed to its end
    one.set_epoch(2)
    assert list(one) == order(20, 2, 5).tolist()


# ---------------------------------------------------------------- resuming


@settings(max_examples=200, deadline=None)
@given(data=st.data(), length=LENGTHS, first=SIZES)
def test_any_chain_of_stops_and_world_sizes_gives_each_sample_once(data: st.DataObject, length: int, first: int) -> None:
    """Workers may stop at different places; each time their number changes or stays."""
    workers, seen = samplers(length, first, seed=1), []
    for size in data.draw(st.lists(SIZES, min_size=1, max_size=4)):
        for worker in workers:
            seen += take(worker, data.draw(st.integers(0, len(worker) + 1)))
        state = workers[0].state_dict([worker.num_consumed for worker in workers])
        workers = samplers(length, size, seed=99)
        for worker in workers:
            worker.load_state_dict(state)
    for worker in workers:
        seen += list(worker)
    assert sorted(seen) == list(range(length))


@settings(deadline=None)
@given(data=st.data(), length=LENGTHS, size=SIZES, options=st.sampled_from([{}, {"pad": True}, {"drop_last": True}]))
def test_with_as_many_workers_each_goes_on_as_if_never_stopped(
    data: st.DataObject, length: int, size: int, options: dict[str, bool]
) -> None:
    whole = [list(worker) for worker in samplers(length, size, **options)]
    workers = samplers(length, size, **options)
    seen = [take(worker, data.draw(st.integers(0, len(worker)))) for worker in workers]
    state = workers[0].state_dict([worker.num_consumed for worker in workers])

    for rank, worker in enumerate(samplers(length, size, **options)):
        worker.load_state_dict(state)
        assert seen[rank] + list(worker) == whole[rank]


@given(length=LENGTHS, size=SIZES, after=SIZES, steps=st.integers(0, 20), batch=st.integers(1, 5))
def test_equal_batches_consume_the_order_from_its_front(length: int, size: int, after: int, steps: int, batch: int) -> None:
    """One worker's own state is enough then."""
    worker = samplers(length, size)[0]
    take(worker, steps * batch)
    done = min(steps * batch * size, length)

    rest = [list(_resumed(worker, new)) for new in samplers(length, after)]
    assert rest[0] == order(length, 0, 0)[done:][::after].tolist()
    assert sorted(index for share in rest for index in share) == sorted(order(length, 0, 0)[done:].tolist())


def _resumed(worker: Sampler, new: Sampler) -> Sampler:
    new.load_state_dict(worker.state_dict())
    return new


def test_setting_the_epoch_that_is_next_anyway_does_not_lose_the_place() -> None:
    worker, new = samplers(10, 1)[0], samplers(10, 1)[0]
    seen = take(worker, 4)
    new.load_state_dict(worker.state_dict())
    new.set_epoch(0)

    assert seen + list(new) == order(10, 0, 0).tolist()


# ---------------------------------------------------------------- with a DataLoader


def loader_of(sampler: Sampler, num_workers: int = 0, **options: Any) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(sampler.length))
    return DataLoader(data, sampler=sampler, num_workers=num_workers, **options)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # of Python 3.12, where other tests have left threads
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loop_over_a_data_loader_resumes_in_mid_epoch_without_repeating_or_skipping(num_workers: int) -> None:
    """With workers the loader has drawn four batches more than the loop has seen; at another world size, two epochs on."""
    seen: list[int] = []
    workers = samplers(37, 2, seed=4)
    for worker in workers:
        worker.set_epoch(2)
        for step, (batch,) in enumerate(worker.follow(loader_of(worker, num_workers, batch_size=3))):
            seen += batch.tolist()
            if step == 2:
                break
    assert sorted(seen) == sorted(order(37, 2, 4)[:18].tolist())

    for new in samplers(37, 3):
        new.load_state_dict(workers[0].state_dict())
        assert new.epoch == 2
        for (batch,) in new.follow(loader_of(new, num_workers, batch_size=4)):
            seen += batch.tolist()
        assert new.epoch == 3 and new.state_dict()["taken"] == [[0, 0, 0]]
    assert sorted(seen) == list(range(37))


def test_what_was_only_fetched_ahead_is_not_consumed() -> None:
    worker = samplers(100, 1)[0]
    drawn = []

    class Watched(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            drawn.append(index)
            return self.tensors[0][index]

    loader = DataLoader(Watched(torch.arange(100)), batch_size=5, sampler=worker)
    ahead = iter([*islice(loader, 4)])  # a prefetcher of the user's own
    for _ in islice(worker.follow(ahead, batch_size=5), 2):
        pass
    assert len(drawn) == 20
    assert worker.num_consumed == 10


def test_batches_of_one_are_counted_too() -> None:
    worker = samplers(7, 2)[0]
    assert len(list(islice(worker.follow(loader_of(worker, batch_size=None)), 3))) == 3
    assert worker.num_consumed == 3


def test_saving_at_the_last_batch_leaves_an_empty_rest_and_then_the_next_epoch() -> None:
    worker, new = samplers(6, 2)[0], samplers(6, 2)[0]
    for (batch,) in worker.follow(loader_of(worker, batch_size=2)):
        if len(batch) == 1:
            new.load_state_dict(worker.state_dict())
    assert list(new.follow(loader_of(new, batch_size=2))) == []
    assert new.epoch == worker.epoch == 1
    assert list(new) == list(worker)


def test_resuming_in_mid_epoch_draws_no_random_number_that_the_first_run_did_not_draw() -> None:
    torch.manual_seed(3)
    worker, new = samplers(12, 1)[0], samplers(12, 1)[0]
    batches = worker.follow(loader_of(worker, batch_size=4))
    next(batches)
    state, random = worker.state_dict(), torch.get_rng_state()
    expected = [(batch.tolist(), torch.rand(()).item()) for (batch,) in batches]

    torch.set_rng_state(random)
    new.load_state_dict(state)
    assert [(batch.tolist(), torch.rand(()).item()) for (batch,) in new.follow(loader_of(new, batch_size=4))] == expected


# ---------------------------------------------------------------- what is refused


def test_a_place_that_nobody_counted_is_not_made_up() -> None:
    worker = samplers(10, 1)[0]
    assert worker.state_dict()["taken"] == [[0]]
    next(iter(loader_of(worker, batch_size=2)))
    with pytest.raises(ConfigurationError, match="follow"):
        worker.state_dict()
    worker.consumed(2)
    assert worker.state_dict()["taken"] == [[2]]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset_or_length": -1}, "whole number"),
        ({"dataset_or_length": True}, "has no length"),
        ({"dataset_or_length": Stream()}, "islice"),
        ({"dataset_or_length": 3, "pad": True, "drop_last": True}, "Choose one"),
        ({"dataset_or_length": 3, "seed": -5}, "seed=-5"),
        ({"dataset_or_length": 3, "seed": 1.5}, "seed=1.5"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Sampler(**arguments, job=place(0, 1))


def test_bad_uses_are_refused() -> None:
    worker, other = samplers(10, 2)
    with pytest.raises(ConfigurationError, match="share of epoch 0 is 5"):
        worker.consumed(6)
    with pytest.raises(ConfigurationError, match="dataset has 10 samples, and the state is about one of 11"):
        worker.load_state_dict(samplers(11, 2)[0].state_dict())
    with pytest.raises(ConfigurationError, match="does not draw from this sampler"):
        next(worker.follow(loader_of(other, batch_size=2)))
    with pytest.raises(ConfigurationError, match="batch_size"):
        next(worker.follow([1, 2]))
    with pytest.raises(ConfigurationError, match="in_order"):
        next(worker.follow(loader_of(worker, 1, batch_size=2, in_order=False)))
    with pytest.raises(ConfigurationError, match="no job"):
        Sampler(10)
