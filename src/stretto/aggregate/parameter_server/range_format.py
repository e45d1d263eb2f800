"""All that a server keeps of one range, as bytes: for a new replica, and for a snapshot.

    | bytes of the header, 4 | header: `RangeHeader` in msgpack | values | vectors of the optimizer | M | backups |
                                                                 `------- each of them `size` float32, little-endian -------'

Backups are what workers hold, for delay compensation; those who hold the same version share one, and version 0 is the values.

Bytes may come from anywhere: nothing is allocated before their length has been compared with what the header says, and a header
says nothing that the optimizer of this range could not have written. What is read lies in the given memory, and is to be copied.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from stretto.aggregate.parameter_server.shard_optimizer import OptimizerSpec
from stretto.errors import MalformedPayload

FORMAT: Final = 1
LENGTH: Final = struct.Struct("<I")
MAX_HEADER_BYTES: Final = 1 << 20
FLOAT: Final = np.dtype("<f4")
Floats = NDArray[np.float32]


class RangeHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What lies in the bytes behind it, in this order."""

    format: int
    size: int
    optimizer: str | None
    scalars: dict[str, float]
    vectors: list[str]
    has_mean_square: bool
    num_backups: int
    workers: dict[int, int]  # worker -> the number of its version: 0 is the values, and 1 the first backup


@dataclass(slots=True)
class RangeContent:
    """Values, the optimizer's state by name, and what delay compensation remembers."""

    values: Floats
    scalars: Mapping[str, float] = field(default_factory=dict)
    vectors: Mapping[str, Floats] = field(default_factory=dict)
    mean_square: Floats | None = None
    backups: Mapping[int, Floats] = field(default_factory=dict)  # of workers; the same array for those who hold the same version


def encode(content: RangeContent, spec: OptimizerSpec | None) -> bytes:
    """One copy of everything."""
    versions = [content.values]
    workers = {worker: _number_of(backup, versions) for worker, backup in content.backups.items()}
    header = RangeHeader(
        format=FORMAT,
        size=content.values.size,
        optimizer=None if spec is None else spec.name,
        scalars=dict(content.scalars),
        vectors=list(content.vectors),
        has_mean_square=content.mean_square is not None,
        num_backups=len(versions) - 1,
        workers=workers,
    )
    text = msgspec.msgpack.encode(header)
    arrays = [content.values, *content.vectors.values(), content.mean_square, *versions[1:]]
    body = (array.astype(FLOAT, copy=False).data for array in arrays if array is not None)
    return b"".join([LENGTH.pack(len(text)), text, *body])


def _number_of(backup: Floats, versions: list[Floats]) -> int:
    """Its place among the versions, which it joins if it is new. The same memory is the same version."""
    for number, version in enumerate(versions):
        if version.ctypes.data == backup.ctypes.data:
            return number
    versions.append(backup)
    return len(versions) - 1


def decode(data: memoryview, size: int, spec: OptimizerSpec | None, *, has_mean_square: bool, has_backups: bool) -> RangeContent:
    """What `encode` has written for a range of this size, optimizer and delay compensation. The arrays lie in `data`."""
    header, start = _read_header(data)
    wrong = _mismatch(header, size, spec, has_mean_square, has_backups)
    if wrong := wrong or _fault_in_state(header, spec) or _fault_in_workers(header):
        raise _malformed(wrong)
    arrays = iter(_arrays(data[start:], 1 + len(header.vectors) + header.has_mean_square + header.num_backups, size))
    values = next(arrays)
    vectors = {name: next(arrays) for name in header.vectors}
    mean_square = next(arrays) if header.has_mean_square else None
    versions = [values, *arrays]
    backups = {worker: versions[number] for worker, number in header.workers.items()}
    return RangeContent(values, header.scalars, vectors, mean_square, backups)


def _arrays(body: memoryview, count: int, size: int) -> list[Floats]:
    num_bytes = size * FLOAT.itemsize
    if body.nbytes != count * num_bytes:
        raise _malformed(f"{body.nbytes} bytes follow the header, and {count} arrays of {size} float32 were announced")
    return [np.frombuffer(body[start * num_bytes : (start + 1) * num_bytes], FLOAT) for start in range(count)]


def _read_header(data: memoryview) -> tuple[RangeHeader, int]:
    """And where the arrays begin."""
    if data.nbytes < LENGTH.size:
        raise _malformed(f"it has {data.nbytes} bytes")
    (length,) = LENGTH.unpack_from(data)
    stop = LENGTH.size + length
    if length > MAX_HEADER_BYTES or stop > data.nbytes:
        raise _malformed(f"a header of {length} bytes is announced, in {data.nbytes} bytes")
    try:
        return msgspec.msgpack.decode(data[LENGTH.size : stop], type=RangeHeader), stop
    except (msgspec.MsgspecError, ValueError, RecursionError) as problem:
        raise _malformed(f"its header cannot be read ({str(problem)[:200]})") from problem


def _mismatch(header: RangeHeader, size: int, spec: OptimizerSpec | None, has_mean_square: bool, has_backups: bool) -> str | None:
    if header.format != FORMAT:
        return f"it has format {header.format}, and this stretto reads format {FORMAT}"
    if header.size != size:
        return f"it has {header.size} elements, and this range {size}"
    name = None if spec is None else spec.name
    if header.optimizer != name:
        return f"it is of the optimizer {str(header.optimizer)[:100]}, and this range has {name}"
    if header.has_mean_square != has_mean_square or (header.workers and not has_backups):
        return "it was written under another delay compensation than this range has"
    return None


def _fault_in_state(header: RangeHeader, spec: OptimizerSpec | None) -> str | None:
    """The state is as after an update, or there is none."""
    if not header.scalars and not header.vectors:
        return None
    if spec is None:
        return "it has the state of an optimizer, and names none"
    kind = spec.kind
    if header.scalars.keys() != kind.scalars.keys():
        return f"the scalars of its optimizer are {sorted(header.scalars)[:10]}, and {spec.name} has {sorted(kind.scalars)}"
    for name, (is_good, wanted) in kind.scalars.items():
        if not is_good(header.scalars[name]):
            return f"{name} of its optimizer is {header.scalars[name]}, and not {wanted}"
    given = set(header.vectors)
    if len(given) != len(header.vectors) or not set(kind.vectors) <= given <= set(kind.all_vectors):
        return f"the vectors of its optimizer are {header.vectors[:10]}, and {spec.name} has {list(kind.all_vectors)}"
    return None


def _fault_in_workers(header: RangeHeader) -> str | None:
    if not 0 <= header.num_backups <= len(header.workers):
        return f"it has {header.num_backups} backups for {len(header.workers)} workers"
    if not all(worker >= 0 and 0 <= number <= header.num_backups for worker, number in header.workers.items()):
        return f"a worker holds a version that is not among its {header.num_backups} backups"
    return None


def _malformed(why: str) -> MalformedPayload:
    return MalformedPayload(f"what was given as the state of a range is not one: {why}. The range is as it was before.")
