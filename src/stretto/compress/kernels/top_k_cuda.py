"""The k largest of each block on a GPU, exactly as `top_k.largest_reference` chooses them, and no waiting for the device.

Magnitudes are compared as integers, the bits without the sign. The k-th largest of a block (its *edge*) is enclosed more and
more narrowly between two magnitudes, lo <= edge <= hi:

    1. a sample of 16384 elements, one at random from each stretch of the block, gives lo and hi, three deviations apart
    2. one pass over the block counts what is above hi, on hi and on lo, and what lies between them in bins of equal width. Few
       elements do, so adding one to a bin in the device's memory costs little; many equals (zeros, say) are on lo or hi
    3. these counts say in which bin the edge lies: that is the new lo and hi. There are so many bins that the edge is usually
       known now. Where it is not, or the sample misled, steps 2 and 3 are done again, with fewer bins. They are launched as often
       as any values need, and return at once where lo = hi
    4. one pass marks, a bit each, what reaches the edge, and counts in every piece what is above it and on it
    5. sums of these counts say where a piece writes: everything above the edge, and of what is on it the first, until there are k

So the sample decides how long it takes and never what is chosen: as a rule two passes over the values, and one over their marks.
Memory while it runs: up to 2 bytes per value for bins (a quarter in large blocks), and half a byte for marks.
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

from stretto.compress import sparse_format
from stretto.compress.kernels.cut_cuda import Cut, Pieces, cut_of, pieces_of
from stretto.compress.kernels.draw_cuda import as_argument, bits_of
from stretto.compress.kernels.flag_cuda import new_flag, wait_for
from stretto.compress.kernels.int8_cuda import word_at
from stretto.compress.layout import Blocks
from stretto.compress.sparse_format import Form
from stretto.errors import MalformedPayload

PIECE = 4096  # elements of a block that one program takes
NUM_WARPS = 8  # of it: with fewer, a thread has so many elements that few programs fit into a processor
SAMPLE = 16384
DEVIATIONS = 3.0
LEAST_BIN_BITS, MOST_BIN_BITS = 12, 22  # the logarithm of the number of bins
GROUP = 1024  # bins are added up in groups of so many: first the group is found, then the bin
MOST_GROUPS = 1 << 12
NUM_LEVELS = 4  # lo and hi are moved so often at most: once for the sample, and until 31 bits are known, 12 at a time
MAGNITUDE, LARGEST = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7F7FFFFF)
BAD_COUNT, BAD_INDEX, BAD_PADDING = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # places in sparse_format.PROBLEMS
BAD_BITMAP, NOT_FINITE = tl.constexpr(4), tl.constexpr(5)


@dataclass(frozen=True, slots=True)
class Plan:
    """What does not depend on the values, for one cut and fraction. Tensors have one number per block, in the device's memory."""

    form: Form
    bounds: Tensor
    step: int  # divides all bounds
    counts: Tensor  # k
    list_numbers: Tensor  # of the listed blocks, in order; -1 of a bitmapped one
    index_starts: Tensor  # in words of the payload
    value_starts: Tensor
    bitmap_starts: Tensor  # in bytes of the payload
    ranks: Tensor  # 2 per block: which of the sample's largest are hi and lo; 0: none
    bin_bits: Tensor  # the logarithm of how many bins there are at first
    bin_starts: Tensor
    all_bins: int
    few_bits: Tensor  # and later
    few_starts: Tensor
    few_bins: int
    pieces: Pieces
    first_pieces: Tensor  # one more than there are blocks
    chosen: Pieces  # of what is chosen, instead of elements
    any_bitmapped: bool


def plan_of(fraction: float, blocks: Blocks, device: torch.device) -> Plan:
    """Made once."""
    made = cut_of(blocks, device).made
    if ("top_k", fraction) not in made:
        made["top_k", fraction] = _plan(Form.smallest(blocks, sparse_format.counts_of(fraction, blocks)), cut_of(blocks, device))
    plan: Plan = made["top_k", fraction]
    return plan


def encode(values: Tensor, blocks: Blocks, fraction: float, key: int, residual: bool) -> Tensor:
    """The payload of the largest. `key`: of the sample. With `residual`, `values` becomes zero where they were."""
    plan = plan_of(fraction, blocks, values.device)
    payload = torch.empty(plan.form.num_bytes, dtype=torch.uint8, device=values.device)
    if len(blocks):
        edges = _edges(values, plan, key)
        num = len(plan.pieces.owners)
        tallies = torch.empty(2, num, dtype=torch.int32, device=values.device)
        marks = torch.empty(num * (PIECE // 8), dtype=torch.int32, device=values.device)
        pieces, shape = plan.pieces.columns, {"PIECE": PIECE, "num_warps": NUM_WARPS}
        _mark[(num,)](values, plan.bounds, *pieces, edges, tallies, marks, num, STEP=plan.step, **shape)
        sums = torch.empty(2, num + 1, dtype=torch.int64, device=values.device)
        _add_up[(2,)](tallies, sums, num, WIDTH=4096, num_warps=8)
        _unmark[(num,)](
            values, plan.bounds, *pieces, plan.first_pieces, edges, sums, marks, plan.counts, num, STEP=plan.step, **shape
        )
        words = payload[: sum(plan.form.sections[:3])].view(torch.int32)
        _write[(num,)](
            values, payload, words, plan.bounds, *pieces, plan.first_pieces, sums, marks, plan.counts,
            plan.list_numbers, plan.index_starts, plan.value_starts, plan.bitmap_starts, num,
            RESIDUAL=residual, BITMAPS=plan.any_bitmapped, PIECE=PIECE,
        )  # fmt: skip
    return payload


def add_decoded(payload: Tensor, blocks: Blocks, fraction: float, total: Tensor) -> None:
    """Add the chosen elements to `total`. Refuses what `sparse_format.read` refuses; `total` is of no use then. Waits for the
    device."""
    plan = plan_of(fraction, blocks, total.device)
    if len(payload) != plan.form.num_bytes:
        raise MalformedPayload(f"{len(payload)} bytes, not {plan.form.num_bytes}")
    problem = _added(payload, plan, total) if len(blocks) else 0
    if problem:
        raise MalformedPayload(sparse_format.PROBLEMS[problem - 1])


def _added(payload: Tensor, plan: Plan, out: Tensor) -> int:
    """0, or 1 + a place in `sparse_format.PROBLEMS`."""
    problem = new_flag(out.device)
    _read_lists[(len(plan.chosen.owners),)](
        payload, out, plan.bounds, *plan.chosen.columns, plan.counts, plan.list_numbers, plan.index_starts, plan.value_starts,
        problem, PIECE=PIECE,
    )  # fmt: skip
    if plan.any_bitmapped:
        grid = (len(plan.pieces.owners),)
        ones = torch.empty(len(plan.pieces.owners), dtype=torch.int32, device=out.device)
        _count_ones[grid](payload, plan.bounds, *plan.pieces.columns, plan.list_numbers, plan.bitmap_starts, ones, PIECE=PIECE)
        _read_bitmaps[grid](
            payload, out, plan.bounds, *plan.pieces.columns, plan.first_pieces, ones, ones.cumsum(0), plan.counts,
            plan.list_numbers, plan.value_starts, plan.bitmap_starts, problem, PIECE=PIECE,
        )  # fmt: skip
    return wait_for(problem, out.device)


def _plan(form: Form, cut: Cut) -> Plan:
    device, lengths, counts, listed = cut.bounds.device, form.blocks.lengths, form.counts, ~form.bitmapped
    maps = sparse_format.bitmap_bytes(lengths) * form.bitmapped
    bin_bits = _bin_bits(lengths)
    large = lengths > SAMPLE  # others are in the sample as a whole, and need no bins
    bins, few = (1 << bin_bits) * large, large * (1 << LEAST_BIN_BITS)
    num_listed, num_indices = form.sections[0] // 4, form.sections[1] // 4
    pieces = (lengths + PIECE - 1) // PIECE
    return Plan(
        form=form,
        bounds=cut.bounds,
        step=cut.step,
        counts=counts.to(device),
        list_numbers=torch.where(listed, listed.cumsum(0) - 1, -1).to(device),
        index_starts=(num_listed + _before(counts * listed)).to(device),
        value_starts=(num_listed + num_indices + _before(counts)).to(device),
        bitmap_starts=(sum(form.sections[:3]) + _before(maps)).to(device),
        ranks=_ranks(lengths, counts).to(device),
        bin_bits=bin_bits.to(torch.int32).to(device),
        bin_starts=_before(bins).to(device),
        all_bins=int(bins.sum()),
        few_bits=torch.full_like(bin_bits, LEAST_BIN_BITS).to(torch.int32).to(device),
        few_starts=_before(few).to(device),
        few_bins=int(few.sum()),
        pieces=pieces_of(lengths, PIECE, device),
        first_pieces=torch.cat([torch.zeros(1, dtype=torch.int64), pieces.cumsum(0)]).to(device),
        chosen=pieces_of(counts, PIECE, device),
        any_bitmapped=bool(form.bitmapped.any()),
    )


def _before(sizes: Tensor) -> Tensor:
    return sizes.cumsum(0) - sizes


def _bin_bits(lengths: Tensor) -> Tensor:
    """A bin for every 2 to 4 elements, where that is not too many."""
    bits = [(n // 4).bit_length() for n in lengths.tolist()]
    return torch.tensor(bits, dtype=torch.int64).clamp_(LEAST_BIN_BITS, MOST_BIN_BITS)


def _ranks(lengths: Tensor, counts: Tensor) -> Tensor:
    ranks = [_ranks_of(n, k) for n, k in zip(lengths.tolist(), counts.tolist(), strict=True)]
    return torch.tensor(ranks, dtype=torch.int64)


def _ranks_of(n: int, k: int) -> tuple[int, int]:
    if n <= SAMPLE:
        return k, k
    expected = SAMPLE * k / n
    margin = DEVIATIONS * math.sqrt(expected) + 2
    upper, lower = int(expected - margin), math.ceil(expected + margin)
    return max(upper, 0), lower if lower <= SAMPLE else 0


def _edges(values: Tensor, plan: Plan, key: int) -> Tensor:
    """The k-th largest magnitude of each block, twice: lo and hi, which have met."""
    num_blocks, num_pieces, device = len(plan.counts), len(plan.pieces.owners), values.device
    window = torch.empty(num_blocks, 2, dtype=torch.int32, device=device)
    _guess[(num_blocks,)](values, plan.bounds, plan.ranks, as_argument(key), window, SAMPLE=SAMPLE, num_warps=16)
    if not plan.all_bins:
        return window
    bins = torch.zeros(plan.all_bins + (NUM_LEVELS - 1) * plan.few_bins, dtype=torch.int32, device=device)
    tallies = torch.empty(3, num_pieces, dtype=torch.int32, device=device)
    for level in range(NUM_LEVELS):
        of_level = bins[plan.all_bins + (level - 1) * plan.few_bins :] if level else bins
        bits, starts = (plan.few_bits, plan.few_starts) if level else (plan.bin_bits, plan.bin_starts)
        _count[(num_pieces,)](
            values, plan.bounds, *plan.pieces.columns, window, bits, starts, of_level, tallies, num_pieces, PIECE=PIECE,
            num_warps=NUM_WARPS,
        )  # fmt: skip
        groups = of_level if level else bins[: plan.all_bins].view(-1, GROUP).sum(1, dtype=torch.int32)
        _narrow[(num_blocks,)](
            window, plan.counts, bits, starts, of_level, groups, tallies, plan.first_pieces, num_pieces,
            GROUP=1 if level else GROUP, GROUP_SPAN=GROUP, MOST_GROUPS=MOST_GROUPS, num_warps=8,
        )  # fmt: skip
    return window


# -- finding the edge -------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["key"])
def _guess(values, bounds, ranks, key, window, SAMPLE: tl.constexpr):
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
    tl.store(window + 2 * block, tl.where(lower == 0, 0, low))
    tl.store(window + 2 * block + 1, tl.where(upper == 0, LARGEST, high))


@triton.jit
def _piece(values, bounds, owners, firsts, PIECE: tl.constexpr, STEP: tl.constexpr):
    """Of this program's piece the elements' bits, and magnitudes: -1 beyond the end of the block."""
    block = tl.load(owners + tl.program_id(0))
    stop = tl.load(bounds + block + 1)
    first = tl.multiple_of(tl.load(bounds + block), STEP) + tl.multiple_of(tl.load(firsts + tl.program_id(0)), PIECE)
    at = first + tl.arange(0, PIECE)
    if first + PIECE <= stop:  # without a mask, which would have every thread read one element at a time
        bits = tl.load(values + at).to(tl.int32, bitcast=True)
    else:
        bits = tl.load(values + at, mask=at < stop, other=0.0).to(tl.int32, bitcast=True)
    return bits, tl.where(at < stop, bits & MAGNITUDE, -1)


@triton.jit
def _width(low, high, bin_bits):
    """Of a bin, its logarithm: 2^bin_bits bins hold what is between low and high."""
    shift = 0
    while ((high - low - 2) >> bin_bits) >> shift > 0:
        shift += 1
    return shift


@triton.jit(do_not_specialize=["num_pieces"])
def _count(values, bounds, owners, firsts, window, bin_bits, bin_starts, bins, tallies, num_pieces, PIECE: tl.constexpr):
    piece = tl.program_id(0)
    block = tl.load(owners + piece)
    low, high = tl.load(window + 2 * block), tl.load(window + 2 * block + 1)
    if low != high:
        # One element at a time: threads would exchange elements before they add to bins, if they had read several side by side.
        _bits, magnitude = _piece(values, bounds, owners, firsts, PIECE, 1)
        tl.store(tallies + piece, tl.sum((magnitude > high).to(tl.int32), 0))
        tl.store(tallies + num_pieces + piece, tl.sum((magnitude == high).to(tl.int32), 0))
        tl.store(tallies + 2 * num_pieces + piece, tl.sum((magnitude == low).to(tl.int32), 0))
        between = (magnitude > low) & (magnitude < high)
        number = (magnitude - low - 1) >> _width(low, high, tl.load(bin_bits + block))
        tl.atomic_add(bins + tl.load(bin_starts + block) + number, 1, mask=between, sem="relaxed")


@triton.jit(do_not_specialize=["num_pieces"])
def _narrow(
    window, counts, bin_bits, bin_starts, bins, groups, tallies, first_pieces, num_pieces,
    GROUP: tl.constexpr, GROUP_SPAN: tl.constexpr, MOST_GROUPS: tl.constexpr,
):  # fmt: skip
    """`groups`: sums of GROUP bins each."""
    block = tl.program_id(0)
    low, high = tl.load(window + 2 * block), tl.load(window + 2 * block + 1)
    if low != high:
        k, here, start = tl.load(counts + block), tl.load(bin_bits + block), tl.load(bin_starts + block)
        above, on_high, on_low = _totals(tallies, tl.load(first_pieces + block), tl.load(first_pieces + block + 1), num_pieces)
        shift = _width(low, high, here)
        group, before, between = _reached(groups + start // GROUP, (1 << here) // GROUP, above + on_high, k, MOST_GROUPS)
        number = 0
        if GROUP > 1:
            number, _before, _all = _reached(bins + start + tl.maximum(group, 0) * GROUP, GROUP, before, k, GROUP_SPAN)
        bottom = low + 1 + ((group * GROUP + number) << shift)
        top = tl.minimum(bottom + (1 << shift) - 1, high - 1)
        if above >= k:  # the sample misled
            bottom, top = high + 1, LARGEST + 0
        elif above + on_high >= k:
            bottom, top = high, high
        elif above + on_high + between < k:
            if above + on_high + between + on_low >= k:
                bottom, top = low, low
            else:  # the sample misled
                bottom, top = 0, low - 1
        tl.store(window + 2 * block, bottom)
        tl.store(window + 2 * block + 1, top)


@triton.jit
def _totals(tallies, first, last, num_pieces):
    """Of the three tallies, over these pieces."""
    above, on_high, on_low = tl.zeros((2048,), tl.int32), tl.zeros((2048,), tl.int32), tl.zeros((2048,), tl.int32)
    for at in range(first, last, 2048):
        index = at + tl.arange(0, 2048)
        above += tl.load(tallies + index, mask=index < last, other=0)
        on_high += tl.load(tallies + num_pieces + index, mask=index < last, other=0)
        on_low += tl.load(tallies + 2 * num_pieces + index, mask=index < last, other=0)
    return tl.sum(above.to(tl.int64), 0), tl.sum(on_high.to(tl.int64), 0), tl.sum(on_low.to(tl.int64), 0)


@triton.jit
def _reached(bins, num, above, k, MOST: tl.constexpr):
    """Of `num` (up to MOST) bins, the last in which, counted from the top and on from `above`, the k-th lies (-1: in none); how
    many are above that bin; and how many are in all bins."""
    index = num - 1 - tl.arange(0, MOST)
    held = tl.load(bins + index, mask=index >= 0, other=0).to(tl.int64)
    short = (above + tl.cumsum(held, 0) < k) & (index >= 0)
    return num - 1 - tl.sum(short.to(tl.int32), 0), above + tl.sum(tl.where(short, held, 0), 0), tl.sum(held, 0)


# -- the payload ------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_pieces"])
def _mark(values, bounds, owners, firsts, edges, tallies, marks, num_pieces, PIECE: tl.constexpr, STEP: tl.constexpr):
    """Of each piece the marks of all that reach the edge, and how many are above it, and on it."""
    piece = tl.program_id(0)
    edge = tl.load(edges + 2 * tl.load(owners + piece))
    _bits, magnitude = _piece(values, bounds, owners, firsts, PIECE, STEP)
    both = tl.sum((magnitude > edge).to(tl.int32) + ((magnitude == edge).to(tl.int32) << 16), 0)
    tl.store(tallies + piece, both & 0xFFFF)
    tl.store(tallies + num_pieces + piece, both >> 16)
    tl.store(marks + piece * (PIECE // 8) + tl.arange(0, PIECE // 8), _marks(magnitude >= edge, PIECE))


@triton.jit
def _marks(flags, PIECE: tl.constexpr):
    """A word for every eight flags: themselves, the first in the lowest bit, and above them how many are set before."""
    eights = tl.sum(tl.reshape(flags.to(tl.int32), (PIECE // 8, 8)) << tl.arange(0, 8)[None, :], 1)
    ones = _num_ones(eights)
    return eights | ((tl.cumsum(ones, 0) - ones) << 8)


@triton.jit
def _num_ones(byte):
    byte -= (byte >> 1) & 0x55
    byte = (byte & 0x33) + ((byte >> 2) & 0x33)
    return (byte + (byte >> 4)) & 0x0F


@triton.jit(do_not_specialize=["num_pieces"])
def _add_up(tallies, sums, num_pieces, WIDTH: tl.constexpr):
    """sums[r, i] = tallies[r, 0] + ... + tallies[r, i - 1], for i up to num_pieces."""
    tallies, sums = tallies + tl.program_id(0) * num_pieces, sums + tl.program_id(0) * (num_pieces + 1)
    total = tl.zeros((), tl.int64)
    for first in range(0, num_pieces, WIDTH):
        index = first + tl.arange(0, WIDTH)
        held = tl.load(tallies + index, mask=index < num_pieces, other=0)
        tl.store(sums + index, total + tl.cumsum(held, 0) - held, mask=index < num_pieces)
        total += tl.sum(held, 0)
    tl.store(sums + num_pieces, total)


@triton.jit(do_not_specialize=["num_pieces"])
def _unmark(
    values, bounds, owners, firsts, first_pieces, edges, sums, marks, counts, num_pieces, PIECE: tl.constexpr, STEP: tl.constexpr
):
    """Where more are on the edge than are chosen, leave the marks of the first alone. (Of few pieces, unless many are equal.)"""
    piece = tl.program_id(0)
    block = tl.load(owners + piece)
    first_piece, next_piece = tl.load(first_pieces + block), tl.load(first_pieces + block + 1)
    on_edge = sums + num_pieces + 1
    on, until = tl.load(on_edge + piece), tl.load(on_edge + piece + 1)
    spare = tl.load(counts + block) - (tl.load(sums + next_piece) - tl.load(sums + first_piece))  # so many on the edge are chosen
    spare += tl.load(on_edge + first_piece) - on  # of them in this piece and later
    if (until > on) & (until - on > spare):
        edge = tl.load(edges + 2 * block)
        _bits, magnitude = _piece(values, bounds, owners, firsts, PIECE, STEP)
        equal = (magnitude == edge).to(tl.int32)
        chosen = (magnitude > edge) | ((equal > 0) & (tl.cumsum(equal, 0) <= spare))
        tl.store(marks + piece * (PIECE // 8) + tl.arange(0, PIECE // 8), _marks(chosen, PIECE))


@triton.jit(do_not_specialize=["num_pieces"])
def _write(
    values, payload, words, bounds, owners, firsts, first_pieces, sums, marks, counts, list_numbers, index_starts,
    value_starts, bitmap_starts, num_pieces, RESIDUAL: tl.constexpr, BITMAPS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    block, first = tl.load(owners + piece), tl.load(firsts + piece)
    first_piece, next_piece = tl.load(first_pieces + block), tl.load(first_pieces + block + 1)
    start_above, on_edge = tl.load(sums + first_piece), sums + num_pieces + 1
    above, on = tl.load(sums + piece) - start_above, tl.load(on_edge + piece) - tl.load(on_edge + first_piece)
    k, list_number = tl.load(counts + block), tl.load(list_numbers + block)
    spare = k - (tl.load(sums + next_piece) - start_above)

    row = tl.arange(0, PIECE // 8)
    mark = tl.load(marks + piece * (PIECE // 8) + row)
    before = above + tl.minimum(on, spare)
    left, rank = mark & 0xFF, mark >> 8
    at = values + (tl.load(bounds + block) + first) + 8 * row
    value_words = words + (tl.load(value_starts + block) + before)
    index_words = words + (tl.load(index_starts + block) + before)
    while tl.max(left, 0) > 0:  # of every eight the first that is left: where few are chosen, few rounds
        bit = ((left & 0xF) == 0).to(tl.int32) * 4
        bit += (((left >> bit) & 3) == 0).to(tl.int32) * 2
        bit += (((left >> bit) & 1) == 0).to(tl.int32)
        some = left > 0
        bits = tl.load(at + bit, mask=some).to(tl.int32, bitcast=True)
        tl.store(value_words + rank, bits, mask=some)
        tl.store(index_words + rank, first.to(tl.int32) + 8 * row + bit, mask=some & (list_number >= 0))
        if RESIDUAL:
            tl.store(at + bit, tl.zeros((PIECE // 8,), tl.float32), mask=some)
        rank += 1
        left &= left - 1
    tl.store(words + list_number, k.to(tl.int32), mask=(list_number >= 0) & (piece == first_piece))
    if BITMAPS:
        byte = first // 8 + row
        n = tl.load(bounds + block + 1) - tl.load(bounds + block)
        wanted = (byte < (n + 7) // 8) & (list_number < 0)
        tl.store(payload + tl.load(bitmap_starts + block) + byte, mark.to(tl.uint8), mask=wanted)


@triton.jit
def _until(sums, tallies, piece):
    """How many all pieces before this one have."""
    return tl.load(sums + piece) - tl.load(tallies + piece)


@triton.jit
def _not_finite(word):
    return (word & MAGNITUDE) > LARGEST


@triton.jit
def _add(out, word, mask):
    tl.store(out, tl.load(out, mask=mask) + word.to(tl.float32, bitcast=True), mask=mask)


@triton.jit
def _read_lists(
    payload, out, bounds, owners, firsts, counts, list_numbers, index_starts, value_starts, problem, PIECE: tl.constexpr
):
    """Of listed blocks all; of bitmapped ones, whether the values are finite."""
    block = tl.load(owners + tl.program_id(0))
    first, k, list_number = tl.load(firsts + tl.program_id(0)), tl.load(counts + block), tl.load(list_numbers + block)
    j = first + tl.arange(0, PIECE)
    value = word_at(payload, tl.load(value_starts + block) + j, j < k)
    worst = tl.max(tl.where(_not_finite(value), NOT_FINITE, 0), 0)
    if list_number >= 0:
        start, stop = tl.load(bounds + block), tl.load(bounds + block + 1)
        at = tl.load(index_starts + block) + j
        index, previous = word_at(payload, at, j < k), word_at(payload, at - 1, (j > 0) & (j < k))
        right = (index >= 0) & (start + index < stop) & ((index > previous) | (j == 0)) & (j < k)
        _add(out + start + index, value, right)
        worst = tl.maximum(worst, tl.max(tl.where(right | (j >= k), 0, BAD_INDEX), 0))
        worst = tl.maximum(worst, tl.where(word_at(payload, list_number, first == 0) != tl.where(first == 0, k, 0), BAD_COUNT, 0))
    tl.store(problem, worst, mask=worst > 0)


@triton.jit
def _count_ones(payload, bounds, owners, firsts, list_numbers, bitmap_starts, ones, PIECE: tl.constexpr):
    piece = tl.program_id(0)
    block = tl.load(owners + piece)
    n = tl.load(bounds + block + 1) - tl.load(bounds + block)
    byte = tl.load(firsts + piece) // 8 + tl.arange(0, PIECE // 8)
    mask = (byte < (n + 7) // 8) & (tl.load(list_numbers + block) < 0)
    eights = tl.load(payload + tl.load(bitmap_starts + block) + byte, mask=mask, other=0).to(tl.int32)
    tl.store(ones + piece, tl.sum(_num_ones(eights), 0))


@triton.jit
def _read_bitmaps(
    payload, out, bounds, owners, firsts, first_pieces, ones, sums, counts, list_numbers, value_starts, bitmap_starts, problem,
    PIECE: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    block = tl.load(owners + piece)
    if tl.load(list_numbers + block) < 0:
        k, first_piece, last_piece = tl.load(counts + block), tl.load(first_pieces + block), tl.load(first_pieces + block + 1) - 1
        begin = _until(sums, ones, first_piece)
        start, stop = tl.load(bounds + block), tl.load(bounds + block + 1)
        index = tl.load(firsts + piece) + tl.arange(0, PIECE)
        in_bytes = index < (stop - start + 7) // 8 * 8
        eight = tl.load(payload + tl.load(bitmap_starts + block) + index // 8, mask=in_bytes, other=0).to(tl.int32)
        one = (eight >> (index % 8).to(tl.int32)) & 1
        rank = _until(sums, ones, piece) - begin + tl.cumsum(one, 0) - 1
        right = (one > 0) & (start + index < stop) & (rank < k)
        value = word_at(payload, tl.load(value_starts + block) + rank, right)
        _add(out + start + index, value, right)
        worst = tl.max(tl.where((one > 0) & (start + index >= stop), BAD_PADDING, 0), 0)
        worst = tl.maximum(worst, tl.where(tl.load(sums + last_piece) - begin != k, BAD_BITMAP, 0))
        tl.store(problem, worst, mask=worst > 0)
