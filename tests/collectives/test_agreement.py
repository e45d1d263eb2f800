"""The failure agreement alone, in virtual time: whatever fails, all members that live raise the same error, and nobody else does.

Machines of `stretto.collectives.failures` and nothing beneath them: no wire, no threads, no data. A collective is a value that
says who its members are; the test begins and ends it, or says that a transfer has failed. Messages are late, doubled and out of
order, nodes stand still and die.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
import pytest

from stretto.collectives.failures import FailureAgreement, HasBegun, HasEnded, HasFailed
from stretto.collectives.inquiry import ASK_S
from stretto.collectives.messages import ROUNDS, Believes, Failed, Name, as_failed
from stretto.collectives.request import OngoingCollective
from stretto.collectives.whereabouts import Wait, Whereabouts
from stretto.errors import FrameError, PeerLost, RankMismatch, StrettoError, WireTimeout
from stretto.protocol.machine import Actions, HeaderReader, SendMessage
from stretto.testing.faults import Fault, Kill, Pause
from stretto.testing.network_model import ExponentialDelay, Link, NetworkModel
from stretto.testing.virtual_network import VirtualNetwork
from stretto.timeouts import Timeouts

UNEVEN = Link(latency_s=1e-3, jitter=ExponentialDelay(5e-3), duplicate=0.1, reorder=0.4, hold_s=0.1)
MODEL = NetworkModel(UNEVEN, detect_s=0.02)
TIMEOUTS = Timeouts(warn_s=4.0, arrive_s=8.0)
ENDED_S = 15.0  # by then whatever has begun has ended
LATE_S = 20.0  # when members that were missing begin after all
SLOW = [pytest.param(range(begin, begin + 1940), marks=pytest.mark.slow) for begin in range(300, 10_000, 1940)]
SEEDS = pytest.mark.parametrize("seeds", [range(300), *SLOW], ids=str)  # 10,000 in all
ROUND: Name = (99, 0)
KINDS: dict[str, set[type[StrettoError]]] = {
    "belief": {RankMismatch},
    "transfer": {FrameError, WireTimeout},  # if nobody notices, nothing moves
    "absent": {WireTimeout},
    "apart": {RankMismatch},
}
Verdict = tuple[type[StrettoError], int]


class Part(OngoingCollective):
    """One member's part of a collective, which says of itself what a `Request` does."""

    generation = 0
    needs_everybody = True
    arrive_s = None

    def __init__(self, name: Name, members: tuple[int, ...], rank: int, belief: str, part_of: Name | None, now: float) -> None:
        self.request: Any = self
        self.name, self.belief = name, belief
        self.done, self.error = False, None
        self.members, self.part_of, self.touched_at = members, part_of, now
        self.others = [other for other in members if other != rank]

    def waiting_for(self) -> list[int]:
        return self.others


class OneThread(Whereabouts):
    """A program of one thread, which waits for one thing at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.blocked_in: Part | None = None

    def waits(self) -> list[Wait]:
        part: Any = self.blocked_in
        return [] if part is None or part.done else [Wait(0, part.name[0], part, None)]

    def blocking(self, channel: int) -> list[Wait]:
        return self.waits()

    def place(self, channel: int) -> str:
        return "somewhere"

    def place_of_thread(self, thread: int) -> str:
        return "somewhere"


@dataclass
class Here:
    """Who is here, as a wire would say it."""

    rank: int
    world_size: int
    lost: dict[int, PeerLost] = field(default_factory=dict)
    generation: int = 0

    @property
    def peers(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def said_goodbye(self, rank: int) -> bool:
        return False

    def joined_in(self, rank: int) -> int:
        return 0


class Node(FailureAgreement):
    def __init__(self, rank: int, size: int, speaks: Callable[[int], None]) -> None:
        self.here, self.thread, self._speaks = Here(rank, size), OneThread(), speaks
        super().__init__(self.here, TIMEOUTS, self.thread)

    def tell(self, members: Iterable[int], header: Any) -> None:
        super().tell(members, header)
        if isinstance(header, Failed):
            self._speaks(self.here.rank)

    def on_view(self, now: float, joined: Sequence[int], left: Sequence[int], generation: int) -> Actions:
        self.here.lost |= {rank: PeerLost(rank, "it was killed") for rank in left}
        return super().on_view(now, joined, left, generation)

    def tables(self) -> list[Any]:
        own = [self.under_way, self._votes, self.inquiry._silences]
        return [table for table in (*own, self.disagreement._disputes, self.disagreement._early) if table]


class Scenario:
    """One history, from a seed: groups, what their members do when, and what becomes of it."""

    def __init__(self, seed: int, more_kills: Sequence[Kill] = ()) -> None:
        self.chance = chance = Random(seed)
        self.size = chance.choice([2, 3, 4, 7])
        self.dying = chance.sample(range(self.size), min(chance.choice([0, 1, 1, 2, 2]), self.size - 1))
        faults = [*self._faults(), *more_kills]
        self.dying = [*self.dying, *(int(kill.node) for kill in more_kills)]
        self.network = VirtualNetwork(seed=seed, model=MODEL, faults=faults)
        self.spoke: list[tuple[float, int]] = []  # when somebody has said that something has failed
        self.nodes = [Node(rank, self.size, self._speaks) for rank in range(self.size)]
        self.parts: dict[tuple[Name, int], Part] = {}
        self.errors: dict[tuple[Name, int], Future[Any]] = {}
        self.members: dict[Name, tuple[int, ...]] = {}
        self.wrong: dict[Name, str] = {}
        self.round: set[Name] = set()  # the collectives that are part of one round of the whole job
        for rank in range(self.size):
            self.network.add(rank, self.nodes[rank])
        for channel in range(chance.randint(1, 3)):
            self._plan_stream(channel)
        if chance.random() < 0.3:
            self._plan_ranks_apart(10)

    def _speaks(self, rank: int) -> None:
        self.spoke.append((self.network.now, rank))

    def _faults(self) -> list[Fault]:
        chance = self.chance
        at_s, apart_s = chance.uniform(0.1, 2), chance.choice([0.01, 0.01, 1])
        kills = [Kill(rank, at_s=at_s + chance.uniform(0, apart_s)) for rank in self.dying]
        living = [rank for rank in range(self.size) if rank not in self.dying]
        pause = Pause(chance.choice(living), at_s=max(0.0, at_s + chance.uniform(-0.3, 0.1)), for_s=chance.uniform(0.01, 0.4))
        return [*kills, *([pause] if chance.random() < 0.5 else [])]

    def _plan_stream(self, channel: int) -> None:
        """One or two collectives; the members of each begin it one after another, and perhaps something is wrong with it."""
        chance = self.chance
        members = tuple(chance.sample(range(self.size), chance.randint(2, self.size)))
        is_round, at_s = chance.random() < 0.3, chance.uniform(0, 1.5)
        for sequence in range(chance.randint(1, 2)):
            name = (channel, sequence)
            wrong = self._add(name, members, chance.choice(["", "", "belief", "transfer", "absent"]))
            if is_round:
                self.round.add(name)
            odd = chance.choice(members)
            for rank in members:
                late = rank == odd and wrong == "absent"
                self._begin_at(LATE_S if late else at_s + chance.uniform(0, 0.3), name, rank, odd)
            at_s += chance.uniform(0, 0.5)

    def _plan_ranks_apart(self, channel: int) -> None:
        """One member waits in the first stream, another one in the second, and each for the other; a third has gone on."""
        chance = self.chance
        members = tuple(chance.sample(range(self.size), chance.randint(2, self.size)))
        here, there = members[:2]
        first, later, second = (channel, 0), (channel, 1), (channel + 1, 0)
        self.round |= {first, later, second} if chance.random() < 0.3 else set()
        for name, missing in ((first, there), (later, there), (second, here)):
            self._add(name, members, "apart")
            for rank in members:
                self._begin_at(LATE_S if rank == missing else chance.uniform(0, 0.5), name, rank, rank)

    def _add(self, name: Name, members: tuple[int, ...], wrong: str) -> str:
        self.members[name], self.wrong[name] = members, wrong
        return wrong

    def _begin_at(self, at_s: float, name: Name, rank: int, odd: int) -> None:
        self.network.at(at_s, lambda: self._begin(name, rank, odd) if self.network.is_alive(rank) else None)

    def _begin(self, name: Name, rank: int, odd: int) -> None:
        chance, network, wrong, members = self.chance, self.network, self.wrong[name], self.members[name]
        belief = "another" if wrong == "belief" and rank == odd else "one"
        part_of = ROUND if name in self.round else None
        part = self.parts[name, rank] = Part(name, members, rank, belief, part_of, network.now)
        self.errors[name, rank] = network.request(rank, HasBegun(part))
        at_s = network.now + chance.uniform(0, 0.3)
        if wrong == "apart" and rank in members[:2] and name[1] == 0 and network.now < LATE_S:
            self.nodes[rank].thread.blocked_in = part
        elif wrong == "belief" and rank != odd and chance.random() < 0.5:
            network.at(at_s, lambda: network.send(odd, rank, Believes(*name, "another", None)))  # its first message
        elif wrong == "transfer" and rank != odd and chance.random() < 0.5:
            network.at(at_s, lambda: self._say(part, rank, HasFailed(part.request, FrameError(odd, "nonsense"))))
        elif not wrong:
            network.at(at_s, lambda: self._try_to_complete(part, rank))

    def _is_open(self, part: Part, rank: int) -> bool:
        return self.network.is_alive(rank) and not part.done and not self.errors[part.name, rank].done()

    def _say(self, part: Part, rank: int, request: Any) -> None:
        if self._is_open(part, rank):
            self.network.request(rank, request)

    def _try_to_complete(self, part: Part, rank: int) -> None:
        """As its data would: when all members have begun it. A member may be through with it when another one dies."""
        if self._is_open(part, rank) and not part.failing:
            if all((part.name, other) in self.parts for other in self.members[part.name]):
                part.done = True
                self.network.request(rank, HasEnded(part))
            else:
                self.network.at(self.network.now + 0.1, lambda: self._try_to_complete(part, rank))

    def kills_in_the_middle(self) -> list[Kill]:
        """Of one or two nodes that have just said that something has failed: not all members hear it before they are gone."""
        found: dict[int, Kill] = {}
        for at_s, rank in self.chance.sample(self.spoke, len(self.spoke)):
            if rank not in self.dying and len(self.dying) + len(found) < self.size - 1:
                found.setdefault(rank, Kill(rank, at_s=at_s + 1e-9))
        return list(found.values())[: self.chance.choice([1, 1, 2])]

    # What must hold

    def check(self) -> Counter[str]:
        for until_s in (ENDED_S, LATE_S + 2):
            self.network.run(until_s=until_s)
            assert not [key for key, part in self.parts.items() if self._is_open(part, key[1])], "not in time"
        seen: Counter[str] = Counter()
        verdicts = {name: self._verdict([name]) for name in self.members}
        self._verdict(self.round)
        for name, verdict in verdicts.items():
            self._check_blame(name, verdict)
            seen["none" if verdict is None else verdict[0].__name__] += 1
        for rank, node in enumerate(self.nodes):
            if rank not in self.dying:
                assert node.tables() == []
                assert all(name[0] >= ROUNDS or rank in self.members[name] for name in node._doomed)
        return seen + Counter({fault.partition("(")[0] for fault in self.network.fired})

    def _verdict(self, names: Iterable[Name]) -> Verdict | None:
        """What members that live have raised: the same in all of them."""
        found: set[Verdict] = set()
        for (name, rank), future in self.errors.items():
            if name in names and rank not in self.dying and future.done():
                error = future.exception()
                assert isinstance(error, StrettoError)
                found.add((type(error), getattr(error, "rank", -1)))
        assert len(found) < 2, f"different verdicts: {found}"
        return next(iter(found), None)

    def _check_blame(self, name: Name, verdict: Verdict | None) -> None:
        concerned = [name] if name not in self.round else list(self.round)
        wrong = {self.wrong[each] for each in concerned} - {""}
        ranks = set(range(self.size)) if name in self.round else set(self.members[name])
        deaths = ranks & set(self.dying)
        if verdict is None:  # it was completed, then, or nobody who has begun it lives
            return
        kind, blamed = verdict
        assert wrong or deaths, f"{name} of {ranks} has failed: {verdict}"
        assert blamed == -1 or blamed in ranks
        assert kind in {PeerLost if deaths else None, *(kind for each in wrong for kind in KINDS[each])}
        assert kind is not PeerLost or blamed in deaths


@SEEDS
def test_all_members_that_live_raise_the_same_error_and_nobody_else_raises(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            history = Scenario(seed)
            seen += history.check()
            for _ in range(2):
                if kills := history.kills_in_the_middle():
                    seen += Scenario(seed, kills).check()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    expected = {"none", "PeerLost", "WireTimeout", "FrameError", "RankMismatch", "Kill", "Pause", "duplicate", "reorder"}
    assert seen.keys() == expected and min(seen.values()) > len(seeds) / 20, seen


@pytest.mark.parametrize(
    "failed",
    [
        {"kind": "KeyboardInterrupt", "arguments": []},
        {"kind": "WireTimeout", "arguments": [1, "x", "long"]},
        {"kind": "PeerLost", "arguments": [1]},
        {"members": [0, 99]},
        {"members": [1, 2]},
        {"members": [0, 2]},
    ],
    ids=str,
)
def test_what_is_no_verdict_or_is_about_others_is_ignored(failed: dict[str, Any]) -> None:
    """To rank 0 of three, from rank 1: no such error, and members that rank 0 or rank 1 is not among."""

    def heard(kind: str = "PeerLost", arguments: Sequence[Any] = (2, "x"), members: Sequence[int] = (0, 1)) -> bool:
        node = Node(0, 3, lambda rank: None)
        header = HeaderReader(node).read(1, msgspec.msgpack.encode([2, 5, 0, members, kind, arguments]))
        if header is not None:
            node.on_message(0.0, 1, header, memoryview(b""))
        return bool(node._doomed)

    assert heard() and not heard(**failed)


def test_a_member_that_hears_of_a_failure_tells_those_that_it_waits_for() -> None:
    """They may not have heard: whoever found the failure has died after telling some."""
    node = Node(3, 5, lambda rank: None)
    actions = node.on_message(0.0, 1, Failed(0, 0, [0, 1, 3, 4], "PeerLost", (4, "x")), memoryview(b""))
    assert [action.to for action in actions if isinstance(action, SendMessage)] == [0]
    actions = node.on_message(0.0, 0, Failed(0, 0, [0, 1, 3, 4], "FrameError", (1, "x"), settled=True), memoryview(b""))
    assert not actions and not node._doomed  # rank 1 has proposed something, but has not settled on it
    node.here.lost[1] = PeerLost(1, "it was killed")
    actions = node.on_view(0.0, [], [1], 0)
    assert [(action.to, action.header.kind) for action in actions if isinstance(action, SendMessage)] == [(4, "FrameError")]


def test_a_member_that_waits_for_a_mute_one_is_waited_for_longer() -> None:
    """Otherwise members that both answer would settle alone, on what each has found, when the mute one's time is over."""
    for answers in (True, False):
        node = Node(2, 5, lambda rank: None)
        node.on_message(0.0, 1, Failed(0, 0, [0, 1, 2], "PeerLost", (4, "x")), memoryview(b""))
        node.on_timer(1.3 * ASK_S, "look")
        assert not node._doomed  # rank 0 is mute, and rank 1 may have given it up only just now
        if answers:
            node.on_message(1.3 * ASK_S, 1, Failed(0, 0, [0, 1, 2], "PeerLost", (3, "x"), settled=True), memoryview(b""))
        else:
            node.on_timer(2.3 * ASK_S, "look")
        (verdict,) = node._doomed.values()
        assert verdict.arguments[0] == (3 if answers else 4)


def test_any_text_of_an_error_can_be_told() -> None:
    failed = as_failed((0, 0), None, StrettoError("\udcff" + 100_000 * "x"))
    assert len(msgspec.msgpack.encode(failed)) < 70_000
