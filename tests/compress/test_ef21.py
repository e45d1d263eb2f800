"""EF21: estimates and their mean, geometric convergence, momentum, participation, resuming."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from compress.together import Workers
from stretto.compress.bfloat16 import BFloat16
from stretto.compress.codec import Codec, Compression
from stretto.compress.ef21 import EF21, ESTIMATE, MEAN, VELOCITY
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.float16 import Float16
from stretto.compress.none import NoCompression
from stretto.compress.qsgd import QSGD
from stretto.compress.random_k import RandomK
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.sign import Sign
from stretto.compress.state import SERVER, CompressionState
from stretto.compress.top_k import TopK
from stretto.errors import ConfigurationError

SHAPES: list[tuple[str, tuple[int, ...]]] = [("w", (8, 9)), ("bias", (11,)), ("empty", (0,)), ("v", (40,)), ("scalar", ())]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def gradients(workers: Workers, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(workers.layout.num_elements, generator=generator) for _ in workers.states]


def mean_of(workers: Workers, kind: str) -> Tensor:
    return torch.stack([state.own.flat(kind) for state in workers.states]).mean(0)


def unsaid(workers: Workers) -> Tensor:
    """What the workers that combine blocks have not said of their means, as one vector."""
    exported = [state.own.export() for state in workers.states]
    kept = [
        torch.stack([one[place.name].get(SERVER, torch.zeros(place.shape)).flatten() for one in exported])
        for place in workers.layout.places
    ]
    return torch.cat([rows.sum(0) for rows in kept])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("codec", [TopK(0.1), RandomK(0.2), Sign(8), QSGD(5, 64)], ids=repr)
@pytest.mark.parametrize("options", [{}, {"momentum": 0.3}, {"participation": 0.5}], ids=str)
def test_the_mean_estimate_is_the_mean_of_the_estimates(codec: Codec, size: int, options: dict[str, float]) -> None:
    workers = Workers(EF21(codec, **options), SHAPES, size)
    for number in range(12):
        first, *others = workers.round(gradients(workers, number))
        assert all(torch.equal(first, other) for other in others)
        assert all(torch.equal(first, state.shared.flat(MEAN)) for state in workers.states)
        both = first + unsaid(workers) if codec.splits and size > 2 else first
        torch.testing.assert_close(both, mean_of(workers, ESTIMATE), atol=1e-5, rtol=1e-5)
    assert first.norm() > 0.1


def test_the_first_estimate_is_the_compressed_gradient() -> None:
    codec = TopK(0.1)
    workers = Workers(EF21(codec), SHAPES, 2)
    grads = gradients(workers)
    result = workers.round(grads)[0]
    blocks = codec.blocks(workers.layout)
    said = [codec.decode(codec.encode(grad, blocks, RandomKeys()), blocks, RandomKeys()) for grad in grads]
    assert torch.equal(result, (said[0] + said[1]) / 2)
    assert all(torch.equal(state.own.flat(ESTIMATE), one) for state, one in zip(workers.states, said, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_without_loss_it_is_the_mean(size: int) -> None:
    workers = Workers(EF21(TopK(1.0)), SHAPES, size)
    for number in range(4):
        grads = gradients(workers, number)
        torch.testing.assert_close(workers.round(grads)[0], torch.stack(grads).mean(0), atol=1e-6, rtol=1e-5)
        assert all(torch.equal(state.own.flat(ESTIMATE), grad) for state, grad in zip(workers.states, grads, strict=True))


def test_estimates_of_fixed_gradients_converge_geometrically() -> None:
    workers = Workers(EF21(TopK(0.25)), [("w", (64,))], 3)
    grads = gradients(workers)
    for number in range(1, 4):
        workers.round(grads)
        for state, grad in zip(workers.states, grads, strict=True):
            assert (grad - state.own.flat(ESTIMATE)).norm() ** 2 <= 0.75**number * grad.norm() ** 2
    torch.testing.assert_close(workers.round(grads)[0], torch.stack(grads).mean(0))  # the fourth quarter was the last


@pytest.mark.parametrize("codec", [Sign(8), QSGD(5, 64)], ids=repr)
def test_means_compressed_too_converge_to_the_mean(codec: Codec) -> None:
    workers = Workers(EF21(codec), SHAPES, 4)
    grads = gradients(workers)
    mean = torch.stack(grads).mean(0)
    errors = [float((workers.round(grads)[0] - mean).norm() / mean.norm()) for _ in range(80)]
    assert errors[-1] < 0.02 * errors[0]


def test_momentum_estimates_the_running_mean() -> None:
    workers = Workers(EF21(TopK(1.0), momentum=0.25), SHAPES, 2)
    expected: list[Tensor] = []
    for number in range(4):
        grads = gradients(workers, number)
        expected = [0.75 * v + 0.25 * grad for v, grad in zip(expected, grads, strict=True)] if number else grads
        torch.testing.assert_close(workers.round(grads)[0], torch.stack(expected).mean(0), atol=1e-6, rtol=1e-5)
    for state, v in zip(workers.states, expected, strict=True):
        torch.testing.assert_close(state.own.flat(VELOCITY), v)


def test_momentum_of_one_is_none() -> None:
    plain, other = Workers(EF21(TopK(0.1)), SHAPES, 3), Workers(EF21(TopK(0.1), momentum=1.0), SHAPES, 3)
    for number in range(5):
        assert torch.equal(plain.round(gradients(plain, number))[0], other.round(gradients(plain, number))[0])


def test_those_who_do_not_take_part_keep_their_estimates() -> None:
    workers = Workers(EF21(TopK(0.1), momentum=0.5, participation=0.3), SHAPES, 4)
    took_part = 0
    for number in range(100):
        before = [(state.own.flat(ESTIMATE).clone(), state.own.flat(VELOCITY).clone()) for state in workers.states]
        workers.round(gradients(workers, number))
        for state, (estimate, velocity) in zip(workers.states, before, strict=True):
            moved = not torch.equal(state.own.flat(ESTIMATE), estimate)
            assert moved == (not torch.equal(state.own.flat(VELOCITY), velocity))
            took_part += moved
    assert abs(took_part - 120) < 5 * math.sqrt(400 * 0.3 * 0.7)


def test_a_discarded_round_leaves_everything() -> None:
    workers, other = (Workers(EF21(Sign(8), momentum=0.5), SHAPES, 3) for _ in range(2))
    for number in range(4):
        workers.round(gradients(workers, number))
        other.round(gradients(other, number))
    other.round(gradients(other, 99), commit=False)
    other.rounds -= 1  # the round is repeated
    assert torch.equal(workers.round(gradients(workers, 4))[0], other.round(gradients(other, 4))[0])
    for one, two in zip(workers.states, other.states, strict=True):
        assert all(torch.equal(one.own.flat(kind), two.own.flat(kind)) for kind in (ESTIMATE, VELOCITY, SERVER))
        assert torch.equal(one.shared.flat(MEAN), two.shared.flat(MEAN))


def resumed(workers: Workers, named: list[tuple[str, tuple[int, ...]]]) -> Workers:
    other = Workers(workers.compression, named, len(workers.states))
    for rank, (old, new) in enumerate(zip(workers.states, other.states, strict=True)):
        workers.compression.restore(new, old.own.export(), old.shared.export(), rank, len(workers.states))
        new.rounds = old.rounds
    other.rounds = workers.rounds
    return other


@pytest.mark.parametrize("codec", [TopK(0.1), Sign(8)], ids=repr)
def test_a_resumed_run_has_the_same_bits(codec: Codec) -> None:
    workers = Workers(EF21(codec, momentum=0.5), SHAPES, 3)
    for number in range(5):
        workers.round(gradients(workers, number))
    other = resumed(workers, SHAPES)
    for number in range(5, 10):
        grads = gradients(workers, number)
        assert torch.equal(workers.round(grads)[0], other.round(grads)[0])


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_another_number_of_workers_keeps_the_invariant(size: int) -> None:
    """Each of the new ones is given the mean of the old ones' estimates and its share of what they had not said."""
    workers = Workers(EF21(Sign(8)), SHAPES, 4)
    for number in range(5):
        workers.round(gradients(workers, number))
    given = Workers(EF21(Sign(8)), SHAPES, 1).states[0].own
    given.next_flat(ESTIMATE).copy_(mean_of(workers, ESTIMATE))
    given.next_flat(SERVER).copy_(unsaid(workers) / size)
    given.commit()
    other = Workers(workers.compression, SHAPES, size)
    for rank, state in enumerate(other.states):
        workers.compression.restore(state, given.export(), workers.states[0].shared.export(), rank, size)
    both = other.states[0].shared.flat(MEAN) + unsaid(other)
    torch.testing.assert_close(both, mean_of(other, ESTIMATE), atol=1e-5, rtol=1e-5)


def test_other_buckets_keep_the_invariant() -> None:
    """Other workers combine other blocks then; what they had not said of the old ones must not be lost."""
    workers = Workers(EF21(Sign(8)), SHAPES, 3)
    for number in range(5):
        workers.round(gradients(workers, number))
    assert unsaid(workers).norm() > 0.1
    other = resumed(workers, SHAPES[::-1])
    both = other.states[0].shared.flat(MEAN) + unsaid(other)
    torch.testing.assert_close(both, mean_of(other, ESTIMATE), atol=1e-5, rtol=1e-5)
    grads = gradients(other, 7)
    errors = [float((other.round(grads)[0] - torch.stack(grads).mean(0)).norm()) for _ in range(80)]
    assert errors[-1] < 0.05 * errors[0]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("codec", [TopK(0.1), Sign(8)], ids=repr)
def test_bytes_are_those_of_the_codec(codec: Codec, size: int) -> None:
    workers = Workers(EF21(codec), SHAPES, size)
    workers.round(gradients(workers))
    assert workers.bytes_sent == [EF21(codec).bytes_sent(workers.layout, rank, size) for rank in range(size)]


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-45, 1e38])
def test_awkward_values(value: float) -> None:
    workers = Workers(EF21(TopK(0.1)), SHAPES, 3)
    constant = torch.full((workers.layout.num_elements,), value)
    one_hot = torch.zeros_like(constant)
    one_hot[5] = value
    for _ in range(12):
        result = workers.round([constant, one_hot, constant])[0]
        assert result.isfinite().all()
    expected = torch.stack([constant.double(), one_hot.double(), constant.double()]).mean(0)
    torch.testing.assert_close(result.double(), expected, atol=3e-45, rtol=1e-5)


def test_it_converges_where_workers_disagree() -> None:
    """Least squares, each worker with its own data, constant steps: at the solution their gradients differ and do not vanish."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(4, 30, 20, generator=generator), torch.randn(4, 30, generator=generator)
    solution = torch.linalg.lstsq(inputs.flatten(0, 1), targets.flatten()).solution
    distances = {}
    for compression in (EF21(TopK(0.1)), TopK(0.1)):
        workers, w = Workers(compression, [("w", (20,))], 4), torch.zeros(20)
        for _ in range(200):
            w -= 0.1 * workers.round([x.T @ (x @ w - y) / 30 for x, y in zip(inputs, targets, strict=True)])[0]
        distances[compression] = float((w - solution).norm() / solution.norm())
    corrected, bare = distances.values()
    assert corrected < 1e-3 < 1e-1 < bare


@pytest.mark.parametrize(
    "codec",
    [
        NoCompression(),
        Float16(),
        BFloat16(stochastic=True),
        ErrorFeedback(TopK(0.1)),
        EF21(TopK(0.1)),
        Sign(vote=True),
        TopK,
        None,
    ],
    ids=repr,
)
def test_what_is_no_contraction_is_refused(codec: Compression) -> None:
    with pytest.raises(ConfigurationError, match=r"EF21\(.*\n.*EF21\(TopK"):
        EF21(codec)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["momentum", "participation"])
@pytest.mark.parametrize("value", [0, 1.5, -0.1, math.nan, True, "1"])
def test_arguments_that_cannot_work(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"EF21\\({name}="):
        EF21(TopK(0.1), **{name: value})  # type: ignore[arg-type]


def test_repr_parameters_and_refusals() -> None:
    compression = EF21(TopK(0.1), momentum=0.5)
    assert eval(repr(compression)) == compression
    assert compression.for_parameter("w", (3, 4)) == compression
    assert compression.refusal("ring") is not None
    assert EF21(RandomK(0.1)).refusal("ring") is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_computes_the_same() -> None:
    compression = EF21(TopK(0.1), momentum=0.5)
    here, there = (Workers(compression, SHAPES, 3) for _ in range(2))
    there.states = [CompressionState(there.layout, torch.device("cuda")) for _ in range(3)]
    for number in range(6):
        grads = gradients(here, number)
        expected = here.round(grads)[0]
        first, *others = there.round([grad.cuda() for grad in grads])
        assert all(torch.equal(first, other) for other in others)
        torch.testing.assert_close(first.cpu(), expected, atol=1e-4, rtol=1e-4)
