"""The dynamic tree: its table, the nearest code, how far off values may be, and what the decoder refuses."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.together import Workers
from stretto.compress import dynamic8
from stretto.compress.codec import Codec
from stretto.compress.dynamic8 import Dynamic8
from stretto.compress.error_feedback import RESIDUAL, ErrorFeedback
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
        "huge": gaussian(n).sign() * LARGEST,
        "one huge": gaussian(n).index_fill(0, torch.tensor([n // 3]), LARGEST),
        "ties": torch.tensor([1.0, *dynamic8.halfway()]).repeat(n)[:n],
        "beside ties": torch.tensor([1.0, *dynamic8.halfway()]).repeat(n)[:n].view(torch.int32).add(1).view(torch.float32),
        "spread": gaussian(n) * 10.0 ** torch.arange(n).remainder(60).sub(35),
        "any": any_floats(n, 0),
    }


def round_trip(codec: Codec, values: Tensor, blocks: Blocks, draw: RandomKeys = DRAW) -> Tensor:
    return codec.decode(codec.encode(values, blocks, draw), blocks, draw)


def reference(values: Tensor, blocks: Blocks) -> Tensor:
    return Dynamic8().encode_in_torch(values, blocks, DRAW)


def largest_of_each(values: Tensor, blocks: Blocks) -> Tensor:
    """For every value the largest magnitude in its block."""
    parts = [values[a:b].abs().max().expand(b - a) for a, b in zip(blocks.bounds[:-1], blocks.bounds[1:], strict=True)]
    return torch.cat(parts) if parts else values.abs()


codecs = pytest.mark.parametrize("codec", [Dynamic8(), Dynamic8(block=7), Dynamic8(block=1)], ids=repr)
sized = st.lists(st.integers(0, 40), max_size=4)


def test_the_table_is_that_of_the_paper() -> None:
    codes = dynamic8.table()

    assert len(codes) == len(set(np.array(codes, np.float32))) == 256
    assert list(codes) == sorted(codes)
    assert codes[dynamic8.ZERO] == 0 and codes[255] == 1
    assert all(codes[127 - k] == -codes[127 + k] for k in range(128))
    assert -1 not in codes
    for e in range(7):
        edges = np.linspace(0.1, 1, 2**e + 1)
        decade = codes[127 + 2**e : 127 + 2 ** (e + 1)]
        np.testing.assert_allclose(decade, (edges[:-1] + edges[1:]) / 2 * 10.0 ** (e - 6), rtol=1e-12)


def test_the_cells_do_not_depend_on_the_default_type() -> None:
    expected, default = dynamic8.cells(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        cells = dynamic8.cells.__wrapped__()
    finally:
        torch.set_default_dtype(default)
    assert torch.equal(cells.entries, expected.entries) and cells.first == expected.first and cells.last == expected.last


@codecs
@pytest.mark.parametrize("name", vectors(7))
def test_the_kernel_writes_and_reads_what_the_reference_does(codec: Dynamic8, name: str) -> None:
    values, blocks = vectors(801)[name], cut(codec, 600, 0, 1, 200)
    payload = codec.encode(values, blocks, DRAW)

    assert torch.equal(payload, reference(values, blocks))
    assert torch.equal(codec.decode(payload, blocks, DRAW), codec.decode_in_torch(payload, blocks))


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), sizes=sized, block=st.integers(1, 20), exponent=st.integers(-149, 127))
def test_kernel_and_reference_agree_to_the_bit_on_any_floats(seed: int, sizes: list[int], block: int, exponent: int) -> None:
    codec = Dynamic8(block=block)
    blocks = cut(codec, *sizes)
    for values in (any_floats(sum(sizes), seed), gaussian(sum(sizes), seed).clamp(-1, 1) * 2.0**exponent):
        payload = codec.encode(values, blocks, DRAW)
        assert torch.equal(payload, reference(values, blocks))
        assert codec.decode(payload, blocks, DRAW).isfinite().all()


def test_every_value_gets_the_nearest_code_and_of_two_the_lower() -> None:
    codes = torch.tensor(dynamic8.table())
    values = torch.cat([torch.ones(1), torch.rand(3000, generator=torch.Generator().manual_seed(2)) * 2 - 1])
    values[1001:2001] *= 1e-3
    values[2001:] *= 1e-5
    written = Dynamic8().encode(values, cut(Dynamic8(), 3001), DRAW)[4:].long()
    distance = (values[:, None].double() - codes.double()).abs()

    assert (distance.gather(1, written[:, None])[:, 0] <= distance.amin(1) + 1e-7 * values.abs()).all()
    tied = torch.tensor([1.0, *dynamic8.halfway()])
    assert Dynamic8().encode(tied, cut(Dynamic8(), 256), DRAW)[5:].tolist() == list(range(255))


@pytest.mark.parametrize(
    ("low", "relative"), [(-1, 0.062), (-2, 0.11), (-3, 0.181), (-4, 0.28), (-5, 0.47), (-6, 0.711)], ids=str
)
def test_no_value_is_further_off_than_stated(low: int, relative: float) -> None:
    magnitudes = torch.logspace(low, low + 1, 4000)
    for sign in (1, -1):
        values = torch.cat([torch.ones(1), sign * magnitudes])
        error = (values - round_trip(Dynamic8(block=4001), values, cut(Dynamic8(block=4001), 4001))).abs()[1:]
        assert (error <= 0.0071).all()
        assert (error <= relative * magnitudes * (1 + 1e-3)).all()
        assert error.max() > 0 and (error / magnitudes).max() > relative * 0.9, "the bound is tight"


@pytest.mark.parametrize("name", vectors(7))
def test_it_is_a_contraction_whatever_the_values(name: str) -> None:
    values, blocks = vectors(1000)[name], cut(Dynamic8(), 1000)
    said = round_trip(Dynamic8(), values, blocks)
    error, largest = (values.double() - said.double()).abs(), largest_of_each(values, blocks).double()

    assert said.isfinite().all()
    assert (error <= values.double().abs() * (1 + 1e-6) + 2.0**-149).all()
    assert (error <= 0.0071 * largest + 2.0**-149).all()


def test_of_gaussian_values_little_is_lost() -> None:
    values = gaussian(100_000)
    lost = (values - round_trip(Dynamic8(), values, cut(Dynamic8(), len(values)))).norm() ** 2 / values.norm() ** 2
    assert 1e-4 < lost < 3e-4


def test_encoding_again_changes_nothing_where_the_largest_is_positive() -> None:
    values, blocks = gaussian(500), cut(Dynamic8(), 500)
    values[3], values[4] = 5.0, -4.9
    payload = Dynamic8().encode(values, blocks, DRAW)
    assert torch.equal(Dynamic8().encode(Dynamic8().decode(payload, blocks, DRAW), blocks, DRAW), payload)

    payload = Dynamic8().encode(-values, blocks, DRAW)
    assert Dynamic8().decode(payload, blocks, DRAW).min().item() == pytest.approx(-0.993 * 5, rel=1e-3)


def test_small_values_beside_a_large_one_keep_their_size() -> None:
    values = torch.cat([torch.ones(1), torch.full((99,), 1e-3)])
    assert (round_trip(Dynamic8(), values, cut(Dynamic8(), 100))[1:] / 1e-3 - 1).abs().max() < 0.1


def test_bytes_are_as_the_docstring_says() -> None:
    codec = Dynamic8(block=3)
    payload = codec.encode(torch.tensor([2.0, -2.0, 0.0, -5e-324, 0.0]), cut(codec, 5), DRAW)

    assert bytes(payload.tolist()) == struct.pack("<2f5B", 2.0, 0.0, 255, 0, 127, 127, 127)


@codecs
@pytest.mark.parametrize("name", vectors(7))
def test_residual_and_sum_in_one_pass_are_those_of_decode(codec: Dynamic8, name: str) -> None:
    values, blocks = vectors(501)[name], cut(codec, 500, 1)
    payload, said = codec.encode(values, blocks, DRAW), round_trip(codec, values, blocks)
    residual, total = values.clone(), gaussian(501, 9)

    assert torch.equal(codec.encode_residual(residual, blocks, DRAW), payload)
    codec.add_decoded(payload, blocks, DRAW, total)

    assert torch.equal(residual, values - said)
    assert torch.equal(total, gaussian(501, 9) + said)


@codecs
def test_length_is_one_byte_each_and_four_per_block(codec: Dynamic8) -> None:
    for sizes in [(), (0,), (1,), (5, 0, 300)]:
        blocks = cut(codec, *sizes)
        expected = sum(sizes) + 4 * sum(-(-size // codec.block) for size in sizes)
        assert len(codec.encode(torch.zeros(sum(sizes)), blocks, DRAW)) == codec.num_bytes(blocks) == expected


@codecs
def test_what_is_sent_for_a_tensor_does_not_depend_on_its_neighbours(codec: Dynamic8) -> None:
    first, second = gaussian(300), 100 * gaussian(500, 1)
    layouts = [Layout.of(named) for named in ([("a", (300,)), ("b", (500,))], [("a", (300,))], [("b", (500,))])]
    together, *alone = (codec.blocks(layout) for layout in layouts)
    said = round_trip(codec, torch.cat([first, second]), together)

    assert torch.equal(said[:300], round_trip(codec, first, alone[0]))
    assert torch.equal(said[300:], round_trip(codec, second, alone[1]))


def refused(payload: Tensor, codec: Dynamic8, blocks: Blocks) -> str | None:
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
    codec = Dynamic8(block=4)
    message = refused(torch.tensor(list(noise), dtype=torch.uint8), codec, cut(codec, 7, 1))
    assert message is not None or len(noise) == 20


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 8 * 20 - 1), st.integers(0, 1000))
def test_a_flipped_bit_is_decoded_to_finite_values_or_refused(bit: int, seed: int) -> None:
    codec = Dynamic8(block=4)
    blocks = cut(codec, 7, 1)
    payload = codec.encode(gaussian(8, seed), blocks, DRAW)
    payload[bit // 8] ^= 1 << bit % 8
    refused(payload, codec, blocks)


@pytest.mark.parametrize(
    ("scale", "codes"),
    [(-1.0, (127, 127)), (-0.0, (127, 127)), (float("inf"), (3, 3)), (float("nan"), (3, 3)), (0.0, (127, 128))],
)
def test_what_no_encoder_writes_is_refused(scale: float, codes: tuple[int, int]) -> None:
    codec = Dynamic8(block=2)
    payload = torch.tensor(list(struct.pack("<2f4B", 1.0, scale, 255, 1, *codes)), dtype=torch.uint8)

    assert refused(payload, codec, cut(codec, 4)) is not None


def test_a_payload_at_an_odd_address_is_decoded_all_the_same() -> None:
    blocks = cut(Dynamic8(), 300)
    payload = Dynamic8().encode(gaussian(300), blocks, DRAW)
    shifted = torch.zeros(len(payload) + 1, dtype=torch.uint8)
    shifted[1:] = payload

    assert torch.equal(Dynamic8().decode(shifted[1:], blocks, DRAW), Dynamic8().decode(payload, blocks, DRAW))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_error_feedback_conserves_what_was_given(size: int) -> None:
    workers = Workers(ErrorFeedback(Dynamic8(block=64)), SHAPES, size)
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
    assert eval(repr(Dynamic8(block=64))) == Dynamic8(block=64)
    assert repr(ErrorFeedback(Dynamic8())) == "ErrorFeedback(codec=Dynamic8(block=4096))"


@pytest.mark.parametrize("block", [0, -1, True, 2.0, float("nan"), "256", None])
def test_a_block_without_values_is_refused(block: object) -> None:
    with pytest.raises(ConfigurationError, match="block=4096"):
        Dynamic8(block=block)  # type: ignore[arg-type]


@pytest.mark.skipif(not has_numba(), reason="Numba is not installed")
@codecs
def test_it_works_without_numba(codec: Dynamic8, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_on_a_gpu_bytes_and_values_are_those_of_the_cpu(codec: Dynamic8, name: str) -> None:
    values, blocks = vectors(801)[name], cut(codec, 600, 0, 1, 200)
    payload, said = codec.encode(values, blocks, DRAW), round_trip(codec, values, blocks)
    on_gpu = values.cuda()

    assert torch.equal(codec.encode_residual(on_gpu, blocks, DRAW).cpu(), payload)
    assert torch.equal(on_gpu.cpu(), values - said)
    assert torch.equal(codec.decode(payload.cuda(), blocks, DRAW).cpu(), said)
