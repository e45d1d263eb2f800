"""What the wires of one process share: messages by reference, and other threads that bring them.

All state belongs to the one thread that drives the wire; other threads only append to its `_inbox` (a subclass says how that
wakes the driver), and items are handled one by one in `_drain`. Messages are matched with receives as on sockets
(`wire/mailbox.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable

from stretto.errors import ConfigurationError, PeerLost, WireError
from stretto.launching.peers import Peer
from stretto.testing.envelopes import Arrival, BufferChanged, Envelope, Gone, Goodbye, Item, Knock, Posted, Sent
from stretto.wire.base import Handle
from stretto.wire.frames import HEADER_BYTES
from stretto.wire.handshake import Life
from stretto.wire.mailbox import Key, MailboxWire, PostedReceive, retired_by_it

LEFT = "it left the job"


class WireKilled(WireError):
    """This rank's own wire was killed: for the program it is as if its process were gone. Let it end the thread."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} was killed: {reason}. Nothing can be sent or received on its wire any more.")
        self.rank = rank
        self.reason = reason

    def __reduce__(self) -> tuple[type[WireKilled], tuple[int, str]]:
        return WireKilled, (self.rank, self.reason)


class InProcessWire(MailboxWire[Envelope]):
    """See the module's text. Subclasses move items between inboxes and keep the time."""

    def __init__(self, rank: int, world_size: int, check: bool, generation: int = 0, members: Iterable[Life] = ()) -> None:
        super().__init__(rank, world_size, generation)
        self._lives = (dict(members) or dict.fromkeys(range(world_size), generation)) | {rank: generation}
        self._members = set(self._lives)
        self.life = Life(rank, generation)
        self._early: dict[Life, list[Item]] = {}  # from newcomers that have not been admitted yet
        self._check = check
        self._inbox: deque[Item] = deque()
        self._sending: dict[int, Envelope] = {}
        self._untold: deque[PeerLost] = deque()
        self._killed: str | None = None

    # What a subclass adds

    @abstractmethod
    def _transmit(self, envelope: Envelope) -> None:
        """Bring an `Arrival` to the target's inbox, sometime."""

    @abstractmethod
    def _transmit_post(self, to: int, posted: Posted) -> None:
        """Bring it to the target's inbox, after everything posted there before."""

    @abstractmethod
    def _acknowledge(self, envelope: Envelope) -> None:
        """The receiver has read the message: where this is what makes a send done, tell the sender."""

    @abstractmethod
    def _may_keep_parked(self, envelope: Envelope) -> bool:
        """Read a message nobody has asked for yet (freeing the sender), or leave it in the sender's memory?"""

    @abstractmethod
    def kill(self, reason: str = "its process died") -> None:
        """As if this rank's process ended now, without a word. Any thread may call it."""

    def abandon(self) -> None:
        self.kill("it ended without a goodbye")

    # The contract

    def _send(self, handle: Handle, data: memoryview, dtype: int) -> None:
        if not data.c_contiguous:
            raise ConfigurationError(
                f"send of {data.nbytes} bytes to rank {handle.peer} ({handle.tag}): the memory is not contiguous, so it is not "
                f"one run of bytes.\nSend a contiguous copy."
            )
        self._sent += data.nbytes + HEADER_BYTES
        view = data.cast("B") if data.nbytes else memoryview(b"")
        envelope = Envelope(self.life, handle.peer, handle.tag, dtype, view, handle, self._check)
        self._sending[id(envelope)] = envelope
        self._transmit(envelope)

    def _post(self, to: int, topic: int, body: bytes) -> None:
        if to in self.lost or to in self._left:
            return
        self._sent += len(body) + HEADER_BYTES
        self._transmit_post(to, Posted(self.life, topic, bytes(body)))

    @property
    def peers(self) -> list[int]:
        return sorted(self._members - {self.rank})

    @property
    def peer(self) -> Peer:
        """This rank as others know it: what they admit."""
        return Peer(self.rank, self.rank, "here", "", 0, generation=self._born)

    def members(self) -> list[Life]:
        """The lives that are in this rank's view: what a newcomer to the same world has to know."""
        return [Life(rank, self._lives[rank]) for rank in sorted(self._members)]

    def _begin_admission(self, peer: Peer) -> None:
        self._inbox.extendleft(reversed(self._early.pop(Life(peer.rank, peer.generation), [])))

    def _joined(self, rank: int) -> None:
        self._members.add(rank)
        super()._joined(rank)

    def _forget(self, rank: int) -> None:
        self._members.discard(rank)

    def cancel(self, channel: int, sequence: int) -> None:
        super().cancel(channel, sequence)
        for number, envelope in list(self._sending.items()):
            if envelope.tag[:2] == (channel, sequence):
                envelope.revoke()
                del self._sending[number]

    # Inside

    def _enter(self) -> None:
        """Refuse everything on a wire that is closed or killed."""
        if self._killed is not None:
            raise WireKilled(self.rank, self._killed)
        if self._closed:
            raise WireError(f"rank {self.rank}'s wire is closed: nothing can be sent or received on it any more. Close it last.")

    def _loss_of(self, peer: int) -> PeerLost | None:
        """Why nothing can be waited for from this peer. Waiting for one that has left is what makes it lost."""
        if peer in self._left:
            self._lose(peer, LEFT)
        return self.lost.get(peer)

    def _has_news(self) -> bool:
        return bool(self._inbox or self._untold)

    def _drain(self) -> None:
        """Handle everything that is here now. An item that raises is gone; those behind it stay for the next time."""
        for _ in range(len(self._inbox)):
            if self._inbox and self._killed is None:  # a callback may have closed or killed this wire
                self._handle(self._inbox.popleft())
        while self._untold and self._killed is None:
            super()._tell_lost(self._untold.popleft())

    def _tell_lost(self, error: PeerLost) -> None:
        self._untold.append(error)  # for `progress` to tell: a peer may be found lost inside `send` or `recv`

    def _handle(self, item: Item) -> None:
        if not isinstance(item, Sent):
            origin = item.origin
            admitted = self._lives.get(origin.rank, -1)
            if origin.generation != admitted:
                if origin.generation > admitted:  # else it is of a former life
                    self._early.setdefault(origin, []).append(item)
                return
            if origin.rank in self.lost and origin.rank not in self._admitted:
                return  # as on a network, nothing comes from a peer that is lost
        match item:
            case Arrival(envelope):
                self._deliver(envelope.key, envelope)
            case Sent(envelope):
                self._finish_send(envelope)
            case Posted(origin, topic, body):
                self._hear(origin.rank, topic, body)
            case Knock(origin):
                if origin.rank in self._admitted:
                    self._joined(origin.rank)
            case Gone(origin, reason):
                self._lose(origin.rank, reason)
            case Goodbye(origin, int(generation)):
                self._lose(origin.rank, retired_by_it(generation))
            case Goodbye(origin):
                self._left.add(origin.rank)
                if self._waits_for(origin.rank):
                    self._lose(origin.rank, LEFT)

    def _park(self, key: Key, message: Envelope) -> None:
        if not self._may_keep_parked(message):
            if message.read() is None:
                return
            self._let_go(message)
        super()._park(key, message)

    def _hand_over(self, receive: PostedReceive, message: Envelope) -> None:
        problem = receive.problem(message)
        if problem is not None:
            self._let_go(message)
            receive.handle.finish(problem)
            return
        data = message.read()
        if data is None:  # cancelled by its sender: this recv waits on, for its deadline or its own cancel
            self._expected[message.key] = receive
            return
        self._let_go(message)
        if message.changed:
            raise BufferChanged(message)
        if receive.into is None:
            receive.consume(memoryview(data))
        elif data:
            receive.into.cast("B")[:] = data
        if message.checked:
            data[:] = b"\xa5" * len(data)
        receive.handle.finish()

    def _let_go(self, message: Envelope) -> None:
        if not message.acknowledged:
            message.acknowledged = True
            self._acknowledge(message)

    def _finish_send(self, envelope: Envelope) -> None:
        if self._sending.pop(id(envelope), None) is None:
            return
        envelope.verify()
        envelope.revoke()  # read by now; a message that stays parked must not keep the sender's memory alive
        envelope.handle.finish()
        if envelope.changed:
            raise BufferChanged(envelope)

    def _waits_for(self, peer: int) -> bool:
        waits = any(key[0] == peer for key in self._expected)
        return waits or any(each.target == peer for each in self._sending.values()) or self._serving.waits_for(peer)

    def _stop_sending(self, rank: int) -> list[Handle]:
        stopped = [(number, envelope) for number, envelope in self._sending.items() if envelope.target == rank]
        for number, envelope in stopped:
            envelope.revoke()
            del self._sending[number]
        return [envelope.handle for _, envelope in stopped]

    def _release(self) -> None:
        """Forget everything at the end. What is still under way goes out as it is now: the memory is the caller's again."""
        for envelope in self._sending.values():
            envelope.read()
        self._sending.clear()
        self._expected.clear()
        self._parked.clear()
        self._unheard.clear()
        self._inbox.clear()
        self._untold.clear()
