"""What every wire must do. A test module inherits `WireContract` and says how a world of its wires is made.

    class TestThreadsKeepTheContract(WireContract):
        @contextmanager
        def make_world(self, size): ...

Each test is a program for one rank, run on all of them. Programs end with `Meeting`, so that nobody stops making
progress while others still need an answer.
"""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest

from stretto.errors import ConfigurationError, FrameError, PeerLost, WireTimeout
from stretto.testing import run_threads, wait_for
from stretto.wire import mailbox
from stretto.wire.base import DigestMismatch, Handle, Tag, Wire
from stretto.wire.serving import MESSAGE_BYTES

MEETING_TOPIC = 1000
SIZES = (0, 1, 7, 48, 1000, 40_000, 200_000)


class Meeting:
    """A barrier of control messages among the peers that are left."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._heard: Counter[int] = Counter()
        self._round = 0
        wire.listen(MEETING_TOPIC, lambda source, body: self._heard.update([source]))

    def __call__(self, *without: int) -> None:
        wire = self._wire
        self._round += 1
        peers = [rank for rank in range(wire.world_size) if rank != wire.rank and rank not in without]
        for peer in peers:
            wire.post(peer, MEETING_TOPIC, b"here")
        progress_until(wire, lambda: all(self._heard[peer] >= self._round for peer in peers), "the meeting")


def progress_until(wire: Wire, condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    deadline = wire.now() + timeout_s
    while not condition():
        if wire.now() > deadline:
            raise WireTimeout(-1, what, timeout_s)
        wire.progress(1.0)


def body(source: int, target: int, index: int, num_bytes: int) -> bytes:
    return random.Random(f"{source} {target} {index}").randbytes(num_bytes)


def receive(wire: Wire, source: int, tag: Tag, num_bytes: int, dtype: int = 0) -> tuple[Handle, list[bytes]]:
    arrived: list[bytes] = []
    return wire.recv(source, tag, num_bytes, dtype, lambda view: arrived.append(bytes(view))), arrived


def send(wire: Wire, to: int, tag: Tag, data: bytes, dtype: int = 0) -> Handle:
    return wire.send(memoryview(bytearray(data)), to, tag, dtype)


class WireContract:
    def make_world(self, size: int) -> AbstractContextManager[Sequence[Wire]]:
        raise NotImplementedError

    def kill(self, wire: Wire) -> None:
        """End a rank without a goodbye, from its own thread."""
        wire.abandon()

    def run(self, size: int, program: Callable[..., Any], *args: Any) -> list[Any]:
        with self.make_world(size) as wires:
            return run_threads(size, program, *args, wires=wires, timeout_s=90)

    @pytest.mark.parametrize("size", [2, 3, 7])
    def test_everybody_exchanges_messages_of_every_size_with_everybody(self, size: int) -> None:
        def program(wire: Wire) -> None:
            meeting = Meeting(wire)
            handles, arrived = [], {}
            for peer in (rank for rank in range(size) if rank != wire.rank):
                for index, num_bytes in enumerate(SIZES):
                    tag = Tag(1, 5, index)
                    handles.append(send(wire, peer, tag, body(wire.rank, peer, index, num_bytes)))
                    handle, arrived[peer, index] = receive(wire, peer, tag, num_bytes)
                    handles.append(handle)
            wait_for(wire, *handles)
            for (peer, index), got in arrived.items():
                assert got == [body(peer, wire.rank, index, SIZES[index])]
            meeting()

        self.run(size, program)

    def test_messages_are_matched_by_tag_whatever_their_order(self) -> None:
        def program(wire: Wire) -> None:
            meeting = Meeting(wire)
            if wire.rank == 0:
                wait_for(wire, *(send(wire, 1, Tag(1, 0, index), bytes([index])) for index in range(10)))
            else:
                got = [receive(wire, 0, Tag(1, 0, index), 1) for index in reversed(range(10))]
                wait_for(wire, *(handle for handle, _ in got))
                assert [arrived for _, arrived in got] == [[bytes([index])] for index in reversed(range(10))]
            meeting()

        self.run(2, program)

    def test_the_same_tag_from_two_peers_is_two_messages(self) -> None:
        def program(wire: Wire) -> None:
            meeting = Meeting(wire)
            if wire.rank == 0:
                got = [receive(wire, peer, Tag(1, 0, 0), 1) for peer in (2, 1)]
                wait_for(wire, *(handle for handle, _ in got))
                assert [arrived for _, arrived in got] == [[b"\2"], [b"\1"]]
            else:
                wait_for(wire, send(wire, 0, Tag(1, 0, 0), bytes([wire.rank])))
            meeting()

        self.run(3, program)

    def test_a_message_that_came_early_is_delivered_inside_recv(self) -> None:
        def program(wire: Wire) -> None:
            meeting = Meeting(wire)
            if wire.rank == 0:
                wait_for(wire, send(wire, 1, Tag(1, 0, 0), b"early"))
                meeting()
            else:
                meeting()  # whatever rank 0 sent before is here now
                finished: list[Handle] = []
                arrived: list[bytes] = []
                handle = wire.recv(0, Tag(1, 0, 0), 5, 0, lambda view: arrived.append(bytes(view)), finished.append)
                assert handle.done and handle.error is None
                assert arrived == [b"early"] and finished == [handle]
            meeting()

        self.run(2, program)

    def test_many_messages_of_many_collectives_are_under_way_at_once(self) -> None:
        tags = [Tag(channel, sequence, index) for channel in (1, 2) for sequence in range(10) for index in range(10)]

        def program(wire: Wire) -> None:
            meeting = Meeting(wire)
            peer = 1 - wire.rank
            order = random.Random(wire.rank)
            got = {tag: receive(wire, peer, tag, 20) for tag in order.sample(tags, len(tags))}
            sent = [send(wire, peer, tag, body(wire.rank, peer, hash(tag), 20)) for tag in order.sample(tags, len(tags))]
            wait_for(wire, *sent, *(handle for handle, _ in got.values()))
            for tag, (_, arrived) in got.items():
                assert arrived == [body(peer, wire.rank, hash(tag), 20)]
            meeting()

        self.run(2, program)

    def test_memory_may_be_used_again_once_the_send_is_done(self) -> None:
        num_bytes = 300_000

        def program(wire: Wire) -> None:
            meeting = Meeting(wire)
            peer = 1 - wire.rank
            memory = bytearray(num_bytes)
            for step in range(5):
                memory[:] = bytes([wire.rank * 100 + step]) * num_bytes
                sent = wire.send(memoryview(memory), peer, Tag(1, step, 0), 0)
                handle, arrived = receive(wire, peer, Tag(1, step, 0), num_bytes)
                wait_for(wire, sent, handle)
                assert arrived == [bytes([peer * 100 + step]) * num_bytes]
            meeting()

        self.run(2, program)

    def test_bytes_arrive_in_place_where_a_receive_only_copies(self) -> None:
        def program(wire: Wire) -> None:
            meeting = Meeting(wire)
            peer = 1 - wire.rank
            for index, num_bytes in enumerate(SIZES):
                target = bytearray(num_bytes)

                def copy(view: memoryview, target: bytearray = target) -> None:
                    target[:] = view

                sent = send(wire, peer, Tag(1, 0, index), body(wire.rank, peer, index, num_bytes))
                got = wire.recv(peer, Tag(1, 0, index), num_bytes, 0, copy, into=memoryview(target))
                wait_for(wire, sent, got)
                assert target == body(peer, wire.rank, index, num_bytes)
            meeting()

        self.run(2, program)

    def test_a_send_calls_on_done_exactly_once(self) -> None:
        def program(wire: Wire) -> None:
            meeting = Meeting(wire)
            finished: list[Handle] = []
            memory = memoryview(bytearray(200_000))
            sent = wire.send(memory, 1 - wire.rank, Tag(1, 0, 0), 0, finished.append)
            handle, _ = receive(wire, 1 - wire.rank, Tag(1, 0, 0), 200_000)
            wait_for(wire, sent, handle)
            meeting()
            assert finished == [sent]

        self.run(2, program)

    def test_posts_are_heard_in_order_even_before_anybody_listens(self) -> None:
        def program(wire: Wire) -> None:
            meeting = Meeting(wire)
            for number in range(50):
                wire.post(1 - wire.rank, 20 + number % 2, bytes([number]))
            meeting()  # so they are all here, unheard
            even: list[tuple[int, bytes]] = []
            odd: list[tuple[int, bytes]] = []
            wire.listen(20, lambda source, body: even.append((source, body)))
            wire.listen(21, lambda source, body: odd.append((source, body)))
            wire.post(1 - wire.rank, 20, b"last")
            progress_until(wire, lambda: len(even) == 26 and len(odd) == 25, "posts")
            peer = 1 - wire.rank
            assert even == [(peer, bytes([number])) for number in range(0, 50, 2)] + [(peer, b"last")]
            assert odd == [(peer, bytes([number])) for number in range(1, 50, 2)]
            meeting()

        self.run(2, program)

    @pytest.mark.parametrize("early", [False, True], ids=["asked first", "came first"])
    @pytest.mark.parametrize(
        ("asked", "dtype", "digest", "error"),
        [(99, 1, 7, FrameError), (101, 1, 7, FrameError), (0, 1, 7, FrameError), (100, 2, 7, FrameError)]
        + [(100, 1, 8, DigestMismatch)],
        ids=["shorter", "longer", "empty", "dtype", "digest"],
    )
    def test_a_message_that_is_not_what_was_asked_for_ends_the_receive(
        self, asked: int, dtype: int, digest: int, error: type[Exception], early: bool
    ) -> None:
        def program(wire: Wire) -> None:
            meeting = Meeting(wire)
            if wire.rank == 0:
                if not early:
                    meeting()
                sent = send(wire, 1, Tag(1, 0, 0, 7), bytes(100), dtype=1)
                wait_for(wire, sent)
                if early:
                    meeting()
            else:
                if early:
                    meeting()
                handle, arrived = receive(wire, 0, Tag(1, 0, 0, digest), asked, dtype)
                if not early:
                    meeting()
                with pytest.raises(error) as caught:
                    wait_for(wire, handle)
                assert getattr(caught.value, "rank") == 0  # noqa: B009
                assert arrived == []
            meeting()
            exchange_once(wire)  # the wire is as good as before
            meeting()

        self.run(2, program)

    def test_a_killed_peer_is_lost_to_those_who_wait_and_to_no_others(self) -> None:
        def program(wire: Wire) -> None:
            meeting = Meeting(wire)
            told: list[PeerLost] = []
            wire.on_lost(told.append)
            meeting()
            if wire.rank == 1:
                self.kill(wire)
                return
            handle, arrived = receive(wire, 1, Tag(1, 0, 0), 10)
            with pytest.raises(PeerLost) as caught:
                wait_for(wire, handle)
            assert caught.value.rank == 1 and arrived == []
            progress_until(wire, lambda: bool(told), "on_lost")
            assert [lost.rank for lost in told] == [1] and list(wire.lost) == [1]
            after_the_loss(wire)
            meeting(1)
            exchange_once(wire, (0, 2))
            meeting(1)
            assert len(told) == 1

        def after_the_loss(wire: Wire) -> None:
            handle, _ = receive(wire, 1, Tag(1, 1, 0), 10)
            sent = send(wire, 1, Tag(1, 1, 0), b"hello")
            wire.post(1, 20, b"dropped")
            for each in (handle, sent):
                assert each.done and isinstance(each.error, PeerLost) and each.error.rank == 1

        self.run(3, program)

    def test_waiting_for_a_peer_that_said_goodbye_is_an_error_that_says_so(self) -> None:
        def program(wire: Wire) -> None:
            meeting = Meeting(wire)
            meeting()
            if wire.rank == 1:
                wait_for(wire, send(wire, 0, Tag(1, 0, 0), b"last words"))
                wire.close()
                wire.close()
                return
            handle, arrived = receive(wire, 1, Tag(1, 0, 0), 10)
            wait_for(wire, handle)
            assert arrived == [b"last words"]
            nothing, _ = receive(wire, 1, Tag(1, 0, 1), 10)
            with pytest.raises(PeerLost, match="left the job") as caught:
                wait_for(wire, nothing)
            assert caught.value.rank == 1 and 1 in wire.lost

        self.run(2, program)

    def test_nothing_of_a_cancelled_collective_touches_memory(self) -> None:
        def program(wire: Wire) -> None:
            meeting = Meeting(wire)
            if wire.rank == 0:
                parked = send(wire, 1, Tag(1, 0, 0), b"parked")
                other = send(wire, 1, Tag(1, 1, 0), b"other")
                meeting()
                meeting()  # rank 1 has cancelled
                late = send(wire, 1, Tag(1, 0, 1), b"late")
                wait_for(wire, parked, other, late)
                meeting()
                return
            asked, arrived = receive(wire, 0, Tag(1, 0, 1), 4)
            meeting()
            wire.cancel(1, 0)
            meeting()
            meeting()
            assert not asked.done and arrived == []
            handle, kept = receive(wire, 0, Tag(1, 1, 0), 5)
            wait_for(wire, handle)
            assert kept == [b"other"]

        self.run(2, program)

    @pytest.mark.parametrize("size", [2, 3])
    def test_offers_arrive_whole_and_in_order_without_a_receive(self, size: int) -> None:
        lengths = (0, 1, 300, 40_000, 17, 200_000, 0, 16 << 10, 20_000)

        def program(wire: Wire) -> None:
            meeting = Meeting(wire)
            got: dict[int, list[tuple[bytes, bytes]]] = {peer: [] for peer in wire.peers}
            handles = []
            for number, num_bytes in enumerate(lengths):  # those to ranks that do not serve yet wait
                for peer in wire.peers:
                    payload = memoryview(body(wire.rank, peer, number, num_bytes))
                    handles.append(wire.offer(peer, 7, bytes([number]) * number, payload))
            wire.serve(7, lambda source, header, payload: got[source].append((header, bytes(payload))), 1 << 20)
            wait_for(wire, *handles)
            progress_until(wire, lambda: all(len(each) == len(lengths) for each in got.values()), "the messages")
            for peer, messages in got.items():
                expected = [(bytes([i]) * i, body(peer, wire.rank, i, n)) for i, n in enumerate(lengths)]
                assert messages == expected
            meeting()

        self.run(size, program)

    def test_an_offer_waits_until_the_channel_is_served_and_no_other_channel_waits_for_it(self) -> None:
        def program(wire: Wire) -> None:
            meeting = Meeting(wire)
            got: list[bytes] = []
            if wire.rank == 0:
                wire.serve(2, lambda source, header, payload: got.append(header), 1000)
            meeting()
            if wire.rank == 1:
                unserved = wire.offer(0, 1, b"for later", memoryview(b"x" * 100))
                wait_for(wire, wire.offer(0, 2, b"for now", memoryview(b"")))
                assert not unserved.done
                meeting()
                meeting()
                wait_for(wire, unserved)
            else:
                meeting()
                progress_until(wire, lambda: bool(got), "the message to the channel that is served")
                assert got == [b"for now"]
                wire.serve(1, lambda source, header, payload: got.append(header), 1000)
                meeting()
                progress_until(wire, lambda: len(got) == 2, "the other one")
                assert got == [b"for now", b"for later"]
            meeting()

        self.run(2, program)

    @pytest.mark.parametrize("num_bytes", [500, 60_000])
    def test_no_more_than_its_credit_leaves_a_sender(self, num_bytes: int) -> None:
        credit, number = 3 * num_bytes + 1000, 40

        def program(wire: Wire) -> None:
            meeting = Meeting(wire)
            got: list[int] = []
            meeting()
            if wire.rank == 0:
                handles = [wire.offer(1, 3, bytes([i]), memoryview(bytes([i]) * num_bytes)) for i in range(number)]
                meeting()  # rank 1 serves, and has taken nothing yet
                wait_for(wire, *handles)
            else:
                undelivered: list[int] = []

                def on_message(source: int, header: bytes, payload: memoryview) -> None:
                    assert bytes(payload) == header * num_bytes
                    serving = wire._serving  # type: ignore[attr-defined]
                    undelivered.append(serving._inflows[0, 3].held)
                    got.append(header[0])

                wire.serve(3, on_message, credit)
                meeting()
                progress_until(wire, lambda: len(got) == number, "the messages")
                assert got == list(range(number))
                assert max(undelivered) <= credit
            meeting()

        self.run(2, program)

    def test_a_message_of_the_whole_credit_is_sent_and_a_larger_one_is_refused_at_its_sender(self) -> None:
        credit = 100_000

        def program(wire: Wire) -> None:
            meeting = Meeting(wire)
            got: list[int] = []
            wire.serve(3, lambda source, header, payload: got.append(payload.nbytes), credit)
            whole = credit - MESSAGE_BYTES - len(b"header")
            small = wire.offer(1 - wire.rank, 3, b"", memoryview(bytes(1000)))
            large = wire.offer(1 - wire.rank, 3, b"header", memoryview(bytes(whole)))
            larger = wire.offer(1 - wire.rank, 3, b"header", memoryview(bytes(whole + 1)))
            last = wire.offer(1 - wire.rank, 3, b"", memoryview(b""))
            wait_for(wire, small, large, last)
            assert larger.done and re.search(r"costs 100001 .* credit of 100000.*\n.*in pieces", str(larger.error))
            progress_until(wire, lambda: got == [1000, whole, 0], "the messages")
            meeting()

        self.run(2, program)

    def test_offers_to_a_killed_peer_end_with_its_loss(self) -> None:
        def program(wire: Wire) -> None:
            meeting = Meeting(wire)
            if wire.rank == 1:
                wire.serve(3, lambda source, header, payload: None, 1000)
            meeting()
            if wire.rank == 1:
                self.kill(wire)
                return
            handles = [wire.offer(1, channel, b"", memoryview(bytes(900))) for channel in (4, 4, 5)]
            for handle in handles:
                with pytest.raises(PeerLost) as caught:
                    wait_for(wire, handle)
                assert caught.value.rank == 1
            assert isinstance(wire.offer(1, 3, b"", memoryview(b"")).error, PeerLost)

        self.run(2, program)

    def test_what_cannot_be_served_or_offered_is_refused_at_once(self) -> None:
        def program(wire: Wire) -> None:
            wire.serve(3, lambda source, header, payload: None, 1000)
            with pytest.raises(ConfigurationError, match="served with 1000 already"):
                wire.serve(3, lambda source, header, payload: None, 2000)
            with pytest.raises(ConfigurationError, match="none could ever be sent"):
                wire.serve(4, lambda source, header, payload: None, 10)
            with pytest.raises(ConfigurationError, match="joins different workers"):
                wire.offer(wire.rank, 3, b"", memoryview(b""))
            with pytest.raises(ConfigurationError, match="in pieces"):
                wire.offer(1 - wire.rank, 3, bytes(1 << 20), memoryview(b""))
            with pytest.raises(ConfigurationError, match="not contiguous"):
                wire.offer(1 - wire.rank, 3, b"", memoryview(bytearray(10))[::2])
            Meeting(wire)()

        self.run(2, program)

    @pytest.mark.parametrize("num_bytes", [1, 100_000])
    def test_an_exception_of_on_message_leaves_progress_and_nobody_is_blamed(self, num_bytes: int) -> None:
        def program(wire: Wire) -> None:
            meeting = Meeting(wire)
            got: list[bytes] = []

            def on_message(source: int, header: bytes, payload: memoryview) -> None:
                got.append(header)
                if header == b"bad":
                    raise ValueError("a bug of this side")

            wire.serve(3, on_message, 1 << 20)
            if wire.rank == 0:
                wait_for(wire, wire.offer(1, 3, b"bad", memoryview(bytes(num_bytes))))
            else:
                with pytest.raises(ValueError, match="a bug of this side"):
                    progress_until(wire, lambda: False, "the exception")
            meeting()
            if wire.rank == 0:
                wait_for(wire, wire.offer(1, 3, b"good", memoryview(bytes(num_bytes))))
            else:
                progress_until(wire, lambda: got == [b"bad", b"good"], "the next message")
            meeting()
            assert not wire.lost

        self.run(2, program)

    def test_a_rank_that_nobody_knows_is_refused_at_once(self) -> None:
        def program(wire: Wire) -> None:
            for action in (
                lambda: send(wire, 9, Tag(1, 0, 0), b"x"),
                lambda: receive(wire, 9, Tag(1, 0, 0), 1),
                lambda: wire.post(9, 20, b""),
                lambda: wire.offer(9, 3, b"", memoryview(b"")),
            ):
                with pytest.raises(ConfigurationError, match=r"rank 9: the ranks that this wire knows are .* Give one of those"):
                    action()
            Meeting(wire)()

        self.run(2, program)

    def test_each_peer_has_its_own_account_of_control_messages_that_nobody_listens_to(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(mailbox, "MAX_UNHEARD_BYTES", 100 * (mailbox.UNHEARD_BYTES + 1))

        def program(wire: Wire) -> None:
            meeting = Meeting(wire)
            meeting()
            for number in range(0 if wire.rank == 0 else 95):  # together more than one may have
                wire.post(0, 900 + number % 3, b"?")
            meeting()
            assert not wire.lost
            meeting()
            if wire.rank == 1:
                for number in range(20):
                    wire.post(0, 2000 + number, b"?")  # each on a topic of its own
            if wire.rank == 0:
                progress_until(wire, lambda: 1 in wire.lost, "the loss")
                assert re.search("bad frame: too many control messages that nobody listens to", wire.lost[1].reason)
            if wire.rank != 1:
                meeting(1)
                assert 2 - wire.rank not in wire.lost

        self.run(3, program)

    def test_another_thread_can_wake_a_blocked_progress(self) -> None:
        def program(wire: Wire) -> None:
            asleep = threading.Event()

            def wake() -> None:
                assert asleep.wait(30)
                wire.wake()

            waker = threading.Thread(target=wake)
            waker.start()
            asleep.set()
            start = wire.now()
            wire.progress(80.0)  # far beyond what a test may take, were it not woken
            waker.join(30)
            assert wire.now() - start <= 80.0  # virtual time may pass in no time at all

        self.run(1, program)

    def test_a_wake_before_progress_is_not_forgotten(self) -> None:
        def program(wire: Wire) -> None:
            wire.wake()
            start = wire.now()
            wire.progress(80.0)
            assert wire.now() - start < 40.0

        self.run(1, program)

    def test_progress_returns_when_its_time_is_over(self) -> None:
        def program(wire: Wire) -> None:
            meeting = Meeting(wire)
            meeting()
            handle, _ = receive(wire, 1 - wire.rank, Tag(1, 0, 0), 1)
            start = wire.now()
            with pytest.raises(WireTimeout) as caught:
                wait_for(wire, handle, timeout_s=0.2)
            assert caught.value.rank == 1 - wire.rank
            assert 0.2 <= wire.now() - start < 40.0
            wire.progress(0.0)
            wire.cancel(1, 0)
            meeting()

        self.run(2, program)


def exchange_once(wire: Wire, ranks: Sequence[int] = (0, 1)) -> None:
    peer = ranks[1] if wire.rank == ranks[0] else ranks[0]
    sent = send(wire, peer, Tag(9, 9, 9), bytes([wire.rank]))
    handle, arrived = receive(wire, peer, Tag(9, 9, 9), 1)
    wait_for(wire, sent, handle)
    assert arrived == [bytes([peer])]
