from __future__ import annotations

import doctest
import threading

import pytest

import stretto.testing
import stretto.testing.network_model
from stretto.errors import ConfigurationError, PeerLost
from stretto.testing import RanksHung, ThreadsLeft, run_threads, run_virtual, wait_for
from stretto.testing.envelopes import BufferChanged
from stretto.testing.threads import threads_world
from stretto.testing.virtual import VirtualWire, virtual_world
from stretto.wire.base import Tag, Wire

TAG = Tag(1, 0, 0)


def wait_for_ever(wire: Wire) -> None:
    while True:
        wire.progress(60.0)


@pytest.mark.parametrize("module", [stretto.testing, stretto.testing.network_model])
def test_the_examples_in_the_text_are_true(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_results_come_in_the_order_of_ranks(size: int) -> None:
    assert run_threads(size, lambda wire, x: (wire.rank, wire.world_size, x), "x") == [(rank, size, "x") for rank in range(size)]


@pytest.mark.parametrize("run", [run_threads, run_virtual])
def test_the_first_failure_is_raised_with_its_traceback_and_ends_the_others(run: object) -> None:
    def burst(wire: Wire) -> None:
        raise ZeroDivisionError("on purpose")

    def program(wire: Wire) -> None:
        if wire.rank == 1:
            burst(wire)
        wait_for_ever(wire)

    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        run(3, program, timeout_s=20)  # type: ignore[operator]
    assert "burst" in [entry.name for entry in caught.traceback]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_a_rank_that_hangs_is_shown_where_it_hangs() -> None:
    release = threading.Event()

    def stuck_here(wire: Wire) -> None:
        release.wait(60)

    def program(wire: Wire) -> None:
        if wire.rank == 1:
            stuck_here(wire)
        elif wire.rank == 2:
            wait_for_ever(wire)

    timer = threading.Timer(0.7, release.set)  # within the grace that is left for unwinding
    timer.start()
    stacks = r"(?s)rank 0 has ended\nrank 1 is here:.*stuck_here.*rank 2 is here:.*progress"
    with pytest.raises(RanksHung, match=stacks):
        run_threads(3, program, timeout_s=0.3)
    timer.join(30)


def test_a_virtual_rank_that_hangs_in_real_time_releases_the_others() -> None:
    release = threading.Event()

    def program(wire: VirtualWire) -> None:
        if wire.rank == 1:
            release.wait(60)
        wait_for_ever(wire)

    timer = threading.Timer(0.7, release.set)
    timer.start()
    with pytest.raises(RanksHung, match=r"(?s)rank 1 is here:.*release.wait"):
        run_threads(3, program, wires=virtual_world(3), timeout_s=0.3)
    timer.join(30)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_threads_that_a_program_leaves_behind_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretto.testing, "GRACE_S", 0.1)
    release = threading.Event()
    thread = threading.Thread(target=release.wait, args=(60,), name="straggler")

    with pytest.raises(ThreadsLeft, match="straggler"):
        run_threads(1, lambda wire: thread.start())
    release.set()
    thread.join(30)


def test_waiting_for_a_rank_that_has_returned_is_not_a_hang() -> None:
    def program(wire: Wire) -> int:
        if wire.rank == 0:
            return -1
        with pytest.raises(PeerLost, match="left the job") as caught:
            wait_for(wire, wire.recv(0, TAG, 1, 0, lambda view: None))
        return caught.value.rank

    assert run_threads(3, program) == [-1, 0, 0]
    assert run_virtual(3, program) == [-1, 0, 0]


def test_a_changed_buffer_is_found_without_being_asked_for() -> None:
    def program(wire: Wire) -> None:
        memory = bytearray(4)
        if wire.rank == 0:
            sent = wire.send(memoryview(memory), 1, TAG, 0)
            memory[:] = b"evil"
            wait_for(wire, sent)
        else:
            wait_for(wire, wire.recv(0, TAG, 4, 0, lambda view: None))

    with pytest.raises(BufferChanged, match="rank 0 changed the 4 bytes it was sending to rank 1"):
        run_threads(2, program)


def test_a_killed_rank_has_no_result() -> None:
    def program(wire: Wire) -> str:
        if wire.rank == 1:
            threads_wire = wires[1]
            threads_wire.kill("on purpose")
            wire.progress(1.0)
        return "fine"

    wires = threads_world(3)
    assert run_threads(3, program, wires=wires) == ["fine", None, "fine"]


def test_as_many_wires_as_ranks() -> None:
    with pytest.raises(ConfigurationError, match="2 wires for 3 ranks"):
        run_threads(3, wait_for_ever, wires=threads_world(2))


def test_64_virtual_ranks_meet_quickly() -> None:
    def program(wire: VirtualWire) -> float:
        heard: list[int] = []
        wire.listen(20, lambda source, body: heard.append(source))
        for peer in range(wire.world_size):
            if peer != wire.rank:
                wire.post(peer, 20, b"")
        while len(heard) < wire.world_size - 1:
            wire.progress(1.0)
        return wire.now()

    assert set(run_virtual(64, program)) == {0.0}
