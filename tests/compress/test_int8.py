"""Signed bytes with scales: exact on their own grid, bounded in error, right in the mean, and what the decoder refuses."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.together import Workers
from stretto.compress import bits, int8
from stretto.compress.codec import Codec
from stretto.compress.error_feedback import RESIDUAL, ErrorFeedback
from stretto.compress.int8 import Int8
from stretto.compress.int8_hop import Int8Hop
from stretto.compress.kernels import compiling
from stretto.compress.kernels.compiling import has_numba
from stretto.compress.layout import Blocks, Layout
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.state import SERVER
from stretto.errors import ConfigurationError, MalformedPayload

DRAW = RandomKeys.of_round(3, 1)
LARGEST = torch.finfo(torch.float32).max
SHAPES = [("matrix", (30, 40)), ("bias", (40,)), ("empty", (0, 3)), ("scalar", ()), ("kernel", (8, 4, 3, 3))]


def cut(codec: Codec, *sizes: int) -> Blocks:
    return codec.blocks(Layout.of([(f"tensor {number}", (size,)) for number, size in enumerate(sizes)]))


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
        "negative zero": -torch.zeros(n),
        "one-hot": one_hot,
        "constant": torch.full((n,), -0.3),
        "denormal": gaussian(n) * 1e-41,
        "smallest": gaussian(n).sign() * 2.0**-149,
        "about the smallest scale": gaussian(n) * 2.0**-126,
        "about 127 of it": gaussian(n) * 2.0**-119,
        "huge": gaussian(n).sign() * LARGEST,
        "one huge": gaussian(n).index_fill(0, torch.tensor([n // 3]), LARGEST),
        "ties": torch.arange(n).remainder(255).sub(127) + 0.5,
        "spread": gaussian(n) * 10.0 ** torch.arange(n).remainder(60).sub(35),
        "any": any_floats(n, 0),
    }


def round_trip(codec: Codec, values: Tensor, blocks: Blocks, draw: RandomKeys = DRAW) -> Tensor:
    return codec.decode(codec.encode(values, blocks, draw), blocks, draw)


def reference(codec: Int8, values: Tensor, blocks: Blocks) -> Tensor:
    return codec.encode_in_torch(values, blocks, DRAW)


def largest_of_each(values: Tensor, blocks: Blocks) -> Tensor:
    """For every value the largest magnitude in its block."""
    parts = [values[a:b].abs().max().expand(b - a) for a, b in zip(blocks.bounds[:-1], blocks.bounds[1:], strict=True)]
    return torch.cat(parts) if parts else values.abs()


codecs = pytest.mark.parametrize("codec", [Int8(), Int8(block=7), Int8(block=16, stochastic=True), Int8(block=1)], ids=repr)
sized = st.lists(st.integers(0, 40), max_size=4)


@codecs
@pytest.mark.parametrize("name", vectors(7))
def test_the_kernel_writes_and_reads_what_the_reference_does(codec: Int8, name: str) -> None:
    values, blocks = vectors(801)[name], cut(codec, 600, 0, 1, 200)
    payload = codec.encode(values, blocks, DRAW)

    assert torch.equal(payload, reference(codec, values, blocks))
    assert torch.equal(codec.decode(payload, blocks, DRAW), codec.decode_in_torch(payload, blocks))


@codecs
@pytest.mark.parametrize("name", vectors(7))
def test_residual_and_sum_in_one_pass_are_those_of_decode(codec: Int8, name: str) -> None:
    values, blocks = vectors(501)[name], cut(codec, 500, 1)
    payload, said = codec.encode(values, blocks, DRAW), round_trip(codec, values, blocks)
    residual, total = values.clone(), gaussian(501, 9)

    assert torch.equal(codec.encode_residual(residual, blocks, DRAW), payload)
    codec.add_decoded(payload, blocks, DRAW, total)

    assert torch.equal(residual, values - said)
    assert torch.equal(total, gaussian(501, 9) + said)


@pytest.mark.parametrize("name", vectors(7))
@pytest.mark.parametrize("block", [1, 7, 256])
def test_encoding_what_was_decoded_gives_the_same_bytes(name: str, block: int) -> None:
    codec = Int8(block=block)
    values, blocks = vectors(701)[name], cut(codec, 700, 1)
    payload = codec.encode(values, blocks, DRAW)

    assert torch.equal(codec.encode(codec.decode(payload, blocks, DRAW), blocks, DRAW), payload)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), sizes=sized, block=st.integers(1, 20), exponent=st.integers(-149, 127))
def test_encoding_what_was_decoded_gives_the_same_bytes_for_any_floats(
    seed: int, sizes: list[int], block: int, exponent: int
) -> None:
    codec = Int8(block=block)
    blocks = cut(codec, *sizes)
    for values in (any_floats(sum(sizes), seed), gaussian(sum(sizes), seed).clamp(-1, 1) * 2.0**exponent):
        payload = codec.encode(values, blocks, DRAW)
        said = codec.decode(payload, blocks, DRAW)
        assert said.isfinite().all()
        assert torch.equal(codec.encode(said, blocks, DRAW), payload)
        assert torch.equal(payload, reference(codec, values, blocks))


@pytest.mark.parametrize("name", vectors(7))
def test_no_value_is_further_off_than_half_a_step(name: str) -> None:
    values, blocks = vectors(1000)[name], cut(Int8(), 1000)
    payload = Int8().encode(values, blocks, DRAW)
    scales = bits.opened(payload, blocks, 8, 1).scales
    error = (values.double() - Int8().decode(payload, blocks, DRAW).double()).abs()
    largest, scale = largest_of_each(values, blocks).double(), scales[blocks.numbers()].double()

    assert (error <= torch.where(scale > 0, scale / 2, 2.0**-127) * (1 + 2.0**-16)).all()
    assert (error <= (largest / 254 * (1 + 2.0**-15)).clamp(min=2.0**-127) * (1 + 2.0**-14)).all()
    assert (error.norm() <= values.double().norm()).all(), "a contraction, whatever the values"


def test_of_gaussian_values_little_is_lost() -> None:
    values = gaussian(100_000)
    lost = (values - round_trip(Int8(), values, cut(Int8(), len(values)))).norm() ** 2 / values.norm() ** 2
    assert 3e-5 < lost < 7e-5


def test_the_largest_of_a_block_has_the_largest_code() -> None:
    blocks = cut(Int8(block=4), 4000)
    payload = Int8(block=4).encode(gaussian(4000), blocks, DRAW)

    assert (payload[4 * len(blocks) :].view(torch.int8).abs().reshape(-1, 4).amax(1) == 127).all()


def test_bytes_are_as_the_docstring_says() -> None:
    codec = Int8(block=3)
    payload = codec.encode(torch.tensor([127.0, -64.5, 0.5, -254.0, 1.0]), cut(codec, 5), DRAW)

    assert bytes(payload.tolist()) == struct.pack("<2f5b", 1.0, 2.0, 127, -64, 0, -127, 0)


@codecs
def test_length_is_one_byte_each_and_four_per_block(codec: Int8) -> None:
    for sizes in [(), (0,), (1,), (5, 0, 300)]:
        blocks = cut(codec, *sizes)
        expected = sum(sizes) + 4 * sum(-(-size // codec.block) for size in sizes)
        assert len(codec.encode(torch.zeros(sum(sizes)), blocks, DRAW)) == codec.num_bytes(blocks) == expected


def test_at_random_the_mean_is_right() -> None:
    codec, values = Int8(block=50, stochastic=True), torch.linspace(-1, 1, 100) ** 3
    blocks, draws = cut(codec, 100), [RandomKeys.of_round(number, 0) for number in range(600)]
    mean = torch.stack([round_trip(codec, values, blocks, draw) for draw in draws]).double().mean(0)
    off = mean - values.double()

    spread = 1 / 127 / 2 / np.sqrt(600)  # at most, of one element
    assert (off.abs() < 5 * spread).all()
    assert off.mean().abs() < 5 * spread / np.sqrt(100)
    nearest = round_trip(Int8(block=50), values, blocks)
    assert (nearest - values).abs().max() > 10 * spread, "or the test has no power"


def test_draws_differ_by_round_and_worker_and_repeat_for_the_same() -> None:
    codec, values = Int8(stochastic=True), torch.full((4096,), 0.5 / 127).index_fill(0, torch.arange(0, 4096, 256), 1.0)
    blocks = cut(codec, 4096)
    rounds = [codec.encode(values, blocks, RandomKeys.of_round(number, rank)) for number, rank in [(0, 0), (1, 0), (0, 1)]]

    assert torch.equal(rounds[0], codec.encode(values, blocks, RandomKeys.of_round(0, 0)))
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        assert 0.4 < (rounds[one] != rounds[other])[64:].float().mean() < 0.6


@codecs
def test_what_is_sent_for_a_tensor_does_not_depend_on_its_neighbours(codec: Int8) -> None:
    first, second = gaussian(300), 100 * gaussian(500, 1)
    layouts = [Layout.of(named) for named in ([("a", (300,)), ("b", (500,))], [("a", (300,))], [("b", (500,))])]
    together, *alone = (codec.blocks(layout) for layout in layouts)
    said = round_trip(codec, torch.cat([first, second]), together)

    assert torch.equal(said[:300], round_trip(codec, first, alone[0]))
    assert torch.equal(said[300:], round_trip(codec, second, alone[1]))


def refused(payload: Tensor, codec: Int8, blocks: Blocks) -> str | None:
    """The message, the same from all three decoders, or None."""
    messages: list[str | None] = []
    for decode in (
        lambda: codec.decode(payload, blocks, DRAW),
        lambda: codec.add_decoded(payload, blocks, DRAW, torch.zeros(blocks.num_elements)),
        lambda: codec.decode_in_torch(payload, blocks),
    ):
        try:
            result = decode()
            assert result is None or result.isfinite().all()
            messages.append(None)
        except MalformedPayload as problem:
            messages.append(str(problem))
    assert len({message is None for message in messages}) == 1
    return messages[0]


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=30))
def test_any_bytes_are_decoded_to_finite_values_or_refused(noise: bytes) -> None:
    codec = Int8(block=4)
    message = refused(torch.tensor(list(noise), dtype=torch.uint8), codec, cut(codec, 7, 1))
    assert message is not None or len(noise) == 20


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 8 * 20 - 1), st.integers(0, 1000))
def test_a_flipped_bit_is_decoded_to_finite_values_or_refused(bit: int, seed: int) -> None:
    codec = Int8(block=4)
    blocks = cut(codec, 7, 1)
    payload = codec.encode(gaussian(8, seed), blocks, DRAW)
    payload[bit // 8] ^= 1 << bit % 8
    refused(payload, codec, blocks)


@pytest.mark.parametrize(
    ("scale", "codes", "reason"),
    [
        (-1.0, (0, 0), "scale"),
        (-0.0, (0, 0), "scale"),
        (float("inf"), (0, 0), "scale"),
        (float("nan"), (0, 0), "scale"),
        (1e37, (0, 0), "too large"),
        (1e-40, (0, 0), "too small"),
        (1 + 2.0**-16, (0, 0), "16 significant bits"),
        (1.0, (5, -128), "-128"),
        (0.0, (0, 1), "zero"),
        (0.0, (-128, 0), ""),
    ],
)
def test_what_no_encoder_writes_is_refused(scale: float, codes: tuple[int, int], reason: str) -> None:
    codec = Int8(block=2)
    payload = torch.tensor(list(struct.pack("<2f4b", 1.0, scale, 127, 1, *codes)), dtype=torch.uint8)

    message = refused(payload, codec, cut(codec, 4))

    assert message is not None and reason in message


def test_the_largest_scale_and_the_smallest_are_read() -> None:
    for scale in (int8.LARGEST_SCALE, int8.SMALLEST_SCALE):
        payload = torch.tensor(list(struct.pack("<Ib", scale, -127)), dtype=torch.uint8)
        assert refused(payload, Int8(), cut(Int8(), 1)) is None
        assert Int8().encode(Int8().decode(payload, cut(Int8(), 1), DRAW), cut(Int8(), 1), DRAW).tolist() == payload.tolist()


def test_a_payload_at_an_odd_address_is_decoded_all_the_same() -> None:
    blocks = cut(Int8(), 300)
    payload = Int8().encode(gaussian(300), blocks, DRAW)
    shifted = torch.zeros(len(payload) + 1, dtype=torch.uint8)
    shifted[1:] = payload

    assert torch.equal(Int8().decode(shifted[1:], blocks, DRAW), Int8().decode(payload, blocks, DRAW))


@pytest.mark.parametrize("codec", [Int8(block=64), Int8(block=64, stochastic=True)], ids=repr)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_error_feedback_conserves_what_was_given(codec: Int8, size: int) -> None:
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
    if size > 2:
        left = left + torch.cat([workers.states[rank].own.flat(SERVER) for rank in range(size)])
    assert (got + left - given_in).norm() / given_in.norm() < 1e-5
    assert left.norm() > 0


def test_it_prints_as_it_is_written() -> None:
    for codec in (Int8(), Int8(block=64, stochastic=True)):
        assert eval(repr(codec)) == codec
    assert repr(ErrorFeedback(Int8(block=64))) == "ErrorFeedback(codec=Int8(block=64, stochastic=False))"


def test_a_ring_may_carry_it_unless_it_rounds_at_random() -> None:
    assert Int8(block=64).hop() == Int8Hop(64)
    assert Int8(stochastic=True).hop() is None


@pytest.mark.parametrize("block", [0, -1, True, 2.0, float("nan"), "256", None])
def test_a_block_without_values_is_refused(block: object) -> None:
    with pytest.raises(ConfigurationError, match="block=256"):
        Int8(block=block)  # type: ignore[arg-type]


@pytest.mark.parametrize("stochastic", [1, 0, "yes", None])
def test_what_is_neither_true_nor_false_is_refused(stochastic: object) -> None:
    with pytest.raises(ConfigurationError, match="True or False"):
        Int8(stochastic=stochastic)  # type: ignore[arg-type]


@pytest.mark.skipif(not has_numba(), reason="Numba is not installed")
@codecs
def test_it_works_without_numba(codec: Int8, monkeypatch: pytest.MonkeyPatch) -> None:
    values, blocks = any_floats(300, 1), cut(codec, 300)
    expected, residual, total = round_trip(codec, values, blocks), values.clone(), torch.ones(300)
    monkeypatch.setattr(compiling, "has_numba", lambda: False)

    payload = codec.encode_residual(residual, blocks, DRAW)
    codec.add_decoded(payload, blocks, DRAW, total)

    assert torch.equal(codec.decode(payload, blocks, DRAW), expected)
    assert torch.equal(residual, values - expected)
    assert torch.equal(total, 1 + expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@codecs
@pytest.mark.parametrize("name", vectors(7))
def test_on_a_gpu_bytes_and_values_are_those_of_the_cpu(codec: Int8, name: str) -> None:
    values, blocks = vectors(801)[name], cut(codec, 600, 0, 1, 200)
    payload, said = codec.encode(values, blocks, DRAW), round_trip(codec, values, blocks)
    on_gpu = values.cuda()

    assert torch.equal(codec.encode_residual(on_gpu, blocks, DRAW).cpu(), payload)
    assert torch.equal(on_gpu.cpu(), values - said)
    assert torch.equal(codec.decode(payload.cuda(), blocks, DRAW).cpu(), said)
