"""Shared memory between workers of one host: used where it can be, silently right over sockets where it cannot."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.collectives.request import DEFAULT_SEGMENT_BYTES
from stretto.testing import run_threads, wait_for
from stretto.wire import mapping, sharing
from stretto.wire import tcp as tcp_module
from stretto.wire.base import Handle, Tag
from stretto.wire.framed import FramedWire
from stretto.wire.frames import HEADER_BYTES
from stretto.wire.mapping import COOKIE_BYTES, MappingOffer
from stretto.wire.shared_memory import GRAIN_BYTES, OUTBOX_BYTES, Inbox, Outbox
from stretto.wire.sharing import SHARED_FROM_BYTES
from stretto.wire.tcp import TcpWire
from wire.contract import Meeting, body, progress_until, receive
from wire.socket_world import Make, connect_all, peer_of, socket_world, tcp, wires_of, zeromq

BOTH = pytest.mark.parametrize("make", [tcp(), zeromq()], ids=["tcp", "zeromq"])


# The file.


def test_what_is_put_in_is_seen_on_the_other_side() -> None:
    outbox = Outbox(2 * GRAIN_BYTES)
    inbox = Inbox(outbox.offer)
    assert outbox.put(memoryview(b"first")) == 0 and outbox.put(memoryview(b"second")) == 1
    assert bytes(inbox.view(0, 5)) == b"first" and bytes(inbox.view(1, 6)) == b"second"
    assert outbox.put(memoryview(b"third")) is None
    outbox.release(0)
    assert outbox.put(memoryview(b"third")) == 0
    assert bytes(inbox.view(0, 5)) == b"third"
    assert bytes(inbox.view(0, 5)) == b"third"  # memory of both, not of one


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5 * GRAIN_BYTES)), max_size=60))
def test_no_message_lies_where_another_is_still_to_be_read(steps: list[tuple[bool, int]]) -> None:
    outbox = Outbox(8 * GRAIN_BYTES)
    inbox = Inbox(outbox.offer)
    there: dict[int, bytes] = {}
    for number, (comes, num_bytes) in enumerate(steps):
        if comes:
            data = bytes([number]) * num_bytes
            slot = outbox.put(memoryview(data))
            if slot is not None:
                assert slot not in there
                there[slot] = data
            elif not there:
                raise AssertionError(f"no room for {num_bytes} bytes in an empty outbox")
        elif there:
            slot = next(iter(there))
            del there[slot]
            outbox.release(slot)
        for slot, data in there.items():
            assert bytes(inbox.view(slot, len(data))) == data


def test_the_file_is_private_and_allocated_in_full_and_gone_once_settled() -> None:
    outbox = Outbox(3 * GRAIN_BYTES)
    path = Path(outbox.offer.path)
    status = path.stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == COOKIE_BYTES + 3 * GRAIN_BYTES
    assert status.st_blocks * 512 >= status.st_size
    outbox.settle()
    assert not path.exists()


def test_the_reader_cannot_write() -> None:
    outbox = Outbox(GRAIN_BYTES)
    inbox = Inbox(outbox.offer)
    assert inbox.view(0, 10).readonly


def altered(offer: MappingOffer, **changes: object) -> MappingOffer:
    values = {name: getattr(offer, name) for name in offer.__struct_fields__} | changes
    return MappingOffer(**values)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda offer: altered(offer, cookie=bytes(COOKIE_BYTES)), "not the one that was offered"),
        (lambda offer: altered(offer, cookie=b""), "not the one that was offered"),
        (lambda offer: altered(offer, num_bytes=offer.num_bytes + 1), "bytes long instead of"),
        (lambda offer: altered(offer, num_bytes=0), "an offer of 0 bytes"),
        (lambda offer: altered(offer, num_bytes=1 << 40), "an offer of"),
        (lambda offer: altered(offer, num_bytes=-1), "an offer of"),
        (lambda offer: altered(offer, path=offer.path + "999"), "No such file"),
        (lambda offer: altered(offer, path="/dev/zero"), "no open file of a process"),
        (lambda offer: altered(offer, path=offer.path + "-not"), "no open file of a process"),
    ],
)
def test_an_offer_that_does_not_fit_is_refused_with_the_reason(spoil: Callable[[MappingOffer], MappingOffer], why: str) -> None:
    outbox = Outbox(2 * GRAIN_BYTES)
    with pytest.raises((OSError, ValueError), match=why):
        Inbox(spoil(outbox.offer))


def test_a_file_that_others_could_write_to_is_refused() -> None:
    outbox = Outbox(GRAIN_BYTES)
    os.chmod(outbox.offer.path, 0o644)
    with pytest.raises(ValueError, match="not mode 0600"):
        Inbox(outbox.offer)


def test_a_pipe_in_place_of_the_file_does_not_block() -> None:
    reading, writing = os.pipe()
    with pytest.raises(ValueError, match="not a regular file"):
        Inbox(MappingOffer(f"/proc/{os.getpid()}/fd/{reading}", bytes(COOKIE_BYTES), GRAIN_BYTES))
    os.close(reading)
    os.close(writing)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused() -> None:
    outbox = Outbox(GRAIN_BYTES)
    os.chown(outbox.offer.path, 12345, 12345)
    with pytest.raises(ValueError, match="owned by somebody else"):
        Inbox(outbox.offer)


@pytest.mark.parametrize(
    ("slot", "num_bytes"), [(2, 1), (65535, 1), (0, 2 * GRAIN_BYTES + 1), (1, GRAIN_BYTES + 1), (0, 1 << 40)]
)
def test_a_view_outside_of_the_slots_is_refused(slot: int, num_bytes: int) -> None:
    outbox = Outbox(2 * GRAIN_BYTES)
    inbox = Inbox(outbox.offer)
    with pytest.raises(ValueError, match=f"{num_bytes} bytes at {slot * GRAIN_BYTES} of {2 * GRAIN_BYTES}"):
        inbox.view(slot, num_bytes)


# On a wire.


def settle(wires: Sequence[FramedWire], *, used: bool = True) -> None:
    """Everybody has sent everybody a first large message, and has heard whether later ones may go through shared memory."""

    def agreed(wire: FramedWire) -> bool:
        connections = [wire._connections[rank] for rank in wire.peers]
        return all(each.outbox_open if used else each.outbox is None and not each.may_share for each in connections)

    def program(wire: FramedWire) -> None:
        meeting = Meeting(wire)
        exchange_large(wire, [SHARED_FROM_BYTES], sequence=1000, meeting=meeting)
        progress_until(wire, lambda: agreed(wire), "the agreement on shared memory")
        meeting()

    run_threads(len(wires), program, wires=wires)


def exchange_large(wire: FramedWire, sizes: Sequence[int], sequence: int = 0, meeting: Meeting | None = None) -> None:
    """Everybody sends everybody a message of each size, and checks what arrives."""
    meeting = meeting or Meeting(wire)
    handles: list[Handle] = []
    arrived: dict[tuple[int, int], list[bytes]] = {}
    for peer in (rank for rank in range(wire.world_size) if rank != wire.rank):
        for index, num_bytes in enumerate(sizes):
            data = memoryview(body(wire.rank, peer, index, num_bytes))
            handles.append(wire.send(data, peer, Tag(1, sequence, index), 0))
            handle, arrived[peer, index] = receive(wire, peer, Tag(1, sequence, index), num_bytes)
            handles.append(handle)
    wait_for(wire, *handles)
    for (peer, index), got in arrived.items():
        assert got == [body(peer, wire.rank, index, sizes[index])]
    meeting()  # nobody stops making progress while others wait for an acknowledgement


@BOTH
def test_large_messages_do_not_go_over_the_socket(make: Make) -> None:
    sizes = [SHARED_FROM_BYTES, 300_000, DEFAULT_SEGMENT_BYTES]
    with socket_world(3, make) as wires:
        settle(wires)
        before = [wire.bytes_sent for wire in wires]
        run_threads(3, lambda wire: exchange_large(wire, sizes), wires=wires)
        for wire, sent in zip(wires, before, strict=True):
            headers = 2 * len(sizes) * HEADER_BYTES
            acknowledgements = 2 * len(sizes) * (HEADER_BYTES + 4)
            assert headers <= wire.bytes_sent - sent <= headers + acknowledgements + 12 * HEADER_BYTES


@BOTH
def test_messages_larger_than_the_outbox_go_over_the_socket(make: Make) -> None:
    with socket_world(2, make) as wires:
        settle(wires)
        before = [wire.bytes_sent for wire in wires]
        run_threads(2, lambda wire: exchange_large(wire, [OUTBOX_BYTES + 1]), wires=wires)
        assert all(wire.bytes_sent - sent > OUTBOX_BYTES for wire, sent in zip(wires, before, strict=True))


@BOTH
def test_small_messages_go_over_the_socket_and_a_pair_that_has_no_others_takes_no_memory(make: Make) -> None:
    with socket_world(2, make) as wires:
        before = [wire.bytes_sent for wire in wires]
        run_threads(2, lambda wire: exchange_large(wire, [SHARED_FROM_BYTES - 1] * 5), wires=wires)
        assert all(wire.bytes_sent - sent >= 5 * (SHARED_FROM_BYTES - 1) for wire, sent in zip(wires, before, strict=True))
        assert all(wire._connections[1 - wire.rank].outbox is None for wire in wires)


@BOTH
def test_workers_of_different_hosts_use_sockets(make: Make) -> None:
    with socket_world(2, make, hosts=["here", "there"]) as wires:
        settle(wires, used=False)
        run_threads(2, lambda wire: exchange_large(wire, [300_000]), wires=wires)
        assert all(wire.bytes_sent > 300_000 for wire in wires)


@BOTH
def test_a_hundred_megabytes_sent_before_anybody_asks_for_them_do_not_block(make: Make) -> None:
    number, num_bytes = 100, 1 << 20
    with socket_world(2, make) as wires:
        settle(wires)
        assert number * num_bytes > OUTBOX_BYTES
        data = memoryview(bytearray(num_bytes))

        def program(wire: FramedWire) -> None:
            meeting = Meeting(wire)
            if wire.rank == 0:
                wait_for(wire, *(wire.send(data, 1, Tag(1, 0, index), 0) for index in range(number)))
                meeting()
                return
            meeting()  # by now all of it is here, out of the slots
            assert len(wire._parked) == number
            for index in reversed(range(number)):
                handle, arrived = receive(wire, 0, Tag(1, 0, index), num_bytes)
                assert handle.done and len(arrived[0]) == num_bytes

        run_threads(2, program, wires=wires)


@BOTH
def test_what_came_early_is_a_copy_that_later_messages_do_not_change(make: Make) -> None:
    with socket_world(2, make) as wires:
        settle(wires)

        def program(wire: FramedWire) -> None:
            meeting = Meeting(wire)
            if wire.rank == 0:
                for index in range(200):
                    wait_for(wire, wire.send(memoryview(bytes([index]) * 100_000), 1, Tag(1, 0, index), 0))
                meeting()
                return
            meeting()
            for index in range(200):
                _, arrived = receive(wire, 0, Tag(1, 0, index), 100_000)
                assert arrived == [bytes([index]) * 100_000]

        run_threads(2, program, wires=wires)


@BOTH
def test_messages_that_wait_for_a_slot_end_with_the_peer(make: Make) -> None:
    with socket_world(2, make) as wires:
        settle(wires)
        data = memoryview(bytearray(DEFAULT_SEGMENT_BYTES))
        sent = [wires[0].send(data, 1, Tag(1, 0, index), 0) for index in range(8)]
        assert not sent[-1].done
        wires[1].abandon()
        progress_until(wires[0], lambda: all(each.done for each in sent), "the end of the sends")
        assert sent[-1].error is not None


# Where it cannot be used.


def no_space(*args: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def check_fallback(make: Make, caplog: pytest.LogCaptureFixture, why: str, size: int = 3) -> None:
    """The job forms, results are right, the payload went over sockets, and each rank said so once."""
    with caplog.at_level(logging.WARNING, "stretto.wire"), wires_of(size, make) as wires:
        connect_all(wires, [peer_of(wire) for wire in wires])
        settle(wires, used=False)
        run_threads(size, lambda wire: exchange_large(wire, [300_000]), wires=wires)
        assert all(wire.bytes_sent > (size - 1) * 300_000 for wire in wires)
        run_threads(size, lambda wire: wire.close(), wires=wires)
    said = [record.getMessage() for record in caplog.records if record.name == "stretto.wire"]
    for rank in range(size):
        own = [text for text in said if text.startswith(f"rank {rank}: ")]
        assert len(own) == 1 and why in own[0] and "using sockets" in own[0], said


@BOTH
def test_no_memory_means_sockets_and_one_warning(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    check_fallback(make, caplog, "No space left on device")


@BOTH
def test_little_memory_for_all_pairs_of_a_host_means_sockets_and_one_warning(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mapping, "_free_bytes", lambda: 2 * 6 * OUTBOX_BYTES - 1)  # three workers are six pairs
    check_fallback(make, caplog, "more than half of the")


@BOTH
def test_workers_of_one_host_that_do_not_see_each_other_use_sockets_and_say_so(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Containers may share a network and not their processes: a pid of one is nobody, or somebody else, to the other."""
    monkeypatch.setattr(tcp_module, "_is_running", lambda pid: pytest.fail("it looked up a foreign process"))
    with caplog.at_level(logging.WARNING, "stretto.wire"), wires_of(2, make) as wires:
        connect_all(wires, [msgspec.structs.replace(peer_of(wire), pid_namespace=str(wire.rank)) for wire in wires])
        run_threads(2, lambda wire: exchange_large(wire, [300_000] * 2), wires=wires)
        assert all(wire.bytes_sent > 600_000 and wire._connections[1 - wire.rank].outbox is None for wire in wires)
        for wire in wires:
            if isinstance(wire, TcpWire):
                assert wire._is_alive(wire._connections[1 - wire.rank])  # by its pulse
        run_threads(2, lambda wire: wire.close(), wires=wires)
    assert caplog.text.count("in another PID namespace") == 2


@BOTH
def test_a_receiver_that_cannot_open_the_file_means_sockets_and_one_warning(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Spoilt(Outbox):
        def __init__(self, num_bytes: int, of_all: int) -> None:
            super().__init__(num_bytes, of_all)
            os.chmod(self.offer.path, 0o640)

    monkeypatch.setattr(sharing, "Outbox", Spoilt)
    check_fallback(make, caplog, "not mode 0600")


@BOTH
def test_a_file_that_is_not_the_one_offered_means_sockets_and_one_warning(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Spoilt(Outbox):
        def __init__(self, num_bytes: int, of_all: int) -> None:
            super().__init__(num_bytes, of_all)
            self.offer = altered(self.offer, cookie=bytes(COOKIE_BYTES))

    monkeypatch.setattr(sharing, "Outbox", Spoilt)
    check_fallback(make, caplog, "not the one that was offered")


def test_one_side_that_does_not_want_it_means_sockets(caplog: pytest.LogCaptureFixture) -> None:
    def make(rank: int, size: int) -> FramedWire:
        return tcp(shared_memory=rank == 0)(rank, size)

    with wires_of(2, make) as wires:
        connect_all(wires, [peer_of(wire) for wire in wires])
        settle(wires, used=False)
        run_threads(2, lambda wire: exchange_large(wire, [300_000]), wires=wires)
        run_threads(2, lambda wire: wire.close(), wires=wires)
