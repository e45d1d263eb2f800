"""The hop of `Int8`: the laws that a quantised ring relies on, and what arrives from others."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from collectives.ranks import Rank, floats, run_ranks
from stretto.collectives import catalogue
from stretto.collectives.message_codec import MessageCodec
from stretto.collectives.plan import Kind
from stretto.collectives.request import Request
from stretto.compress import int8_hop
from stretto.compress.int8 import Int8
from stretto.compress.int8_hop import Int8Hop
from stretto.compress.kernels import compiling
from stretto.compress.kernels.compiling import has_numba
from stretto.compress.layout import Layout
from stretto.compress.random_numbers import RandomKeys
from stretto.errors import MalformedPayload

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
units = st.sampled_from([1, 3, 16, 256])
counts = st.integers(0, 700)
seeds = st.integers(0, 2**32 - 1)


def gaussian(n: int, seed: int = 0, scale: float = 1.0) -> Floats:
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


def any_bits(n: int, seed: int) -> Floats:
    """Every bit at random: infinities and NaN among them."""
    return np.random.default_rng(seed).integers(0, 2**32, n, dtype=np.uint32).view(np.float32)


def encoded(hop: Int8Hop, values: Floats) -> Bytes:
    out = np.full(hop.num_bytes(len(values)), 0xAA, np.uint8)
    hop.encode(values, out)
    return out


def decoded(hop: Int8Hop, payload: Bytes, count: int) -> Floats:
    values = np.full(count, 7, np.float32)
    hop.copy(payload, values)
    return values


@settings(max_examples=50, deadline=None)
@given(unit=units, count=counts, seed=seeds)
def test_any_values_are_encoded_to_what_decodes_to_finite_ones_and_encodes_to_the_same(unit: int, count: int, seed: int) -> None:
    hop = Int8Hop(unit)
    for values in (gaussian(count, seed), any_bits(count, seed)):
        payload = encoded(hop, values)
        said = decoded(hop, payload, count)
        assert np.isfinite(said).all()
        assert (encoded(hop, said) == payload).all()


@settings(max_examples=50, deadline=None)
@given(unit=units, count=counts, seed=seeds)
def test_settle_is_what_others_decode(unit: int, count: int, seed: int) -> None:
    hop = Int8Hop(unit)
    for values in (gaussian(count, seed), any_bits(count, seed), gaussian(count, seed, 1e-41)):
        said = decoded(hop, encoded(hop, values), count)
        settled = values.copy()
        hop.settle(settled)
        assert (settled.view(np.uint32) == said.view(np.uint32)).all()
        hop.settle(settled)
        assert (settled.view(np.uint32) == said.view(np.uint32)).all()


@settings(max_examples=30, deadline=None)
@given(unit=units, count=counts, seed=seeds)
def test_the_kernel_writes_and_reads_what_the_reference_does(unit: int, count: int, seed: int) -> None:
    hop = Int8Hop(unit)
    for values in (gaussian(count, seed), any_bits(count, seed)):
        payload, written, read = encoded(hop, values), np.empty(hop.num_bytes(count), np.uint8), np.empty(count, np.float32)
        int8_hop.encode_units.reference(values, unit, written)
        int8_hop.decode_units.reference(payload, unit, read, False)
        assert (payload == written).all() and (decoded(hop, payload, count) == read).all()


@settings(max_examples=30, deadline=None)
@given(unit=units, first=st.integers(0, 4), count=counts, seed=seeds)
def test_a_unit_is_encoded_by_itself(unit: int, first: int, count: int, seed: int) -> None:
    hop, values = Int8Hop(unit), gaussian(count, seed)
    start = min(first * unit, count // unit * unit)

    pieces = [encoded(hop, values[:start]), encoded(hop, values[start:])]

    assert (np.concatenate(pieces) == encoded(hop, values)).all()


@pytest.mark.parametrize("unit", [3, 256])
def test_add_adds_what_copy_copies_also_from_memory_that_is_read_only_or_odd(unit: int) -> None:
    hop, values, mine = Int8Hop(unit), gaussian(700), gaussian(700, 1)
    payload = encoded(hop, values)
    expected = mine + decoded(hop, payload, 700)

    for arrived in (payload, memoryview(payload.tobytes()), memoryview(b"x" + payload.tobytes())[1:]):
        total = mine.copy()
        hop.add(arrived, total)
        assert (total == expected).all()


def test_one_tensor_alone_has_the_codes_of_the_codec() -> None:
    values, codec = gaussian(600), Int8(block=256)
    blocks = codec.blocks(Layout.of([("tensor", (600,))]))
    said = codec.decode(codec.encode(torch.from_numpy(values), blocks, RandomKeys()), blocks, RandomKeys())
    hop = codec.hop()
    assert hop is not None

    assert (decoded(hop, encoded(hop, values), 600) == said.numpy()).all()


def test_bytes_are_as_the_docstring_says() -> None:
    payload = encoded(Int8Hop(3), np.array([127.0, -64.5, 0.5, -254.0, 1.0], np.float32))

    assert payload.tobytes() == struct.pack("<f3bf2b", 1.0, 127, -64, 0, 2.0, -127, 0)


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1000])
def test_length_is_one_byte_each_and_four_per_unit(count: int) -> None:
    assert Int8Hop(256).num_bytes(count) == count + 4 * -(-count // 256)


def test_what_is_not_finite_comes_out_as_the_largest() -> None:
    values = np.array([np.inf, -np.inf, np.nan, 1.0], np.float32)
    said = decoded(Int8Hop(4), encoded(Int8Hop(4), values), 4)

    assert said[0] == -said[1] == said[2] > 3.4e38
    assert said[3] == 0


def test_errors_of_a_running_sum_grow_with_the_square_root_of_the_hops() -> None:
    hop, errors = Int8Hop(256), []
    for size in (4, 64):
        running, exact = np.zeros(25600, np.float32), np.zeros(25600)
        for rank in range(size):
            mine = gaussian(25600, rank)
            exact += mine
            hop.add(encoded(hop, running), mine)
            running = mine
        errors.append(np.linalg.norm(running - exact) / np.linalg.norm(exact))

    assert errors[1] < 0.05
    assert 3 < errors[1] / errors[0] < 5


@pytest.mark.parametrize("payload", [b"", b"\0" * 5, b"\0" * 7])
def test_the_wrong_length_is_refused(payload: bytes) -> None:
    for decode in (Int8Hop(4).add, Int8Hop(4).copy):
        with pytest.raises(MalformedPayload, match="bytes where 6"):
            decode(memoryview(payload), np.zeros(2, np.float32))


@pytest.mark.parametrize(
    ("scale", "codes", "reason"),
    [
        (-1.0, (0, 0), "scale"),
        (float("inf"), (0, 0), "scale"),
        (float("nan"), (0, 0), "scale"),
        (1e37, (0, 0), "too large"),
        (1e-40, (0, 0), "too small"),
        (1 + 2.0**-16, (0, 0), "16 significant bits"),
        (1.0, (5, -128), "-128"),
        (0.0, (0, 1), "zero"),
    ],
)
@pytest.mark.parametrize("numba", [True, False])
def test_what_no_encoder_writes_is_refused(
    scale: float, codes: tuple[int, int], reason: str, numba: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "has_numba", lambda: numba and has_numba())
    payload = np.frombuffer(struct.pack("<f2bf2b", 1.0, 127, 1, scale, *codes), np.uint8)

    for decode in (Int8Hop(2).add, Int8Hop(2).copy):
        with pytest.raises(MalformedPayload, match=reason):
            decode(payload, np.zeros(4, np.float32))


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=13, max_size=13))
def test_any_bytes_are_decoded_to_finite_values_or_refused(noise: bytes) -> None:
    values = np.zeros(5, np.float32)
    try:
        Int8Hop(4).copy(np.frombuffer(noise, np.uint8), values)
    except MalformedPayload:
        return
    assert np.isfinite(values).all()


def test_it_is_a_hop_that_ranks_can_compare() -> None:
    hop: MessageCodec = Int8Hop(64)

    assert hop == Int8Hop(64) != Int8Hop(65)
    assert len({Int8Hop(64), Int8Hop(64)}) == 1
    assert repr(hop) == "Int8Hop(unit=64)"


def test_it_works_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    hop, values = Int8Hop(16), any_bits(300, 1)
    payload, said = encoded(hop, values), decoded(hop, encoded(hop, values), 300)
    monkeypatch.setattr(compiling, "has_numba", lambda: False)
    settled, total = values.copy(), np.ones(300, np.float32)

    hop.settle(settled)
    hop.add(memoryview(payload.tobytes()), total)

    assert (encoded(hop, values) == payload).all()
    assert (decoded(hop, payload, 300) == said).all()
    assert (settled == said).all()
    assert (total == 1 + said).all()


def all_reduce(me: Rank, algorithm: str, length: int) -> torch.Tensor:
    tensor, plan = floats(me.rank, length), catalogue.plan(Kind.ALL_REDUCE, algorithm, me.rank, me.size)
    me.sequences[me.channel] += 1
    me.communicator.start(
        Request(plan, tensor, "sum", me.channel, me.sequences[me.channel], 1000, message_codec=Int8Hop(64))
    ).wait()
    return tensor


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_end_with_the_same_bits_close_to_the_sum(algorithm: str, size: int) -> None:
    results = run_ranks(size, lambda me: all_reduce(me, algorithm, 1501))
    expected = torch.stack([floats(rank, 1501) for rank in range(size)]).sum(0)

    for result in results:
        assert torch.equal(result.view(torch.int32), results[0].view(torch.int32))
    assert 0 < (results[0] - expected).norm() < 0.02 * expected.norm()
