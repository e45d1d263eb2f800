"""Runs of zeros: what is written is read back, byte for byte as documented, and nothing else is taken."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.compress.layout import Blocks, Layout
from stretto.compress.run_length import decode_sparse, encode_sparse, max_bytes
from stretto.errors import MalformedPayload

LONGEST = 65535


def blocks_of(*sizes: int) -> Blocks:
    return Layout.of([(str(i), (size,)) for i, size in enumerate(sizes)]).whole()


def payload_of(counts: list[int], pairs: list[tuple[int, float]]) -> Tensor:
    runs, values = [run for run, _ in pairs], [value for _, value in pairs]
    raw = struct.pack(f"<{len(counts)}I{len(pairs)}f{len(pairs)}H", *counts, *values, *runs)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def encoded(positions: list[int], values: list[float], blocks: Blocks) -> Tensor:
    return encode_sparse(torch.tensor(positions, dtype=torch.int64), torch.tensor(values), blocks)


def test_the_bytes() -> None:
    got = encoded([0, 3, 4, 7], [1.0, -2.0, 3.0, 4.0], blocks_of(4, 6))
    assert got.tolist() == payload_of([2, 2], [(0, 1.0), (2, -2.0), (0, 3.0), (2, 4.0)]).tolist()


@pytest.mark.parametrize(
    ("position", "pairs"),
    [
        (65535, [(65535, 5.0)]),
        (65536, [(65535, 0.0), (0, 5.0)]),
        (65537, [(65535, 0.0), (1, 5.0)]),
        (131071, [(65535, 0.0), (65535, 5.0)]),
        (131072, [(65535, 0.0), (65535, 0.0), (0, 5.0)]),
    ],
)
def test_long_runs_are_cut_by_fillers(position: int, pairs: list[tuple[int, float]]) -> None:
    blocks = blocks_of(3, 200_000)
    got = encoded([1, 3 + position, 3 + position + 2], [9.0, 5.0, 6.0], blocks)
    assert got.tolist() == payload_of([1, len(pairs) + 1], [(1, 9.0), *pairs, (1, 6.0)]).tolist()
    positions, values = decode_sparse(got, blocks)
    assert positions.tolist() == [1, 3 + position, 3 + position + 2]
    assert values.tolist() == [9.0, 5.0, 6.0]


sizes_and_choices = st.lists(st.integers(1, 300), max_size=5).flatmap(
    lambda sizes: st.tuples(st.just(sizes), st.sets(st.integers(0, max(0, sum(sizes) - 1))) if sizes else st.just(set()))
)


@settings(max_examples=50, deadline=None)
@given(sizes_and_choices)
def test_what_is_written_is_read_back(given_: tuple[list[int], set[int]]) -> None:
    sizes, chosen = given_
    blocks = blocks_of(*sizes)
    positions = torch.tensor(sorted(chosen), dtype=torch.int64)
    values = torch.linspace(-3, 2, len(positions)) + 1e-3
    payload = encode_sparse(positions, values, blocks)
    assert len(payload) == 4 * len(sizes) + 6 * len(positions) <= max_bytes(blocks, sizes)
    for offset in range(4):  # a row of what was gathered need not be aligned
        row = torch.zeros(len(payload) + offset, dtype=torch.uint8)
        row[offset:] = payload
        again, same = decode_sparse(row[offset:], blocks)
        assert torch.equal(again, positions)
        assert torch.equal(same, values)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 999_999), max_size=6, unique=True), st.integers(1, 999_999))
def test_no_payload_is_longer_than_the_bound(chosen: list[int], border: int) -> None:
    blocks = blocks_of(border, 1_000_000 - border)
    positions = torch.tensor(sorted(chosen), dtype=torch.int64)
    payload = encode_sparse(positions, torch.ones(len(positions)), blocks)
    most = [sum(one < border for one in chosen), sum(one >= border for one in chosen)]
    assert len(payload) <= max_bytes(blocks, most)
    assert torch.equal(decode_sparse(payload, blocks)[0], positions)


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        (torch.zeros(7, dtype=torch.uint8), "bytes"),
        (torch.zeros(9, dtype=torch.uint8), "bytes"),
        (payload_of([1], [(0, 1.0)]), "bytes"),
        (payload_of([1, 1], [(0, 1.0)]), "announced"),
        (payload_of([0, 0], [(0, 1.0)]), "announced"),
        (payload_of([2**32 - 1, 2], [(0, 1.0)]), "announced"),
        (payload_of([1, 0], [(5, 1.0)]), "beyond"),
        (payload_of([0, 2], [(LONGEST, 1.0), (LONGEST, 1.0)]), "beyond"),
        (payload_of([1, 0], [(0, float("inf"))]), "finite"),
        (payload_of([1, 0], [(0, float("nan"))]), "finite"),
        (payload_of([1, 0], [(0, 0.0)]), "no filler"),
        (payload_of([1, 0], [(0, -0.0)]), "minus zero"),
        (payload_of([0, 1], [(LONGEST, 0.0)]), "ends in a filler"),
        (payload_of([0, 2], [(0, 1.0), (LONGEST, 0.0)]), "ends in a filler"),
        (payload_of([0, 2], [(LONGEST, -0.0), (0, 1.0)]), "minus zero"),
    ],
)
def test_malformed_payloads(payload: Tensor, problem: str) -> None:
    with pytest.raises(MalformedPayload, match=problem):
        decode_sparse(payload, blocks_of(5, 100_000))


def assert_decodes_or_is_refused(payload: Tensor, blocks: Blocks) -> None:
    """And if it decodes, then it is the one payload of what it says."""
    try:
        positions, values = decode_sparse(payload, blocks)
    except MalformedPayload:
        return
    assert torch.equal(encode_sparse(positions, values, blocks), payload)
    assert values.isfinite().all()
    assert (positions.diff() > 0).all()
    assert not len(positions) or 0 <= positions[0] <= positions[-1] < blocks.num_elements


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=80), st.booleans())
def test_random_bytes(raw: bytes, zero_counts: bool) -> None:
    payload = torch.tensor(list(raw), dtype=torch.uint8)
    if zero_counts:  # gets further into the decoder
        pairs = max(0, len(raw) - 8) // 6
        payload = torch.cat([payload_of([0, pairs], []), payload[8 : 8 + 6 * pairs]])
    assert_decodes_or_is_refused(payload, blocks_of(5, 100_000))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 7))
def test_flipped_bits(place: int, bit: int) -> None:
    blocks = blocks_of(10, 100_000)
    payload = encoded([0, 4, 10, 13, 80_000, 99_999], [1.0, -2.0, 1e-44, 3e38, 5.0, 6.0], blocks)
    payload[place % len(payload)] ^= 1 << bit
    assert_decodes_or_is_refused(payload, blocks)
