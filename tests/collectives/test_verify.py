"""`verify` must reject whatever is not right: good plans are mutilated in every way we can think of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from stretto.collectives.catalogue import CATALOGUE, Entry
from stretto.collectives.plan import Buffer, Kind, Local, Operation, Plan, Recv, Send
from stretto.errors import StrettoError
from stretto.testing.verify import PlanError, verify, verify_plans

ENTRIES = list(CATALOGUE.values())
SIZE = 5
D, W = Buffer.DATA, Buffer.WORK


def label(entry: Entry) -> str:
    return f"{entry.kind.value}-{entry.name}"


def world(entry: Entry, size: int = SIZE) -> list[Plan]:
    return [entry.bind(group=2)(rank, size) for rank in range(size)]


def with_program(plan: Plan, operations: list[Operation]) -> Plan:
    return replace(plan, operations=tuple(operations))


def each_place(plans: list[Plan]) -> Iterator[tuple[int, int, Operation]]:
    for plan in plans:
        for index, operation in enumerate(plan.operations):
            yield plan.rank, index, operation


def rejects(plans: list[Plan], rank: int, operations: list[Operation]) -> bool:
    changed = [with_program(plan, operations) if plan.rank == rank else plan for plan in plans]
    try:
        verify_plans(changed)
    except PlanError:
        return True
    return False


def plan_of(rank: int, size: int, *operations: Operation, kind: Kind = Kind.ALL_REDUCE, chunks: int = 1, ports: int = 1) -> Plan:
    return Plan(kind, "made up", rank, size, chunks, operations, ports=ports)


def fails(law: str, *plans: Plan) -> None:
    with pytest.raises(PlanError, match=f"law of {law}"):
        verify_plans(plans)


# ---------------------------------------------------------------- mutilated plans of the catalogue


@pytest.mark.parametrize("entry", ENTRIES, ids=label)
def test_a_plan_with_any_one_operation_left_out_is_rejected(entry: Entry) -> None:
    plans = world(entry)
    for rank, index, _ in each_place(plans):
        program = list(plans[rank].operations)
        del program[index]
        assert rejects(plans, rank, program), (rank, index)


@pytest.mark.parametrize("entry", ENTRIES, ids=label)
def test_a_plan_with_any_one_message_doubled_at_one_end_is_rejected(entry: Entry) -> None:
    plans = world(entry)
    for rank, index, operation in each_place(plans):
        if not isinstance(operation, Local):
            program = list(plans[rank].operations)
            program.insert(index, operation)
            assert rejects(plans, rank, program), (rank, index)


@pytest.mark.parametrize("entry", ENTRIES, ids=label)
def test_a_plan_with_any_one_wrong_peer_is_rejected(entry: Entry) -> None:
    plans = world(entry)
    for rank, index, operation in each_place(plans):
        for peer in (rank, SIZE, (operation.peer + 1) % SIZE) if not isinstance(operation, Local) else ():
            program = list(plans[rank].operations)
            assert not isinstance(operation, Local)
            program[index] = replace(operation, peer=peer)
            assert rejects(plans, rank, program), (rank, index, peer)


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry.kind is not Kind.BARRIER], ids=label)
def test_a_plan_with_any_one_wrong_chunk_is_rejected(entry: Entry) -> None:
    plans = world(entry)
    for rank, index, operation in each_place(plans):
        chunks = plans[rank].num_chunks
        shifted = (operation.lo + 1) % chunks if chunks > 1 else 1
        program = list(plans[rank].operations)
        program[index] = replace(operation, lo=shifted, hi=shifted + operation.hi - operation.lo)
        assert rejects(plans, rank, program), (rank, index)


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry.kind is not Kind.BARRIER], ids=label)
def test_a_plan_that_copies_where_it_should_add_or_adds_where_it_should_copy_is_rejected(entry: Entry) -> None:
    plans = world(entry)
    for rank, index, operation in each_place(plans):
        if not isinstance(operation, Send):
            program = list(plans[rank].operations)
            program[index] = replace(operation, add=not operation.add)
            assert rejects(plans, rank, program), (rank, index)


@pytest.mark.parametrize("entry", ENTRIES, ids=label)
def test_a_plan_with_any_one_message_in_another_step_is_rejected(entry: Entry) -> None:
    plans = world(entry)
    for rank, index, operation in each_place(plans):
        if not isinstance(operation, Local):
            program = list(plans[rank].operations)
            program[index] = replace(operation, step=operation.step + 1)
            assert rejects(plans, rank, program), (rank, index)


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry.kind is not Kind.BARRIER], ids=label)
def test_a_plan_that_uses_the_wrong_buffer_anywhere_is_rejected(entry: Entry) -> None:
    plans = world(entry)
    for rank, index, operation in each_place(plans):
        if entry.name == "butterfly" and isinstance(operation, Send) and operation.buffer is W:
            continue  # both hold the same here; what the copy changes is who waits for whom (test_schedule.py)
        if not isinstance(operation, Local):
            program = list(plans[rank].operations)
            program[index] = replace(operation, buffer=W if operation.buffer is D else D)
            assert rejects(plans, rank, program), (rank, index)


# ---------------------------------------------------------------- each law by itself


def exchange(rank: int) -> Plan:
    return plan_of(rank, 2, Send(0, 1 - rank, 0, 1), Recv(0, 1 - rank, 0, 1, add=True))


def test_two_ranks_that_exchange_and_add_are_fine() -> None:
    verify_plans([exchange(0), exchange(1)])


def test_sending_in_the_step_of_arrival_breaks_the_law_of_rounds() -> None:
    first = plan_of(0, 2, Send(0, 1, 0, 1), Recv(0, 1, 0, 1))
    second = plan_of(1, 2, Recv(0, 0, 0, 1, add=True), Send(0, 0, 0, 1))
    fails("rounds", first, second)


def test_overwriting_a_chunk_before_it_has_left_is_an_in_place_hazard() -> None:
    """Three ranks transpose without the scratch buffer: step 0 overwrites what should leave in step 1."""
    plans = [
        plan_of(
            rank,
            3,
            Send(0, (rank + 1) % 3, (rank + 1) % 3, (rank + 1) % 3 + 1),
            Recv(0, (rank + 2) % 3, (rank + 2) % 3, (rank + 2) % 3 + 1),
            Send(1, (rank + 2) % 3, (rank + 2) % 3, (rank + 2) % 3 + 1),
            Recv(1, (rank + 1) % 3, (rank + 1) % 3, (rank + 1) % 3 + 1),
            kind=Kind.ALL_TO_ALL,
            chunks=3,
        )
        for rank in range(3)
    ]
    fails("promise", *plans)


def test_two_ranks_that_each_wait_for_the_other_are_a_deadlock() -> None:
    plans = [plan_of(rank, 2, Recv(0, 1 - rank, 0, 1, add=True), Send(0, 1 - rank, 0, 1)) for rank in (0, 1)]
    fails("no deadlock", *plans)


def test_waiting_on_another_chunk_is_no_deadlock() -> None:
    """Both ranks receive before they send, but on different chunks: data dependencies let the sends overtake."""
    plans = [
        plan_of(
            rank,
            2,
            Recv(0, 1 - rank, rank, rank + 1, add=True),
            Send(0, 1 - rank, 1 - rank, 2 - rank),
            Send(1, 1 - rank, rank, rank + 1),
            Recv(1, 1 - rank, 1 - rank, 2 - rank),
            chunks=2,
        )
        for rank in (0, 1)
    ]
    verify_plans(plans)


def test_sending_to_more_peers_than_ports_is_rejected_and_declaring_them_allows_it() -> None:
    def plans(ports: int) -> list[Plan]:
        root = plan_of(0, 3, Send(0, 1, 0, 1), Send(0, 2, 0, 1), kind=Kind.BROADCAST, ports=ports)
        leaves = [plan_of(rank, 3, Recv(0, 0, 0, 1), kind=Kind.BROADCAST, ports=ports) for rank in (1, 2)]
        return [root, *leaves]

    verify_plans(plans(2))
    fails("ports", *plans(1))


def test_receiving_from_more_peers_than_ports_is_rejected() -> None:
    root = plan_of(0, 3, Recv(0, 1, 0, 1, add=True), Recv(0, 2, 0, 1, add=True), kind=Kind.REDUCE)
    fails("ports", root, *(plan_of(rank, 3, Send(0, 0, 0, 1), kind=Kind.REDUCE) for rank in (1, 2)))


def test_reading_the_scratch_buffer_before_it_is_written_is_rejected() -> None:
    fails("definedness", plan_of(0, 1, Local(0, W, D, 0, 1)))
    fails("definedness", plan_of(0, 1, Local(0, D, W, 0, 1, add=True)))


def test_counting_a_contribution_twice_is_rejected() -> None:
    plans = [
        plan_of(rank, 2, *(o for step in (0, 1) for o in (Send(step, 1 - rank, 0, 1), Recv(step, 1 - rank, 0, 1, add=True))))
        for rank in (0, 1)
    ]
    fails("once", *plans)


def test_adding_in_arrival_order_gives_other_bits_on_each_rank() -> None:
    """Round-robin as it is often written: correct sums, but each rank in its own order."""

    def naive(rank: int, size: int) -> Plan:
        operations: list[Operation] = [Local(0, D, W, 0, 1)]
        for shift in range(1, size):
            operations.append(Send(shift - 1, (rank + shift) % size, 0, 1))
            operations.append(Recv(shift - 1, (rank - shift) % size, 0, 1, W, add=True))
        return plan_of(rank, size, *operations, Local(size - 2, W, D, 0, 1))

    verify(naive, 2)  # a + b = b + a
    with pytest.raises(PlanError, match="law of bits"):
        verify(naive, 3)


def test_a_barrier_that_only_asks_its_neighbour_is_rejected() -> None:
    def neighbourly(rank: int, size: int) -> Plan:
        return plan_of(rank, size, Send(0, (rank + 1) % size, 0, 0), Recv(0, (rank - 1) % size, 0, 0), kind=Kind.BARRIER)

    verify(neighbourly, 2)
    with pytest.raises(PlanError, match="may leave before"):
        verify(neighbourly, 3)


def test_an_all_gather_with_too_few_chunks_is_rejected() -> None:
    fails("agreement", plan_of(0, 2, kind=Kind.ALL_GATHER), plan_of(1, 2, kind=Kind.ALL_GATHER))


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: replace(plan, rank=0),
        lambda plan: replace(plan, num_chunks=2),
        lambda plan: replace(plan, kind=Kind.REDUCE),
        lambda plan: replace(plan, algorithm="other"),
    ],
)
def test_ranks_with_plans_of_different_collectives_are_rejected(change: Callable[[Plan], Plan]) -> None:
    fails("agreement", exchange(0), change(exchange(1)))


def test_going_back_in_steps_is_rejected() -> None:
    fails("program order", plan_of(0, 2, Send(1, 1, 0, 1), Send(0, 1, 0, 1)), plan_of(1, 2))


def test_an_empty_message_outside_a_barrier_is_rejected() -> None:
    fails("ranges", plan_of(0, 2, Send(0, 1, 0, 0)), plan_of(1, 2, Recv(0, 0, 0, 0)))


def test_the_error_names_plan_law_and_place_and_is_an_assertion_too() -> None:
    with pytest.raises(PlanError, match=r"all_reduce plan 'made up' for 1 ranks.*rank 0 reads chunks 0\.\.1") as caught:
        verify_plans([plan_of(0, 1, Local(0, W, D, 0, 1))])
    assert isinstance(caught.value, StrettoError) and isinstance(caught.value, AssertionError)
