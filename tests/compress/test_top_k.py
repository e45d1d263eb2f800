"""Top-k: which elements are chosen, how they are written, what the decoder refuses, and that nothing is lost."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.together import Workers
from stretto.compress import sparse_format
from stretto.compress.codec import Codec
from stretto.compress.error_feedback import RESIDUAL, ErrorFeedback
from stretto.compress.kernels import compiling
from stretto.compress.kernels.compiling import has_numba
from stretto.compress.layout import Blocks, Layout
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.sparse_format import Chosen, Form
from stretto.compress.top_k import TopK, largest
from stretto.errors import ConfigurationError, MalformedPayload

DRAW = RandomKeys.of_round(3, 1)
LARGEST = torch.finfo(torch.float32).max
SHAPES = [("matrix", (30, 40)), ("bias", (40,)), ("empty", (0, 3)), ("scalar", ()), ("kernel", (8, 4, 3, 3))]
needs_numba = pytest.mark.skipif(not has_numba(), reason="Numba is not installed")


def whole(*sizes: int) -> Blocks:
    return Layout.of([(f"tensor {number}", (size,)) for number, size in enumerate(sizes)]).whole()


def gaussian(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def vectors(n: int) -> dict[str, Tensor]:
    """Vectors on which a selection may go wrong."""
    one_hot, ties = torch.zeros(n), gaussian(n).round()
    one_hot[n // 2] = -3.0
    return {
        "gaussian": gaussian(n),
        "sparse": gaussian(n) * (gaussian(n, 1) > 2.5),
        "zero": torch.zeros(n),
        "one-hot": one_hot,
        "constant": torch.full((n,), -0.25),
        "ties": ties,
        "negative zeros": ties * -0.0,
        "denormal": gaussian(n) * 1e-41,
        "huge": gaussian(n).sign() * LARGEST,
        "spread": gaussian(n) * 10.0 ** torch.arange(n).remainder(60).sub(35),
        "sorted": gaussian(n).sort().values,
        "periodic": torch.arange(n).remainder(5).eq(0) * gaussian(n),  # every sample of stride 5 sees nothing, or everything
    }


def chosen_by_sorting(values: Tensor, k: int) -> Tensor:
    return values.abs().sort(descending=True, stable=True).indices[:k].sort().values


@pytest.mark.parametrize("fraction", [0.001, 0.02, 0.2, 0.6])
@pytest.mark.parametrize("n", [1, 2, 9, 2049, 20001])
def test_the_largest_are_chosen_and_of_equals_the_first(n: int, fraction: float) -> None:
    form = TopK(fraction).form(whole(n))
    for name, values in vectors(n).items():
        expected = chosen_by_sorting(values, form.num_chosen)
        assert torch.equal(largest.reference(values, form).places, expected), name
        assert torch.equal(largest(values, form).places, expected), name


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=60), st.floats(0.01, 1.0))
def test_any_values_are_chosen_as_by_sorting(numbers: list[float], fraction: float) -> None:
    values = torch.tensor(numbers)
    form = TopK(fraction).form(whole(len(numbers)))

    assert torch.equal(largest.reference(values, form).places, chosen_by_sorting(values, form.num_chosen))
    assert torch.equal(largest(values, form).places, chosen_by_sorting(values, form.num_chosen))


@needs_numba
def test_a_sample_that_misleads_changes_nothing() -> None:
    """The kernel looks at every 5th of 20000 values. Large ones only there: it expects too many; only elsewhere: too few."""
    for remainder in (0, 1):
        values = gaussian(20000).abs()
        values[torch.arange(20000) % 5 == remainder] += 100.0
        for fraction in (0.01, 0.1, 0.19, 0.21):
            form = TopK(fraction).form(whole(20000))
            assert torch.equal(largest(values, form).places, chosen_by_sorting(values, form.num_chosen))


@pytest.mark.parametrize(
    ("fraction", "n", "k"), [(0.07, 100, 7), (0.01, 1, 1), (0.01, 101, 2), (1, 5, 5), (1e-9, 10, 1), (0.5, 3, 2)]
)
def test_k_is_the_ceiling_of_the_fraction_as_written(fraction: float, n: int, k: int) -> None:
    assert sparse_format.counts_of(fraction, whole(n)).tolist() == [k]


def test_the_bytes_are_those_of_the_docstring() -> None:
    values = torch.tensor([0.0, 5.0, 0.0, -7.0] + [0.0] * 96 + [1.0, -2.0, 3.0])
    blocks = whole(100, 3)  # 2 of 100: 20 bytes listed, 21 bytes as a bitmap; 1 of 3: 12 bytes listed, 5 as a bitmap
    payload = TopK(0.02).encode(values, blocks, DRAW)

    assert bytes(payload.tolist()) == struct.pack("<I2I3fB", 2, 1, 3, 5.0, -7.0, 3.0, 0b100)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 300), max_size=6), st.sampled_from([0.001, 0.03, 0.035, 0.25, 1.0]), st.integers(0, 99))
def test_payloads_have_the_promised_length_and_kernels_write_the_same(sizes: list[int], fraction: float, seed: int) -> None:
    codec, blocks, values = TopK(fraction), whole(*sizes), gaussian(sum(sizes), seed)
    form = codec.form(blocks)
    payload = codec.encode(values, blocks, DRAW)

    counts = [max(1, math.ceil(round(n * fraction, 9))) for n in sizes]
    assert (
        len(payload)
        == codec.num_bytes(blocks)
        == sum(min(4 + 8 * k, -(-n // 8) + 4 * k) for n, k in zip(sizes, counts, strict=True))
    )
    assert torch.equal(payload, sparse_format.write.reference(largest.reference(values, form), form))
    fast, plain = sparse_format.read(payload, form), sparse_format.read.reference(payload, form)
    assert torch.equal(fast.places, plain.places) and torch.equal(fast.values, plain.values)


@pytest.mark.parametrize("fraction", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("n", [1, 5000])
def test_what_is_sent_is_exact_and_the_rest_stays(n: int, fraction: float) -> None:
    codec, blocks = TopK(fraction), whole(n)
    for name, values in vectors(n).items():
        rest = values.clone()
        payload = codec.encode_residual(rest, blocks, DRAW)
        sent = codec.decode(payload, blocks, DRAW)

        assert torch.equal(payload, codec.encode(values, blocks, DRAW)), name
        assert torch.equal(sent + rest, values) and torch.equal(sent * rest, torch.zeros(n)), name
        assert torch.equal(codec.decode(codec.encode(sent, blocks, DRAW), blocks, DRAW), sent), name
        total = torch.full((n,), 0.5)
        codec.add_decoded(payload, blocks, DRAW, total)
        assert torch.equal(total, 0.5 + sent), name


@pytest.mark.parametrize("fraction", [0.01, 0.3])
def test_it_is_a_contraction(fraction: float) -> None:
    codec, n = TopK(fraction), 4000
    for name, values in vectors(n).items():
        values = values.double() / max(1.0, float(values.abs().max()))
        sent = codec.decode(codec.encode(values.float(), whole(n), DRAW), whole(n), DRAW)
        error = (values.float() - sent).double().square().sum()
        assert error <= (1 - fraction) * values.float().double().square().sum() * (1 + 1e-9), name


def test_tensors_do_not_depend_on_their_neighbours() -> None:
    codec, values = TopK(0.05), gaussian(1500)
    together = codec.decode(codec.encode(values, whole(1000, 500), DRAW), whole(1000, 500), DRAW)

    for part, n in ((values[:1000], 1000), (values[1000:], 500)):
        alone = codec.decode(codec.encode(part, whole(n), DRAW), whole(n), DRAW)
        assert torch.equal(alone, together[:1000] if n == 1000 else together[1000:])


def test_a_payload_may_begin_anywhere_in_memory() -> None:
    codec, blocks, values = TopK(0.05), whole(1000, 9), gaussian(1009)
    payload = codec.encode(values, blocks, DRAW)
    table = torch.zeros((4, len(payload) + 1), dtype=torch.uint8)
    table[:, : len(payload)] = payload

    for row in table:
        assert torch.equal(codec.decode(row[: len(payload)], blocks, DRAW), codec.decode(payload, blocks, DRAW))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_error_feedback_loses_nothing_and_all_end_alike(size: int) -> None:
    workers = Workers(ErrorFeedback(TopK(0.03)), SHAPES, size)
    n = workers.layout.num_elements
    given_, sent = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for turn in range(20):
        gradients = [gaussian(n, 100 * turn + rank) for rank in range(size)]
        results = workers.round(gradients)
        assert all(torch.equal(result, results[0]) for result in results)
        given_ += torch.stack(gradients).double().mean(0)
        sent += results[0].double()

    left = torch.stack([state.own.flat(RESIDUAL) for state in workers.states]).double().mean(0)
    torch.testing.assert_close(sent + left, given_, rtol=1e-5, atol=1e-5)
    length = TopK(0.03).num_bytes(workers.layout.whole())
    assert workers.bytes_sent == [20 * (size - 1) * length] * size
    assert ErrorFeedback(TopK(0.03)).bytes_sent(workers.layout, 0, size) == (size - 1) * length


LISTED, BITMAPPED = whole(100), whole(20)


def listed(count: int, first: int, second: int, a: float = 1.0, b: float = 2.0) -> bytes:
    return struct.pack("<3I2f", count, first, second, a, b)


def bitmapped(one: int, two: int, three: int, a: float = 1.0, b: float = 2.0) -> bytes:
    return struct.pack("<2f3B", a, b, one, two, three)


MALFORMED: dict[str, tuple[Blocks, bytes]] = {
    "a count too small": (LISTED, listed(1, 3, 4)),
    "a count too large": (LISTED, listed(0xFFFFFFFF, 3, 4)),
    "descending": (LISTED, listed(2, 4, 3)),
    "twice": (LISTED, listed(2, 4, 4)),
    "out of range": (LISTED, listed(2, 4, 100)),
    "far out of range": (LISTED, listed(2, 4, 0xFFFFFFFF)),
    "far out of range and not ascending": (LISTED, listed(2, 0xFFFFFFFF, 4)),
    "NaN": (LISTED, listed(2, 3, 4, b=math.nan)),
    "infinity": (LISTED, listed(2, 3, 4, a=-math.inf)),
    "too short": (LISTED, listed(2, 3, 4)[:-1]),
    "too long": (LISTED, listed(2, 3, 4) + b"\0"),
    "nothing": (LISTED, b""),
    "too few ones": (BITMAPPED, bitmapped(1, 0, 0)),
    "too many ones": (BITMAPPED, bitmapped(1, 1, 1)),
    "all ones": (BITMAPPED, bitmapped(255, 255, 15)),
    "padding": (BITMAPPED, bitmapped(1, 1, 16)),
    "padding instead of an element": (BITMAPPED, bitmapped(1, 0, 128)),
    "NaN beside a bitmap": (BITMAPPED, bitmapped(1, 1, 0, a=math.nan)),
}


def as_tensor(content: bytes) -> Tensor:
    return torch.tensor(list(content), dtype=torch.uint8)


def two_of(blocks: Blocks) -> TopK:
    return TopK(2 / blocks.num_elements)


def test_what_malformed_payloads_are_made_from_is_well_formed() -> None:
    for blocks, content in ((LISTED, listed(2, 3, 99)), (BITMAPPED, bitmapped(8, 0, 8))):
        decoded = two_of(blocks).decode(as_tensor(content), blocks, DRAW)
        assert decoded.nonzero().flatten().tolist() == [3, blocks.num_elements - 1]


@pytest.mark.parametrize("name", MALFORMED)
def test_what_no_encoder_writes_is_refused(name: str) -> None:
    blocks, content = MALFORMED[name]
    codec, payload, total = two_of(blocks), as_tensor(content), torch.ones(blocks.num_elements)

    with pytest.raises(MalformedPayload):
        codec.decode(payload, blocks, DRAW)
    with pytest.raises(MalformedPayload):
        codec.add_decoded(payload, blocks, DRAW, total)
    assert torch.equal(total, torch.ones(blocks.num_elements))
    if len(payload) == codec.num_bytes(blocks):
        with pytest.raises(MalformedPayload):
            sparse_format.read.reference(payload, codec.form(blocks))


def outcome(read: Callable[[Tensor, Form], Chosen], payload: Tensor, form: Form) -> tuple[list[int], list[float]] | str:
    try:
        chosen = read(payload, form)
    except MalformedPayload:
        return "refused"
    return chosen.places.tolist(), chosen.values.tolist()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_bytes_decode_to_finite_values_or_are_refused(data: st.DataObject) -> None:
    blocks = whole(9, 80, 3)
    codec: Codec = TopK(0.03)
    length = codec.num_bytes(blocks)
    assert length is not None
    if data.draw(st.booleans(), label="from a valid payload"):
        payload = codec.encode(gaussian(92), blocks, DRAW)
        for bit in data.draw(st.lists(st.integers(0, 8 * length - 1), min_size=1, max_size=3, unique=True)):
            payload[bit // 8] ^= 1 << bit % 8
    else:
        payload = as_tensor(data.draw(st.binary(max_size=2 * length) | st.binary(min_size=length, max_size=length)))

    try:
        decoded = codec.decode(payload, blocks, DRAW)
    except MalformedPayload:
        pass
    else:
        assert decoded.shape == (92,) and bool(decoded.isfinite().all())
        again = codec.encode(decoded, blocks, DRAW)
        assert torch.equal(codec.decode(again, blocks, DRAW), decoded)
    if len(payload) == length:
        form = TopK(0.03).form(blocks)
        assert outcome(sparse_format.read, payload, form) == outcome(sparse_format.read.reference, payload, form)


def test_no_blocks_make_no_bytes() -> None:
    blocks = Layout.of([("empty", (0,))]).whole()
    payload = TopK(0.1).encode(torch.zeros(0), blocks, DRAW)

    assert len(payload) == TopK(0.1).num_bytes(blocks) == 0
    assert TopK(0.1).decode(payload, blocks, DRAW).shape == (0,)
    assert sparse_format.write.reference(
        Chosen(torch.zeros(0, dtype=torch.int64), torch.zeros(0)), TopK(0.1).form(blocks)
    ).shape == (0,)
    assert sparse_format.read.reference(payload, TopK(0.1).form(blocks)).places.shape == (0,)


def test_without_numba_everything_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, blocks, values = TopK(0.05), whole(700, 30, 1), gaussian(731)

    def everything() -> list[Tensor]:
        rest, total = values.clone(), torch.ones(731)
        payload = codec.encode_residual(rest, blocks, DRAW)
        codec.add_decoded(payload, blocks, DRAW, total)
        return [codec.encode(values, blocks, DRAW), payload, rest, total, codec.decode(payload, blocks, DRAW)]

    fast = everything()
    monkeypatch.setattr(compiling, "has_numba", lambda: False)
    assert all(torch.equal(a, b) for a, b in zip(fast, everything(), strict=True))


def test_it_prints_as_it_is_written() -> None:
    assert eval(repr(ErrorFeedback(TopK(0.01)))) == ErrorFeedback(TopK(0.01))


@pytest.mark.parametrize("fraction", [0, -0.1, 1.5, math.nan, math.inf, True, "0.1", None])
def test_a_fraction_that_is_none_is_refused(fraction: object) -> None:
    with pytest.raises(ConfigurationError, match=r"Write TopK\(0.01\)"):
        TopK(fraction)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("fraction", [0.01, 0.1])
def test_a_gpu_writes_and_reads_the_same_bytes(fraction: float) -> None:
    codec, blocks = TopK(fraction), whole(7000, 30, 1)
    for name, values in vectors(7031).items():
        payload = codec.encode(values.cuda(), blocks, DRAW)
        assert torch.equal(payload.cpu(), codec.encode(values, blocks, DRAW)), name
        assert torch.equal(codec.decode(payload, blocks, DRAW).cpu(), codec.decode(payload.cpu(), blocks, DRAW)), name
