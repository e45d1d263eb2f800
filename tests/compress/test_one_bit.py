from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress import few_bits as laws
from compress.few_bits import DRAW, KINDS, flat, gaussian, kinds, said
from stretto.compress.layout import Layout
from stretto.compress.one_bit import OneBit


def test_the_bytes() -> None:
    layout = Layout.of([("a", (2, 3)), ("b", (3,))])
    values = torch.tensor([-1.0, 3.0, 0.0, 5.0, 6.0, 7.0, -2.0, -4.0, -6.0])
    payload = OneBit().encode(values, OneBit().blocks(layout), DRAW)

    assert payload[:24].view(torch.float32).tolist() == [-1.0, 1.5, 0.0, 6.0, -4.0, 0.0]
    assert payload[24:].tolist() == [0b110, 0b111, 0b000]


def test_a_row_is_what_follows_the_first_dimension() -> None:
    layout = Layout.of([("conv", (4, 3, 2, 2)), ("bias", (5,)), ("scalar", ()), ("none", (0, 7)), ("empty rows", (7, 0))])

    assert OneBit().blocks(layout).lengths.tolist() == [12] * 4 + [5, 1]


def test_length() -> None:
    laws.assert_length(OneBit(), Layout.of([("w", (3, 20)), ("b", (7,))]), 4 * 8 + 3 * 3 + 1)
    laws.assert_length(OneBit(), Layout.of([("narrow", (10, 1))]), 10 * 9)
    laws.assert_length(OneBit(), Layout.of([]), 0)


def test_kernels_are_the_reference() -> None:
    layout = Layout.of(laws.SHAPES)
    laws.assert_kernels_are_the_reference(OneBit(), gaussian(layout.num_elements), layout)


@given(shapes=laws.shapes, kind=st.sampled_from(KINDS))
@settings(max_examples=25, deadline=None)
def test_kernels_are_the_reference_on_any_shape(shapes: list[tuple[int, ...]], kind: str) -> None:
    layout = Layout.of((str(number), shape) for number, shape in enumerate(shapes))
    laws.assert_kernels_are_the_reference(OneBit(), kinds(max(1, layout.num_elements))[kind][: layout.num_elements], layout)


@pytest.mark.parametrize("kind", KINDS)
def test_finite_for_all_that_is_finite(kind: str) -> None:
    laws.assert_finite(OneBit(), kinds(333)[kind])


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"denormal"}))  # there the means themselves are rounded
def test_contraction(kind: str) -> None:
    values = kinds(640)[kind]
    layout = Layout.of([("w", (5, 128))])
    error = (values.double() - said(OneBit(), values, layout).double()).view(5, 128).square().sum(1)
    rows = values.double().view(5, 128)
    above = rows >= 0
    told = (rows * above).sum(1).square() / above.sum(1).clamp(min=1) + (rows * ~above).sum(1).square() / (~above).sum(1).clamp(
        min=1
    )
    square = rows.square().sum(1)

    torch.testing.assert_close(error, square - told, rtol=1e-5, atol=1e-6 * float(square.max()))
    assert (error <= (1 - 1 / 128) * square * (1 + 1e-6)).all()
    assert kind != "gaussian" or abs(1 - float(error.sum() / square.sum()) - 0.637) < 0.05


def test_the_mean_of_each_row_is_kept() -> None:
    values, layout = gaussian(640) + 0.3, Layout.of([("w", (5, 128))])

    torch.testing.assert_close(said(OneBit(), values, layout).view(5, 128).mean(1), values.view(5, 128).mean(1))


@pytest.mark.parametrize("kind", KINDS)
def test_saying_it_again(kind: str) -> None:
    once = said(OneBit(), kinds(333)[kind])

    torch.testing.assert_close(said(OneBit(), once), once, rtol=2e-7, atol=0)


def test_buckets_do_not_matter() -> None:
    laws.assert_buckets_do_not_matter(OneBit())


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_error_feedback_conserves(size: int) -> None:
    laws.assert_conserved(OneBit(), size)


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_any_bytes_are_read_or_refused(data: st.DataObject) -> None:
    laws.assert_any_bytes_are_read_or_refused(OneBit(), data)


@pytest.mark.parametrize(
    "which,mean", [(0, 1.0), (1, -1.0), (0, -float("inf")), (1, float("inf")), (0, float("nan")), (1, float("nan"))]
)
def test_means_of_the_wrong_sign_are_refused(which: int, mean: float) -> None:
    layout = Layout.of([("w", (3, 20))])
    blocks = OneBit().blocks(layout)
    payload = OneBit().encode(gaussian(60), blocks, DRAW)
    payload[8 + 4 * which : 12 + 4 * which] = torch.tensor([mean]).view(torch.uint8)

    laws.assert_refused(OneBit(), payload, blocks, "scale")


def test_set_padding_and_other_lengths_are_refused() -> None:
    blocks = OneBit().blocks(flat(20))
    payload = OneBit().encode(gaussian(20), blocks, DRAW)
    laws.assert_refused(OneBit(), payload[:-1], blocks, "bytes came where")
    payload[-1] |= 0b10000

    laws.assert_refused(OneBit(), payload, blocks, "padding")


def test_repr_evaluates() -> None:
    assert eval(repr(OneBit())) == OneBit()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_same_on_cuda() -> None:
    laws.assert_the_same_on_cuda(OneBit())
