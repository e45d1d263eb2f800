"""Synchronous training with servers: they only sum, and every worker steps with its own optimizer, whatever that is.

A bucket is some ranges of the servers. When it is full its gradients are pushed, range by range, and their sum is pulled into
the same memory: the servers answer when everybody's have come, so a pull is under way as soon as its push is. What workers say
of themselves (notes: weights, failed backwards, unused parameters) is little, and goes by all-reduce in the closing bucket,
which has no gradients. Everything else (rounds, late gradients, failures, buffers) is that of synchronous all-reduce.

The memory of a bucket may be pushed from and pulled into at once: the servers answer a pull after they have acknowledged the
push, and the acknowledgement comes first.

With a schedule that orders transfers (`Tic`, `Tac`, `Priority`, `Caramel`), pushes wait for their turn at this worker, and
answers to its pulls at the servers (`request_order.py`).
Across the barrier a bucket is waited for where its parameters are read, as in all-reduce.

When parameters are frozen, unfrozen or added, buckets are made anew, and so is what the servers serve.

Precision: values travel and are added as float32. Gradients in half precision become float32 before they are pushed and are
rounded once, after the sum. What float32 cannot hold (float64, complex numbers) is combined by all-reduce instead. Gradients
that are compressed, of whatever precision, travel as their codec writes them, and so does their mean (`encoded_rounds.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.aggregate.all_reduce.admission import check_compression, check_crossing
from stretto.aggregate.all_reduce.bucket import Notes, ReducedBucket
from stretto.aggregate.all_reduce.compression_thread import ThreadedExchange
from stretto.aggregate.all_reduce.exchange import UnderWay
from stretto.aggregate.all_reduce.planning import BytesOf
from stretto.aggregate.all_reduce.training import SynchronousAllReduce
from stretto.aggregate.hierarchy.hosts import groups_of
from stretto.aggregate.hierarchy.value import Hierarchy
from stretto.aggregate.parameter_server.client import Pull, PulledPayload, Push
from stretto.aggregate.parameter_server.encoded_rounds import EncodedRounds, RangePlace, codecs_of, served_parameters
from stretto.aggregate.parameter_server.encoding import payload_bytes, refusal
from stretto.aggregate.parameter_server.layout import RANGE_BYTES
from stretto.aggregate.parameter_server.messages import PushTaken, ValuesPulled
from stretto.aggregate.parameter_server.network import ServerNetwork, network_of, number_dedicated
from stretto.aggregate.parameter_server.server_record import ServerLedger
from stretto.aggregate.parameter_server.service import ServedModel
from stretto.aggregate.parameter_server.transfer_cost import cost_with_servers
from stretto.aggregate.parameter_server.transfer_order import range_bytes_of, urgency_with_servers
from stretto.aggregate.parameter_server.value import ParameterServer
from stretto.collectives.group import Group
from stretto.collectives.messages import Name
from stretto.collectives.plan import Kind
from stretto.collectives.request import InProgress, Pending
from stretto.collectives.urgency import Urgency
from stretto.compress.rounds import ExchangeContext
from stretto.compress.state import SERVER, CompressionState
from stretto.engine.training import (
    Named,
    Participation,
    RoundEnd,
    RoundResult,
    Setting,
    TensorsByName,
    TrainingState,
)
from stretto.errors import ConfigurationError, PeerLost, StrettoError, WireError
from stretto.job import Job
from stretto.plan.profile import TransferCost
from stretto.protocol.loop import Running
from stretto.schedule.orders import Buckets

if TYPE_CHECKING:
    from stretto.strategy import Strategy

SERVED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # what float32 can hold
LOSS_S = 2.0  # between two ways to find out that a worker has died
log = logging.getLogger("stretto.parameter_server")
BUCKETS = Buckets(bytes=1 << 20)  # a bucket has no start-up here beyond those of its ranges, so small ones begin early


class SynchronousServers(SynchronousAllReduce):
    """`ParameterServer` + `Synchronous` + `Replicated`."""

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        self._service: Running | None = None
        self._network: ServerNetwork | None = None
        self._ranges: dict[ReducedBucket, list[RangePlace]] = {}
        self._range_bytes = RANGE_BYTES
        self._clock_of: dict[ReducedBucket, int] = {}  # the round that a bucket has left in
        self._clock = 0  # rounds since what is served was arranged
        self._meeting: Pending | None = None  # of all workers, in the round under way
        self._encoded: EncodedRounds | None = None  # where gradients are compressed
        self._left_over: dict[str, Tensor] = {}  # what servers shall go on with, on rank 0
        super().__init__(replace(strategy, schedule=BUCKETS) if strategy.schedule == Buckets() else strategy, job, setting)
        if job.world_size > 1:
            self._network = network_of(job, servers_of(strategy), len(clients_of(strategy, job)))
        if self._planner is not None:
            self._planner.measure, self._planner.bytes_of = self._measure, self._bytes_of

    @classmethod
    def check_strategy(cls, strategy: Strategy) -> None:
        check_codec(strategy, steps=False)
        if servers_of(strategy).answers is not None:
            raise ConfigurationError(
                f"{strategy.aggregate!r} with sync={strategy.sync!r}: there servers answer with means of gradients, which "
                f"compress= writes both ways, and not with values.\nLeave answers= out and write compress=, or write another "
                f"sync=, such as StaleSynchronous(3)."
            )
        if servers_of(strategy).snapshots is not None:
            raise ConfigurationError(
                f"{strategy.aggregate!r} with sync={strategy.sync!r}: there the workers step and have everything, and "
                f"servers have sums, of which nothing could go on.\nLeave snapshots= out and call stretto.save, or write another "
                f"sync=, such as StaleSynchronous(3)."
            )

    @classmethod
    def check(cls, model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, job: Job) -> None:
        check_compression(model, optimizers, strategy)
        servers_of(strategy).num_servers(len(clients_of(strategy, job)), number_dedicated(job))
        check_crossing(optimizers, strategy)

    def _find_group(self) -> tuple[Group, str]:
        return self._job.world, "butterfly"  # of the notes, which are small

    def _make_channel(self) -> int:
        return self._job.world.new_channel()

    @property
    def _combiners(self) -> tuple[int, int]:
        return 0, 1  # servers combine: no worker has blocks

    @property
    def _closing_notes_all(self) -> bool:
        return True

    @property
    def _computes(self) -> bool:
        return True

    # -- what is served -----------------------------------------------------------------------------------------------

    def arrange(self, dense: Sequence[Named], sparse: Sequence[Named]) -> Sequence[ReducedBucket]:
        buckets = super().arrange(dense, sparse)
        if self._network is None:
            return buckets
        assert self.plan is not None, "arranged"
        self._broadcast(f" to arrange them{self._label}", torch.zeros(1, device="cpu"))  # all have the same, or find out
        if self._service is not None:
            self._network.end(self._service)
            self._service = self._encoded = None
        served = [bucket for bucket in buckets if bucket.flat.dtype in SERVED_DTYPES or bucket.state is not None]
        parameters = [parameter for bucket in served for parameter in served_parameters(bucket)]
        model = ServedModel(
            parameters=parameters,
            servers=self._network.servers,
            workers=clients_of(self._strategy, self._job),
            replicas=servers_of(self._strategy).replicas,
            range_bytes=range_bytes_of(self.plan, parameters, len(self._network.servers)),
            codecs=codecs_of(served),
        )
        self._range_bytes = model.range_bytes
        if model.parameters:
            self._service, self._clock = self._network.begin(model, self), 0
        self._ranges = _ranges_of(buckets, model)
        if self._service is not None and model.codecs:
            patience_s = self._job.timeouts.arrive_s
            self._encoded = EncodedRounds(self._service, model, self._ranges, self._all_of, patience_s)
            self._give_left_over()
        return buckets

    def _measure(self, what: str) -> TransferCost:
        assert self._network is not None
        return cost_with_servers(self._job, self._network, servers_of(self._strategy).replicas, self._range_bytes)

    def _bytes_of(self, name: str, parameter: Tensor) -> BytesOf:
        """Pushed and pulled. A mean is written by the codec that has written what it is the mean of."""
        dense = 2 * parameter.nbytes
        if parameter.dtype not in SERVED_DTYPES:
            return BytesOf(dense, dense)
        shape = tuple(parameter.shape)
        one_way = payload_bytes(self._strategy.compress.for_parameter(name, shape), name, shape)
        return BytesOf(2 * one_way, dense)

    def server_ledgers(self) -> dict[int, ServerLedger]:
        """What the servers have counted of this model; nothing where there is one worker and no server."""
        return {} if self._network is None or self._service is None else self._network.ledgers(self._service)

    def close(self) -> None:
        super().close()
        if self._network is not None and self._service is not None and not self._job.closed:
            self._network.end(self._service)
            self._service = self._encoded = None

    # -- what servers have left over ----------------------------------------------------------------------------------

    def state(self) -> TrainingState:
        state = super().state()
        return state if self._job.rank else state._replace(own=_with_left_over(state.own, self._ask_left_over()))

    def before_release(self) -> None:
        super().before_release()
        if self._job.rank == 0:
            self._left_over = dict(self._ask_left_over())  # for `state`, once there is nobody to ask

    def _ask_left_over(self) -> Mapping[str, Tensor]:
        if self._encoded is None:
            return self._left_over
        try:
            return self._encoded.left_over()
        except PeerLost as lost:
            log.warning("what servers of %s had left over of a codec is lost with them: %s", self._setting.name, lost)
            return {}

    def _restore(self, state: TrainingState) -> None:
        """What was rank 0's goes to the servers. What others have of the kind was their part among workers that combined blocks:
        it becomes theirs to say, P times, for a P-th of that reaches the mean."""
        goes_to_servers = self._job.rank == 0 and self._network is not None
        own, self._left_over = _without_left_over(state.own, 0 if goes_to_servers else self._job.world_size)
        super()._restore(state._replace(own=own))

    def load_state(self, state: TrainingState) -> None:
        super().load_state(state)
        if self._encoded is not None:
            self._encoded.forget()
            self._give_left_over()

    def _give_left_over(self) -> None:
        if self._job.rank == 0 and self._encoded is not None:
            self._encoded.go_on_with(self._left_over)
        self._left_over = {}

    # -- rounds -------------------------------------------------------------------------------------------------------

    def _send(self, bucket: ReducedBucket, participation: Participation, *, late: bool) -> None:
        self._clock_of[bucket] = self._clock  # its exchange may begin when this round is over for the others
        super()._send(bucket, participation, late=late)

    def _turn(
        self, bucket: ReducedBucket, state: CompressionState, participation: Participation, weight: float
    ) -> ExchangeContext | None:
        turn = super()._turn(bucket, state, participation, weight)
        if turn is not None and self._encoded is not None:
            self._encoded.begin(bucket, turn, self._clock)
        return turn

    def _finish(self, bucket: ReducedBucket, note: Notes, closing: Notes, used: Sequence[bool]) -> None:
        is_good = not closing.infinite and closing.present > 0
        if self._encoded is not None:
            self._encoded.concluded(bucket, [not (is_good and somewhere) for somewhere in used])
        super()._finish(bucket, note, closing, used)

    def _end_exchange(self, bucket: ReducedBucket, *, good: bool) -> None:
        if self._encoded is not None:
            self._encoded.concluded(bucket, [not good] * len(bucket.names))
        super()._end_exchange(bucket, good=good)

    def _begin(self, bucket: ReducedBucket, under_way: UnderWay) -> None:
        if self._meeting is None and self._job.world_size > 1:
            self._meeting = self._meet()
        super()._begin(bucket, under_way)

    def _meet(self, part_of: Name | None = None) -> Pending:
        """Servers cannot tell who is elsewhere, in another round or in another collective; a meeting of all workers finds out."""
        nothing, name = torch.empty(0, dtype=torch.uint8, device="cpu"), (self._setting.channel, self._sequence & 0xFFFFFFFF)
        return self._job.world.start(Kind.BARRIER, nothing, "dissemination", name=name, label=self._label, part_of=part_of)

    def backward_ended(self, end: RoundEnd) -> RoundResult:
        try:
            return super().backward_ended(end)
        finally:
            self._clock += 1
            self._meeting = None

    def _combine(self, bucket: ReducedBucket, values: Tensor, number: int, label: str) -> UnderWay:
        if self._service is None or not self._ranges[bucket]:
            return super()._combine(bucket, values, number, label)
        if bucket.turn is not None and self._encoded is not None:
            return self._encoded.drive(bucket, values, self._urgency_of(bucket))
        return self._by_servers(self._service, self._clock_of[bucket], bucket, values)

    def _by_servers(self, service: Running, clock: int, bucket: ReducedBucket, values: Tensor) -> UnderWay:
        flat = values if values.dtype is torch.float32 and values.device.type == "cpu" else values.to("cpu", torch.float32)
        yield self._sum(service, clock, bucket, flat)
        flat.mul_(1.0 / self._job.world_size)
        if flat is not values:
            values.copy_(flat)

    def _sum(self, service: Running, clock: int, bucket: ReducedBucket, flat: Tensor) -> InProgress:
        """Replace `flat`, which is this worker's, by the sum over all that push."""
        memory, answers, urgency = flat.numpy(), [], self._urgency_of(bucket)
        for index, start, stop in self._ranges[bucket]:
            part = memory[start:stop].data
            answers.append(service.request(Push(index, clock, part, {}, 0, urgency=urgency)))
            answers.append(service.request(Pull(index, clock + 1, part, urgency=urgency)))
        return self._all_of(answers)

    def _all_of(self, answers: Sequence[Future[Any]]) -> InProgress:
        return Answers(answers, len(clients_of(self._strategy, self._job)))

    def _urgency_of(self, bucket: ReducedBucket) -> Urgency | None:
        assert self._network is not None
        return urgency_with_servers(bucket.sending.urgency, self._range_bytes, len(self._network.servers))

    def _wait(self, buckets: Sequence[ReducedBucket]) -> None:
        if self._meeting is not None:
            try:
                self._meeting.wait()  # everybody has begun the round, or it is said who has not
            except WireError as error:
                self._end_service(error)
                raise
        if self._service is not None:
            self._give_up_late(buckets)
        try:
            super()._wait(buckets)
        except IncompleteSum as incomplete:
            raise self._whoever_is_lost() or incomplete from None

    def _whoever_is_lost(self) -> PeerLost | None:
        """The worker that has left the servers has most likely died: then the job finds out at about the same time."""
        lost = {} if self._job.wire is None else self._job.wire.lost
        deadline = time.monotonic() + LOSS_S
        while not lost and time.monotonic() < deadline:
            time.sleep(0.01)
        return next(iter(lost.values()), None)

    def _end_service(self, error: WireError) -> None:
        """What servers will not answer fails with this error, now and in all later rounds: workers are not in the same round."""
        if self._network is not None and self._service is not None:
            self._network.give_up(self._service, error)

    def _give_up_late(self, buckets: Sequence[ReducedBucket]) -> None:
        """All are in the round, so what is missing after so long will not come."""
        patience_s = self._job.timeouts.arrive_s
        deadline = time.monotonic() + patience_s
        for bucket in buckets:
            assert isinstance(bucket.exchange, ThreadedExchange)
            while not bucket.exchange.has_ended(0.25):
                if time.monotonic() > deadline:
                    self._end_service(self._too_late(patience_s))
                    return

    def _too_late(self, patience_s: float) -> WireError:
        return WireError(
            f"gradients of {self._setting.name}: all workers have begun the round, and the servers have not got everybody's "
            f"within {patience_s:g} s.\nA worker is stuck in its backward: find out with py-spy dump, or allow more time: "
            f"stretto.init(timeouts=Timeouts(arrive_s=...))."
        )


class IncompleteSum(WireError):
    """The sum of a round is not that of all workers."""


class Answers(InProgress):
    """Several answers of servers in a round; done when all have come, with the first error if there was one."""

    def __init__(self, answers: Sequence[Future[Any]], num_workers: int) -> None:
        super().__init__()
        self._missing = len(answers)
        self._num_workers = num_workers
        self._first_error: StrettoError | None = None
        for answer in answers:
            answer.add_done_callback(self._came)

    def _came(self, answer: Future[Any]) -> None:
        problem = answer.exception() or self._missing_in(answer.result())
        with self._lock:
            self._missing -= 1
            is_last = self._missing == 0
            if isinstance(problem, StrettoError):
                self._first_error = self._first_error or problem
            elif problem is not None:
                self._first_error = self._first_error or StrettoError(f"a request to a server has failed: {problem!r}")
        if is_last:
            self.finish(self._first_error)

    def _missing_in(self, answer: PushTaken | ValuesPulled | PulledPayload) -> IncompleteSum | None:
        """Servers wait for nobody that has left, and a mean without somebody would be wrong."""
        answer = answer.header if isinstance(answer, PulledPayload) else answer
        if isinstance(answer, ValuesPulled) and answer.weight != self._num_workers:
            return IncompleteSum(
                f"the servers have the gradients of {answer.weight:g} of {self._num_workers} workers: one has left"
            )
        if isinstance(answer, PushTaken) and answer.applied is False:
            return IncompleteSum("the servers have gone on without this worker's gradients, for they have lost it")
        return None


def _ranges_of(buckets: Sequence[ReducedBucket], model: ServedModel) -> dict[ReducedBucket, list[RangePlace]]:
    """The ranges of each bucket, which is a group to the servers: one after the other in the bucket's memory."""
    ranges: dict[ReducedBucket, list[RangePlace]] = {bucket: [] for bucket in buckets}
    for each in model.layout().ranges:
        before = ranges[buckets[int(each.group)]]
        start = before[-1].stop if before else 0
        before.append(RangePlace(each.index, start, start + each.numel))
    return ranges


def _with_left_over(own: TensorsByName, left_over: Mapping[str, Tensor]) -> TensorsByName:
    return {**own, **{name: {**own.get(name, {}), SERVER: value} for name, value in left_over.items()}}


def _without_left_over(own: TensorsByName, times: int) -> tuple[TensorsByName, dict[str, Tensor]]:
    """What servers had left over apart; or multiplied by `times`, unless that is 0."""
    if times:
        kept = {
            name: {kind: value * times if kind == SERVER else value for kind, value in kinds.items()}
            for name, kinds in own.items()
        }
        return kept, {}
    rest = {name: {kind: value for kind, value in kinds.items() if kind != SERVER} for name, kinds in own.items()}
    return rest, {name: kinds[SERVER] for name, kinds in own.items() if SERVER in kinds}


def check_codec(strategy: Strategy, *, steps: bool) -> None:
    """The codecs that servers know, who may step."""
    asked = f"aggregate={strategy.aggregate!r}"
    if not strategy.compress.lossless and (reason := refusal(strategy.compress, steps=steps)) is not None:
        raise ConfigurationError(
            f"{asked} with compress={strategy.compress!r}: {reason}.\n"
            f"Write a codec that servers know, such as compress=ErrorFeedback(Sign()) or Float16(); or aggregate=AllReduce()."
        )


def servers_of(strategy: Strategy) -> ParameterServer:
    aggregate = strategy.aggregate
    servers = aggregate.outer if isinstance(aggregate, Hierarchy) else aggregate
    assert isinstance(servers, ParameterServer), "another way of training"
    return servers


def clients_of(strategy: Strategy, job: Job) -> list[int]:
    """The workers that push and pull: all of them, or the first of each group."""
    if isinstance(strategy.aggregate, Hierarchy):
        return [group[0] for group in groups_of(job.peers, strategy.aggregate.group_size)]
    return list(range(job.world_size))
