"""DeMo: the chunked transform, conservation of momentum, the mean over senders, the wire format."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.together import Workers
from stretto.compress.cosine import ChunkedCosine, cosine_matrix, largest_divisor
from stretto.compress.demo import LARGEST_VALUE, MOMENTUM, DeMo, Frequencies, largest
from stretto.compress.layout import Layout
from stretto.compress.rounds import Gather, Steps
from stretto.compress.state import CompressionState
from stretto.errors import ConfigurationError, FrameError, MalformedPayload

CPU = torch.device("cpu")
SHAPES: list[tuple[str, tuple[int, ...]]] = [
    ("w", (12, 20)),
    ("conv", (6, 5, 3, 2)),
    ("bias", (20,)),
    ("prime", (11, 13)),
    ("scalar", ()),
    ("empty", (0, 5)),
    ("one", (1,)),
]
FREQUENCIES = Frequencies(Layout.of(SHAPES), 3, 8, CPU)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices of 8 x 8 are not worth waiting for a second one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def first_row(steps: Steps) -> torch.Tensor:
    asked = next(steps)
    assert isinstance(asked, Gather)
    return asked.row


def gradients(workers: Workers, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(workers.layout.num_elements, generator=generator) for _ in workers.states]


@pytest.mark.parametrize(
    ("number", "limit", "expected"), [(128, 64, 64), (100, 64, 50), (67, 64, 1), (7, 64, 7), (0, 64, 1), (9, 2, 1)]
)
def test_chunks_are_the_largest_divisors(number: int, limit: int, expected: int) -> None:
    assert largest_divisor(number, limit) == expected


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 256])
def test_the_transform_is_orthonormal(length: int) -> None:
    matrix = cosine_matrix(length, CPU)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(length), atol=2e-6, rtol=0)
    j = torch.arange(length, dtype=torch.float64)
    for k in {0, 1 % length, length - 1}:  # as the definition says, frequency by frequency
        wave = torch.cos(math.pi / length * (j + 0.5) * k)
        torch.testing.assert_close(matrix[k].double(), wave / wave.norm(), atol=1e-6, rtol=0)


@settings(max_examples=40, deadline=None)
@given(shape=st.lists(st.integers(0, 9), max_size=4).map(tuple), chunk=st.integers(1, 9), seed=st.integers(0, 99))
def test_the_chunked_transform_inverts_and_keeps_norms(shape: tuple[int, ...], chunk: int, seed: int) -> None:
    cosine = ChunkedCosine(shape, chunk, CPU)
    x = torch.randn(math.prod(shape), generator=torch.Generator().manual_seed(seed))
    frequencies = cosine.forward(x)
    assert frequencies.shape == (cosine.num_chunks, cosine.size)
    assert cosine.num_chunks * cosine.size == x.numel()
    torch.testing.assert_close(cosine.inverse(frequencies), x, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(frequencies.norm(), x.norm(), atol=1e-5, rtol=1e-5)


def test_a_chunk_is_a_rectangle_of_the_matrix() -> None:
    x = torch.zeros(4, 6)
    x[2:4, 3:6] = 1.0  # the fourth of the chunks of 2 x 3
    frequencies = ChunkedCosine((4, 6), 3, CPU).forward(x.flatten())
    expected = torch.zeros(4, 6)
    expected[3, 0] = math.sqrt(6)  # constant, so the lowest frequency alone
    torch.testing.assert_close(frequencies, expected, atol=1e-6, rtol=0)


def test_the_largest_of_equal_magnitudes_come_first() -> None:
    rows = torch.tensor([[1.0, -2.0, 2.0, 0.0, 2.0], [0.0, 0.0, -0.0, 0.0, 0.0], [1e-45, 3e38, -1e-45, -3e38, 0.0]])
    assert largest(rows, 2).tolist() == [[1, 2], [0, 1], [1, 3]]
    assert largest(rows, 9).tolist() == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_what_is_not_sent_stays(size: int) -> None:
    """m before (decayed, with the gradient) = m after + what the payload says, per worker and round."""
    demo = DeMo(k=3, chunk=8, decay=0.9, sign=False)
    workers = Workers(demo, SHAPES, size)
    frequencies = Frequencies(workers.layout, 3, 8, CPU)
    for number in range(4):
        grads = gradients(workers, number)
        before = [0.9 * state.own.flat(MOMENTUM) + grad for state, grad in zip(workers.states, grads, strict=True)]
        payloads = [first_row(demo.exchange(grad.clone(), workers.turn(rank))) for rank, grad in enumerate(grads)]
        for state in workers.states:
            state.discard()
        workers.round(grads)
        for state, payload, momentum in zip(workers.states, payloads, before, strict=True):
            positions, values = frequencies.unpack(payload)
            sent = torch.zeros(workers.layout.num_elements).index_put((positions,), values)
            q = frequencies.inverse(sent)
            assert q.norm() > 0.1 * momentum.norm()
            torch.testing.assert_close(state.own.flat(MOMENTUM) + q, momentum, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("sign", [True, False])
def test_everything_sent_is_the_mean(size: int, sign: bool) -> None:
    workers = Workers(DeMo(k=64, chunk=8, sign=sign), SHAPES, size)
    for number in range(3):
        grads = gradients(workers, number)
        mean = torch.stack(grads).mean(0)
        for result, state in zip(workers.round(grads), workers.states, strict=True):
            torch.testing.assert_close(state.own.flat(MOMENTUM), torch.zeros_like(mean), atol=2e-5, rtol=0)
            if sign:
                clear = mean.abs() > 1e-4
                assert torch.equal(result[clear], mean[clear].sign())
            else:
                torch.testing.assert_close(result, mean, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_all_workers_end_with_the_same_bits(size: int) -> None:
    workers = Workers(DeMo(k=2, chunk=8, sign=False), SHAPES, size)
    for number in range(3):
        first, *others = workers.round(gradients(workers, number))
        assert first.isfinite().all() and first.any()
        assert all(torch.equal(first, other) for other in others)


def test_a_coefficient_is_the_mean_over_those_that_sent_it() -> None:
    """One chunk of 4, of which each worker sends 1."""
    workers = Workers(DeMo(k=1, chunk=4, sign=False), [("w", (4,))], 3)
    cosine = ChunkedCosine((4,), 4, CPU)
    waves = [cosine.inverse(torch.tensor([row])) for row in ([0.0, 4, 1, 0], [0.0, 2, 0, 0], [0.0, 0, 0, 9])]
    result = cosine.forward(workers.round(waves)[0])
    torch.testing.assert_close(result, torch.tensor([[0.0, 3.0, 0.0, 9.0]]), atol=1e-5, rtol=0)
    left = cosine.forward(workers.states[0].own.flat(MOMENTUM))
    torch.testing.assert_close(left, torch.tensor([[0.0, 0.0, 1.0, 0.0]]), atol=1e-5, rtol=0)


def test_a_worker_with_nothing_to_say_does_not_weigh_in() -> None:
    workers = Workers(DeMo(k=2, chunk=4, sign=False), [("w", (4,)), ("b", (4,))], 2)
    wave = torch.tensor([1.0, 1.0, 1.0, 1.0])
    mine = torch.cat([wave, wave])
    others = torch.cat([torch.zeros(4), 3 * wave])  # zeros in the first tensor alone
    torch.testing.assert_close(workers.round([mine, others])[0], torch.cat([wave, 2 * wave]))


def test_what_is_sent_does_not_depend_on_the_bucket() -> None:
    together = Workers(DeMo(k=2, chunk=4, sign=False), [("a", (4, 6)), ("b", (10,))], 3)
    grads = gradients(together)
    expected = together.round(grads)[0]
    parts = [(("a", (4, 6)), slice(0, 24)), (("b", (10,)), slice(24, 34))]
    alone = [Workers(DeMo(k=2, chunk=4, sign=False), [named], 3).round([g[where] for g in grads])[0] for named, where in parts]
    assert torch.equal(torch.cat(alone), expected)


def test_a_discarded_round_leaves_the_momentum() -> None:
    workers = Workers(DeMo(k=1, chunk=8), SHAPES, 2)
    workers.round(gradients(workers))
    before = [state.own.flat(MOMENTUM).clone() for state in workers.states]
    workers.round(gradients(workers, 1), commit=False)
    assert all(torch.equal(state.own.flat(MOMENTUM), kept) for state, kept in zip(workers.states, before, strict=True))


def test_momentum_survives_export_and_other_buckets() -> None:
    workers = Workers(DeMo(k=1, chunk=4), [("a", (4, 6)), ("b", (10,))], 1)
    workers.round(gradients(workers))
    other = Workers(DeMo(k=1, chunk=4), [("b", (10,)), ("a", (4, 6))], 1)
    other.states[0].own.restore(workers.states[0].own.export(), DeMo.flat_kinds)
    kept, moved = workers.states[0].own.flat(MOMENTUM), other.states[0].own.flat(MOMENTUM)
    assert torch.equal(torch.cat([moved[10:], moved[:10]]), kept)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_bytes(size: int) -> None:
    demo = DeMo(k=3, chunk=8)
    workers = Workers(demo, SHAPES, size)
    workers.round(gradients(workers))
    # chunks (6 x 5), (6 x 6), (5), (1 x 1), (), none, (1)
    slots = 3 * (2 * 4) + 3 * (1 * 5) + 3 * 4 + 11 * 13 + 1 + 0 + 1
    assert demo.bytes_sent(workers.layout, 0, size) == 6 * slots * (size - 1)
    assert workers.bytes_sent == [6 * slots * (size - 1)] * size


def test_the_papers_setting_sends_85_times_less() -> None:
    layout = Layout.of([("w", (128, 192))])
    assert DeMo().bytes_sent(layout, 0, 2) == 4 * 128 * 192 * 32 * 6 // (4 * 4096)


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-45, 3.4e38, -3.4e38])
@pytest.mark.parametrize("sign", [True, False])
def test_awkward_values(value: float, sign: bool) -> None:
    workers = Workers(DeMo(k=2, chunk=64, decay=1.0, sign=sign), [("w", (64, 64)), ("b", (5,)), ("none", (0,))], 3)
    constant = torch.full((workers.layout.num_elements,), value)
    one_hot = torch.zeros_like(constant)
    one_hot[7] = value
    for _ in range(3):
        for result in workers.round([constant, one_hot, constant]):
            assert result.isfinite().all()
            if sign:
                assert set(result.tolist()) <= {-1.0, 0.0, 1.0}
    assert all(state.own.flat(MOMENTUM).isfinite().all() for state in workers.states)
    if abs(value) >= 1:
        assert torch.equal(result.sign(), constant.sign())


def test_no_tensors() -> None:
    workers = Workers(DeMo(), [("none", (0, 3))], 2)
    assert [len(result) for result in workers.round(gradients(workers))] == [0, 0]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda values, index: index.__setitem__(0, 64), "beyond the end"),
        (lambda values, index: index.__setitem__(0, -1), "beyond the end"),
        (lambda values, index: index.__setitem__(1, int(index[0])), "ascend"),
        (lambda values, index: index.__setitem__(slice(0, 2), index[:2].flip(0).clone()), "ascend"),
        (lambda values, index: values.__setitem__(0, math.nan), "not finite"),
        (lambda values, index: values.__setitem__(3, math.inf), "not finite"),
        (lambda values, index: values.__setitem__(3, -2 * LARGEST_VALUE), "larger"),
    ],
)
def test_malformed_payloads_name_who_sent_them(change: object, complaint: str) -> None:
    demo = DeMo(k=2, chunk=8)
    workers = Workers(demo, [("w", (16, 16))], 2)
    generator = demo.exchange(gradients(workers)[0], workers.turn(0))
    payload = first_row(generator).clone()
    values, index = payload[: 4 * 8].clone().view(torch.float32), payload[4 * 8 :].clone().view(torch.int16)
    change(values, index)  # type: ignore[operator]
    bad = torch.cat([values.view(torch.uint8), index.view(torch.uint8)])
    with pytest.raises(FrameError, match=f"rank 1 .*DeMo.*{complaint}"):
        generator.send(torch.stack([payload, bad]))


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_bytes_are_refused_or_finite(data: st.DataObject) -> None:
    right = FREQUENCIES.num_bytes
    length = data.draw(st.sampled_from([0, 1, right - 1, right, right + 1]))
    payload = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))).byte()
    try:
        positions, values = FREQUENCIES.unpack(payload)
    except MalformedPayload:
        return
    assert length == right and values.isfinite().all() and len(positions) == len(values)


@settings(max_examples=50, deadline=None)
@given(bit=st.integers(0, 8 * FREQUENCIES.num_bytes - 1))
def test_a_flipped_bit_is_refused_or_finite(bit: int) -> None:
    spectrum = torch.randn(FREQUENCIES.num_elements, generator=torch.Generator().manual_seed(bit))
    payload = FREQUENCIES.pack(spectrum, FREQUENCIES.strongest(spectrum))
    payload[bit // 8] ^= 1 << (bit % 8)
    total, senders = torch.zeros_like(spectrum), torch.zeros_like(spectrum)
    try:
        FREQUENCIES.add_unpacked(payload, total, senders)
    except MalformedPayload:
        return
    assert FREQUENCIES.inverse(total).isfinite().all()
    assert senders.max() == 1


def test_positions_of_the_largest_chunk_fit_in_16_bits() -> None:
    frequencies = Frequencies(Layout.of([("w", (256, 256))]), 2, 256, CPU)
    spectrum = torch.zeros(65536)
    spectrum[[0, 65535]] = torch.tensor([1.0, -2.0])
    positions, values = frequencies.unpack(frequencies.pack(spectrum, frequencies.strongest(spectrum)))
    assert positions.tolist() == [0, 65535] and values.tolist() == [1.0, -2.0]


def test_it_trains() -> None:
    """Least squares, each worker with its own part of the data, by signs of size lr, which shrinks."""
    generator = torch.Generator().manual_seed(0)
    inputs, solution = torch.randn(4, 50, 24, generator=generator), torch.randn(24, generator=generator)
    workers = Workers(DeMo(k=4, chunk=8, decay=0.9), [("w", (24,))], 4)
    w = torch.zeros(24)
    for number in range(120):
        w -= 0.1 * 0.97**number * workers.round([x.T @ (x @ (w - solution)) / 50 for x in inputs])[0]
    assert (w - solution).norm() < 0.05 * solution.norm()


@pytest.mark.parametrize(
    "arguments",
    [
        {"k": 0},
        {"k": True},
        {"k": 1.5},
        {"chunk": 0},
        {"chunk": 257},
        {"decay": -0.1},
        {"decay": 1.1},
        {"decay": math.nan},
        {"sign": 1},
    ],
)
def test_arguments_that_cannot_work(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=f"DeMo\\({next(iter(arguments))}="):
        DeMo(**arguments)  # type: ignore[arg-type]


def test_repr_reads_back_and_it_brings_its_momentum() -> None:
    demo = DeMo(k=8, chunk=32, decay=0.99, sign=False)
    assert eval(repr(demo)) == demo
    assert demo.optimizer_hint is not None and "SGD" in demo.optimizer_hint
    assert demo.refusal("ring") is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_computes_the_same() -> None:
    compression = DeMo(k=64, chunk=8, sign=False)  # everything is sent, so that rounding chooses nothing
    here, there = (Workers(compression, SHAPES, 3) for _ in range(2))
    there.states = [CompressionState(there.layout, torch.device("cuda")) for _ in range(3)]
    for number in range(6):
        grads = gradients(here, number)
        expected = here.round(grads)[0]
        first, *others = there.round([grad.cuda() for grad in grads])
        assert all(torch.equal(first, other) for other in others)
        torch.testing.assert_close(first.cpu(), expected, atol=1e-4, rtol=1e-4)
