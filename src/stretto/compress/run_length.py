"""Few values of a long vector, as runs of zeros: 48 bits for each.

A block's non-zero values are written in order as pairs (zeros before it, value). A run of more than 65535 zeros is cut by
fillers: the pair (65535, 0.0) stands for 65536 zeros.

Layout:     for each block the number of its pairs (u32); then the values of all pairs (f32); then all runs (u16).
Bits:       48 per pair and 32 per block. A block of n has at most n // 65536 fillers.
Invariant:  there is one payload for given positions and values, and the decoder takes no other: it rejects pairs that reach
            beyond their block, values that are not finite, a zero that is not a filler, and a filler with nothing after it.
Reference:  Lin et al., "Deep Gradient Compression", ICLR 2018, for 16-bit runs. Departs from it: values and runs lie apart, so
            that both are aligned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.compress.layout import Blocks
from stretto.errors import MalformedPayload

LONGEST = 65535


def encode_sparse(positions: Tensor, values: Tensor, blocks: Blocks) -> Tensor:
    """`positions`: int64, ascending, in the whole vector. `values`: float32, one for each, finite and not zero."""
    bounds, _ = blocks.on(values.device)
    number = torch.searchsorted(bounds, positions, right=True) - 1
    before = bounds[number] - 1
    before[1:] = torch.maximum(before[1:], positions[:-1])
    zeros = positions - before - 1
    pairs = zeros // (LONGEST + 1) + 1
    last = pairs.cumsum(0) - 1
    total = int(last[-1]) + 1 if len(last) else 0
    runs = torch.full((total,), LONGEST, dtype=torch.int64, device=values.device)
    runs[last] = zeros % (LONGEST + 1)
    spread = torch.zeros(total, device=values.device, dtype=torch.float32)
    spread[last] = values
    counts = torch.zeros(len(blocks), dtype=torch.int64, device=values.device).index_add_(0, number, pairs)
    return torch.cat([_bytes(counts.to(torch.uint32)), _bytes(spread), _bytes(runs.to(torch.uint16))])


def decode_sparse(payload: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Positions and values, as they were given to `encode_sparse`."""
    counts, values, runs = _fields(payload, len(blocks))
    filler = values.view(torch.int32) == 0
    _check_values(values, runs, filler)
    bounds, _ = blocks.on(payload.device)
    stops, index = counts.cumsum(0), torch.arange(len(values), device=payload.device, dtype=torch.int64)
    number = torch.searchsorted(stops, index, right=True)
    if (filler & (index + 1 == stops[number])).any():
        raise MalformedPayload("a block ends in a filler")
    reach = torch.zeros_like(counts).index_add_(0, number, runs + 1)
    if (reach > bounds.diff()).any():
        raise MalformedPayload("a run of zeros reaches beyond the end of its block")
    start = bounds[:-1] - (reach.cumsum(0) - reach)
    positions = start[number] + (runs + 1).cumsum(0) - 1
    return (positions[~filler], values[~filler]) if filler.any() else (positions, values)


def max_bytes(blocks: Blocks, most: list[int]) -> int:
    """The longest payload with at most `most[b]` values in block b."""
    fillers = (blocks.lengths // (LONGEST + 1)).sum()
    return 4 * len(blocks) + 6 * (sum(most) + int(fillers))


def _fields(payload: Tensor, num_blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    total, rest = divmod(len(payload) - 4 * num_blocks, 6)
    if total < 0 or rest:
        raise MalformedPayload(f"{len(payload)} bytes are not {num_blocks} counts of 4 bytes and pairs of 6")
    parts = torch.split(payload, [4 * num_blocks, 4 * total, 2 * total])
    counts, values, runs = (part.clone().view(dtype) for part, dtype in zip(parts, _DTYPES, strict=True))
    counts = counts.to(torch.int64)
    if int(counts.sum()) != total:
        raise MalformedPayload(f"{int(counts.sum())} pairs are announced and {total} are there")
    return counts, values, runs.to(torch.int64)


_DTYPES = (torch.uint32, torch.float32, torch.uint16)


def _check_values(values: Tensor, runs: Tensor, filler: Tensor) -> None:
    if not values.isfinite().all():
        raise MalformedPayload("a value is not finite")
    if (values.view(torch.int32) == -(2**31)).any():
        raise MalformedPayload("a value is minus zero")
    if (runs[filler] != LONGEST).any():
        raise MalformedPayload(f"a value is zero and its run is not {LONGEST}, so it is no filler")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
