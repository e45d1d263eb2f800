"""Frames: what is written is read again, and nothing but a ValueError comes of anything else."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.wire import frames
from stretto.wire.frames import DTYPE_NAMES, HEADER_BYTES, MAX_PAYLOAD_BYTES, MAX_POST_BYTES, FrameKind, Header

U32 = st.integers(0, 2**32 - 1)
LIMITS = {
    FrameKind.INLINE: MAX_PAYLOAD_BYTES,
    FrameKind.BULK: MAX_PAYLOAD_BYTES,
    FrameKind.SHARED: MAX_PAYLOAD_BYTES,
    FrameKind.POST: MAX_POST_BYTES,
    FrameKind.ACK: MAX_POST_BYTES,
    FrameKind.GOODBYE: 0,
    FrameKind.HEARTBEAT: 0,
}


@st.composite
def headers(draw: st.DrawFn) -> Header:
    kind = draw(st.sampled_from(FrameKind))
    num_bytes = draw(st.integers(0, LIMITS[kind] // 4)) * 4 if kind == FrameKind.ACK else draw(st.integers(0, LIMITS[kind]))
    generation, source, channel, sequence, index, digest = (draw(U32) for _ in range(6))
    dtype = draw(st.integers(0, len(DTYPE_NAMES) - 1))
    slot = draw(st.integers(0, 2**16 - 1))
    return Header(kind, generation, source, channel, sequence, index, digest, dtype, slot, draw(U32), num_bytes)


def whole(payload: bytes = b"", *, kind: int = FrameKind.INLINE, num_bytes: int | None = None) -> bytes:
    header = Header(kind, 0, 1, 2, 3, 4, 5, 1, 0, 0, len(payload) if num_bytes is None else num_bytes)
    return frames.encode(header) + payload


def test_every_kind_has_a_limit() -> None:
    assert set(LIMITS) == set(FrameKind)


@given(headers())
def test_a_header_is_read_as_it_was_written(header: Header) -> None:
    encoded = frames.encode(header)
    assert len(encoded) == HEADER_BYTES
    assert frames.decode_stream(encoded) == header
    assert frames.decode_stream(memoryview(encoded + b"what follows")) == header


@given(st.sampled_from([FrameKind.INLINE, FrameKind.POST]), st.binary(max_size=300))
def test_a_whole_frame_is_read_as_it_was_written(kind: FrameKind, payload: bytes) -> None:
    header = frames.decode(whole(payload, kind=kind))
    assert header.kind == kind and header.num_bytes == len(payload)


@pytest.mark.parametrize(
    ("offset", "value", "named"),
    [
        (0, b"XX", "magic 0x5858"),
        (2, b"\x09", "version 9"),
        (3, b"\0", "kind 0"),
        (3, b"\x08", "kind 8"),
        (3, b"\xff", "kind 255"),
        (28, bytes([len(DTYPE_NAMES)]), f"dtype code {len(DTYPE_NAMES)}"),
        (29, b"\1", "reserved"),
        (36, b"\0\0\0\1", "reserved"),
        (40, struct.pack("<Q", MAX_PAYLOAD_BYTES + 1), f"{MAX_PAYLOAD_BYTES + 1} payload bytes declared"),
        (40, b"\xff" * 8, "payload bytes declared"),
    ],
)
def test_a_corrupted_field_is_named(offset: int, value: bytes, named: str) -> None:
    part = whole()[:offset] + value + whole()[offset + len(value) :]
    for decode in (frames.decode, frames.decode_stream):
        with pytest.raises(ValueError, match=named):
            decode(part)


@pytest.mark.parametrize("kind", list(FrameKind))
def test_the_declared_length_is_bounded_for_every_kind(kind: FrameKind) -> None:
    limit = LIMITS[kind]
    assert frames.decode_stream(whole(kind=kind, num_bytes=limit)).num_bytes == limit
    with pytest.raises(ValueError, match=f"the limit is {limit}"):
        frames.decode_stream(whole(kind=kind, num_bytes=limit + 4))


def test_an_acknowledgement_is_a_list_of_numbers() -> None:
    with pytest.raises(ValueError, match="6 bytes is not a list of numbers"):
        frames.decode(whole(bytes(6), kind=FrameKind.ACK))


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1])
def test_less_than_a_header_is_named(length: int) -> None:
    with pytest.raises(ValueError, match=f"{length} bytes where a header of {HEADER_BYTES} is due"):
        frames.decode(whole()[:length])
    with pytest.raises(ValueError, match=f"{length} bytes where a header of {HEADER_BYTES} is due"):
        frames.decode_stream(whole()[:length])


@pytest.mark.parametrize("kind", list(FrameKind))
def test_a_part_that_is_longer_or_shorter_than_declared_is_named(kind: FrameKind) -> None:
    with pytest.raises(ValueError, match="4 bytes after the header where 0 are due"):
        frames.decode(whole(bytes(4), kind=kind, num_bytes=0))
    if kind in (FrameKind.INLINE, FrameKind.POST, FrameKind.ACK):
        with pytest.raises(ValueError, match="4 bytes after the header where 8 are due"):
            frames.decode(whole(bytes(4), kind=kind, num_bytes=8))


@given(st.binary(max_size=200))
def test_random_bytes_give_a_value_error_and_nothing_else(part: bytes) -> None:
    for decode in (frames.decode, frames.decode_stream):
        with pytest.raises(ValueError):
            decode(part)


@given(st.binary(min_size=46, max_size=200))
def test_random_bytes_behind_the_right_magic_never_give_anything_but_a_header_or_a_value_error(rest: bytes) -> None:
    part = frames.encode(Header(1, *[0] * 10))[:2] + rest
    for decode in (frames.decode, frames.decode_stream):
        try:
            header = decode(memoryview(part))
        except ValueError:
            continue
        assert header.num_bytes <= LIMITS[FrameKind(header.kind)] and header.dtype < len(DTYPE_NAMES)


@given(headers(), st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_one_flipped_byte_is_another_valid_header_or_a_value_error(header: Header, offset: int, flip: int) -> None:
    part = bytearray(frames.encode(header))
    part[offset] ^= flip
    try:
        other = frames.decode_stream(memoryview(part))
    except ValueError:
        return
    assert other != header and other.num_bytes <= LIMITS[FrameKind(other.kind)]
