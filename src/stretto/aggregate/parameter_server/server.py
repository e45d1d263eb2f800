"""The machine of a server: it takes what workers and other servers say to the ranges that they mean.

    machine = ServerMachine(rank, layout, servers=[4, 5], workers=range(4), sync=SoftSync(1), make_values=...)
    loop.start(machine, channel)

What it serves is in `head.py`, how ranges are kept by several servers in `chains.py`.

Guarantees, as long as one server of each range lives:

    A push that was acknowledged is in the values once, or was discarded (with backup workers), whoever dies.
    A worker reads only what every server of the range has.
    Every request is answered, if the pushes that its rule waits for are made by the workers that count.
    Nobody waits for a worker that has left.
    What is wrong is refused, with a reason that names its sender; the server goes on.

Needs: messages of one peer come once and in order, until it has left, as they do on a wire. `left` means dead: a server that
only seems to be would go on serving its ranges to those that still hear it. A worker keeps what it has pushed until it is
acknowledged.

Memory: what a server has on its way to the next one of a chain is at most a gradient of each worker for each range, since a
worker pulls before it pushes again. Start the machine with `unsent_bytes` that allow it.

A server that joins later, or again, is made with its `life`: it has nothing, says that it is here, and is handed its ranges.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, Final

from stretto.aggregate.parameter_server.answers import AnswerCodec, SentCopies
from stretto.aggregate.parameter_server.chains import Chains
from stretto.aggregate.parameter_server.consistency import SyncAnswer, rule_for
from stretto.aggregate.parameter_server.encoding import RangeEncoding
from stretto.aggregate.parameter_server.head import Terms, UpdateRecord
from stretto.aggregate.parameter_server.layout import RangeLayout
from stretto.aggregate.parameter_server.lives import Lives
from stretto.aggregate.parameter_server.messages import (
    CopyName,
    EntryStored,
    InstallRange,
    LogEntry,
    Options,
    PullValues,
    PushGradient,
    PushReceived,
    RangeChain,
    RangeInstalled,
    RangeQuery,
    RangesPlaced,
    RequestRefused,
    ServedRequest,
    ServerJoins,
    ToServer,
    ValuesPulled,
    WorkerClock,
)
from stretto.aggregate.parameter_server.replica import MakeValues, RangeReplica
from stretto.aggregate.parameter_server.request_order import Lane
from stretto.collectives.urgency import Urgency
from stretto.errors import ConfigurationError
from stretto.protocol.machine import Actions, Machine, Payload, SendMessage

MAX_CHAINS: Final = 1000  # in one message, whose header must not be too long
MAX_COMPLAINTS: Final = 10

log = logging.getLogger("stretto.parameter_server")


def _no_fault(options: Options) -> str | None:
    return None


def _float32(index: int) -> RangeEncoding | None:
    return None


def _values(index: int) -> AnswerCodec | None:
    return None


def _no_record(record: UpdateRecord) -> None:
    return None


class ServerMachine(Machine):
    """See the module's text.

    `servers`, `workers`: those that the job begins with, the same everywhere. `joins`: others serve the model already; else this
    server begins with them, in whatever life. `others`: further servers that are here when this one joins.
    `make_values(range, values)` makes a range's values; `filled`: what it makes without any is what training begins with, else
    some worker has to `Fill` every range.
    """

    header_type = ToServer

    def __init__(
        self,
        rank: int,
        layout: RangeLayout,
        *,
        servers: Sequence[int],
        workers: Iterable[int],
        sync: SyncAnswer,
        make_values: MakeValues,
        replicas: int = 0,
        filled: bool = False,
        life: int = 0,
        lives: Mapping[int, int] | None = None,
        joins: bool | None = None,
        others: Iterable[int] = (),
        fault_in: Callable[[Options], str | None] = _no_fault,
        on_update: Callable[[UpdateRecord], None] = _no_record,
        encoding_of: Callable[[int], RangeEncoding | None] = _float32,
        answer_codec_of: Callable[[int], AnswerCodec | None] = _values,
    ) -> None:
        if replicas < 0 or not servers:
            raise ConfigurationError(
                f"ServerMachine(replicas={replicas}, servers={list(servers)}): there is at least one server, and each range has "
                f"no or more copies beside the one that is served.\nWrite for instance replicas=1."
            )
        self.rank = rank
        self.layout = layout
        self.lives = Lives(lives or {})
        self._joining = life > 0 if joins is None else joins
        self._others = set(others)
        self._first_workers = {worker: WorkerClock(0, 0, 0) for worker in workers}
        self._clients = set(self._first_workers)  # whoever wants to know where ranges are
        self._make_values = make_values
        rule = rule_for(sync, len(self._first_workers))
        self._filled = filled or rule.sums
        self._answer_codec_of, self._names = answer_codec_of, (CopyName(rank, life, number) for number in count())
        terms = Terms(rule, self.lives, self._send_answer, fault_in, on_update, encoding_of, self._copies_of)
        self.chains = Chains(rank, life, layout, servers, replicas, terms, self._make_replica, self._news_of, self._turn_all_away)
        self._attempts: dict[tuple[int, int], int] = {}  # the last one of each client for each range
        self._turned_away: dict[tuple[int, int], int] = {}  # of these, the last one that was
        self._greeted = {rank}  # servers that have been told that this one has joined
        self._queries: dict[tuple[int, int], RangeQuery] = {}  # by client and range, those that cannot be answered yet
        self._news: list[RangeChain] = []
        self._urgencies: dict[tuple[int, int], Urgency | None] = {}  # of what each client has asked for last of each range
        self._values = Lane(patience=2 * len(layout))  # that are answers, and wait for their turn
        self._waiting_values: dict[tuple[int, int], tuple[Any, Payload]] = {}  # by range and client
        self._actions: list[SendMessage] = []
        self._num_complaints = 0

    def _make_replica(self, index: int) -> RangeReplica:
        return RangeReplica(index, self._make_values, self._first_workers, self._filled)

    def _copies_of(self, index: int) -> SentCopies | None:
        how = self._answer_codec_of(index)
        return None if how is None else SentCopies(how, self._names.__next__)

    def served(self) -> dict[int, RangeReplica]:
        """The ranges that this server is first for, to be read in the thread that drives the machine."""
        return {index: each.replica for index, each in self.chains.holdings.items() if each.head is not None}

    # -- events -------------------------------------------------------------------------------------------------------

    def on_start(self, now: float) -> Actions:
        if self._joining:
            self._greet(self.chains.servers | self._others)
        else:
            self.chains.begin()
        return self._take_actions()

    def on_message(self, now: float, source: int, header: ToServer, payload: memoryview) -> Actions:
        if isinstance(header, PushGradient) and header.receipt is not None:
            self._send(source, PushReceived(header.receipt))  # whatever becomes of it
        match header:
            case RangesPlaced():
                self._heard_of(header)
            case ServerJoins(layout):
                self._server_joins(source, layout)
            case _ if not 0 <= header.range < len(self.layout):
                self._refuse(source, header, f"there is no such range: the model has {len(self.layout)}")
            case LogEntry() | EntryStored() | InstallRange() | RangeInstalled() if source in self._clients:
                self._refuse(source, header, "it is for a server to say")
            case LogEntry():
                self.chains.on_entry(header, payload)
            case EntryStored():
                self.chains.on_stored(header)
            case InstallRange():
                self.chains.install(header, payload)
            case RangeInstalled():
                self.chains.on_installed(header)
            case RangeQuery():
                self._clients.add(source)
                self._queries[source, header.range] = header
            case _:
                self._serve(source, header, payload)
        return self._take_actions()

    def on_view(self, now: float, joined: Sequence[int], left: Sequence[int], generation: int) -> Actions:
        self.lives.end(left)
        self._clients -= set(left)
        self._greeted -= set(left)
        self._queries = {asked: query for asked, query in self._queries.items() if asked[0] not in left}
        self._attempts = {asked: attempt for asked, attempt in self._attempts.items() if asked[0] not in left}
        self._urgencies = {asked: each for asked, each in self._urgencies.items() if asked[0] not in left}
        self._waiting_values = {key: each for key, each in self._waiting_values.items() if key[1] not in left}
        for rank in left:
            self._values.lose(rank)
        self._turned_away = {asked: attempt for asked, attempt in self._turned_away.items() if asked[0] not in left}
        self.chains.left(set(left))
        for holding in list(self.chains.holdings.values()):
            for rank in left:
                if holding.head is not None:
                    holding.head.forget(rank)
        self.lives.begin(joined, generation)
        return self._take_actions()

    def _take_actions(self) -> Actions:
        self.chains.advance()
        self._answer_queries()
        news, self._news = self._news, []
        for rank in sorted((self._clients | self.chains.servers) - {self.rank}) if news else ():
            self._tell_of(rank, news)
        for turn in self._values.leave():
            header, payload = self._waiting_values.pop(turn.key)
            self._actions.append(SendMessage(turn.to, header, payload, turn.number))
        actions, self._actions = self._actions, []
        return actions

    def on_sent(self, now: float, token: int) -> Actions:
        self._values.sent(token)
        return self._take_actions()

    def _send(self, to: int, header: Any, payload: Payload = b"") -> None:
        self._actions.append(SendMessage(to, header, payload))

    def _send_answer(self, to: int, header: Any, payload: Payload = b"") -> None:
        """Values that were asked for with an urgency wait for their turn."""
        urgency = self._urgencies.get((to, header.range)) if isinstance(header, ValuesPulled) else None
        if urgency is None:
            self._send(to, header, payload)
        else:
            self._waiting_values[header.range, to] = (header, payload)
            self._values.wait((header.range, to), to, memoryview(payload).nbytes, urgency)

    # -- workers ------------------------------------------------------------------------------------------------------

    def _serve(self, source: int, request: ServedRequest, payload: memoryview) -> None:
        self._welcome(source)
        holding = self.chains.holdings.get(request.range)
        asked = (source, request.range)
        self._attempts[asked] = request.attempt
        if request.layout != self.layout.digest:
            self._refuse(source, request, "it is about a model of another layout: names, sizes, groups or range_bytes differ")
        elif holding is None or holding.head is None:
            self._turn_away(source, request.range)
        elif request.attempt > self._turned_away.get(asked, -1):
            if isinstance(request, PullValues):
                self._urgencies[source, request.range] = request.urgency
            holding.head.take(source, request, payload)

    def _welcome(self, client: int) -> None:
        """It hears of chains when they change. One that has come, or come back, after they did is told of those that are served
        here: it may know a chain as it was while a server was missing."""
        if client in self._clients:
            return
        self._clients.add(client)
        if changed := self.chains.served_here_and_changed():
            self._tell_of(client, changed)

    def _refuse(self, source: int, header: Any, fault: str) -> None:
        kind = type(header).__name__
        reason = f"a {kind} of rank {source} for range {header.range} was refused: {fault}."
        self._complain(reason)
        clock = header.clock if isinstance(header, PushGradient) else -1
        self._send(source, RequestRefused(header.range, kind, clock, reason))

    def _complain(self, reason: str) -> None:
        self._num_complaints += 1
        if self._num_complaints <= MAX_COMPLAINTS:
            log.warning("rank %d: %s", self.rank, reason)

    def _turn_away(self, worker: int, index: int) -> None:
        attempt = self._turned_away[worker, index] = self._attempts[worker, index]
        self._send(worker, self.chains.not_head(index, attempt))

    def _turn_all_away(self, index: int) -> None:
        """Workers that wait for an answer from this server have to ask another one, of whom they will hear."""
        for worker, asked in list(self._attempts):
            if asked == index:
                self._turn_away(worker, index)

    def _tell_those_that_were_turned_away(self, chain: RangeChain) -> None:
        """These workers wait to hear who serves the range, and that server may not know of them."""
        for (worker, index), attempt in self._turned_away.items():
            if index == chain.range and attempt == self._attempts[worker, index]:
                self._tell_of(worker, [chain])

    def _answer_queries(self) -> None:
        """Answer the queries about deaths of which this server knows by now."""
        for (source, index), query in list(self._queries.items()):
            if all(self.lives.has_ended(*life) for life in query.ended):
                del self._queries[source, index]
                self._send(source, self.chains.report(index))

    # -- servers ------------------------------------------------------------------------------------------------------

    def _news_of(self, chain: RangeChain) -> None:
        self._news.append(chain)

    def _tell_of(self, rank: int, chains: list[RangeChain]) -> None:
        """At least one message, for it also says which servers there are."""
        servers = sorted(self.chains.servers)
        for begin in range(0, max(1, len(chains)), MAX_CHAINS):
            self._send(rank, RangesPlaced(chains[begin : begin + MAX_CHAINS], servers))

    def _heard_of(self, placed: RangesPlaced) -> None:
        for chain in placed.chains:
            if 0 <= chain.range < len(self.layout):
                self.chains.heard_of(chain)
                self._tell_those_that_were_turned_away(chain)
        servers = [rank for rank in placed.servers if self.lives.is_here(rank)]
        self.chains.servers.update(servers)
        if self._joining:
            self._greet(servers)

    def _greet(self, servers: Iterable[int]) -> None:
        for rank in sorted(set(servers) - self._greeted):
            self._send(rank, ServerJoins(self.layout.digest))
            self._greeted.add(rank)

    def _server_joins(self, source: int, layout: int) -> None:
        if layout != self.layout.digest:
            self._complain(f"rank {source} wants to serve a model of another layout: names, sizes, groups or range_bytes differ.")
            return
        self.chains.joined(source)
        served = [holding.chain() for holding in self.chains.holdings.values() if holding.head is not None and holding.active]
        self._tell_of(source, served)
