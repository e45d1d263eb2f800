"""Payloads of few bits: a header of float32 per block, then fields of 1 to 8 bits.

    float32 of block 0, of block 1, ...; fields of block 0, padded to whole bytes; fields of block 1, padded; ...

Little-endian; field i of a block begins at its bit i * bits, bits are counted from the lowest of the first byte. Padding bits are
0, and a decoder takes no other. So a block's bytes do not depend on its neighbours, and payloads can be cut between blocks.
Cost: 32 bits per float32, `bits` per value, and up to 7 bits of padding per block.

What is here is plain torch and runs on every device; `kernels/bits_cpu.py` and `kernels/bits_cuda.py` have the
same in one pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stretto.compress.layout import Blocks
from stretto.errors import MalformedPayload

FINE, BAD_SCALE, BAD_PADDING, BAD_FIELD = 0, 1, 2, 3  # what a compiled decoder returns
_WORDS = {
    BAD_SCALE: "a scale is not finite or has the wrong sign",
    BAD_PADDING: "padding bits are not zero",
    BAD_FIELD: "a field holds a code that no encoder writes",
}


class Payload(NamedTuple):
    """`whole` as it travels; `scales` (float32) and `packed` (uint8) are its two parts."""

    whole: Tensor
    scales: Tensor
    packed: Tensor


def num_bytes(blocks: Blocks, bits: int, scales: int) -> int:
    """`scales`: how many float32 each block has in the header."""
    if bits == 8:
        return 4 * scales * len(blocks) + blocks.num_elements
    return 4 * scales * len(blocks) + int(_widths(blocks, bits).sum())


def blank(blocks: Blocks, bits: int, scales: int, values: Tensor) -> Payload:
    """To be written, for these values: both parts are views of the whole."""
    assert len(values) == blocks.num_elements, "kernels trust the blocks"
    whole = blocks.pool.empty(num_bytes(blocks, bits, scales), torch.uint8, values.device)
    header = 4 * scales * len(blocks)
    return Payload(whole, whole[:header].view(torch.float32), whole[header:])


def opened(payload: Tensor, blocks: Blocks, bits: int, scales: int) -> Payload:
    """To be read. The scales are a copy: what comes off a wire may begin at any address."""
    expected, header = num_bytes(blocks, bits, scales), 4 * scales * len(blocks)
    if len(payload) != expected:
        raise MalformedPayload(f"{len(payload)} bytes came where {expected} must")
    return Payload(payload, payload[:header].clone().view(torch.float32), payload[header:])


def check(outcome: int) -> None:
    """Say in words what a decoder found."""
    if outcome != FINE:
        raise MalformedPayload(_WORDS[outcome])


def check_scales(scales: Tensor) -> None:
    """Those that are magnitudes."""
    if not (scales.isfinite() & (scales >= 0)).all():
        check(BAD_SCALE)


def pack(fields: Tensor, blocks: Blocks, bits: int) -> Tensor:
    """Fields (uint8, one per value) to bytes."""
    single = torch.zeros(8 * int(_widths(blocks, bits).sum()), dtype=torch.uint8, device=fields.device)
    positions = _positions(blocks, bits, fields.device)
    for j in range(bits):
        single[positions + j] = (fields >> j) & 1
    shifts = torch.arange(8, dtype=torch.uint8, device=fields.device)
    return (single.view(-1, 8) << shifts).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, blocks: Blocks, bits: int) -> Tensor:
    """The reverse; refuses padding bits that are set."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    single = ((packed.unsqueeze(1) >> shifts) & 1).view(-1)
    positions = _positions(blocks, bits, packed.device)
    fields = torch.zeros(blocks.num_elements, dtype=torch.uint8, device=packed.device)
    num_set = torch.zeros((), dtype=torch.int64, device=packed.device)
    for j in range(bits):
        bit = single[positions + j]
        num_set += bit.sum()
        fields |= bit << j
    if num_set != single.sum():  # some set bit is in no field
        check(BAD_PADDING)
    return fields


def sums(values: Tensor, blocks: Blocks) -> Tensor:
    """The sum of each block, in float64."""
    return torch.segment_reduce(values.double(), "sum", lengths=blocks.lengths.to(values.device), unsafe=True)


def largest_magnitudes(values: Tensor, blocks: Blocks) -> Tensor:
    return torch.segment_reduce(values.abs(), "max", lengths=blocks.lengths.to(values.device), unsafe=True)


def _widths(blocks: Blocks, bits: int) -> Tensor:
    """Bytes of each block."""
    return (blocks.lengths * bits + 7) // 8


def _positions(blocks: Blocks, bits: int, device: torch.device) -> Tensor:
    """For every value, the first bit of its field."""
    bounds, numbers = blocks.on(device)[0], blocks.numbers(device)
    widths = (bounds.diff() * bits + 7) // 8
    starts = 8 * (widths.cumsum(0) - widths)
    index = torch.arange(blocks.num_elements, device=device, dtype=torch.int64) - bounds[numbers]
    return starts[numbers] + index * bits
