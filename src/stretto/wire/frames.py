"""The bytes of a frame: a fixed header, checked field by field.

    offset  size  field
         0     2  magic 0x5374 ("tS" little-endian)
         2     1  version
         3     1  kind                 (`FrameKind`)
         4     4  generation           in which the source joined: which life of that rank it is
         8     4  source rank
        12     4  channel   \\
        16     4  sequence   } tag; for a control message `channel` is its topic
        20     4  index     /
        24     4  digest               of the collective the sender believes it is in
        28     1  dtype code
        29     1  reserved, 0
        30     2  slot                 of shared memory (kind SHARED)
        32     4  message number       for acknowledgement (kinds BULK and SHARED)
        36     4  reserved, 0
        40     8  payload bytes

The payload follows in the same message part (INLINE, POST, ACK) or in a part of its own (BULK), or is in shared memory (SHARED).
Whatever does not fit is a `ValueError` that says which field: never an abort, never a short read.
"""

from __future__ import annotations

import enum
import struct
from typing import Final, NamedTuple

MAGIC: Final = 0x5374
VERSION: Final = 3
HEADER: Final = struct.Struct("<HBBIIIIIIBBHIIQ")
HEADER_BYTES: Final = HEADER.size
assert HEADER_BYTES == 48

MAX_PAYLOAD_BYTES: Final = 1 << 28  # one message; collectives cut their tensors into far smaller segments
MAX_POST_BYTES: Final = 1 << 20


class FrameKind(enum.IntEnum):
    INLINE = 1  # payload in the header's part
    BULK = 2  # payload in a part of its own, sent without a copy: acknowledged
    SHARED = 3  # payload in a slot of shared memory: acknowledged
    POST = 4  # control message
    ACK = 5  # payload: message numbers, u32 each
    GOODBYE = 6
    HEARTBEAT = 7


# Names of torch dtypes; a wire compares the codes and knows nothing else of them. Code 0: plain bytes.
DTYPE_NAMES: Final = (
    "bytes",
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "bool",
    "complex64",
    "complex128",
)
DTYPE_CODES: Final = {name: code for code, name in enumerate(DTYPE_NAMES)}


class Header(NamedTuple):
    kind: int
    generation: int
    source: int
    channel: int
    sequence: int
    index: int  # type: ignore[assignment]  # tuple has a method of that name, which nobody needs here
    digest: int
    dtype: int
    slot: int
    number: int
    num_bytes: int


def encode(header: Header) -> bytes:
    kind, generation, source, channel, sequence, index, digest, dtype, slot, number, num_bytes = header
    return HEADER.pack(
        MAGIC, VERSION, kind, generation, source, channel, sequence, index, digest, dtype, 0, slot, number, 0, num_bytes
    )


def decode(part: bytes | memoryview) -> Header:
    """The header of a frame that is whole in `part`; raises ValueError naming the first field that is wrong."""
    header = decode_stream(part)
    here = 0 if header.kind in (FrameKind.BULK, FrameKind.SHARED) else header.num_bytes
    if len(part) - HEADER_BYTES != here:
        raise ValueError(f"{len(part) - HEADER_BYTES} bytes after the header where {here} are due")
    return header


def decode_stream(part: bytes | memoryview) -> Header:
    """The header at the start of `part`, whose payload may still be on its way."""
    if len(part) < HEADER_BYTES:
        raise ValueError(f"{len(part)} bytes where a header of {HEADER_BYTES} is due")
    (magic, version, kind, generation, source, channel, sequence, index, digest, dtype, zero, slot, number, zero2, n) = (
        HEADER.unpack_from(part)
    )
    if magic != MAGIC:
        raise ValueError(f"magic {magic:#06x} where {MAGIC:#06x} is due")
    if version != VERSION:
        raise ValueError(f"protocol version {version}, this side speaks {VERSION}")
    if not FrameKind.INLINE <= kind <= FrameKind.HEARTBEAT:
        raise ValueError(f"unknown kind {kind}")
    if zero or zero2:
        raise ValueError("reserved fields are not zero")
    if dtype >= len(DTYPE_NAMES):
        raise ValueError(f"unknown dtype code {dtype}")
    _check_length(kind, n)
    return Header(kind, generation, source, channel, sequence, index, digest, dtype, slot, number, n)


def _check_length(kind: int, declared: int) -> None:
    limit = MAX_PAYLOAD_BYTES
    if kind in (FrameKind.POST, FrameKind.ACK):
        limit = MAX_POST_BYTES
    elif kind in (FrameKind.GOODBYE, FrameKind.HEARTBEAT):
        limit = 0
    if declared > limit:
        raise ValueError(f"{declared} payload bytes declared, the limit is {limit}")
    if kind == FrameKind.ACK and declared % 4:
        raise ValueError(f"an acknowledgement of {declared} bytes is not a list of numbers")
