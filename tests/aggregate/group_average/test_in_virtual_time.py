"""Wait-avoiding groups in virtual time: what always holds, whoever is late, stands still or dies."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from aggregate.group_average.workers import LAN, World
from stretto.aggregate.group_average import butterfly
from stretto.testing.faults import Fault, Kill, Pause
from stretto.testing.network_model import ExponentialDelay, Link, NetworkModel

LATENCY_S = LAN.default.latency_s
STORM = NetworkModel(Link(latency_s=0.01, jitter=ExponentialDelay(0.02), loss=0.1), detect_s=0.3)
SLOW = [pytest.param(range(40, 340), marks=pytest.mark.slow)]
SEEDS = pytest.mark.parametrize("seeds", [range(40), *SLOW], ids=str)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(butterfly, "PIECE", 2)


def own_number(rank: int) -> tuple[float, ...]:
    return (float(rank),) * 5


@pytest.mark.parametrize(("size", "group_size"), [(4, 2), (8, 4), (16, 4), (64, 8)])
def test_with_everybody_on_time_the_sum_of_each_group_is_preserved(size: int, group_size: int) -> None:
    world = World(size, group_size, num_steps=4, model=own_number, patience_s=1.0).run()
    for number in range(4):
        averages = [program.averages[number] for program in world.programs]
        groups = {average.contributors for average in averages}
        assert all(average.is_included and not average.missed for average in averages)
        assert sorted(rank for group in groups for rank in group) == list(range(size))
        assert {len(group) for group in groups} == {group_size}
        for rank, average in enumerate(averages):
            assert rank in average.contributors
    models = np.stack([program.model for program in world.programs])
    np.testing.assert_allclose(models.mean(axis=0), (size - 1) / 2, rtol=1e-6)


@pytest.mark.parametrize(("size", "group_size", "rounds"), [(4, 2, 2), (64, 8, 2), (32, 4, 3), (8, 8, 1), (16, 2, 4)])
def test_without_training_the_average_is_exact_after_so_many_rounds(size: int, group_size: int, rounds: int) -> None:
    world = World(size, group_size, every=1000, num_steps=rounds, model=own_number).run()
    assert all((program.model == (size - 1) / 2).all() for program in world.programs)


@pytest.mark.parametrize("size", [2, 3, 4, 6, 7, 16])
def test_one_group_of_all_on_time_is_synchronous_averaging(size: int) -> None:
    """In every round, and with the same bits; also where the world is no power of two."""
    chance = Random(size)
    world = World(
        size, 1 << (size - 1).bit_length(), every=1000, num_steps=5, patience_s=1.0,
        model=lambda rank: [chance.gauss(0, 1) for _ in range(7)],
        progress=lambda rank, step: rank * 0.1 + step,
    )  # fmt: skip
    expected = np.mean([program.model for program in world.programs], axis=0)
    world.run()
    expected = expected + sum((size - 1) / 2 * 0.1 + step for step in range(5))
    for program in world.programs:
        np.testing.assert_allclose(program.model, expected, rtol=1e-5, atol=1e-5)
        assert program.model.tobytes() == world.programs[0].model.tobytes()


def test_in_worlds_that_are_no_power_of_two_groups_differ_in_size_and_the_mean_is_kept() -> None:
    for size in (3, 5, 6, 7, 12, 33):
        world = World(size, 4, every=1000, num_steps=12, model=own_number, patience_s=1.0).run()
        models = np.stack([program.model for program in world.programs])
        np.testing.assert_allclose(models.mean(axis=0), (size - 1) / 2, rtol=1e-5)
        assert np.ptp(models) < 0.02 * size, "it contracts all the same"


@pytest.mark.parametrize(("size", "group_size"), [(4, 2), (8, 4), (64, 8)])
def test_a_slow_worker_delays_nobodys_step_by_more_than_messages_take(size: int, group_size: int) -> None:
    world = World(
        size, group_size, num_steps=15, every=10,
        step_s=lambda rank, chance: 4.3 if rank == size - 1 else 1.0,
        progress=lambda rank, step: 1.0,
    ).run()  # fmt: skip
    *fast, slow = world.programs
    bits = (size - 1).bit_length()
    for program in fast:
        assert max(program.waited) <= (3 * bits + 3) * LATENCY_S
    assert any(average.missed for average in slow.averages) and not all(average.is_included for average in slow.averages)
    assert max(average.missed for average in slow.averages) >= 4


def test_who_becomes_slow_is_waited_for_once_and_then_waits_itself() -> None:
    steps = {rank: iter([1.0] * 8 + [4.5 if rank == 3 else 1.0] * 32) for rank in range(4)}
    world = World(4, 2, num_steps=40, step_s=lambda rank, chance: next(steps[rank])).run()
    late = [seconds for program in world.programs[:3] for seconds in program.waited if seconds > 0.1]
    assert len(late) == 3 and max(late) < 4.5, "one global round"
    assert max(world.programs[3].waited) > 0.5


def test_workers_that_all_wait_for_the_global_round_go_to_it() -> None:
    """Each has missed rounds, at times of its own, so that none would begin another step."""
    steps = {rank: iter([0.5] * (2 + rank) + [5.0] + [0.5] * 40) for rank in range(4)}
    world = World(4, 2, num_steps=20, step_s=lambda rank, chance: next(steps[rank])).run()
    assert all(len(program.averages) == 20 for program in world.programs)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("every", [1, 3, 10])
def test_programs_that_have_ended_their_steps_and_wait_for_the_others_hold_up_no_global_round(size: int, every: int) -> None:
    """As in `stretto.consensus` at the end of training, to which a slow worker comes long after the others."""
    world = World(
        size, 2, every=every, num_steps=25, meets=True, model=own_number,
        step_s=lambda rank, chance: 5.0 if rank == 1 else chance.uniform(0.5, 1.5),
    ).run()  # fmt: skip
    assert all(program.settled and len(program.averages) == 25 for program in world.programs)
    assert world.programs[1].averages[-1].round > world.programs[0].averages[-1].round or every == 1
    assert all(np.ptp(program.model) == 0 for program in world.programs), "made of whole models"


def test_who_waits_for_a_global_round_goes_to_it_when_all_others_have_settled() -> None:
    """Rank 3 has missed so much that it begins no step before the next global round, and nobody begins those before that."""
    steps = {rank: iter([1.0] * 8 + [4.5 if rank == 3 else 1.0] * 32) for rank in range(4)}
    world = World(4, 2, num_steps=12, meets=True, step_s=lambda rank, chance: next(steps[rank])).run()
    assert all(program.settled for program in world.programs)


def run_storm(seed: int) -> Counter[str]:
    chance = Random(seed)
    size = chance.choice([3, 4, 6, 8, 16, 64] if seed % 10 == 0 else [3, 4, 6, 8, 16])
    group_size = chance.choice([2, 4] if size < 16 else [4, 8])
    every = chance.choice([3, 5, 8])
    dying = chance.sample(range(size), chance.randint(1, size // 2))
    deaths = {rank: chance.uniform(0, 8) for rank in dying}
    faults: list[Fault] = [Kill(rank, at_s=at_s) for rank, at_s in deaths.items()]
    faults.append(Pause(chance.choice([r for r in range(size) if r not in dying]), at_s=chance.uniform(0, 6), for_s=2))
    world = World(
        size, group_size, seed=seed, every=every, num_steps=15, network=STORM, faults=faults,
        model=own_number, patience_s=chance.choice([0.0, 0.05]), meets=seed % 2 == 0,
        step_s=lambda rank, chance: chance.expovariate(2) * (4 if rank % 3 == 0 else 1),
        progress=lambda rank, step: rank + 1.0,
    )  # fmt: skip
    returning = [rank for rank in dying if chance.random() < 0.4]
    for rank in returning:
        world.network.at(deaths[rank] + 0.7 + chance.random(), lambda rank=rank: world.come_back(rank))  # type: ignore[misc]
    world.run(600)
    synced: dict[int, bytes] = {}
    for program in world.programs:
        for number, model in program.models.items():
            assert synced.setdefault(number, model.tobytes()) == model.tobytes(), f"seed {seed}: round {number}"
        assert np.ptp(program.model) == 0, f"seed {seed}: made of halves"
        for average in program.averages:
            assert np.ptp(average.total) == 0 and average.missed < every
            assert average.contributors <= set(range(size)) and program.rank in average.contributors
        rounds = [average.round for average in program.averages]
        assert rounds == sorted(rounds)
    for program in world.living:
        assert len(program.averages) == 15, (
            f"seed {seed}: rank {program.rank} hangs in round {world.machines[program.rank].round}"
        )
        assert program.quit is not None and program.quit.done(), f"seed {seed}: rank {program.rank} cannot quit"
    seen = Counter({name.partition("(")[0] for name in world.network.fired})
    averages = [average for program in world.programs for average in program.averages]
    seen["returned"] = len([rank for rank in returning if len(world.programs[rank].models) > 1])
    seen["late"] = any(not average.is_included for average in averages)
    seen["global"] = bool(synced)
    seen["again"] = any(machine.had_to_try_again for machine in world.machines)
    return seen


@SEEDS
def test_whoever_dies_the_others_end_with_whole_models_and_the_same_bits_after_each_global_round(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen += run_storm(seed)
    assert min(seen[kind] for kind in ("Kill", "Pause", "loss", "late", "global")) > len(seeds) / 2
    assert seen["returned"] > len(seeds) / 6
    assert seen["again"] > len(seeds) / 50, "somebody died in the middle of a global round"


def test_a_group_is_completed_without_a_partner_that_is_dead() -> None:
    """Rank 1 is gone before the first round: all others of its group average the three of them."""
    world = World(4, 4, every=1000, num_steps=1, model=own_number, faults=[Kill(1, at_s=0.1)]).run()
    world.network.assert_all_fired()
    for program in world.living:
        assert program.averages[0].contributors == {0, 2, 3} and (program.model == np.float32(5) / np.float32(3)).all()
