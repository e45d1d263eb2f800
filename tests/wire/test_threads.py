from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from stretto.errors import ConfigurationError, PeerLost, WireError
from stretto.testing import run_threads, wait_for
from stretto.testing.envelopes import BufferChanged
from stretto.testing.in_process import WireKilled
from stretto.testing.threads import ThreadsWire, threads_world
from stretto.wire.base import Tag, Wire
from stretto.wire.frames import HEADER_BYTES
from wire.contract import Meeting, WireContract, progress_until, receive, send

TAG = Tag(1, 0, 0)


class TestThreadsKeepTheContract(WireContract):
    @contextmanager
    def make_world(self, size: int) -> Iterator[Sequence[Wire]]:
        wires = threads_world(size, check=True)
        yield wires
        for wire in wires:
            wire.close()


class TestThreadsWithoutBuffersKeepTheContractTheyCan:
    """`eager=False`: a send is done only when somebody has asked for it."""

    def test_a_send_waits_until_it_is_asked_for(self) -> None:
        sender, receiver = threads_world(2, eager=False)
        sent = send(sender, 1, TAG, b"x")
        receiver.progress(0)
        sender.progress(0)
        assert not sent.done
        handle, arrived = receive(receiver, 0, TAG, 1)
        sender.progress(1)
        assert sent.done and handle.done and arrived == [b"x"]

    def test_memory_changed_before_it_is_asked_for_arrives_changed(self) -> None:
        sender, receiver = threads_world(2, eager=False)
        memory = bytearray(b"good")
        sender.send(memoryview(memory), 1, TAG, 0)
        receiver.progress(0)
        memory[:] = b"evil"
        _, arrived = receive(receiver, 0, TAG, 4)
        assert arrived == [b"evil"]


def test_memory_changed_before_the_receiver_makes_progress_arrives_changed() -> None:
    sender, receiver = threads_world(2)
    memory = bytearray(b"good")
    sent = sender.send(memoryview(memory), 1, TAG, 0)
    handle, arrived = receive(receiver, 0, TAG, 4)
    memory[:] = b"evil"
    assert not sent.done
    receiver.progress(1)
    assert handle.done and arrived == [b"evil"]


@pytest.mark.parametrize("asked", [True, False])
def test_check_names_the_ranks_and_the_tag_of_a_changed_buffer_on_both_sides(asked: bool) -> None:
    sender, receiver = threads_world(2, check=True)
    memory = bytearray(b"good")
    sender.send(memoryview(memory), 1, TAG, 0)
    memory[:] = b"evil"
    words = r"rank 0 changed the 4 bytes .* to rank 1 \(Tag\(channel=1, sequence=0, index=0"
    if asked:
        receive(receiver, 0, TAG, 4)
        with pytest.raises(BufferChanged, match=words):
            receiver.progress(1)
    else:
        receiver.progress(1)
        with pytest.raises(BufferChanged, match=words):
            receive(receiver, 0, TAG, 4)
    with pytest.raises(BufferChanged, match=words):
        sender.progress(1)


def test_check_catches_a_sender_that_writes_between_delivery_and_done() -> None:
    sender, receiver = threads_world(2, check=True)
    memory = bytearray(b"good")
    sent = sender.send(memoryview(memory), 1, TAG, 0)
    _, arrived = receive(receiver, 0, TAG, 4)
    receiver.progress(1)
    assert arrived == [b"good"]
    memory[:] = b"evil"  # it got away with it, but on a real network it might not have
    with pytest.raises(BufferChanged):
        sender.progress(1)
    assert sent.done


def test_check_scribbles_over_a_view_that_is_kept() -> None:
    sender, receiver = threads_world(2, check=True)
    kept: list[memoryview] = []
    send(sender, 1, TAG, b"good")
    receiver.recv(0, TAG, 4, 0, kept.append)
    receiver.progress(1)
    assert bytes(kept[0]) == b"\xa5" * 4


def test_a_cancelled_send_is_not_read_any_more() -> None:
    sender, receiver = threads_world(2)
    sent = send(sender, 1, TAG, b"good")
    handle, arrived = receive(receiver, 0, TAG, 4)
    sender.cancel(1, 0)
    receiver.progress(0)
    sender.progress(0)
    assert not sent.done and not handle.done and arrived == []


def test_a_second_message_of_the_same_name_makes_its_sender_lost() -> None:
    sender, receiver = threads_world(2)
    for _ in range(2):
        send(sender, 1, TAG, b"x")
    receiver.progress(0)
    assert "second message" in receiver.lost[0].reason


def test_asking_twice_for_one_message_is_refused() -> None:
    _, receiver = threads_world(2)
    receive(receiver, 0, TAG, 1)
    with pytest.raises(ConfigurationError, match="its own index"):
        receive(receiver, 0, TAG, 1)


def test_bytes_sent_counts_payload_and_header_of_messages_and_posts() -> None:
    sender, _ = threads_world(2)
    send(sender, 1, TAG, bytes(100))
    sender.post(1, 20, b"four")
    assert sender.bytes_sent == 100 + 4 + 2 * HEADER_BYTES


def test_goodbye_is_not_a_lost_peer_until_somebody_waits_for_it() -> None:
    leaver, stayer = threads_world(2)
    told: list[PeerLost] = []
    stayer.on_lost(told.append)
    leaver.close()
    stayer.progress(0)
    assert stayer.lost == {} and told == [] and stayer.said_goodbye(0)
    handle, _ = receive(stayer, 0, TAG, 1)
    assert isinstance(handle.error, PeerLost) and "left the job" in str(handle.error)
    stayer.progress(0)
    assert [lost.rank for lost in told] == [0]


def test_what_was_sent_before_goodbye_arrives_although_the_memory_is_used_again() -> None:
    leaver, stayer = threads_world(2)
    memory = bytearray(b"good")
    leaver.send(memoryview(memory), 1, TAG, 0)
    leaver.close()
    memory[:] = b"evil"
    handle, arrived = receive(stayer, 0, TAG, 4)
    wait_for(stayer, handle)
    assert arrived == [b"good"]


def test_kill_from_another_thread_ends_the_rank_and_is_seen_at_once() -> None:
    wires = threads_world(2)
    reason: list[str] = []

    def program(wire: ThreadsWire) -> None:
        meeting = Meeting(wire)
        meeting()
        if wire.rank == 1:
            killer = threading.Timer(0.05, wire.kill, ("shot",))
            killer.start()
            try:
                progress_until(wire, lambda: False, "death")
            finally:
                killer.join(30)
        handle, _ = receive(wire, 1, TAG, 1)
        with pytest.raises(PeerLost) as caught:
            wait_for(wire, handle)
        reason.append(caught.value.reason)

    assert run_threads(2, program, wires=wires) == [None, None]
    assert reason == ["shot"]
    with pytest.raises(WireKilled, match="rank 1 was killed: shot"):
        wires[1].progress(0)


def test_a_closed_wire_says_so() -> None:
    (wire,) = threads_world(1)
    wire.close()
    with pytest.raises(WireError, match="closed"):
        wire.progress(0)


def test_a_callback_that_cancels_the_collective_stops_the_others_of_it() -> None:
    dying, survivor = threads_world(2)
    finished: list[int] = []

    def on_done(index: int) -> None:
        finished.append(index)
        survivor.cancel(1, 0)

    for index in range(3):
        survivor.recv(0, Tag(1, 0, index), 1, 0, lambda view: None, lambda handle: on_done(handle.tag.index))
    dying.kill()
    survivor.progress(1)
    assert finished == [0]


def test_a_rank_may_send_to_itself() -> None:
    (wire,) = threads_world(1)
    sent = send(wire, 0, TAG, b"me")
    handle, arrived = receive(wire, 0, TAG, 2)
    wait_for(wire, sent, handle)
    assert arrived == [b"me"]


@pytest.mark.parametrize("peer", [-1, 2])
def test_a_rank_outside_the_world_is_refused(peer: int) -> None:
    wire = threads_world(2)[0]
    with pytest.raises(ConfigurationError, match=r"are \[0, 1\]. Give one of those"):
        send(wire, peer, TAG, b"")
    with pytest.raises(ConfigurationError, match=r"are \[0, 1\]. Give one of those"):
        receive(wire, peer, TAG, 0)


def test_what_cannot_be_sent_is_refused_before_anything_is() -> None:
    wire = threads_world(2)[0]
    with pytest.raises(ConfigurationError, match="not contiguous"):
        wire.send(memoryview(bytearray(10))[::2], 1, TAG, 0)
    with pytest.raises(ConfigurationError, match="in pieces"):
        wire.post(1, 20, bytes(2 << 20))
    with pytest.raises(ConfigurationError, match="at least one rank"):
        threads_world(0)
    assert wire.bytes_sent == 0
