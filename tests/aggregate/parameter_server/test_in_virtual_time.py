"""Workers and servers over many seeds: what always holds, whoever is slow, stands still, dies, comes back or comes late.

`history.py` says what happens and what is checked: after every event, whenever a worker has read, and at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from aggregate.parameter_server.history import STEPS, History
from stretto.aggregate.parameter_server.answers import SentCopies, WrittenAnswer
from stretto.aggregate.parameter_server.chains import Chains, Holding
from stretto.aggregate.parameter_server.consistency import BoundedStaleness, ConsistencyRule, SyncAnswer
from stretto.aggregate.parameter_server.head import RangeHead
from stretto.aggregate.parameter_server.messages import DifferenceTo
from stretto.aggregate.parameter_server.server import ServerMachine
from stretto.errors import StrettoError
from stretto.protocol.machine import Payload
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.backup_workers import BackupWorkers
from stretto.sync.soft_sync import SoftSync
from stretto.sync.stale_synchronous import StaleSynchronous
from stretto.sync.synchronous import Synchronous
from stretto.testing.faults import Kill

SLOW = [
    pytest.param(range(begin, begin + 1940), marks=[pytest.mark.slow, pytest.mark.timeout(900)])
    for begin in range(300, 10_000, 1940)
]
SEEDS = pytest.mark.parametrize("seeds", [range(300), *SLOW], ids=str)  # 10,000 in all
KINDS = {"Kill", "Pause", "loss", "push twice", "killed in the middle", "lost"}
KINDS |= {"urgency", "difference", "whole", "server comes back", "server joins", "worker comes back", "worker joins"}


def run(seed: int, **settings: Any) -> History:
    try:
        history = History(seed, **settings)
        history.run()
    except Exception as error:
        error.add_note(f"seed {seed} with {settings}")
        raise
    return history


@SEEDS
def test_nothing_acknowledged_is_lost_or_applied_twice_nobody_is_too_far_ahead_and_all_is_answered(seeds: range) -> None:
    fired: Counter[str] = Counter()
    for seed in seeds:
        history = run(seed)
        fired += history.seen()
        if seed % 2 == 0 and (kills := history.kills_in_the_middle()):
            run(seed, more_kills=kills)
            fired["killed in the middle"] += 1
    assert fired.keys() == KINDS and min(fired.values()) > len(seeds) / 20, fired


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 1000), marks=[pytest.mark.slow])], ids=str)
def test_servers_that_are_added_take_ranges_over_though_servers_die_while_these_move(seeds: range) -> None:
    moved, killed = 0, 0
    for seed in seeds:
        history = run(seed, has_faults=False, added=1 + seed % 2)
        moved += sum(len(history.machines[rank].served()) for rank in history.added)
        if history.moments:
            again = run(seed, has_faults=False, added=1 + seed % 2, more_kills=history.kill_while_ranges_move_to_what_was_added())
            killed += again.seen()["Kill"]
    assert moved > len(seeds) / 5 and killed > len(seeds) / 5, (moved, killed)


def test_a_refusal_that_comes_after_word_of_a_later_chain_holds_up_nothing() -> None:
    """Another server tells a worker of the chain before its first server, which had turned the worker away, says so itself."""
    run(871, has_faults=False, added=2, more_kills=[Kill(node=120, at_s=0.13465066489565275)])


# -- equal to each other ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_a_bound_of_zero_reads_what_synchronous_reads(seed: int) -> None:
    """At each clock the gradients of all clocks before it; from synchronous servers those of one clock at a time."""
    bounded = run(seed, sync=StaleSynchronous(0), has_faults=False).reads
    in_rounds = run(seed, sync=Synchronous(), has_faults=False).reads
    assert bounded.keys() == in_rounds.keys()
    for (rank, index, clock), read in bounded.items():
        assert read == set().union(*(in_rounds[rank, index, earlier] for earlier in range(1, clock + 1)))


@pytest.mark.parametrize("seed", range(10))
def test_a_bound_that_nobody_reaches_is_no_bound(seed: int) -> None:
    """The same history to the last message, with all faults."""
    bounded = run(seed, sync=StaleSynchronous(100))
    assert bounded.network.trace.hexdigest() == run(seed, sync=Asynchronous()).network.trace.hexdigest()


# -- rules in histories without faults --------------------------------------------------------------------------------


def updates_before_anybody_quits(seed: int, sync: SyncAnswer) -> tuple[History, list[Any]]:
    history = History(seed, sync=sync, has_faults=False)
    history.network.run_until(lambda: any(program.ended for program in history.programs), until_s=100)
    return history, [record for records in history.records.values() for record in records]


@pytest.mark.parametrize("seed", range(10))
def test_every_update_with_backup_workers_has_exactly_n_gradients_of_its_version(seed: int) -> None:
    history = History(seed, has_faults=False)
    if history.num_workers == 1:
        return
    history, records = updates_before_anybody_quits(seed, BackupWorkers(1))
    assert len(records) >= STEPS
    for _, version, parts in records:
        assert len({part.worker for part in parts}) == len(parts) == history.num_workers - 1
        assert {part.version_read for part in parts} == {version}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("seed", range(10))
def test_every_soft_update_has_exactly_as_many_gradients_as_it_should(seed: int, n: int) -> None:
    history, records = updates_before_anybody_quits(seed, SoftSync(n))
    assert records and {len(parts) for _, _, parts in records} == {max(1, history.num_workers // n)}


@pytest.mark.parametrize("sync", [Asynchronous(), SoftSync(1)], ids=str)
def test_staleness_is_about_what_it_should_be(sync: SyncAnswer) -> None:
    """P - 1 without a bound; 1, and rarely more than 2, with as many gradients in an update as there are workers."""
    found = []
    for seed in range(60):
        history = History(seed, sync=sync, has_faults=False)
        if history.num_workers == 7:
            history.run()
            updates = [record for records in history.records.values() for record in records]
            found += [version - part.version_read for _, version, parts in updates for part in parts]
    mean = sum(found) / len(found)
    assert 3 < mean < 6 if sync == Asynchronous() else (0.3 < mean < 1.5 and sum(tau > 2 for tau in found) < 0.05 * len(found))


# -- broken on purpose ------------------------------------------------------------------------------------------------


def answers_at_once(self: Chains, holding: Holding) -> None:
    """Before the other servers of the chain have it."""
    if holding.head is not None:
        holding.head.stored = 1 << 60
        holding.head.release()


def takes_everything(self: RangeHead, source: int, push: Any, payload: memoryview) -> None:
    """Also what it has taken before."""
    self._received[source] = push.clock + 1
    self._gather(source, push, payload)


def never_waits(self: ConsistencyRule, pull: Any) -> bool:
    return True


def passes_nothing_on(self: Chains, holding: Holding, change: Any, payload: Any) -> None:
    """Other servers get copies, and no changes."""
    self._store(holding)


def joins_as_it_is(self: Chains, holding: Holding | None, header: Any, payload: memoryview) -> Any:
    """A server that is told to go on with a range does not look at the copy that came with it."""
    return self._make_replica(header.range) if holding is None else holding.replica


def takes_the_rest(self: ServerMachine, source: int, request: Any, payload: memoryview) -> None:
    """Of requests that were sent together, although it has turned away the first ones."""
    self._attempts[source, request.range] = request.attempt
    holding = self.chains.holdings.get(request.range)
    if holding is None or holding.head is None:
        self._turn_away(source, request.range)
    else:
        holding.head.take(source, request, payload)


def compares_no_names(self: SentCopies, worker: int, asked: DifferenceTo, values: Payload) -> WrittenAnswer:
    """A server that takes what it has sent last for what the worker has."""
    known = self._copies.get(worker)
    answer = ANSWER(self, worker, asked if known is None else asked._replace(copy=known[0]), values)
    return answer if answer.since is None else answer._replace(since=asked.copy)


ANSWER = SentCopies.answer
BROKEN: list[tuple[type, str, Callable[..., Any]]] = [
    (Chains, "_release", answers_at_once),
    (Chains, "_log", passes_nothing_on),
    (Chains, "_installed", joins_as_it_is),
    (RangeHead, "_push", takes_everything),
    (ServerMachine, "_serve", takes_the_rest),
    (BoundedStaleness, "may_read", never_waits),
    (SentCopies, "answer", compares_no_names),
]


@pytest.mark.parametrize(("owner", "name", "broken"), BROKEN, ids=lambda value: getattr(value, "__name__", value))
def test_a_broken_protocol_is_found_out(
    owner: type, name: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises((AssertionError, StrettoError)):
        for seed in range(100):
            run(seed)
