"""Messages that nobody asked for, under credit: `serve` and `offer`, the same on every wire.

A collective knows what will arrive and posts a receive for it. A protocol does not: a parameter server is pushed to whenever a
worker has something. So a server gives each peer a *credit* in bytes, and a sender keeps what exceeds it in its own memory:

    receiver                                       sender
    serve(channel, ..., credit_bytes)   -- OPEN -->  its offers to this channel have waited for it, and may leave now
                                       <-- head --   channel, header, lengths; a short payload rides with it
                                       <== payload   of a longer message: an ordinary `send`, so memory is shared or read in place
    on_message(source, header, payload)
                                        -- RETURN -> the credit of what was consumed, gathered until it is half of it all
                                       <-- ASK --    the next message does not fit: return what there is, and then as you consume

A message costs its header, its payload and `MESSAGE_BYTES`, so that empty ones are bounded too. What a peer has sent and
`on_message` has not consumed is never more than the credit; a peer that sends more is lost. When a head arrives, the receiver
posts a receive for its payload. Messages of one channel are handed over in the order of their heads, also where a short payload
overtakes a long one that waits for shared memory.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from stretto.errors import ConfigurationError, PeerLost, WireError
from stretto.wire.base import Handle, OnMessage, Tag
from stretto.wire.frames import MAX_PAYLOAD_BYTES

if TYPE_CHECKING:
    from stretto.wire.mailbox import MailboxWire

TOPIC_CREDIT: Final = 4
TOPIC_HEAD: Final = 5

MESSAGE_BYTES: Final = 64  # what a message costs beyond its header and payload
RIDING_BYTES: Final = 16 << 10  # payloads up to this ride with the head
MAX_HEADER_BYTES: Final = 64 << 10
MAX_CHANNELS: Final = 1 << 12  # that one peer may serve
PAYLOAD_CHANNEL: Final = 0xFFFFFFFF  # of the tags of long payloads; no collective has it

OPEN: Final = 1
RETURN: Final = 2
ASK: Final = 3
CREDIT: Final = struct.Struct("<BIQ")  # what, channel, bytes
HEAD: Final = struct.Struct("<IIIQ")  # channel, number of the long payload (0: it rides), bytes of the header, of the payload


class Service(NamedTuple):
    """A channel that this rank serves."""

    on_message: OnMessage
    credit_bytes: int


class OfferedMessage(NamedTuple):
    """A message that waits for credit."""

    handle: Handle
    header: bytes
    payload: memoryview

    @property
    def cost(self) -> int:
        return MESSAGE_BYTES + len(self.header) + self.payload.nbytes


class Outflow:
    """What this rank offers to one channel of one peer."""

    def __init__(self) -> None:
        self.credit: int | None = None  # None: the peer does not serve this channel (yet)
        self.available = 0
        self.asked = False  # for credit, since the last time that some came
        self.waiting: deque[OfferedMessage] = deque()


class HeardMessage(NamedTuple):
    """A message whose head has come."""

    header: bytes
    payload: bytes | None  # None: it is still to come
    number: int
    num_bytes: int


class Inflow:
    """What one peer sends to one channel of this rank."""

    def __init__(self, source: int, channel: int, service: Service) -> None:
        self.source = source
        self.channel = channel
        self.service = service
        self.held = 0  # bytes of credit that the peer has used and not got back
        self.owed = 0  # of these, what has been consumed
        self.asked = False  # the peer waits for credit
        self.heard: deque[HeardMessage] = deque()
        self.delivering = False
        self.receiving = False


class Serving:
    """The services and offers of one wire; driven by its `progress`. See the module's text."""

    def __init__(self, wire: MailboxWire[Any]) -> None:
        self._wire = wire
        self.credit_given = 0  # to each peer, in all
        self._services: dict[int, Service] = {}
        self._outflows: dict[int, dict[int, Outflow]] = {}  # peer -> channel -> what goes there
        self._inflows: dict[tuple[int, int], Inflow] = {}  # (source, channel)
        self._announced: set[tuple[int, int]] = set()  # (source, number) of the long payloads that are due
        self._numbers: dict[int, int] = {}  # peer -> number of the last long payload sent to it

    def serve(self, channel: int, on_message: OnMessage, credit_bytes: int) -> None:
        if credit_bytes <= MESSAGE_BYTES:
            raise ConfigurationError(
                f"serve(channel={channel}, credit_bytes={credit_bytes}): a message costs {MESSAGE_BYTES} bytes beyond its header "
                f"and payload, so none could ever be sent.\nGive the size of the largest message, or better of several."
            )
        known = self._services.get(channel)
        if known is not None and known.credit_bytes != credit_bytes:
            raise ConfigurationError(
                f"serve(channel={channel}, credit_bytes={credit_bytes}): it is served with {known.credit_bytes} already, "
                f"and peers have been told so.\nServe it with the same credit, or take another channel."
            )
        self._services[channel] = Service(on_message, credit_bytes)
        for (_, other), inflow in self._inflows.items():
            if other == channel:
                inflow.service = self._services[channel]
        if known is None:
            self.credit_given += credit_bytes
            for peer in self._wire.peers:
                self._tell(peer, OPEN, channel, credit_bytes)

    def greet(self, peer: int) -> None:
        """A peer has come: tell it what is served here."""
        for channel, service in self._services.items():
            self._tell(peer, OPEN, channel, service.credit_bytes)

    def forget(self, peer: int) -> list[Handle]:
        """A peer is gone; returns the handles of what can no longer be sent to it."""
        for key in [key for key in self._inflows if key[0] == peer]:
            del self._inflows[key]
        self._announced = {each for each in self._announced if each[0] != peer}
        self._numbers.pop(peer, None)
        outflows = self._outflows.pop(peer, {}).values()
        return [message.handle for outflow in outflows for message in outflow.waiting]

    def waits_for(self, peer: int) -> bool:
        return any(outflow.waiting for outflow in self._outflows.get(peer, {}).values())

    # -- sending ------------------------------------------------------------------------------------------------------

    def offer(
        self, to: int, channel: int, header: bytes, payload: memoryview, on_done: Callable[[Handle], None] | None
    ) -> Handle:
        handle = Handle(to, Tag(channel, 0, 0), on_done)
        self._check(to, channel, header, payload)
        if (lost := self._wire._loss_of(to)) is not None:
            handle.finish(lost)
            return handle
        outflow = self._outflows.setdefault(to, {}).setdefault(channel, Outflow())
        outflow.waiting.append(OfferedMessage(handle, header, payload))
        self._flush(to, channel, outflow)
        return handle

    def _check(self, to: int, channel: int, header: bytes, payload: memoryview) -> None:
        asked = f"offer(to={to}, channel={channel}) of a header of {len(header)} and a payload of {payload.nbytes} bytes"
        if to == self._wire.rank:
            raise ConfigurationError(f"{asked}: this is rank {to}, and a wire joins different workers. Handle it here instead.")
        if len(header) > MAX_HEADER_BYTES or payload.nbytes > MAX_PAYLOAD_BYTES:
            raise ConfigurationError(
                f"{asked}: a header has at most {MAX_HEADER_BYTES} bytes and a payload {MAX_PAYLOAD_BYTES}, so that none "
                f"holds up the others.\nSend it in pieces."
            )
        if not payload.c_contiguous:
            raise ConfigurationError(f"{asked}: the memory is not contiguous, so it is not one run of bytes. Send a copy.")

    def _flush(self, to: int, channel: int, outflow: Outflow) -> None:
        while outflow.waiting and outflow.credit is not None:
            message = outflow.waiting[0]
            if outflow.available < message.cost <= outflow.credit:
                if not outflow.asked:
                    outflow.asked = True
                    self._tell(to, ASK, channel)
                return
            outflow.waiting.popleft()
            if message.cost > outflow.credit:
                message.handle.finish(_too_large(to, channel, message, outflow.credit))
            else:
                outflow.available -= message.cost
                self._send(to, channel, message)

    def _send(self, to: int, channel: int, message: OfferedMessage) -> None:
        handle, header, payload = message
        if payload.nbytes <= RIDING_BYTES:
            head = HEAD.pack(channel, 0, len(header), payload.nbytes)
            self._wire._post(to, TOPIC_HEAD, b"".join((head, header, payload)))
            handle.finish()
            return
        number = self._numbers[to] = self._numbers.get(to, 0) % 0xFFFFFFFF + 1  # never 0
        self._wire._post(to, TOPIC_HEAD, HEAD.pack(channel, number, len(header), payload.nbytes) + header)
        self._wire.send(payload, to, Tag(PAYLOAD_CHANNEL, number, 0), 0, lambda sent: handle.finish(sent.error))

    def _tell(self, peer: int, what: int, channel: int, num_bytes: int = 0) -> None:
        self._wire._post(peer, TOPIC_CREDIT, CREDIT.pack(what, channel, num_bytes))

    # -- what peers say -----------------------------------------------------------------------------------------------

    def on_credit(self, source: int, body: bytes) -> None:
        try:
            what, channel, num_bytes = CREDIT.unpack(body)
            if what == ASK:
                self._on_ask(source, channel)
            elif what in (OPEN, RETURN):
                self._on_more(source, channel, num_bytes, opens=what == OPEN)
            else:
                raise ValueError(f"{what} is no message about credit")
        except (struct.error, ValueError) as problem:
            self._wire._lose(source, f"it sent a bad frame: {problem}")

    def _on_ask(self, source: int, channel: int) -> None:
        inflow = self._inflows.get((source, channel))
        if inflow is None:
            raise ValueError(f"a question for the credit of channel {channel}, of which it has used none")
        inflow.asked = True
        if inflow.owed:
            self._return_credit(inflow)

    def _on_more(self, source: int, channel: int, num_bytes: int, *, opens: bool) -> None:
        outflows = self._outflows.setdefault(source, {})
        if opens:
            outflow = outflows.setdefault(channel, Outflow())
            if outflow.credit is not None or len(outflows) > MAX_CHANNELS:
                raise ValueError(f"credit for channel {channel} twice, or for more than {MAX_CHANNELS} channels")
            outflow.credit = outflow.available = num_bytes
        else:
            found = outflows.get(channel)
            if found is None or found.credit is None or num_bytes > found.credit - found.available:
                raise ValueError(f"a return of {num_bytes} bytes of credit for channel {channel}, which had not been used")
            outflow = found
            outflow.available += num_bytes
        outflow.asked = False
        self._flush(source, channel, outflow)

    def on_head(self, source: int, body: bytes) -> None:
        try:
            channel, number, header_bytes, num_bytes = HEAD.unpack_from(body)
            begin = HEAD.size + header_bytes
            if len(body) != begin + (0 if number else num_bytes) or header_bytes > MAX_HEADER_BYTES:
                raise ValueError(f"a message of {len(body)} bytes that declares {header_bytes} and {num_bytes}")
            if (source, number) in self._announced:
                raise ValueError(f"payload number {number} a second time, and the first is still due")
            inflow = self._inflow_for(source, channel, MESSAGE_BYTES + header_bytes + num_bytes)
        except (struct.error, ValueError) as problem:
            self._wire._lose(source, f"it sent a bad frame: {problem}")
            return
        if number:
            self._announced.add((source, number))
        inflow.heard.append(HeardMessage(body[HEAD.size : begin], None if number else body[begin:], number, num_bytes))
        self._deliver(inflow)

    def _inflow_for(self, source: int, channel: int, cost: int) -> Inflow:
        """Use so much of the credit that the sender was given."""
        service = self._services.get(channel)
        if service is None:
            raise ValueError(f"a message for channel {channel}, which is not served here")
        inflow = self._inflows.setdefault((source, channel), Inflow(source, channel, service))
        if inflow.held + cost > service.credit_bytes:
            raise ValueError(f"{inflow.held + cost} bytes under way to channel {channel}, its credit is {service.credit_bytes}")
        inflow.held += cost
        return inflow

    # -- handing over -------------------------------------------------------------------------------------------------

    def _deliver(self, inflow: Inflow) -> None:
        """Hand over what is complete, in order, and ask for the payload of the first message that is not."""
        if inflow.delivering:
            return  # called from a callback of the loop below, which goes on
        inflow.delivering = True
        try:
            while inflow.heard and not inflow.receiving and self._is_current(inflow):
                message = inflow.heard[0]
                if message.payload is not None:
                    self._consume(inflow, memoryview(message.payload))
                    continue
                inflow.receiving = True
                tag = Tag(PAYLOAD_CHANNEL, message.number, 0)
                consume = partial(self._consume, inflow)
                self._wire.recv(inflow.source, tag, message.num_bytes, 0, consume, partial(self._received, inflow))
        finally:
            inflow.delivering = False

    def _is_current(self, inflow: Inflow) -> bool:
        """Whether its peer is still here: a callback may have retired or lost it."""
        return self._inflows.get((inflow.source, inflow.channel)) is inflow

    def _received(self, inflow: Inflow, handle: Handle) -> None:
        inflow.receiving = False
        if handle.error is None:
            self._deliver(inflow)
            return
        inflow.heard.clear()
        if not isinstance(handle.error, PeerLost):
            self._wire._lose(inflow.source, f"it sent a bad frame: {handle.error}")

    def _consume(self, inflow: Inflow, payload: memoryview) -> None:
        message = inflow.heard.popleft()
        self._announced.discard((inflow.source, message.number))
        inflow.owed += MESSAGE_BYTES + len(message.header) + message.num_bytes
        try:
            inflow.service.on_message(inflow.source, message.header, payload)
        except (UnicodeError, RecursionError) as problem:  # what decoding raises besides its own errors
            self._wire._lose(inflow.source, f"it sent a bad frame: a malformed message ({problem})")
        finally:
            inflow.receiving = False  # also where the exception keeps the receive from ending
            if self._is_current(inflow) and (inflow.asked or 2 * inflow.owed >= inflow.service.credit_bytes):
                self._return_credit(inflow)

    def _return_credit(self, inflow: Inflow) -> None:
        returned, inflow.owed, inflow.asked = inflow.owed, 0, False
        inflow.held -= returned
        self._tell(inflow.source, RETURN, inflow.channel, returned)


def _too_large(to: int, channel: int, message: OfferedMessage, credit: int) -> WireError:
    return WireError(
        f"offer(to={to}, channel={channel}) of a header of {len(message.header)} and a payload of {message.payload.nbytes} "
        f"bytes: that costs {message.cost} with its {MESSAGE_BYTES} of overhead, and rank {to} serves this channel with a "
        f"credit of {credit}, so it could never be sent.\nSend it in pieces, or serve the channel with a larger credit_bytes."
    )
