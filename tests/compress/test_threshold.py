"""Threshold: what reaches it is sent, exactly; lengths that vary; what the decoder refuses; and that nothing is lost."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.together import Workers
from stretto.compress import sparse_format
from stretto.compress.error_feedback import RESIDUAL, ErrorFeedback
from stretto.compress.kernels import compiling
from stretto.compress.layout import Blocks, Layout
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.threshold import Threshold, at_least
from stretto.errors import ConfigurationError, FrameError, MalformedPayload

DRAW = RandomKeys.of_round(3, 1)
LARGEST, TINIEST = torch.finfo(torch.float32).max, 2.0**-149
SHAPES = [("matrix", (30, 40)), ("bias", (40,)), ("empty", (0, 3)), ("scalar", ()), ("kernel", (8, 4, 3, 3))]


def whole(*sizes: int) -> Blocks:
    return Layout.of([(f"tensor {number}", (size,)) for number, size in enumerate(sizes)]).whole()


def gaussian(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def bits(value: float) -> int:
    return int(torch.tensor(value).view(torch.int32))


def test_the_bytes_are_those_of_the_docstring() -> None:
    values = torch.tensor([0.0, 2.0, 0.5, -3.0, 1.0, 0.0, 0.9])
    payload = Threshold(1.0).encode(values, whole(4, 2, 1), DRAW)

    assert bytes(payload.tolist()) == struct.pack("<3I3I3f", 2, 1, 0, 1, 3, 0, 2.0, -3.0, 1.0)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 5000), max_size=4), st.sampled_from([TINIEST, 0.01, 0.1, 1.0, 3.0, LARGEST]), st.integers(0, 9))
def test_everything_that_reaches_it_is_sent_exactly(sizes: list[int], value: float, seed: int) -> None:
    codec, blocks, values = Threshold(value), whole(*sizes), gaussian(sum(sizes), seed)
    values[::7] = 0.0
    values[3::50] = -0.1  # on the threshold, as float32 has it
    rest = values.clone()
    payload = codec.encode_residual(rest, blocks, DRAW)
    sent = codec.decode(payload, blocks, DRAW)

    reaches = values.abs() >= torch.tensor(value)
    assert torch.equal(sent, values * reaches) and torch.equal(rest, values * ~reaches)
    assert len(payload) == 4 * len(blocks) + 8 * int(reaches.sum()) <= codec.max_bytes(blocks)
    assert torch.equal(payload, codec.encode(values, blocks, DRAW))
    total = torch.ones(sum(sizes))
    codec.add_decoded(payload, blocks, DRAW, total)
    assert torch.equal(total, 1 + sent)
    chosen, form = at_least.reference(values, bits(value), blocks)
    assert torch.equal(at_least(values, bits(value), blocks)[0].places, chosen.places)
    assert torch.equal(payload, sparse_format.write.reference(chosen, form))


def test_awkward_tensors() -> None:
    denormal, huge = gaussian(3000) * 1e-41, gaussian(3000).sign() * LARGEST
    for values, value, count in (
        (torch.zeros(3000), TINIEST, 0),
        (torch.full((3000,), -0.25), 0.25, 3000),
        (denormal, TINIEST, int(denormal.ne(0).sum())),
        (denormal, 2.0**-126, 0),
        (huge, LARGEST, 3000),
        (torch.eye(3000)[77], 1.0, 1),
    ):
        payload = Threshold(value).encode(values, whole(3000), DRAW)
        assert len(payload) == 4 + 8 * count
        assert torch.equal(Threshold(value).decode(payload, whole(3000), DRAW), values if count else torch.zeros(3000))


def test_no_blocks_make_no_bytes() -> None:
    payload = Threshold(1.0).encode(torch.zeros(0), whole(), DRAW)

    assert len(payload) == Threshold(1.0).max_bytes(whole()) == 0
    assert Threshold(1.0).decode(payload, whole(), DRAW).shape == (0,)
    assert len(at_least.reference(torch.zeros(0), 1, whole())[0].places) == 0


def test_tensors_do_not_depend_on_their_neighbours() -> None:
    codec, values = Threshold(1.5), gaussian(1500)
    together = codec.decode(codec.encode(values, whole(1000, 500), DRAW), whole(1000, 500), DRAW)

    assert torch.equal(codec.decode(codec.encode(values[:1000], whole(1000), DRAW), whole(1000), DRAW), together[:1000])
    assert torch.equal(codec.decode(codec.encode(values[1000:], whole(500), DRAW), whole(500), DRAW), together[1000:])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_error_feedback_loses_nothing_and_keeps_residuals_below_the_threshold(size: int) -> None:
    workers = Workers(ErrorFeedback(Threshold(2.0)), SHAPES, size)
    n = workers.layout.num_elements
    given_, sent = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for turn in range(20):
        gradients = [gaussian(n, 100 * turn + rank) * 0.5 for rank in range(size)]
        results = workers.round(gradients)
        assert all(torch.equal(result, results[0]) for result in results)
        given_ += torch.stack(gradients).double().mean(0)
        sent += results[0].double()

    residuals = torch.stack([state.own.flat(RESIDUAL) for state in workers.states])
    torch.testing.assert_close(sent + residuals.double().mean(0), given_, rtol=1e-5, atol=1e-5)
    assert bool((residuals.abs() < 2.0).all()) and bool(sent.any())


def test_workers_with_nothing_to_say_and_workers_with_everything_meet() -> None:
    workers = Workers(Threshold(1.0), SHAPES, 3)
    n = workers.layout.num_elements
    results = workers.round([torch.zeros(n), torch.full((n,), 3.0), torch.full((n,), 0.5)])

    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], torch.ones(n))
    assert Threshold(1.0).bytes_sent(workers.layout, 0, 3) is None


def test_a_worker_that_announces_more_than_can_come_is_named() -> None:
    workers = Workers(Threshold(1.0), [("a", (4,))], 2)
    steps = Threshold(1.0).exchange(torch.ones(4), workers.turn(0))
    next(steps)

    with pytest.raises(FrameError, match="rank 1"):
        steps.send(torch.tensor([[36], [37]]))


BLOCKS = whole(3, 5)


def payload_of(
    counts: tuple[int, int] = (1, 1), indices: tuple[int, ...] = (2, 4), values: tuple[float, ...] = (1, -2)
) -> Tensor:
    content = struct.pack(f"<2I{len(indices)}I{len(values)}f", *counts, *indices, *values)
    return torch.tensor(list(content), dtype=torch.uint8)


def test_what_malformed_payloads_are_made_from_is_well_formed() -> None:
    assert Threshold(1.0).decode(payload_of(), BLOCKS, DRAW).tolist() == [0, 0, 1, 0, 0, 0, 0, -2]


MALFORMED = {
    "nothing": torch.zeros(0, dtype=torch.uint8),
    "less than the counts": payload_of()[:7],
    "a byte missing": payload_of()[:-1],
    "a byte too many": torch.cat([payload_of(), torch.zeros(1, dtype=torch.uint8)]),
    "a value missing": payload_of(values=(1,)),
    "more counted than there is": payload_of((2, 1)),
    "more than the tensor has": payload_of((4, 0), (0, 1, 2, 3), (1, 1, 1, 1)),
    "far more": payload_of((0xFFFFFFFF, 0xFFFFFFFF)),
    "less counted than there is": payload_of((0, 1)),
    "an index of the next tensor": payload_of(indices=(3, 4)),
    "an index far away": payload_of(indices=(2, 0xFFFFFFFF)),
    "descending": payload_of((0, 2), (2, 1)),
    "twice": payload_of((0, 2), (2, 2)),
    "NaN": payload_of(values=(1, math.nan)),
    "infinity": payload_of(values=(-math.inf, 1)),
    "below the threshold": payload_of(values=(1, 0.999)),
    "zero": payload_of(values=(1, 0)),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_no_encoder_writes_is_refused(name: str) -> None:
    total = torch.ones(8)
    with pytest.raises(MalformedPayload):
        Threshold(1.0).decode(MALFORMED[name], BLOCKS, DRAW)
    with pytest.raises(MalformedPayload):
        Threshold(1.0).add_decoded(MALFORMED[name], BLOCKS, DRAW, total)
    assert torch.equal(total, torch.ones(8))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_bytes_decode_to_what_an_encoder_may_have_had_or_are_refused(data: st.DataObject) -> None:
    codec = Threshold(1e-3)
    payload = codec.encode(gaussian(8), BLOCKS, DRAW)
    if data.draw(st.booleans(), label="from a valid payload"):
        for bit in data.draw(st.lists(st.integers(0, 8 * len(payload) - 1), min_size=1, max_size=2, unique=True)):
            payload[bit // 8] ^= 1 << bit % 8
    else:
        counts = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 5)))
        rest = data.draw(st.binary(max_size=80) | st.binary(min_size=8 * sum(counts), max_size=8 * sum(counts)))
        payload = torch.tensor(list(struct.pack("<2I", *counts) + rest), dtype=torch.uint8)

    try:
        decoded = codec.decode(payload, BLOCKS, DRAW)
    except MalformedPayload:
        return
    assert bool(decoded.isfinite().all())
    assert torch.equal(codec.encode(decoded, BLOCKS, DRAW), payload)


def test_without_numba_everything_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, blocks, values = Threshold(1.0), whole(700, 30, 1), gaussian(731)

    def everything() -> list[Tensor]:
        rest, total = values.clone(), torch.ones(731)
        payload = codec.encode_residual(rest, blocks, DRAW)
        codec.add_decoded(payload, blocks, DRAW, total)
        return [codec.encode(values, blocks, DRAW), payload, rest, total, codec.decode(payload, blocks, DRAW)]

    fast = everything()
    monkeypatch.setattr(compiling, "has_numba", lambda: False)
    assert all(torch.equal(a, b) for a, b in zip(fast, everything(), strict=True))


def test_it_prints_as_it_is_written() -> None:
    assert eval(repr(ErrorFeedback(Threshold(1e-3)))) == ErrorFeedback(Threshold(1e-3))
    assert Threshold(1) == Threshold(1.0)


@pytest.mark.parametrize(
    "value", [0, -1.0, math.nan, math.inf, 1e-60, 1e60, 10**400, True, "0.1", None], ids=lambda value: f"{value!r:.20}"
)
def test_a_threshold_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"Write Threshold\(1e-3\)"):
        Threshold(value)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_writes_and_reads_the_same_bytes() -> None:
    codec, blocks, values = Threshold(1.0), whole(7000, 30, 1), gaussian(7031)
    payload = codec.encode(values.cuda(), blocks, DRAW)

    assert torch.equal(payload.cpu(), codec.encode(values, blocks, DRAW))
    assert torch.equal(codec.decode(payload, blocks, DRAW).cpu(), codec.decode(payload.cpu(), blocks, DRAW))
