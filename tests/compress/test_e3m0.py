from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress import few_bits as laws
from compress.few_bits import DRAW, KINDS, flat, gaussian, kinds, said
from compress.together import Workers
from stretto.compress.e3m0 import E3M0
from stretto.compress.ef21 import EF21
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.layout import Layout
from stretto.errors import ConfigurationError

CODECS = [E3M0(), E3M0(block=100), E3M0(block=9000), E3M0(block=1)]
LEVELS = [2.0**-exponent for exponent in range(6, -1, -1)]


def test_the_bytes() -> None:
    """Levels 7 to 1 are 1 to 1/64 of the largest, the lowest bit is the sign, and the lower half of a byte comes first."""
    values = [4.0, -2.0, 1.0, 0.5, 0.25, -0.125, 0.0625, -0.0, 0.0]
    codec, layout = E3M0(block=8), flat(9)
    payload = codec.encode(torch.tensor(values), codec.blocks(layout), DRAW)

    assert payload[:8].view(torch.float32).tolist() == [4.0, 0.0]
    assert payload[8:].tolist() == [0b1101_1110, 0b1000_1010, 0b0101_0110, 0b0000_0010, 0b0000]
    assert codec.decode(payload, codec.blocks(layout), DRAW).tolist() == values


def test_every_value_becomes_the_nearest_level() -> None:
    steps = torch.arange(-4000, 4001) / 4000 * 3.7
    codes = 3.7 * torch.tensor([0.0, *LEVELS, *(-level for level in LEVELS)])
    nearest = (steps[:, None].double() - codes.double()).abs().min(1).values

    decoded = said(E3M0(block=len(steps)), steps)
    torch.testing.assert_close((decoded - steps).abs().double(), nearest, rtol=1e-6, atol=1e-9)


def test_halfway_the_larger_level_is_taken() -> None:
    halfway = [1 / 128, *(3 / 4 * level for level in LEVELS[1:])]
    values = torch.tensor([1.0, *halfway, *(-value for value in halfway)])
    below = torch.nextafter(values, torch.zeros(()))

    assert said(E3M0(), values).tolist() == [1.0, *LEVELS, *(-level for level in LEVELS)]
    below[0] = 1.0
    lower = [0.0, *LEVELS[:-1]]
    assert said(E3M0(), below).tolist() == [1.0, *lower, *(-level for level in lower)]


def test_length() -> None:
    laws.assert_length(E3M0(block=100), flat(251), 3 * 4 + 50 + 50 + 26)
    laws.assert_length(E3M0(), flat(600), 3 * 4 + 300)
    laws.assert_length(E3M0(), Layout.of([]), 0)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_kernels_are_the_reference(codec: E3M0) -> None:
    layout = Layout.of(laws.SHAPES)
    laws.assert_kernels_are_the_reference(codec, gaussian(layout.num_elements), layout)


@given(shapes=laws.shapes, block=st.integers(1, 20), kind=st.sampled_from(KINDS), exponent=st.integers(-149, 127))
@settings(max_examples=50, deadline=None)
def test_kernels_are_the_reference_on_any_shape(shapes: list[tuple[int, ...]], block: int, kind: str, exponent: int) -> None:
    layout = Layout.of((str(number), shape) for number, shape in enumerate(shapes))
    values = kinds(max(1, layout.num_elements))[kind][: layout.num_elements]
    scaled = (values * 2.0**exponent).clamp(-laws.LARGEST, laws.LARGEST)
    laws.assert_kernels_are_the_reference(E3M0(block), scaled, layout)


@given(bits=st.lists(st.integers(0, 2**32 - 1), max_size=60), block=st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_kernels_are_the_reference_on_any_floats(bits: list[int], block: int) -> None:
    values = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    laws.assert_kernels_are_the_reference(E3M0(block), values.nan_to_num(1.0), flat(len(bits)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_finite_for_all_that_is_finite(codec: E3M0, kind: str) -> None:
    laws.assert_finite(codec, kinds(333)[kind])


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"denormal"}))  # there a 64th is no number
def test_a_value_is_off_by_a_third_and_keeps_its_sign(kind: str) -> None:
    values = kinds(333)[kind]
    decoded, largest = said(E3M0(block=333), values), values.abs().max().double()
    error, size = (decoded.double() - values.double()).abs(), values.double().abs()

    assert (error <= size * (1 + 1e-6)).all()
    assert (error <= size / 3 * (1 + 1e-6))[size >= largest * 3 / 256].all()
    assert (error <= largest / 128 * (1 + 1e-6))[size < largest * 3 / 256].all()
    assert (decoded * values.sign() >= 0).all()
    assert (decoded[values == 0] == 0).all()
    assert (decoded == values)[size == largest].all()


@pytest.mark.parametrize("block", [1, 16, 256, 4096])
def test_the_error_is_bounded_by_the_length(block: int) -> None:
    """Also for the worst of vectors: one value, and others that just become 0; or all of them 3/4 of a power of two."""
    below = torch.full((block,), 1 / 128 - 1e-9)
    thirds = torch.full((block,), 0.75)
    below[0] = thirds[0] = 1.0
    for values in (below, thirds, *kinds(block).values()):
        squares = values.double().square().sum()
        error = (said(E3M0(block), values).double() - values.double()).square().sum()
        assert error <= (1 / 9 + (block - 1) / 2**14) * squares * (1 + 1e-6)


def test_what_the_docstring_says_of_gaussian_values() -> None:
    values = gaussian(1 << 16)
    decoded, squares = said(E3M0(), values), values.square().sum()

    assert 0.036 < (decoded - values).square().sum() / squares < 0.040
    assert 0.960 < (decoded @ values) / squares < 0.970


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"denormal"}))
def test_what_was_decoded_encodes_to_the_same(kind: str) -> None:
    values, blocks = kinds(333)[kind], E3M0().blocks(flat(333))
    payload = E3M0().encode(values, blocks, DRAW)

    assert torch.equal(E3M0().encode(E3M0().decode(payload, blocks, DRAW), blocks, DRAW), payload)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_buckets_do_not_matter(codec: E3M0) -> None:
    laws.assert_buckets_do_not_matter(codec)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_error_feedback_conserves(size: int) -> None:
    laws.assert_conserved(E3M0(block=8), size)


def test_residuals_stay_bounded() -> None:
    """|e| <= r / (1 - r) |g| for gradients of one length, r^2 the share that the error may have."""
    workers = Workers(ErrorFeedback(E3M0()), [("w", (512,))], 3)
    for number in range(100):
        workers.round([gaussian(512, 3 * number + rank) / 512**0.5 for rank in range(3)])
    r = (1 / 9 + 255 / 2**14) ** 0.5
    for rank in range(3):
        assert laws.left(workers, rank).norm() < 1.1 * r / (1 - r)
        assert laws.left(workers, rank, "server_residual").norm() < 1.1 * r / (1 - r)
    assert EF21(E3M0()).codec == E3M0()


@given(data=st.data(), block=st.integers(1, 12))
@settings(max_examples=50, deadline=None)
def test_any_bytes_are_read_or_refused(data: st.DataObject, block: int) -> None:
    laws.assert_any_bytes_are_read_or_refused(E3M0(block), data)


def test_what_no_encoder_writes_is_refused() -> None:
    codec, blocks = E3M0(block=9), E3M0(block=9).blocks(flat(18))
    payload = codec.encode(torch.zeros(18), blocks, DRAW)
    laws.assert_refused(codec, payload[:-1], blocks, "bytes came where")
    codes, padding = ((8, 1), (8, 1 << 4), (17, 1)), ((12, 1 << 4), (17, 1 << 7))
    for place, value, why in ((*at, why) for why, places in (("code", codes), ("padding", padding)) for at in places):
        broken = payload.clone()
        broken[place] = value
        laws.assert_refused(codec, broken, blocks, why)
    for scale in (-1.0, float("nan"), float("inf")):
        broken = payload.clone()
        broken[4:8] = torch.tensor([scale]).view(torch.uint8)
        laws.assert_refused(codec, broken, blocks, "scale")


def test_it_does_not_depend_on_the_default_type() -> None:
    values = gaussian(300)
    with laws.in_torch():
        expected = said(E3M0(), values)
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.equal(said(E3M0(), values), expected)
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("block", [0, -1, 1.5, True, None])
def test_bad_blocks(block: object) -> None:
    with pytest.raises(ConfigurationError, match="Write E3M0"):
        E3M0(block=block)  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_repr_evaluates(codec: E3M0) -> None:
    assert eval(repr(codec)) == codec


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_the_same_on_cuda(codec: E3M0) -> None:
    laws.assert_the_same_on_cuda(codec)
