"""The sampler: every epoch is shared out, equally unless asked otherwise, and goes on where it was left."""

from __future__ import annotations

import doctest
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data import Sampler as TorchSampler

from stretto import epoch_order, random_state, sampler
from stretto.aggregate.all_reduce import AllReduce
from stretto.distributing import distribute, join
from stretto.epoch_order import order
from stretto.errors import ConfigurationError
from stretto.job import Job
from stretto.launching.detect import Launch
from stretto.sampler import Sampler
from stretto.strategy import Strategy
from stretto.testing import run_jobs
from stretto.timeouts import Timeouts

RING = Strategy(aggregate=AllReduce("ring"))  # not `auto`, which measures first
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
    assert doctest.testmod(sampler).failed == doctest.testmod(epoch_order).failed == 0


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
def test_all_workers_get_the_same_number_and_every_sample_comes_at_least_once(length: int, size: int, seed: int) -> None:
    """The few that come twice are the first of the order."""
    shares = [list(each) for each in samplers(length, size, seed=seed)]
    counts = Counter(index for share in shares for index in share)
    once_more = -length % size if length else 0

    assert [len(share) for share in shares] == [-(-length // size)] * size == [len(each) for each in samplers(length, size)]
    expected = Counter(range(length))
    for number in range(once_more):
        expected[int(order(length, 0, seed)[number % length])] += 1
    assert counts == expected
    for rank, share in enumerate(shares):
        assert share[: length // size] == order(length, 0, seed)[rank::size].tolist()[: length // size]


@given(length=LENGTHS, size=SIZES, seed=st.integers(0, 9))
def test_without_padding_no_sample_comes_twice_or_never(length: int, size: int, seed: int) -> None:
    shares = [list(each) for each in samplers(length, size, seed=seed, pad=False)]

    assert sorted(index for share in shares for index in share) == list(range(length))
    assert all(share == order(length, 0, seed)[rank::size].tolist() for rank, share in enumerate(shares))
    assert [len(each) for each in samplers(length, size, pad=False)] == [len(share) for share in shares]


@given(length=LENGTHS, size=SIZES)
def test_drop_last_gives_all_workers_the_same_number_and_repeats_nothing(length: int, size: int) -> None:
    shares = [list(each) for each in samplers(length, size, drop_last=True)]

    assert [len(share) for share in shares] == [length // size] * size == [len(s) for s in samplers(length, size, drop_last=True)]
    assert max(Counter(index for share in shares for index in share).values(), default=1) == 1


def test_each_iteration_is_the_next_epoch() -> None:
    one = samplers(20, 1, seed=5)[0]

    assert [list(one) for _ in range(3)] == [order(20, epoch, 5).tolist() for epoch in range(3)]
    one.set_epoch(1)
    assert list(one.follow(one)) == order(20, 1, 5).tolist()
    assert one.epoch == 2  # followed to its end
    one.set_epoch(2)
    assert list(one) == order(20, 2, 5).tolist()


# ---------------------------------------------------------------- unequal shares in training


def train(job: Job, length: int, loop: str, pad: bool = True) -> Any:
    """Two epochs; returns the number of steps of this worker, or what it was told."""
    layer = torch.nn.Linear(1, 1)
    model, optimizer = distribute(layer, torch.optim.SGD(layer.parameters(), lr=0.1), RING, job=job)
    worker, steps = Sampler(length, job=job, pad=pad), 0
    loader = loader_of(worker, batch_size=2)
    try:
        for _ in range(2):
            with join(model) if loop == "join" else nullcontext():
                for (x,) in loader if loop == "direct" else worker.follow(loader):
                    steps += 1
                    if loop == "evaluate":
                        continue
                    model(x.float().unsqueeze(1)).sum().backward()
                    optimizer.step()
    except ConfigurationError as refused:
        return f"after {steps}: {refused}"
    return steps


@pytest.mark.parametrize("size", [2, 5, 7])
def test_the_plain_loop_of_the_docs_makes_as_many_steps_on_every_worker(size: int) -> None:
    """Workers with a sample less would otherwise leave before the others: 1024 samples on 5 workers, in small."""
    share = -(-22 // size)
    assert run_jobs(size, train, 22, "follow") == run_jobs(size, train, 22, "direct") == [2 * -(-share // 2)] * size


@pytest.mark.parametrize("loop", ["follow", "direct"])
def test_training_on_unequal_shares_without_join_is_refused_on_all_workers_after_the_first_step(loop: str) -> None:
    """Seven samples for three workers in batches of two: two batches, and one each for the others."""
    said = run_jobs(3, train, 7, loop, False)

    assert all(each.startswith("after 1: Sampler(pad=False)") and "7 samples are shared by 3 workers" in each for each in said)
    assert all("the first 1 of which have 3 and the others 2" in each and "stretto.join(model)" in each for each in said)


def test_unequal_shares_are_for_join_for_evaluation_and_for_equal_numbers_of_batches() -> None:
    assert run_jobs(3, train, 7, "join", False) == [4, 2, 2]
    assert run_jobs(3, train, 7, "evaluate", False) == [4, 2, 2]
    assert run_jobs(3, train, 10, "follow", False) == [4, 4, 4]  # 4, 3 and 3 samples


# ---------------------------------------------------------------- resuming


KINDS = st.sampled_from([{}, {"pad": False}, {"drop_last": True}])


def resumed_from(workers: list[Sampler], size: int, **options: Any) -> list[Sampler]:
    state = workers[0].state_dict([worker.num_consumed for worker in workers])
    fresh = samplers(workers[0].length, size, seed=99, **options)
    for worker in fresh:
        worker.load_state_dict(state)
    return fresh


@settings(max_examples=200, deadline=None)
@given(data=st.data(), length=LENGTHS, first=SIZES, options=KINDS)
def test_any_chain_of_stops_and_world_sizes_leaves_nothing_out_and_repeats_only_padding(
    data: st.DataObject, length: int, first: int, options: dict[str, bool]
) -> None:
    """Workers may stop at different places; each time their number changes or stays."""
    workers, seen, repeats = samplers(length, first, seed=1, **options), Counter[int](), 0
    for size in data.draw(st.lists(SIZES, min_size=1, max_size=4)):
        for worker in workers:
            seen.update(take(worker, data.draw(st.integers(0, len(worker) + 1))))
        repeats += len(workers) - 1
        workers = resumed_from(workers, size, **options)
    rests = [list(worker) for worker in workers]
    seen.update(index for rest in rests for index in rest)
    repeats += len(workers) - 1

    if options.get("drop_last"):
        assert len(seen) >= length - (len(workers) - 1) and seen.total() == len(seen)
    elif "pad" in options:
        assert seen == Counter(range(length))
    else:
        assert set(seen) == set(range(length)) and seen.total() <= length + repeats


@settings(deadline=None)
@given(length=LENGTHS, sizes=st.tuples(SIZES, SIZES), steps=st.integers(0, 20), batch=st.integers(1, 5))
def test_equal_shares_stay_equal_when_resumed_with_another_number_of_workers(
    length: int, sizes: tuple[int, int], steps: int, batch: int
) -> None:
    """Also where padding had begun: what came once more is not left for the others."""
    workers = samplers(length, sizes[0], seed=1)
    seen = [index for worker in workers for index in take(worker, steps * batch)]
    rests = [list(worker) for worker in resumed_from(workers, sizes[1])]

    assert len({len(rest) for rest in rests}) == 1
    assert {*seen, *(index for rest in rests for index in rest)} == set(range(length))
    assert sum(map(len, rests)) < max(0, length - len(seen)) + sizes[1]


@settings(deadline=None)
@given(data=st.data(), length=LENGTHS, size=SIZES, options=KINDS)
def test_with_as_many_workers_each_goes_on_as_if_never_stopped(
    data: st.DataObject, length: int, size: int, options: dict[str, bool]
) -> None:
    whole = [list(worker) for worker in samplers(length, size, seed=1, **options)]
    workers = samplers(length, size, seed=1, **options)
    seen = [take(worker, data.draw(st.integers(0, len(worker)))) for worker in workers]

    for rank, worker in enumerate(resumed_from(workers, size, **options)):
        assert seen[rank] + list(worker) == whole[rank]


@given(length=LENGTHS, size=SIZES, after=SIZES, steps=st.integers(0, 20), batch=st.integers(1, 5))
def test_equal_batches_consume_the_order_from_its_front(length: int, size: int, after: int, steps: int, batch: int) -> None:
    """One worker's own state is enough then."""
    worker = samplers(length, size, pad=False)[0]
    take(worker, steps * batch)
    done = min(steps * batch * size, length)

    rest = [list(_resumed(worker, new)) for new in samplers(length, after, pad=False)]
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
    workers = samplers(37, 2, seed=4, pad=False)
    for worker in workers:
        worker.set_epoch(2)
        for step, (batch,) in enumerate(worker.follow(loader_of(worker, num_workers, batch_size=3))):
            seen += batch.tolist()
            if step == 2:
                break
    assert sorted(seen) == sorted(order(37, 2, 4)[:18].tolist())

    for new in samplers(37, 3, pad=False):
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
    batches = iter(worker.follow(loader_of(worker, batch_size=4)))
    next(batches)
    state, random = worker.state_dict(), torch.get_rng_state()
    expected = [(batch.tolist(), torch.rand(()).item()) for (batch,) in batches]

    torch.set_rng_state(random)
    new.load_state_dict(state)
    assert [(batch.tolist(), torch.rand(()).item()) for (batch,) in new.follow(loader_of(new, batch_size=4))] == expected


def test_every_pass_draws_as_the_loader_does_and_a_resumed_one_as_the_run_that_was_stopped() -> None:
    """Workers of the loader are seeded by that number: it must be another one in every pass, also after a break."""

    def passes(worker: Sampler, resume_at: int | None = None) -> list[int]:
        loader, seeds = loader_of(worker, batch_size=4), []
        for number in range(3):
            for step, _ in enumerate(worker.follow(loader)):
                seeds.append(int(torch.randint(10**9, ())))
                if (number, step) == (0, 1):
                    break
            if number == resume_at:
                state, generator = worker.state_dict(), torch.get_rng_state()
                worker = samplers(16, 1)[0]
                torch.manual_seed(99)  # another process
                worker.load_state_dict(state)
                torch.set_rng_state(generator)
                loader = loader_of(worker, batch_size=4)
        return seeds

    torch.manual_seed(3)
    expected = passes(samplers(16, 1)[0])
    torch.manual_seed(3)
    assert passes(samplers(16, 1)[0], resume_at=0) == expected  # stopped between two passes, in mid-epoch
    torch.manual_seed(3)
    plain = loader_of(samplers(16, 1)[0], batch_size=4)
    assert [int(torch.randint(10**9, ())) for _, _ in zip(range(2), plain, strict=False)] == expected[:2]


# ---------------------------------------------------------------- passes that are left early


class Untrained:
    """What the sampler looks at of a model that is distributed."""

    rounds, joining = 0, False


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # of Python 3.12, where other tests have left threads
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_a_look_at_a_batch_costs_nothing(options: dict[str, Any]) -> None:
    """Before, in the middle of, and after a pass; also by one worker alone, which must stay in step with the others."""
    here, model = place(0, 2), Untrained()
    here.engines.add(model)
    worker = Sampler(20, seed=5, job=here)
    loader = loader_of(worker, batch_size=2, **options)
    first = next(iter(loader))[0].tolist()
    held = iter(loader)  # one that nobody lets go of
    next(held)
    assert first == order(20, 0, 5)[[0, 2]].tolist()
    assert (worker.epoch, worker.state_dict()["taken"]) == (0, [[0, 0]])

    for epoch in range(2):
        seen: list[int] = []
        for step, (batch,) in enumerate(worker.follow(loader)):
            seen += batch.tolist()
            if step == 1 and "persistent_workers" not in options:  # where a second iterator ends the first
                ahead = next(iter(loader))[0].tolist()
                assert ahead == order(20, epoch, 5)[[8, 10]].tolist()
                assert worker.state_dict()["taken"] == [[4, 4]]
        assert seen == order(20, epoch, 5)[::2].tolist()
        next(iter(loader))
        assert worker.epoch == epoch + 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_look_by_a_loader_that_draws_a_whole_epoch_at_once_costs_nothing() -> None:
    """Nothing is left to draw when the loop sees its first batch, so only what is trained since then tells a loop from a look."""
    here, model = place(0, 2), Untrained()
    here.engines.add(model)
    worker = Sampler(16, seed=5, job=here)
    loader = loader_of(worker, batch_size=4, num_workers=2)
    first = order(16, 0, 5)[::2].tolist()
    for _ in range(2):
        assert next(iter(loader))[0].tolist() == first[:4]  # by this worker alone
        assert worker.epoch == 0
    for epoch in range(3):
        seen: list[int] = []
        for (batch,) in loader:  # nobody counts
            seen += batch.tolist()
            model.rounds += 1
        assert seen == order(16, epoch, 5)[::2].tolist() and worker.epoch == epoch
        assert len(worker) == 8
        assert next(iter(loader))[0].tolist() == order(16, epoch + 1, 5)[::2].tolist()[:4]
    with pytest.raises(ConfigurationError, match="nobody has said how many samples of epoch 2"):
        worker.state_dict()


@pytest.mark.parametrize("size", [1, 2])
def test_a_loop_that_trains_and_is_left_early_is_no_look(size: int) -> None:
    """Followed, the next pass has the rest of the epoch. Not counted, it is the next epoch, and not the same batches again."""

    def program(job: Job, followed: bool) -> list[list[int]]:
        layer = torch.nn.Linear(1, 1)
        model, optimizer = distribute(layer, torch.optim.AdamW(layer.parameters()), RING, job=job)
        worker = Sampler(8, job=job, shuffle=False)
        loader, passes = loader_of(worker, batch_size=1), []
        next(iter(loader))
        for _ in range(3):
            passes.append([worker.epoch])
            for step, (x,) in enumerate(worker.follow(loader) if followed else loader):
                passes[-1].append(int(x))
                model(x.float()).sum().backward()
                optimizer.step()
                next(iter(loader))  # in between
                if step == 1:
                    break
        passes.append([worker.epoch, worker._order.length(0, 0), *list(worker)])
        return passes

    stride = list(range(0, 8, size))
    [first, *_] = run_jobs(size, program, True)
    assert first[:2] == [[0, *stride[:2]], [0, *stride[2:4]]]
    assert first[2] == ([0, *stride[4:6]] if size == 1 else [0, *stride[:2]])  # two workers are through with the epoch
    [first, *_] = run_jobs(size, program, False)
    assert [each[1:] for each in first[:3]] == [stride[:2]] * 3 and first[3][0] == 2


def test_counting_by_hand_goes_from_epoch_to_epoch() -> None:
    worker, new = samplers(6, 2)[0], samplers(6, 2)[0]
    for epoch in range(2):
        for _ in worker:
            worker.consumed(1)
        assert (worker.epoch, worker.state_dict()["taken"]) == (epoch, [[3, 3]])
    assert take(worker, 1) == [order(6, 2, 0)[0]]
    new.load_state_dict(worker.state_dict())
    assert list(worker) == list(new) == order(6, 2, 0)[2::2].tolist()


@pytest.mark.parametrize("drop_last", [False, True])
def test_what_is_followed_has_a_length(drop_last: bool) -> None:
    """What a progress bar asks for before the loop begins; and asked in the loop it does not change."""
    worker, new = samplers(17, 2)[0], samplers(17, 2)[0]
    batches = worker.follow(loader_of(worker, batch_size=2, drop_last=drop_last))
    assert len(batches) == 4 + (not drop_last)
    lengths = []
    for step, _ in enumerate(batches):
        lengths.append(len(batches))
        if step == 2:
            break
    assert set(lengths) == {4 + (not drop_last)}
    new.load_state_dict(worker.state_dict())
    for each in (worker, new):
        rest = each.follow(loader_of(each, batch_size=2, drop_last=drop_last))
        assert len(rest) == len(list(rest)) == 1 + (not drop_last)
        assert each.epoch == 1 and len(rest) == 4 + (not drop_last)
        assert len(each.follow(each)) == 9 and len(each.follow([], batch_size=5)) == 2


# ---------------------------------------------------------------- other samplers


class ByEpoch:
    """One of a user's own: no torch sampler, other items in every epoch, of another number."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.epoch, 100 * self.epoch + len(self)))

    def __len__(self) -> int:
        return 10 + self.epoch


WEIGHTS = [0.0, 1.0, 2.0, 3.0, 4.0, 0.0]
WRAPPED: dict[str, Callable[[], Any]] = {
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, 30),
    "with a generator of its own": lambda: RandomSampler(range(30), generator=torch.Generator()),
    "batches": lambda: BatchSampler(RandomSampler(range(30)), 4, drop_last=False),
    "a list": lambda: [7, 7, 3],
    "by epoch": ByEpoch,
    "of numpy": lambda: _OfNumpy(),
}


class _OfNumpy(TorchSampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter((np.random.permutation(20) + random.randrange(100)).tolist())

    def __len__(self) -> int:
        return 20


def wrapped(kind: str, size: int, **options: Any) -> list[Sampler]:
    return [Sampler.wrap(WRAPPED[kind](), job=place(rank, size), **options) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("kind", WRAPPED)
def test_workers_share_what_another_sampler_gives_and_resume_with_any_number(kind: str, size: int) -> None:
    """Every worker draws for itself, wherever its generators are; together they have the items of one worker, in its order."""
    [alone] = wrapped(kind, 1, seed=3)
    torch.manual_seed(size)
    epochs = [list(alone) for _ in range(3)]
    workers = wrapped(kind, size, seed=3, pad=False)
    for items in epochs:
        generators = random_state.capture(torch.nn.Identity())
        assert [list(worker) for worker in workers] == [items[rank::size] for rank in range(size)]
        assert random_state.capture(torch.nn.Identity()) == generators
        torch.rand(size)
    if kind != "a list":
        assert repr(epochs[0]) != repr(epochs[1])

    workers = wrapped(kind, size, seed=3, pad=False)
    for worker in workers:
        worker.set_epoch(1)
        take(worker, 2)
    state_dict = workers[0].state_dict([worker.num_consumed for worker in workers])
    for after in (size, 2):
        rest = [item for worker in wrapped(kind, after, pad=False) for item in _loaded(worker, state_dict)]
        assert sorted(rest) == sorted(epochs[1][2 * size :])


def _loaded(worker: Sampler, state: dict[str, Any]) -> Sampler:
    worker.load_state_dict(state)
    return worker


def test_wrapped_batches_go_to_the_loader_as_its_batch_sampler() -> None:
    workers = wrapped("batches", 3)
    data, seen = TensorDataset(torch.arange(30)), []
    for worker in workers:
        batches = worker.follow(DataLoader(data, batch_sampler=worker))
        assert len(batches) == 3  # eight batches, padded to nine
        seen.append([x.tolist() for (x,) in batches])
        assert worker.epoch == 1
    assert {index for batches in seen for batch in batches for index in batch} == set(range(30))
    assert seen[2][2] == seen[0][0] and [len(batch) for batch in seen[1]] == [4, 4, 2]


def test_a_wrapped_sampler_that_workers_cannot_agree_on_is_refused() -> None:
    class OwnNumpy(ByEpoch):
        def __init__(self) -> None:
            self.generator = np.random.default_rng(0)

        def __iter__(self) -> Iterator[int]:
            return iter(self.generator.permutation(10).tolist())

    here = place(0, 2)
    with pytest.raises(ConfigurationError, match="two passes over it gave different items"):
        Sampler.wrap(OwnNumpy(), job=here)
    with pytest.raises(ConfigurationError, match="takes a worker's share by itself"):
        Sampler.wrap(DistributedSampler(TensorDataset(torch.ones(9)), num_replicas=2, rank=0), job=here)
    with pytest.raises(ConfigurationError, match="Sampler takes a worker's share by itself"):
        Sampler.wrap(BatchSampler(Sampler(9, job=here), 2, False), job=here)
    with pytest.raises(ConfigurationError, match="generator has no __len__"):
        Sampler.wrap((i for i in range(3)), job=here)
    with pytest.raises(ConfigurationError, match="Sampler.wrap"):
        Sampler(RandomSampler(range(9)), job=here)
    state = Sampler.wrap(WeightedRandomSampler(WEIGHTS, 30), job=here).state_dict()
    with pytest.raises(ConfigurationError, match="epoch 0 in another order"):
        Sampler.wrap(WeightedRandomSampler(WEIGHTS[::-1], 30), job=here).load_state_dict(state)
    with pytest.raises(ConfigurationError, match="epoch 0 in another order"):
        Sampler(30, job=here).load_state_dict(state)


# ---------------------------------------------------------------- what is refused


def test_a_place_that_nobody_counted_is_not_made_up() -> None:
    worker = samplers(10, 1)[0]
    assert worker.state_dict()["taken"] == [[0]]
    batches = iter(loader_of(worker, batch_size=2))
    next(batches)
    with pytest.raises(ConfigurationError, match="follow"):
        worker.state_dict()
    worker.consumed(2)
    assert worker.state_dict()["taken"] == [[2]]
    list(worker)
    worker.set_epoch(3)
    list(worker)  # to its end, and nobody knows what of it was used
    with pytest.raises(ConfigurationError, match="follow"):
        worker.state_dict()


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
        worker.follow(loader_of(other, batch_size=2))
    with pytest.raises(ConfigurationError, match="batch_size"):
        worker.follow([1, 2])
    with pytest.raises(ConfigurationError, match="in_order"):
        worker.follow(loader_of(worker, 1, batch_size=2, in_order=False))
    with pytest.raises(ConfigurationError, match="no job"):
        Sampler(10)


def test_a_model_that_is_dropped_meanwhile_does_not_hide_that_another_was_trained() -> None:
    here, old, new = place(0, 2), Untrained(), Untrained()
    old.rounds = 3
    here.engines.add(old)
    here.engines.add(new)
    worker = Sampler(8, job=here)
    for _ in loader_of(worker, batch_size=1):
        here.engines.discard(old)
        new.rounds += 1
        with pytest.raises(ConfigurationError, match="nobody has said"):
            worker.state_dict()
