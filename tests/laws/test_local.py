"""The laws of workers that train copies of their own and bring them together now and then.

1   a world of one is the plain optimizer, bit for bit, where there is no outer optimizer
3   after an exchange all workers hold the same bits
5   error feedback conserves what it is given
8   bytes on the wire equal the formula
9   save, kill, resume: the same bits as never having stopped

`LocalSGD(every=1)` with SGD is synchronous training, and so are the steps before `start_after`, with any optimizer
an outer optimizer with rate 1 and without momentum is averaging
one worker, one step of SGD from exchange to exchange: torch's own SGD with that momentum
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from laws.cases import BY_NAME, CASES, Case, adamw, mlp
from laws.test_laws import bytes_of
from laws.training import State, alone, assert_close, assert_same_bits, build, count_questions, share, state_of, together
from resumable_training import Training
from stretto.aggregate.all_reduce import AllReduce
from stretto.aggregate.local_sgd.training import LocalAveraging
from stretto.compress.codec import Compression
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.exchange import bytes_of_sum
from stretto.compress.int8 import Int8
from stretto.compress.layout import Layout
from stretto.compress.power_sgd import PowerSGD
from stretto.compress.qsgd import QSGD
from stretto.compress.sign import Sign
from stretto.compress.top_k import TopK
from stretto.distributing import distribute, engine_of
from stretto.job import Job
from stretto.plan.choose import Choices
from stretto.plan.costs import LinkCosts
from stretto.strategy import Strategy
from stretto.sync.local_sgd import LocalSGD
from stretto.sync.outer import Average, HeavyBall, Nesterov, Outer, SlowMo
from stretto.testing import run_jobs
from stretto.wire.frames import HEADER_BYTES

SLOW = pytest.mark.slow
SIZES = [1, 2, pytest.param(3, marks=SLOW), pytest.param(4, marks=SLOW), 7]
RING = AllReduce("ring")
AWKWARD = [
    case.name
    for case in CASES
    if case.dtype is torch.float32 and not any(parameter.dtype is torch.float64 for parameter in build(case, 0).parameters())
]
PLAIN = Strategy(aggregate=RING)
OUTER = [Nesterov(0.7, 0.9), HeavyBall(0.5, 0.5), SlowMo(0.6)]


def plain_sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05)


MLP = Case("mlp", mlp, optimizer=plain_sgd)


def local(every: int, **options: Any) -> Strategy:
    return Strategy(aggregate=RING, sync=LocalSGD(every, **options))


def train(job: Job, case: Case, strategy: Strategy, steps: int, done: Callable[[Any, Job], Any] | None = None) -> Any:
    """The model of this worker after every step, on its own share of every batch. `done` looks at the engine at the end."""
    model = build(case, seed=job.rank)
    model, optimizer = distribute(model, case.optimizer(model), strategy, job=job)
    states = []
    for number in range(steps):
        case.step(model, share(case.batch(number), job.rank, job.world_size), number)
        optimizer.step()
        optimizer.zero_grad()
        states.append(state_of(model))
    return states if done is None else done(engine_of(model), job)


def run(case: Case, strategy: Strategy, size: int, steps: int) -> list[list[State]]:
    """By worker, by step."""
    states: list[list[State]] = run_jobs(size, train, case, strategy, steps)
    return states


def are_equal(one: State, other: State) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


# -- 1 and 3 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["mlp", "frozen, tied, 0-d, empty"])
def test_law_1_a_world_of_one_is_the_plain_optimizer_bit_for_bit(case: str) -> None:
    assert_same_bits(together(case, local(2, optimizer_state="average"), 1, 5)[0].state, alone(case, 5))


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("outer", [Average(), *OUTER], ids=repr)
def test_law_3_all_workers_hold_the_same_bits_after_an_exchange_and_their_own_between(size: int, outer: Outer) -> None:
    states = run(MLP, local(3, outer=outer), size, 6)
    for step in range(6):
        same = [are_equal(states[0][step], other[step]) for other in states[1:]]
        assert all(same) if step % 3 == 2 else not any(same)


@pytest.mark.parametrize(
    "compress",
    [
        ErrorFeedback(Sign(block=64)),
        pytest.param(Int8(block=32), marks=SLOW),
        pytest.param(ErrorFeedback(PowerSGD(2)), marks=SLOW),
    ],
    ids=repr,
)
@pytest.mark.parametrize("size", [1, 3])
def test_law_3_holds_where_the_exchange_is_compressed(compress: Compression, size: int) -> None:
    strategy = Strategy(aggregate=AllReduce(), sync=LocalSGD(2, outer=Nesterov(0.7, 0.9)), compress=compress)
    states = run(MLP, strategy, size, 4)
    for step in (1, 3):
        assert all(are_equal(states[0][step], other[step]) for other in states[1:])
    assert not are_equal(states[0][3], run(MLP, local(2, outer=Nesterov(0.7, 0.9)), size, 4)[0][3])  # it is lossy


@pytest.mark.parametrize("name", AWKWARD)
def test_law_3_holds_for_awkward_models_also_where_steps_are_synchronous_first(name: str) -> None:
    for start_after in (0, 1):
        states = run(BY_NAME[name], local(2, start_after=start_after, optimizer_state="average"), 2, 3 + start_after)
        assert_same_bits(states[0][1 + start_after], states[1][1 + start_after])
        assert not are_equal(states[0][-1], states[1][-1])


# -- what is what -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_an_exchange_after_each_step_of_sgd_is_synchronous_training(size: int) -> None:
    local_states, synchronous = run(MLP, local(1), size, 5), run(MLP, PLAIN, size, 5)
    for step in range(5):
        assert_close(local_states[0][step], synchronous[0][step])


def test_an_exchange_gives_the_mean_of_what_workers_have_by_themselves() -> None:
    apart, found = run(MLP, local(9), 4, 4), run(MLP, local(4), 4, 4)[0][-1]
    assert_close(found, {name: torch.stack([one[-1][name] for one in apart]).mean(0) for name in found})


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("outer", [Nesterov(1.0, 0.0), HeavyBall(1.0, 0.0), SlowMo(0.0)], ids=repr)
def test_an_outer_optimizer_with_rate_1_and_without_momentum_is_averaging(size: int, outer: Outer) -> None:
    assert_close(run(MLP, local(3, outer=outer), size, 6)[0][-1], run(MLP, local(3), size, 6)[0][-1])


@pytest.mark.parametrize("start_after", [0, 2])
@pytest.mark.parametrize("outer", OUTER, ids=repr)
def test_one_worker_with_one_step_of_sgd_is_torchs_own_momentum(outer: Outer, start_after: int) -> None:
    (states,) = run(MLP, local(1, outer=outer, start_after=start_after), 1, 7)
    model = build(MLP, seed=0)
    for number in range(7):
        if number in (0, start_after):
            momentum, lr = 0.0 if number < start_after else outer.momentum, 1.0 if number < start_after else outer.lr  # type: ignore[attr-defined]
            nesterov = isinstance(outer, Nesterov) and number >= start_after
            optimizer = SGD(model.parameters(), lr=0.05 * lr, momentum=momentum, nesterov=nesterov)
        optimizer.zero_grad()
        MLP.step(model, MLP.batch(number), number)
        optimizer.step()
        assert_close(states[number], state_of(model))


def test_slow_momentum_is_in_units_of_the_rate_that_each_parameter_has_at_the_exchange() -> None:
    """By the formula of the paper, with two groups, one of which has a rate that changes and is 0 once."""
    rates = [[0.1, 0.1], [0.05, 0.2], [0.0, 0.1], [0.02, 0.3]]

    def program(job: Job) -> list[list[float]]:
        model = nn.ParameterList([nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor([3.0]))])
        optimizer = SGD([{"params": [parameter], "lr": 0.1} for parameter in model])
        distribute(model, optimizer, local(1, outer=SlowMo(0.5, lr=0.8)), job=job)
        seen = []
        for number, both in enumerate(rates):
            for group, parameter, rate in zip(optimizer.param_groups, model, both, strict=True):
                group["lr"] = rate
                parameter.grad = torch.full_like(parameter, float(number + 1 + job.rank))
            optimizer.step()
            seen.append([float(parameter.detach()[0]) for parameter in model])
        return seen

    expected, place, slow = [], [1.0, 3.0], [0.0, 0.0]
    for number, both in enumerate(rates):
        for which, rate in enumerate(both):
            if rate:  # one step from `place`: the mean progress over the rate is the mean gradient
                slow[which] = 0.5 * slow[which] + (number + 1.5)
                place[which] -= 0.8 * rate * slow[which]
        expected.append(list(place))
    for seen in run_jobs(2, program):
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected))


# -- synchronous first ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [BY_NAME["mlp"].optimizer, adamw], ids=["momentum", "adamw"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_steps_before_start_after_are_those_of_synchronous_training_bit_for_bit(
    optimizer: Callable[[nn.Module], Optimizer], size: int
) -> None:
    case = Case("mlp", mlp, optimizer=optimizer)
    states, synchronous = run(case, local(2, start_after=3), size, 7), run(case, PLAIN, size, 3)
    for step in range(3):
        for mine, theirs in zip(states, synchronous, strict=True):
            assert_same_bits(mine[step], theirs[step])
    same = [all(are_equal(states[0][step], other[step]) for other in states[1:]) for step in range(7)]
    assert same == [True, True, True, size == 1, True, size == 1, True]


# -- 5: what is compressed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [pytest.param(TopK(0.1), marks=SLOW), Sign(block=64)], ids=repr)
def test_law_5_what_was_moved_and_what_is_left_over_is_all_that_workers_have_gone(codec: Compression) -> None:
    """With rate 1 and no momentum theta has moved by the mean of what all have sent; the residuals are the rest."""
    strategy = Strategy(aggregate=AllReduce(), sync=LocalSGD(2), compress=ErrorFeedback(codec))
    gone: list[list[Tensor]] = [[] for _ in range(3)]

    def program(job: Job) -> tuple[Tensor, Tensor]:
        model = build(MLP, seed=0)
        model, optimizer = distribute(model, MLP.optimizer(model), strategy, job=job)
        training = engine_of(model).training
        assert isinstance(training, LocalAveraging)
        begin = training.weights.read()
        exchange = training._exchange.mean

        def noted(values: Tensor, *args: Any) -> Any:
            gone[job.rank].append(values.clone())
            return exchange(values, *args)

        training._exchange.mean = noted  # type: ignore[method-assign, assignment]
        for number in range(8):
            MLP.step(model, share(MLP.batch(number), job.rank, 3), number)
            optimizer.step()
            optimizer.zero_grad()
        own, _ = training._exchange.export()
        residual = torch.zeros_like(begin)
        for kind in {kind for kinds in own.values() for kind in kinds}:
            scale = 1.0 if kind == "residual" else 3.0  # of means, of which each worker keeps a share
            residual += training.weights.from_names({name: kinds[kind] for name, kinds in own.items()}) * scale
        return begin - training.weights.read(), residual

    runs = run_jobs(3, program)
    assert all(len(each) == 4 for each in gone)
    produced = torch.stack([torch.stack(each).sum(0) for each in gone]).mean(0)
    left = torch.stack([residual for _, residual in runs]).mean(0)
    torch.testing.assert_close(runs[0][0] + left, produced, rtol=1e-4, atol=1e-6)
    assert float(left.abs().max()) > 0


# -- 8: bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("outer", [Average(), Nesterov(0.7, 0.9)], ids=repr)
def test_law_8_bytes_on_the_wire_equal_the_formula(size: int, outer: Outer) -> None:
    """Steps of a worker's own send nothing; an exchange is one all-reduce of the weights."""

    def program(job: Job) -> list[int]:
        model = build(MLP, seed=0)
        model, optimizer = distribute(model, MLP.optimizer(model), local(2, outer=outer), job=job)
        assert job.wire is not None
        questions, sent = count_questions(job.wire), []
        for number in range(4):
            MLP.step(model, share(MLP.batch(number), job.rank, size), number)
            before = job.wire.bytes_sent - questions[0]
            optimizer.step()
            sent.append(job.wire.bytes_sent - questions[0] - before)
        return sent

    weights = sum(parameter.numel() for parameter in mlp().parameters())
    for rank, sent in enumerate(run_jobs(size, program)):
        expected = bytes_of(_Vector(torch.zeros(weights)), rank, size, "ring", "")  # type: ignore[arg-type]
        assert sent == [0, expected, 0, expected]
        assert expected >= 2 * (size - 1) * HEADER_BYTES + 8 * weights * (size - 1) // size - 8 * size


@pytest.mark.parametrize("size", [2, 3])
def test_law_8_of_what_is_compressed_payloads_are_as_long_as_the_codec_says(size: int) -> None:
    """And one number of each worker goes ahead: whether what it has can be encoded."""
    compress = ErrorFeedback(Sign(block=64))

    def program(job: Job) -> list[int]:
        job.choices = Choices([0], ["ring"], LinkCosts(alpha=1e-5, beta=1e-9, gamma=1e-9))
        model = build(MLP, seed=0)
        strategy = Strategy(sync=LocalSGD(2), compress=compress)
        model, optimizer = distribute(model, MLP.optimizer(model), strategy, job=job)
        sent = []
        for number in range(4):
            MLP.step(model, share(MLP.batch(number), job.rank, size), number)
            before = job.ledger.bytes_sent
            optimizer.step()
            sent.append(job.ledger.bytes_sent - before)
        return sent

    layout = Layout.of((name, tuple(parameter.shape)) for name, parameter in mlp().named_parameters())
    for rank, sent in enumerate(run_jobs(size, program)):
        payload = compress.bytes_sent(layout, rank, size)
        assert payload is not None
        expected = payload + bytes_of_sum(size, 4, rank, size, "ring")
        assert sent == [0, expected, 0, expected]


class _Vector:
    """As much of a bucket as `bytes_of` looks at."""

    def __init__(self, flat: Tensor) -> None:
        self.flat, self.num_bytes = flat, flat.nbytes


# -- 9: checkpoints ---------------------------------------------------------------------------------------------------

RESUMED = [
    local(4, outer=Nesterov(0.7, 0.9)),
    local(4, outer=SlowMo(0.6), optimizer_state="average"),
    local(2, optimizer_state="reset"),
    local(2, outer=HeavyBall(0.7, 0.5), start_after=4),
    local(2, outer=HeavyBall(0.7, 0.5), start_after=7),
    Strategy(sync=LocalSGD(2), compress=ErrorFeedback(Sign(block=64))),
    Strategy(sync=LocalSGD(2), compress=QSGD(bits=4, bucket=16)),  # rounds decide what is drawn
    pytest.param(Strategy(sync=LocalSGD(2, outer=Nesterov(0.7, 0.9)), compress=ErrorFeedback(PowerSGD(2))), marks=SLOW),
]


@pytest.mark.parametrize("strategy", RESUMED, ids=lambda strategy: f"{strategy.sync!r} {strategy.compress!r}")
@pytest.mark.parametrize("size", [1, 3])
def test_law_9_save_kill_resume_gives_the_same_bits(strategy: Strategy, size: int, tmp_path: Path) -> None:
    path = tmp_path / "c.pt"

    def begin(job: Job) -> Training:
        job.choices = Choices([0], ["ring"], LinkCosts(alpha=1e-5, beta=1e-9, gamma=1e-9))
        return Training(job, strategy=strategy)

    def first(job: Job) -> list[bytes]:
        training = begin(job).run(5)
        training.save(path)
        return training.run(5).bits

    def second(job: Job) -> list[bytes]:
        training = begin(job)
        assert training.load(path).lost == ()
        return training.run(5).bits

    whole = run_jobs(size, first)
    assert run_jobs(size, second) == whole == run_jobs(size, lambda job: begin(job).run(10).bits)
