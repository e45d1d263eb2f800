from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress import few_bits as laws
from compress.few_bits import DRAW, KINDS, flat, gaussian, kinds, said
from stretto.compress.ef21 import EF21
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.layout import Layout
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.tern_grad import TernGrad
from stretto.errors import ConfigurationError

CODECS = [TernGrad(), TernGrad(clip=None), TernGrad(clip=1, block=100), TernGrad(clip=None, block=1), TernGrad(block=None)]


def test_the_bytes() -> None:
    """Values of the largest magnitude and zeros leave nothing to the dice."""
    codec, layout = TernGrad(clip=None, block=5), flat(7)
    payload = codec.encode(torch.tensor([2.0, -2.0, 0.0, -0.0, -2.0, 0.0, 0.0]), codec.blocks(layout), DRAW)

    assert payload[:8].view(torch.float32).tolist() == [2.0, 0.0]
    assert payload[8:].tolist() == [0b00_00_11_10, 0b11, 0]


def test_length() -> None:
    laws.assert_length(TernGrad(block=100), flat(250), 3 * 4 + 25 + 25 + 13)
    laws.assert_length(TernGrad(block=None), Layout.of([("a", (50, 5)), ("b", (3,))]), 2 * 4 + 63 + 1)
    laws.assert_length(TernGrad(), Layout.of([]), 0)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_kernels_are_the_reference(codec: TernGrad) -> None:
    layout = Layout.of(laws.SHAPES)
    laws.assert_kernels_are_the_reference(codec, gaussian(layout.num_elements), layout)


@given(shapes=laws.shapes, block=st.integers(1, 20), kind=st.sampled_from(KINDS), clip=st.sampled_from([None, 0.5, 2.5, 1e30]))
@settings(max_examples=25, deadline=None)
def test_kernels_are_the_reference_on_any_shape(shapes: list[tuple[int, ...]], block: int, kind: str, clip: float | None) -> None:
    layout = Layout.of((str(number), shape) for number, shape in enumerate(shapes))
    values = kinds(max(1, layout.num_elements))[kind][: layout.num_elements]
    laws.assert_kernels_are_the_reference(TernGrad(clip, block), values, layout)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_finite_for_all_that_is_finite(codec: TernGrad, kind: str) -> None:
    laws.assert_finite(codec, kinds(333)[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_three_values_and_no_sign_changes(kind: str) -> None:
    values = kinds(333)[kind]
    decoded = said(TernGrad(clip=None), values)

    assert set(decoded.abs().tolist()) <= {0.0, float(values.abs().max())}
    assert (decoded * values.sign() >= 0).all()
    assert (decoded[values == 0] == 0).all()


def test_clipping_is_to_standard_deviations() -> None:
    values = gaussian(1000)
    sigma = values.double().square().mean().sqrt()

    assert said(TernGrad(clip=1.5), values).abs().max() == (1.5 * sigma).float()
    assert said(TernGrad(clip=100), values).abs().max() == values.abs().max()


@pytest.mark.parametrize("numel", [1, 50])
def test_equal_values_are_not_clipped(numel: int) -> None:
    values = torch.full((numel,), -0.7)

    assert torch.equal(said(TernGrad(), values), values)


def test_unbiased_without_clipping() -> None:
    values = (torch.rand(300, generator=torch.Generator().manual_seed(1)) * 0.9 + 0.1) * gaussian(300).sign()
    scales = values.double().abs().view(3, 100).max(1).values.repeat_interleave(100)
    variance = scales * values.double().abs() - values.double().square()

    laws.assert_unbiased(TernGrad(clip=None, block=100), values, variance)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"denormal", "largest", "all largest"}))  # squares in range
def test_variance(kind: str) -> None:
    values, codec = kinds(256)[kind], TernGrad(clip=None)
    errors = [(said(codec, values, draw=RandomKeys.of_round(t, 0)) - values).double().square().sum() for t in range(50)]
    square = values.double().square().sum()
    expected = float(values.abs().max()) * values.double().abs().sum() - square

    assert expected <= (256**0.5 - 1) / 2 * square + 1e-4
    torch.testing.assert_close(torch.stack(errors).mean(), expected, rtol=0.1, atol=1e-4)


def test_worst_case_of_the_variance() -> None:
    """One value of 1 and the others 1 / (1 + sqrt(n)): the bound is reached."""
    values = torch.full((256,), 1 / 17, dtype=torch.float64)
    values[0] = 1
    omega = values.abs().sum() / values.square().sum() - 1

    assert float(omega) == pytest.approx((256**0.5 - 1) / 2)


def test_saying_it_again() -> None:
    once = said(TernGrad(clip=None, block=100), gaussian(333))

    assert torch.equal(said(TernGrad(clip=None, block=100), once), once)


@pytest.mark.parametrize("codec", [TernGrad(), TernGrad(clip=None, block=None)], ids=repr)
def test_buckets_do_not_matter(codec: TernGrad) -> None:
    laws.assert_buckets_do_not_matter(codec)


def test_draws_by_round() -> None:
    laws.assert_draws_by_round(TernGrad())


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_error_feedback_is_refused(codec: TernGrad) -> None:
    for around in (ErrorFeedback, EF21):
        with pytest.raises(ConfigurationError, match=r"(?s)grows and is not said.*rite TernGrad\(.*alone.*contraction"):
            around(codec)


def test_what_would_be_left_over_grows() -> None:
    codec, residual = TernGrad(clip=None), torch.zeros(4096)
    for number in range(50):
        residual += gaussian(4096, number)
        residual -= said(codec, residual, draw=RandomKeys.of_round(number, 0))

    assert residual.norm() > 10 * 4096**0.5  # ten gradients long


@given(data=st.data(), block=st.integers(1, 12))
@settings(max_examples=50, deadline=None)
def test_any_bytes_are_read_or_refused(data: st.DataObject, block: int) -> None:
    laws.assert_any_bytes_are_read_or_refused(TernGrad(block=block), data)


def test_what_no_encoder_writes_is_refused() -> None:
    codec, blocks = TernGrad(block=10), TernGrad(block=10).blocks(flat(20))
    payload = codec.encode(gaussian(20), blocks, DRAW)
    laws.assert_refused(codec, payload[:-1], blocks, "bytes came where")
    for place, value, why in ((8, 0b01_00_00, "code"), (13, 0b1_00_00, "padding"), (10, 0b10_00_00, "padding")):
        broken = payload.clone()
        broken[place] |= value
        laws.assert_refused(codec, broken, blocks, why)
    for scale in (-1.0, float("nan"), float("inf")):
        broken = payload.clone()
        broken[4:8] = torch.tensor([scale]).view(torch.uint8)
        laws.assert_refused(codec, broken, blocks, "scale")


@pytest.mark.parametrize("clip", [0, -1.0, float("nan"), float("inf"), True, "2.5"])
def test_bad_clips(clip: object) -> None:
    with pytest.raises(ConfigurationError, match="Write TernGrad"):
        TernGrad(clip=clip)  # type: ignore[arg-type]


@pytest.mark.parametrize("block", [0, -1, 1.5, True, "4096"])
def test_bad_blocks(block: object) -> None:
    with pytest.raises(ConfigurationError, match="Write TernGrad"):
        TernGrad(block=block)  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_repr_evaluates(codec: TernGrad) -> None:
    assert eval(repr(codec)) == codec


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_same_on_cuda() -> None:
    laws.assert_the_same_on_cuda(TernGrad(block=100))
