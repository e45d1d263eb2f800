"""DGC: nothing is lost, momentum is momentum, masking wipes it where it must, and the warm-up follows its schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.together import Workers
from stretto.compress.codec import Compression
from stretto.compress.dense_momentum import DenseMomentum, clip_each
from stretto.compress.dgc import DGC, LARGEST, Accumulators, accumulate, write_accumulated
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.kernels.compiling import has_numba
from stretto.compress.layout import Layout
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.rounds import ExchangeContext, Gather
from stretto.compress.state import CompressionState
from stretto.errors import ConfigurationError, FrameError

SHAPES: list[tuple[str, tuple[int, ...]]] = [("w", (40, 50)), ("empty", (0, 3)), ("v", (30, 7)), ("one", (1, 1))]
WORLDS = [1, 2, 3, 4, 7]
NEARLY_ONE = 1 - 1e-9  # all values, by the sparse path


def normal(workers: Workers, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(workers.layout.num_elements, generator=generator) for _ in workers.states]


def dgc(fraction: float = 0.01, **options: Any) -> DGC:
    return DGC(fraction, **{"warm_up": (), **options})


def kept(workers: Workers, rank: int = 0) -> tuple[Tensor, Tensor]:
    own = workers.states[rank].own
    return own.flat("velocity"), own.flat("accumulated")


def mean(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.double() for tensor in tensors]).mean(0)


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("masking", [True, False])
def test_nothing_is_lost(size: int, nesterov: bool, masking: bool) -> None:
    """What was handed out, and the mean of v, are the mean of the sum of all u: the u of each round, before it was masked."""
    workers = Workers(dgc(nesterov=nesterov, masking=masking, fraction=0.05), SHAPES, size)
    added = handed_out = torch.zeros(workers.layout.num_elements, dtype=torch.float64)
    for seed in range(20):
        gradients = normal(workers, seed)
        before = [kept(workers, rank)[0].double() for rank in range(size)]
        if nesterov:
            now = [0.9 * (u + g) + g for u, g in zip(before, gradients, strict=True)]
        else:
            now = [0.9 * u + g for u, g in zip(before, gradients, strict=True)]
        added = added + mean(now)
        out = workers.round(gradients)
        assert all(torch.equal(out[0], other) for other in out[1:])
        handed_out = handed_out + out[0].double()
    left = mean([kept(workers, rank)[1] for rank in range(size)])
    assert (handed_out + left - added).norm() < 1e-5 * added.norm()
    assert left.any()
    assert handed_out.any()


def train(
    size: int, compression: Compression, gradient: Callable[[Tensor, int], Tensor], steps: int, lr: float, n: int
) -> Tensor:
    """Plain SGD on what the workers are handed out; `gradient` of the parameters and the rank."""
    workers = Workers(compression, [("w", (n, 1))], size)
    x = torch.linspace(-1, 1, n)
    for _ in range(steps):
        x = x - lr * workers.round([gradient(x, rank) for rank in range(size)])[0]
    return x


def curvature(n: int) -> Tensor:
    return torch.linspace(0.5, 2.0, n)


def centre(rank: int, n: int) -> Tensor:
    return torch.sin(torch.arange(n) * (rank + 1.0))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("which", ["sparse", "fraction 1", "dense"])
def test_at_density_one_without_masking_it_is_momentum_sgd(which: str, nesterov: bool) -> None:
    n, size = 60, 3
    compression: Compression = {
        "sparse": dgc(NEARLY_ONE, momentum=0.8, nesterov=nesterov, masking=False),
        "fraction 1": dgc(1.0, momentum=0.8, nesterov=nesterov),
        "dense": DenseMomentum(0.8, nesterov),
    }[which]
    got = train(size, compression, lambda x, rank: curvature(n) * (x - centre(rank, n)), 15, 0.1, n)
    x = torch.nn.Parameter(torch.linspace(-1, 1, n))
    optimizer = torch.optim.SGD([x], lr=0.1, momentum=0.8, nesterov=nesterov)
    for _ in range(15):
        x.grad = curvature(n) * (x.detach() - torch.stack([centre(rank, n) for rank in range(size)]).mean(0))
        optimizer.step()
    torch.testing.assert_close(got, x.detach(), rtol=1e-4, atol=1e-5)


def test_with_masking_density_one_has_no_momentum() -> None:
    """Why fraction=1 goes the dense way: what is sent loses its u, so all of it does."""
    workers = Workers(dgc(NEARLY_ONE, masking=True), SHAPES, 2)
    for seed in range(3):
        gradients = normal(workers, seed)
        torch.testing.assert_close(workers.round(gradients)[0].double(), mean(gradients))
        assert not kept(workers)[0].any()


def test_masking_wipes_u_where_v_was_sent_and_nowhere_else() -> None:
    results = {}
    for masking in (True, False):
        workers = Workers(dgc(0.1, masking=masking), [("w", (30, 30))], 1)
        gradient = normal(workers)[0]
        sent = workers.round([gradient])[0] != 0
        u, v = kept(workers)
        assert int(sent.sum()) == 90
        assert not v[sent].any()
        assert torch.equal(v[~sent], gradient[~sent])
        assert torch.equal(u[~sent], gradient[~sent])
        assert torch.equal(u[sent], torch.zeros(90) if masking else gradient[sent])
        results[masking] = sent
    assert torch.equal(results[True], results[False]), "before the first send masking changes nothing"


def test_the_largest_are_sent() -> None:
    workers = Workers(dgc(0.01), [("a", (100, 100)), ("b", (40, 50))], 1)
    gradient = normal(workers)[0]
    out = workers.round([gradient])[0]
    for part, k in ((slice(0, 10_000), 100), (slice(10_000, 12_000), 20)):
        sent = out[part] != 0
        assert 0.8 * k <= int(sent.sum()) <= k
        assert gradient[part][sent].abs().min() >= gradient[part][~sent].abs().max()
        assert torch.equal(out[part][sent], gradient[part][sent])


def test_warm_up() -> None:
    compression = DGC(0.01, warm_up=(0.5, 0.1, 0.004), warm_up_rounds=2)
    assert [compression.density(t) for t in range(8)] == [0.5, 0.5, 0.1, 0.1, 0.01, 0.01, 0.01, 0.01]
    workers = Workers(compression, [("w", (20, 50))], 2)
    numbers = []
    for seed in range(6):
        before = workers.bytes_sent[0]
        workers.round(normal(workers, seed))
        numbers.append((workers.bytes_sent[0] - before - 8 - 4) // 6)
    assert numbers == [500, 500, 100, 100, 10, 10]
    assert DGC(0.001, warm_up=()).density(0) == 0.001
    assert DGC().density(10**6) == 0.001


def test_a_discarded_round_changes_nothing_and_does_not_count() -> None:
    compression = DGC(0.01, warm_up=(0.5,), warm_up_rounds=2)
    workers, other = (Workers(compression, SHAPES, 3) for _ in range(2))
    for one in (workers, other):
        one.round(normal(one, 1))
    workers.round(normal(workers, 2), commit=False)
    workers.rounds -= 1  # so that both draw the same numbers
    for seed in (3, 4):
        assert torch.equal(workers.round(normal(workers, seed))[0], other.round(normal(other, seed))[0])
    for mine, theirs in zip(kept(workers), kept(other), strict=True):
        assert torch.equal(mine, theirs)


def test_buckets_do_not_matter() -> None:
    together = Workers(dgc(0.002), [("a", (100, 100)), ("b", (99, 101))], 2)
    apart = [Workers(dgc(0.002), [place], 2) for place in (("a", (100, 100)), ("b", (99, 101)))]
    for seed in range(4):
        gradients = normal(together, seed)
        whole = together.round(gradients)[0]
        assert torch.equal(apart[0].round([g[:10_000] for g in gradients])[0], whole[:10_000])
        assert torch.equal(apart[1].round([g[10_000:] for g in gradients])[0], whole[10_000:])


def test_its_memory_survives_a_checkpoint() -> None:
    workers, resumed = (Workers(dgc(0.01), SHAPES, 2) for _ in range(2))
    for seed in range(3):
        workers.round(normal(workers, seed))
    for mine, theirs in zip(resumed.states, workers.states, strict=True):
        mine.own.restore(theirs.own.export(), DGC.flat_kinds)
    resumed.rounds = workers.rounds
    assert torch.equal(resumed.round(normal(resumed, 9))[0], workers.round(normal(workers, 9))[0])


@pytest.mark.parametrize("compression", [dgc(NEARLY_ONE, clip=3.0), DenseMomentum(clip=3.0), dgc(1.0, clip=3.0)])
def test_clipping_is_by_tensor_and_by_worker(compression: DGC | DenseMomentum) -> None:
    workers = Workers(compression, [("large", (2, 50)), ("small", (2, 3)), ("zero", (2, 2))], 4)
    one = torch.cat([torch.full((100,), 2.0), torch.full((6,), 0.1), torch.zeros(4)])  # norms 20, 0.24, 0
    out = workers.round([one] * 4)[0]
    assert out[:100].norm() == pytest.approx(3.0 / math.sqrt(4))
    torch.testing.assert_close(out[100:], one[100:])
    assert (out[:100] == out[0]).all()


def test_clipping_of_huge_and_tiny_gradients() -> None:
    values = torch.cat([torch.full((4,), 3e38), torch.full((4,), 1e-45)])
    layout = Layout.of([("a", (4,)), ("b", (4,))])
    clip_each(values, ExchangeContext(layout, CompressionState(layout, torch.device("cpu"))), 1.0)
    torch.testing.assert_close(values, torch.cat([torch.full((4,), 0.5), torch.full((4,), 1e-45)]))


def distance(compression: DGC, centres: list[Tensor], lr: float, steps: int) -> float:
    """From the optimum of three workers, each a quadratic around its own centre, relative to where they began."""
    n, target = len(centres[0]), torch.stack(centres).mean(0)
    x = train(3, compression, lambda x, rank: curvature(n) * (x - centres[rank]), steps, lr, n)
    return float((x - target).norm() / (torch.linspace(-1, 1, n) - target).norm())


@pytest.mark.parametrize("nesterov", [False, True])
def test_it_converges(nesterov: bool) -> None:
    compression = DGC(0.2, nesterov=nesterov, warm_up=(0.5, 0.25), warm_up_rounds=20)
    assert distance(compression, [centre(0, 60)] * 3, lr=0.02, steps=150) < 0.06


def test_workers_that_disagree_meet_in_the_middle_only_without_masking() -> None:
    """As the docstring says: masked, those with the larger gradients lose their momentum more often, at any rate."""
    centres = [centre(rank, 60) for rank in range(3)]
    far, near = (DGC(0.2, warm_up=(0.5, 0.25), warm_up_rounds=20, masking=masking) for masking in (True, False))
    assert distance(near, centres, lr=0.01, steps=250) < 0.08 < distance(far, centres, lr=0.01, steps=250) < 0.2


@pytest.mark.parametrize("compression", [dgc(0.01), dgc(0.01, nesterov=True, clip=1.0), dgc(1.0), DenseMomentum()])
@pytest.mark.parametrize("kind", ["zero", "one-hot", "constant", "denormal", "huge"])
@pytest.mark.parametrize("named", [SHAPES, [("empty", (0, 4))], []])
def test_awkward_tensors(compression: Compression, kind: str, named: list[tuple[str, tuple[int, ...]]]) -> None:
    workers = Workers(compression, named, 3)
    n = workers.layout.num_elements
    level = {"zero": 0.0, "one-hot": 0.0, "constant": 3.0, "denormal": 1e-44, "huge": 3e38}[kind]
    value = torch.full((n,), level)
    if kind == "one-hot" and n:
        value[n // 2] = 1.0
    out = workers.round([value] * 3)
    if isinstance(compression, DGC) and compression.fraction < 1:  # twice 3e38 is too much for momentum that adds up plainly
        out = workers.round([value] * 3)
    assert all(torch.equal(out[0], other) for other in out)
    assert out[0].isfinite().all()
    if kind != "denormal":  # a third of the smallest number is nothing
        assert bool(out[0].any()) == (n > 0 and kind != "zero")


@pytest.mark.skipif(not has_numba(), reason="the kernel needs Numba")
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 50), st.integers(0, 100), st.booleans(), st.sampled_from([1.0, 1e-42, 2e38]), st.floats(0, 0.99))
def test_kernel_and_reference_give_the_same_bits(n: int, seed: int, nesterov: bool, scale: float, momentum: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    g, u, v = ((torch.rand(n, generator=generator) * 2 - 1) * scale for _ in range(3))
    state = CompressionState(Layout.of([("w", (n,))]), torch.device("cpu"))
    state.own.flat("velocity").copy_(u)
    state.own.flat("accumulated").copy_(v)
    by_kernel = accumulate(g, state.own, momentum, nesterov)
    by_reference = Accumulators(torch.empty(n), torch.empty(n))
    write_accumulated.reference(g, Accumulators(u, v), momentum, nesterov, by_reference)
    assert torch.equal(by_kernel.u, by_reference.u)
    assert torch.equal(by_kernel.v, by_reference.v)
    assert not n or by_reference.v.abs().max() <= LARGEST


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_does_what_it_does_on_a_cpu() -> None:
    layout = Layout.of([("w", (300, 500)), ("v", (40, 50))])
    states = [CompressionState(layout, torch.device(device)) for device in ("cpu", "cuda")]
    gradients = torch.randn(3, layout.num_elements, generator=torch.Generator().manual_seed(0))
    for number, gradient in enumerate(gradients):
        out = []
        for state in states:
            values = gradient.to(state.device)
            steps = dgc(0.01, clip=100.0).exchange(values, ExchangeContext(layout, state, RandomKeys.of_round(number, 0)))
            told = next(steps)
            assert isinstance(told, Gather)
            rows = steps.send(told.row[None])
            assert isinstance(rows, Gather)
            with pytest.raises(StopIteration):
                steps.send(rows.row[None])
            state.commit()
            out.append(values.cpu())
        assert torch.equal(out[0] != 0, out[1] != 0)
        torch.testing.assert_close(*out)


def test_bytes_are_counts_and_pairs() -> None:
    workers = Workers(dgc(0.01), [("a", (100, 100)), ("b", (40, 50))], 4)
    workers.round(normal(workers))
    most = max((state.own.flat("accumulated") == 0).sum().item() for state in workers.states)
    assert workers.bytes_sent == [3 * (8 + 2 * 4 + 6 * most)] * 4
    assert dgc().bytes_sent(workers.layout, 0, 4) is None
    assert dgc().bytes_sent(workers.layout, 0, 1) == 0
    assert DenseMomentum().bytes_sent(workers.layout, 0, 4, "ring") == 2 * 3 * 12_000
    assert DenseMomentum().bytes_sent(workers.layout, 0, 1) == 0


class Liar(Workers):
    """Rank 1 announces a length, or sends bytes, of its own."""

    def __init__(self, length: int | None, flip: bool) -> None:
        super().__init__(dgc(0.01), [("w", (40, 50))], 2)
        self.length, self.flip = length, flip

    def carry_out(self, asked: list[Any]) -> list[Tensor]:
        assert all(isinstance(one, Gather) for one in asked)
        rows = super().carry_out(asked)
        for row in rows:
            if row.dtype == torch.int64 and self.length is not None:
                row[1] = self.length
            if row.dtype == torch.uint8 and self.flip:
                row[1, 2] = 1
        return rows


@pytest.mark.parametrize(
    ("length", "flip", "problem"),
    [(10**12, False, "announces"), (-1, False, "announces"), (None, True, "pairs"), (123, False, "bytes")],
)
def test_what_no_worker_sends_is_refused_with_its_rank(length: int | None, flip: bool, problem: str) -> None:
    liar = Liar(length, flip)
    with pytest.raises(FrameError, match=problem) as caught:
        liar.round(normal(liar))
    assert caught.value.rank == 1


def test_dense_momentum_is_shared_and_can_be_taken_back() -> None:
    workers = Workers(DenseMomentum(0.5), [("b", (4,))], 2)
    ones = [torch.ones(4), 3 * torch.ones(4)]
    assert workers.round(ones)[0].tolist() == [2.0] * 4
    assert workers.round(ones, commit=False)[0].tolist() == [3.0] * 4
    assert workers.round(ones)[1].tolist() == [3.0] * 4
    assert workers.round(ones)[1].tolist() == [3.5] * 4
    assert torch.equal(workers.states[0].shared.export()["b"]["velocity"], torch.full((4,), 3.5))
    assert workers.states[0].own.export() == {}


@pytest.mark.parametrize(
    ("shape", "sparse"),
    [((), False), ((100_000,), False), ((31, 33), False), ((32, 32), True), ((64, 3, 3, 3), True), ((0, 9), False)],
)
def test_which_tensors_go_whole(shape: tuple[int, ...], sparse: bool) -> None:
    compression = DGC(0.01, momentum=0.7, nesterov=True, clip=2.0)
    assert compression.for_parameter("w", shape) == (compression if sparse else DenseMomentum(0.7, nesterov=True, clip=2.0))
    assert DGC(1.0, clip=2.0).for_parameter("w", shape) == DenseMomentum(0.9, clip=2.0)


def test_it_refuses_error_feedback_momentum_and_sums() -> None:
    with pytest.raises(ConfigurationError, match="remembers what it has not said by itself"):
        ErrorFeedback(DGC())
    assert DGC.optimizer_hint is not None
    assert DGC.optimizer_hint.startswith("torch.optim.SGD(")
    assert "do not add up" in str(DGC().refusal("ring"))
    assert DenseMomentum().refusal("ring") is None


def test_it_prints_as_it_is_written() -> None:
    for one in (DGC(), DGC(0.01, 0.5, True, 2.0, (), 7, False), DenseMomentum(0.5, True, 1.0)):
        assert eval(repr(one)) == one
        assert hash(one) == hash(eval(repr(one)))


@pytest.mark.parametrize(
    "arguments",
    [{"fraction": x} for x in (0, 0.0, -0.1, 1.5, math.nan, True, "0.1", None)]
    + [{"momentum": x} for x in (1.0, -0.1, math.nan, False, "0.9")]
    + [{"clip": x} for x in (0.0, -1.0, math.inf, math.nan, True)]
    + [{"warm_up": x} for x in ([0.25], (0.0,), (1.0,), (math.nan,), (True,), 0.25)]
    + [{"warm_up_rounds": x} for x in (0, -1, 2.0, True)]
    + [{"nesterov": 1}, {"masking": 0}],
)
def test_bad_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="Write|Leave"):
        DGC(**arguments)
    if set(arguments) <= {"momentum", "clip", "nesterov"}:
        with pytest.raises(ConfigurationError, match="Write"):
            DenseMomentum(**arguments)
