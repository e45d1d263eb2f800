"""Between which two magnitudes the k-th largest of each block lies (its *edge*), on a GPU, and no waiting for the device.

Magnitudes are compared as integers, the bits without the sign. The edge is enclosed in a window, low <= edge <= high:

    1. a sample of 8192 elements, one at random from each stretch of the block, gives a window of three deviations either way
    2. one pass over the block counts what is above the window and on its ends, and what lies between them in 4096 bins of equal
       width. Few elements do, so adding to a bin in the device's memory costs little; many equals (zeros, say) are on an end
    3. these counts say in which bin the edge lies: that is the new window. Usually few elements are in it, and that is narrow
       enough
    4. where it is not (many are equal, as gradients of bfloat16 are, or the sample misled), steps 2 and 3 are done again. They
       are launched as often as any values need, each time 12 of 31 bits become known, and return at once where nothing is left

So the sample decides how long it takes and never what the edge is. Blocks of up to 8192 elements are in the sample as a whole.
Memory while it runs: 16 KiB for each longer block.
"""

# What Triton compiles has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.compress.kernels.random_numbers_cuda import as_argument, bits_of
from stretto.compress.kernels.spans_cuda import MAGNITUDE, NUM_WARPS, SPAN, Spans, magnitudes_at
from stretto.compress.kernels.starting_cuda import kernel
from stretto.compress.layout import Blocks

SAMPLE = 8192
DEVIATIONS = 3.0
BIN_BITS = tl.constexpr(12)
NUM_BINS = tl.constexpr(1 << BIN_BITS.value)
NUM_LEVELS = 4  # the window is moved so often at most: once because the sample misled, and until 31 bits are known, 12 at a time
FEW_PROGRAMS = 1056  # of a pass that is hardly ever needed: eight for each processor of a large GPU
TWO_OCTAVES, HIGHEST_GUESS = tl.constexpr(2 << 23), tl.constexpr(0x7FFFFFFF - (2 << 23))
LOW, HIGH, SHIFT, OPEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # columns of `state`


@dataclass(frozen=True, slots=True)
class Search:
    """What does not depend on the values. Tensors have one number per block, in the device's memory."""

    bounds: Tensor
    counts: Tensor  # k
    ranks: Tensor  # 2 per block: which of the sample's largest are high and low; 0: none
    bin_rows: Tensor  # numbers of the blocks longer than the sample
    num_rows: int
    spans: Spans  # of these
    most_inside: int  # a window of so many elements is narrow enough

    @staticmethod
    def of(blocks: Blocks, counts: Tensor, most_inside: int, device: torch.device) -> Search:
        """`counts`: of each block, at least 1 and at most its length."""
        long = blocks.lengths > SAMPLE
        ranks = [_ranks(n, k) for n, k in zip(blocks.lengths.tolist(), counts.tolist(), strict=True)]
        return Search(
            bounds=blocks.on(device)[0],
            counts=counts.to(device),
            ranks=torch.tensor(ranks, dtype=torch.int64, device="cpu").to(device),
            bin_rows=(long.cumsum(0) - 1).to(torch.int32).to(device),
            num_rows=int(long.sum()),
            spans=Spans.of(blocks, long, device),
            most_inside=most_inside,
        )


@dataclass(frozen=True, slots=True)
class Windows:
    """`state`: four numbers per block, the first two low and high. `rest`: how many of those in the window are among the k
    largest; not known where low = high."""

    state: Tensor
    rest: Tensor


def _ranks(n: int, k: int) -> tuple[int, int]:
    if n <= SAMPLE:
        return k, k
    expected = SAMPLE * k / n
    margin = DEVIATIONS * math.sqrt(expected) + 2
    upper, lower = int(expected - margin), math.ceil(expected + margin)
    return max(upper, 0), lower if lower <= SAMPLE else 0


def windows_of(values: Tensor, search: Search, key: int) -> Windows:
    """`key`: of the sample. At most `search.most_inside` elements are in a window whose ends differ."""
    num_blocks, num_spans, device = len(search.counts), len(search.spans), values.device
    state = torch.empty(num_blocks, 4, dtype=torch.int32, device=device)
    rest = torch.empty(num_blocks, dtype=torch.int64, device=device)
    _guess[(num_blocks,)](values, search.bounds, search.ranks, as_argument(key), state, SAMPLE=SAMPLE, num_warps=16)
    if search.num_rows:
        num_bins = NUM_BINS.value * search.num_rows
        zeros = torch.zeros(num_bins + 4 * (NUM_LEVELS + 1), dtype=torch.int32, device=device)
        left = zeros[num_bins:].view(-1, 4)  # 16 bytes apart: Triton compiles anew for addresses that are not
        tallies = torch.empty(2, num_spans, dtype=torch.int32, device=device)
        for level in range(NUM_LEVELS):
            _count[(min(num_spans, FEW_PROGRAMS) if level else num_spans,)](
                values, *search.spans.columns, state, search.bin_rows, zeros, tallies, left[level:], num_spans,
                AGAIN=level > 0, SPAN=SPAN, num_warps=NUM_WARPS,
            )  # fmt: skip
            _narrow[(num_blocks,)](
                state, rest, search.counts, search.bin_rows, zeros, tallies, search.spans.bounds, left[level + 1 :], num_spans,
                MOST_INSIDE=search.most_inside, num_warps=16,
            )  # fmt: skip
    return Windows(state, rest)


@kernel("key")
def _guess(values, bounds, ranks, key, state, SAMPLE: tl.constexpr):
    block = tl.program_id(0)
    start = tl.load(bounds + block)
    n = tl.load(bounds + block + 1) - start
    j = tl.arange(0, SAMPLE)
    jitter = ((bits_of(key.to(tl.uint32), j) >> 8).to(tl.int64) * (n // SAMPLE)) >> 24
    index = tl.where(n <= SAMPLE, j.to(tl.int64), j * n // SAMPLE + jitter)
    magnitude = tl.load(values + start + index, mask=index < n, other=0.0).to(tl.int32, bitcast=True) & MAGNITUDE
    magnitude = tl.where(index < n, magnitude, -1)
    upper, lower = tl.load(ranks + 2 * block), tl.load(ranks + 2 * block + 1)
    high, low = 0, 0
    for step in range(31):  # bit by bit the largest number that so many reach; both counts in one sum
        bit = 1 << (30 - step)
        both = tl.sum((magnitude >= (high | bit)).to(tl.int32) + ((magnitude >= (low | bit)).to(tl.int32) << 16), 0)
        high = tl.where((both & 0xFFFF) >= upper, high | bit, high)
        low = tl.where((both >> 16) >= lower, low | bit, low)
    low = tl.where(lower == 0, 0, low)
    if upper == 0:  # so few are among the k largest that the sample may have none of them
        high = tl.minimum(tl.max(magnitude, 0), HIGHEST_GUESS) + TWO_OCTAVES
    _put(state, block, low, high, (n > SAMPLE).to(tl.int32))


@triton.jit
def _put(state, block, low, high, still_open):
    shift = 0  # of a bin's width, its logarithm: what is between low and high is in NUM_BINS bins
    while ((high - low - 2) >> BIN_BITS) >> shift > 0:
        shift += 1
    tl.store(state + 4 * block + LOW, low)
    tl.store(state + 4 * block + HIGH, high)
    tl.store(state + 4 * block + SHIFT, shift)
    tl.store(state + 4 * block + OPEN, still_open)


@kernel("num_spans")
def _count(
    values, owners, begins, ends, state, bin_rows, bins, tallies, left, num_spans, AGAIN: tl.constexpr, SPAN: tl.constexpr
):
    if AGAIN:
        stop = tl.where(tl.load(left) != 0, num_spans, 0)
        for span in range(tl.program_id(0), stop, tl.num_programs(0)):
            if tl.load(state + 4 * tl.load(owners + span) + OPEN) != 0:
                _count_span(values, owners, begins, ends, state, bin_rows, bins, tallies, num_spans, span, SPAN)
    else:
        _count_span(values, owners, begins, ends, state, bin_rows, bins, tallies, num_spans, tl.program_id(0), SPAN)


@triton.jit
def _count_span(values, owners, begins, ends, state, bin_rows, bins, tallies, num_spans, span, SPAN: tl.constexpr):
    # STEP is 1: threads would exchange elements before they add to bins, if they had read several side by side.
    magnitude = magnitudes_at(values, tl.load(begins + span), tl.load(ends + span), SPAN, 1)
    block = tl.load(owners + span)
    low, high, shift = tl.load(state + 4 * block + LOW), tl.load(state + 4 * block + HIGH), tl.load(state + 4 * block + SHIFT)
    tl.store(tallies + span, tl.sum((magnitude > high).to(tl.int32) + tl.where(magnitude >= high, 1 << 16, 0), 0))
    tl.store(tallies + num_spans + span, tl.sum((magnitude >= low).to(tl.int32), 0))
    between = (magnitude > low) & (magnitude < high)
    row = bins + tl.load(bin_rows + block).to(tl.int64) * NUM_BINS
    tl.atomic_add(row + ((magnitude - (low + 1)) >> shift), 1, mask=between, sem="relaxed")


@kernel("num_spans")
def _narrow(state, rest, counts, bin_rows, bins, tallies, span_bounds, left, num_spans, MOST_INSIDE: tl.constexpr):
    """`left`: becomes 1 if a block needs another pass."""
    block = tl.program_id(0)
    if tl.load(state + 4 * block + OPEN) != 0:
        low, high = tl.load(state + 4 * block + LOW), tl.load(state + 4 * block + HIGH)
        shift, k = tl.load(state + 4 * block + SHIFT), tl.load(counts + block)
        above, reach_high, reach_low = _totals(
            tallies, tallies + num_spans, tl.load(span_bounds + block), tl.load(span_bounds + block + 1)
        )
        row = bins + tl.load(bin_rows + block).to(tl.int64) * NUM_BINS
        number, before, inside, between = _reached(row, reach_high, k)
        bottom = low + 1 + (number << shift)
        top = bottom + tl.minimum((1 << shift) - 1, high - 1 - bottom)  # a NaN may be so large that the sum of two is negative
        if above >= k:  # the sample misled
            bottom, top, inside = high + 1, MAGNITUDE + 0, k * 0 + MOST_INSIDE + 1
        elif reach_high >= k:
            bottom, top = high, high
        elif reach_high + between < k:
            if reach_low >= k:
                bottom, top = low, low
            else:  # the sample misled
                bottom, top, inside = low * 0, low - 1, k * 0 + MOST_INSIDE + 1
        still_open = ((bottom != top) & (inside > MOST_INSIDE)).to(tl.int32)
        _put(state, block, bottom, top, still_open)
        tl.store(rest + block, k - before)
        tl.store(left, 1, mask=still_open != 0)
        _clear(row, still_open)


@triton.jit
def _totals(highs, lows, first, last):
    """How many are above the window, reach its upper and reach its lower end, over these spans."""
    above, reach_high, reach_low = tl.zeros((2048,), tl.int32), tl.zeros((2048,), tl.int32), tl.zeros((2048,), tl.int32)
    for at in range(first, last, 2048):
        index = at + tl.arange(0, 2048)
        high = tl.load(highs + index, mask=index < last, other=0)
        above += high & 0xFFFF
        reach_high += high >> 16
        reach_low += tl.load(lows + index, mask=index < last, other=0)
    return tl.sum(above.to(tl.int64), 0), tl.sum(reach_high.to(tl.int64), 0), tl.sum(reach_low.to(tl.int64), 0)


@triton.jit
def _reached(bins, above, k):
    """The last bin in which, counted from the top and on from `above`, the k-th lies (-1: in none); how many are above that bin;
    how many are in it; and how many are in all bins."""
    index = NUM_BINS - 1 - tl.arange(0, NUM_BINS)
    held = tl.load(bins + index).to(tl.int64)
    short = above + tl.cumsum(held, 0) < k
    number = NUM_BINS - 1 - tl.sum(short.to(tl.int32), 0)
    inside = tl.sum(tl.where(index == number, held, 0), 0)
    return number, above + tl.sum(tl.where(short, held, 0), 0), inside, tl.sum(held, 0)


@triton.jit
def _clear(bins, wanted):
    """For the next pass, if there is one."""
    if wanted != 0:
        tl.debug_barrier()  # all threads have read what they need
        tl.store(bins + tl.arange(0, NUM_BINS), tl.zeros((NUM_BINS,), tl.int32))
