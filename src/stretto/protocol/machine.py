"""A protocol is a state machine without input or output: it is told what happened, and answers with what to do.

    event      on_start, on_message, on_timer, on_view, on_request, on_sent
    action     SendMessage, SetTimer, Reply

A machine never blocks, reads no clock (every event carries the time) and draws no random number that it was not given.
So the same object runs in two places: on a wire, in the communication thread (`protocol/loop.py`), and in virtual time,
thousands of times a second, with losses, duplicates, reordering, pauses, cuts and kills from a seed
(`testing/virtual_network.py`).

What a machine may rely on:

- Events come one at a time; actions are carried out in order, before the next event.
- A message arrives as it was sent, or not at all: headers are msgspec values of the type that `header_type` names, and
  bytes that are not such a value are logged and ignored. A payload is any run of bytes, valid only during `on_message`;
  what was handed to `SendMessage` must not change afterwards.
- On a wire, messages from one peer come once and in order, until `on_view` says that it has left. The virtual network
  loses, doubles and reorders them unless it is told to be reliable; a machine that needs order says so in its text and
  is tested on reliable links only. In both, nothing comes from a peer that has left before it has joined again.
- `left` means: this node does not wait for that peer any more. It is dead, or was silent for so long that the wire gave
  it up. A machine that takes `left` for "dead" relies on silence being rare; one that counts majorities does not.

What the loop relies on: events are short. All machines of a process, and its collectives, share one thread.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import msgspec

from stretto.errors import StrettoError

Node = int | str | bytes  # a rank on a wire; whatever else names a participant elsewhere
Payload = bytes | bytearray | memoryview
MAX_COMPLAINTS: Final = 10

log = logging.getLogger("stretto.protocol")


class SendMessage(NamedTuple):
    """Send a header, and possibly bulk, to a node; to the node itself too. To one that has left: dropped."""

    to: Node
    header: Any
    payload: Payload = b""
    token: int | None = None  # to be told, with it, when it has left this node


class SetTimer(NamedTuple):
    """Call `on_timer(now, name)` in `after_s` seconds. A timer replaces the one of the same name; None takes it back."""

    name: str
    after_s: float | None


class Reply(NamedTuple):
    """Answer the local request of that ticket, once: with a value, or with the error that its caller shall raise."""

    ticket: int
    value: Any = None
    error: StrettoError | None = None


Actions = Iterable[SendMessage | SetTimer | Reply]


class Machine(ABC):
    """One node's part of a protocol. An exception that leaves an event ends the machine: its callers get the error."""

    header_type: ClassVar[Any]  # what `on_message` takes: a msgspec struct, or a union of tagged ones
    decides_order: ClassVar[bool] = True  # by what `on_sent` tells: queues below are to be short then

    def on_start(self, now: float) -> Actions:
        return ()

    @abstractmethod
    def on_message(self, now: float, source: Any, header: Any, payload: memoryview) -> Actions: ...

    def on_timer(self, now: float, name: str) -> Actions:
        return ()

    def on_sent(self, now: float, token: int) -> Actions:
        """A message with that token has left this node: what is sent now can no longer overtake it. Not told if its receiver is
        lost."""
        return ()

    def on_view(self, now: float, joined: Sequence[Any], left: Sequence[Any], generation: int) -> Actions:
        """Peers have come or gone. Those that are gone before the machine starts are told right after `on_start`."""
        return ()

    def on_request(self, now: float, ticket: int, request: Any) -> Actions:
        """The program of this node wants something; `Reply(ticket, ...)`, now or in a later event, is the answer."""
        name = type(self).__name__
        raise StrettoError(f"{name} was sent the request {request!r}, but takes none. Give {name} an on_request.")


class HeaderReader:
    """Reads headers that peers sent to a machine. What cannot be read is logged, the first few times, and ignored."""

    def __init__(self, machine: Machine) -> None:
        self._name = type(machine).__name__
        self._decoder = msgspec.msgpack.Decoder(machine.header_type)
        self.num_ignored = 0

    def read(self, source: Node, body: bytes) -> Any | None:
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as problem:
            self.num_ignored += 1
            if self.num_ignored <= MAX_COMPLAINTS:
                log.warning("%s ignored a message from %r that cannot be read: %s", self._name, source, problem)
            return None
