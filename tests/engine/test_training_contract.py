"""The contract between hooks and ways to train, shown by two small ways of the test's own, and by all-reduce itself.

A way to train is a class on `Training`, a value that names it, and a line in `WAYS`: these tests add both and train with them.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engine.worker import RING, assert_equal_everywhere, data, loss_of, mlp, seeded, start, state_of
from stretto import strategy as strategy_module
from stretto.checkpoint import load, save
from stretto.distributing import distribute, engine_of, synchronize
from stretto.engine.bucket import Bucket
from stretto.engine.training import (
    EVERYBODY,
    NOBODY,
    Named,
    RoundEnd,
    RoundResult,
    Setting,
    Training,
    TrainingState,
)
from stretto.errors import BackwardFailed, ConfigurationError
from stretto.job import Job
from stretto.schedule.orders import WaitFree
from stretto.shard.replicated import Replicated
from stretto.strategy import ANSWERS, WAYS, Strategy, Way
from stretto.sync.synchronous import Synchronous
from stretto.testing import run_jobs

PATIENCE_S = 20.0


class Board:
    """Memory that all ranks of a test share: each puts its gradients, waits for the others', and takes the sum."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: dict[Any, dict[int, Tensor]] = defaultdict(dict)
        self._changed = threading.Condition()

    def put(self, key: Any, rank: int, value: Tensor) -> None:
        with self._changed:
            self._entries[key][rank] = value
            self._changed.notify_all()

    def is_full(self, key: Any) -> bool:
        return len(self._entries[key]) == self._size

    def total(self, key: Any) -> Tensor:
        with self._changed:
            assert self._changed.wait_for(lambda: self.is_full(key), PATIENCE_S), f"nobody else came to {key}"
            return torch.stack([self._entries[key][rank] for rank in range(self._size)]).sum(0)


BOARDS: dict[int, Board] = {}


@dataclass(frozen=True)
class OnBoard:
    """An answer to `aggregate`: sums through the board of that number. `steps`: what its optimizers may do."""

    number: int
    steps: str = "everybody"


class BoardTraining(Training[Bucket]):
    """Adds gradients up in shared memory: no wire, no collective, no codec."""

    waits_before_use = True
    state_text = "a board"

    def __init__(self, strategy: Any, job: Job, setting: Setting) -> None:
        super().__init__(strategy, job, setting)
        self._job, self._setting = job, setting
        self.board, self.steps = BOARDS[strategy.aggregate.number], strategy.aggregate.steps
        self.calls: list[str] = []
        self.used: set[Tensor] = set()
        self._round = 0
        self._stepped = 0

    def arrange(self, dense: Sequence[Named], sparse: Sequence[Named]) -> Sequence[Bucket]:
        self.calls.append("arrange")
        groups = [[named] for named in reversed(dense)]
        first = groups[0][0][1]
        self.buckets = [Bucket(group, first.dtype, first.device) for group in groups]
        return self.buckets

    def bucket_ready(self, bucket: Bucket) -> None:
        self.calls.append(f"bucket_ready {bucket.names[0]}")
        self._put(bucket)

    def backward_ended(self, end: RoundEnd) -> RoundResult:
        self.calls.append(f"backward_ended {end.participation.name}")
        for bucket in self.buckets:
            if not bucket.sent:
                self._put(bucket)
        for bucket in self.buckets:
            bucket.gradients.copy_(self.board.total(self._key(bucket)))
            bucket.hand_out([True] * len(bucket.parameters))
        self._round += 1
        return RoundResult(combined=True)

    def is_complete(self, parameter: Tensor) -> bool:
        return any(self.board.is_full(self._key(b)) for b in self.buckets for p in b.parameters if p is parameter)

    def _put(self, bucket: Bucket) -> None:
        self.board.put(self._key(bucket), self._job.rank, bucket.gradients.clone())

    def _key(self, bucket: Bucket) -> tuple[int, str]:
        return self._round, bucket.names[0]

    def before_use(self, parameters: Iterable[Tensor]) -> None:
        self.used |= set(parameters)

    def before_step(self, optimizer: Optimizer) -> Set[Tensor] | None:
        self.calls.append("before_step")
        choices = {"everybody": EVERYBODY, "nobody": NOBODY, "the first": set(self.buckets[0].parameters)}
        return choices[self.steps]

    def after_step(self, optimizer: Optimizer) -> None:
        self.calls.append("after_step")
        self._stepped += 1

    def state(self) -> TrainingState:
        name = self.buckets[0].names[0]
        return TrainingState(self._round, {name: {"steps": torch.tensor([float(self._stepped)])}}, {})

    def load_state(self, state: TrainingState) -> None:
        self._round = state.rounds
        self._stepped = int(next(iter(state.own.values()))["steps"])


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Strategy]]:
    """Makes the new way known, as a folder of its own would: a value, a Training, a line each in two lists."""
    monkeypatch.setitem(ANSWERS, "aggregate", (*ANSWERS["aggregate"], OnBoard))
    monkeypatch.setattr(strategy_module, "WAYS", (*WAYS, Way(OnBoard, Synchronous, Replicated, BoardTraining)))
    numbers = iter(range(1000))

    def make(size: int, steps: str = "everybody") -> Strategy:
        number = next(numbers)
        BOARDS[number] = Board(size)
        return Strategy(aggregate=OnBoard(number, steps))  # type: ignore[arg-type]

    yield make
    BOARDS.clear()


def board_training(model: nn.Module) -> BoardTraining:
    training = engine_of(model).training
    assert isinstance(training, BoardTraining)
    return training


# -- a way of the test's own ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_a_new_way_to_train_is_a_class_and_a_line(size: int, board: Callable[..., Strategy]) -> None:
    strategy = board(size)

    def program(job: Job) -> tuple[dict[str, Tensor], int]:
        model = mlp()
        optimizer = start(job, model, strategy)
        before = sum(job.ledger.sent.values())
        for step in range(3):
            torch.autograd.backward(loss_of(model, job, step))
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model), sum(job.ledger.sent.values()) - before

    results = run_jobs(size, program)
    assert_equal_everywhere([state for state, _ in results])
    assert all(sent == 0 for _, sent in results)  # hooks and steps send nothing by themselves
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        for rank in range(size):
            model(data(rank, step)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in state_of(model).items():
        torch.testing.assert_close(results[0][0][name], value, rtol=1e-10, atol=1e-12)


def test_calls_come_in_the_order_that_is_promised(board: Callable[..., Strategy]) -> None:
    strategy = board(1)

    def program(job: Job) -> None:
        model = mlp()
        optimizer = start(job, model, strategy)
        training = board_training(model)
        model.eval()(data(0))
        assert training.calls == ["arrange"] and training.used == set(model.parameters())  # an evaluation may wait, too
        training.calls.clear()
        torch.autograd.backward(loss_of(model.train(), job))
        names = [name for name, _ in model.named_parameters()]
        assert sorted(training.calls[:-1]) == sorted(f"bucket_ready {name}" for name in names)
        assert training.calls[-1] == "backward_ended WORKING"
        training.calls.clear()
        optimizer.step()
        assert training.calls == ["before_step", "after_step"]
        training.used.clear()
        model.state_dict()
        assert training.used == set(model.parameters())
        training.used.clear()
        synchronize(model)
        assert training.used == set(model.parameters())
        training.calls.clear()
        model.append(nn.Linear(1, 1).double())  # whose place is given when the round that failed has been closed
        with pytest.raises(ZeroDivisionError):
            _backward_that_fails(model, job)
        optimizer.zero_grad()
        model(data(0))
        assert training.calls[-2:] == ["backward_ended FAILED", "arrange"]

    run_jobs(1, program)


def _backward_that_fails(model: nn.Sequential, job: Job) -> None:
    out = model[2:](_Failing.apply(model[:2](data(job.rank)), lambda: None))  # type: ignore[no-untyped-call]
    out.sum().backward()


@pytest.mark.parametrize(("steps", "moved"), [("nobody", 0), ("the first", 1), ("everybody", 6)])
def test_a_training_says_who_steps(steps: str, moved: int, board: Callable[..., Strategy]) -> None:
    """Whoever does not step keeps its gradient, and its optimizer has no state for it."""
    strategy = board(2, steps)

    def program(job: Job) -> None:
        model = mlp()
        optimizer = start(job, model, strategy)
        torch.autograd.backward(loss_of(model, job))
        gradients, before = [p.grad for p in model.parameters()], state_of(model)
        optimizer.step()
        assert sum(not torch.equal(value, before[name]) for name, value in state_of(model).items()) == moved
        assert len(optimizer.state) == moved
        assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))

    run_jobs(2, program)


def test_gradients_that_did_not_step_come_back_after_a_step_that_raises(board: Callable[..., Strategy]) -> None:
    strategy = board(1, "nobody")

    class Raising(torch.optim.SGD):
        fails = True

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise ZeroDivisionError("on purpose")
            return super().step(closure)

    def program(job: Job) -> None:
        model = mlp()
        optimizer = Raising(model.parameters(), lr=0.1)
        distribute(model, optimizer, strategy, job=job)
        torch.autograd.backward(loss_of(model, job))
        gradients = [p.grad for p in model.parameters()]
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        optimizer.fails = False
        optimizer.step()
        assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))

    run_jobs(1, program)


def test_what_a_training_remembers_is_saved_and_loaded(board: Callable[..., Strategy], tmp_path: Any) -> None:
    strategy = board(2)

    def program(job: Job) -> list[int]:
        model = mlp()
        optimizer = start(job, model, strategy)
        for _ in range(2 + job.rank):  # the number of steps is each worker's own here
            optimizer.step()
        engine_of(model).loop.begin_anew()
        save(tmp_path / "saved.pt", model, optimizer)
        kept = optimizer.state_dict()
        training, found = board_training(model), []
        for bring_back in (lambda: load(tmp_path / "saved.pt", model, optimizer), lambda: optimizer.load_state_dict(kept)):
            training._stepped = 0
            bring_back()
            found.append(training._stepped)
        return found

    assert run_jobs(2, program) == [[2, 2], [3, 3]]


def test_answers_that_no_training_combines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Sometimes:
        """A `sync` that nobody has built."""

    @dataclass(frozen=True)
    class Halved:
        """A `shard` that nobody has built."""

    for axis, kind in (("sync", Sometimes), ("shard", Halved)):
        monkeypatch.setitem(ANSWERS, axis, (*ANSWERS[axis], kind))
        with pytest.raises(ConfigurationError) as caught:
            Strategy(**{axis: kind()})  # type: ignore[arg-type]
        message = str(caught.value)
        assert f"{kind.__name__}()" in message and "no way of training" in message
        assert "Write one of the combinations that exist: aggregate=AllReduce, sync=Synchronous, shard=Replicated" in message


# -- all-reduce: a parameter is complete when its own bucket is --------------------------------------------------------


class _Failing(torch.autograd.Function):
    """Does nothing in forward. In backward it calls a function, and raises unless that returns True."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, then: Callable[[], Any]) -> Tensor:
        ctx.then = then
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.then() is True:
            return gradient, None
        raise ZeroDivisionError("on purpose")


@dataclass
class Halfway:
    """A model whose backward stops between its second and its first layer, until `then` returns there."""

    build: Callable[[], nn.Module] = field(default=lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)).double())

    def __post_init__(self) -> None:
        self.model: Any = seeded(self.build)

    def backward(self, x: Tensor, then: Callable[[], Any]) -> None:
        hidden = _Failing.apply(self.model[0](x), then)  # type: ignore[no-untyped-call]
        self.model[1](hidden).pow(2).mean().backward()


def wait_until_complete(training: Training[Any], parameters: Iterable[Tensor]) -> None:
    until = threading.Event()
    for parameter in parameters:
        for _ in range(int(PATIENCE_S * 1000)):
            if training.is_complete(parameter):
                break
            until.wait(0.001)
        assert training.is_complete(parameter)


EACH = Strategy(aggregate=RING.aggregate, schedule=WaitFree())


@pytest.mark.parametrize("size", [2, 3])
def test_a_gradient_is_complete_when_its_own_bucket_is(size: int) -> None:
    """Every worker holds its first layer back until the second one's gradients have come from all the others."""

    def program(job: Job) -> list[Tensor]:
        halfway = Halfway()
        first, second = halfway.model
        start(job, halfway.model, EACH)
        training = engine_of(halfway.model).training
        looked = []

        def look() -> bool:
            wait_until_complete(training, second.parameters())
            looked.append([training.is_complete(p) for p in first.parameters()])
            return True

        halfway.backward(data(job.rank), look)
        assert looked == [[False, False]]
        return [p.grad.clone() for p in halfway.model.parameters()]

    everybody = run_jobs(size, program)
    plain = Halfway()
    for rank in range(size):
        plain.backward(data(rank), lambda: True)
    for grads in everybody:
        for found, parameter in zip(grads, plain.model.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad / size)


def test_with_low_precision_and_weights_completeness_waits_for_the_exact_weight() -> None:
    """A sum of weights in bfloat16 would be rounded: without weights the bucket says it all, with them the closing one must."""

    def program(job: Job, weight: float) -> list[bool]:
        halfway = Halfway(lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)).bfloat16())
        start(job, halfway.model, EACH)
        job.weight = weight
        training, looked = engine_of(halfway.model).training, list[bool]()
        first, second = halfway.model
        buckets = {p: b for b in engine_of(halfway.model).buckets for p in b.parameters}

        def look() -> bool:
            for p in second.parameters():
                exchange = buckets[p].exchange  # type: ignore[attr-defined]
                exchange._pending.wait()
                looked.append(training.is_complete(p))
            return True

        halfway.backward(data(job.rank).bfloat16(), look)
        return looked

    assert run_jobs(2, program, 1.0) == [[True, True]] * 2
    assert run_jobs(2, program, 3.0) == [[False, False]] * 2


def test_a_backward_that_fails_after_a_bucket_is_complete_gives_nobody_a_step() -> None:
    size = 3

    def program(job: Job) -> tuple[dict[str, Tensor], int]:
        halfway = Halfway()
        model, (_, second) = halfway.model, halfway.model
        optimizer = start(job, model, EACH)
        training, before, complete = engine_of(model).training, state_of(model), []

        def then() -> bool:
            wait_until_complete(training, second.parameters())
            complete.append(True)
            return job.rank != 1

        with pytest.raises(ZeroDivisionError if job.rank == 1 else BackwardFailed):
            halfway.backward(data(job.rank), then)
        optimizer.step()
        assert_equal_everywhere([before, state_of(model)])
        assert all(p.grad is None for p in model.parameters())
        halfway.backward(data(job.rank, 1), lambda: True)
        optimizer.step()
        return state_of(model), len(complete)

    results = run_jobs(size, program)
    assert_equal_everywhere([state for state, _ in results])
    assert all(complete == 1 for _, complete in results)  # the early bucket had come, on all workers, before the failure


def test_every_bucket_has_a_weight_of_its_own() -> None:
    """A weight that changes in the middle of backward counts for the buckets that leave after it."""

    def program(job: Job) -> None:
        halfway = Halfway()
        start(job, halfway.model, EACH)

        def change() -> bool:
            job.weight = 1.0 + job.rank
            return True

        halfway.backward(data(job.rank), change)
        plain = [Halfway() for _ in range(2)]
        for rank, each in enumerate(plain):
            each.backward(data(rank), lambda: True)
        for index, shares in ((0, (1 / 3, 2 / 3)), (1, (1 / 2, 1 / 2))):
            for name in ("weight", "bias"):
                parts = [getattr(each.model[index], name).grad * share for each, share in zip(plain, shares, strict=True)]
                torch.testing.assert_close(getattr(halfway.model[index], name).grad, parts[0] + parts[1])

    run_jobs(2, program)
