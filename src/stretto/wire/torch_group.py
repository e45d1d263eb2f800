"""The torch.distributed wire: our control plane, torch's data plane.

An inner wire (`tcp.py` or `zeromq.py`) connects the same ranks. It keeps heartbeats, control messages, goodbyes and the
knowledge of who is lost; the process group moves payloads (here) and runs the backend's own collectives (`torch_native.py`).

gloo. A payload that meets a receive of another size ends the process, so nothing is handed to the group before both sides
have agreed on it:

    sender                                  receiver
    frame (tag, bytes, dtype, digest)  -->  waits for its `recv`. Not what was asked for: `drop`, and the receive fails
                                       <--  `go`, after its own group.recv was issued
    group.send(payload)                ==>  into a buffer of ours, then consumed
                                       <--  `done`: the sender's memory is free again

Up to `INLINE_BYTES` the payload rides in the frame and the send is done at once: such messages cost what they cost on the
inner wire. A larger one costs three control messages and a round trip before its first byte. Both sides have issued their part
when the waiting begins, so waiting for receives in order (`torch_works.py`) keeps no transfer from moving.

Failure. gloo names no rank and cannot cancel. Who is lost is the inner wire's word; once somebody is, later payloads travel on
the inner wire. A receive from the lost rank is ended by closing this rank's connections in the group; other ranks see theirs
break, and their inner wires, not their groups, tell them whom to blame. The group is then of no use; the wire is.

NCCL. Native collectives only. It moves CUDA memory and `send`/`recv` are about host memory, so large messages travel on the
inner wire as well (a warning says so once).
"""

from __future__ import annotations

import enum
import logging
import struct
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from stretto.errors import ConfigurationError, JobError, PeerLost
from stretto.timeouts import Timeouts
from stretto.wire import frames
from stretto.wire.base import Consume, Handle, Listener, LostListener, OnMessage, Tag, Wire
from stretto.wire.framed import Expected, Key
from stretto.wire.frames import FrameKind, Header
from stretto.wire.torch_native import NativeCollectives
from stretto.wire.torch_works import LAST_NUMBER, Group, GroupWorks

INLINE_BYTES: Final = 64 << 10
GRACE_S: Final = 2.0  # between a failure in the group and blaming its peer: time for the inner wire to find who is really lost
CANCEL_S: Final = 1.0  # for payloads on their way when their collective is cancelled
SPARE_BUFFERS: Final = 16

TOPIC_FRAME: Final = 8
TOPIC_ANSWER: Final = 9
TOPIC_NATIVE: Final = 10

ANSWER: Final = struct.Struct("<IB")
BACKENDS: Final = ("gloo", "nccl")

log = logging.getLogger("stretto.wire")


def torch_group(
    backend: str, rank: int, world_size: int, *, store: Store | None = None, timeout_s: float = 60.0
) -> dist.ProcessGroup:
    """A new group of all ranks for one wire. All ranks call it together.

    It is never torch's default group: a group that two threads use mixes up their data without an error. Where there is no
    default group yet, one is made, from `store` or as torch does it, from MASTER_ADDR and MASTER_PORT.
    """
    if backend not in BACKENDS or not dist.is_backend_available(backend):
        has = " and ".join(repr(name) for name in BACKENDS if dist.is_backend_available(name))
        raise ConfigurationError(
            f"the torch backend {backend!r} cannot be used: of those that stretto drives, torch {torch.__version__} here "
            f"has {has or 'none'}.\nWrite one that it has, or use stretto's own wire (wire='auto')."
        )
    limit = timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        _make_default_group(backend, rank, world_size, store, limit)
    elif (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
        raise ConfigurationError(
            f"torch.distributed was initialised as rank {dist.get_rank()} of {dist.get_world_size()}, "
            f"but this is rank {rank} of {world_size} of the job.\n"
            f"Start both from the same launcher, or leave init_process_group to stretto."
        )
    group = dist.new_group(list(range(world_size)), backend=backend, timeout=limit)
    assert isinstance(group, dist.ProcessGroup)  # torch returns an int to ranks outside of the group
    return group


def _make_default_group(backend: str, rank: int, world_size: int, store: Store | None, limit: timedelta) -> None:
    place: dict[str, Any] = {"init_method": "env://"} if store is None else {"store": store}
    try:
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=limit, **place)
    except (ValueError, RuntimeError) as error:
        raise JobError(
            f"torch.distributed.init_process_group({backend!r}, rank={rank}, world_size={world_size}) failed: {error}\n"
            f"Every rank must reach MASTER_ADDR:MASTER_PORT, which is not stretto's port; `stretto run` and torchrun set both."
        ) from error


class Verdict(enum.IntEnum):
    """A receiver's answers to one frame without its payload."""

    GO = 1  # through the group: the receive has been issued
    GO_INNER = 2  # through the inner wire: this side's group is broken
    DROP = 3  # not wanted
    DONE = 4  # it is here
    FAILED = 5  # the group did not bring it


class _Offer:
    """A payload that its receiver knows of."""

    __slots__ = ("data", "dtype", "handle", "tag", "work")

    def __init__(self, handle: Handle, data: memoryview, dtype: int) -> None:
        self.handle: Handle | None = handle  # None: cancelled, but still promised
        self.tag = handle.tag
        self.data = data
        self.dtype = dtype
        self.work: dist.Work | None = None


class _Arrival:
    """A payload that the group is bringing."""

    __slots__ = ("buffer", "expected")

    def __init__(self, expected: Expected, buffer: torch.Tensor) -> None:
        self.expected: Expected | None = expected  # None: cancelled
        self.buffer = buffer


class TorchGroupWire(Wire):
    """See the module's text. `inner` is connected already and belongs to this wire from now on; so does `group`."""

    def __init__(self, inner: Wire, group: Group, *, timeouts: Timeouts | None = None) -> None:
        if (group.rank(), group.size()) != (inner.rank, inner.world_size):
            raise ConfigurationError(
                f"rank {group.rank()} of a group of {group.size()} over a wire that is rank {inner.rank} of {inner.world_size}.\n"
                f"Both must connect the same ranks under the same numbers: make the group with torch_group()."
            )
        self.inner = inner
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.lost = inner.lost
        self._works = GroupWorks(group, inner.wake, (timeouts or Timeouts()).arrive_s)
        self._group = group
        self.backend = self._works.backend
        self._closed = False
        self._warned = False
        self._sent = 0
        self._next_number = 0
        self._offers: dict[tuple[int, int], _Offer] = {}  # (receiver, number)
        self._arrivals: dict[tuple[int, int], _Arrival] = {}  # (sender, number)
        self._expected: dict[Key, Expected] = {}
        self._parked: dict[Key, tuple[Header, memoryview]] = {}
        self._cancelled: deque[tuple[int, int]] = deque(maxlen=256)
        self._suspects: list[tuple[Handle, float, str]] = []
        self._spare: dict[int, list[torch.Tensor]] = {}
        inner.on_lost(self._on_lost)
        inner.listen(TOPIC_FRAME, self._on_frame)
        inner.listen(TOPIC_ANSWER, self._on_answer)
        native = NativeCollectives(self, self._works, TOPIC_NATIVE)
        self.native_all_reduce = native.all_reduce
        self.native_broadcast = native.broadcast
        self.native_all_gather = native.all_gather

    # -- the inner wire's part ----------------------------------------------------------------------------------------

    def post(self, to: int, topic: int, body: bytes) -> None:
        self.inner.post(to, topic, body)

    def listen(self, topic: int, listener: Listener) -> None:
        self.inner.listen(topic, listener)

    def on_lost(self, listener: LostListener) -> None:
        self.inner.on_lost(listener)

    def serve(self, channel: int, on_message: OnMessage, credit_bytes: int) -> None:
        self.inner.serve(channel, on_message, credit_bytes)

    def offer(
        self, to: int, channel: int, header: bytes, payload: memoryview, on_done: Callable[[Handle], None] | None = None
    ) -> Handle:
        return self.inner.offer(to, channel, header, payload, on_done)

    @property
    def peers(self) -> list[int]:
        return self.inner.peers

    def said_goodbye(self, rank: int) -> bool:
        return self.inner.said_goodbye(rank)

    def wake(self) -> None:
        self.inner.wake()

    def now(self) -> float:
        return self.inner.now()

    @property
    def bytes_sent(self) -> int:
        return self.inner.bytes_sent + self._sent

    @property
    def broken(self) -> str | None:
        """Why the group is no longer used, if it is not."""
        return self._works.broken

    def progress(self, timeout_s: float) -> None:
        if self._collect():
            timeout_s = 0.0
        elif self._suspects:
            timeout_s = min(timeout_s, 0.05)
        self.inner.progress(timeout_s)
        self._collect()

    def _collect(self) -> bool:
        something = self._works.collect()
        if self._suspects:
            self._judge()
        return something

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, data: memoryview, to: int, tag: Tag, dtype: int, on_done: Callable[[Handle], None] | None = None) -> Handle:
        handle = Handle(to, tag, on_done)
        num_bytes = data.nbytes
        if to in self.lost:
            handle.finish(self.lost[to])
        elif num_bytes > frames.MAX_PAYLOAD_BYTES:
            raise ConfigurationError(
                f"a message of {num_bytes} bytes: one message carries at most {frames.MAX_PAYLOAD_BYTES}. Send it in pieces."
            )
        elif num_bytes <= INLINE_BYTES:
            self.inner.post(to, TOPIC_FRAME, self._head(FrameKind.INLINE, tag, dtype, num_bytes) + bytes(data))
            handle.finish()
        else:
            self._next_number = self._next_number % LAST_NUMBER + 1
            self._offers[to, self._next_number] = _Offer(handle, data, dtype)
            self.inner.post(to, TOPIC_FRAME, self._head(FrameKind.BULK, tag, dtype, num_bytes, self._next_number))
        return handle

    def _head(self, kind: FrameKind, tag: Tag, dtype: int, num_bytes: int, number: int = 0) -> bytes:
        channel, sequence, index, digest = tag
        return frames.encode(Header(kind, 0, self.rank, channel, sequence, index, digest, dtype, 0, number, num_bytes))

    def _on_answer(self, source: int, body: bytes) -> None:
        try:
            number, code = ANSWER.unpack(body)
            verdict = Verdict(code)
        except (struct.error, ValueError) as problem:
            log.warning("ignored a malformed answer from rank %d: %s", source, problem)
            return
        offer = self._offers.get((source, number))
        if offer is None:
            log.debug("rank %d answers %s to frame %d, which is over", source, verdict.name, number)
        elif verdict is Verdict.GO:
            self._send_through_group(offer, source, number)
        else:
            del self._offers[source, number]
            self._ended(offer, source, verdict)

    def _send_through_group(self, offer: _Offer, to: int, number: int) -> None:
        try:
            offer.work = self._group.send([_as_tensor(offer.data)], to, number)
            self._sent += offer.data.nbytes
        except RuntimeError as error:
            del self._offers[to, number]
            self._works.break_off(str(error))  # which closes the connections, so the receiver learns of it too
            self._suspect(offer.handle, str(error))

    def _ended(self, offer: _Offer, to: int, verdict: Verdict) -> None:
        if verdict is Verdict.GO_INNER:
            handle = offer.handle
            finish = None if handle is None else partial(_pass_on, handle)
            self.inner.send(offer.data, to, offer.tag, offer.dtype, finish)
        elif verdict is Verdict.FAILED:
            self._works.keep(offer)
            self._suspect(offer.handle, f"rank {to} did not get a payload")
        else:
            self._await_sent(offer)
            if offer.handle is not None:
                offer.handle.finish()

    def _await_sent(self, offer: _Offer) -> None:
        """The payload has arrived or is on its way with the receive issued: a matter of the link's speed, or of a broken one."""
        if offer.work is None:
            return
        try:
            offer.work.wait(timedelta(seconds=CANCEL_S))
        except RuntimeError as error:
            self._works.keep(offer)
            self._works.break_off(str(error))

    # -- receiving ----------------------------------------------------------------------------------------------------

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
        handle = Handle(source, tag, on_done)
        expected = Expected(handle, num_bytes, dtype, tag.digest, consume, into)
        key = (source, tag.channel, tag.sequence, tag.index)
        parked = self._parked.pop(key, None)
        if parked is not None:
            self._match(expected, *parked)
        elif source in self.lost:
            handle.finish(self.lost[source])
        else:
            self._expected[key] = expected
        return handle

    def _on_frame(self, source: int, body: bytes) -> None:
        view = memoryview(body)
        try:
            header = frames.decode(view)
            if header.source != source or header.kind not in (FrameKind.INLINE, FrameKind.BULK):
                raise ValueError(f"kind {header.kind} of rank {header.source}")
        except ValueError as problem:
            log.warning("ignored a bad frame from rank %d: %s", source, problem)
            return
        key = (source, header.channel, header.sequence, header.index)
        expected = self._expected.pop(key, None)
        if expected is not None:
            self._match(expected, header, view[frames.HEADER_BYTES :])
        elif (header.channel, header.sequence) in self._cancelled:
            self._refuse(source, header)
        else:
            self._parked[key] = (header, view[frames.HEADER_BYTES :])

    def _match(self, expected: Expected, header: Header, payload: memoryview) -> None:
        problem = expected.problem(header)
        if problem is not None:
            self._refuse(expected.handle.peer, header)
            expected.handle.finish(problem)
        elif header.kind == FrameKind.INLINE:
            expected.consume(payload)
            expected.handle.finish()
        else:
            self._accept(expected, header.number)

    def _refuse(self, source: int, header: Header) -> None:
        if header.kind == FrameKind.BULK:
            self._answer(source, header.number, Verdict.DROP)

    def _answer(self, source: int, number: int, verdict: Verdict) -> None:
        self.inner.post(source, TOPIC_ANSWER, ANSWER.pack(number, verdict))

    def _accept(self, expected: Expected, number: int) -> None:
        source = expected.handle.peer
        if self._usable() and self._receive_through_group(expected, source, number):
            self._answer(source, number, Verdict.GO)
            return
        tag, dtype = expected.handle.tag, expected.dtype
        finish = partial(_pass_on, expected.handle)
        self.inner.recv(source, tag, expected.num_bytes, dtype, expected.consume, finish, expected.into)
        self._answer(source, number, Verdict.GO_INNER)

    def _usable(self) -> bool:
        if self.backend != "gloo" and not self._warned:
            self._warned = True
            log.warning(
                "rank %d: a message in host memory travels on stretto's own wire, not through %s, which moves CUDA tensors only. "
                'For CUDA tensors use algorithm="native".',
                self.rank, self.backend,
            )  # fmt: skip
        return self.backend == "gloo" and self._works.broken is None

    def _receive_through_group(self, expected: Expected, source: int, number: int) -> bool:
        # Never straight into the caller's memory: gloo cannot cancel, and a cancelled collective must not touch it.
        buffer = self._borrow(expected.num_bytes)
        try:
            work = self._group.recv([buffer], source, number)
        except RuntimeError as error:
            self._works.break_off(str(error))
            return False
        self._arrivals[source, number] = _Arrival(expected, buffer)
        self._works.watch(work, partial(self._arrived, source, number))
        return True

    def _arrived(self, source: int, number: int, problem: str | None) -> None:
        arrival = self._arrivals.pop((source, number), None)
        if arrival is None:
            return  # its sender was lost meanwhile
        if problem is None:
            self._answer(source, number, Verdict.DONE)
            if arrival.expected is not None:
                arrival.expected.consume(_as_bytes(arrival.buffer))
                arrival.expected.handle.finish()
            self._give_back(arrival.buffer)
        else:
            self._works.break_off(problem)
            self._answer(source, number, Verdict.FAILED)
            self._suspect(None if arrival.expected is None else arrival.expected.handle, problem)

    def _borrow(self, num_bytes: int) -> torch.Tensor:
        spare = self._spare.get(num_bytes)
        return spare.pop() if spare else torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def _give_back(self, buffer: torch.Tensor) -> None:
        if sum(map(len, self._spare.values())) >= SPARE_BUFFERS:
            self._spare.clear()
        self._spare.setdefault(buffer.numel(), []).append(buffer)

    # -- failure ------------------------------------------------------------------------------------------------------

    def _suspect(self, handle: Handle | None, problem: str) -> None:
        if handle is not None:
            self._suspects.append((handle, self.now() + GRACE_S, problem))

    def _judge(self) -> None:
        """End transfers that the group failed: with the loss that the inner wire knows of, or after a while with their peer's."""
        culprit = next(iter(self.lost.values()), None)
        suspects, self._suspects = self._suspects, []
        for suspect in suspects:
            handle, deadline, problem = suspect
            if culprit is not None:
                handle.finish(self.lost.get(handle.peer, culprit))
            elif self.now() > deadline:
                handle.finish(PeerLost(handle.peer, f"its connection in the {self.backend} group broke: {problem}"))
            else:
                self._suspects.append(suspect)

    def _on_lost(self, error: PeerLost) -> None:
        rank = error.rank
        handles = [self._expected.pop(key).handle for key in [key for key in self._expected if key[0] == rank]]
        for key in [key for key in self._parked if key[0] == rank and self._parked[key][0].kind == FrameKind.BULK]:
            del self._parked[key]
        for place in [place for place in self._offers if place[0] == rank]:
            offer = self._offers.pop(place)
            self._works.keep(offer)
            handles += [] if offer.handle is None else [offer.handle]
        stuck = [place for place in self._arrivals if place[0] == rank]
        for place in stuck:
            arrival = self._arrivals.pop(place)
            self._works.keep(arrival)
            handles += [] if arrival.expected is None else [arrival.expected.handle]
        if stuck:
            self._works.break_off(str(error))
        elif not self.said_goodbye(rank) and self._works.broken is None:
            self._works.broken = str(error)
        for handle in handles:
            handle.finish(error)

    def cancel(self, channel: int, sequence: int) -> None:
        name = (channel, sequence)
        self._cancelled.append(name)
        self.inner.cancel(channel, sequence)
        for key in [key for key in self._expected if key[1:3] == name]:
            del self._expected[key]
        for key in [key for key in self._parked if key[1:3] == name]:
            self._refuse(key[0], self._parked.pop(key)[0])
        for arrival in self._arrivals.values():
            if arrival.expected is not None and arrival.expected.handle.tag[:2] == name:
                arrival.expected = None
        for offer in list(self._offers.values()):
            if offer.handle is not None and offer.tag[:2] == name:
                self._withdraw(offer)
        self._suspects = [suspect for suspect in self._suspects if suspect[0].tag[:2] != name]

    def _withdraw(self, offer: _Offer) -> None:
        """Its owner takes the memory back. What was promised still goes out, from a copy; what is going out is waited for."""
        offer.handle = None
        if offer.work is None:
            offer.data = memoryview(bytearray(offer.data))
        else:
            self._await_sent(offer)

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._end(self.inner.close)

    def abandon(self) -> None:
        self._end(self.inner.abandon)

    def _end(self, leave: Callable[[], None]) -> None:
        if self._closed:
            return
        self._closed = True
        leave()
        if self._arrivals:
            self._works.end_all()
        self._works.stop()


def _pass_on(handle: Handle, inner: Handle) -> None:
    handle.finish(inner.error)


def _as_tensor(data: memoryview) -> torch.Tensor:
    # torch warns about memory that it must not write to, and a send does not write: but only a copy silences it everywhere
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)


def _as_bytes(buffer: torch.Tensor) -> memoryview:
    array: Any = buffer.numpy()  # numpy's stubs hide that it is a buffer
    return memoryview(array)
