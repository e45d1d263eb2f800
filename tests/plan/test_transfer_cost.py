"""What transfers cost: a line through measured times, the same on all members, on links of known costs in virtual time."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from collectives.ranks import Rank
from stretto.collectives.plan import Kind
from stretto.collectives.request import DEFAULT_SEGMENT_BYTES
from stretto.job import Job
from stretto.plan import transfer_cost as module
from stretto.plan.choose import Choices
from stretto.plan.costs import LinkCosts, predict
from stretto.plan.profile import TransferCost
from stretto.plan.transfer_cost import (
    LEAST_PER_BYTE_S,
    LEAST_TURNS,
    LONGEST_S,
    SIZES,
    TURNS,
    expected_cost,
    fitted,
    measured,
    transfer_cost,
)
from stretto.testing import run_jobs, run_virtual
from stretto.testing.network_model import Link, NetworkModel
from stretto.testing.virtual import VirtualWire


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("link", [Link(latency_s=5e-5, bytes_per_s=1.25e8), Link(latency_s=1e-3, bytes_per_s=1e7)])
def test_the_line_predicts_transfers_that_were_not_measured(size: int, link: Link) -> None:
    def program(wire: VirtualWire) -> list[tuple[int, float]]:
        me = Rank(wire)

        def ring(probe: torch.Tensor) -> None:
            me.all_reduce("ring", probe)

        return measured(me.barrier, ring, lambda seconds: seconds, wire.now)  # all ranks measure alike in virtual time

    times = run_virtual(size, program, model=NetworkModel(link))
    assert all([num_bytes for num_bytes, _ in mine] == [num_bytes for num_bytes, _ in times[0]] for mine in times)
    cost = fitted(times[0])
    links = LinkCosts(link.latency_s, 1 / link.bytes_per_s)
    for num_bytes in (1 << 14, 1 << 20, 1 << 23):
        expected = predict(Kind.ALL_REDUCE, "ring", size, num_bytes, links, DEFAULT_SEGMENT_BYTES)
        assert cost.seconds(num_bytes) == pytest.approx(expected, rel=0.25)


def measured_on(seconds: list[float], sizes: list[int]) -> list[tuple[int, float]]:
    """`measured` where the transfers take these times, one after the other; `sizes` gets what was sent."""
    clock = iter(second for taken in seconds for second in (0.0, taken))
    return measured(lambda: None, lambda probe: sizes.append(probe.nbytes), lambda taken: taken, lambda: next(clock))


def test_sizes_grow_until_one_takes_long_and_a_single_hiccup_stops_nothing() -> None:
    sizes: list[int] = []
    slow = [0.001] * TURNS + [2 * LONGEST_S, 9.0, 3 * LONGEST_S, 2.5 * LONGEST_S]
    assert measured_on(slow, sizes) == [(SIZES[0], 0.001), (SIZES[1], 3 * LONGEST_S)]  # the first turn warms up
    assert sizes == [SIZES[0]] * TURNS + [SIZES[1]] * LEAST_TURNS
    hiccup = [9.0, *[0.001] * (TURNS - 1), 0.002, 9.0, *[0.002] * (TURNS - 2), *[0.004] * TURNS, *[0.02] * TURNS]
    assert measured_on(hiccup, []) == list(zip(SIZES, [0.001, 0.002, 0.004, 0.02], strict=True))
    far = [1.0] * LEAST_TURNS + [1.1] * LEAST_TURNS  # two sizes at least, else nobody knows what the bytes cost
    assert measured_on(far, []) == [(SIZES[0], 1.0), (SIZES[1], 1.1)]


def test_a_fit_finds_the_line_and_errors_of_long_transfers_do_not_drown_the_start() -> None:
    line = TransferCost(start_s=2e-4, per_byte_s=8e-9)
    exact = fitted([(size, line.seconds(size)) for size in SIZES])
    assert exact.start_s == pytest.approx(line.start_s) and exact.per_byte_s == pytest.approx(line.per_byte_s)
    generator = random.Random(3)
    for _ in range(100):
        noisy = fitted([(size, line.seconds(size) * generator.uniform(0.9, 1.1)) for size in SIZES])
        assert noisy.start_s == pytest.approx(line.start_s, rel=0.3)
        assert noisy.per_byte_s == pytest.approx(line.per_byte_s, rel=0.3)


def test_a_fit_never_starts_below_zero_and_always_rises() -> None:
    generator = random.Random(4)
    for _ in range(500):
        times = [(size, generator.uniform(0, 1) ** 4) for size in SIZES[: generator.randint(1, 4)]]
        cost = fitted(times)
        assert cost.start_s >= 0 and cost.per_byte_s >= LEAST_PER_BYTE_S
    flat, falling = fitted([(size, 0.01) for size in SIZES]), fitted(list(zip(SIZES, [0.04, 0.03, 0.02, 0.01], strict=True)))
    assert flat.start_s == pytest.approx(0.01) and flat.per_byte_s == pytest.approx(LEAST_PER_BYTE_S, abs=1e-11)
    assert 0.01 < falling.start_s < 0.04 and falling.per_byte_s == LEAST_PER_BYTE_S
    steep = fitted([(1 << 12, 1e-6), (1 << 22, 0.1)])  # a line through both would start below zero
    assert steep.start_s == 0 and steep.per_byte_s > 0
    assert fitted([(1 << 12, 0.0), (1 << 16, 0.0)]).per_byte_s > 0


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_all_members_get_the_first_ones_cost_and_the_tables_algorithms_are_used(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members that fit differently, for another rounding, say, still agree."""
    monkeypatch.setattr(module, "SIZES", (1 << 12, 1 << 14))
    monkeypatch.setattr(module, "TURNS", 2)
    lock, used = threading.Lock(), set[tuple[int, str]]()

    class Table(Choices, frozen=True):
        def algorithm(self, num_bytes: int) -> str:
            name = super().algorithm(num_bytes)
            with lock:
                used.add((num_bytes, name))
            return name

    def program(job: Job) -> TransferCost:
        job.world.choices = Table([1 << 12, 1 << 13], ["butterfly", "ring"], LinkCosts(1e-5, 1e-9))
        monkeypatch.setattr(module, "fitted", lambda times: TransferCost(start_s=float(threading.get_ident()), per_byte_s=1.0))
        found = transfer_cost(job.world, "a test")
        return transfer_cost(job.world, "a second time") and found

    costs = run_jobs(size, program)
    assert len(set(costs)) == 1
    assert used == ({(1 << 12, "butterfly"), (1 << 14, "ring")} if size > 1 else set())


@pytest.mark.parametrize("link", [LinkCosts(5e-5, 8e-9), LinkCosts(1e-3, 1e-7)])
def test_the_expected_cost_is_that_of_the_links_that_were_measured(link: LinkCosts) -> None:
    """Nothing is sent: one member alone may ask."""

    def program(job: Job) -> TransferCost | None:
        job.world.choices = Choices([1 << 40], ["ring"], link)
        return expected_cost(job.world, "a test") if job.rank == 1 else None

    _, cost, *_ = run_jobs(4, program)
    assert cost is not None
    assert cost.per_byte_s == pytest.approx(1.5 * link.beta, rel=0.1) and cost.start_s == pytest.approx(6 * link.alpha, rel=0.2)


def test_a_real_job_has_a_cost_that_a_plan_can_use() -> None:
    def program(job: Job) -> TransferCost:
        job.world.choices = Choices([1 << 40], ["ring"], LinkCosts(1e-5, 1e-9))
        return transfer_cost(job.world, "a test")

    first, second = run_jobs(2, program)
    assert first == second and 0 <= first.start_s < 1 and 0 < first.per_byte_s < 1e-5
