"""Synchronous all-reduce: every backward ends with the same mean of everybody's gradients in every `p.grad`.

A bucket's exchange begins when the bucket is full. When backward has ended the rest leaves, the closing bucket last, all are
waited for, and `p.grad` becomes a view of the combined bucket. The k-th round of this worker meets the k-th round of every other,
whatever each has done in between, and collectives carry their name, so workers need no common order of buckets.

A gradient that is late is exchanged by itself at the end of the round, on all workers if any has one. Addition is linear, so the
result is the same; for the same reason a second backward before the step is one more round over what is there.

There is one pipeline for all buckets (`exchange.py`). What is not compressed needs no thread of its own and no pass over the
values; compressed buckets are taken through their exchanges by the compression thread. What may not happen to a round that comes
to nothing: that residuals, momenta or Q matrices have moved on while no worker steps. So every exchange proposes its new state,
which is committed when all workers' notes say that the round is good. A gradient that is not finite cannot be encoded: its worker
sends zeros in its place and says so in its notes; then everybody's gradients become NaN, as they would without compression
(`GradScaler` skips the step), and nothing is committed. With a `GradScaler`, values are divided by its scale before they are
encoded and multiplied by it afterwards: the scale changes from step to step, and residuals must not.

Invariant: after a round all workers hold the same bits in every `p.grad`, or none at all and an error. A worker whose backward
failed closes the round with weight 0 and says so; then nobody gets a gradient, all others raise `BackwardFailed`, and replicas
stay equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.aggregate.all_reduce import AllReduce, compression_state
from stretto.aggregate.all_reduce.admission import (
    check_compression,
    check_crossing,
    check_native,
    check_order,
    check_payloads,
    warn_of_host_memory,
    warn_of_lost_gradients,
)
from stretto.aggregate.all_reduce.bucket import (
    INFINITE,
    Notes,
    OwnerOf,
    ReducedBucket,
    layout_digest,
    make_buckets,
    no_owner,
)
from stretto.aggregate.all_reduce.compression_thread import CompressionThread
from stretto.aggregate.all_reduce.crossing import Crossing
from stretto.aggregate.all_reduce.exchange import MOST, DirectExchange, ExchangeDriver, Mean, Steps, UnderWay
from stretto.aggregate.all_reduce.planning import Planner
from stretto.aggregate.all_reduce.sparse import exchange_sparse
from stretto.aggregate.all_reduce.unplaced import combine_unplaced
from stretto.collectives.group import Group
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.rounds import ExchangeContext
from stretto.compress.state import CompressionState
from stretto.engine.bucket import gradient_dtype
from stretto.engine.finite import FiniteCheck, is_finite
from stretto.engine.state import copy_buffers, copy_by
from stretto.engine.training import (
    EVERYBODY,
    Named,
    Participation,
    RoundEnd,
    RoundResult,
    Setting,
    TensorsByName,
    Training,
    TrainingState,
)
from stretto.engine.watch import Watch
from stretto.errors import BackwardFailed
from stretto.job import Job
from stretto.plan.auto import chosen_for
from stretto.plan.transfers import TransferPlan

if TYPE_CHECKING:
    from stretto.strategy import Strategy


class SynchronousAllReduce(Training[ReducedBucket]):
    """`AllReduce` + `Synchronous` + `Replicated`."""

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        super().__init__(strategy, job, setting)
        self._strategy, self._job, self._setting = strategy, job, setting
        self._group, self._algorithm = self._find_group()
        compress = strategy.compress
        self._is_lossy = not compress.lossless
        self.engaged = job.world_size > 1 or self._is_lossy or self._works_alone
        self.buckets: list[ReducedBucket] = []
        self._remembered: tuple[TensorsByName, TensorsByName] = ({}, {})  # of parameters without a bucket: they may get one again
        self._finite = FiniteCheck() if setting.check_finite else None
        channel = self._make_channel()
        self._channels = {setting.channel, channel}  # of all collectives of this model
        self._driver = ExchangeDriver(job, self._group, channel, self._algorithm)
        self._thread: CompressionThread | None = None
        self._infinite = False  # a gradient of this round that was to be compressed
        self._sequence = 0  # of this model's collectives: its next number
        self._round = 0
        self._planner = Planner(strategy, job, self._group, self._algorithm, setting) if self.engaged else None
        self._closing_notes = Notes(1.0)  # of the round that is under way across the barrier
        self._crossing: Crossing | None = None
        self._stale: frozenset[Tensor] = frozenset()  # parameters that this round's forward did not wait for
        if strategy.schedule.cross_barrier and self.engaged:
            self._prepare_to_cross()
        if self._is_lossy:
            self.no_second_mean, self.state_text = f"compress={compress!r}", repr(compress)
            if compress.no_abstention is not None:
                self.no_join = f"compress={compress!r}: {compress.no_abstention} (ErrorFeedback(Sign()) can)"
            if job.rank == 0:
                warn_of_lost_gradients(setting.model, compress)
        if self._computes:
            self._thread = CompressionThread()
            job.threads.add(self._thread)
        if self._algorithm == "auto" and self._group.size > 1:
            chosen_for(self._group, "distribute()")

    def _prepare_to_cross(self) -> None:
        asked = f"schedule={self._strategy.schedule!r}"
        self._crossing = Crossing(self._wait_for_one, self._finish_crossing, self._drop, self._job.tracer)
        self.waits_before_use = self.watches_first = True
        self.no_join = f"{asked}: a worker that has run out of data makes no forward, in which updates take place"

    def _find_group(self) -> tuple[Group, str]:
        """The workers among which buckets are exchanged, and by which algorithm."""
        return self._job.world, _all_reduce_of(self._strategy).algorithm

    def _make_channel(self) -> int:
        """The channel of these exchanges."""
        return self._setting.channel

    @property
    def _combiners(self) -> tuple[int, int]:
        """Among how many workers blocks are shared out to be combined, and this one's place among them."""
        return self._group.rank, self._group.size

    @property
    def _closing_notes_all(self) -> bool:
        """Whether the closing bucket has no gradients, and the notes of all parameters."""
        return self._is_lossy or self._crossing is not None

    @property
    def _works_alone(self) -> bool:
        """Whether a worker that is alone in its job has something to do too."""
        return False

    @property
    def _all_have_the_same(self) -> bool:
        """Whether all workers have the same combined gradients, and not each a part of them."""
        return True

    @property
    def _computes(self) -> bool:
        """Whether something is computed between the collectives of an exchange, which takes a thread."""
        return self._is_lossy

    @classmethod
    def check_strategy(cls, strategy: Strategy) -> None:
        check_payloads(strategy, _all_reduce_of(strategy))
        check_order(strategy, _all_reduce_of(strategy))

    @classmethod
    def check(cls, model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, job: Job) -> None:
        check_compression(model, optimizers, strategy)
        check_crossing(optimizers, strategy)
        if _all_reduce_of(strategy).algorithm == "native" and job.world_size > 1:
            check_native(strategy, job)

    def close(self) -> None:
        if self._planner is not None:
            self._planner.close()
        if self._thread is not None:
            self._thread.stop()

    # -- parameters ---------------------------------------------------------------------------------------------------

    def arrange(self, dense: Sequence[Named], sparse: Sequence[Named]) -> Sequence[ReducedBucket]:
        """What compressions remember belongs to parameters, wherever these lie now."""
        before = self.state()  # which also waits for what is under way
        self.buckets = self._make_buckets(dense)
        self._restore(before)
        self._sparse = sparse
        self._bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}
        self._label = f" for gradients of {self._setting.name}, layout {layout_digest(self.buckets, sparse):08x}"
        if self._job.rank == 0 and self._group.is_world and self._algorithm == "auto" and not self._is_lossy:
            warn_of_host_memory(self._setting.name, [bucket.flat.device for bucket in self.buckets], self._job)
        return self.buckets

    def is_current(self) -> bool:
        return self._planner is None or self._planner.is_current()

    def _plan(self, dense: Sequence[Named], owner_of: OwnerOf = no_owner) -> TransferPlan:
        assert self._planner is not None, "without a round there is nothing to plan"
        self.plan = self._planner.make(dense, owner_of)
        return self.plan

    def _make_buckets(self, dense: Sequence[Named]) -> list[ReducedBucket]:
        native_on = self._job.device if self._algorithm == "native" else None
        return make_buckets(dense, self._plan(dense), self._strategy.compress, native_on, apart=self._closing_notes_all)

    def adopt(self, new: Sequence[Tensor], found: Sequence[Named]) -> None:
        copy_by(partial(self._broadcast, f" of new parameters{self._label}"), new)
        if found:
            weight, sparse = self._job.weight, {parameter for _, parameter in self._sparse}
            combined_weight = combine_unplaced(self._job, [(name, p) for name, p in found if p not in sparse], weight)
            exchange_sparse(self._job, [(name, p) for name, p in found if p in sparse], weight, combined_weight)

    def before_forward(self, buffers: Watch | None, *, saved: bool) -> None:
        for channel in self._channels:  # on a GPU, backward waits in a thread of autograd's
            self._job.whereabouts.claim(channel)
        if buffers is not None and self._job.world_size > 1:
            broadcast = partial(self._broadcast, f" of the buffers of {self._setting.name}, for a forward in training mode")
            copy_buffers(self._job, buffers, broadcast, saved=saved)

    def _broadcast(self, label: str, tensor: Tensor) -> Tensor:
        """Rank 0's. It has its number among the collectives of this model's rounds: a worker that is elsewhere in them is found
        out at once."""
        name = (self._setting.channel, self._sequence & 0xFFFFFFFF)
        self._sequence += 1
        return self._job.broadcast(tensor, name=name, label=f"{label} before round {self._round}")

    @property
    def closing(self) -> ReducedBucket:
        return self.buckets[-1]

    # -- sending ------------------------------------------------------------------------------------------------------

    def bucket_ready(self, bucket: ReducedBucket) -> None:
        self._send(bucket, Participation.WORKING, late=False)

    def _send_rest(self, end: RoundEnd) -> None:
        for bucket in self.buckets[:-1]:
            if not bucket.sent:
                self._send(bucket, end.participation, late=bool(end.late))
        if self._is_lossy:
            self._infinite |= not all(is_finite(p.grad) for _, p in self._sparse if p.grad is not None)
        self._send(self.closing, end.participation, late=bool(end.late))

    def _send(self, bucket: ReducedBucket, participation: Participation, *, late: bool) -> None:
        weight = self._weight(participation)
        if weight != 1.0:
            _weigh(bucket.gradients, weight)
        if self._finite is not None:
            for name, view in bucket.named_views:
                self._finite.look(name, view)
        if bucket.has_notes:
            failed, present = participation is Participation.FAILED, participation is not Participation.ABSENT
            bucket.write(Notes(weight, float(late), float(failed), float(present)), self._noted_use(bucket))
        if bucket.state is not None:
            bucket.turn = self._turn(bucket, bucket.state, participation, weight)
        bucket.sent = True
        label = self._label + self._loop_label(participation) if bucket.closes else self._label
        first_number = self._sequence + bucket.number * self._numbers_per_bucket
        self._begin(bucket, self._exchange(bucket, first_number, label))

    def _turn(
        self, bucket: ReducedBucket, state: CompressionState, participation: Participation, weight: float
    ) -> ExchangeContext | None:
        """What this worker's codec begins the bucket's exchange with."""
        state = state.of_absent() if participation is Participation.ABSENT else state
        draw, group = RandomKeys.of_round(self._draw_of(state), self._group.rank), self._group
        return ExchangeContext(bucket.layout, state, draw, group.rank, group.size, self._algorithm, bucket.kept, weight)

    def _draw_of(self, state: CompressionState) -> int:
        """The number of a round by which random numbers are drawn."""
        return state.rounds

    def _noted_use(self, bucket: ReducedBucket) -> Sequence[bool]:
        if self._closing_notes_all:
            return [used for each in self.buckets for used in each.used]
        return bucket.used

    def _weight(self, participation: Participation) -> float:
        return self._job.weight if participation is Participation.WORKING else 0.0

    def _loop_label(self, participation: Participation) -> str:
        """What the workers' loops must agree on. Not under `join`, where a worker that has run out takes no steps."""
        if participation is Participation.ABSENT or self._job.world_size == 1:
            return ""
        return self._setting.loop.text()

    def _begin(self, bucket: ReducedBucket, under_way: UnderWay) -> None:
        arrived = self._trace_of(bucket)
        if self._thread is None:
            bucket.exchange = exchange = DirectExchange(under_way)
            if arrived is not None:
                exchange.when_done(arrived)
            return
        if not self._job.is_here:  # the thread that would take it along is the parent's
            self._job.check_usable()
        for channel in self._channels:
            self._job.whereabouts.carrying(channel, 1)
        bucket.exchange = self._thread.submit(self._carried(under_way, arrived), bucket.flat.device)

    def _trace_of(self, bucket: ReducedBucket) -> Callable[[], None] | None:
        """What to call when the bucket has arrived, where the job is traced."""
        tracer = self._job.tracer
        if tracer is None:
            return None
        name = "closing notes" if not bucket.parameters else f"transfer {bucket.number}"
        what, num_bytes = ", ".join(bucket.names), bucket.num_bytes
        return partial(tracer.span, "transfer", name, tracer.now(), num_bytes=num_bytes, collective=what)

    def _carried(self, under_way: UnderWay, arrived: Callable[[], None] | None) -> UnderWay:
        try:
            yield from under_way
            if arrived is not None:
                arrived()
        finally:
            for channel in self._channels:
                self._job.whereabouts.carrying(channel, -1)

    def _exchange(self, bucket: ReducedBucket, number: int, label: str) -> UnderWay:
        """One bucket's way from this worker's gradients to the mean over all workers."""
        if self._is_lossy:
            return self._checked_exchange(bucket, number, label)
        return self._combine(bucket, bucket.on_wire, number, label)

    def _checked_exchange(self, bucket: ReducedBucket, number: int, label: str) -> UnderWay:
        """The same where some gradients are compressed: their values must be finite, and the closing bucket says if not."""
        if bucket.closes:  # by now the thread has seen the values of all other buckets
            bucket.tail[INFINITE], self._infinite = float(self._infinite), False
            yield from self._combine(bucket, bucket.on_wire, number, label)
            return
        values = bucket.on_wire if bucket.state is None else bucket.in_float32()
        scaler = self._setting.scaler
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        if not is_finite(values):
            self._infinite = True
            values.zero_()
        if scale != 1.0:
            values.mul_(1.0 / scale)
        yield from self._combine(bucket, values, number, label)
        if scale != 1.0:
            values.mul_(scale)
        if bucket.state is not None and bucket.flat.dtype is not torch.float32:
            bucket.gradients.copy_(values)

    def _combine(self, bucket: ReducedBucket, values: Tensor, number: int, label: str) -> UnderWay:
        """Replace `values`, which are this worker's, by the mean over all workers."""
        return self._driver.drive(self._steps_of(bucket, values), number, label, bucket.sending)

    def _steps_of(self, bucket: ReducedBucket, values: Tensor) -> Steps:
        """The collectives that do it."""
        return mean_of_bucket(bucket) if bucket.turn is None else bucket.compression.exchange(values, bucket.turn)

    @property
    def _numbers_per_bucket(self) -> int:
        return MOST if self._computes else 1

    # -- the end of a round -------------------------------------------------------------------------------------------

    def backward_ended(self, end: RoundEnd) -> RoundResult:
        crosses = self._is_crossing
        try:
            if self._crossing is not None:
                self._crossing.check()
            self._send_rest(end)
            self._wait([self.closing] if crosses else self.buckets)
            if crosses and (self.closing.read()[0].failed or self.closing.read()[0].late):
                crosses = False  # nobody steps, or some gradients have yet to be completed
                self._wait(self.buckets)
            result = self._hand_out(end, crosses)
        except BaseException as error:
            crosses = False
            self._drop_gradients()  # they are neither this worker's nor combined
            if isinstance(error, Exception):
                self._let_finish()
            self._end_all(good=False)
            raise
        finally:
            for bucket in self.buckets if not crosses else [self.closing]:
                bucket.turn = bucket.exchange = None
            self._stale = frozenset()
            self._round += 1
            self._sequence += len(self.buckets) * self._numbers_per_bucket
        return result

    def is_complete(self, parameter: Tensor) -> bool:
        bucket = self._bucket_of.get(parameter)
        if bucket is None or bucket.exchange is None or not bucket.exchange.arrived:
            return False
        return not bucket.needs_closing() or (self.closing.exchange is not None and self.closing.exchange.arrived)

    def _wait(self, buckets: Sequence[ReducedBucket]) -> None:
        """Wait for these buckets, also if one fails: the memory of the others is not free before. Then raise the first error."""
        begin_ns, first = time.perf_counter_ns(), None
        with self._job.whereabouts.waiting(self._setting.channel) if self._computes else nullcontext():
            for bucket in buckets:
                try:
                    assert bucket.exchange is not None
                    bucket.exchange.wait()
                except Exception as error:  # also a raw one, of a user's codec
                    first = first or error
        if self._computes:  # otherwise what is waited for counts by itself
            self._job.ledger.count_wait(time.perf_counter_ns() - begin_ns)
        if first is not None:
            raise first

    def _let_finish(self) -> None:
        """After an error: other buckets may be under way, and their memory is not free until they have arrived or failed too."""
        for bucket in self.buckets:
            if bucket.exchange is not None:
                with suppress(Exception):
                    bucket.exchange.wait()

    def _drop_gradients(self) -> None:
        for bucket in self.buckets:
            bucket.let_go()
        for _, parameter in self._sparse:
            parameter.grad = None

    def _hand_out(self, end: RoundEnd, crosses: bool) -> RoundResult:
        """The round is closed: gradients become what everybody's are together, or (`crosses`) will when they have come."""
        closing, closing_shares = self.closing.read()
        if closing.failed:
            self._end_all(good=False)
            self._give_up(end.participation)
            return RoundResult(combined=False, anybody_present=closing.present > 0)
        notes, shares = self._notes_of_buckets(self.buckets, closing, closing_shares)
        used = [[share > 0 for share in each] for each in shares]
        if closing.late:
            self._add_late(end, used)
        if crosses:
            assert self._crossing is not None
            self._closing_notes = closing
            self._crossing.begin(self.buckets[:-1], used[:-1])
        else:
            for bucket, note, flags in zip(self.buckets, notes, used, strict=True):
                self._finish(bucket, note, closing, flags)
                bucket.hand_out(flags)
        self._infinite = False
        if closing.present:
            self._job.ledger.count_round(staleness=0)  # everybody's contribution is of this very round
        self._combine_sparse(self._weight(end.participation), closing.weight)
        if self._finite is not None:
            sparse = (p.grad for _, p in self._sparse if p.grad is not None)
            combined = [*(bucket.gradients for bucket in self.buckets), *sparse]
            self._finite.conclude(self._job, combined, alike=self._all_have_the_same)
        assert self._planner is not None
        arrange_anew = self._planner.round_ended([name for bucket in self.buckets for name in bucket.names], sum(shares, []))
        self.profile = self._planner.profile
        lowest = min((share for each in shares for share in each), default=1.0)
        return RoundResult(
            combined=True,
            anybody_present=closing.present > 0,
            some_unused=lowest < 1.0 - 0.5 / self._job.world_size or not all(all(bucket.used) for bucket in self.buckets),
            final=self._is_lossy and not closing.infinite,
            arrange_anew=arrange_anew,
        )

    def _finish(self, bucket: ReducedBucket, note: Notes, closing: Notes, used: Sequence[bool]) -> None:
        """A bucket has arrived, and the round is closed: what is in it becomes the gradients, and what its exchange proposed the
        state of its compression."""
        bucket.land()
        weight = note.weight if bucket.is_precise else (closing.weight if note.weight else 1.0)
        if weight not in (1.0, 0.0) and bucket.compression.hands_out == "mean":
            bucket.gradients.div_(weight)
        if closing.infinite:
            bucket.gradients.fill_(torch.nan)
        if bucket.turn is not None and not all(used):
            # A parameter without a gradient anywhere keeps p.grad = None, so what was said of it in this round is not heard.
            places = zip(bucket.layout.places, used, strict=True)
            bucket.turn.state.keep_as_it_was([place for place, somewhere in places if not somewhere])
        self._end_exchange(bucket, good=not closing.infinite and closing.present > 0)

    # -- across the barrier -------------------------------------------------------------------------------------------

    @property
    def _is_crossing(self) -> bool:
        """Whether rounds are left under way when backward ends. The first ones are not: it is watched how the model computes."""
        return self._crossing is not None and self._planner is not None and not self._planner.is_watching

    def _wait_for_one(self, bucket: ReducedBucket) -> None:
        self._wait([bucket])

    def _finish_crossing(self, bucket: ReducedBucket, used: Sequence[bool]) -> None:
        try:
            self._finish(bucket, self._closing_notes, self._closing_notes, used)
        finally:
            bucket.turn = bucket.exchange = None

    def _drop(self, bucket: ReducedBucket) -> None:
        self._end_exchange(bucket, good=False)
        bucket.turn = bucket.exchange = None

    def round_begins(self) -> None:
        if self._crossing is not None:
            self._stale = self._crossing.stale
            self._crossing.settle_all()

    def is_stale(self, parameter: Tensor) -> bool:
        return parameter in self._stale or (self._crossing is not None and self._crossing.is_stale(parameter))

    def before_use(self, parameters: Iterable[Tensor]) -> None:
        if self._crossing is not None:
            self._crossing.settle(parameters)

    def before_load(self) -> None:
        if self._crossing is not None:
            self._crossing.settle_or_forget()

    def before_step(self, optimizer: Optimizer) -> Set[Tensor] | None:
        return EVERYBODY if self._crossing is None else self._crossing.note_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        if self._crossing is not None:
            self._crossing.step_taken()

    # -- notes --------------------------------------------------------------------------------------------------------

    def _notes_of_buckets(
        self, buckets: Sequence[ReducedBucket], closing: Notes, shares: list[float]
    ) -> tuple[list[Notes], list[list[float]]]:
        """Each bucket's own; or, where compressed payloads carry none, what the closing bucket says for all of them."""
        if not self._closing_notes_all:
            read = [bucket.read() for bucket in buckets[:-1]]
            return [note for note, _ in read] + [closing], [share for _, share in read] + [shares]
        bounds = [0]
        for bucket in buckets:
            bounds.append(bounds[-1] + len(bucket.parameters))
        return [closing] * len(buckets), [shares[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]

    def _give_up(self, participation: Participation) -> None:
        """Some worker's backward failed: nobody has a combined gradient. Those whose own did not fail get to know."""
        self._drop_gradients()
        failed = self._job.gather_object(participation is Participation.FAILED)
        if participation in (Participation.WORKING, Participation.EMPTY):
            raise BackwardFailed([rank for rank, theirs in enumerate(failed) if theirs])

    def _add_late(self, end: RoundEnd, used: list[list[bool]]) -> None:
        """One more exchange, of the gradients that came after their bucket had left."""
        places = [(bucket, slot) for bucket in self.buckets for slot in range(len(bucket.parameters))]
        mine = [float(bucket.parameters[slot] in end.late) for bucket, slot in places]
        flags = self._job.all_reduce(torch.tensor(mine, dtype=torch.float32, device="cpu"), op="max", algorithm="ring")
        for number in flags.nonzero().flatten().tolist():
            bucket, slot = places[number]
            parameter = bucket.parameters[slot]
            late = end.late.get(parameter, torch.zeros_like(parameter)).to(gradient_dtype(parameter)).contiguous().clone()
            _weigh(late, self._weight(end.participation))
            if self._finite is not None:
                self._finite.look(bucket.names[slot], late)
            bucket.add(slot, self._job.all_reduce(late, op="mean", algorithm="ring"))
            used[bucket.number][slot] = True

    def _combine_sparse(self, weight: float, combined_weight: float) -> None:
        if self._finite is not None and weight:
            for name, parameter in self._sparse:
                self._finite.look(name, parameter.grad)
        exchange_sparse(self._job, self._sparse, weight, combined_weight)

    # -- what compressions remember -----------------------------------------------------------------------------------

    def _end_exchange(self, bucket: ReducedBucket, *, good: bool) -> None:
        """What the exchange of a bucket proposed becomes the state, or is forgotten."""
        if bucket.turn is not None and bucket.state is not None:
            if good:
                bucket.turn.state.commit()
                bucket.state.rounds = bucket.turn.state.rounds
            else:
                bucket.turn.state.discard()

    def _end_all(self, *, good: bool) -> None:
        self._infinite = False
        for bucket in self.buckets:
            self._end_exchange(bucket, good=good)

    def state(self) -> TrainingState:
        if self._crossing is not None:
            self._crossing.settle_all()
        own, shared = compression_state.export(self.buckets)
        rounds = next((bucket.state.rounds for bucket in self.buckets if bucket.state is not None), 0)
        return TrainingState(rounds, self._remembered[0] | own, self._remembered[1] | shared)

    def check_state(self, saved: Mapping[str, Mapping[str, Any]]) -> str | None:
        return compression_state.check(saved, compression_state.compressed_in(self.buckets))

    def load_state(self, state: TrainingState) -> None:
        self.before_load()
        for bucket in self.buckets:
            bucket.forget()
        self._restore(state)

    def _restore(self, state: TrainingState) -> None:
        """The buckets must be fresh."""
        compression_state.restore(self.buckets, state, *self._combiners)
        here = {name for bucket in self.buckets for name in bucket.names}
        own, shared = ({name: kinds for name, kinds in part.items() if name not in here} for part in (state.own, state.shared))
        self._remembered = (own, shared)

    def shared_out(self, everybody: Sequence[TensorsByName]) -> TensorsByName:
        return compression_state.mean_of(everybody, self._job.world_size)


def _all_reduce_of(strategy: Strategy) -> AllReduce:
    assert isinstance(strategy.aggregate, AllReduce), "another way of training"
    return strategy.aggregate


def mean_of_bucket(bucket: ReducedBucket) -> Steps:
    """The exchange of what is not compressed."""
    yield Mean(bucket.on_wire, bucket.tail if bucket.notes_on_host else None)


def _weigh(gradient: Tensor, weight: float) -> None:
    if weight == 0.0:
        gradient.zero_()  # not times 0: the mean over an empty batch is NaN
    else:
        gradient.mul_(weight)
