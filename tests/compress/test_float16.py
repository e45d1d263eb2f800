"""Halves: how they are rounded, that they saturate and their sums do not overflow, and what the decoder refuses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.together import Workers
from stretto.compress.codec import Codec
from stretto.compress.error_feedback import RESIDUAL, ErrorFeedback
from stretto.compress.float16 import Float16
from stretto.compress.kernels import compiling
from stretto.compress.kernels.compiling import has_numba
from stretto.compress.layout import Blocks, Layout
from stretto.compress.random_numbers import RandomKeys
from stretto.errors import MalformedPayload

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
        "constant": torch.full((n,), -0.25),
        "denormal": gaussian(n) * 1e-41,
        "denormal halves": gaussian(n) * 1e-6,
        "huge": gaussian(n).sign() * LARGEST,
        "about the largest half": gaussian(n) * 20 + 65504,
        "any": any_floats(n, 0),
    }


def round_trip(codec: Codec, values: Tensor, blocks: Blocks) -> Tensor:
    return codec.decode(codec.encode(values, blocks, DRAW), blocks, DRAW)


@pytest.mark.parametrize("name", vectors(7))
@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_the_kernel_writes_what_torch_converts_to(name: str, world_size: int) -> None:
    codec = Float16().among(world_size)
    assert isinstance(codec, Float16)
    values, blocks = vectors(1000)[name], whole(1000)
    payload = codec.encode(values, blocks, DRAW)

    expected = values.clamp(-codec.limit, codec.limit).to(torch.float16)
    assert torch.equal(payload.view(torch.int16), expected.view(torch.int16))
    assert torch.equal(payload, codec.encode_in_torch(values, blocks, DRAW))
    assert torch.equal(codec.decode(payload, blocks, DRAW), expected.float())
    assert torch.equal(codec.decode_in_torch(payload, blocks), expected.float())


def test_every_half_is_decoded_as_torch_does_and_encoded_back() -> None:
    halves = torch.arange(65536).to(torch.int16).view(torch.float16)
    halves = halves[halves.isfinite()]
    payload, blocks = halves.view(torch.uint8), whole(len(halves))

    values = Float16().decode(payload, blocks, DRAW)

    assert torch.equal(values.view(torch.int32), halves.float().view(torch.int32))
    assert torch.equal(Float16().encode(values, blocks, DRAW), payload)


@pytest.mark.parametrize("name", vectors(7))
def test_residual_and_sum_in_one_pass_are_those_of_decode(name: str) -> None:
    values, blocks = vectors(501)[name], whole(500, 1)
    payload, said = Float16().encode(values, blocks, DRAW), round_trip(Float16(), values, blocks)
    residual, total = values.clone(), gaussian(501, 9)

    assert torch.equal(Float16().encode_residual(residual, blocks, DRAW), payload)
    Float16().add_decoded(payload, blocks, DRAW, total)

    assert torch.equal(residual, values - said)
    assert torch.equal(total, gaussian(501, 9) + said)


@pytest.mark.parametrize("name", vectors(7))
def test_no_value_is_further_off_than_stated_and_rounding_is_a_contraction(name: str) -> None:
    values = vectors(1000)[name]
    said = round_trip(Float16(), values, whole(1000))
    error, magnitude = (values.double() - said.double()).abs(), values.double().abs()

    assert said.isfinite().all()
    assert (error <= magnitude).all()
    normal = (magnitude >= 2.0**-14) & (magnitude <= 65504)
    assert (error[normal] <= 2.0**-11 * magnitude[normal]).all()
    assert (error[magnitude < 2.0**-14] <= 2.0**-25).all()
    assert (said[magnitude > 65504].abs() == 65504).all()


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_sums_of_several_payloads_do_not_overflow_in_any_order(world_size: int) -> None:
    codec, blocks = Float16().among(world_size), whole(2)
    values = torch.tensor([LARGEST, 1e6]) / world_size
    halves = [codec.encode(values if rank % 3 else -values, blocks, DRAW).view(torch.float16) for rank in range(world_size)]
    halves[0] = halves[-1]

    for order in itertools.islice(itertools.permutations(range(world_size)), 100):
        total = halves[order[0]].clone()
        for rank in order[1:]:
            total += halves[rank]
        assert codec.decode(total.view(torch.uint8), blocks, DRAW).isfinite().all()


@pytest.mark.parametrize("world_size", [2, 64, 1000])
def test_sums_of_the_largest_of_many_stay_finite(world_size: int) -> None:
    codec, blocks = Float16().among(world_size), whole(1)
    one = codec.encode(torch.tensor([LARGEST]), blocks, DRAW).view(torch.float16)

    total = one.clone()
    for _ in range(world_size - 1):
        total += one

    assert codec.decode(total.view(torch.uint8), blocks, DRAW).item() > 20000


def test_length_is_two_bytes_each() -> None:
    for sizes in [(), (0,), (1,), (5, 0, 7)]:
        blocks = whole(*sizes)
        assert len(Float16().encode(torch.zeros(sum(sizes)), blocks, DRAW)) == Float16().num_bytes(blocks) == 2 * sum(sizes)


def test_what_is_sent_for_a_tensor_does_not_depend_on_its_neighbours() -> None:
    first, second = gaussian(30), gaussian(50, 1)
    both = round_trip(Float16(), torch.cat([first, second]), whole(30, 50))

    assert torch.equal(both[:30], round_trip(Float16(), first, whole(30)))
    assert torch.equal(both[30:], round_trip(Float16(), second, whole(50)))


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=12))
def test_any_bytes_are_decoded_to_finite_values_or_refused(noise: bytes) -> None:
    payload = torch.tensor(list(noise), dtype=torch.uint8)
    blocks = whole(3)
    finite = len(noise) == 6 and bool(payload.view(torch.float16).isfinite().all())

    if finite:
        assert Float16().decode(payload, blocks, DRAW).isfinite().all()
    else:
        with pytest.raises(MalformedPayload):
            Float16().decode(payload, blocks, DRAW)


@pytest.mark.parametrize("half", [float("inf"), float("-inf"), float("nan")])
def test_halves_that_are_not_finite_are_refused_wherever_they_lie(half: float) -> None:
    for position in [0, 17, 99]:
        halves = torch.ones(100, dtype=torch.float16)
        halves[position] = half
        for decode in (
            lambda payload: Float16().decode(payload, whole(100), DRAW),
            lambda payload: Float16().add_decoded(payload, whole(100), DRAW, torch.zeros(100)),
            lambda payload: Float16().decode_in_torch(payload, whole(100)),
        ):
            with pytest.raises(MalformedPayload, match="not finite"):
                decode(halves.view(torch.uint8))


def test_a_payload_at_an_odd_address_is_decoded_all_the_same() -> None:
    payload = Float16().encode(gaussian(9), whole(9), DRAW)
    shifted = torch.zeros(19, dtype=torch.uint8)
    shifted[1:] = payload

    assert torch.equal(Float16().decode(shifted[1:], whole(9), DRAW), Float16().decode(payload, whole(9), DRAW))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_error_feedback_loses_nothing_but_the_rounding_of_sums(size: int) -> None:
    workers = Workers(ErrorFeedback(Float16()), SHAPES, size)
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
    assert lost < (1e-6 if size == 1 else 1e-3)  # one worker adds nothing up


def test_it_prints_as_it_is_written_and_equal_ones_are_equal() -> None:
    assert repr(ErrorFeedback(Float16())) == "ErrorFeedback(codec=Float16())"
    assert eval(repr(Float16())) == Float16()
    assert len({Float16(), Float16()}) == 1


def test_it_works_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    values, blocks = any_floats(300, 1), whole(300)
    expected, residual, total = round_trip(Float16(), values, blocks), values.clone(), torch.ones(300)
    monkeypatch.setattr(compiling, "has_numba", lambda: False)

    payload = Float16().encode_residual(residual, blocks, DRAW)
    Float16().add_decoded(payload, blocks, DRAW, total)

    assert torch.equal(Float16().decode(payload, blocks, DRAW), expected)
    assert torch.equal(residual, values - expected)
    assert torch.equal(total, 1 + expected)


@pytest.mark.skipif(not has_numba(), reason="Numba is not installed")
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_kernel_and_reference_agree_to_the_bit_on_any_floats(seed: int) -> None:
    values, blocks = any_floats(500, seed), whole(500)

    assert torch.equal(Float16().encode(values, blocks, DRAW), Float16().encode_in_torch(values, blocks, DRAW))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", vectors(7))
def test_on_a_gpu_bytes_and_values_are_those_of_the_cpu(name: str) -> None:
    values, blocks = vectors(801)[name], whole(600, 0, 1, 200)
    payload, said = Float16().encode(values, blocks, DRAW), round_trip(Float16(), values, blocks)
    on_gpu = values.cuda()

    assert torch.equal(Float16().encode_residual(on_gpu, blocks, DRAW).cpu(), payload)
    assert torch.equal(on_gpu.cpu(), values - said)
    assert torch.equal(Float16().decode(payload.cuda(), blocks, DRAW).cpu(), said)
