from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import ConfigurationError
from stretto.protocol.machine import Actions, Machine, SendMessage, SetTimer
from stretto.testing.faults import Cut, Fault, Kill, Pause
from stretto.testing.network_model import ExponentialDelay, Link, NetworkModel, NodeName
from stretto.testing.virtual_links import OutOfBudget
from stretto.testing.virtual_network import VirtualNetwork


@dataclass
class Beacon(Machine):
    """Sends a number to each of its peers every second, and notes what it hears and when."""

    header_type = int
    peers: Sequence[NodeName]
    count: int = 10
    heard: list[tuple[float, NodeName, int]] = field(default_factory=list)
    views: list[tuple[float, list[NodeName], list[NodeName], int]] = field(default_factory=list)
    sent: int = 0

    def on_start(self, now: float) -> Actions:
        return [SetTimer("beat", 1.0)]

    def on_message(self, now: float, source: NodeName, header: int, payload: memoryview) -> Actions:
        self.heard.append((round(now, 9), source, header))
        return []

    def on_view(self, now: float, joined: Sequence[Any], left: Sequence[Any], generation: int) -> Actions:
        self.views.append((now, list(joined), list(left), generation))
        return []

    def on_timer(self, now: float, name: str) -> Actions:
        if self.sent >= self.count:
            return []
        self.sent += 1
        return [*(SendMessage(peer, self.sent) for peer in self.peers), SetTimer("beat", 1.0)]

    @property
    def numbers(self) -> list[int]:
        return [number for _, _, number in self.heard]


def pair(link: Link | None = None, faults: Sequence[Fault] = (), seed: int = 1, **options: Any) -> VirtualNetwork:
    return VirtualNetwork(seed=seed, model=NetworkModel(link or Link(latency_s=0.25)), faults=faults, **options)


def run_pair(network: VirtualNetwork, count: int = 10, until_s: float = 100.0) -> Beacon:
    receiver = Beacon([])
    network.add("a", Beacon(["b"], count))
    network.add("b", receiver)
    network.run(until_s)
    network.assert_all_fired()
    return receiver


def test_messages_arrive_after_the_latency_of_their_link() -> None:
    assert run_pair(pair(), count=2).heard == [(1.25, "a", 1), (2.25, "a", 2)]


def test_bandwidth_counts_the_encoded_bytes_at_both_ends() -> None:
    network = pair(Link(latency_s=1.0, bytes_per_s=10.0))
    receiver = Beacon([])
    network.add("b", receiver)
    for name in ("x", "y"):
        network.send(name, "b", 7, bytes(19))  # one byte of header
    network.run(100)
    assert [time for time, _, _ in receiver.heard] == [3.0, 5.0]


class Marking(Machine):
    """Sends two messages that it has marked, and notes when they have left it."""

    header_type = int

    def __init__(self) -> None:
        self.left: list[tuple[float, int]] = []

    def on_start(self, now: float) -> Actions:
        return [SendMessage("b", 1, bytes(999), 7), SendMessage("b", 2, bytes(999), 8), SendMessage("nobody", 3, b"", 9)]

    def on_message(self, now: float, source: NodeName, header: int, payload: memoryview) -> Actions:
        return ()

    def on_sent(self, now: float, token: int) -> Actions:
        self.left.append((round(now, 9), token))
        return ()


def test_a_node_is_told_when_what_it_has_marked_has_left_its_interface() -> None:
    network = VirtualNetwork(seed=0, model=NetworkModel(Link(latency_s=5.0, bytes_per_s=1000.0)))
    network.add("b", Beacon([], count=0))
    network.add("a", machine := Marking())
    network.run(20.0)
    assert machine.left == [(1.0, 7), (2.0, 8)]


def test_lost_messages_do_not_arrive() -> None:
    network = pair(Link(loss=0.5))
    numbers = run_pair(network, count=50).numbers
    assert len(numbers) == 50 - network.fired["loss"]
    assert numbers == sorted(set(numbers))


def test_duplicates_arrive_twice() -> None:
    network = pair(Link(duplicate=0.5))
    numbers = run_pair(network, count=50).numbers
    assert len(numbers) == 50 + network.fired["duplicate"] and set(numbers) == set(range(1, 51))


def test_reordered_messages_are_overtaken() -> None:
    numbers = run_pair(pair(Link(reorder=0.3, hold_s=2.5)), count=50).numbers
    assert numbers != sorted(numbers) and sorted(numbers) == list(range(1, 51))


def test_jitter_reorders_too() -> None:
    network = pair(Link(jitter=ExponentialDelay(3.0)))
    numbers = run_pair(network, count=50).numbers
    assert sorted(numbers) == list(range(1, 51)) and network.fired["reorder"] > 0


def test_a_killed_node_hears_and_says_nothing_more() -> None:
    assert run_pair(pair(faults=[Kill("b", at_s=3.0)])).numbers == [1, 2]
    assert run_pair(pair(faults=[Kill("a", at_s=3.5)])).numbers == [1, 2, 3]


def test_a_fault_can_come_at_the_nth_event() -> None:
    network = pair(faults=[Kill("a", at_event=5)])
    run_pair(network)
    assert not network.is_alive("a") and network.is_alive("b")


def test_a_node_can_come_back_under_its_name_with_an_empty_memory() -> None:
    network = pair(faults=[Kill("b", at_s=3.0)])
    again = Beacon([])
    network.at(5.1, lambda: network.add("b", again))
    assert run_pair(network).numbers == [1, 2]
    assert again.numbers == [6, 7, 8, 9, 10]  # 5 was sent to the one before


def test_a_paused_node_takes_what_came_meanwhile_in_order_when_it_goes_on() -> None:
    heard = run_pair(pair(faults=[Pause("b", at_s=2.5, for_s=3.0)]), count=6).heard
    assert heard == [(1.25, "a", 1), (2.25, "a", 2), (5.5, "a", 3), (5.5, "a", 4), (5.5, "a", 5), (6.25, "a", 6)]


def test_a_paused_nodes_timers_wait_as_well() -> None:
    heard = run_pair(pair(faults=[Pause("a", at_s=1.5, for_s=3.0)]), count=3).heard
    assert [time for time, _, _ in heard] == [1.25, 4.75, 5.75]


def test_a_cut_drops_what_is_under_way_and_heals() -> None:
    network = pair(faults=[Cut(("b",), at_s=2.1, for_s=2.0)])
    assert run_pair(network, count=6).numbers == [1, 5, 6]  # 2 was under way, 3 and 4 were sent into the cut
    assert sum(network.fired.values()) == 3


def test_a_partition_leaves_each_side_whole() -> None:
    names = ["a", "b", "c", "d"]
    nodes = {name: Beacon([other for other in names if other != name], count=5) for name in names}
    network = pair(faults=[Cut(("a", "b"), at_s=0.0)])
    for name, node in nodes.items():
        network.add(name, node)
    network.run(100)
    network.assert_all_fired()
    assert {source for _, source, _ in nodes["a"].heard} == {"b"}
    assert {source for _, source, _ in nodes["d"].heard} == {"c"}


def test_a_timer_can_be_set_again_and_taken_back() -> None:
    rung: list[tuple[float, str]] = []

    class Timing(Beacon):
        def on_start(self, now: float) -> Actions:
            return [SetTimer("a", 1.0), SetTimer("a", 2.0), SetTimer("b", 1.5), SetTimer("c", 1.0), SetTimer("b", None)]

        def on_timer(self, now: float, name: str) -> Actions:
            rung.append((now, name))
            return []

    network = pair()
    network.add(0, Timing([]))
    network.run(10)
    assert rung == [(1.0, "c"), (2.0, "a")]


def test_run_until_stops_when_the_condition_holds() -> None:
    network = pair()
    receiver = Beacon([])
    network.add("a", Beacon(["b"]))
    network.add("b", receiver)
    assert network.run_until(lambda: len(receiver.heard) == 3, until_s=100.0)
    assert network.now == 3.25
    assert not network.run_until(lambda: len(receiver.heard) == 30, until_s=50.0)
    assert network.now == 50.0


def test_nodes_that_answer_each_other_for_ever_run_out_of_events() -> None:
    class Echo(Beacon):
        def on_message(self, now: float, source: NodeName, header: int, payload: memoryview) -> Actions:
            return [SendMessage(source, header)]

    network = pair(Link())
    network.add("a", Echo([]))
    network.add("b", Echo([]))
    network.send("a", "b", 1)
    with pytest.raises(OutOfBudget, match="1000 events by virtual time 0 s"):
        network.run(1.0, max_events=1000)


def test_a_fault_without_effect_is_told() -> None:
    network = pair(faults=[Cut(("b",), at_s=50.0, for_s=1.0)])
    network.add("a", Beacon(["b"]))
    network.run(100)
    with pytest.raises(AssertionError, match="no effect: Cut"):
        network.assert_all_fired()


def test_a_name_means_one_node() -> None:
    network = pair()
    network.add("a", Beacon([]))
    with pytest.raises(ConfigurationError, match="is alive"):
        network.add("a", Beacon([]))


def test_the_death_of_a_node_is_told_to_each_other_one_at_a_time_of_its_own() -> None:
    nodes = {name: Beacon([]) for name in "abcd"}
    network = pair(faults=[Kill("c", at_s=3.0)])
    for name, node in nodes.items():
        network.add(name, node)
    network.run(100)
    network.assert_all_fired()
    told = [nodes[name].views for name in "abd"]
    assert all(len(views) == 1 and views[0][1:] == ([], ["c"], 0) for views in told) and not nodes["c"].views
    times = [views[0][0] for views in told]
    assert all(3.01 <= time <= 3.02 for time in times) and len(set(times)) == 3


@pytest.mark.parametrize("back_at_s", [3.001, 5.1])  # before anybody has noticed that it was gone, and long after
def test_a_node_that_comes_back_has_left_and_joined_and_hears_who_is_gone(back_at_s: float) -> None:
    a, again = Beacon(["b"]), Beacon([])
    network = pair(faults=[Kill("b", at_s=3.0), Kill("c", at_s=1.0)])
    for name, node in {"a": a, "b": Beacon([]), "c": Beacon([])}.items():
        network.add(name, node)
    network.at(back_at_s, lambda: network.add("b", again))
    network.run(100)
    network.assert_all_fired()
    assert [view[1:] for view in a.views] == [([], ["c"], 0), ([], ["b"], 0), (["b"], [], 1)]
    assert [view[1:] for view in again.views] == [([], ["c"], 1)]
    assert again.numbers == [number for number in range(1, 11) if number > back_at_s]  # nothing that its former life was sent


def test_nothing_comes_from_a_node_after_it_has_left_nor_from_its_former_life() -> None:
    receiver = Beacon([])
    network = pair(Link(latency_s=5.0), faults=[Kill("a", at_s=3.5)])
    network.at(7.0, lambda: network.add("a", Beacon(["b"], count=1)))
    network.add("a", Beacon(["b"]))
    network.add("b", receiver)
    network.run(100)
    assert receiver.heard == [(13.0, "a", 1)]  # 1, 2 and 3 of its first life were under way


@pytest.mark.parametrize("fault", [Pause("b", at_s=2.5, for_s=8.0), Cut(("b",), at_s=2.5, for_s=8.0)], ids=["pause", "cut"])
@pytest.mark.parametrize("reliable", [True, False])
def test_a_long_silence_parts_two_nodes_for_good_on_both_sides(fault: Fault, reliable: bool) -> None:
    a, b, c = Beacon(["b"], 20), Beacon(["a"], 20), Beacon([])
    model = NetworkModel(Link(latency_s=0.25), silence_s=5.0)
    network = VirtualNetwork(seed=1, model=model, faults=[fault], reliable=reliable)
    for name, node in {"a": a, "b": b, "c": c}.items():
        network.add(name, node)
    network.run(100)
    network.assert_all_fired()
    back_s = 10.5 if isinstance(fault, Pause) else 7.5  # a paused node hears of it when it goes on
    assert a.views == [(7.5, [], ["b"], 0)] and b.views == [(back_s, [], ["a"], 0), (back_s, [], ["c"], 0)]
    assert a.numbers == b.numbers == [1, 2] and c.views == [(7.5, [], ["b"], 0)]


def test_on_a_reliable_network_everything_comes_once_and_in_order() -> None:
    link = Link(latency_s=0.25, jitter=ExponentialDelay(3.0), loss=0.3, retransmit_s=2.0, bytes_per_s=10.0)
    network = pair(link, [Cut(("b",), at_s=5.0, for_s=4.0), Pause("a", at_s=12.0, for_s=3.0)], reliable=True)
    receiver = run_pair(network, count=40, until_s=1000)
    assert receiver.numbers == list(range(1, 41)) and network.fired["loss"] > 5


def test_on_a_reliable_network_nothing_overtakes_what_overlapping_cuts_hold_back() -> None:
    network = pair(faults=[Cut(("b",), at_s=2.0, for_s=8.0), Cut(("a",), at_s=5.0, for_s=8.0)], reliable=True)
    assert run_pair(network, count=20).numbers == list(range(1, 21))


def test_what_a_cut_that_never_heals_holds_back_does_not_keep_a_run_from_ending() -> None:
    network = pair(faults=[Cut(("b",), at_s=2.0)], reliable=True)
    assert run_pair(network, count=3, until_s=math.inf).numbers == [1]


def test_a_reliable_network_neither_doubles_nor_reorders() -> None:
    with pytest.raises(ConfigurationError, match="once and in order"):
        pair(Link(duplicate=0.1), reliable=True)


def test_a_payload_arrives_and_is_gone_afterwards_and_is_read_when_it_arrives() -> None:
    kept: list[memoryview] = []
    seen: list[bytes] = []

    class Keeping(Beacon):
        def on_message(self, now: float, source: NodeName, header: int, payload: memoryview) -> Actions:
            seen.append(bytes(payload))
            kept.append(payload)
            return []

    network = pair()
    network.add("b", Keeping([]))
    changed = bytearray(b"too early")
    network.send("a", "b", 1, b"whole")
    network.send("a", "b", 2, changed)
    changed[:] = b"TOO LATE!"
    network.run(10)
    assert seen == [b"whole", b"TOO LATE!"] and kept[0] == b"\xa5" * 5


def test_a_machine_that_raises_ends_the_run_and_says_where_and_when() -> None:
    class Broken(Beacon):
        def on_message(self, now: float, source: NodeName, header: int, payload: memoryview) -> Actions:
            raise ZeroDivisionError

    network = pair()
    network.add("a", Beacon(["b"]))
    network.add("b", Broken([]))
    with pytest.raises(ZeroDivisionError) as caught:
        network.run(10)
    assert caught.value.__notes__ == ["message from 'a' at node 'b', virtual time 1.25 s, seed 1"]


def test_what_is_not_a_header_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    network = pair()
    receiver = Beacon([])
    network.add("b", receiver)
    network.send("a", "b", "not a number")
    network.send("a", "b", 1)
    network.run(10)
    assert receiver.numbers == [1] and "cannot be read" in caplog.text


def test_a_message_to_oneself_arrives_at_once_whatever_the_link_does() -> None:
    network = pair(Link(latency_s=1.0, loss=0.99))
    alone = Beacon(["a"], count=3)
    network.add("a", alone)
    network.run(10)
    assert alone.heard == [(1.0, "a", 1), (2.0, "a", 2), (3.0, "a", 3)]


STORMY = Link(latency_s=0.1, bytes_per_s=1e4, jitter=ExponentialDelay(0.5), loss=0.1, duplicate=0.1, reorder=0.1, hold_s=1.0)


def storm(seed: int) -> str:
    faults: list[Fault] = [Kill("c", at_s=8.0), Pause("b", at_s=3.0, for_s=2.0), Cut(("a",), at_s=5.0, for_s=2.0)]
    network = pair(STORMY, faults, seed)
    for name in "abcd":
        network.add(name, Beacon([other for other in "abcd" if other != name], count=20))
    network.run(100)
    network.assert_all_fired()
    return network.trace.hexdigest()


def test_one_seed_gives_one_history_and_another_seed_another() -> None:
    assert storm(5) == storm(5) != storm(6)


def test_the_history_is_the_same_in_another_process() -> None:
    command = f"import runpy; print(runpy.run_path({str(Path(__file__))!r})['storm'](5))"
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(sys.path)}
    answer = subprocess.run(
        [sys.executable, "-c", command], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert answer.stdout.strip() == storm(5)
