"""Training by `LocalSGD` and `AllReduce`: after every so many steps, what workers have come to is brought together.

The exchange is made at the end of `optimizer.step()`, when the last of the given optimizers has taken the step that is due. It
waits for the slowest worker; if a worker has died, it raises `PeerLost`, as every collective does.

    outer=Average(), uncompressed        x <- mean of x                            the weights are exchanged
    otherwise                            theta <- outer(theta, mean of theta - x)  the differences are, encoded as `compress` says

theta is in float32, also where parameters are not: x is theta rounded. Theta and the velocity are the same on all workers.

The first `start_after` steps are synchronous and are left to the Training for these (`_before`); then no gradients are sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.aggregate.all_reduce import compression_state
from stretto.aggregate.all_reduce.admission import warn_of_lost_gradients
from stretto.aggregate.all_reduce.exchange import ExchangeDriver, UnderWay
from stretto.aggregate.local_sgd import admission, optimizer_state
from stretto.aggregate.local_sgd.delta_exchange import DeltaExchange
from stretto.aggregate.own_weights.flat_weights import FlatWeights, sum_of_squares
from stretto.aggregate.own_weights.training import WHOLE, OwnWeights
from stretto.compress.codec import Compression
from stretto.compress.none import NoCompression
from stretto.engine.bucket import Bucket
from stretto.engine.training import Named, RoundEnd, RoundResult, Setting, TensorsByName, Training, TrainingState
from stretto.engine.watch import Watch
from stretto.errors import StrettoError
from stretto.job import Job
from stretto.plan.auto import chosen_for
from stretto.sync.growing_period import chance_in, next_period

if TYPE_CHECKING:
    from stretto.strategy import Strategy

LAST, PERIOD, ROUNDS, THETA, VELOCITY, UNDER_WAY, BUFFERS_UNDER_WAY = OURS = (
    "last exchange", "period", "rounds of compression", "outer weights", "outer velocity", "outer gradient under way",
    "buffers under way",
)  # fmt: skip


class LocalAveraging(OwnWeights):
    """`AllReduce` + `LocalSGD` + `Replicated`."""

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        super().__init__(strategy, job, setting)
        self._sync, self._outer = admission.sync_of(strategy), admission.sync_of(strategy).outer
        self._algorithm = admission.all_reduce_of(strategy).algorithm
        is_plain = strategy.compress.lossless and not self._outer.remembers
        self._is_plain = is_plain and self._sync.grow_to is None  # the mean of weights, and not of differences
        self.period = self._sync.every  # how many steps now lie between exchanges
        self.engaged = job.world_size > 1 or not is_plain or self._sync.optimizer_state == "reset"
        self._before: Training[Any] | None = None  # takes the synchronous steps at the beginning
        self._last = 0  # the step after which weights were exchanged last
        self._theta: Tensor | None = None  # what all workers held then, where it is needed
        self._velocity: Tensor | None = None
        if self.engaged:
            self._channel = job.new_channel()
            self._driver = ExchangeDriver(job, job.world, self._channel, self._algorithm)
            self._sequence = 0  # of this model's collectives: its next number
            text = f"LocalSGD(outer={self._outer!r}, start_after={self._sync.start_after}), compress={strategy.compress!r}"
            self.state_text = f"sync={text}"
            if self._algorithm == "auto" and job.world_size > 1:
                chosen_for(job.world, "distribute()")
            if job.rank == 0 and not strategy.compress.lossless:
                warn_of_lost_gradients(setting.model, strategy.compress)

    @classmethod
    def check_strategy(cls, strategy: Strategy) -> None:
        admission.check_answers(strategy)

    @classmethod
    def check(cls, model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, job: Job) -> None:
        super().check(model, optimizers, strategy, job)
        admission.check_model(model, optimizers, strategy, job)

    # -- exchanges ----------------------------------------------------------------------------------------------------

    def begun(self) -> None:
        """From here on workers train by themselves, until the next exchange."""
        self._last, self.period = self.steps, self._sync.every
        self._exchange, self._plain = self._make_exchange(self._strategy.compress), self._make_exchange(NoCompression())
        self._theta = None if self._is_plain else self.weights.read()
        self._velocity = self.weights.zeros() if self._outer.remembers else None

    def _make_exchange(self, compress: Compression, named: Sequence[Named] | None = None) -> DeltaExchange:
        """Of these parameters (None: all)."""
        shapes = [(name, tuple(parameter.shape)) for name, parameter in (self._named if named is None else named)]
        return DeltaExchange(shapes, compress, self._job.world, self._algorithm, self.weights.device)

    def stepped(self, step: int) -> None:
        if step <= self._sync.start_after:
            self.is_together = True
            if step == self._sync.start_after:
                self.wants_arranging = self._before is not None
                if self._named:  # of a world of one, where nothing has to be combined before
                    self.begun()
        elif step - self._last >= self.period:
            self._come_together(step)

    def _come_together(self, step: int) -> None:
        tracer = self._job.tracer
        begin_ns = 0 if tracer is None else tracer.now()
        if self._theta is None:
            self.weights.write(self._mean_weights())
        else:
            self._move(self._theta)
            self.weights.write(self._theta)
        self._last = step
        self.average_buffers()
        if self._sync.optimizer_state == "reset":
            optimizer_state.reset(self._optimizers)
        elif self._sync.optimizer_state == "average":
            optimizer_state.average(self._optimizers, self.average, self._job.gather_object)
        self._setting.loop.round_ended()
        self._job.ledger.count_round()
        self.is_together = True
        if tracer is not None:
            tracer.span("transfer", f"weights after step {step}", begin_ns, num_bytes=4 * self.weights.numel)

    def _mean_weights(self) -> Tensor:
        values = self.weights.read()
        if self._setting.check_finite:
            self._wait_for(self._plain.check(values, *self._call(self._plain)))
        return self.average(values)

    def _move(self, theta: Tensor) -> None:
        """theta <- outer(theta, mean of theta - x)"""
        delta = torch.sub(theta, self.weights.read())
        try:
            if self._setting.check_finite and self._strategy.compress.lossless:
                self._wait_for(self._plain.check(delta, *self._call(self._plain)))
            squares = None if self._sync.grow_to is None else sum_of_squares(delta).float()
            self._wait_for(self._exchange.mean(delta, *self._call(self._exchange), squares))
        except BaseException:
            self._exchange.end(good=False)
            raise
        self._exchange.end(good=True)
        if squares is not None:
            self._set_period(float(squares), float(sum_of_squares(delta)))
        velocity = delta if self._velocity is None else self._velocity
        for part, rate in self._rates(self.weights):
            self._outer.move(theta[part], delta[part], velocity[part], rate)

    def _set_period(self, mean_of_squares: float, square_of_mean: float) -> None:
        """The next period, from how much workers agree: see `growing_period.py`."""
        assert self._sync.grow_to is not None
        chance = chance_in(mean_of_squares, square_of_mean, self._job.world_size)
        self.period = next_period(self.period, chance, self._sync.every, self._sync.grow_to)
        if (tracer := self._job.tracer) is not None:
            values = {"period": float(self.period), "chance": chance}
            tracer.sample(f"local steps of {self._setting.name}", tracer.now(), values)

    def _rates(self, weights: FlatWeights) -> Iterator[tuple[slice, float]]:
        """Each part of the vector with its inner learning rate; the whole vector with 1 where the rate is not needed."""
        if not self._outer.divides_by_rate:
            yield slice(0, weights.numel), 1.0
            return
        rates = {p: float(group["lr"]) for each in self._optimizers for group in each.param_groups for p in group["params"]}
        start, stop, rate = 0, 0, 1.0
        for parameter, part in zip(weights.parameters, weights.parts, strict=True):
            if rates[parameter] != rate and stop > start:
                yield slice(start, stop), rate
                start = stop
            stop, rate = part.stop, rates[parameter]
        yield slice(start, stop), rate

    def average(self, values: Tensor) -> Tensor:
        self._wait_for(self._plain.mean(values, *self._call(self._plain)))
        return values

    def _call(self, exchange: DeltaExchange) -> tuple[ExchangeDriver, int, str]:
        """What an exchange is called with: its driver, its first number, and a label on which all workers must agree."""
        number, self._sequence = self._sequence, self._sequence + exchange.num_numbers
        label = f" for weights of {self._setting.name}, after step {self.steps}{self._setting.loop.text()}"
        return self._driver, number, label

    def _wait_for(self, under_way: UnderWay) -> None:
        pending = next(under_way, None)
        while pending is not None:
            try:
                pending.wait()
            except StrettoError as failed:  # the collectives beside it have to end too, before their memory is free
                pending = under_way.throw(failed)
            else:
                pending = next(under_way, None)

    # -- synchronous steps at the beginning ---------------------------------------------------------------------------

    @property
    def _is_early(self) -> bool:
        """Whether the next step is synchronous. One worker by itself has nothing to combine."""
        return self.steps < self._sync.start_after and self._job.world_size > 1

    def arrange(self, dense: Sequence[Named], sparse: Sequence[Named]) -> Sequence[Bucket]:
        self.wants_arranging = False
        if self._is_early:
            if self._before is None:
                setting = replace(self._setting, channel=self._job.new_channel())
                self._before = admission.synchronous(self._strategy).bind(self._job, setting)
                self._named, self.replicas_differ = [], False
            return self._before.arrange(dense, sparse)
        if self._before is not None:
            self._before.close()
            self._before = None
        return super().arrange(dense, sparse)

    def is_current(self) -> bool:
        return self._is_early == (self._before is not None) and (self._before is None or self._before.is_current())

    def adopt(self, new: Sequence[Tensor], found: Sequence[Named]) -> None:
        if self._before is not None:
            self._before.adopt(new, found)

    def before_forward(self, buffers: Watch | None, *, saved: bool) -> None:
        if self._before is not None:
            self._before.before_forward(buffers, saved=saved)

    def round_begins(self) -> None:
        if self._before is not None:
            self._before.round_begins()

    def bucket_ready(self, bucket: Bucket) -> None:
        assert self._before is not None, "there are no buckets"
        self._before.bucket_ready(bucket)

    def backward_ended(self, end: RoundEnd) -> RoundResult:
        if self._before is None:
            return RoundResult(combined=False)
        result = self._before.backward_ended(end)
        self.profile, self.plan = self._before.profile, self._before.plan
        return result

    def is_complete(self, parameter: Tensor) -> bool:
        return self._before is not None and self._before.is_complete(parameter)

    def close(self) -> None:
        if self._before is not None:
            self._before.close()
        super().close()

    # -- what is remembered -------------------------------------------------------------------------------------------

    def shared_extra(self) -> dict[str, Tensor]:
        numbers = {LAST: self._last, PERIOD: self.period, ROUNDS: self._exchange.rounds}
        extra = {kind: torch.tensor(number, device="cpu") for kind, number in numbers.items()}
        return extra | {kind: value for kind, value in ((THETA, self._theta), (VELOCITY, self._velocity)) if value is not None}

    def load_shared_extra(self, saved: Mapping[str, Tensor]) -> None:
        if LAST in saved:
            self._last = int(saved[LAST])
        if PERIOD in saved and self._sync.grow_to is not None:
            self.period = min(max(int(saved[PERIOD]), self._sync.every), self._sync.grow_to)
        if self._theta is not None and THETA in saved:
            self._theta = saved[THETA]
        if self._velocity is not None and VELOCITY in saved:
            self._velocity = saved[VELOCITY]

    def state(self) -> TrainingState:
        found = super().state()
        if not found.shared:
            return found
        own: TensorsByName = {}
        shared: TensorsByName = {}
        for exchange in self.exchanges():
            for whole, part in zip((own, shared), exchange.export(), strict=True):
                whole |= part
        return TrainingState(found.rounds, own, _merged(found.shared, shared))

    def exchanges(self) -> Sequence[DeltaExchange]:
        """Those that remember something from one time to the next."""
        return [self._exchange]

    def load_remembered(self, own: TensorsByName, shared: TensorsByName) -> None:
        ours, theirs = split(shared)
        super().load_remembered({}, ours)
        self._exchange = self._make_exchange(self._strategy.compress)
        self._exchange.restore(int(ours.get(WHOLE, {}).get(ROUNDS, 0)), own, theirs)

    def check_state(self, saved: Mapping[str, Mapping[str, Any]]) -> str | None:
        ours, theirs = split(saved)
        known = [(name, p) for name, p in self._setting.model.named_parameters() if p.requires_grad]
        compress = self._strategy.compress
        answers = ((name, p.numel(), compress.for_parameter(name, tuple(p.shape))) for name, p in known)
        return super().check_state(ours) or compression_state.check(theirs, answers)

    def shared_out(self, everybody: Sequence[TensorsByName]) -> TensorsByName:
        return compression_state.mean_of(everybody, self._job.world_size)


def split(saved: Mapping[str, Mapping[str, Any]]) -> tuple[TensorsByName, TensorsByName]:
    """What is saved of the outer optimizer, and what of compressions."""
    ours: TensorsByName = {}
    theirs: TensorsByName = {}
    for name, values in saved.items():
        for kind, value in values.items():
            (ours if kind in OURS else theirs).setdefault(name, {})[kind] = value
    return ours, theirs


def _merged(one: TensorsByName, other: TensorsByName) -> TensorsByName:
    return {name: {**one.get(name, {}), **other.get(name, {})} for name in dict.fromkeys((*one, *other))}
