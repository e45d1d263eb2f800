"""Streaming local SGD: fragments, each in its turn, in the background, and mixed with what workers have done meanwhile."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import stretto
from stretto.aggregate.all_reduce import AllReduce
from stretto.aggregate.local_sgd.fragments import fragments_of
from stretto.aggregate.local_sgd.streaming import StreamingAveraging
from stretto.aggregate.local_sgd.training import BUFFERS_UNDER_WAY
from stretto.compress.codec import Compression
from stretto.compress.e3m0 import E3M0
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.none import NoCompression
from stretto.compress.qsgd import QSGD
from stretto.compress.sign import Sign
from stretto.distributing import Buffers, distribute, engine_of
from stretto.errors import CheckpointError, ConfigurationError, NonFiniteGradient
from stretto.job import Job
from stretto.observe.trace import Tracer
from stretto.parsing import parse
from stretto.strategy import Strategy
from stretto.sync.local_sgd import LocalSGD
from stretto.sync.outer import Average, HeavyBall, Nesterov, Outer, SlowMo
from stretto.testing import run_jobs

Weights = dict[str, Tensor]
RATE = 0.1
STREAMING = "fragments, overlap, merge"


def net() -> nn.Module:
    """The same on all workers, which are threads and share torch's generator."""
    model, generator = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return model


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=RATE, momentum=0.5)


def take_step(model: nn.Module, optimizer: Optimizer, step: int, rank: int) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * step + rank))
    loss = (model(x) - x[:, :4]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(model: nn.Module) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def equal(one: Weights, other: Weights) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def strategy(sync: LocalSGD, compress: Compression | None = None) -> Strategy:
    return Strategy(aggregate=AllReduce("ring" if compress is None else "auto"), sync=sync, compress=compress or NoCompression())


def train(job: Job, sync: LocalSGD, compress: Compression | None, steps: int) -> list[Weights]:
    model = net()
    model, optimizer = distribute(model, sgd(model), strategy(sync, compress), job=job)
    after = []
    for step in range(1, steps + 1):
        take_step(model, optimizer, step, job.rank)
        after.append(weights(model))
    return after


def by_hand(size: int, sync: LocalSGD, steps: int) -> list[list[Weights]]:
    """One process in the place of all: by worker, by step."""
    models = [net() for _ in range(size)]
    optimizers = [sgd(model) for model in models]
    named = [dict(model.named_parameters()) for model in models]
    fragments = [[name for name, _ in each] for each in fragments_of([*named[0].items()], sync.fragments)]
    theta, velocity = weights(models[0]), {name: torch.zeros_like(value) for name, value in named[0].items()}
    delta: Weights = {}
    seen: list[list[Weights]] = [[] for _ in range(size)]
    spacing = sync.every // sync.fragments
    for step in range(1, steps + 1):
        for rank in range(size):
            take_step(models[rank], optimizers[rank], step, rank)
        turn, since = divmod(step, spacing)
        for name in fragments[(turn - 1) % sync.fragments] if turn else ():
            if since == 0:
                delta[name] = torch.stack([theta[name] - each[name].detach() for each in named]).mean(0)
            if since == sync.overlap:
                sync.outer.move(theta[name], delta[name].clone(), velocity[name], RATE)
                with torch.no_grad():
                    for each in named:
                        each[name].copy_(sync.merge * each[name] + (1 - sync.merge) * theta[name])
        for rank in range(size):
            seen[rank].append(weights(models[rank]))
    return seen


CASES = [
    LocalSGD(4, fragments=2),
    LocalSGD(6, fragments=3, overlap=1),
    LocalSGD(6, fragments=2, overlap=2, merge=0.5, outer=Nesterov(0.7, 0.9)),
    LocalSGD(4, overlap=3, merge=0.25, outer=HeavyBall(0.5, 0.5)),
    LocalSGD(3, fragments=3, merge=1.0, outer=SlowMo(0.6)),
    LocalSGD(1, merge=0.5),
]


@pytest.mark.parametrize(("sync", "size"), [(sync, size) for sync, size in zip(CASES, (2, 3, 4, 2, 3, 7), strict=True)], ids=repr)
def test_it_does_what_one_process_would_do_for_all(sync: LocalSGD, size: int) -> None:
    steps = 2 * sync.every + sync.overlap + 2
    expected = by_hand(size, sync, steps)
    for rank, found in enumerate(run_jobs(size, train, sync, None, steps)):
        for mine, right in zip(found, expected[rank], strict=True):
            for name in mine:
                torch.testing.assert_close(mine[name], right[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("compress", [None, E3M0(block=8), ErrorFeedback(E3M0(block=8)), ErrorFeedback(Sign(block=8))], ids=repr)
@pytest.mark.parametrize("outer", [Average(), Nesterov(0.7, 0.9)], ids=repr)
def test_one_fragment_without_overlap_is_the_blocking_exchange(
    outer: Outer, compress: Compression | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DiLoCo, to the bit. (The mean of weights, which it takes where nothing else is asked, to rounding.)"""
    sync = LocalSGD(3, outer=outer)
    blocking = run_jobs(3, train, sync, compress, 10)
    monkeypatch.setattr(LocalSGD, "variant", STREAMING)
    assert strategy(sync).training is StreamingAveraging
    for mine, theirs in zip(run_jobs(3, train, sync, compress, 10), blocking, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            if compress is None and outer == Average():
                for name in one:
                    torch.testing.assert_close(one[name], other[name])
            else:
                assert equal(one, other)


def test_every_fragment_is_exchanged_once_in_a_period_and_together_they_are_the_model() -> None:
    sync = LocalSGD(6, fragments=3)

    one, other = run_jobs(2, train, sync, None, 12)
    after = [{name for name in mine if torch.equal(mine[name], theirs[name])} for mine, theirs in zip(one, other, strict=True)]
    turns = [after[step - 1] for step in (2, 4, 6)]
    assert all(after[step - 1] == set() for step in (1, 3, 5, 7, 9, 11))
    assert [after[step - 1] for step in (8, 10, 12)] == turns
    assert set().union(*turns) == set(weights(net())) and sum(map(len, turns)) == len(weights(net()))


DRAWN = pytest.param(QSGD(bits=4, bucket=16), marks=pytest.mark.slow)  # the number of rounds decides what is drawn


@pytest.mark.parametrize("saved_after", [5, 6, 7])
@pytest.mark.parametrize("compress", [None, ErrorFeedback(E3M0(block=8)), DRAWN], ids=repr)
def test_save_load_and_go_on_with_the_same_bits_also_with_an_exchange_under_way(
    tmp_path: Path, compress: Compression | None, saved_after: int
) -> None:
    start_after = 3 if compress is None else 0
    sync = LocalSGD(8, fragments=2, overlap=2, merge=0.5, outer=Nesterov(0.7, 0.9), start_after=start_after)
    path, steps = tmp_path / "checkpoint", 14

    def begin(job: Job) -> tuple[nn.Module, Optimizer]:
        model = net()
        return distribute(model, sgd(model), strategy(sync, compress), job=job)

    def go_on(job: Job, model: nn.Module, optimizer: Optimizer, first: int, last: int) -> Weights:
        for step in range(first, last + 1):
            take_step(model, optimizer, step, job.rank)
        return weights(model)

    def first(job: Job) -> Weights:
        model, optimizer = begin(job)
        go_on(job, model, optimizer, 1, saved_after)
        stretto.save(path, model, optimizer, job=job)
        return go_on(job, model, optimizer, saved_after + 1, steps)

    def second(job: Job) -> Weights:
        model, optimizer = begin(job)
        go_on(job, model, optimizer, 1, 2 if start_after else 9)  # under way is something of another life, or gradients
        resumed = stretto.load(path, model, optimizer, job=job)
        assert not resumed.lost, resumed.lost
        return go_on(job, model, optimizer, saved_after + 1, steps)

    whole = [each[-1] for each in run_jobs(3, train, sync, compress, steps)]
    assert not equal(whole[0], whole[1])
    for expected, went_on, came_back in zip(whole, run_jobs(3, first), run_jobs(3, second), strict=True):
        assert equal(expected, went_on) and equal(expected, came_back)


def test_looking_at_the_mean_with_an_exchange_under_way_changes_nothing() -> None:
    sync = LocalSGD(8, fragments=2, overlap=2, merge=0.5, outer=Nesterov(0.7, 0.9))

    def run(job: Job, looks: bool) -> Weights:
        model = net()
        model, optimizer = distribute(model, sgd(model), strategy(sync), job=job)
        for step in range(1, 12):
            take_step(model, optimizer, step, job.rank)
            if looks and step in (4, 5):
                with stretto.consensus(model) as mean:
                    assert mean.distance > 0
        return weights(model)

    for seen, unseen in zip(run_jobs(3, run, True), run_jobs(3, run, False), strict=True):
        assert equal(seen, unseen)


def test_distributing_again_with_an_exchange_under_way_begins_from_the_mean_and_keeps_the_velocity() -> None:
    sync = LocalSGD(8, overlap=3, outer=HeavyBall(0.7, 0.9))

    def run(job: Job) -> tuple[Weights, Weights, Tensor]:
        model = net()
        model, optimizer = distribute(model, sgd(model), strategy(sync), job=job)
        for step in range(1, 18):  # applied after the 11th; another one left with the 16th
            take_step(model, optimizer, step, job.rank)
        own, before = weights(model), engine_of(model).training.state().shared
        distribute(model, optimizer, strategy(sync), job=job)
        after = engine_of(model).training.state().shared
        for name, values in before.items():
            if "outer velocity" in values:
                assert torch.equal(values["outer velocity"], after[name]["outer velocity"])
        return own, weights(model), torch.cat([v["outer velocity"].flatten() for v in after.values() if "outer velocity" in v])

    runs = run_jobs(2, run)
    for _, begins, velocity in runs:
        assert float(velocity.abs().sum()) > 0
        for name, value in begins.items():
            torch.testing.assert_close(value, torch.stack([own[name] for own, _, _ in runs]).mean(0))


def test_nobody_waits_before_an_exchange_is_due() -> None:
    """Rank 1 does not even send before rank 0 has sent and taken two more steps, which has three before it waits."""
    sync, passed = LocalSGD(8, overlap=3), threading.Event()

    def run(job: Job) -> int:
        job.tracer = Tracer()
        model = net()
        model, optimizer = distribute(model, sgd(model), strategy(sync), job=job)
        for step in range(1, 12):
            if step == 8 and job.rank == 1:
                assert passed.wait(30)
            take_step(model, optimizer, step, job.rank)
            if step == 10 and job.rank == 0:
                now_ns = job.tracer.now()
                passed.set()
        training = engine_of(model).training
        assert isinstance(training, StreamingAveraging) and training.is_together
        if job.rank == 0:  # the trace shows it under the steps
            (sent,) = (span for span in job.tracer.spans if span.name == "fragment 0 after step 8")
            assert sent.category == "transfer" and sent.num_bytes == 4 * training.weights.numel
            assert sent.begin_ns < now_ns < sent.end_ns
        return dict(job.ledger.staleness)[3]

    assert run_jobs(2, run) == [1, 1]


def with_statistics() -> nn.Module:
    return nn.Sequential(net(), nn.BatchNorm1d(4))


def statistics(model: nn.Module) -> Weights:
    return {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}


@pytest.mark.parametrize("buffers", ["broadcast", "local"])
def test_buffers_are_averaged_when_the_last_fragment_of_a_period_is_applied(buffers: Buffers) -> None:
    def run(job: Job) -> list[Weights]:
        model, seen = with_statistics(), []
        how = strategy(LocalSGD(4, fragments=2, overlap=1))
        model, optimizer = distribute(model, sgd(model), how, buffers=buffers, job=job)
        for step in range(1, 10):
            take_step(model, optimizer, step, job.rank)
            seen.append(statistics(model))
        return seen

    one, other = run_jobs(2, run)
    same = [equal(mine, theirs) for mine, theirs in zip(one, other, strict=True)]
    assert same == [buffers == "broadcast" and step in (5, 9) for step in range(1, 10)]
    if buffers == "broadcast":
        for name, left in one[3].items():  # with the fourth step; the mean is that of then
            torch.testing.assert_close(one[4][name], (left + other[3][name]) / 2)


@pytest.mark.parametrize("merge", [0.0, 0.5])
def test_buffers_that_are_not_finite_stay_what_they_are(merge: float) -> None:
    """A mask of attention."""

    def run(job: Job) -> Tensor:
        model = net()
        model.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        model, optimizer = distribute(model, sgd(model), strategy(LocalSGD(4, overlap=1, merge=merge)), job=job)
        for step in range(1, 10):
            take_step(model, optimizer, step, job.rank)
        return model.get_buffer("mask").clone()

    for mask in run_jobs(2, run):
        assert torch.equal(mask, torch.full((3, 3), -torch.inf).triu(1))


def test_nobody_waits_for_buffers_while_a_fragment_is_under_way() -> None:
    """Rank 1 begins the step of which the mean is due only when rank 0 has ended it."""
    applied = threading.Event()

    def run(job: Job) -> tuple[Weights, Weights]:
        model = with_statistics()
        model, optimizer = distribute(model, sgd(model), strategy(LocalSGD(4, overlap=2, merge=0.25)), job=job)
        for step in range(1, 7):
            if job.rank == 1 and step == 6:
                assert applied.wait(30)
            take_step(model, optimizer, step, job.rank)
            if step == 4:
                left = statistics(model)
            if step == 5:
                with torch.no_grad():  # what comes then does not depend on the data of the sixth step
                    model.get_buffer("1.running_mean").fill_(job.rank)
                model.eval()
        applied.set()
        return left, statistics(model)

    (left, one), (other_left, other) = run_jobs(2, run)
    mean = (left["1.running_mean"] + other_left["1.running_mean"]) / 2
    torch.testing.assert_close(one["1.running_mean"], 0.75 * mean)
    torch.testing.assert_close(other["1.running_mean"], 0.25 + 0.75 * mean)


def test_save_load_and_go_on_with_the_same_bits_with_buffers_under_way(tmp_path: Path) -> None:
    path, sync = tmp_path / "checkpoint", LocalSGD(4, fragments=2, overlap=1, merge=0.25)

    def run(job: Job, *, first: int, saves: bool) -> list[Weights]:
        model = with_statistics()
        model, optimizer = distribute(model, sgd(model), strategy(sync), job=job)
        if first > 1:
            assert not stretto.load(path, model, optimizer, job=job).lost
        for step in range(first, 7):
            take_step(model, optimizer, step, job.rank)
            if saves and step == 4:  # the last fragment has just left
                training = engine_of(model).training
                stretto.save(path, model, optimizer, job=job)
                assert isinstance(training, StreamingAveraging) and BUFFERS_UNDER_WAY in training.shared_extra()
        return [weights(model), statistics(model)]

    whole = run_jobs(2, partial(run, first=1, saves=False))
    saved = run_jobs(2, partial(run, first=1, saves=True))
    for results in zip(whole, saved, run_jobs(2, partial(run, first=5, saves=False)), strict=True):
        for expected, went_on, came_back in zip(*results, strict=True):
            assert equal(expected, went_on) and equal(expected, came_back)


def test_a_world_of_one_with_nothing_to_do_is_the_plain_loop() -> None:
    model = net()
    optimizer = sgd(model)
    expected = []
    for step in range(1, 8):
        take_step(model, optimizer, step, 0)
        expected.append(weights(model))
    found = run_jobs(1, train, LocalSGD(4, fragments=2, overlap=1), None, 7)[0]
    assert all(equal(mine, right) for mine, right in zip(found, expected, strict=True))


def test_synchronous_steps_first() -> None:
    sync = LocalSGD(4, start_after=3, fragments=2, overlap=1, merge=0.5)
    results = run_jobs(3, train, sync, None, 12)
    for step in range(3):
        assert all(equal(mine[step], results[0][step]) for mine in results)
    assert not equal(results[0][3], results[1][3])


@pytest.mark.parametrize("compress", [None, E3M0()], ids=repr)
def test_values_that_are_not_finite_are_named(compress: Compression | None) -> None:
    """Uncompressed, with check_finite=True; what is encoded must be finite anyway."""

    def spoil(job: Job) -> None:
        model = net()
        model, optimizer = distribute(
            model, sgd(model), strategy(LocalSGD(4, fragments=2, overlap=1), compress), check_finite=compress is None, job=job
        )
        take_step(model, optimizer, 1, job.rank)
        if job.rank == 1:
            with torch.no_grad():
                next(model.parameters()).fill_(torch.nan)
        with pytest.raises(NonFiniteGradient, match="a weight is not finite: rank 1"):
            for _ in range(2, 8):
                optimizer.step()  # without gradients, which would not be finite either

    run_jobs(2, spoil)


@pytest.mark.parametrize("compress", [None, E3M0(block=8)], ids=repr)
def test_no_two_collectives_have_the_same_name(compress: Compression | None) -> None:
    """Also where it is checked first that all values are finite: a worker may begin the exchange while others still check."""

    def run(job: Job) -> list[object]:
        names: list[object] = []
        start = job.world.start
        job.world.start = lambda *args, **options: (names.append(options["name"]), start(*args, **options))[1]  # type: ignore[method-assign, func-returns-value]
        model = net()
        how = strategy(LocalSGD(4, fragments=2, overlap=1), compress)
        model, optimizer = distribute(model, sgd(model), how, check_finite=True, job=job)
        names.clear()
        for step in range(1, 12):
            take_step(model, optimizer, step, job.rank)
        return names

    for names in run_jobs(3, run):
        assert len(names) >= 2 * 5 and len(set(names)) == len(names)


def test_after_an_exchange_that_failed_in_a_save_nothing_is_applied() -> None:
    """What is left of it is each worker's own difference. Applied, it would make theta another one on each worker."""

    def run(job: Job) -> tuple[Weights, int]:
        model = net()
        model, optimizer = distribute(model, sgd(model), strategy(LocalSGD(4, overlap=3), E3M0(block=8)), job=job)
        for step in range(1, 4):
            take_step(model, optimizer, step, job.rank)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        if job.rank == 1:
            next(model.parameters()).data.fill_(torch.nan)
        take_step(model, optimizer, 4, job.rank)  # its fragment leaves
        with pytest.raises(CheckpointError, match="not finite"):
            stretto.save("never.pt", model, optimizer, job=job)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(before[name])
        optimizer.state.clear()
        for step in range(5, 12):
            take_step(model, optimizer, step, job.rank)
        return weights(model), sum(job.ledger.staleness.values())

    (one, rounds), (other, _) = run_jobs(2, run)
    assert equal(one, other) and rounds == 1  # that of step 8, applied after step 11


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 12])
def test_fragments_are_whole_layers_of_about_the_same_size(count: int) -> None:
    blocks = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)) for _ in range(6)]
    named = list(nn.Sequential(*blocks).named_parameters())
    fragments = fragments_of(named, count)
    sizes = [sum(parameter.numel() for _, parameter in fragment) for fragment in fragments]

    assert sorted(name for fragment in fragments for name, _ in fragment) == sorted(name for name, _ in named)
    for fragment in fragments:
        assert fragment
        layers = {name.rpartition(".")[0] for name, _ in fragment}
        assert len(fragment) == sum(name.rpartition(".")[0] in layers for name, _ in named)
    assert max(sizes) - min(sizes) <= 288  # the largest layer
    assert [name for name, _ in fragments_of(named, 1)[0]] == [name for name, _ in named]


def test_layers_of_one_size_are_dealt_out_in_turn() -> None:
    named = list(nn.Sequential(*[nn.Linear(3, 3) for _ in range(7)]).named_parameters())
    layers = [[name.partition(".")[0] for name, _ in fragment[::2]] for fragment in fragments_of(named, 3)]
    assert layers == [["0", "3", "6"], ["1", "4"], ["2", "5"]]


REFUSED = [
    (dict(every=20, fragments=6), r"6 does not divide 20.*\n.*fragments=5 or 10; or every=18 or 24"),
    (dict(every=3, fragments=4), r"fragments=3; or every=4"),
    (dict(every=20, fragments=4, overlap=5), "overlap=4 or less, or every=24"),
    (dict(every=2, overlap=2), "overlap=1 or less"),
    (dict(every=4, fragments=0), "fragments=4"),
    (dict(every=4, overlap=-1), "overlap=5"),
    (dict(every=4, merge=1.5), "from 0 to 1"),
    (dict(every=4, merge=-0.1), "from 0 to 1"),
    (dict(every=4, merge=True), "from 0 to 1"),
    (dict(every=4, fragments=2, optimizer_state="average"), 'optimizer_state="keep"'),
]


@pytest.mark.parametrize(("arguments", "why"), REFUSED, ids=[str(arguments) for arguments, _ in REFUSED])
def test_values_that_make_no_sense_are_refused_with_the_nearest_that_do(arguments: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        LocalSGD(**arguments)  # type: ignore[arg-type]


def test_torchs_own_collectives_cannot_run_under_the_next_steps() -> None:
    with pytest.raises(
        ConfigurationError, match=r"while the caller waits.*\nWrite aggregate=AllReduce\(\), or leave overlap= out"
    ):
        Strategy(aggregate=AllReduce("native"), sync=LocalSGD(8, overlap=2))
    Strategy(aggregate=AllReduce("native"), sync=LocalSGD(8, fragments=2))


def test_more_fragments_than_layers_are_refused() -> None:
    def refuse(job: Job) -> None:
        model = net()
        with pytest.raises(ConfigurationError, match=r"3 layers.*\n?.*Write fragments=2"):
            distribute(model, AdamW(model.parameters()), strategy(LocalSGD(4, fragments=4)), job=job)

    run_jobs(2, refuse)


def test_it_reads_back_from_text() -> None:
    value = strategy(LocalSGD(20, outer=Nesterov(0.7, 0.9), fragments=4, overlap=2, merge=0.5), ErrorFeedback(E3M0()))
    assert parse(repr(value)) == value and value.training is StreamingAveraging
