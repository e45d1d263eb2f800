"""bfloat16: both roundings, that it saturates and sums do not overflow, and what the decoder refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.together import Workers
from stretto.compress.bfloat16 import BFloat16
from stretto.compress.codec import Codec
from stretto.compress.error_feedback import RESIDUAL, ErrorFeedback
from stretto.compress.kernels import compiling
from stretto.compress.kernels.compiling import has_numba
from stretto.compress.layout import Blocks, Layout
from stretto.compress.random_numbers import RandomKeys
from stretto.errors import ConfigurationError, MalformedPayload

DRAW = RandomKeys.of_round(3, 1)
LARGEST = torch.finfo(torch.float32).max
SHAPES = [("matrix", (30, 40)), ("bias", (40,)), ("empty", (0, 3)), ("scalar", ())]


def whole(*sizes: int) -> Blocks:
    return Layout.of([(f"tensor {number}", (size,)) for number, size in enumerate(sizes)]).whole()


def gaussian(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def any_floats(n: int, seed: int) -> Tensor:
    """Finite floats with bits at random: every exponent is as likely as any other."""
    bits = np.random.default_rng(seed).integers(0, 2**32, n, dtype=np.uint32)
    values = torch.from_numpy(bits.view(np.float32))
    return torch.where(values.isfinite(), values, torch.tensor(LARGEST))


def vectors(n: int) -> dict[str, Tensor]:
    one_hot = torch.zeros(n)
    one_hot[n // 2] = -3.0
    return {
        "gaussian": gaussian(n),
        "sparse": gaussian(n) * (gaussian(n, 1) > 2),
        "zero": torch.zeros(n),
        "one-hot": one_hot,
        "constant": torch.full((n,), -0.3),
        "denormal": gaussian(n) * 1e-41,
        "huge": gaussian(n).sign() * LARGEST,
        "ties": torch.arange(n).remainder(9).sub(4) * 2.0**-8 + 1,
        "any": any_floats(n, 0),
    }


def round_trip(codec: Codec, values: Tensor, blocks: Blocks, draw: RandomKeys = DRAW) -> Tensor:
    return codec.decode(codec.encode(values, blocks, draw), blocks, draw)


def reference(codec: BFloat16, values: Tensor, blocks: Blocks) -> Tensor:
    return codec.encode_in_torch(values, blocks, DRAW)


both = pytest.mark.parametrize("codec", [BFloat16(), BFloat16(stochastic=True)], ids=repr)


@both
@pytest.mark.parametrize("name", vectors(7))
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_kernel_writes_what_the_reference_writes(codec: BFloat16, name: str, world_size: int) -> None:
    one = codec.among(world_size)
    assert isinstance(one, BFloat16)
    values, blocks = vectors(1001)[name], whole(600, 0, 1, 400)
    payload = one.encode(values, blocks, DRAW)

    assert torch.equal(payload, reference(one, values, blocks))
    assert torch.equal(one.decode(payload, blocks, DRAW), one.decode_in_torch(payload, blocks))


@pytest.mark.parametrize("name", vectors(7))
def test_rounding_to_nearest_is_that_of_torch_but_does_not_overflow(name: str) -> None:
    values = vectors(1000)[name]
    largest = torch.finfo(torch.bfloat16).max
    expected = values.to(torch.bfloat16).clamp(-largest, largest)

    assert torch.equal(BFloat16().encode(values, whole(1000), DRAW).view(torch.int16), expected.view(torch.int16))


@both
def test_every_bfloat16_is_decoded_as_torch_does_and_encoded_back(codec: BFloat16) -> None:
    halves = torch.arange(65536).to(torch.int16).view(torch.bfloat16)
    halves = halves[halves.isfinite()]
    payload, blocks = halves.view(torch.uint8), whole(len(halves))

    values = codec.decode(payload, blocks, DRAW)

    assert torch.equal(values.view(torch.int32), halves.float().view(torch.int32))
    assert torch.equal(codec.encode(values, blocks, DRAW), payload)


@both
@pytest.mark.parametrize("name", vectors(7))
def test_residual_and_sum_in_one_pass_are_those_of_decode(codec: BFloat16, name: str) -> None:
    values, blocks = vectors(501)[name], whole(500, 1)
    payload, said = codec.encode(values, blocks, DRAW), round_trip(codec, values, blocks)
    residual, total = values.clone(), gaussian(501, 9)

    assert torch.equal(codec.encode_residual(residual, blocks, DRAW), payload)
    codec.add_decoded(payload, blocks, DRAW, total)

    assert torch.equal(residual, values - said)
    assert torch.equal(total, gaussian(501, 9) + said)


@both
@pytest.mark.parametrize("name", vectors(7))
def test_no_value_is_further_off_than_stated(codec: BFloat16, name: str) -> None:
    values = vectors(1000)[name]
    said = round_trip(codec, values, whole(1000))
    error, magnitude = (values.double() - said.double()).abs(), values.double().abs()
    times = 2 if codec.stochastic else 1

    assert said.isfinite().all()
    normal = magnitude >= 2.0**-126
    assert (error[normal] <= times * 2.0**-8 * magnitude[normal]).all()
    assert (error[~normal] <= times * 2.0**-134).all()


def test_at_random_the_mean_is_right_and_to_nearest_it_is_not() -> None:
    values, blocks = torch.tensor([1 + 2.0**-10, -1 - 2.0**-9, 3.005, -7e-3, 1e20]).repeat(20), whole(100)
    draws = [RandomKeys.of_round(number, 0) for number in range(500)]
    mean = torch.stack([round_trip(BFloat16(stochastic=True), values, blocks, draw) for draw in draws]).double().mean(0)
    off = (mean - values.double()).reshape(20, 5) / values[:5].double()

    spread = 2.0**-7 / 2 / np.sqrt(500)  # at most, of one element
    assert (off.abs() < 5 * spread).all()
    assert (off.mean(0).abs() < 5 * spread / np.sqrt(20)).all()
    nearest = round_trip(BFloat16(), values, blocks)
    assert nearest[0] == 1, "or the test has no power"


def test_draws_differ_by_round_worker_and_element_and_repeat_for_the_same() -> None:
    codec, values, blocks = BFloat16(stochastic=True), torch.full((4096,), 1 + 2.0**-8), whole(4096)
    rounds = [codec.encode(values, blocks, RandomKeys.of_round(number, rank)) for number, rank in [(0, 0), (1, 0), (0, 1)]]

    assert torch.equal(rounds[0], codec.encode(values, blocks, RandomKeys.of_round(0, 0)))
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        differing = (rounds[one].view(torch.int16) != rounds[other].view(torch.int16)).float().mean()
        assert 0.4 < differing < 0.6


@both
@pytest.mark.parametrize("world_size", [2, 3, 7, 99])
def test_sums_of_the_largest_of_several_stay_finite(codec: BFloat16, world_size: int) -> None:
    one = codec.among(world_size).encode(torch.tensor([LARGEST / world_size]), whole(1), DRAW).view(torch.bfloat16)

    total = one.clone()
    for _ in range(world_size - 1):
        total += one

    assert codec.decode(total.view(torch.uint8), whole(1), DRAW).item() > 1e38


@both
def test_what_is_sent_for_a_tensor_does_not_depend_on_its_neighbours(codec: BFloat16) -> None:
    first, second = gaussian(30), gaussian(50, 1)
    together = Layout.of([("first", (30,)), ("second", (50,))]).whole()
    said = round_trip(codec, torch.cat([first, second]), together)

    assert torch.equal(said[:30], round_trip(codec, first, Layout.of([("first", (30,))]).whole()))
    assert torch.equal(said[30:], round_trip(codec, second, Layout.of([("second", (50,))]).whole()))


@both
def test_length_is_two_bytes_each(codec: BFloat16) -> None:
    for sizes in [(), (0,), (1,), (5, 0, 7)]:
        blocks = whole(*sizes)
        assert len(codec.encode(torch.zeros(sum(sizes)), blocks, DRAW)) == codec.num_bytes(blocks) == 2 * sum(sizes)


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=12))
def test_any_bytes_are_decoded_to_finite_values_or_refused(noise: bytes) -> None:
    payload = torch.tensor(list(noise), dtype=torch.uint8)
    finite = len(noise) == 6 and bool(payload.view(torch.bfloat16).isfinite().all())

    if finite:
        assert BFloat16().decode(payload, whole(3), DRAW).isfinite().all()
    else:
        with pytest.raises(MalformedPayload):
            BFloat16().decode(payload, whole(3), DRAW)


@pytest.mark.parametrize("half", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_refused_wherever_it_lies(half: float) -> None:
    for position in [0, 17, 99]:
        halves = torch.ones(100, dtype=torch.bfloat16)
        halves[position] = half
        for decode in (
            lambda payload: BFloat16().decode(payload, whole(100), DRAW),
            lambda payload: BFloat16().add_decoded(payload, whole(100), DRAW, torch.zeros(100)),
            lambda payload: BFloat16().decode_in_torch(payload, whole(100)),
        ):
            with pytest.raises(MalformedPayload, match="not finite"):
                decode(halves.view(torch.uint8))


def test_a_payload_at_an_odd_address_is_decoded_all_the_same() -> None:
    payload = BFloat16().encode(gaussian(9), whole(9), DRAW)
    shifted = torch.zeros(19, dtype=torch.uint8)
    shifted[1:] = payload

    assert torch.equal(BFloat16().decode(shifted[1:], whole(9), DRAW), BFloat16().decode(payload, whole(9), DRAW))


@both
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_error_feedback_loses_nothing_but_the_rounding_of_sums(codec: BFloat16, size: int) -> None:
    workers = Workers(ErrorFeedback(codec), SHAPES, size)
    n, generator = workers.layout.num_elements, torch.Generator().manual_seed(1)
    given_in, got = torch.zeros(n), torch.zeros(n)
    for _ in range(20):
        gradients = [torch.randn(n, generator=generator) for _ in range(size)]
        given_in += sum(gradients) / size
        outputs = workers.round(gradients)
        got += outputs[0]
        assert all(torch.equal(output, outputs[0]) for output in outputs)

    left = torch.stack([state.own.flat(RESIDUAL) for state in workers.states]).mean(0)
    lost = (got + left - given_in).norm() / given_in.norm()
    assert lost < (1e-6 if size == 1 else 8e-3)  # one worker adds nothing up


def test_it_prints_as_it_is_written() -> None:
    for codec in (BFloat16(), BFloat16(stochastic=True)):
        assert eval(repr(codec)) == codec
    assert BFloat16() != BFloat16(stochastic=True)


@pytest.mark.parametrize("stochastic", [1, 0, "yes", None])
def test_what_is_neither_true_nor_false_is_refused(stochastic: object) -> None:
    with pytest.raises(ConfigurationError, match="True or False"):
        BFloat16(stochastic=stochastic)  # type: ignore[arg-type]


@both
def test_it_works_without_numba(codec: BFloat16, monkeypatch: pytest.MonkeyPatch) -> None:
    values, blocks = any_floats(300, 1), whole(300)
    expected, residual, total = round_trip(codec, values, blocks), values.clone(), torch.ones(300)
    monkeypatch.setattr(compiling, "has_numba", lambda: False)

    payload = codec.encode_residual(residual, blocks, DRAW)
    codec.add_decoded(payload, blocks, DRAW, total)

    assert torch.equal(codec.decode(payload, blocks, DRAW), expected)
    assert torch.equal(residual, values - expected)
    assert torch.equal(total, 1 + expected)


@pytest.mark.skipif(not has_numba(), reason="Numba is not installed")
@both
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), sizes=st.lists(st.integers(0, 40), max_size=4))
def test_kernel_and_reference_agree_to_the_bit_on_any_floats(codec: BFloat16, seed: int, sizes: list[int]) -> None:
    values, blocks = any_floats(sum(sizes), seed), whole(*sizes)

    assert torch.equal(codec.encode(values, blocks, DRAW), reference(codec, values, blocks))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@both
@pytest.mark.parametrize("name", vectors(7))
def test_on_a_gpu_bytes_and_values_are_those_of_the_cpu(codec: BFloat16, name: str) -> None:
    values, blocks = vectors(801)[name], whole(600, 0, 1, 200)
    payload, said = codec.encode(values, blocks, DRAW), round_trip(codec, values, blocks)
    on_gpu = values.cuda()

    assert torch.equal(codec.encode_residual(on_gpu, blocks, DRAW).cpu(), payload)
    assert torch.equal(on_gpu.cpu(), values - said)
    assert torch.equal(codec.decode(payload.cuda(), blocks, DRAW).cpu(), said)
