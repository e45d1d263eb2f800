from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress import few_bits as laws
from compress.few_bits import DRAW, KINDS, flat, gaussian, kinds, said
from compress.together import Workers
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.layout import Layout
from stretto.compress.sign import Sign
from stretto.errors import ConfigurationError

CODECS = [Sign(), Sign(block=100), Sign(block=1), Sign(block=10**6)]
SIZES = [1, 2, 3, 4, 7]


def test_the_bytes() -> None:
    layout = Layout.of([("a", (3,)), ("b", (1,))])
    payload = Sign(block=2).encode(torch.tensor([-1.0, 3.0, 0.0, -5.0]), Sign(block=2).blocks(layout), DRAW)

    assert payload[:12].view(torch.float32).tolist() == [2.0, 0.0, 5.0]
    assert payload[12:].tolist() == [0b10, 0b1, 0b0]


def test_length() -> None:
    laws.assert_length(Sign(block=100), flat(250), 3 * 4 + 13 + 13 + 7)
    laws.assert_length(Sign(block=100, vote=True), flat(250), 13 + 13 + 7)
    laws.assert_length(Sign(), Layout.of([]), 0)
    laws.assert_length(Sign(), Layout.of([("none", (0,)), ("one", ())]), 5)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_kernels_are_the_reference(codec: Sign) -> None:
    layout = Layout.of(laws.SHAPES)
    laws.assert_kernels_are_the_reference(codec, gaussian(layout.num_elements), layout)


@given(shapes=laws.shapes, block=st.integers(1, 20), kind=st.sampled_from(KINDS))
@settings(max_examples=25, deadline=None)
def test_kernels_are_the_reference_on_any_shape(shapes: list[tuple[int, ...]], block: int, kind: str) -> None:
    layout = Layout.of((str(number), shape) for number, shape in enumerate(shapes))
    laws.assert_kernels_are_the_reference(Sign(block), kinds(max(1, layout.num_elements))[kind][: layout.num_elements], layout)


def test_kernels_count_votes_as_the_reference_does() -> None:
    codec, values = Sign(block=100, vote=True), gaussian(5013)
    blocks = codec.blocks(flat(5013))
    payload = codec.encode(values, blocks, DRAW)
    decoded = codec.decode(payload, blocks, DRAW)
    with laws.in_torch():
        assert torch.equal(codec.encode(values, blocks, DRAW), payload)
        assert torch.equal(codec.decode(payload, blocks, DRAW), decoded)
    assert torch.equal(decoded, torch.where(values >= 0, 1.0, -1.0))


@pytest.mark.parametrize("kind", KINDS)
def test_finite_for_all_that_is_finite(kind: str) -> None:
    laws.assert_finite(Sign(block=100), kinds(333)[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [1, 64, 4096])
def test_contraction(kind: str, block: int) -> None:
    values = kinds(640)[kind]
    error = (values.double() - said(Sign(block), values).double()).square().view(-1, min(block, 640)).sum(1)
    rows = values.double().view(-1, min(block, 640))
    square, told = rows.square().sum(1), rows.abs().sum(1).square() / rows.shape[1]

    if kind != "denormal":  # there the mean itself is rounded
        torch.testing.assert_close(error, square - told, rtol=1e-5, atol=1e-6 * float(square.max()))
        assert (error <= (1 - 1 / rows.shape[1]) * square * (1 + 1e-6) + 1e-12).all()
    assert kind != "gaussian" or block != 4096 or abs(1 - float(error.sum() / square.sum()) - 0.637) < 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_saying_it_again(kind: str) -> None:
    once = said(Sign(block=100), kinds(333)[kind])

    torch.testing.assert_close(said(Sign(block=100), once), once, rtol=2e-7, atol=0)


def test_buckets_do_not_matter() -> None:
    laws.assert_buckets_do_not_matter(Sign(block=100))


@pytest.mark.parametrize("size", SIZES)
def test_error_feedback_conserves(size: int) -> None:
    laws.assert_conserved(Sign(block=16), size)


@given(data=st.data(), block=st.integers(1, 12), vote=st.booleans())
@settings(max_examples=50, deadline=None)
def test_any_bytes_are_read_or_refused(data: st.DataObject, block: int, vote: bool) -> None:
    laws.assert_any_bytes_are_read_or_refused(Sign(block, vote), data)


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf"), -float("inf")])
def test_bad_scales_are_refused(scale: float) -> None:
    codec, blocks = Sign(block=8), Sign(block=8).blocks(flat(20))
    payload = codec.encode(gaussian(20), blocks, DRAW)
    payload[4:8] = torch.tensor([scale]).view(torch.uint8)

    laws.assert_refused(codec, payload, blocks, "scale")


@pytest.mark.parametrize("vote", [False, True])
def test_set_padding_and_other_lengths_are_refused(vote: bool) -> None:
    codec = Sign(block=8, vote=vote)
    blocks = codec.blocks(flat(20))
    payload = codec.encode(gaussian(20), blocks, DRAW)
    laws.assert_refused(codec, payload[:-1], blocks, "bytes came where")
    laws.assert_refused(codec, torch.cat([payload, payload[:1]]), blocks, "bytes came where")
    payload[-1] |= 0b10000

    laws.assert_refused(codec, payload, blocks, "padding")


def test_payloads_are_read_from_any_address() -> None:
    codec, blocks = Sign(block=8), Sign(block=8).blocks(flat(21))
    payload = codec.encode(gaussian(21), blocks, DRAW)
    shifted = torch.cat([payload[:1], payload])[1:]

    assert torch.equal(codec.decode(shifted, blocks, DRAW), codec.decode(payload, blocks, DRAW))


@pytest.mark.parametrize("size", SIZES)
def test_the_majority_decides(size: int) -> None:
    workers = Workers(Sign(block=16, vote=True), [("a", (6, 11)), ("b", (23,))], size)
    gradients = [gaussian(89, rank) for rank in range(size)]
    votes = torch.stack([torch.where(gradient >= 0, 1, -1) for gradient in gradients]).sum(0)
    results = workers.round(gradients)

    assert all(torch.equal(result, torch.where(votes >= 0, 1.0, -1.0)) for result in results)
    assert size % 2 or (votes == 0).any(), "ties are among the cases"
    assert workers.bytes_sent == [workers.compression.bytes_sent(workers.layout, rank, size) for rank in range(size)]


def test_votes_cost_a_bit_each_way() -> None:
    """A quarter of the blocks' bits to each of three others, twice."""
    assert Sign(block=64, vote=True).bytes_sent(flat(4 * 64), 0, world_size=4) == 2 * 3 * 8
    assert Sign(block=64, vote=True).bytes_sent(flat(4 * 64), 0, world_size=2) == 32
    assert Sign(block=64).bytes_sent(flat(4 * 64), 0, world_size=4) == 2 * 3 * (8 + 4)


def test_a_minority_cannot_turn_what_the_others_agree_on() -> None:
    honest = gaussian(100)
    results = Workers(Sign(vote=True), [("w", (100,))], 5).round([honest, -1e30 * honest, honest, -1e30 * honest, honest])

    assert torch.equal(results[0], torch.where(honest >= 0, 1.0, -1.0))


def test_a_vote_takes_no_error_feedback() -> None:
    with pytest.raises(ConfigurationError):
        Workers(ErrorFeedback(Sign(vote=True)), [("w", (9,))], 2).round([gaussian(9), gaussian(9, 1)])
    assert Sign(vote=True).no_residual is not None and Sign().no_residual is None


@pytest.mark.parametrize("block", [0, -1, 1.5, True, None, "4096", float("nan")])
def test_bad_blocks(block: object) -> None:
    with pytest.raises(ConfigurationError, match="Write Sign"):
        Sign(block=block)  # type: ignore[arg-type]


@pytest.mark.parametrize("vote", [1, None, "yes"])
def test_bad_votes(vote: object) -> None:
    with pytest.raises(ConfigurationError, match="vote=True"):
        Sign(vote=vote)  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", [*CODECS, Sign(vote=True)], ids=repr)
def test_repr_evaluates(codec: Sign) -> None:
    assert eval(repr(codec)) == codec


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_same_on_cuda() -> None:
    laws.assert_the_same_on_cuda(Sign(block=100))
