"""The loop that drives machines over a wire, in the one thread that may touch it.

    running = loop.start(machine, channel)            on every rank that takes part, with the same channel
    future = running.request(Read("x"))               the machine's `Reply` will be its result
    value = future.result(timeout_s)
    running.stop()

All of these, and `call`, are for any thread, and none of them waits. Whoever drives the wire calls `turn` between two calls of
`wire.progress`, and blocks there no longer than `turn` says.

Memory. What peers have on their way to a machine is bounded by `credit_bytes` for each of them (`Wire.serve`). What a machine
has sent and a peer has not taken waits in this process, at most `unsent_bytes` for each peer: a machine that goes on sending to
a peer that takes nothing ends with an error. A protocol in which that can happen lets its peers answer before it sends more.

Errors. An exception in a machine ends that machine: it is logged, and whoever waits for one of its replies gets the error. Its
peers are not told; to them it is a node that does not answer. Other machines, and collectives, go on.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from stretto.errors import ConfigurationError, PeerLost, StrettoError, WireError
from stretto.protocol.machine import Actions, HeaderReader, Machine, Node, Payload, Reply, SendMessage, SetTimer
from stretto.protocol.timers import Timers

if TYPE_CHECKING:  # at run time this package lies below the wires, for `launching` speaks its vocabulary too
    from stretto.wire.base import Wire

CREDIT_BYTES: Final = 16 << 20
UNSENT_BYTES: Final = 256 << 20

log = logging.getLogger("stretto.protocol")
T = TypeVar("T")


class _Ended(Machine):
    """In the place of a machine that has ended: nothing is told to it."""

    header_type = None

    def on_message(self, now: float, source: Any, header: Any, payload: memoryview) -> Actions:
        return ()


_ENDED: Final = _Ended()


class Running:
    """A machine under way on this rank. `error` says why it has ended; None while it has not."""

    def __init__(self, loop: Loop, machine: Machine, channel: int, unsent_bytes: int) -> None:
        self.name = type(machine).__name__
        self.machine = machine  # for the loop's thread alone; gone when it has ended, with all its memory
        self.channel = channel
        self.unsent_bytes = unsent_bytes
        self.unsent: Counter[int] = Counter()  # peer -> bytes that it has not taken yet
        self.reader = HeaderReader(machine)
        self.replies: dict[int, Future[Any]] = {}  # by ticket
        self.num_tickets = 0
        self.begun = False
        self.joined: list[int] = []  # ranks, before it began
        self.error: StrettoError | None = None
        self._loop = loop

    def __str__(self) -> str:
        return f"{self.name} on channel {self.channel}"

    def request(self, request: Any) -> Future[Any]:
        """Hand a request to the machine. Wait with a deadline, `result(timeout_s)`: a machine need not ever answer."""
        return self._loop.enter(lambda reply: self._loop.take_request(self, request, reply))

    def stop(self) -> None:
        """End the machine; requests that wait for a reply fail."""
        self._loop.call(lambda: self._loop.end(self, StrettoError(f"{self} was stopped")))


class Loop:
    """See the module's text."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._running: dict[int, Running] = {}  # by channel; those that have ended stay: a channel means one machine
        self._timers: Timers[tuple[int, str]] = Timers()
        self._calls: deque[tuple[Callable[[Future[Any]], None], Future[Any]]] = deque()
        self._to_myself: deque[tuple[Running, bytes, memoryview]] = deque()
        self._events: deque[tuple[Running, Callable[[float], Actions]]] = deque()
        self._busy = False  # with an event
        self._closed: StrettoError | None = None
        self._left = set(wire.lost)
        wire.on_lost(lambda lost: self._change_view([], [lost.rank]))
        wire.on_view(lambda joined, left, _: self._change_view(joined, left))

    # For any thread

    def start(
        self, machine: Machine, channel: int, *, credit_bytes: int = CREDIT_BYTES, unsent_bytes: int = UNSENT_BYTES
    ) -> Running:
        """Run a machine on a channel of its own. What goes wrong with it later is in `Running.error` and in its replies."""
        running = Running(self, machine, channel, unsent_bytes)
        first = self._running.setdefault(channel, running)
        if first is not running:
            raise ConfigurationError(
                f"{running}: that channel belongs to {first}, and messages of the two could not be told apart.\n"
                f"Give every machine a channel of its own, the same on all ranks."
            )
        self.call(lambda: self._begin(running, credit_bytes))
        if self._closed is not None:  # `close` may not have seen it
            running.error = self._closed
        return running

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Run `action` in the loop's thread, the only one that may touch the wire. It must not block there."""
        return self.enter(lambda future: future.set_result(action()))

    def enter(self, action: Callable[[Future[Any]], None]) -> Future[Any]:
        """Run `action(future)` in the loop's thread. It sees to the future's result; an exception ends it."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled: it may be under way
        self._calls.append((action, future))
        self._wire.wake()
        if self._closed is not None:  # nobody will look at it
            self._fail_calls(self._closed)
        return future

    # For the thread that drives the wire

    def turn(self) -> float:
        """Let machines take what is due. Returns for how many seconds only peers, or other threads, can bring more."""
        if not self._calls and not self._running:
            return math.inf
        for _ in range(len(self._calls)):
            self._make_call(*self._calls.popleft())
        for _ in range(len(self._to_myself)):
            running, header, payload = self._to_myself.popleft()
            self._taken(running, self._wire.rank, len(header) + payload.nbytes)
            self._on_message(running, self._wire.rank, header, payload)
        self._timers.fire(self._wire.now(), self._on_timer)
        return 0.0 if self._to_myself or self._calls else max(0.0, self._timers.next_at() - self._wire.now())

    def close(self, error: StrettoError) -> None:
        """Whatever is under way ends with `error`, and what comes later too."""
        self._closed = error
        for running in list(self._running.values()):
            self.end(running, error)
        self._fail_calls(error)

    def end(self, running: Running, error: StrettoError) -> None:
        if running.error is not None:
            return
        running.error = error
        running.machine = _ENDED
        self._timers.forget(lambda timer: timer[0] == running.channel)
        replies, running.replies = running.replies, {}
        for reply in replies.values():
            reply.set_exception(error)

    def take_request(self, running: Running, request: Any, reply: Future[Any]) -> None:
        if running.error is not None:
            raise running.error
        running.num_tickets += 1
        ticket = running.num_tickets
        running.replies[ticket] = reply
        self._run(running, lambda now: running.machine.on_request(now, ticket, request))

    # Events

    def _begin(self, running: Running, credit_bytes: int) -> None:
        running.begun = True
        self._run(running, running.machine.on_start)
        for rank in running.joined:
            if rank not in self._left:
                self._run(running, partial(self._view_of, running.machine, [rank], []))
        if self._left:
            self._run(running, partial(self._view_of, running.machine, [], sorted(self._left)))
        try:
            self._wire.serve(running.channel, partial(self._on_message, running), credit_bytes)
        except StrettoError as error:
            self.end(running, error)

    def _on_message(self, running: Running, source: int, header: bytes, payload: memoryview) -> None:
        if running.error is None and (value := running.reader.read(source, header)) is not None:
            if self._busy:
                payload = memoryview(bytes(payload))  # it has to wait, and the wire does not
            self._run(running, lambda now: running.machine.on_message(now, source, value, payload))

    def _on_timer(self, timer: tuple[int, str]) -> None:
        channel, name = timer
        running = self._running[channel]
        self._run(running, lambda now: running.machine.on_timer(now, name))

    def _change_view(self, joined: list[int], left: list[int]) -> None:
        """A peer that is lost has left; that it is taken out of the job later, if it is, is no news."""
        left = [rank for rank in left if rank not in self._left]
        self._left = (self._left | set(left)) - set(joined)
        for running in list(self._running.values()) if joined or left else ():
            if not running.begun:
                running.joined += joined
            else:
                self._run(running, partial(self._view_of, running.machine, joined, left))

    def _view_of(self, machine: Machine, joined: list[int], left: list[int], now: float) -> Actions:
        generation = max(map(self._wire.joined_in, joined), default=self._wire.generation)  # of that life, not of the view
        return machine.on_view(now, joined, left, generation)

    def _make_call(self, action: Callable[[Future[Any]], None], future: Future[Any]) -> None:
        try:
            action(future)
        except Exception as error:  # the caller's own: raised again where the result is waited for
            future.set_exception(error)

    def _fail_calls(self, error: StrettoError) -> None:
        while self._calls:
            with contextlib.suppress(IndexError):  # another thread was faster
                self._calls.popleft()[1].set_exception(error)

    def _run(self, running: Running, event: Callable[[float], Actions]) -> None:
        """Events come one at a time: a peer that is found lost while an action sends to it is told of afterwards."""
        self._events.append((running, event))
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                self._take_event(*self._events.popleft())
        finally:
            self._busy = False

    def _take_event(self, running: Running, event: Callable[[float], Actions]) -> None:
        if running.error is not None:
            return
        try:
            for action in event(self._wire.now()):
                self._perform(running, action)
        except StrettoError as error:
            log.error("%s has ended: %s", running, error)
            self.end(running, error)
        except Exception as error:
            log.error("%s has failed", running, exc_info=error)
            failure = StrettoError(f"{running} has failed: {error!r}. The log has the traceback: report it.")
            failure.__cause__ = error
            self.end(running, failure)

    # Actions

    def _perform(self, running: Running, action: SendMessage | SetTimer | Reply) -> None:
        match action:
            case SendMessage(to, header, payload, token):
                self._send(running, to, msgspec.msgpack.encode(header), payload, token)
            case SetTimer(name, after_s):
                self._timers.set((running.channel, name), None if after_s is None else self._wire.now() + after_s)
            case Reply(ticket, value, error):
                reply = running.replies.pop(ticket)
                if error is None:
                    reply.set_result(value)
                else:
                    reply.set_exception(error)

    def _send(self, running: Running, to: Node, header: bytes, payload: Payload, token: int | None) -> None:
        view = _as_bytes(payload)
        num_bytes = len(header) + view.nbytes
        if to in self._left:
            return
        if not isinstance(to, int) or (to != self._wire.rank and to not in self._wire.peers):
            raise ConfigurationError(f"{running} sends to {to!r}, which is no rank of this job: these are {self._wire.peers}.")
        if running.unsent[to] + num_bytes > running.unsent_bytes:
            raise StrettoError(
                f"{running} sends {num_bytes} bytes to rank {to}, which has not taken {running.unsent[to]} bytes sent before: "
                f"more than unsent_bytes={running.unsent_bytes} would wait in memory.\n"
                f"Find out why rank {to} does not take them, or let the protocol wait for its answers before it sends more."
            )
        running.unsent[to] += num_bytes
        if to == self._wire.rank:
            self._to_myself.append((running, header, view))
            self._tell_sent(running, token)
        else:
            if token is not None and running.machine.decides_order:
                self._wire.keep_queues_short()
            self._wire.offer(
                to, running.channel, header, view, lambda handle: self._taken(running, to, num_bytes, handle.error, token)
            )

    def _taken(self, running: Running, to: int, num_bytes: int, error: WireError | None = None, token: int | None = None) -> None:
        running.unsent[to] -= num_bytes
        if error is None:
            self._tell_sent(running, token)
        elif not isinstance(error, PeerLost):  # a loss is told as a view
            self.end(running, error)

    def _tell_sent(self, running: Running, token: int | None) -> None:
        if token is not None:
            self._run(running, lambda now: running.machine.on_sent(now, token))


def _as_bytes(payload: Payload) -> memoryview:
    """A wire counts and cuts in bytes; the elements of an array's memory may be longer."""
    view = memoryview(payload)
    return view.cast("B") if view.nbytes else memoryview(b"")
