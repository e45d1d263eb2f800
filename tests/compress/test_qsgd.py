from __future__ import annotations

from itertools import product
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress import few_bits as laws
from compress.few_bits import DRAW, KINDS, flat, gaussian, kinds, said
from compress.together import Workers
from stretto.compress.ef21 import EF21
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.layout import Layout
from stretto.compress.qsgd import QSGD, Norm
from stretto.compress.random_numbers import RandomKeys
from stretto.errors import ConfigurationError

NORMS: tuple[Norm, ...] = get_args(Norm)
WIDTHS = list(range(2, 9))
CODECS = [QSGD(bits, bucket, norm) for (bits, norm), bucket in zip(product(WIDTHS, NORMS), [512, 100, 10**6] * 5, strict=False)]
FEW = [QSGD(), QSGD(bits=2, bucket=100), QSGD(bits=8, bucket=1), QSGD(bits=3, bucket=100, norm="l2")]


def test_the_bytes() -> None:
    """Values on the levels leave nothing to the dice: s = 7, sign in the lowest bit."""
    codec, layout = QSGD(bits=4, bucket=3), flat(5)
    payload = codec.encode(torch.tensor([7.0, -7.0, -0.0, 0.0, 0.0]), codec.blocks(layout), DRAW)

    assert payload[:8].view(torch.float32).tolist() == [7.0, 0.0]
    assert payload[8:].tolist() == [0b1111_1110, 0b0000, 0b0000_0000]


def test_the_bytes_of_a_width_that_does_not_divide_eight() -> None:
    codec, layout = QSGD(bits=3, bucket=5), flat(5)
    payload = codec.encode(torch.tensor([4.0, -4.0, 0.0, 4.0, -4.0]), codec.blocks(layout), DRAW)

    assert int.from_bytes(bytes(payload[4:].tolist()), "little") == 0b111_110_000_111_110


def test_length() -> None:
    laws.assert_length(QSGD(bits=4, bucket=100), flat(251), 3 * 4 + 50 + 50 + 26)
    laws.assert_length(QSGD(bits=3, bucket=100), flat(250), 3 * 4 + 38 + 38 + 19)
    laws.assert_length(QSGD(bits=8), flat(600), 2 * 4 + 600)
    laws.assert_length(QSGD(), Layout.of([]), 0)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_kernels_are_the_reference(codec: QSGD) -> None:
    layout = Layout.of(laws.SHAPES)
    laws.assert_kernels_are_the_reference(codec, gaussian(layout.num_elements), layout)


@given(
    shapes=laws.shapes,
    bits=st.sampled_from(WIDTHS),
    bucket=st.integers(1, 20),
    norm=st.sampled_from(NORMS),
    kind=st.sampled_from(KINDS),
)
@settings(max_examples=25, deadline=None)
def test_kernels_are_the_reference_on_any_shape(
    shapes: list[tuple[int, ...]], bits: int, bucket: int, norm: Norm, kind: str
) -> None:
    layout = Layout.of((str(number), shape) for number, shape in enumerate(shapes))
    values = kinds(max(1, layout.num_elements))[kind][: layout.num_elements]
    laws.assert_kernels_are_the_reference(QSGD(bits, bucket, norm), values, layout)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("codec", FEW, ids=repr)
def test_finite_for_all_that_is_finite(codec: QSGD, kind: str) -> None:
    laws.assert_finite(codec, kinds(333)[kind])


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"denormal"}))  # there levels lie closer than numbers do
@pytest.mark.parametrize("norm", NORMS)
def test_a_value_is_off_by_less_than_a_level_and_keeps_its_sign(kind: str, norm: Norm) -> None:
    values = kinds(333)[kind]
    decoded = said(QSGD(bits=4, norm=norm), values)
    unit = values.abs().max() if norm == "max" else values.double().square().sum().sqrt().clamp(max=laws.LARGEST)

    assert ((decoded.double() - values.double()).abs() <= unit.double() / 7 * (1 + 1e-6)).all()
    assert (decoded * values.sign() >= 0).all()
    assert (decoded[values == 0] == 0).all()


@pytest.mark.parametrize("bits,norm", [(2, "max"), (3, "l2"), (4, "max"), (4, "l2"), (8, "max")])
def test_unbiased(bits: int, norm: Norm) -> None:
    values = (torch.rand(300, generator=torch.Generator().manual_seed(1)) * 0.9 + 0.1) * gaussian(300).sign()
    rows = values.double().abs().view(3, 100)
    step = (rows.max(1).values if norm == "max" else rows.square().sum(1).sqrt()).repeat_interleave(100) / (2 ** (bits - 1) - 1)
    part = (values.double().abs() / step).frac()

    laws.assert_unbiased(QSGD(bits, 100, norm), values, step.square() * part * (1 - part))


@pytest.mark.parametrize("kind", ["gaussian", "sparse", "one-hot", "constant", "steep"])
@pytest.mark.parametrize("codec", FEW, ids=repr)
def test_variance(codec: QSGD, kind: str) -> None:
    values = kinds(500)[kind]
    errors = [(said(codec, values, draw=RandomKeys.of_round(t, 0)) - values).double().square().sum() for t in range(50)]
    levels, numel = 2 ** (codec.bits - 1) - 1, min(codec.bucket, 500)
    omega = min(numel / (4 * levels**2), numel**0.5 / levels)

    assert torch.stack(errors).mean() <= omega * values.double().square().sum()


def test_the_largest_value_is_the_better_unit() -> None:
    values = gaussian(1 << 14)
    by_largest, by_norm = ((said(QSGD(norm=norm), values) - values).square().sum() / values.square().sum() for norm in NORMS)

    assert by_largest < 0.05 and 1 < by_norm < 2


@pytest.mark.parametrize("codec", FEW, ids=repr)
def test_buckets_do_not_matter(codec: QSGD) -> None:
    laws.assert_buckets_do_not_matter(codec)


@pytest.mark.parametrize("norm", NORMS)
def test_draws_by_round(norm: Norm) -> None:
    laws.assert_draws_by_round(QSGD(norm=norm))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_error_feedback_conserves(size: int) -> None:
    laws.assert_conserved(QSGD(bits=3, bucket=8), size)


ALLOWED = [QSGD(5), QSGD(5, norm="l2"), QSGD(6), QSGD(8), QSGD(4, bucket=256), QSGD(3, bucket=60), QSGD(3, bucket=35, norm="l2")]
REFUSED = [
    QSGD(),
    QSGD(2),
    QSGD(4, norm="l2"),
    QSGD(4, bucket=393),
    QSGD(3, bucket=73),
    QSGD(3, bucket=36, norm="l2"),
    QSGD(2, 9),
]


@pytest.mark.parametrize("codec", REFUSED, ids=repr)
def test_error_feedback_is_refused_where_residuals_may_grow(codec: QSGD) -> None:
    for around in (ErrorFeedback, EF21):
        with pytest.raises(ConfigurationError, match=r"(?s)may grow without bound.*rite QSGD\(.*alone.*contraction"):
            around(codec)


@pytest.mark.parametrize("codec", ALLOWED, ids=repr)
def test_error_feedback_is_allowed_where_it_is_a_contraction(codec: QSGD) -> None:
    """Also for the worst of vectors: one value of 1, and the others where they err most for their size."""
    assert ErrorFeedback(codec).codec == codec
    ratio = _ratio_at_worst(codec)
    assert 0 < ratio < 1


def test_the_limit_is_that_of_the_worst_vector() -> None:
    assert QSGD(3, bucket=72).no_contraction is None and QSGD(3, bucket=73).no_contraction is not None
    assert QSGD(4, bucket=392).no_contraction is None and QSGD(4, bucket=393).no_contraction is not None


def test_with_few_bits_it_is_no_contraction() -> None:
    assert _ratio_at_worst(QSGD(4)) > 1.1

    residual = torch.zeros(512)
    for number in range(50):
        residual += gaussian(512, number)
        residual -= said(QSGD(4, norm="l2"), residual, draw=RandomKeys.of_round(number, 0))
    assert residual.norm() > 100 * 512**0.5  # a hundred gradients long


def _ratio_at_worst(codec: QSGD, rounds: int = 50) -> float:
    """(sqrt(1 + a) - 1) / 2 with "max", for a = d / s^2."""
    levels, numel = 2 ** (codec.bits - 1) - 1, codec.bucket
    a = (numel - 1) / levels**2
    values = torch.full((numel,), ((1 + a) ** 0.5 - 1) / a / levels)
    values[0] = 1.0
    errors = [(said(codec, values, draw=RandomKeys.of_round(t, 0)) - values).double().square().sum() for t in range(rounds)]
    return float(torch.stack(errors).mean() / values.double().square().sum())


def test_residuals_stay_bounded_where_they_are_allowed() -> None:
    """|e| <= r / (1 - r) |g| for gradients of one length, r = sqrt(omega)."""
    workers = Workers(ErrorFeedback(QSGD(5)), [("w", (512,))], 3)
    for number in range(100):
        workers.round([gaussian(512, 3 * number + rank) / 512**0.5 for rank in range(3)])
    r = 0.41**0.5
    for rank in range(3):
        assert laws.left(workers, rank).norm() < 1.1 * r / (1 - r)
        assert laws.left(workers, rank, "server_residual").norm() < 1.1 * r / (1 - r)


@given(data=st.data(), bits=st.sampled_from(WIDTHS), bucket=st.integers(1, 12))
@settings(max_examples=50, deadline=None)
def test_any_bytes_are_read_or_refused(data: st.DataObject, bits: int, bucket: int) -> None:
    laws.assert_any_bytes_are_read_or_refused(QSGD(bits, bucket), data)


def test_what_no_encoder_writes_is_refused() -> None:
    codec, blocks = QSGD(bits=3, bucket=10), QSGD(bits=3, bucket=10).blocks(flat(20))
    payload = codec.encode(torch.zeros(20), blocks, DRAW)
    laws.assert_refused(codec, payload[:-1], blocks, "bytes came where")
    for place, value, why in ((8, 1, "code"), (15, 1 << 3, "code"), (11, 1 << 6, "padding"), (15, 1 << 7, "padding")):
        broken = payload.clone()
        broken[place] = value
        laws.assert_refused(codec, broken, blocks, why)
    for norm in (-1.0, float("nan"), float("inf")):
        broken = payload.clone()
        broken[4:8] = torch.tensor([norm]).view(torch.uint8)
        laws.assert_refused(codec, broken, blocks, "scale")


@pytest.mark.parametrize("bits", [1, 9, 0, 4.0, True, None, "4"])
def test_bad_widths(bits: object) -> None:
    with pytest.raises(ConfigurationError, match="Write QSGD"):
        QSGD(bits=bits)  # type: ignore[arg-type]


@pytest.mark.parametrize("bucket", [0, -1, 1.5, True, None])
def test_bad_buckets(bucket: object) -> None:
    with pytest.raises(ConfigurationError, match="Write QSGD"):
        QSGD(bucket=bucket)  # type: ignore[arg-type]


@pytest.mark.parametrize("norm", ["l1", 2, None, ["max"]])
def test_bad_norms(norm: object) -> None:
    with pytest.raises(ConfigurationError, match="Write norm"):
        QSGD(norm=norm)  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_repr_evaluates(codec: QSGD) -> None:
    assert eval(repr(codec)) == codec


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("codec", FEW, ids=repr)
def test_the_same_on_cuda(codec: QSGD) -> None:
    laws.assert_the_same_on_cuda(codec)
