"""What a worker's requests to servers cost: a machine around a client's that passes everything on and counts what it sees.

    bytes           `ledger.sent["push", server]`, `ledger.received["pull", server]`; what is filled and exported as "state".
                    Servers have ranks of their own, from the number of workers on
    queue           requests that servers have not answered, now and at most
    spans           with a tracer, each push and each pull on its way. The time for which the server kept the request
                    (`server_record.py`) is left out: what is left is the network's, and the server's queue

It also asks the servers for what they have counted (`AskLedgers`). The reply is a dict by server; one that dies meanwhile is not
in it.

Cost:      a few dictionary entries for each message.
Invariant: the machine inside gets the same events and does the same as without it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from stretto.aggregate.parameter_server.client import ClientMachine
from stretto.aggregate.parameter_server.messages import (
    ExportRange,
    FillValues,
    PullValues,
    PushGradient,
    PushTaken,
    RangeExported,
    RangeFilled,
    ToClient,
    ValuesPulled,
)
from stretto.aggregate.parameter_server.routes import Route
from stretto.aggregate.parameter_server.server_record import LedgerQuery, ServerLedger
from stretto.observe.ledger import Ledger
from stretto.observe.trace import Tracer
from stretto.protocol.machine import Actions, Machine, Reply, SendMessage

ASKED: Final[dict[type, str]] = {PushGradient: "push", PullValues: "pull", FillValues: "fill", ExportRange: "export"}
ANSWERED: Final[dict[type, str]] = {PushTaken: "push", ValuesPulled: "pull", RangeFilled: "fill", RangeExported: "export"}
COUNTED_AS: Final = {"push": "push", "pull": "pull", "fill": "state", "export": "state"}


class AskLedgers(NamedTuple):
    """What have the servers counted of this model? The reply is a dict of `ServerLedger` by rank, of those that live."""


class RequestUnderWay(NamedTuple):
    server: int
    begin_ns: int
    num_bytes: int


class RecordedClient(Machine):
    """See the module's text."""

    header_type = ToClient | ServerLedger

    def __init__(
        self, machine: ClientMachine, servers: Sequence[int], first_server: int, ledger: Ledger, tracer: Tracer | None
    ) -> None:
        self._machine, self._first_server = machine, first_server
        self._servers = set(servers)
        self._book, self._tracer = ledger, tracer
        self._under_way: dict[tuple[str, int, int], RequestUnderWay] = {}  # kind, range, clock of a push
        self._queries: dict[int, tuple[set[int], dict[int, ServerLedger]]] = {}  # ticket -> who has not answered; the others

    @property
    def routes(self) -> Sequence[Route]:
        return self._machine.routes

    # -- events -------------------------------------------------------------------------------------------------------

    def on_start(self, now: float) -> Actions:
        return self._machine.on_start(now)

    def on_request(self, now: float, ticket: int, request: Any) -> Actions:
        if isinstance(request, AskLedgers):
            self._queries[ticket] = set(self._servers), {}
            return [*(SendMessage(server, LedgerQuery(ticket)) for server in sorted(self._servers)), *self._answered(ticket)]
        return self._noted(self._machine.on_request(now, ticket, request))

    def on_message(self, now: float, source: int, header: Any, payload: memoryview) -> Actions:
        if isinstance(header, ServerLedger):
            if header.number in self._queries and source in self._queries[header.number][0]:
                self._queries[header.number][0].discard(source)
                self._queries[header.number][1][source] = header
                return self._answered(header.number)
            return ()
        kind = ANSWERED.get(type(header))
        if kind is not None:
            self._answer(kind, source, header, payload)
        return self._noted(self._machine.on_message(now, source, header, payload))

    def on_view(self, now: float, joined: Sequence[int], left: Sequence[int], generation: int) -> Actions:
        self._servers = (self._servers - set(left)) | {rank for rank in joined if rank >= self._first_server}
        self._under_way = {key: each for key, each in self._under_way.items() if each.server not in left}
        replies: list[Reply] = []
        for ticket in list(self._queries):
            self._queries[ticket][0].difference_update(left)
            replies += self._answered(ticket)
        return [*replies, *self._noted(self._machine.on_view(now, joined, left, generation))]

    def _answered(self, ticket: int) -> list[Reply]:
        waiting, found = self._queries[ticket]
        if waiting:
            return []
        del self._queries[ticket]
        return [Reply(ticket, dict(sorted(found.items())))]

    # -- what is noted ------------------------------------------------------------------------------------------------

    def _noted(self, actions: Actions) -> Actions:
        actions = list(actions)
        for action in actions:
            if isinstance(action, SendMessage) and (kind := ASKED.get(type(action.header))) is not None:
                self._asked(kind, int(action.to), action.header, memoryview(action.payload).nbytes)
        return actions

    def _asked(self, kind: str, server: int, header: Any, num_bytes: int) -> None:
        clock = header.clock if kind == "push" else -1
        self._under_way[kind, header.range, clock] = RequestUnderWay(server, time.perf_counter_ns(), num_bytes)
        self._book.count_message(COUNTED_AS[kind], server, sent=num_bytes)
        self._book.count_under_way(len(self._under_way))

    def _answer(self, kind: str, source: int, header: Any, payload: memoryview) -> None:
        self._book.count_message(COUNTED_AS[kind], source, received=payload.nbytes)
        request = self._under_way.pop((kind, header.range, header.clock if kind == "push" else -1), None)
        self._book.count_under_way(len(self._under_way))
        if request is None or self._tracer is None:
            return
        now_ns, server = time.perf_counter_ns(), source - self._first_server
        kept_ns = max(0, 1000 * getattr(header, "kept_us", 0))
        if kind in ("push", "fill"):
            end_ns = max(request.begin_ns, now_ns - kept_ns)
            self._tracer.span(
                "send", f"{kind} to server {server}", request.begin_ns, end_ns=end_ns, num_bytes=request.num_bytes, peer=source
            )
        else:
            begin_ns = min(now_ns, request.begin_ns + kept_ns)
            self._tracer.span("receive", f"{kind} from server {server}", begin_ns, num_bytes=payload.nbytes, peer=source)
