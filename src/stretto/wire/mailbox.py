"""What every wire of ours does once a message is here: match it with its receive, or keep it until that comes.

A message is known by (source, channel, sequence, index). It waits, parked, for its `recv`, or the `recv` waits for it; whichever
comes second makes the delivery. A name is used once: a second message of the same name makes its sender lost. Control messages
go to the listener of their topic, or wait for one. What a peer can make us keep is bounded (`MAX_PARKED_BYTES`,
`MAX_UNHEARD_BYTES`, credit: `serving.py`); a peer that exceeds it is lost.

The wires below (`framed.py` with its transports, `testing/in_process.py`) bring messages here and say what a message is to them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Final, Generic, Protocol, TypeVar

from stretto.errors import ConfigurationError, FrameError, PeerLost, WireError
from stretto.launching.peers import Peer
from stretto.wire.base import (
    Consume,
    DigestMismatch,
    Handle,
    Listener,
    LostListener,
    OnMessage,
    Tag,
    ViewListener,
    Wire,
)  # fmt: skip
from stretto.wire.frames import DTYPE_NAMES, MAX_PAYLOAD_BYTES, MAX_POST_BYTES
from stretto.wire.serving import TOPIC_CREDIT, TOPIC_HEAD, Serving

MAX_PARKED_BYTES: Final = 256 << 20  # of one peer, beyond its credit; collectives send it at most 17 MiB unasked
PARKED_BYTES: Final = 512  # that a parked message takes beyond its payload
MAX_UNHEARD_BYTES: Final = 64 << 20  # of one peer: control messages kept for listeners that are still to come
UNHEARD_BYTES: Final = 512  # that such a message takes beyond its body

Key = tuple[int, int, int, int]  # source, channel, sequence, index: the digest is not part of the name


class Described(Protocol):
    """What is known of a message apart from its bytes: a frame's header, or an envelope."""

    @property
    def digest(self) -> int: ...
    @property
    def dtype(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...


class PostedReceive:
    """A `recv` that waits."""

    __slots__ = ("consume", "digest", "dtype", "handle", "into", "num_bytes")

    def __init__(
        self, handle: Handle, num_bytes: int, dtype: int, digest: int, consume: Consume, into: memoryview | None
    ) -> None:
        self.handle = handle
        self.num_bytes = num_bytes
        self.dtype = dtype
        self.digest = digest
        self.consume = consume
        self.into = into

    def problem(self, message: Described) -> WireError | None:
        if message.digest != self.digest:
            return DigestMismatch(self.handle.peer)
        if message.num_bytes != self.num_bytes:
            return FrameError(self.handle.peer, f"{message.num_bytes} bytes where {self.num_bytes} are due")
        if message.dtype != self.dtype:
            return FrameError(self.handle.peer, f"{DTYPE_NAMES[message.dtype]} where {DTYPE_NAMES[self.dtype]} is due")
        return None


def retired_by_it(generation: int) -> str:
    """Why a peer is lost that says that it has retired this worker."""
    return f"it retired this worker in generation {generation}"


M = TypeVar("M", bound=Described)


class MailboxWire(Wire, Generic[M]):
    """See the module's text. `M` describes a message, and leads to its bytes."""

    def __init__(self, rank: int, world_size: int, generation: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.generation = generation
        self._born = generation  # in every frame: which life of this rank it comes from
        self._lives: dict[int, int] = {}  # rank -> generation in which its last life here joined
        self._admitted: dict[int, Peer] = {}  # who may join, and is not here yet
        self.lost: dict[int, PeerLost] = {}
        self._closed = False
        self._sent = 0
        self._expected: dict[Key, PostedReceive] = {}
        self._parked: dict[Key, M] = {}
        self._parked_bytes: Counter[int] = Counter()  # source -> what its parked messages take
        self._cancelled: deque[tuple[int, int]] = deque(maxlen=256)  # late messages of these are dropped
        self._listeners: dict[int, Listener] = {}
        self._unheard: dict[int, list[tuple[int, bytes]]] = {}
        self._unheard_bytes: Counter[int] = Counter()  # source -> what its unheard messages take
        self._lost_listeners: list[LostListener] = []
        self._view_listeners: list[ViewListener] = []
        self._left: set[int] = set()
        self._serving = Serving(self)
        self.listen(TOPIC_CREDIT, self._serving.on_credit)
        self.listen(TOPIC_HEAD, self._serving.on_head)

    # -- what a wire below provides -----------------------------------------------------------------------------------

    def _enter(self) -> None:
        """The program calls: refuse it here if nothing can be sent or received any more."""

    @abstractmethod
    def _send(self, handle: Handle, data: memoryview, dtype: int) -> None:
        """Start sending to a peer that is here; finish the handle when the memory is free again."""

    @abstractmethod
    def _post(self, to: int, topic: int, body: bytes) -> None:
        """`post`, of the wire's own topics as well, and of any length that a frame can have."""

    @abstractmethod
    def _hand_over(self, receive: PostedReceive, message: M) -> None:
        """Give the message to its receive, or end that with what is wrong with it."""

    def _let_go(self, message: M) -> None:
        """Nobody wants the message (any more)."""

    @abstractmethod
    def _stop_sending(self, rank: int) -> list[Handle]:
        """Close what belongs to a peer that is lost; returns the handles of what was on its way to it."""

    @abstractmethod
    def _begin_admission(self, peer: Peer) -> None:
        """Take the newcomer in if it is here, or else when it comes: `_joined`."""

    @abstractmethod
    def _part_from(self, rank: int, generation: int) -> None:
        """Tell a member that it is retired in this generation."""

    @abstractmethod
    def _forget(self, rank: int) -> None:
        """Nothing is to be kept of a member that is out of the view."""

    # -- the contract -------------------------------------------------------------------------------------------------

    @property
    def bytes_sent(self) -> int:
        return self._sent

    def said_goodbye(self, rank: int) -> bool:
        return rank in self._left

    def send(self, data: memoryview, to: int, tag: Tag, dtype: int, on_done: Callable[[Handle], None] | None = None) -> Handle:
        self._enter()
        self._check_peer("send", to)
        _check_length("send", data.nbytes, MAX_PAYLOAD_BYTES)
        handle = Handle(to, tag, on_done)
        if (lost := self._loss_of(to)) is not None:
            handle.finish(lost)
        else:
            self._send(handle, data, dtype)
        return handle

    def post(self, to: int, topic: int, body: bytes) -> None:
        self._enter()
        self._check_peer("post", to)
        _check_length("post", len(body), MAX_POST_BYTES)
        self._post(to, topic, body)

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
        self._enter()
        self._check_peer("recv", source)
        handle = Handle(source, tag, on_done)
        key = (source, tag.channel, tag.sequence, tag.index)
        if key in self._expected:
            raise ConfigurationError(
                f"recv from rank {source} ({tag}) on rank {self.rank}: that message is being waited for already, and it comes "
                f"once.\nGive every message of a collective its own index."
            )
        receive = PostedReceive(handle, num_bytes, dtype, tag.digest, consume, into)
        parked = self._unpark(key) if key in self._parked else None
        if parked is not None:
            self._hand_over(receive, parked)
        elif (lost := self._loss_of(source)) is not None:
            handle.finish(lost)
        else:
            self._expected[key] = receive
        return handle

    def _loss_of(self, rank: int) -> PeerLost | None:
        """Why nothing can be waited for from a peer, if so."""
        return self.lost.get(rank)

    def cancel(self, channel: int, sequence: int) -> None:
        self._cancelled.append((channel, sequence))
        for key in [key for key in self._expected if key[1] == channel and key[2] == sequence]:
            del self._expected[key]
        for key in [key for key in self._parked if key[1] == channel and key[2] == sequence]:
            parked = self._unpark(key)
            if parked is not None:
                self._let_go(parked)

    def listen(self, topic: int, listener: Listener) -> None:
        self._listeners[topic] = listener
        for source, body in self._unheard.pop(topic, ()):
            self._unheard_bytes[source] -= len(body) + UNHEARD_BYTES
            self._tell(listener, source, body)

    def serve(self, channel: int, on_message: OnMessage, credit_bytes: int) -> None:
        self._enter()
        self._serving.serve(channel, on_message, credit_bytes)

    def offer(
        self, to: int, channel: int, header: bytes, payload: memoryview, on_done: Callable[[Handle], None] | None = None
    ) -> Handle:
        self._enter()
        if to != self.rank:  # for which there is an error of its own
            self._check_peer("offer", to)
        return self._serving.offer(to, channel, header, payload, on_done)

    def _check_peer(self, verb: str, peer: int) -> None:
        if peer not in self._lives:
            raise ConfigurationError(
                f"{verb} between rank {self.rank} and rank {peer}: the ranks that this wire knows are {sorted(self._lives)}. "
                f"Give one of those, or admit it first."
            )

    def on_lost(self, listener: LostListener) -> None:
        self._lost_listeners.append(listener)

    def on_view(self, listener: ViewListener) -> None:
        self._view_listeners.append(listener)

    def joined_in(self, rank: int) -> int:
        return self._born if rank == self.rank else self._lives.get(rank, 0)

    def admit(self, peer: Peer) -> None:
        rank, former = peer.rank, self._lives.get(peer.rank)
        if rank == self.rank or (former is not None and peer.generation <= former):
            raise ConfigurationError(
                f"admit(rank {rank}, generation {peer.generation}) on rank {self.rank}: "
                + ("a worker does not admit itself." if rank == self.rank else f"a life of generation {former} is known.")
                + "\nA rank that comes back is another peer: give it a later generation, on every member the same."
            )
        if rank in self._admitted:
            self._forget(rank)
        elif rank in self.peers:
            self._lose(rank, f"another worker took its place in generation {peer.generation}")
            self._forget(rank)
        self._forget_former_life(rank)
        self._lives[rank] = peer.generation
        self.lost[rank] = PeerLost(rank, "it has been admitted, and is not here yet")
        self._admitted[rank] = peer
        self._begin_admission(peer)

    def leave_room(self, ranks: Iterable[int]) -> None:
        for rank in set(ranks) - self._lives.keys() - {self.rank}:
            self.lost[rank] = PeerLost(rank, "it has never joined")

    def _forget_former_life(self, rank: int) -> None:
        for key in [key for key in self._parked if key[0] == rank]:
            del self._parked[key]
        del self._parked_bytes[rank]
        self._forget_unheard(rank)
        self._left.discard(rank)

    def _joined(self, rank: int) -> None:
        peer = self._admitted.pop(rank)
        del self.lost[rank]
        self.generation = max(self.generation, peer.generation)
        self._serving.greet(rank)
        for listener in list(self._view_listeners):
            listener([rank], [], self.generation)

    def retire(self, rank: int, generation: int) -> None:
        if rank not in self.peers and rank not in self._admitted:
            raise ConfigurationError(
                f"retire({rank}, {generation}) on rank {self.rank}: it is not a member; they are "
                f"{sorted([self.rank, *self.peers])}.\nRetire one of the others, once; to leave oneself there is close()."
            )
        self._admitted.pop(rank, None)
        self.generation = max(self.generation, generation)
        if rank not in self.lost:
            life = self._lives[rank]
            self._part_from(rank, generation)
            self._lose(rank, f"it was retired in generation {generation}")
            if rank not in self.peers or self._lives[rank] != life:
                return  # a callback has retired it already
        self._forget(rank)
        for listener in list(self._view_listeners):
            listener([], [rank], self.generation)

    # -- what arrives -------------------------------------------------------------------------------------------------

    def _deliver(self, key: Key, message: M) -> None:
        """A whole message is here. It may be kept, so its bytes must be its own unless there is a receive for it."""
        receive = self._expected.pop(key, None)
        if receive is not None:
            self._hand_over(receive, message)
        elif key[1:3] in self._cancelled:
            self._let_go(message)
        else:
            self._park(key, message)

    def _park(self, key: Key, message: M) -> None:
        source = key[0]
        try:
            if key in self._parked:
                raise ValueError(f"a second message {key[1:]}")
            self._check_room(source, message.num_bytes)
        except ValueError as problem:
            self._lose(source, f"it sent a bad frame: {problem}")
            return
        self._parked[key] = message
        self._parked_bytes[source] += message.num_bytes + PARKED_BYTES

    def _check_room(self, source: int, num_bytes: int) -> None:
        """Raise ValueError if a peer may not send so much more that nobody has asked for."""
        room = MAX_PARKED_BYTES + self._serving.credit_given
        if self._parked_bytes[source] + num_bytes + PARKED_BYTES > room:
            raise ValueError(f"{num_bytes} bytes that nobody asked for, with {self._parked_bytes[source]} here already")

    def _unpark(self, key: Key) -> M | None:
        message = self._parked.pop(key, None)
        if message is not None:
            self._parked_bytes[key[0]] -= message.num_bytes + PARKED_BYTES
        return message

    def _hear(self, source: int, topic: int, body: bytes) -> None:
        listener = self._listeners.get(topic)
        if listener is not None:
            self._tell(listener, source, body)
            return
        self._unheard.setdefault(topic, []).append((source, body))
        self._unheard_bytes[source] += len(body) + UNHEARD_BYTES
        if self._unheard_bytes[source] > MAX_UNHEARD_BYTES:
            self._lose(
                source, f"it sent a bad frame: too many control messages that nobody listens to, the last of topic {topic}"
            )
            self._forget_unheard(source)

    def _forget_unheard(self, source: int) -> None:
        del self._unheard_bytes[source]
        kept = {topic: [each for each in unheard if each[0] != source] for topic, unheard in self._unheard.items()}
        self._unheard = {topic: unheard for topic, unheard in kept.items() if unheard}

    def _tell(self, listener: Listener, source: int, body: bytes) -> None:
        try:
            listener(source, body)
        except (UnicodeError, RecursionError) as problem:  # what decoding raises besides its own errors
            self._lose(source, f"it sent a bad frame: a malformed control message ({problem})")

    # -- peers that go ------------------------------------------------------------------------------------------------

    def _lose(self, rank: int, reason: str) -> None:
        if rank in self.lost:
            return
        error = self.lost[rank] = PeerLost(rank, reason)
        for handle in self._stop_sending(rank) + self._serving.forget(rank):
            handle.finish(error)
        for key in [key for key in self._expected if key[0] == rank]:
            receive = self._expected.pop(key, None)  # a callback may have cancelled it meanwhile
            if receive is not None:
                receive.handle.finish(error)
        self._tell_lost(error)

    def _tell_lost(self, error: PeerLost) -> None:
        for listener in list(self._lost_listeners):
            listener(error)


def _check_length(verb: str, num_bytes: int, limit: int) -> None:
    if num_bytes > limit:
        raise ConfigurationError(
            f"{verb} of {num_bytes} bytes: one message carries at most {limit}, so that none holds up the others. "
            f"Send it in pieces."
        )
