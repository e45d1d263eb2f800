"""Orthonormal vectors: orthonormal to rounding, zero where there is no direction, the same bits by kernel and by reference."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.compress.kernels.compiling import has_numba
from stretto.compress.orthogonal import Shapes, cut, orthonormalise

SHAPES: Shapes = ((4, 100), (1, 1), (3, 7), (4, 128), (2, 2), (4, 65), (1, 1000))


def length_of(shapes: Shapes) -> int:
    return sum(r * n for r, n in shapes)


def normal(shapes: Shapes, seed: int = 0) -> Tensor:
    return torch.randn(length_of(shapes), generator=torch.Generator().manual_seed(seed))


def assert_orthonormal(matrix: Tensor, lost: Tensor) -> None:
    gram = matrix.double() @ matrix.double().t()
    expected = torch.diag((~lost).double())
    assert (gram - expected).abs().max() < 1e-6, gram


def made(x: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal rows of x, and which are zero."""
    flat = x.clone().reshape(-1)
    lost = orthonormalise(flat, (tuple(x.shape),))  # type: ignore[arg-type]
    return flat.view(x.shape), lost


def test_they_are_orthonormal_and_span_the_same() -> None:
    before, flat = normal(SHAPES), normal(SHAPES)
    assert not orthonormalise(flat, SHAPES).any()
    for was, now in zip(cut(before, SHAPES), cut(flat, SHAPES), strict=True):
        assert_orthonormal(now, torch.zeros(len(now), dtype=torch.bool))
        again = (was.double() @ now.double().t()) @ now.double()
        assert (again - was).abs().max() < 1e-5, "a vector of before is not in the span"


def test_the_first_keeps_its_direction_and_each_is_in_the_span_of_those_before() -> None:
    x = torch.tensor([[3.0, 0.0, 0.0], [1.0, 2.0, 0.0], [1.0, 1.0, -5.0]])
    now, _ = made(x)
    assert torch.equal(now, torch.diag(torch.tensor([1.0, 1.0, -1.0])))


@pytest.mark.skipif(not has_numba(), reason="the kernel needs Numba")
@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 70)), max_size=5),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1.0, 1e-30, 1e30]),
    low_rank=st.booleans(),
)
def test_kernel_and_reference_give_the_same_bits(shapes: list[tuple[int, int]], seed: int, scale: float, low_rank: bool) -> None:
    given_shapes = tuple(shapes)
    flat = normal(given_shapes, seed) * scale
    if low_rank:
        flat = (flat / scale).round() * scale
    by_kernel, by_reference = flat.clone(), flat.clone()
    lost_by_kernel = orthonormalise(by_kernel, given_shapes)
    lost_by_reference = orthonormalise.reference(by_reference, given_shapes)
    assert torch.equal(by_kernel, by_reference)
    assert lost_by_kernel.tolist() == lost_by_reference.tolist()


def test_the_same_bits_wherever_a_tensor_lies() -> None:
    flat = normal(SHAPES)
    alone = [made(x)[0] for x in cut(flat, SHAPES)]
    orthonormalise(flat, SHAPES)
    assert all(torch.equal(a, b) for a, b in zip(alone, cut(flat, SHAPES), strict=True))


def test_dependent_vectors_become_zero() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.0], [0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    now, lost = made(x)
    assert lost.tolist() == [False, True, True, False]
    assert not now[lost].any()
    assert_orthonormal(now, lost)


def test_more_vectors_than_dimensions() -> None:
    now, lost = made(torch.randn(4, 2, generator=torch.Generator().manual_seed(1)))
    assert lost.tolist() == [False, False, True, True]
    assert_orthonormal(now, lost)


def test_nearly_dependent_vectors_are_orthogonal_all_the_same() -> None:
    """The reason for going over them twice: after once, 1e-7 apart, the second would keep a part of 1e-9 of the first."""
    base = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    x = torch.stack([base, base * (1 + 2**-23), base + 1e-7 * base.roll(1), base.roll(5)])
    now, lost = made(x)
    assert_orthonormal(now, lost)
    assert (now.double()[0] @ now.double()[2]).abs() < 1e-7


@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1e-20, 1e20, 1e38])
def test_lengths_do_not_matter(scale: float) -> None:
    now, lost = made(torch.tensor([[1.0, 1.0], [1.0, -1.0]]) * scale)
    assert not lost.any()
    assert torch.allclose(now, torch.tensor([[1.0, 1.0], [1.0, -1.0]]) / math.sqrt(2))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_becomes_zero(bad: float) -> None:
    for method in (orthonormalise, orthonormalise.reference):
        flat = torch.tensor([1.0, 0.0, 0.0, bad, 1.0, 0.0])
        lost = method(flat, ((2, 3),))
        assert lost.tolist() == [False, True]
        assert flat.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_nothing_at_all() -> None:
    for method in (orthonormalise, orthonormalise.reference):
        assert len(method(torch.zeros(0), ())) == 0


GPU_SHAPES: dict[str, Shapes] = {
    "nothing": (),
    "one number": ((1, 1),),
    "short": SHAPES,
    "as long as a tile, and around it": ((2, 1023), (2, 1024), (3, 1025), (2, 4095), (1, 4096), (2, 4097)),
    "small tile": ((4, 1024), (2, 64), (7, 1000), (32, 65), (1, 3), (3, 2), (4, 1)),
    "many vectors": ((7, 64), (32, 1000), (32, 40), (33, 5)),
    "long": ((4, 70_000), (2, 5), (1, 65_536), (2, 8193), (7, 1000)),
    "hundreds": tuple((1 + i % 4, 1 + 37 * i % 900) for i in range(300)),
    "more than one program takes": ((1, 1_000_000), (2, 1_100_000), (4, 768)),
}


def rounded(shapes: Shapes) -> Tensor:
    """Many zeros of either sign, and vectors that depend on each other."""
    return (0.7 * normal(shapes)).round()


def dependent(shapes: Shapes) -> Tensor:
    """The last vector is a multiple of the first, and the one before it is zero."""
    flat = normal(shapes)
    for x in cut(flat, shapes):
        if len(x) > 2:
            x[-2] = 0.0
        if len(x) > 1:
            x[-1] = 3.0 * x[0]
    return flat


def with_bad(bad: float, shapes: Shapes) -> Tensor:
    flat = normal(shapes)
    flat[len(flat) // 3 :: max(1, len(flat) // 2)] = bad
    return flat


GPU_VALUES: dict[str, Callable[[Shapes], Tensor]] = {
    "normal": normal,
    "rounded": rounded,
    "dependent": dependent,
    "zeros": lambda shapes: 0.0 * normal(shapes).abs(),
    "large": lambda shapes: 1e37 * normal(shapes),
    "denormal": lambda shapes: 1e-40 * normal(shapes),
    "smallest": lambda shapes: 1e-45 * rounded(shapes),
    "inf": lambda shapes: with_bad(math.inf, shapes),
    "nan": lambda shapes: with_bad(math.nan, shapes),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", GPU_VALUES)
@pytest.mark.parametrize("name", GPU_SHAPES)
def test_on_a_gpu_kernel_and_reference_give_the_same_bits_as_on_a_cpu(name: str, kind: str) -> None:
    shapes = GPU_SHAPES[name]
    flat = GPU_VALUES[kind](shapes)
    by_kernel, by_reference, on_cpu = flat.cuda(), flat.cuda(), flat.clone()
    lost = orthonormalise(by_kernel, shapes).tolist()
    assert lost == orthonormalise.reference(by_reference, shapes).tolist() == orthonormalise(on_cpu, shapes).tolist()
    for other in (by_reference.cpu(), on_cpu):
        assert torch.equal(by_kernel.cpu().view(torch.int32), other.view(torch.int32))
