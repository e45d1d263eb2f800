"""Servers that serve any model: a machine by which workers say what is to be served on which channel.

    rank 0                                servers
    BeginService(channel, model)   -->    a `ServerMachine` on that channel
                                   <--    ServiceBegun
    every worker
    EndService(channel)            -->    it ends when all workers that live have said so, and its memory is free
    every worker, at its end
    WorkerLeaves                   -->    the server ends when all workers have left, or died
    a server or worker that comes later
    AskServices                    -->    all servers
                                   <--    ServicesAre(channels): what they serve; a server joins those that serve it
    a server that comes later
    ServerIsReady                  -->    every worker: from now on it may be among those that begin to serve a model

A server that comes later says that it is ready when everybody has admitted it, and all servers have told it what they serve. So
all that begin to serve a model know each other. One that was not ready then is told of the model when it has begun.

A server process is started once in a job. Models come, are arranged anew when parameters are frozen or added, and go; each
arrangement is a service on a channel of its own, so nothing of the last one can be taken for the next. The description of a model
is the payload, for it may be long.

Workers end a service one by one, because with servers that step they need not be at the same place: whoever releases the model
first must not take it from the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
import torch

from stretto.aggregate.parameter_server.answers import answer_codecs
from stretto.aggregate.parameter_server.encoded_sum import EncodedSum
from stretto.aggregate.parameter_server.encoding import encodings
from stretto.aggregate.parameter_server.layout import RANGE_BYTES, VALUE_BYTES, RangeLayout, ServedParameter
from stretto.aggregate.parameter_server.messages import Options
from stretto.aggregate.parameter_server.range_state import RangeState, fault_in_increment
from stretto.aggregate.parameter_server.replica import RangeValues
from stretto.aggregate.parameter_server.round_sum import RoundSum
from stretto.aggregate.parameter_server.server import ServerMachine
from stretto.aggregate.parameter_server.server_record import RecordedServer
from stretto.aggregate.parameter_server.shard_optimizer import OptimizerSpec
from stretto.aggregate.parameter_server.sync_spec import SyncSpec
from stretto.errors import ConfigurationError, JobError
from stretto.observe.trace import Tracer
from stretto.protocol.loop import UNSENT_BYTES
from stretto.protocol.machine import Actions, Machine, Reply, SendMessage
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.synchronous import Synchronous

CONTROL_CHANNEL: Final = 1
FIRST_CHANNEL: Final = 2  # of a service

log = logging.getLogger("stretto.parameter_server")


class ServedModel(msgspec.Struct, frozen=True):
    """What servers have to know of a model, and of each other. Everybody has the same.

    `optimizers`: for servers that step, by the group of the parameters; none with `Synchronous`, where workers step.
    `codecs`: the text of what gradients of a group are compressed with, if they are. `answers`: the text of the codec that writes
    values, as differences; empty: none. `increments`: no server steps, and what is pushed is added to the values, or takes their
    place (`store.py`). `steps_before`: of the training that goes on here, for snapshots by a worker that has come back."""

    parameters: list[ServedParameter]
    servers: list[int]
    workers: list[int]
    replicas: int = 0
    range_bytes: int = RANGE_BYTES
    sync: SyncSpec = SyncSpec()
    optimizers: dict[str, OptimizerSpec] = {}
    codecs: dict[str, str] = {}
    answers: str = ""
    increments: bool = False
    steps_before: int = 0

    def layout(self) -> RangeLayout:
        return RangeLayout(self.parameters, self.range_bytes)

    @property
    def unsent_bytes(self) -> int:
        """What may wait for one peer: the model that is pushed, and each worker's gradients on their way down a chain."""
        num_bytes = VALUE_BYTES * sum(each.numel for each in self.parameters)
        num_bytes *= 3 if self.codecs else 1  # a sparse payload may be twice as long as what it is of, and a bit more
        return max(UNSENT_BYTES, (len(self.workers) + 2) * num_bytes)

    def fault_in(self, options: Options) -> str | None:
        """Options that no optimizer of this model takes. Whether it is the right one is seen when they are used."""
        if self.increments:
            return fault_in_increment(options)
        faults = [spec.fault_in(options) for spec in distinct_classes(self.optimizers)]
        return None if not faults or None in faults else faults[0]


class BeginService(msgspec.Struct, frozen=True, tag=True):
    channel: int


class EndService(msgspec.Struct, frozen=True, tag=True):
    channel: int


class WorkerLeaves(msgspec.Struct, frozen=True, tag=True):
    pass


class ServiceBegun(msgspec.Struct, frozen=True, tag=True):
    channel: int
    problem: str  # empty: none


class AskServices(msgspec.Struct, frozen=True, tag=True):
    """What is served? Asked by whoever joins later."""


class ServerIsReady(msgspec.Struct, frozen=True, tag=True):
    """A server that has joined later is known to all."""


class ServicesAre(msgspec.Struct, frozen=True, tag=True):
    """The payload has the models, one after the other."""

    channels: list[int]
    lengths: list[int]

    def models(self, payload: memoryview) -> dict[int, ServedModel]:
        """By channel. Raises `MsgspecError` if it cannot be read."""
        if len(self.channels) != len(self.lengths) or sum(self.lengths) != payload.nbytes or any(n < 0 for n in self.lengths):
            raise msgspec.ValidationError(f"{self} with {payload.nbytes} bytes")
        models, begin = {}, 0
        for channel, length in zip(self.channels, self.lengths, strict=True):
            models[channel] = msgspec.msgpack.decode(payload[begin : begin + length], type=ServedModel)
            begin += length
        return models


def distinct_classes(optimizers: dict[str, OptimizerSpec]) -> list[OptimizerSpec]:
    """Each of those that differ in their class, once."""
    return list({spec.name: spec for spec in optimizers.values()}.values())


ToHost = BeginService | EndService | WorkerLeaves | AskServices | ServicesAre


class ServiceHost(Machine):
    """A server's side. `start(machine, channel, model)` runs a machine, `stop(channel)` ends it; `alone()` is called when the
    last worker has left. `life`: the generation in which this server joined; `lives()`: that of others that joined later than 0;
    `others`: servers that know what is served, where this one joins later."""

    header_type = ToHost

    def __init__(
        self,
        rank: int,
        workers: Iterable[int],
        start: Callable[[RecordedServer, int, ServedModel], None],
        stop: Callable[[int], None],
        alone: Callable[[], None],
        tracer: Tracer | None = None,
        *,
        life: int = 0,
        lives: Callable[[], Mapping[int, int]] = dict,
        others: Sequence[int] = (),
    ) -> None:
        self._rank = rank
        self._life, self._lives, self._others = life, lives, others
        self._is_ready = life == 0
        self.somebody_has_left = False  # in order, and not by dying
        self._models: dict[int, bytes] = {}  # channel -> what is served there, encoded
        self._workers = set(workers)
        self._start, self._stop, self._alone, self._tracer = start, stop, alone, tracer
        self._first_server = len(self._workers)
        self._newcomers: set[int] = set()  # servers that have joined after this one
        self._asked = set(others)  # servers that have not said yet what they serve
        self._gone: set[int] = set()  # ranks that have left
        self._users: dict[int, set[int]] = {}  # channel -> workers that have not ended the service

    def on_start(self, now: float) -> Actions:
        return [*(SendMessage(server, AskServices()) for server in self._others), *self._ready_if_told()]

    def _ready_if_told(self) -> list[SendMessage]:
        if self._asked or self._is_ready:
            return []
        self._is_ready = True
        return [SendMessage(worker, ServerIsReady()) for worker in sorted(self._workers)]

    def on_message(self, now: float, source: int, header: ToHost, payload: memoryview) -> Actions:
        match header:
            case AskServices():
                return [self._tell_of(source, list(self._models))]
            case ServicesAre() if source in self._others or source in self._newcomers:
                self._join(header, payload)
                self._asked.discard(source)
                return self._ready_if_told()
            case BeginService(channel):
                return self._begin(source, channel, payload)
            case EndService(channel) if channel in self._users:
                self._users[channel].discard(source)
                self._stop_unused()
            case WorkerLeaves():
                self.somebody_has_left = True
                self._end_if_alone([source])
        return ()

    def _tell_of(self, rank: int, channels: list[int]) -> SendMessage:
        models = [self._models[channel] for channel in channels]
        return SendMessage(rank, ServicesAre(channels, [len(model) for model in models]), b"".join(models))

    def _begin(self, source: int, channel: int, payload: memoryview) -> list[SendMessage]:
        try:
            model = msgspec.msgpack.decode(payload, type=ServedModel)
            if channel not in self._users:  # else others have told of it already
                self._serve(channel, model, joins=False)
        except (msgspec.MsgspecError, ConfigurationError) as problem:
            log.warning("rank %d cannot serve what it was asked to on channel %d: %s", self._rank, channel, problem)
            return [SendMessage(source, ServiceBegun(channel, str(problem)))]
        later = sorted(self._newcomers.difference(model.servers))
        return [SendMessage(source, ServiceBegun(channel, "")), *(self._tell_of(server, [channel]) for server in later)]

    def _join(self, header: ServicesAre, payload: memoryview) -> None:
        """What others serve, and this server, which comes later, does not yet."""
        try:
            for channel, model in header.models(payload).items():
                if channel not in self._users:
                    self._serve(channel, model, joins=True)
                    log.info("rank %d joins the servers of channel %d", self._rank, channel)
        except (msgspec.MsgspecError, ConfigurationError) as problem:
            log.warning("rank %d cannot serve what others do: %s", self._rank, problem)

    def _serve(self, channel: int, model: ServedModel, *, joins: bool) -> None:
        self._start(self._machine(model, joins), channel, model)
        self._users[channel] = self._workers - self._gone  # also those for whom another one pushes: they may ask for state
        self._models[channel] = msgspec.msgpack.encode(model)

    def _machine(self, model: ServedModel, joins: bool) -> RecordedServer:
        layout, sync = model.layout(), model.sync.build()
        compensation = sync.delay_compensation if isinstance(sync, Asynchronous) else None
        encoding_of = encodings(layout.ranges, model.parameters, model.codecs)
        missing = sorted({each.group for each in layout.ranges} - model.optimizers.keys())
        if not isinstance(sync, Synchronous) and missing and not model.increments:
            raise ConfigurationError(f"{sync!r}: no optimizer was named for the groups {missing[:10]}, and the servers step.")

        def make_values(index: int, values: memoryview | None) -> RangeValues:
            each = layout.ranges[index]
            if isinstance(sync, Synchronous):
                encoding = encoding_of(index)
                return RoundSum(each.numel) if encoding is None else EncodedSum(encoding, each.slices)
            begin = np.zeros(each.numel, np.float32) if values is None else np.frombuffer(values, np.float32).copy()
            spec = None if model.increments else model.optimizers[each.group]
            return RangeState(torch.from_numpy(begin), spec, delay_compensation=compensation)

        record = RecordedServer(self._tracer, self._first_server)
        record.machine = ServerMachine(
            self._rank, layout, servers=model.servers, workers=model.workers, sync=sync, make_values=record.timed(make_values),
            replicas=model.replicas, fault_in=model.fault_in, on_update=record.on_update, encoding_of=encoding_of,
            answer_codec_of=answer_codecs(layout.ranges, model.parameters, model.answers),
            life=self._life, lives=self._lives(), joins=joins, others={*self._others, *self._newcomers} - self._gone,
        )  # fmt: skip
        return record

    def _stop_unused(self) -> None:
        for channel, users in list(self._users.items()):
            if not users:
                del self._users[channel], self._models[channel]
                self._stop(channel)

    def on_view(self, now: float, joined: Sequence[int], left: Sequence[int], generation: int) -> Actions:
        self._end_if_alone(left)
        self._newcomers = (self._newcomers - set(left)) | (set(joined) - self._workers)
        self._asked -= set(left)
        self._gone -= set(joined)
        for users in self._users.values():
            users |= self._workers & set(joined)  # until they say that they need it no longer
        return self._ready_if_told()

    def _end_if_alone(self, left: Sequence[int]) -> None:
        self._gone |= set(left)
        for users in self._users.values():
            users -= self._gone
        self._stop_unused()
        if self._workers <= self._gone:
            self._alone()


class NewService(NamedTuple):
    """Have all servers serve a model on a channel. The reply is None when all that live do."""

    channel: int
    model: ServedModel


class StopService(NamedTuple):
    """This worker needs a model no more that these servers serve. The reply is None at once."""

    channel: int
    servers: Sequence[int]


class FindServices(NamedTuple):
    """What do these servers serve? The reply is the models by channel, as the first of them that answers says."""

    servers: Sequence[int]


class LeaveServers(NamedTuple):
    """This worker needs these servers no more. The reply is None when all of them that live have been told: a server that has
    only just started does not serve this channel yet, so the word to it waits, and would be lost with the wire."""

    servers: Sequence[int]


class ServiceClient(Machine):
    """A worker's side. One of them speaks for all when there is something to serve. `ready`: the servers that can be asked for
    it, to begin with those that are here now; to be read in any thread."""

    header_type = ServiceBegun | ServicesAre | ServerIsReady
    decides_order = False

    def __init__(self, ready: Iterable[int] = ()) -> None:
        self.ready = frozenset(ready)
        self._finding: list[int] = []  # tickets
        self._asked: dict[int, tuple[int, set[int]]] = {}  # channel -> ticket, and the servers that have not answered
        self._leaving: dict[int, set[int]] = {}  # ticket -> servers to which the word that this worker leaves is on its way
        self._gone: set[int] = set()

    def on_request(self, now: float, ticket: int, request: NewService | StopService | FindServices | LeaveServers) -> Actions:
        if isinstance(request, FindServices):
            self._finding.append(ticket)
            return [SendMessage(server, AskServices()) for server in request.servers]
        if isinstance(request, StopService):
            return [*(SendMessage(server, EndService(request.channel)) for server in request.servers), Reply(ticket)]
        if isinstance(request, LeaveServers):
            told = self._leaving[ticket] = set(request.servers) - self._gone
            words = [SendMessage(server, WorkerLeaves(), token=server) for server in sorted(told)]
            return [*words, *self._told_that_it_leaves()]
        channel, model = request
        waiting = {server for server in model.servers if server not in self._gone}
        self._asked[channel] = ticket, waiting
        body = msgspec.msgpack.encode(model)
        return [*(SendMessage(server, BeginService(channel), body) for server in waiting), *self._answered(channel)]

    def on_message(
        self, now: float, source: int, header: ServiceBegun | ServicesAre | ServerIsReady, payload: memoryview
    ) -> Actions:
        if isinstance(header, ServerIsReady):
            self.ready |= {source}
            return ()
        if isinstance(header, ServicesAre):
            return self._found(header, payload)
        if header.channel not in self._asked or source not in self._asked[header.channel][1]:
            return ()
        ticket, waiting = self._asked[header.channel]
        if header.problem:
            del self._asked[header.channel]
            return [Reply(ticket, error=JobError(f"the server at rank {source} cannot serve the model: {header.problem}"))]
        waiting.discard(source)
        return self._answered(header.channel)

    def on_sent(self, now: float, token: int) -> Actions:
        return self._told_that_it_leaves(token)

    def _told_that_it_leaves(self, *servers: int) -> list[Reply]:
        for waiting in self._leaving.values():
            waiting.difference_update(servers)
        ended = [ticket for ticket, waiting in self._leaving.items() if not waiting]
        for ticket in ended:
            del self._leaving[ticket]
        return [Reply(ticket) for ticket in ended]

    def on_view(self, now: float, joined: Sequence[int], left: Sequence[int], generation: int) -> Actions:
        self._gone = (self._gone | set(left)) - set(joined)
        self.ready -= set(left)
        actions = self._told_that_it_leaves(*left)
        for channel, (_, waiting) in list(self._asked.items()):
            waiting -= set(left)
            actions += self._answered(channel)
        return actions

    def _found(self, header: ServicesAre, payload: memoryview) -> list[Reply]:
        try:
            models = header.models(payload)
        except msgspec.MsgspecError as problem:
            log.warning("what a server says that it serves cannot be read: %s", problem)
            return []
        tickets, self._finding = self._finding, []
        return [Reply(ticket, models) for ticket in tickets]

    def _answered(self, channel: int) -> list[Reply]:
        ticket, waiting = self._asked[channel]
        if waiting:
            return []
        del self._asked[channel]
        return [Reply(ticket)]
