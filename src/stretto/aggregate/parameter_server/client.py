"""The machine of a worker: it pushes and pulls, and sees to it that each request reaches whoever serves its range.

    running = loop.start(ClientMachine(rank, layout, servers=[4, 5], replicas=1), channel)
    clock = running.request(Enter()).result(timeout_s)                              all ranges; 0 at the beginning of a job
    running.request(Pull(r, clock, into=values)).result(timeout_s)                  ValuesPulled, with the version
    running.request(Push(r, clock, gradient, options, version)).result(timeout_s)   PushTaken: every server of the range has it
    running.request(Quit()).result(timeout_s)                                       nobody waits for this worker any more

A worker's clock is the number of steps that it has pushed. In each step it pulls at its clock and then pushes with it, each range
once; the next step has the next clock. Pushes need not be acknowledged before it goes on: with `SoftSync` the acknowledgement
may take as long as other workers do. What was pushed must not change until then, for it may have to be sent again.

A worker that comes late, or again (a new `life`), enters with the clock of the slowest worker, and the others wait for it from
then on. Ranges may have different ideas of that clock, so entering takes two rounds: every range admits the worker with its
own, then all of them set it to the highest.

Pulls wait here while `window_bytes` are asked from the same server, so that a server need not keep the whole model for a worker
that takes nothing. Pushes wait for their turn (`request_order.py`): with an `urgency`, with as many bytes under way as its credit
says; without one, while there is room in a window for all servers together, which follows the link (`send_window.py`). A pull
never leaves before the pushes of its range. A pull with an `urgency` does not wait here: the server orders its answers. Start the
machine with `unsent_bytes` of at least the bytes that are pushed to a server in a step.

Needs what `server.py` needs. A range of which no server lives fails its requests with `PeerLost`, which names its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from stretto.aggregate.parameter_server.hash_ring import HashRing
from stretto.aggregate.parameter_server.layout import RangeLayout
from stretto.aggregate.parameter_server.lives import Lives
from stretto.aggregate.parameter_server.messages import (
    CodecRound,
    DifferenceTo,
    EnterRange,
    ExportRange,
    FillValues,
    LeaveRange,
    NotHead,
    Options,
    PullValues,
    PushGradient,
    PushReceived,
    PushTaken,
    RangeChain,
    RangeEntered,
    RangeExported,
    RangeFilled,
    RangeLeft,
    RangeQuery,
    RangeReport,
    RangesPlaced,
    RequestRefused,
    ServedAnswer,
    ServedRequest,
    ToClient,
    ValuesPulled,
)
from stretto.aggregate.parameter_server.request_order import Lane, QueuedMessage
from stretto.aggregate.parameter_server.routes import RangeRequest, RequestKey, Route
from stretto.aggregate.parameter_server.send_window import SendWindow
from stretto.aggregate.parameter_server.transfer_order import least_bytes_under_way
from stretto.collectives.urgency import Urgency
from stretto.errors import ConfigurationError, FrameError, PeerLost, StrettoError, WireError
from stretto.protocol.machine import Actions, Machine, Payload, Reply, SendMessage

WINDOW_BYTES: Final = 64 << 20
MAX_NAMES: Final = 10  # of parameters, in an error


class Push(NamedTuple):
    """A gradient of float32 values, or as a codec has `drawn` and written it. The reply is a `PushTaken`. Without an `urgency` it
    leaves after those that were made before, servers taking turns."""

    range: int
    clock: int
    payload: Payload
    options: Options
    version_read: int
    weight: float = 1.0
    urgency: Urgency | None = None
    drawn: CodecRound | None = None


class Pull(NamedTuple):
    """The values, into writable memory of their size. The reply is a `ValuesPulled`. Where they are encoded, `into` is None, and
    the reply a `PulledPayload`.

    `newer_than`: wait for a version after this one. Backup workers give the number of steps before their last (`stepping.py`).
    `urgency`: of the answer, among those that the server has for this worker. Without one it comes as soon as it can.
    `difference`: the answer may be one (`answers.py`), and is a `PulledPayload`.
    """

    range: int
    clock: int
    into: Any
    newer_than: int = -1
    urgency: Urgency | None = None
    difference: DifferenceTo | None = None


class PulledPayload(NamedTuple):
    """Values as a codec has written them, from this server."""

    source: int
    header: ValuesPulled
    payload: bytes


class Fill(NamedTuple):
    """The values that training begins with. The first worker that fills a range does; for others it has no effect.

    `exported`: the payload is what an `Export` gave, values and optimizer state, or was written as such."""

    range: int
    payload: Payload
    exported: bool = False


class Export(NamedTuple):
    """All that the servers keep of a range. The reply is `Exported`. Keep few of them under way: they are longer than the values,
    and wait in the server's memory."""

    range: int


class Exported(NamedTuple):
    """A range as it was when the server answered: `content` is in `range_format.py`, clocks as in `RangeExported`."""

    content: bytes
    version: int
    slowest: int
    fastest: int


class Enter(NamedTuple):
    """Take part. The reply is the clock to begin with."""


class Quit(NamedTuple):
    """Take part no more. Pushes that are under way are acknowledged all the same."""


@dataclass(eq=False)
class Passage:
    """This worker enters, or quits, all ranges."""

    ticket: int
    enters: bool
    clock: int | None = None  # what all ranges are told in the second round
    answers: dict[int, int] = field(default_factory=dict)  # range -> the clock that it has admitted this worker with


class ClientMachine(Machine):
    """See the module's text. `servers`, `replicas`: as all servers have them. `life`: the generation in which this worker
    joined."""

    header_type = ToClient

    def __init__(
        self,
        rank: int,
        layout: RangeLayout,
        *,
        servers: Sequence[int],
        replicas: int = 0,
        life: int = 0,
        lives: Mapping[int, int] | None = None,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self.rank, self.layout, self.life = rank, layout, life
        self.lives = Lives(lives or {})
        self._in_window = Urgency(0, window_bytes)  # of what has no urgency, and waits all the same
        self._others = {*servers, *(lives or {})} - {rank}  # that may be servers
        self._ended: dict[int, int] = {}  # rank -> the last life that has ended
        ring = HashRing(servers)
        placed = ring.place(layout.ranges)
        self.routes = [Route(index, 0, ring.chain(index, placed[index], replicas + 1)) for index in range(len(layout))]
        self._window = SendWindow(least_bytes_under_way(layout.ranges, len(servers)), epoch=len(layout))
        self._pushes, self._pulls = Lane(2 * len(layout), self._window), Lane(2 * len(layout))
        self._asked: set[int] = set()  # ranges whose pull has been sent, or waits in the lane
        self._pulling: dict[int, int] = {}  # range -> number of its pull, which counts in the window
        self._passage: Passage | None = None  # while this worker enters or quits
        self._actions: list[SendMessage | Reply] = []

    # -- events -------------------------------------------------------------------------------------------------------

    def on_request(self, now: float, ticket: int, request: Push | Pull | Fill | Export | Enter | Quit) -> Actions:
        self._window.now = now
        match request:
            case Enter():
                self._pass(Passage(ticket, enters=True))
            case Quit():
                self._pass(Passage(ticket, enters=False))
            case _ if (fault := self._fault_in(request)) is not None:
                self._actions.append(Reply(ticket, error=ConfigurationError(fault)))
            case _:
                self._add(self.routes[request.range], self._request(ticket, request))
        return self._take_actions()

    def on_message(self, now: float, source: int, header: ToClient, payload: memoryview) -> Actions:
        self._window.now = now
        match header:
            case RangesPlaced(chains):
                self._heard_of(source, chains)
            case RangeQuery(index):
                self._send(source, RangeReport(RangeChain(index, -1, []), False))  # a worker has no ranges
            case NotHead(chain=chain) | RangeReport(chain=chain) if 0 <= chain.range < len(self.layout):
                route = self.routes[chain.range]
                route.heard_of(chain, self.lives)
                if isinstance(header, NotHead):
                    route.turned_away(source, header.holds, header.attempt)
                else:
                    self._on_report(route, source, header.holds)
                self._dispatch(route)
            case PushReceived(receipt):
                self._pushes.sent(receipt)
            case PushTaken() | ValuesPulled() | RangeFilled() | RangeExported() | RangeEntered() | RangeLeft() | RequestRefused():
                if 0 <= header.range < len(self.layout):
                    self._on_answer(source, self.routes[header.range], header, payload)
        return self._take_actions()

    def on_view(self, now: float, joined: Sequence[int], left: Sequence[int], generation: int) -> Actions:
        self._window.now = now
        self.lives.end(left)
        self._ended |= {rank: self.lives.current(rank) for rank in left}
        for rank in left:
            for route in self.routes:
                route.left(rank)
            self._pushes.lose(rank)
            self._pulls.lose(rank)
        self.lives.begin(joined, generation)
        self._others = (self._others - set(left)) | set(joined)
        for route in self.routes:
            self._dispatch(route)
        return self._take_actions()

    def _take_actions(self) -> Actions:
        self._let_leave(self._pushes.leave())  # which may let pulls into their lane
        self._let_leave(self._pulls.leave())
        actions, self._actions = self._actions, []
        return actions

    def _let_leave(self, turns: Sequence[QueuedMessage]) -> None:
        """Send these requests, whose turn it is. One whose route has changed meanwhile is left out: it goes to another server."""
        for turn in turns:
            index, clock = turn.key
            route, is_push = self.routes[index], clock >= 0
            request = route.requests.get((PushGradient.__name__ if is_push else PullValues.__name__, clock))
            if request is None or turn.to != route.sent_to:
                (self._pushes if is_push else self._pulls).drop(turn.number)
                continue
            header = msgspec.structs.replace(request.header, attempt=route.attempt)
            if isinstance(header, PushGradient):
                self._send(turn.to, msgspec.structs.replace(header, receipt=turn.number), request.payload)
            else:
                self._send(turn.to, header)
                self._pulling[index] = turn.number
        for index, _ in (turn.key for turn in turns if turn.key[1] >= 0):
            self._ask(self.routes[index])  # now that all of its pushes have left that leave with it

    def _send(self, to: int, header: Any, payload: Payload = b"") -> None:
        self._actions.append(SendMessage(to, header, payload))

    # -- requests -----------------------------------------------------------------------------------------------------

    def _fault_in(self, request: Push | Pull | Fill | Export) -> str | None:
        kind = type(request).__name__
        if not 0 <= request.range < len(self.layout):
            return f"{kind}(range={request.range}): the model has {len(self.layout)} ranges, from 0 on."
        if isinstance(request, Export) or (isinstance(request, Pull) and request.into is None):
            return None
        memory = memoryview(request.into if isinstance(request, Pull) else request.payload)
        wanted = self.layout.ranges[request.range].num_bytes
        is_free = request.exported if isinstance(request, Fill) else isinstance(request, Push) and request.drawn is not None
        if (
            (memory.nbytes != wanted and not is_free)  # else the server looks at it
            or not memory.c_contiguous
            or (memory.readonly and isinstance(request, Pull))
        ):
            return (
                f"{kind}(range={request.range}) with {memory.nbytes} bytes: that range has {wanted}.\n"
                f"Give contiguous memory of that size{', which can be written' if isinstance(request, Pull) else ''}."
            )
        if isinstance(request, Push):
            try:
                msgspec.convert(request.options, Options)
            except msgspec.ValidationError as problem:
                return f"Push(options={request.options!r}): {problem}.\nGive names, and flags, numbers or pairs of numbers."
        return None

    def _request(self, ticket: int, request: Push | Pull | Fill | Export) -> RangeRequest:
        layout, life = self.layout.digest, self.life
        match request:
            case Push(index, clock, payload, options, version, weight, urgency, drawn):
                push = PushGradient(layout, life, 0, index, clock, version, weight, options, drawn)
                return RangeRequest(ticket, push, payload, urgency=urgency)
            case Pull(index, clock, into, newer_than, urgency, difference):
                pull = PullValues(layout, life, 0, index, clock, newer_than, urgency, difference)
                memory = None if into is None else memoryview(into).cast("B")
                return RangeRequest(ticket, pull, b"", memory)
            case Fill(index, payload, exported):
                return RangeRequest(ticket, FillValues(layout, life, 0, index, exported), payload)
            case Export(index):
                return RangeRequest(ticket, ExportRange(layout, life, 0, index))

    def _add(self, route: Route, request: RangeRequest) -> None:
        if route.lost is not None:
            self._fail(request, route.lost)
        elif request.key in route.requests:
            again = f"{request.header}: such a request is under way, and its answer could not be told apart. Wait for it."
            self._actions.append(Reply(request.ticket, error=ConfigurationError(again)))
        else:
            route.requests[request.key] = request
            if route.sent_to is None:
                self._dispatch(route)
            else:
                self._transmit(route, request)

    def _dispatch(self, route: Route) -> None:
        """Send everything to the server that has the range now, if there is one and it has not got it."""
        if route.sent_to is not None or not route.requests:
            return
        if not route.members:
            self._ask_who_has(route)
        elif route.members[0] != route.turned_away_by:
            route.sent_to = route.members[0]
            route.attempt += 1
            for request in list(route.requests.values()):
                self._transmit(route, request)

    def _transmit(self, route: Route, request: RangeRequest) -> None:
        """Send a request to the server that has the range now; a push when its turn has come."""
        assert route.sent_to is not None
        if isinstance(request.header, PullValues):
            self._forget_pull(route.index)
            self._ask(route)
        elif isinstance(request.header, PushGradient):
            key, num_bytes = (route.index, request.header.clock), memoryview(request.payload).nbytes
            self._pushes.wait(key, route.sent_to, num_bytes, request.urgency)
        else:
            self._send(route.sent_to, msgspec.structs.replace(request.header, attempt=route.attempt), request.payload)

    def _ask(self, route: Route) -> None:
        """Pull, unless a push of the range has yet to leave: a server refuses a pull that comes before the push of its clock."""
        request = route.requests.get((PullValues.__name__, -1))
        if request is None or route.sent_to is None or route.index in self._asked or self._pushes.waits(route.index):
            return
        self._asked.add(route.index)
        assert isinstance(request.header, PullValues)
        if request.header.urgency is None:
            self._pulls.wait((route.index, -1), route.sent_to, self.layout.ranges[route.index].num_bytes, self._in_window)
        else:
            self._send(route.sent_to, msgspec.structs.replace(request.header, attempt=route.attempt))

    def _forget_pull(self, index: int) -> None:
        self._asked.discard(index)
        self._pulls.cancel((index, -1))
        if index in self._pulling:
            self._pulls.sent(self._pulling.pop(index))

    # -- answers ------------------------------------------------------------------------------------------------------

    def _on_answer(self, source: int, route: Route, header: ServedAnswer, payload: memoryview) -> None:
        """It may be the second answer to a request that was sent twice: then nobody waits for it."""
        key = _key_of(header)
        request = route.requests.get(key)
        if request is None or not _answers(header, request.header):
            return
        del route.requests[key]
        if isinstance(request.header, PullValues):
            self._forget_pull(route.index)
        elif isinstance(request.header, PushGradient) and self._pushes.waits(route.index):
            self._pushes.cancel((route.index, request.header.clock))
            self._ask(route)
        if isinstance(header, RequestRefused):
            self._fail(request, WireError(f"rank {source}: {header.reason}"))
        elif isinstance(request.header, (EnterRange, LeaveRange)):
            self._passed(route.index, header.clock if isinstance(header, RangeEntered) else 0)
        elif isinstance(header, RangeExported):
            exported = Exported(bytes(payload), header.version, header.slowest, header.fastest)
            self._actions.append(Reply(request.ticket, exported))
        elif request.into is None:
            reply = PulledPayload(source, header, bytes(payload)) if isinstance(header, ValuesPulled) else header
            self._actions.append(Reply(request.ticket, reply))
        elif payload.nbytes != request.into.nbytes:
            self._fail(request, FrameError(source, f"{payload.nbytes} bytes of values for range {route.index}"))
        else:
            request.into[:] = payload
            self._actions.append(Reply(request.ticket, header))

    def _fail(self, request: RangeRequest, error: StrettoError) -> None:
        if not isinstance(request.header, (EnterRange, LeaveRange)):
            self._actions.append(Reply(request.ticket, error=error))
        elif self._passage is not None and self._passage.ticket == request.ticket:
            self._actions.append(Reply(request.ticket, error=error))
            self._passage = None

    # -- entering and quitting ----------------------------------------------------------------------------------------

    def _pass(self, passage: Passage) -> None:
        """Tell all ranges."""
        if self._passage not in (None, passage):
            error = ConfigurationError("this worker enters or quits already: wait until it has.")
            self._actions.append(Reply(passage.ticket, error=error))
            return
        self._passage = passage
        if not passage.enters:  # what was pushed before counts
            self._let_leave(self._pushes.leave(all_of_them=True))
        passage.answers = {}
        layout, life = self.layout.digest, self.life
        for index, route in enumerate(self.routes):
            header: ServedRequest = LeaveRange(layout, life, 0, index)
            if passage.enters:
                header = EnterRange(layout, life, 0, index, passage.clock)
            self._add(route, RangeRequest(passage.ticket, header))

    def _passed(self, index: int, clock: int) -> None:
        passage = self._passage
        if passage is None:
            return
        passage.answers[index] = clock
        if len(passage.answers) < len(self.layout):
            return
        if passage.enters and passage.clock is None:
            passage.clock = max(passage.answers.values())
            self._pass(passage)
        else:
            self._passage = None
            self._actions.append(Reply(passage.ticket, passage.clock))

    # -- where ranges are ---------------------------------------------------------------------------------------------

    def _heard_of(self, source: int, chains: list[RangeChain]) -> None:
        for chain in chains:
            if 0 <= chain.range < len(self.layout):
                self.routes[chain.range].serves_now(source, chain)
                self.routes[chain.range].heard_of(chain, self.lives)
                self._dispatch(self.routes[chain.range])

    def _ask_who_has(self, route: Route) -> None:
        if route.asked is not None:
            return
        route.asked = {rank for rank in self._others if self.lives.is_here(rank)}
        route.is_held = False
        for rank in sorted(route.asked):
            self._send(rank, RangeQuery(route.index, sorted(self._ended.items())))
        self._give_up_if_nobody_has(route)

    def _on_report(self, route: Route, source: int, holds: bool) -> None:
        if route.asked is not None and source in route.asked:
            route.asked.remove(source)
            route.is_held |= holds
            self._give_up_if_nobody_has(route)

    def _give_up_if_nobody_has(self, route: Route) -> None:
        if route.asked or route.is_held:
            return
        names = self.layout.ranges[route.index].names
        shown = ", ".join(repr(name) for name in names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
        route.lost = PeerLost(route.last_dead, f"it was a server, and the last with a copy of {shown}")
        requests, route.requests = route.requests, {}
        self._forget_pull(route.index)
        for request in requests.values():
            self._fail(request, route.lost)


def _key_of(answer: ServedAnswer) -> RequestKey:
    """The key of the request that this answers."""
    match answer:
        case PushTaken(clock=clock):
            return PushGradient.__name__, clock
        case ValuesPulled():
            return PullValues.__name__, -1
        case RangeFilled():
            return FillValues.__name__, -1
        case RangeExported():
            return ExportRange.__name__, -1
        case RangeEntered():
            return EnterRange.__name__, -1
        case RangeLeft():
            return LeaveRange.__name__, -1
        case RequestRefused(request=request, clock=clock):
            return request, clock


def _answers(header: Any, request: ServedRequest) -> bool:
    """Whether it is an answer to this request, and not a late one to an earlier request of its kind."""
    match header, request:
        case ValuesPulled(), PullValues():
            known = header.since is None or (request.difference is not None and header.since == request.difference.copy)
            return bool(known and header.clock == request.clock and header.version > request.newer_than)
        case RangeEntered(), EnterRange(clock=clock):
            return clock is None or bool(header.clock >= clock)
    return True
