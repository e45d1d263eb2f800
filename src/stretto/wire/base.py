"""The contract of a wire: how one rank moves bytes to and from the others.

A wire is driven by exactly one thread (the communication thread, or the caller in tests). Nothing here blocks except
`progress`, which does all input and output and runs the callbacks of whatever has finished:

    handle = wire.send(data, to=2, tag=tag, dtype=code)       # non-blocking; `data` is read-only until handle.done
    handle = wire.recv(source=1, tag=tag, num_bytes=n, dtype=code, consume=f)
    while not handle.done: wire.progress(timeout_s)

`consume(view)` gets the arrived bytes, valid only during the call, straight from the wire's own memory: the executor adds
or copies them into a tensor with no buffer in between.

`post`/`listen` carry small control messages (a few kilobytes at most). `offer`/`serve` carry messages of any size that nobody
posted a receive for, under credit, so that memory stays bounded against any peer: protocols live on them (`serving.py`).

Members come and go. A *view* is the set of members, numbered by its generation. Whoever is above the wires agrees on views,
numbers them, and calls `admit` and `retire` on every member. A rank that comes back is another peer: rank and generation
together name one life of a worker. Every frame carries the generation in which its sender joined, and a receiver takes only
what comes from the life that it has admitted. So what is under way while the view changes arrives, and nothing of a former
life does.

Errors. A peer's failure never raises out of `progress`: every handle that waits for that peer ends with
`handle.error = PeerLost(rank)`, `wire.lost[rank]` says why, and `on_lost` callbacks are told. A message whose size or
dtype is not the one the receiver asked for ends the receiving handle with `FrameError`; garbage from a peer makes that
peer lost.

Time is `wire.now()`: the machine's monotonic clock, or a virtual one. All deadlines above a wire are reckoned with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import NamedTuple

from stretto.errors import PeerLost, WireError
from stretto.launching.peers import Peer


class Tag(NamedTuple):
    """Names one message between two ranks: which stream of collectives, which collective of it, which message of that."""

    channel: int  # 0 .. 2**32-1: 0 is the job's own; each engine has one
    sequence: int  # 0 .. 2**32-1: the collective
    # 0 .. 2**32-1: the message, counted per (sender, receiver)
    index: int  # type: ignore[assignment]  # tuple has a method of that name, which nobody needs here
    digest: int = 0  # 0 .. 2**32-1: of what the sender believes it is doing. Not part of the name: a message that meets a
    # receive with another digest ends it with `DigestMismatch`


class DigestMismatch(WireError):
    """A message met its receive, but the two sides mean different collectives."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} is in another collective")
        self.rank = rank


class Handle:
    """One transfer under way. `on_done(handle)` is called once, from `progress` (or at once, inside send/recv)."""

    __slots__ = ("done", "error", "on_done", "peer", "tag")

    def __init__(self, peer: int, tag: Tag, on_done: Callable[[Handle], None] | None = None) -> None:
        self.peer = peer
        self.tag = tag
        self.done = False
        self.error: WireError | None = None
        self.on_done = on_done

    def finish(self, error: WireError | None = None) -> None:
        if self.done:
            return
        self.done = True
        self.error = error
        if self.on_done is not None:
            self.on_done(self)


Consume = Callable[[memoryview], None]
Listener = Callable[[int, bytes], None]  # (source rank, body)
OnMessage = Callable[[int, bytes, memoryview], None]  # (source rank, header, payload)
LostListener = Callable[[PeerLost], None]
ViewListener = Callable[[list[int], list[int], int], None]  # (ranks that joined, ranks that left, generation)


class Wire(ABC):
    """See the module's text. Implementations: `tcp`, `zeromq`, and in `testing/` `threads` and `virtual`."""

    segment_bytes: int = 2 << 20  # the message length that suits this wire best, for tensors that have to be cut
    rank: int
    world_size: int
    lost: dict[int, PeerLost]  # ranks that are gone, with the reason, until they are admitted again
    generation: int  # of the view: the latest of the changes that were made, so the same on all members in the end

    @abstractmethod
    def send(self, data: memoryview, to: int, tag: Tag, dtype: int, on_done: Callable[[Handle], None] | None = None) -> Handle:
        """Start sending contiguous bytes. The memory must not change until the handle is done."""

    @abstractmethod
    def recv(
        self,
        source: int,
        tag: Tag,
        num_bytes: int,
        dtype: int,
        consume: Consume,
        on_done: Callable[[Handle], None] | None = None,
        into: memoryview | None = None,
    ) -> Handle:
        """Ask for one message. It may have arrived already: then `consume` runs before `recv` returns.

        `into` is where `consume` would copy the bytes, if copying is all that it does: a wire that can reads straight into
        it and does not call `consume`.
        """

    @abstractmethod
    def post(self, to: int, topic: int, body: bytes) -> None:
        """Send a small control message. Topics 0-15 belong to the wire. To a lost peer: dropped.

        It is ordered with earlier posts to the same peer.
        """

    @abstractmethod
    def listen(self, topic: int, listener: Listener) -> None:
        """Call `listener(source, body)` from `progress` for every control message of that topic.

        One listener a topic; earlier arrivals are kept for it.
        """

    @abstractmethod
    def serve(self, channel: int, on_message: OnMessage, credit_bytes: int) -> None:
        """Take the messages of a channel from any peer, without a posted receive.

        `on_message(source, header, payload)` runs in `progress`; the payload is valid only during the call. Each peer may have at
        most `credit_bytes` on their way or undelivered (a message costs its header, its payload and 64 bytes); a peer that sends
        more is lost. Serving a channel again replaces the function.

        An exception of `on_message` is a fault of this side: it leaves `progress`, and the peer is not blamed. The message counts
        as consumed; those that waited behind it on its channel are handed over with the peer's next one. Only what decoding
        raises besides its own errors (UnicodeError, RecursionError) is the peer's fault, and makes it lost.
        """

    @abstractmethod
    def offer(
        self, to: int, channel: int, header: bytes, payload: memoryview, on_done: Callable[[Handle], None] | None = None
    ) -> Handle:
        """Send a message to a channel that the peer serves, or will serve: it waits here until there is credit for it.

        `payload` is read-only until the handle is done. Messages of one channel arrive in the order of their offers. One that
        costs more than the whole credit ends with an error.
        """

    @property
    @abstractmethod
    def peers(self) -> list[int]:
        """The other members of the view. A lost one stays in it until it is retired."""

    @abstractmethod
    def admit(self, peer: Peer) -> None:
        """Let a new worker in, or a rank that comes back, which is another peer and has a later generation.

        Returns at once. The newcomer connects by itself; `on_view` says when it is here, and `on_lost` if it does not come in
        time: then it is a lost member, to be retired. Until then it counts as lost. What its rank sent, and was sent, before is
        gone.
        """

    @abstractmethod
    def leave_room(self, ranks: Iterable[int]) -> None:
        """These ranks may be admitted later, and have never been here: until then they count as lost, and nobody is told so."""

    @abstractmethod
    def retire(self, rank: int, generation: int) -> None:
        """Take a member out of the view. One that is not lost is told so, and counts as lost from now on.

        To the member itself this rank is then lost too, and has not left in order. Any callback may retire any member.
        """

    @abstractmethod
    def on_view(self, listener: ViewListener) -> None:
        """Call `listener(joined, left, generation)` when members have joined (from `progress`) or left (from `retire`)."""

    def joined_in(self, rank: int) -> int:
        """The generation in which the member that now has this rank joined."""
        return 0

    @abstractmethod
    def on_lost(self, listener: LostListener) -> None:
        """Call `listener(PeerLost)` from `progress` when a peer is found lost."""

    def said_goodbye(self, rank: int) -> bool:
        """Whether a lost peer left in order (a clean exit), after sending all that it had to send."""
        return False

    def keep_queues_short(self) -> None:  # noqa: B027
        """From now on what was handed over should leave soon, even if that takes more system calls: somebody decides message by
        message which is the most urgent. A wire that keeps none, or cannot choose, need not do anything."""

    @abstractmethod
    def cancel(self, channel: int, sequence: int) -> None:
        """Forget every handle and parked message of one collective (it failed): nothing of it touches memory any more."""

    @abstractmethod
    def progress(self, timeout_s: float) -> None:
        """Move bytes, run callbacks; return when something happened, `wake` was called or the time is over."""

    @abstractmethod
    def wake(self) -> None:
        """Make a blocked `progress` return soon. The one method that any thread may call."""

    @abstractmethod
    def now(self) -> float:
        """Seconds on this wire's clock."""

    @abstractmethod
    def close(self) -> None:
        """Say goodbye to every peer (a clean exit is not a lost peer) and release everything. Idempotent, bounded in time."""

    @abstractmethod
    def abandon(self) -> None:
        """Release everything without a goodbye: to the others this rank is lost. For an exit with an exception in flight."""

    @property
    @abstractmethod
    def bytes_sent(self) -> int:
        """Payload and header bytes handed to the network so far (the byte ledger); shared memory is not a network."""
