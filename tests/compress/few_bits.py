"""What the codecs of few bits have to hold, each of them: called from the tests of every one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from compress.together import Workers
from stretto.compress.codec import Codec
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.kernels import compiling
from stretto.compress.layout import Blocks, Layout
from stretto.compress.random_numbers import RandomKeys
from stretto.errors import MalformedPayload

LARGEST = torch.finfo(torch.float32).max
DRAW = RandomKeys.of_round(5, rank=1)
SHAPES: list[tuple[str, tuple[int, ...]]] = [
    ("matrix", (5, 2011)),  # rows longer than a byte, not a multiple of 8
    ("long", (4999,)),  # longer than what a kernel takes at once
    ("none", (0, 3)),
    ("scalar", ()),
    ("narrow", (11, 1)),
    ("filter", (4, 3, 3)),
]
shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=4)


def flat(numel: int) -> Layout:
    return Layout.of([("w", (numel,))])


def gaussian(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def kinds(numel: int) -> dict[str, Tensor]:
    """Vectors on which compressions fail in different ways."""
    values = gaussian(numel)
    one_hot, sparse = torch.zeros(numel), torch.where(torch.arange(numel) % 20 == 3, values, 0.0)
    one_hot[numel // 3] = -3.0
    mixed = torch.where(values > 0, LARGEST, -LARGEST)
    return {
        "gaussian": values,
        "sparse": sparse,
        "one-hot": one_hot,
        "zero": torch.zeros(numel),
        "minus zero": -torch.zeros(numel),
        "constant": torch.full((numel,), -0.7),
        "steep": 0.9 ** torch.arange(numel) * values.sign(),
        "denormal": values.sign() * 1e-45,
        "largest": mixed,
        "all largest": torch.full((numel,), LARGEST),
    }


KINDS = sorted(kinds(3))


@contextlib.contextmanager
def in_torch() -> Iterator[None]:
    """As on a machine without Numba: the references."""
    with patch.object(compiling, "has_numba", lambda: False):
        yield


def said(codec: Codec, values: Tensor, layout: Layout | None = None, draw: RandomKeys = DRAW) -> Tensor:
    blocks = codec.blocks(layout or flat(len(values)))
    return codec.decode(codec.encode(values, blocks, draw), blocks, draw)


def assert_kernels_are_the_reference(codec: Codec, values: Tensor, layout: Layout) -> None:
    """The same bytes, values, residuals and sums to the last bit; the values are not touched by encoding."""
    blocks, before = codec.blocks(layout), values.clone()
    with in_torch():
        payload, residual, total = codec.encode(values, blocks, DRAW), values.clone(), torch.ones(len(values))
        decoded = codec.decode(payload, blocks, DRAW)
        codec.encode_residual(residual, blocks, DRAW)
        codec.add_decoded(payload, blocks, DRAW, total)
    assert torch.equal(codec.encode(values, blocks, DRAW), payload)
    assert torch.equal(values, before)
    assert torch.equal(codec.decode(payload, blocks, DRAW), decoded)
    mine, sum_ = values.clone(), torch.ones(len(values))
    assert torch.equal(codec.encode_residual(mine, blocks, DRAW), payload)
    codec.add_decoded(payload, blocks, DRAW, sum_)
    assert torch.equal(mine, residual) and torch.equal(residual, before - decoded)
    assert torch.equal(sum_, total)


def assert_length(codec: Codec, layout: Layout, expected: int) -> None:
    blocks = codec.blocks(layout)
    assert codec.num_bytes(blocks) == expected == codec.max_bytes(blocks)
    payload = codec.encode(gaussian(layout.num_elements), blocks, DRAW)
    assert payload.dtype == torch.uint8 and payload.shape == (expected,)


def assert_buckets_do_not_matter(codec: Codec) -> None:
    """Two tensors in one vector, in either order, and each alone: the same is said of them."""
    shapes = {"a": (37, 29), "b": (613,)}
    values = {"a": gaussian(37 * 29, 1), "b": gaussian(613, 2)}
    for order in ("ab", "ba"):
        layout = Layout.of([(name, shapes[name]) for name in order])
        both = said(codec, torch.cat([values[name] for name in order]), layout)
        alone = [said(codec, values[name], Layout.of([(name, shapes[name])])) for name in order]
        assert torch.equal(both, torch.cat(alone))


def assert_conserved(codec: Codec, size: int, rounds: int = 20) -> None:
    """With error feedback: what all ended up with, and what is left, is what was given; and all have the same bits."""
    named = [("a", (6, 11)), ("b", (23,)), ("c", (2, 2, 5))]
    workers = Workers(ErrorFeedback(codec), named, size)
    given = torch.zeros(workers.layout.num_elements, dtype=torch.float64)
    received, largest = given.clone(), 1.0
    for number in range(rounds):
        gradients = [gaussian(len(given), 100 * number + rank) for rank in range(size)]
        results = workers.round(gradients)
        assert all(torch.equal(result, results[0]) for result in results)
        given += torch.stack(gradients).double().mean(0)
        received += results[0]
        largest = max(largest, *(float(left(workers, rank).abs().max()) for rank in range(size)))
    remains = sum(left(workers, rank, "residual") / size + left(workers, rank, "server_residual") for rank in range(size))
    torch.testing.assert_close(received + remains, given, rtol=0, atol=1e-5 * largest)
    assert workers.bytes_sent == [
        rounds * (workers.compression.bytes_sent(workers.layout, rank, size) or 0) for rank in range(size)
    ]


def left(workers: Workers, rank: int, kind: str = "residual") -> Tensor:
    exported = workers.states[rank].own.export()
    none = torch.zeros(1)
    parts = [exported[place.name].get(kind, none.expand(place.shape)).reshape(-1) for place in workers.layout.places]
    return torch.cat(parts).double()


def assert_unbiased(codec: Codec, values: Tensor, variance: Tensor, draws: int = 600) -> None:
    """The mean of many draws is within 5 standard deviations of each value, and as far off on average as it should be."""
    total, blocks = torch.zeros(len(values), dtype=torch.float64), codec.blocks(flat(len(values)))
    for number in range(draws):
        draw = RandomKeys.of_round(number, rank=0)
        total += codec.decode(codec.encode(values, blocks, draw), blocks, draw)
    error = total / draws - values
    sure = variance < 1e-12
    torch.testing.assert_close(error[sure], torch.zeros_like(error[sure]), rtol=0, atol=1e-6)
    deviations = error[~sure] / (variance[~sure] / draws).sqrt()
    assert deviations.abs().max() < 5
    assert 0.7 < deviations.square().mean() < 1.3
    assert abs(deviations.mean()) < 5 / len(deviations) ** 0.5


def assert_draws_by_round(codec: Codec) -> None:
    """The same round and worker: the same bytes. Another round, another worker, another tensor: others."""
    values, blocks = gaussian(999), codec.blocks(flat(999))
    payload = codec.encode(values, blocks, RandomKeys.of_round(3, rank=1))
    assert torch.equal(payload, codec.encode(values, blocks, RandomKeys.of_round(3, rank=1)))
    for other in (RandomKeys.of_round(4, rank=1), RandomKeys.of_round(3, rank=0), RandomKeys.of_round(3, rank=1).again()):
        assert not torch.equal(payload, codec.encode(values, blocks, other))
    elsewhere = codec.blocks(Layout.of([("v", (999,))]))
    assert not torch.equal(payload, codec.encode(values, elsewhere, RandomKeys.of_round(3, rank=1)))


def assert_finite(codec: Codec, values: Tensor) -> None:
    decoded = said(codec, values)
    assert decoded.isfinite().all()
    residual = values.clone()
    codec.encode_residual(residual, codec.blocks(flat(len(values))), DRAW)
    assert residual.isfinite().all()


def outcome(codec: Codec, payload: Tensor, blocks: Blocks) -> Tensor | None:
    """What is decoded, which must be finite, or None if it is refused."""
    try:
        decoded = codec.decode(payload, blocks, DRAW)
    except MalformedPayload:
        return None
    assert decoded.isfinite().all() and len(decoded) == blocks.num_elements
    return decoded


def assert_any_bytes_are_read_or_refused(codec: Codec, data: st.DataObject) -> None:
    """Random bytes of the right and of wrong lengths, and flipped bits: kernels and references judge alike."""
    layout = Layout.of((str(number), shape) for number, shape in enumerate(data.draw(shapes)))
    blocks = codec.blocks(layout)
    length = codec.num_bytes(blocks) or 0
    payload = codec.encode(gaussian(layout.num_elements), blocks, DRAW)
    if data.draw(st.booleans()) and length:
        for flipped in data.draw(st.lists(st.integers(0, 8 * length - 1), max_size=3)):
            payload[flipped // 8] ^= 1 << flipped % 8
    else:
        wanted = max(0, length + data.draw(st.sampled_from((0, 0, 0, -1, 1, 4))))
        payload = torch.tensor(list(data.draw(st.binary(min_size=wanted, max_size=wanted))), dtype=torch.uint8)
    fast = outcome(codec, payload, blocks)
    with in_torch():
        slow = outcome(codec, payload, blocks)
    assert (fast is None) == (slow is None)
    assert fast is None or slow is None or torch.equal(fast, slow)
    assert len(payload) == length or fast is None


def assert_refused(codec: Codec, payload: Tensor, blocks: Blocks, why: str) -> None:
    """By kernel and reference, decoding and adding."""
    for compiled in (True, False):
        with contextlib.nullcontext() if compiled else in_torch():
            with pytest.raises(MalformedPayload, match=why):
                codec.decode(payload, blocks, DRAW)
            with pytest.raises(MalformedPayload, match=why):
                codec.add_decoded(payload, blocks, DRAW, torch.zeros(blocks.num_elements))


def assert_the_same_on_cuda(codec: Codec) -> None:
    layout = Layout.of(SHAPES)
    values, blocks = gaussian(layout.num_elements), codec.blocks(layout)
    payload = codec.encode(values, blocks, DRAW)
    there = codec.encode(values.cuda(), blocks, DRAW)
    assert there.is_cuda and torch.equal(there.cpu(), payload)
    assert torch.equal(codec.decode(there, blocks, DRAW).cpu(), codec.decode(payload, blocks, DRAW))
    residual = values.cuda()
    codec.encode_residual(residual, blocks, DRAW)
    assert torch.equal(residual.cpu(), values - codec.decode(payload, blocks, DRAW))
