"""Worlds of socket wires inside one process, and a peer among them that says whatever a test wants it to say."""

from __future__ import annotations

import contextlib
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from stretto.errors import FrameError, PeerLost, WireError
from stretto.launching.peers import Peer
from stretto.testing import run_threads, wait_for
from stretto.timeouts import Timeouts
from stretto.wire import frames, mailbox
from stretto.wire.base import Tag
from stretto.wire.framed import TOPIC_HELLO, FramedWire
from stretto.wire.frames import FrameKind, Header
from stretto.wire.mapping import MappingOffer
from stretto.wire.serving import CREDIT, HEAD, MESSAGE_BYTES, RETURN, TOPIC_CREDIT, TOPIC_HEAD
from stretto.wire.sharing import TOPIC_ANSWER, TOPIC_OFFER
from stretto.wire.tcp import TcpWire
from stretto.wire.zeromq import ZeroMQWire
from wire.contract import Meeting, exchange_once, progress_until, receive

SECRET = bytes(range(32))
NONCE = b"the same for all workers"
QUICK = Timeouts(connect_s=40, silence_s=20, arrive_s=40, leave_s=5)
PATIENT = Timeouts(connect_s=60, silence_s=20, arrive_s=40, leave_s=5)  # for what must not take anywhere near that long
DECODING_TOPIC = 700
Make = Callable[[int, int], FramedWire]


def tcp(*, timeouts: Timeouts = QUICK, shared_memory: bool = True, write_in_thread: bool = False) -> Make:
    return lambda rank, size: TcpWire(
        rank, size, secret=SECRET, timeouts=timeouts, shared_memory=shared_memory, write_in_thread=write_in_thread
    )


def zeromq(*, timeouts: Timeouts = QUICK, shared_memory: bool = True) -> Make:
    return lambda rank, size: ZeroMQWire(rank, size, secret=SECRET, timeouts=timeouts, shared_memory=shared_memory)


def peer_of(wire: FramedWire, host: str = "here") -> Peer:
    return Peer(wire.rank, wire.rank, host, wire.address, os.getpid())


def connect_all(wires: Sequence[FramedWire], peers: Sequence[Peer]) -> None:
    run_threads(len(wires), lambda wire: wire.connect(peers, NONCE), wires=wires)


@contextmanager
def wires_of(size: int, make: Make) -> Iterator[list[FramedWire]]:
    """Wires that listen and are not connected yet; whatever happens, they are gone afterwards."""
    wires: list[FramedWire] = []
    try:
        for rank in range(size):
            wires.append(make(rank, size))
        yield wires
    finally:
        for wire in wires:
            wire.abandon()


@contextmanager
def socket_world(size: int, make: Make, hosts: Sequence[str] | None = None) -> Iterator[list[FramedWire]]:
    """Connected wires, each for a thread of its own; they say goodbye to each other unless the test fails."""
    with wires_of(size, make) as wires:
        hosts = hosts or ["here"] * size
        connect_all(wires, [peer_of(wire, host) for wire, host in zip(wires, hosts, strict=True)])
        yield wires
        run_threads(size, lambda wire: wire.close(), wires=wires)


def check_gone_before_connecting(make: Make, gone: int) -> None:
    """Of three workers that know each other's addresses, one is not there any more when the others connect."""
    with wires_of(3, make) as wires:
        peers = [peer_of(wire) for wire in wires]
        wires[gone].abandon()
        start = time.monotonic()

        def program(wire: FramedWire) -> int:
            try:
                wire.connect(peers, NONCE)
            except PeerLost as lost:
                wire.abandon()
                return lost.rank
            raise AssertionError("it connected to somebody who was not there")

        left = [wire for wire in wires if wire.rank != gone]
        named = run_threads(2, program, wires=left)
        assert time.monotonic() - start < PATIENT.connect_s / 2
        # Whoever looks second may find that the first has given up.
        assert gone in named and set(named) <= {0, 1, 2}


def frame(
    kind: int,
    source: int,
    payload: bytes = b"",
    *,
    channel: int = 1,
    sequence: int = 0,
    index: int = 0,
    dtype: int = 0,
    slot: int = 0,
    number: int = 0,
    generation: int = 0,
    declared: int | None = None,
) -> bytes:
    num_bytes = len(payload) if declared is None else declared
    header = Header(kind, generation, source, channel, sequence, index, 0, dtype, slot, number, num_bytes)
    return frames.encode(header) + payload


def post(source: int, topic: int, body: bytes = b"") -> bytes:
    return frame(FrameKind.POST, source, body, channel=topic)


@contextmanager
def background(action: Callable[[], None]) -> Iterator[None]:
    """Run `action` in a thread meanwhile; its exception, if any, is raised at the end."""
    problems: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=run, name="background", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(60)
    assert not thread.is_alive(), "the action in the background did not end"
    if problems:
        raise problems[0]


def peak_memory_grows_by(action: Callable[[], None]) -> int:
    """Bytes of resident memory at the worst moment of `action`, beyond what there was before."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak so far
    before = _memory("VmRSS")
    action()
    return _memory("VmHWM") - before


def _memory(name: str) -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(name))
    return int(line.split()[1]) << 10


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.005)


# A peer that misbehaves: rank 2 of 3, connected in order, with the right secret, and then left to the test.

ROGUE = 2
TAG_INDEX = 7  # the receive that waits for the rogue is for (1, 0, TAG_INDEX), 16 bytes of float32


def good_frame() -> bytes:
    return frame(FrameKind.INLINE, ROGUE, bytes(16), index=TAG_INDEX, dtype=1)


def patched(offset: int, value: bytes) -> bytes:
    part = bytearray(good_frame())
    part[offset : offset + len(value)] = value
    return bytes(part)


# Each ends the receive that waits: with FrameError where one message was wrong, with PeerLost where the peer cannot be trusted.
BAD_FRAMES: dict[str, bytes] = {
    "garbage": random.Random(1).randbytes(1000),
    "zeros": bytes(1000),
    "magic": patched(0, b"XX"),
    "version": patched(2, b"\x09"),
    "kind": patched(3, b"\x63"),
    "dtype code": patched(28, b"\xfa"),
    "reserved": patched(29, b"\x01"),
    "wrong dtype": frame(FrameKind.INLINE, ROGUE, bytes(16), index=TAG_INDEX, dtype=2),
    "shorter": frame(FrameKind.INLINE, ROGUE, bytes(12), index=TAG_INDEX, dtype=1),
    "longer": frame(FrameKind.INLINE, ROGUE, bytes(20), index=TAG_INDEX, dtype=1),
    "wrong source": frame(FrameKind.INLINE, 1, bytes(16), index=TAG_INDEX, dtype=1),
    "source out of range": frame(FrameKind.INLINE, 2**32 - 1, bytes(16), index=TAG_INDEX, dtype=1),
    "wrong generation": frame(FrameKind.INLINE, ROGUE, bytes(16), index=TAG_INDEX, dtype=1, generation=1),
    "declared over the limit": frame(FrameKind.INLINE, ROGUE, bytes(16), declared=frames.MAX_PAYLOAD_BYTES + 1),
    "declared without end": frame(FrameKind.INLINE, ROGUE, bytes(16), declared=2**64 - 1),
    "declared post over the limit": frame(FrameKind.POST, ROGUE, bytes(16), declared=frames.MAX_POST_BYTES + 1),
    "goodbye with a payload": frame(FrameKind.GOODBYE, ROGUE, bytes(16)),
    "acknowledgement of 5 bytes": frame(FrameKind.ACK, ROGUE, bytes(5)),
    "payload in no part": frame(FrameKind.BULK, ROGUE, bytes(16), index=TAG_INDEX, dtype=1),
    "shared memory nobody agreed on": frame(FrameKind.SHARED, ROGUE, declared=16, index=TAG_INDEX, dtype=1, number=1),
    "an unasked message twice": frame(FrameKind.INLINE, ROGUE, b"x", index=99),
    "a message to a channel that nobody serves": post(ROGUE, TOPIC_HEAD, HEAD.pack(5, 0, 1, 1) + b"hp"),
    "a message shorter than it says": post(ROGUE, TOPIC_HEAD, HEAD.pack(5, 0, 2, 2) + b"hp"),
    "half a head": post(ROGUE, TOPIC_HEAD, b"x"),
    "credit that was not used": post(ROGUE, TOPIC_CREDIT, CREDIT.pack(RETURN, 5, 1)),
    "no word about credit": post(ROGUE, TOPIC_CREDIT, CREDIT.pack(9, 5, 1)),
    "text that is not text": post(ROGUE, DECODING_TOPIC, b"\xa2\xff\xff"),
    "nested without end": post(ROGUE, DECODING_TOPIC, b"\x91" * 100_000),
}

# None of these is an error of the kind that ends a receive.
HARMLESS_FRAMES: dict[str, bytes] = {
    "heartbeat": frame(FrameKind.HEARTBEAT, ROGUE),
    "a second greeting": post(ROGUE, TOPIC_HELLO),
    "acknowledgements of nothing": frame(FrameKind.ACK, ROGUE, b"\1\0\0\0\xff\xff\xff\xff"),
    "an answer to no offer": post(ROGUE, TOPIC_ANSWER, b"\xc1"),
    "an offer that is no offer": post(ROGUE, TOPIC_OFFER, b"\xc1\xff"),
    "an offer with a bad path": post(ROGUE, TOPIC_OFFER, msgspec.msgpack.encode(MappingOffer("/\0", bytes(64), 1 << 20))),
    "an offer of too much": post(ROGUE, TOPIC_OFFER, msgspec.msgpack.encode(MappingOffer("/dev/zero", bytes(64), 2**40))),
    "an offer of a device": post(ROGUE, TOPIC_OFFER, msgspec.msgpack.encode(MappingOffer("/dev/zero", bytes(64), 1 << 20))),
    "a post on a topic without listener": post(ROGUE, 4_000_000, b"?"),
    "a message nobody asked for": frame(FrameKind.INLINE, ROGUE, b"x", index=99),
}


Say = Callable[[FramedWire, int, bytes], None]  # (the rogue's wire, to whom, one frame)


@contextmanager
def world_with_a_rogue(make: Make) -> Iterator[list[FramedWire]]:
    with socket_world(3, make, hosts=["here", "here", "elsewhere"]) as wires:
        try:
            yield wires
        finally:
            wires[ROGUE].abandon()


def blamed(error: WireError) -> int:
    assert isinstance(error, (FrameError, PeerLost))
    return error.rank


def decode_posts(wire: FramedWire) -> None:
    """What protocols above a wire do with control messages."""

    def decode(source: int, body: bytes) -> None:
        msgspec.msgpack.decode(body, type=list[Any] | str)

    wire.listen(DECODING_TOPIC, decode)


def check_bad(make: Make, say: Say, bad: bytes, twice: bool) -> None:
    """Rank 0 hears `bad` from the rogue: its receive ends with an error; ranks 0 and 1 go on, and so do 1 and the rogue."""
    with world_with_a_rogue(make) as wires:

        def program(wire: FramedWire) -> None:
            decode_posts(wire)
            meeting = Meeting(wire)
            handle, arrived = receive(wire, ROGUE, Tag(1, 0, TAG_INDEX), 16, 1)
            meeting(ROGUE)
            if wire.rank == 0:
                say(wires[ROGUE], 0, bad)
                if twice:
                    say(wires[ROGUE], 0, bad)
                with pytest.raises((FrameError, PeerLost)) as caught:
                    wait_for(wire, handle)
                assert blamed(caught.value) == ROGUE
                assert arrived == []
            else:
                say(wires[ROGUE], 1, good_frame())
                wait_for(wire, handle)
                assert arrived == [bytes(16)] and not wire.lost
            meeting(ROGUE)
            exchange_once(wire)
            meeting(ROGUE)

        run_threads(2, program, wires=wires[:2])


def check_harmless(make: Make, say: Say, harmless: bytes) -> None:
    with world_with_a_rogue(make) as wires:

        def program(wire: FramedWire) -> None:
            handle, arrived = receive(wire, ROGUE, Tag(1, 0, TAG_INDEX), 16, 1)
            say(wires[ROGUE], wire.rank, harmless)
            say(wires[ROGUE], wire.rank, good_frame())
            wait_for(wire, handle)
            assert arrived == [bytes(16)] and not wire.lost

        run_threads(2, program, wires=wires[:2])


def check_overdraft(make: Make, say: Say) -> None:
    """Rank 0 serves a channel; what the rogue sends within its credit is taken, and one byte more makes it lost."""
    with world_with_a_rogue(make) as wires:
        wire, got = wires[0], list[int]()
        wire.serve(5, lambda source, header, payload: got.append(payload.nbytes), 1000)
        riding = HEAD.pack(5, 0, 0, 100) + bytes(100)
        for _ in range(20):  # each is consumed, so its credit is there again
            say(wires[ROGUE], 0, post(ROGUE, TOPIC_HEAD, riding))
        progress_until(wire, lambda: len(got) == 20, "the honest messages")
        announced = 1000 - MESSAGE_BYTES - wire._serving._inflows[ROGUE, 5].owed
        say(wires[ROGUE], 0, post(ROGUE, TOPIC_HEAD, HEAD.pack(5, 1, 0, announced)))  # its payload never comes
        say(wires[ROGUE], 0, post(ROGUE, TOPIC_HEAD, HEAD.pack(5, 0, 0, 0)))
        progress_until(wire, lambda: ROGUE in wire.lost, "the loss of the rogue")
        assert re.search("bad frame: .* bytes under way to channel 5, its credit is 1000", wire.lost[ROGUE].reason)
        assert len(got) == 20 and not wire._serving._inflows


def check_numbers(make: Make, say: Say) -> None:
    """Two messages that say that the same payload is theirs: the second makes their sender lost."""
    with world_with_a_rogue(make) as wires:
        wire = wires[0]
        for channel in (5, 6):
            wire.serve(channel, lambda source, header, payload: None, 1 << 20)
            say(wires[ROGUE], 0, post(ROGUE, TOPIC_HEAD, HEAD.pack(channel, 1, 0, 100_000)))
        progress_until(wire, lambda: ROGUE in wire.lost, "the loss of the rogue")
        assert "bad frame: payload number 1 a second time" in wire.lost[ROGUE].reason


def check_unasked(make: Make, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody asks for is kept up to a limit, and what is asked for does not count against it."""
    monkeypatch.setattr(mailbox, "MAX_PARKED_BYTES", 10_000)
    with world_with_a_rogue(make) as wires:
        wire = wires[0]
        for index in range(50):
            handle, _ = receive(wire, ROGUE, Tag(1, 0, index), 5000)
            say(wires[ROGUE], 0, frame(FrameKind.INLINE, ROGUE, bytes(5000), index=index))
            wait_for(wire, handle)
        for index in range(2):
            say(wires[ROGUE], 0, frame(FrameKind.INLINE, ROGUE, bytes(5000), sequence=1, index=index))
        progress_until(wire, lambda: ROGUE in wire.lost, "the loss of the rogue")
        assert "bad frame: 5000 bytes that nobody asked for, with 5512 here" in wire.lost[ROGUE].reason


def check_mutations(make: Make, say: Say, seed: int, num_frames: int = 40) -> None:
    """Valid frames, some bytes of which were changed, then an end: whatever they became, nothing but the rogue is lost."""
    chance = random.Random(seed)
    valid = [*HARMLESS_FRAMES.values(), good_frame()]
    with world_with_a_rogue(make) as wires:

        def program(wire: FramedWire) -> None:
            decode_posts(wire)
            meeting = Meeting(wire)
            handle, _ = receive(wire, ROGUE, Tag(1, 0, TAG_INDEX), 16, 1)
            if wire.rank == 0:
                with contextlib.suppress(OSError):  # rank 0 may have hung up already
                    for _ in range(num_frames):
                        say(wires[ROGUE], 0, mutated(chance.choice(valid), chance))
                        wire.progress(0)
                wires[ROGUE].abandon()
            with contextlib.suppress(WireError):
                wait_for(wire, handle)
            progress_until(wire, lambda: ROGUE in wire.lost, "the end of the rogue")
            meeting(ROGUE)
            exchange_once(wire)
            meeting(ROGUE)

        run_threads(2, program, wires=wires[:2])
        assert [set(wire.lost) for wire in wires[:2]] == [{ROGUE}, {ROGUE}]


def mutated(part: bytes, chance: random.Random) -> bytes:
    changed = bytearray(part)
    for _ in range(chance.choice([0, 1, 1, 2, 5])):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    if chance.random() < 0.1:
        del changed[chance.randrange(len(changed)) :]
    return bytes(changed)
