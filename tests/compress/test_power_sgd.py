"""PowerSGD: exact for low rank, the same bits everywhere, nothing lost under error feedback, and a Q that outlives all of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.together import Workers
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.kernels import compiling
from stretto.compress.kernels.compiling import has_numba
from stretto.compress.layout import Layout
from stretto.compress.matrices import Matrices, Matrix, first_q
from stretto.compress.none import NoCompression
from stretto.compress.power_sgd import PowerSGD, multiply, times_left, times_right
from stretto.compress.rounds import ExchangeContext, Sum
from stretto.compress.state import CompressionState
from stretto.errors import ConfigurationError

Named = list[tuple[str, tuple[int, ...]]]

SHAPES: Named = [
    ("w", (12, 20)),
    ("conv", (6, 5, 3, 2)),
    ("empty", (0, 5)),
    ("row", (1, 9)),
    ("bias", (7,)),
    ("scalar", ()),
    ("v", (33, 4)),
]
WORLDS = [1, 2, 3, 4, 7]


def normal(workers: Workers, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(workers.layout.num_elements, generator=generator) for _ in workers.states]


def mean(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([tensor.double() for tensor in tensors]).mean(0)


def assert_same_bits(tensors: Sequence[Tensor]) -> None:
    assert all(torch.equal(tensors[0], other) for other in tensors[1:])


def assert_same(one: Tensor, other: Tensor) -> None:
    """To the bit with our own kernels; what a BLAS adds up depends on where a matrix lies in memory."""
    if has_numba():
        assert torch.equal(one, other)
    else:
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def q_of(workers: Workers, name: str, rank: int = 0) -> Tensor:
    q = workers.states[rank].shared.get("q", name)
    assert q is not None
    return q


@pytest.mark.parametrize("size", WORLDS)
def test_gradients_of_low_rank_come_out_as_their_mean(size: int) -> None:
    """If the mean has rank r or less, one product finds all of it."""
    workers = Workers(PowerSGD(rank=4, min_rate=0), [("w", (30, 50))], size)
    generator = torch.Generator().manual_seed(3)
    left, right = torch.randn(30, 4, generator=generator), torch.randn(4, 50, generator=generator)
    gradients = [(left @ torch.randn(4, 4, generator=generator) @ right).reshape(-1) for _ in range(size)]
    for _ in range(2):
        out = workers.round(gradients)
    torch.testing.assert_close(out[0].double(), mean(gradients), rtol=1e-5, atol=1e-4)


def test_a_fixed_gradient_is_approached_as_well_as_its_rank_allows() -> None:
    """Power iteration: with Q remembered, the error falls to that of the best approximation, from well above it."""
    workers = Workers(PowerSGD(rank=2), [("w", (60, 40))], 2)
    generator = torch.Generator().manual_seed(4)
    u, s, v = torch.linalg.svd(torch.randn(60, 40, generator=generator), full_matrices=False)
    s = 0.7 ** torch.arange(40)
    gradient = (u * s @ v).reshape(-1)
    best = float(s[2:].norm())
    errors = [float((workers.round([gradient, gradient])[0] - gradient).norm()) for _ in range(25)]
    assert errors[0] > 1.15 * best
    assert errors[-1] == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize("size", WORLDS)
def test_all_workers_end_with_the_same_bits(size: int) -> None:
    workers = Workers(ErrorFeedback(PowerSGD(rank=3, min_rate=0)), SHAPES, size)
    for seed in range(4):
        out = workers.round(normal(workers, seed))
        assert_same_bits(out)
    for name, _ in (one for one in SHAPES if one[0] != "empty"):
        assert_same_bits([q_of(workers, name, rank) for rank in range(size)])


@pytest.mark.parametrize("size", WORLDS)
def test_error_feedback_loses_nothing(size: int) -> None:
    """In every round M^ and the mean of the residuals are the mean of M; over all rounds nothing of the gradients is missing."""
    workers = Workers(ErrorFeedback(PowerSGD(rank=2, min_rate=0)), SHAPES, size)
    put_in = handed_out = torch.zeros(workers.layout.num_elements, dtype=torch.float64)
    for seed in range(20):
        gradients = normal(workers, seed)
        before = mean([state.own.flat("residual") for state in workers.states])
        out = workers.round(gradients)[0].double()
        after = mean([state.own.flat("residual") for state in workers.states])
        torch.testing.assert_close(out + after, before + mean(gradients), rtol=1e-5, atol=1e-5)
        put_in, handed_out = put_in + mean(gradients), handed_out + out
    assert (handed_out + after - put_in).norm() < 1e-5 * put_in.norm()


def test_p_is_orthonormal_and_q_is_what_it_gives() -> None:
    """M^ = P P^T M, a projection: doing it to M^ again changes nothing, and what is left is orthogonal to it."""
    workers = Workers(PowerSGD(rank=3), [("w", (20, 30))], 1)
    gradient = normal(workers)[0]
    m, out = gradient.view(20, 30).double(), workers.round([gradient])[0].view(20, 30).double()
    assert (out.t() @ (m - out)).abs().max() < 1e-4
    assert torch.linalg.matrix_rank(out, rtol=1e-5) == 3


@pytest.mark.parametrize("size", [1, 3])
def test_zero_gradients_give_zero_and_do_not_end_learning(size: int) -> None:
    """A Q that became zero would stay zero; a parameter that is not used in the first rounds must still learn later."""
    workers = Workers(PowerSGD(rank=2, min_rate=0), [("w", (8, 9)), ("v", (8, 9))], size)
    nothing = [torch.zeros(144)] * size
    for _ in range(2):
        assert not any(out.any() for out in workers.round(nothing))
    a, b = torch.linspace(1, 2, 8), torch.linspace(-1, 3, 9)
    something = torch.cat([torch.zeros(72), torch.outer(a, b).reshape(-1)])
    torch.testing.assert_close(workers.round([something] * size)[0], something)
    assert torch.equal(q_of(workers, "w"), first_q(Matrix("w", 0, 2, 8, 9)))


def test_directions_that_were_lost_are_found_again() -> None:
    """A gradient of rank 1 leaves Q with one useful column; the next gradient has rank 3."""
    workers = Workers(PowerSGD(rank=3), [("w", (20, 20))], 1)
    one = torch.zeros(20, 20)
    one[3, 4] = 2.0
    torch.testing.assert_close(workers.round([one.reshape(-1)])[0].view(20, 20), one)
    generator = torch.Generator().manual_seed(0)
    three = torch.randn(20, 3, generator=generator) @ torch.randn(3, 20, generator=generator)
    torch.testing.assert_close(workers.round([three.reshape(-1)])[0].view(20, 20), three, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-25, 1e-12, 1e12, 1e25, 1e36])
def test_any_scale(scale: float) -> None:
    """The gradient times Q must not leave the range of float32, in the second round either."""
    workers = Workers(ErrorFeedback(PowerSGD(rank=2, min_rate=0)), [("w", (5, 6))], 2)
    gradient = (torch.outer(torch.arange(1.0, 6.0), torch.arange(1.0, 7.0)) * scale).reshape(-1)
    for _ in range(3):
        out = workers.round([gradient, gradient])[0]
        assert out.isfinite().all()
    torch.testing.assert_close(out, gradient, rtol=1e-4, atol=2e-44)


@pytest.mark.parametrize("named", [SHAPES, [("empty", (0, 4))], []])
@pytest.mark.parametrize("kind", ["zero", "one-hot", "constant", "denormal"])
def test_awkward_tensors(named: Named, kind: str) -> None:
    workers = Workers(ErrorFeedback(PowerSGD(rank=2, min_rate=0)), named, 2)
    n = workers.layout.num_elements
    value = {
        "zero": torch.zeros(n),
        "one-hot": torch.zeros(n),
        "constant": torch.full((n,), 3.0),
        "denormal": torch.full((n,), 1e-42),
    }[kind]
    if kind == "one-hot" and n:
        value[n // 2] = 1.0
    for _ in range(3):
        out = workers.round([value, value])
    assert_same_bits(out)
    torch.testing.assert_close(out[0], value, rtol=1e-4, atol=1e-44)


def test_a_discarded_round_leaves_q_and_residual() -> None:
    workers, other = (Workers(ErrorFeedback(PowerSGD(rank=2, min_rate=0)), SHAPES, 2) for _ in range(2))
    for one in (workers, other):
        one.round(normal(one, 1))
    kept = q_of(workers, "w").clone()
    workers.round(normal(workers, 2), commit=False)
    assert torch.equal(q_of(workers, "w"), kept)
    expected, got = other.round(normal(other, 3)), workers.round(normal(workers, 3))
    assert torch.equal(expected[0], got[0])


def test_what_is_remembered_survives_other_buckets_with_its_bits() -> None:
    first = Workers(ErrorFeedback(PowerSGD(rank=2)), [("a", (40, 30)), ("b", (50, 20))], 2)
    for seed in range(3):
        first.round(normal(first, seed))
    apart = [Workers(ErrorFeedback(PowerSGD(rank=2)), [place], 2) for place in [("b", (50, 20)), ("a", (40, 30))]]
    for one in apart:
        for mine, theirs in zip(one.states, first.states, strict=True):
            mine.own.restore(theirs.own.export(), ErrorFeedback.flat_kinds)
            mine.shared.restore(theirs.shared.export(), ErrorFeedback.flat_kinds)
    gradients = normal(first, 9)
    together = first.round(gradients)[0]
    for one, part in zip(apart, (slice(1200, 2200), slice(0, 1200)), strict=True):
        assert_same(one.round([gradient[part] for gradient in gradients])[0], together[part])


@settings(max_examples=20, deadline=None)
@given(offset=st.integers(1, 40), a=st.integers(2, 40), b=st.integers(2, 40), seed=st.integers(0, 100))
def test_q_does_not_depend_on_the_bucket(offset: int, a: int, b: int, seed: int) -> None:
    alone = Workers(PowerSGD(rank=2, min_rate=0), [("w", (a, b))], 2)
    after = Workers(PowerSGD(rank=2, min_rate=0), [("other", (offset,)), ("w", (a, b))], 2)
    for number in range(2):
        gradients = normal(after, seed + number)
        whole = after.round(gradients)[0]
        assert_same(alone.round([gradient[offset:] for gradient in gradients])[0], whole[offset:])
    assert_same(q_of(alone, "w"), q_of(after, "w"))


def test_q_of_another_rank_is_drawn_anew() -> None:
    workers = Workers(PowerSGD(rank=2), [("w", (30, 30))], 1)
    workers.round(normal(workers))
    workers.compression = PowerSGD(rank=4)
    assert torch.linalg.matrix_rank(workers.round(normal(workers))[0].view(30, 30), rtol=1e-5) == 4


def test_the_first_q_is_normal_and_follows_from_the_name() -> None:
    q = first_q(Matrix("layer.weight", 5, 4, 7, 5001))
    assert torch.equal(q, first_q(Matrix("layer.weight", 99, 4, 8, 5001)))
    assert not torch.equal(q, first_q(Matrix("other.weight", 5, 4, 7, 5001)))
    scaled = q.double() * math.sqrt(5001)
    for row in scaled:
        assert abs(row.mean()) < 5 / math.sqrt(5001)
        assert abs((row**2).mean() - 1) < 5 * math.sqrt(2 / 5001)
        assert abs((row**4).mean() - 3) < 5 * math.sqrt(96 / 5001)
    correlation = scaled @ scaled.t() / 5001 - torch.eye(4)
    assert correlation.abs().max() < 0.1


@pytest.mark.skipif(not has_numba(), reason="the kernel needs Numba")
@settings(max_examples=25, deadline=None)
@given(
    sides=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), max_size=4),
    rank=st.integers(1, 10),
    seed=st.integers(0, 100),
)
def test_kernel_and_reference_give_the_same_bits(sides: list[tuple[int, int]], rank: int, seed: int) -> None:
    layout = Layout.of([(str(i), side) for i, side in enumerate(sides)])
    matrices = Matrices(Matrix(p.name, p.start, rank, *p.shape) for p in layout.places)
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(sum(rank * m.a for m in matrices.each), generator=generator)
    right = torch.randn(sum(rank * m.b for m in matrices.each), generator=generator)
    by_kernel, by_reference = torch.empty(layout.num_elements), torch.empty(layout.num_elements)
    multiply(left, right, matrices, by_kernel)
    multiply.reference(left, right, matrices, by_reference)
    assert torch.equal(by_kernel, by_reference)
    for m, p, q in matrices.factors(left, right):
        torch.testing.assert_close(m.of(by_kernel), p.t() @ q, rtol=1e-4, atol=1e-4)


BLOCK = [(12, 6), (6, 6), (24, 6), (6, 24)]
REPEATED: dict[str, tuple[list[tuple[int, int]], list[int]]] = {  # and how many matrices each product is of
    "nothing": ([], []),
    "one": ([(3, 4)], [1]),
    "a transformer": ([(20, 6), (7, 6), *(3 * BLOCK), (20, 6)], [2, 1, 3, 3, 3, 3]),
    "other distances": ([(5, 5), (5, 5), (5, 5), (2, 3), (5, 5), (4, 4), (5, 5)], [3, 2, 1, 1]),
    "thin": ([(1, 9), (9, 1), (1, 9), (9, 1), (1, 1)], [2, 2, 1]),
}


@pytest.mark.parametrize("name", REPEATED)
def test_equal_matrices_at_equal_distances_are_multiplied_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "has_numba", lambda: False)
    sides, together = REPEATED[name]
    layout = Layout.of([(str(number), side) for number, side in enumerate(sides)])
    matrices = Matrices(Matrix(p.name, p.start, min(3, *p.shape), *p.shape) for p in layout.places)
    assert sorted(batch.num for batch in matrices.batches) == sorted(together)
    generator = torch.Generator().manual_seed(0)
    lengths = (layout.num_elements, *(sum(r * n for r, n in shapes) for shapes in (matrices.lefts, matrices.rights)))
    values, left, right = (torch.randn(1 + length, generator=generator)[1:] for length in lengths)  # not at a storage's beginning
    new_left, new_right = torch.full_like(left, math.nan), torch.full_like(right, math.nan)
    times_right(values, right, matrices, new_left)
    times_left(values, left, matrices, new_right)
    for (m, p, q), (_, new_p, new_q) in zip(matrices.factors(left, right), matrices.factors(new_left, new_right), strict=True):
        torch.testing.assert_close(new_p, q @ m.of(values).t())
        torch.testing.assert_close(new_q, p @ m.of(values))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_round_on_a_gpu_does_not_wait_for_it() -> None:
    """Not in the second round: in the first what is kept is made, and kernels are compiled."""
    layout = Layout.of([(str(number), side) for number, side in enumerate([*(3 * BLOCK), (5000, 8)])])
    state, kept = CompressionState(layout, torch.device("cuda")), {}  # type: ignore[var-annotated]
    for mode in ("default", "error"):
        values = torch.randn(layout.num_elements, device="cuda")
        torch.cuda.set_sync_debug_mode(mode)
        try:
            steps = PowerSGD(rank=3, min_rate=0).exchange(values, ExchangeContext(layout, state, kept=kept))
            asked = next(steps)
            while isinstance(asked, Sum):
                asked = steps.send(asked.tensor)
        except StopIteration:
            pass
        finally:
            torch.cuda.set_sync_debug_mode("default")
        state.commit()
    assert values.isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_does_what_it_does_on_a_cpu() -> None:
    layout = Layout.of([("w", (30, 50)), ("empty", (0, 3)), ("conv", (16, 4, 3, 3)), ("zero", (20, 20))])
    states = [CompressionState(layout, torch.device(device)) for device in ("cpu", "cuda")]
    gradients = torch.randn(3, layout.num_elements, generator=torch.Generator().manual_seed(0))
    gradients[:2, -400:] = 0.0
    for gradient in gradients:
        out = []
        for state in states:
            values = gradient.to(state.device)
            steps = PowerSGD(rank=3, min_rate=0).exchange(values, ExchangeContext(layout, state))
            asked = next(steps)
            assert isinstance(asked, Sum)
            asked = steps.send(asked.tensor)
            assert isinstance(asked, Sum)
            with pytest.raises(StopIteration):
                steps.send(asked.tensor)
            state.commit()
            out.append(values.cpu())
        torch.testing.assert_close(*out, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "compressed"),
    [
        ((), False),
        ((4096,), False),
        ((1, 4096), False),  # r = 1: 4096 values would become 4097
        ((0, 100), False),
        ((100, 0), False),
        ((16, 16), True),  # 256 / (4 * 32) = 2.0
        ((16, 15), False),
        ((256, 768), True),
        ((64, 64, 3, 3), True),
        ((64, 1, 3, 3), False),  # 576 / (4 * 73) < 2
    ],
)
def test_which_tensors_are_compressed(shape: tuple[int, ...], compressed: bool) -> None:
    answer = PowerSGD(rank=4).for_parameter("w", shape)
    assert answer == (PowerSGD(rank=4) if compressed else NoCompression())
    around = ErrorFeedback(PowerSGD(rank=4)).for_parameter("w", shape)
    assert around == (ErrorFeedback(PowerSGD(rank=4)) if compressed else NoCompression())


@pytest.mark.parametrize(
    ("size", "rank", "algorithm"), [(1, 0, "auto"), (2, 0, "auto"), (3, 1, "ring"), (4, 2, "halving_doubling")]
)
def test_bytes_are_those_of_the_two_sums(size: int, rank: int, algorithm: str) -> None:
    named: Named = [("w", (120, 20)), ("conv", (60, 5, 3, 2)), ("empty", (0, 5)), ("thin", (3, 96))]
    compression = PowerSGD(rank=4, min_rate=0)
    workers = Workers(compression, named, 1)
    generator, lengths = compression.exchange(torch.randn(workers.layout.num_elements), workers.turn(0)), []
    asked: Any = next(generator)
    while asked is not None:
        assert isinstance(asked, Sum)
        lengths.append(len(asked.tensor))
        try:
            asked = generator.send(asked.tensor)
        except StopIteration:
            asked = None
    assert lengths == [4 * 120 + 4 * 60 + 3 * 3, 4 * 20 + 4 * 30 + 3 * 96]
    sent = compression.bytes_sent(workers.layout, rank, size, algorithm)
    if size == 1:
        assert sent == 0
    else:
        assert sent == pytest.approx(sum(4 * 2 * length * (size - 1) / size for length in lengths), rel=0.02)


def test_any_algorithm_may_carry_it() -> None:
    assert PowerSGD().refusal("ring") is None
    assert ErrorFeedback(PowerSGD()).refusal("halving_doubling") is None


def test_it_prints_as_it_is_written() -> None:
    assert repr(ErrorFeedback(PowerSGD(2))) == "ErrorFeedback(codec=PowerSGD(rank=2, min_rate=2.0))"
    assert eval(repr(PowerSGD(3, 1.5))) == PowerSGD(3, 1.5)


@pytest.mark.parametrize(
    "arguments",
    [{"rank": 0}, {"rank": -1}, {"rank": 2.0}, {"rank": True}, {"min_rate": -1.0}, {"min_rate": math.nan}, {"min_rate": "2"}],
)
def test_bad_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="Write"):
        PowerSGD(**arguments)
