"""How a ring or halving-doubling carries `Int8`: signed bytes that are decoded, added to and encoded anew at every hop.

Bits:       8 n + 32 per unit of `unit` elements. Layout: for each unit its scale (float32, little-endian), then its codes (int8);
            so any range of whole units is one piece of memory, where `Int8` has all scales first.
Units:      counted from element 0 of the vector that travels, whatever tensors lie in it. `Int8` cuts tensor by tensor; the two
            give the same codes for one tensor alone.
Invariant:  encode(decode(payload)) == payload, bit for bit; see `int8.py`. So whoever forwards a sum that is complete changes
            nothing.
Range:      values that are not finite (a sum on its way may overflow) come out as the largest there is: plus or minus 127 s,
            about 3.4e38; NaN as plus.
Reference:  see `int8.py`. The error of a running sum grows with the square root of the number of hops.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.compress.backend import accelerated
from stretto.compress.int8 import check_codes, codes_of, scales_of
from stretto.errors import MalformedPayload

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
CPU = torch.device("cpu")  # where hops are carried out


@dataclass(frozen=True, slots=True)
class Int8Hop:
    """`unit`: how many elements share a scale."""

    unit: int

    def num_bytes(self, count: int) -> int:
        return 4 * -(-count // self.unit) + count

    def encode(self, values: Floats, out: Bytes) -> None:
        encode_units.on(CPU)(values, self.unit, out)

    def add(self, payload: Bytes | memoryview, values: Floats) -> None:
        """If it raises, `values` is of no use."""
        decode_units.on(CPU)(self._checked(payload, values), self.unit, values, True)

    def copy(self, payload: Bytes | memoryview, values: Floats) -> None:
        decode_units.on(CPU)(self._checked(payload, values), self.unit, values, False)

    def settle(self, values: Floats) -> None:
        settle_units.on(CPU)(values, self.unit)

    def _checked(self, payload: Bytes | memoryview, values: Floats) -> Bytes:
        incoming = np.frombuffer(payload, np.uint8)
        if len(incoming) != self.num_bytes(len(values)):
            raise MalformedPayload(f"{len(incoming)} bytes where {self.num_bytes(len(values))} must come")
        return incoming


@accelerated(cpu="int8_cpu.encode_units")
def encode_units(values: Floats, unit: int, out: Bytes) -> None:
    """One row for each unit, the last filled up with zeros, which are cut off again."""
    rows = torch.zeros(-(-len(values) // unit), unit, dtype=torch.float32, device="cpu")
    rows.view(-1)[: len(values)] = torch.from_numpy(values)
    rows.nan_to_num_(torch.finfo(torch.float32).max)
    scales = scales_of(rows.abs().amax(1))
    codes = codes_of(rows, scales.unsqueeze(1))
    table = torch.cat([scales.view(torch.uint8).view(len(rows), 4), codes.view(torch.uint8)], 1)
    out[:] = table.flatten()[: len(out)].numpy()


@accelerated(cpu="int8_cpu.decode_units")
def decode_units(payload: Bytes, unit: int, values: Floats, adding: bool) -> None:
    rows = torch.zeros(-(-len(values) // unit), 4 + unit, dtype=torch.uint8, device="cpu")
    rows.view(-1)[: len(payload)] = torch.from_numpy(payload.copy())  # torch does not take memory that is read-only
    scales, codes = rows[:, :4].flatten().view(torch.float32).unsqueeze(1), rows[:, 4:].contiguous()
    check_codes(scales, codes, scales.expand(codes.shape))
    decoded = (codes.view(torch.int8) * scales).flatten()[: len(values)].numpy()
    values[:] = values + decoded if adding else decoded


@accelerated(cpu="int8_cpu.settle_units")
def settle_units(values: Floats, unit: int) -> None:
    """Encode, and decode again."""
    payload = np.empty(Int8Hop(unit).num_bytes(len(values)), np.uint8)
    encode_units.reference(values, unit, payload)
    decode_units.reference(payload, unit, values, False)
