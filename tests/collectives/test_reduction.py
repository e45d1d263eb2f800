"""Every number format and every operation: right, the same bits everywhere, or refused with what to write instead."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce

import pytest
import torch

from collectives.ranks import ALL_REDUCES, Rank, bits, run_ranks
from stretto.collectives import catalogue
from stretto.collectives.plan import Kind
from stretto.collectives.reduction import BITWISE, OPS, check_op, dtype_code
from stretto.collectives.request import Request
from stretto.errors import ConfigurationError

FLOATING = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
WHOLE = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
COMPLEX = [torch.complex64, torch.complex128]
ALLOWED = [
    *((dtype, op) for dtype in FLOATING for op in OPS if op not in BITWISE),
    *((dtype, op) for dtype in WHOLE for op in OPS if op != "mean"),
    *((dtype, op) for dtype in COMPLEX for op in ("sum", "mean", "product")),
    *((torch.bool, op) for op in ("min", "max", *BITWISE)),
]


def values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, exact in every format, whose sums and products over four ranks are exact too."""
    small = (torch.arange(21) + rank) % 3 + (rank == 2)
    if dtype is torch.bool:
        return small > 1
    if dtype.is_complex:
        return torch.complex(small.to(torch.float64), (2 - small).to(torch.float64)).to(dtype)
    return small.to(dtype)


def plain(op: str, dtype: torch.dtype, size: int) -> torch.Tensor:
    if op in BITWISE:
        bitwise: Callable[..., torch.Tensor] = getattr(torch, op.replace("bit", "bitwise"))
        return reduce(bitwise, [values(rank, dtype) for rank in range(size)])
    wide = torch.complex128 if dtype.is_complex else torch.float64
    inputs = torch.stack([values(rank, dtype).to(wide) for rank in range(size)])
    functions: dict[str, Callable[..., torch.Tensor]] = {
        "sum": torch.sum, "mean": torch.mean, "product": torch.prod, "min": torch.amin, "max": torch.amax,
    }  # fmt: skip
    return functions[op](inputs, dim=0).to(dtype)


@pytest.mark.parametrize(("dtype", "op"), ALLOWED, ids=lambda value: str(value).removeprefix("torch."))
def test_every_format_and_operation_is_exact_where_the_numbers_are(dtype: torch.dtype, op: str) -> None:
    """Four ranks, so that a mean is exact too. The last algorithm adds in WORK, the second in both partners."""

    def program(me: Rank) -> None:
        for algorithm in ("ring", "butterfly", "round_robin"):
            tensor = values(me.rank, dtype)
            me.all_reduce(algorithm, tensor, op, segment_bytes=16)
            assert torch.equal(tensor, plain(op, dtype, 4)), algorithm

    run_ranks(4, program)


@pytest.mark.parametrize("dtype", [*FLOATING, *WHOLE, *COMPLEX], ids=str)
def test_nothing_is_combined_with_nothing(dtype: torch.dtype) -> None:
    """A parameter without elements may have a transfer of its own."""

    def program(me: Rank) -> None:
        for algorithm in ALL_REDUCES:
            me.all_reduce(algorithm, torch.empty(0, dtype=dtype), "sum")

    run_ranks(2, program)


@pytest.mark.parametrize("dtype", [*FLOATING, *COMPLEX], ids=str)
@pytest.mark.parametrize("algorithm", ALL_REDUCES)
def test_rounding_is_the_same_on_every_rank(algorithm: str, dtype: torch.dtype) -> None:
    def program(me: Rank) -> bytes:
        tensor = torch.randn(70, generator=torch.Generator().manual_seed(me.rank), dtype=torch.float64).to(dtype)
        return bits(me.all_reduce(algorithm, tensor, "mean", segment_bytes=64))

    assert len(set(run_ranks(5, program))) == 1


@pytest.mark.parametrize("op", ["sum", "min", "max", "product"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_zeros_of_both_signs_infinities_and_nans_are_the_same_bits_on_every_rank(dtype: torch.dtype, op: str) -> None:
    """min(0.0, -0.0) and NaN + NaN depend on the order of the operands, which partners in a butterfly see swapped."""
    special = torch.tensor([0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 1e-40, -1e-40, 1.0]).to(dtype)

    def program(me: Rank) -> list[bytes]:
        order = torch.randperm(180, generator=torch.Generator().manual_seed(me.rank))
        return [
            bits(me.all_reduce(algorithm, special.repeat(20)[order].clone(), op, segment_bytes=64)) for algorithm in ALL_REDUCES
        ]

    for size in (2, 4, 5):
        assert len(set(map(tuple, run_ranks(size, program)))) == 1


def test_the_extremes_of_numbers_with_a_nan_are_nan() -> None:
    def program(me: Rank) -> None:
        for op in ("min", "max"):
            tensor = torch.tensor([math.nan if me.rank == 1 else 1.0, 2.0])
            me.all_reduce("ring", tensor, op)
            assert tensor[0].isnan() and tensor[1] == 2.0

    run_ranks(3, program)


@pytest.mark.parametrize(
    ("op", "dtype", "remedy"),
    [
        ("mean", torch.int64, "Use op='sum', or convert"),
        ("mean", torch.bool, "Use op='sum', or convert"),
        ("sum", torch.bool, "use op='max' .any. or op='min' .all., or convert"),
        ("product", torch.bool, "use op='max'"),
        ("bit_or", torch.float32, "Give integers or bools"),
        ("min", torch.complex64, "Use 'sum', 'mean' or 'product'"),
        ("max", torch.complex128, "Use 'sum', 'mean' or 'product'"),
        ("average", torch.float32, "Write one of 'sum', 'mean', 'min', 'max', 'product'"),
    ],
)
def test_an_operation_without_a_meaning_is_refused_with_what_to_write(op: str, dtype: torch.dtype, remedy: str) -> None:
    with pytest.raises(ConfigurationError, match=remedy):
        check_op(op, dtype)
    plan = catalogue.plan(Kind.ALL_REDUCE, "ring", 0, 2)
    with pytest.raises(ConfigurationError, match=remedy):
        Request(plan, torch.zeros(3, dtype=dtype), op)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64], ids=str)
def test_a_format_that_cannot_travel_is_refused_with_those_that_can(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigurationError, match=f"{dtype} cannot travel.*\nConvert it to one of float32, .*complex128"):
        dtype_code(dtype)
    plan = catalogue.plan(Kind.BROADCAST, "binomial", 0, 2)
    with pytest.raises(ConfigurationError, match="cannot travel"):
        Request(plan, torch.zeros(3).to(dtype))


def test_copies_need_no_operation() -> None:
    """A broadcast of integers or bools is no sum: `op` does not come into it."""

    def program(me: Rank) -> None:
        for dtype in (torch.bool, torch.int64, torch.complex64, torch.bfloat16):
            tensor = values(me.rank, dtype)
            me.run(Kind.BROADCAST, "binomial", tensor, root=1)
            assert torch.equal(tensor, values(1, dtype))

    run_ranks(3, program)
