"""Every collective of torch's, on our groups: what it leaves, for all dtypes and operations, and how many bytes it takes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from stretto.errors import ConfigurationError, RankMismatch, StrettoError
from stretto.torch_backend.process_group import StrettoGroup
from torch_backend.groups import rows, run_groups

dist: Any = torch.distributed  # whose stubs leave out what its pages describe
SIZES = (1, 2, 3, 4, 7)
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
)  # fmt: skip
REFERENCE: dict[str, Callable[[Tensor], Tensor]] = {
    "SUM": lambda x: x.sum(0, dtype=x.dtype),
    "AVG": lambda x: x.mean(0),
    "PRODUCT": lambda x: x.prod(0, dtype=x.dtype),
    "MIN": lambda x: x.amin(0),
    "MAX": lambda x: x.amax(0),
    "BAND": lambda x: _folded(x, torch.bitwise_and),
    "BOR": lambda x: _folded(x, torch.bitwise_or),
    "BXOR": lambda x: _folded(x, torch.bitwise_xor),
}


def _folded(x: Tensor, op: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    total = x[0]
    for row in x[1:]:
        total = op(total, row)
    return total


def _rooted(options: Any, root: int, op: Any = None) -> Any:
    options.rootRank = root
    if op is not None:
        options.reduceOp = op
    return options


def _summing(op: Any) -> Any:
    options = AllreduceOptions()
    options.reduceOp = op
    return options


# -- what they leave ----------------------------------------------------------------------------------------------------


def _everything(group: StrettoGroup, length: int) -> None:
    rank, size = group.rank(), group.size()
    x = rows(size, length, torch.float32)
    mine = x[rank].clone()

    summed = mine.clone()
    assert group.allreduce([summed]).wait() is True and summed.equal(x.sum(0))
    for root in range(size):
        given = mine.clone()
        group.broadcast([given], _rooted(BroadcastOptions(), root)).wait()
        assert given.equal(x[root])
        given = mine.clone()
        group.reduce([given], _rooted(ReduceOptions(), root, dist.ReduceOp.SUM)).wait()
        assert given.equal(x.sum(0) if rank == root else mine)
        into = [torch.empty(length) for _ in range(size)] if rank == root else []
        group.gather([into] if into else [], [mine], _rooted(GatherOptions(), root)).wait()
        assert all(part.equal(x[place]) for place, part in enumerate(into))
        got = torch.empty(length)
        pieces = [[row.clone() for row in x]] if rank == root else []
        group.scatter([got], pieces, _rooted(ScatterOptions(), root)).wait()
        assert got.equal(mine)

    listed = [torch.empty(length) for _ in range(size)]
    group.allgather([listed], [mine]).wait()
    assert torch.stack(listed).equal(x)
    flat = torch.empty(size * length)
    group.all_gather_single(flat, mine).wait()
    assert flat.view(size, length).equal(x)

    parts = rows(size, size * length, torch.float32, seed=1)
    given, want = parts[rank].clone(), parts.sum(0).view(size, length)[rank]
    got = torch.empty(length)
    group.reduce_scatter_single(got, given).wait()
    assert got.equal(want) and given.equal(parts[rank])
    group.reduce_scatter([got.zero_()], [[*given.view(size, length)]]).wait()
    assert got.equal(want)

    arrived = torch.empty(size * length)
    group.all_to_all_single(arrived, given, [], []).wait()
    assert arrived.view(size, length).equal(parts.view(size, size, length)[:, rank])
    outputs = [torch.empty(place + 2 * rank) for place in range(size)]  # lengths differ, and there is an empty one
    inputs = [torch.full((rank + 2 * place,), float(10 * rank + place)) for place in range(size)]
    group.alltoall(outputs, inputs).wait()
    assert all(part.equal(torch.full_like(part, float(10 * place + rank))) for place, part in enumerate(outputs))

    group.barrier().wait()
    assert group._get_sequence_number_for_group() == 1 + 4 * size + 2 + 2 + 2 + 1


@pytest.mark.parametrize("size", SIZES)
def test_every_collective_leaves_what_torch_says(size: int) -> None:
    run_groups(size, _everything, 5)


@pytest.mark.parametrize("size", [2, 3])
def test_so_do_large_ones(size: int) -> None:
    run_groups(size, _everything, 300_000)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", REFERENCE)
def test_every_operation_on_every_dtype_that_has_it(name: str, size: int) -> None:
    op = getattr(dist.ReduceOp, name)
    bitwise = name in ("BAND", "BOR", "BXOR")

    def program(group: StrettoGroup) -> int:
        done = 0
        for dtype in (*DTYPES, torch.bool):
            if (bitwise and dtype.is_floating_point) or (name == "AVG" and not dtype.is_floating_point):
                with pytest.raises(ConfigurationError):
                    group.allreduce([torch.ones(3, dtype=dtype)], _summing(op))
                continue
            x = rows(size, 9, dtype)
            given = x[group.rank()].clone()
            group.allreduce([given], _summing(op)).wait()
            if dtype is torch.bool and name in ("SUM", "PRODUCT"):  # whether any, whether all
                want = x.any(0) if name == "SUM" else x.all(0)
            else:
                want = REFERENCE[name](x.double() if name == "AVG" else x).to(dtype)
            assert torch.allclose(given.double(), want.double(), atol=1e-2), (dtype, given, want)
            done += 1
        return done

    assert run_groups(size, program) == [6 if bitwise else 4 if name == "AVG" else 10] * size


def test_complex_numbers_are_summed_and_averaged() -> None:
    def program(group: StrettoGroup) -> Tensor:
        given = torch.full((4,), complex(group.rank(), 1))
        group.allreduce([given], _summing(dist.ReduceOp.AVG)).wait()
        return given

    assert all(result.equal(torch.full((4,), complex(1, 1))) for result in run_groups(3, program))


def test_dtypes_that_have_no_sum_still_travel() -> None:
    def program(group: StrettoGroup) -> None:
        for dtype in (torch.float8_e4m3fn, torch.uint16, torch.uint64):
            given = torch.arange(4).to(dtype) if group.rank() == 1 else torch.zeros(4).to(dtype)
            group.broadcast([given], _rooted(BroadcastOptions(), 1)).wait()
            into = [torch.zeros(4).to(dtype) for _ in range(2)]
            group.allgather([into], [given]).wait()
            assert all(part.to(torch.int64).equal(torch.arange(4)) for part in into)
            with pytest.raises(ConfigurationError, match="cannot travel|no wire format|not"):
                group.allreduce([given])

    run_groups(2, program)


def test_tensors_that_are_not_contiguous_are_filled_in_place() -> None:
    def program(group: StrettoGroup) -> None:
        whole = torch.zeros(4, 6)
        column = whole[:, 2]
        column += group.rank() + 1
        group.allreduce([column]).wait()
        assert whole[:, 2].equal(torch.full((4,), 3.0)) and whole.sum() == 12
        into = torch.zeros(4, 2).t()
        group.all_gather_single(into, torch.full((4,), float(group.rank()))).wait()
        assert into[0].eq(0).all() and into[1].eq(1).all()

    run_groups(2, program)


def test_a_premultiplied_sum_multiplies_first_and_leaves_what_it_was_given() -> None:
    def program(group: StrettoGroup) -> None:
        options = ReduceScatterOptions()
        options.reduceOp = dist._make_nccl_premul_sum(0.5)
        given, got = torch.arange(4.0), torch.empty(2)
        group.reduce_scatter_single(got, given, options).wait()
        first = 2 * group.rank()
        assert got.equal(torch.arange(4.0)[first : first + 2]) and given.equal(torch.arange(4.0))
        summed = torch.ones(3)
        group.allreduce([summed], _summing(dist._make_nccl_premul_sum(2.0))).wait()
        assert summed.eq(4).all()
        again = _summing(dist._make_nccl_premul_sum(2.0))
        for want in (4.0, 16.0):
            group.allreduce([summed.fill_(want / 4)], again).wait()  # the options are the caller's, and stay as they are
            assert summed.eq(want).all()
        untouched = torch.ones(2)
        with pytest.raises(ConfigurationError, match="convert them to one dtype"):
            group.allreduce_coalesced([untouched, torch.ones(2, dtype=torch.float64)], again)
        assert untouched.eq(1).all()

    run_groups(2, program)


def test_several_tensors_at_once() -> None:
    def program(group: StrettoGroup) -> None:
        rank, size = group.rank(), group.size()
        tensors = [torch.full((n,), float(rank)) for n in (3, 0, 5)]
        group.allreduce_coalesced(tensors).wait()
        assert all(tensor.eq(sum(range(size))).all() for tensor in tensors)
        outputs = [torch.empty(size * n) for n in (2, 4)]
        group.all_gather_single_coalesced(outputs, [torch.full((n,), float(rank)) for n in (2, 4)]).wait()
        assert all(out.view(size, -1).eq(torch.arange(size).unsqueeze(1)).all() for out in outputs)
        outputs = [torch.empty(n) for n in (2, 4)]
        work = group.reduce_scatter_single_coalesced(outputs, [torch.ones(size * n) for n in (2, 4)])
        assert len(work.result()) == 2 and all(out.eq(size).all() for out in outputs)
        lists = [[torch.empty(2), torch.empty(3)] for _ in range(size)]
        group.allgather_coalesced(lists, [torch.full((2,), float(rank)), torch.full((3,), float(rank))]).wait()
        assert all(tensor.eq(place).all() for place, both in enumerate(lists) for tensor in both)

    run_groups(3, program)


def test_the_names_that_torch_2_11_calls_are_there() -> None:
    def program(group: StrettoGroup) -> None:
        out = torch.empty(4)
        group._allgather_base(out, torch.ones(2)).wait()
        group._reduce_scatter_base(torch.empty(2), out).wait()
        group.alltoall_base(torch.empty(4), out, [], []).wait()
        group.allgather_into_tensor_coalesced([out], [torch.ones(2)]).wait()
        group.reduce_scatter_tensor_coalesced([torch.empty(2)], [out]).wait()

    run_groups(2, program)


def test_overloads_with_single_tensors_and_operations() -> None:
    def program(group: StrettoGroup) -> None:
        x = torch.full((2,), float(group.rank()))
        group.allreduce(x, dist.ReduceOp.MAX).wait()
        group.broadcast(x, 0).wait()
        into = [torch.empty(2), torch.empty(2)]
        group.allgather(into, x).wait()
        group.barrier(timedelta(seconds=5)).wait()
        assert x.eq(1).all() and into[0].eq(1).all()

    run_groups(2, program)


def test_sparse_tensors_are_added_up_entry_by_entry() -> None:
    def program(group: StrettoGroup, entries: bool) -> Tensor:
        rank, size = group.rank(), group.size()
        index = torch.tensor([[rank, size, rank]]) if entries else torch.empty(1, 0, dtype=torch.int64)
        values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]) if entries else torch.empty(0, 2)
        given = torch.sparse_coo_tensor(index, values, (size + 1, 2), check_invariants=True)
        group.allreduce([given], _summing(dist.ReduceOp.AVG if entries else dist.ReduceOp.SUM)).wait()
        return given.to_dense()

    for size in (2, 3):
        results = run_groups(size, program, True)
        want = torch.tensor([[6.0, 8.0]] * size + [[3.0 * size, 4.0 * size]]) / size
        assert all(torch.allclose(result, want) and result.equal(results[0]) for result in results)
    assert all(result.eq(0).all() for result in run_groups(2, program, False))


def test_on_inference_tensors_and_parameters_too() -> None:
    def program(group: StrettoGroup) -> None:
        with torch.inference_mode():
            given = torch.ones(3)
        group.allreduce([given]).get_future().wait()
        parameter = torch.nn.Parameter(torch.ones(3))
        group.broadcast([parameter]).wait()
        into = [torch.empty(3), torch.empty(3)]
        group.allgather([into], [parameter]).wait()
        assert given.eq(2).all() and into[1].eq(1).all() and not into[1].requires_grad

    run_groups(2, program)


# -- what they cost -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
def test_a_reduce_scatter_sends_its_part_and_not_an_all_reduce(size: int) -> None:
    def program(group: StrettoGroup, length: int) -> int:
        before = sum(group.job.ledger.sent.values())
        group.reduce_scatter_single(torch.empty(length), torch.ones(size * length)).wait()
        return sum(group.job.ledger.sent.values()) - before

    for length in (64, 200_000):
        assert run_groups(size, program, length) == [4 * length * (size - 1)] * size


def test_gathers_and_all_to_alls_send_what_they_must() -> None:
    def program(group: StrettoGroup) -> list[int]:
        def sent(call: Callable[[], Any]) -> int:
            before = sum(group.job.ledger.sent.values())
            call().wait()
            return sum(group.job.ledger.sent.values()) - before

        return [
            sent(lambda: group.all_gather_single(torch.empty(300), torch.ones(100))),
            sent(lambda: group.all_to_all_single(torch.empty(300), torch.ones(300), [], [])),
            sent(lambda: group.allreduce([torch.ones(300_000)])),
        ]

    assert run_groups(3, program) == [[800, 800, 1_600_000]] * 3


# -- bad input ----------------------------------------------------------------------------------------------------------


def test_what_cannot_work_is_refused_before_anything_is_sent() -> None:
    def program(group: StrettoGroup) -> None:
        bad: list[Callable[[], Any]] = [
            lambda: group.all_gather_single(torch.empty(5), torch.ones(2)),
            lambda: group.allgather([[torch.empty(2), torch.empty(3)]], [torch.ones(2)]),
            lambda: group.all_gather_single(torch.empty(4, dtype=torch.float64), torch.ones(2)),
            lambda: group.reduce_scatter_single(torch.empty(3), torch.ones(4)),
            lambda: group.alltoall([torch.empty(1)], [torch.ones(1)]),
            lambda: group.alltoall([torch.empty(1), torch.empty(1)], [torch.ones(2), torch.ones(2)]),
            lambda: group.all_to_all_single(torch.empty(3), torch.ones(3), [], []),
            lambda: group.all_to_all_single(torch.empty(4), torch.ones(4), [1, 1], [2, 2]),
            lambda: group.broadcast([torch.ones(2)], _rooted(BroadcastOptions(), 2)),
            lambda: group.allreduce([torch.ones(2).to(torch.float8_e4m3fn)]),
            lambda: group.allreduce_coalesced([torch.ones(2), torch.ones(2, dtype=torch.float64)]),
            lambda: group.send([torch.ones(2)], group.rank()),
            lambda: group.recv([torch.ones(1)], 7),
        ]
        for call in bad:
            with pytest.raises(ConfigurationError):
                call()
        assert sum(group.job.ledger.sent.values()) == before[group.rank()]

    before: dict[int, int] = {}

    def counted(group: StrettoGroup) -> None:
        before[group.rank()] = sum(group.job.ledger.sent.values())
        program(group)
        group.barrier().wait()

    run_groups(2, counted)


def test_members_that_ask_for_different_things_are_all_told() -> None:
    def program(group: StrettoGroup) -> str:
        with pytest.raises(RankMismatch) as told:
            group.allreduce([torch.ones(2 + group.rank())]).wait()
        return str(told.value)

    texts = run_groups(3, program)
    assert len(set(texts)) == 1 and "all_reduce(float32[2]" in texts[0] and "all_reduce(float32[4]" in texts[0]


def test_a_gather_in_place_from_a_part_of_the_output_that_is_not_contiguous() -> None:
    """Rank 0's part begins where the output does, but its values are elsewhere."""

    def program(group: StrettoGroup) -> list[float]:
        into = torch.arange(8.0)
        group.all_gather_single(into, into[0:8:2] if group.rank() == 0 else torch.ones(4)).wait()
        return into.tolist()

    assert run_groups(2, program) == [[0, 2, 4, 6, 1, 1, 1, 1]] * 2


def test_nothing_is_started_in_a_group_that_was_shut_down() -> None:
    def program(group: StrettoGroup) -> None:
        group.shutdown()
        starts: list[Callable[[], Any]] = [
            lambda: group.allreduce([torch.ones(1)]), lambda: group.barrier(), lambda: group.monitored_barrier(),
            lambda: group.send([torch.ones(1)], 1 - group.rank()), lambda: group.recv([torch.ones(1)], 1 - group.rank()),
        ]  # fmt: skip
        for start in starts:
            with pytest.raises(StrettoError, match="was shut down"):
                start()

    run_groups(2, program)
