"""The k largest of each block on a GPU, exactly as `top_k.largest_reference` chooses them, and no waiting for the device.

Magnitudes are compared as integers, the bits without the sign. The k-th largest of a block (its *edge*) is enclosed more and more
narrowly between two magnitudes, lo <= edge <= hi:

    1. a sample of 16384 elements, one at random from each stretch of the block, gives lo and hi: with a margin of four deviations
    2. one pass over the block counts what is above hi, on hi and on lo, and what lies between them in bins of equal width. Few
       elements do, so adding one to a bin in the device's memory costs little; many equals (zeros, say) are on lo or hi
    3. these counts say in which bin the edge lies: that is the new lo and hi. With a million bins for a large block the edge is
       usually known now; where it is not, steps 2 and 3 are done again. Where the sample misled, lo or hi is moved away and they
       are too. They are launched as often as any values need, and return at once where lo = hi
    4. one pass counts, in every piece of a block, what is above the edge and on it; sums of these say where a piece writes
    5. one pass writes the payload: everything above the edge, and of what is on it the first, until there are k

So the sample decides how long it takes and never what is chosen: as a rule three passes over the values, none of which
writes more than the payload. Memory: up to a quarter of a byte per value and level for the bins, and 28 bytes per piece.
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
from stretto.compress.kernels.int8_cuda import word_at
from stretto.compress.layout import Blocks
from stretto.compress.sparse_format import Form
from stretto.errors import MalformedPayload

PIECE = 4096  # elements of a block that one program takes
SAMPLE = 16384
DEVIATIONS = 4.0
GROUP_BITS = 10  # bins are counted in 1024 groups too: first the group is found, then the bin
FEWEST_BIN_BITS, MOST_BIN_BITS = 12, 20
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
    bin_bits: Tensor  # the logarithm of how many bins there are; 0: none
    bin_starts: Tensor
    all_bins: int
    num_levels: int
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
        tallies = torch.empty(2, len(plan.pieces.owners), dtype=torch.int32, device=values.device)
        num = len(plan.pieces.owners)
        _tally[(num,)](values, plan.bounds, *plan.pieces.columns, edges, tallies, num, PIECE=PIECE, STEP=plan.step)
        words = payload[: sum(plan.form.sections[:3])].view(torch.int32)
        _write[(num,)](
            values, payload, words, plan.bounds, *plan.pieces.columns, plan.first_pieces, edges, tallies, tallies.cumsum(1),
            plan.counts, plan.list_numbers, plan.index_starts, plan.value_starts, plan.bitmap_starts, num,
            RESIDUAL=residual, BITMAPS=plan.any_bitmapped, PIECE=PIECE, STEP=plan.step,
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
    problem = torch.zeros(1, dtype=torch.int32, device=out.device)
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
    return int(problem)


def _plan(form: Form, cut: Cut) -> Plan:
    device, lengths, counts, listed = cut.bounds.device, form.blocks.lengths, form.counts, ~form.bitmapped
    maps = sparse_format.bitmap_bytes(lengths) * form.bitmapped
    bin_bits = _bin_bits(lengths)
    bins = torch.where(bin_bits > 0, 1 << bin_bits, 0)
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
        ranks=torch.tensor([_ranks(n, k) for n, k in zip(lengths.tolist(), counts.tolist(), strict=True)]).to(device),
        bin_bits=bin_bits.to(torch.int32).to(device),
        bin_starts=_before(bins).to(device),
        all_bins=int(bins.sum()),
        num_levels=_num_levels(bin_bits),
        pieces=pieces_of(lengths, PIECE, device),
        first_pieces=torch.cat([torch.zeros(1, dtype=torch.int64), pieces.cumsum(0)]).to(device),
        chosen=pieces_of(counts, PIECE, device),
        any_bitmapped=bool(form.bitmapped.any()),
    )


def _before(sizes: Tensor) -> Tensor:
    return sizes.cumsum(0) - sizes


def _bin_bits(lengths: Tensor) -> Tensor:
    """A bin for every 16 elements or so. None for blocks that are in the sample as a whole."""
    bits = [(n // 16).bit_length() if n > SAMPLE else 0 for n in lengths.tolist()]
    return torch.tensor([min(MOST_BIN_BITS, max(FEWEST_BIN_BITS, num)) if num else 0 for num in bits])


def _num_levels(bin_bits: Tensor) -> int:
    """How often lo and hi may have to be moved: once for the sample, and until 31 bits are known."""
    some = [num for num in bin_bits.tolist() if num]
    return 1 + -(-31 // min(some)) if some else 0


def _ranks(n: int, k: int) -> tuple[int, int]:
    if n <= SAMPLE:
        return k, k
    expected = SAMPLE * k / n
    margin = DEVIATIONS * math.sqrt(expected) + 4
    upper, lower = int(expected - margin), math.ceil(expected + margin)
    return max(upper, 0), lower if lower <= SAMPLE else 0


def _edges(values: Tensor, plan: Plan, key: int) -> Tensor:
    """The k-th largest magnitude of each block, twice: lo and hi, which have met."""
    num_blocks, num_pieces, device = len(plan.counts), len(plan.pieces.owners), values.device
    window = torch.empty(num_blocks, 2, dtype=torch.int32, device=device)
    _guess[(num_blocks,)](values, plan.bounds, plan.ranks, as_argument(key), window, SAMPLE=SAMPLE, num_warps=16)
    if plan.num_levels == 0:
        return window
    bins = torch.zeros(plan.num_levels, plan.all_bins, dtype=torch.int32, device=device)
    groups = torch.zeros(plan.num_levels, num_blocks << GROUP_BITS, dtype=torch.int32, device=device)
    tallies = torch.empty(3, num_pieces, dtype=torch.int32, device=device)
    for level in range(plan.num_levels):
        _count[(num_pieces,)](
            values, plan.bounds, *plan.pieces.columns, window, plan.bin_bits, plan.bin_starts, bins[level], groups[level],
            tallies, num_pieces, GROUP_BITS=GROUP_BITS, PIECE=PIECE, STEP=plan.step,
        )  # fmt: skip
        _narrow[(num_blocks,)](
            window, plan.counts, plan.bin_bits, plan.bin_starts, bins[level], groups[level], tallies, plan.first_pieces,
            num_pieces, GROUP_BITS=GROUP_BITS,
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
    for step in range(31):  # bit by bit the largest number that so many reach
        bit = 1 << (30 - step)
        high = tl.where(tl.sum((magnitude >= (high | bit)).to(tl.int32), 0) >= upper, high | bit, high)
        low = tl.where(tl.sum((magnitude >= (low | bit)).to(tl.int32), 0) >= lower, low | bit, low)
    tl.store(window + 2 * block, tl.where(lower == 0, 0, low))
    tl.store(window + 2 * block + 1, tl.where(upper == 0, LARGEST, high))


@triton.jit
def _piece(values, bounds, owners, firsts, PIECE: tl.constexpr, STEP: tl.constexpr):
    """Of this program's piece: pointers to its elements, their bits, and magnitudes: -1 beyond the end of the block."""
    block = tl.load(owners + tl.program_id(0))
    stop = tl.load(bounds + block + 1)
    first = tl.multiple_of(tl.load(bounds + block), STEP) + tl.multiple_of(tl.load(firsts + tl.program_id(0)), PIECE)
    at = first + tl.arange(0, PIECE)
    if first + PIECE <= stop:  # without a mask, which would have every thread read one element at a time
        bits = tl.load(values + at).to(tl.int32, bitcast=True)
    else:
        bits = tl.load(values + at, mask=at < stop, other=0.0).to(tl.int32, bitcast=True)
    return values + at, bits, tl.where(at < stop, bits & MAGNITUDE, -1)


@triton.jit
def _width(low, high, bin_bits):
    """Of a bin, its logarithm: 2^bin_bits bins hold what is between low and high."""
    shift = 0
    while ((high - low - 2) >> bin_bits) >> shift > 0:
        shift += 1
    return shift


@triton.jit(do_not_specialize=["num_pieces"])
def _count(
    values, bounds, owners, firsts, window, bin_bits, bin_starts, bins, groups, tallies, num_pieces,
    GROUP_BITS: tl.constexpr, PIECE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    block = tl.load(owners + piece)
    low, high = tl.load(window + 2 * block), tl.load(window + 2 * block + 1)
    if low != high:
        _at, _bits, magnitude = _piece(values, bounds, owners, firsts, PIECE, STEP)
        tl.store(tallies + piece, tl.sum((magnitude > high).to(tl.int32), 0))
        tl.store(tallies + num_pieces + piece, tl.sum((magnitude == high).to(tl.int32), 0))
        tl.store(tallies + 2 * num_pieces + piece, tl.sum((magnitude == low).to(tl.int32), 0))
        between = (magnitude > low) & (magnitude < high)
        here = tl.load(bin_bits + block)
        number = (magnitude - low - 1) >> _width(low, high, here)
        tl.atomic_add(bins + tl.load(bin_starts + block) + number, 1, mask=between, sem="relaxed")
        tl.atomic_add(groups + (block << GROUP_BITS) + (number >> (here - GROUP_BITS)), 1, mask=between, sem="relaxed")


@triton.jit(do_not_specialize=["num_pieces"])
def _narrow(window, counts, bin_bits, bin_starts, bins, groups, tallies, first_pieces, num_pieces, GROUP_BITS: tl.constexpr):
    block = tl.program_id(0)
    low, high = tl.load(window + 2 * block), tl.load(window + 2 * block + 1)
    if low != high:
        k = tl.load(counts + block)
        first, last = tl.load(first_pieces + block), tl.load(first_pieces + block + 1)
        above, on_high = _total(tallies, first, last), _total(tallies + num_pieces, first, last)
        on_low = _total(tallies + 2 * num_pieces, first, last)
        here = tl.load(bin_bits + block)
        per_group, shift = 1 << (here - GROUP_BITS), _width(low, high, here)
        group, before, between = _reached(groups + (block << GROUP_BITS), 1 << GROUP_BITS, above + on_high, k, 1 << GROUP_BITS)
        begin = tl.load(bin_starts + block) + tl.maximum(group, 0) * per_group
        number, _before, _all = _reached(bins + begin, per_group, before, k, 1 << GROUP_BITS)
        bottom = low + 1 + ((group * per_group + number) << shift)
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
def _total(tallies, first, last):
    total = tl.zeros((1024,), tl.int32)
    for at in range(first, last, 1024):
        index = at + tl.arange(0, 1024)
        total += tl.load(tallies + index, mask=index < last, other=0)
    return tl.sum(total.to(tl.int64), 0)


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
def _tally(values, bounds, owners, firsts, edges, tallies, num_pieces, PIECE: tl.constexpr, STEP: tl.constexpr):
    """Of each piece, how many are above the edge, and how many are on it."""
    piece = tl.program_id(0)
    edge = tl.load(edges + 2 * tl.load(owners + piece))
    _at, _bits, magnitude = _piece(values, bounds, owners, firsts, PIECE, STEP)
    tl.store(tallies + piece, tl.sum((magnitude > edge).to(tl.int32), 0))
    tl.store(tallies + num_pieces + piece, tl.sum((magnitude == edge).to(tl.int32), 0))


@triton.jit
def _until(sums, tallies, piece):
    """How many all pieces before this one have."""
    return tl.load(sums + piece) - tl.load(tallies + piece)


@triton.jit(do_not_specialize=["num_pieces"])
def _write(
    values, payload, words, bounds, owners, firsts, first_pieces, edges, tallies, sums, counts, list_numbers, index_starts,
    value_starts, bitmap_starts, num_pieces,
    RESIDUAL: tl.constexpr, BITMAPS: tl.constexpr, PIECE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    block = tl.load(owners + piece)
    first_piece, last_piece = tl.load(first_pieces + block), tl.load(first_pieces + block + 1) - 1
    start_above, start_on = _until(sums, tallies, first_piece), _until(sums + num_pieces, tallies + num_pieces, first_piece)
    above, on = _until(sums, tallies, piece) - start_above, _until(sums + num_pieces, tallies + num_pieces, piece) - start_on
    k, edge, list_number = tl.load(counts + block), tl.load(edges + 2 * block), tl.load(list_numbers + block)
    spare = k - (tl.load(sums + last_piece) - start_above)  # so many on the edge are chosen

    at, bits, magnitude = _piece(values, bounds, owners, firsts, PIECE, STEP)
    here = tl.load(tallies + num_pieces + piece)
    chosen = magnitude >= tl.where(on < spare, edge, edge + 1)
    if (on < spare) & (on + here > spare):  # some on the edge are chosen, and others in the same piece are not
        on_edge = (magnitude == edge).to(tl.int32)
        chosen &= (on_edge == 0) | (on + tl.cumsum(on_edge, 0) <= spare)
    rank = above + tl.minimum(on, spare) + tl.cumsum(chosen.to(tl.int32), 0) - 1
    index = tl.load(firsts + piece) + tl.arange(0, PIECE)
    tl.store(words + tl.load(value_starts + block) + rank, bits, mask=chosen)
    tl.store(words + tl.load(index_starts + block) + rank, index.to(tl.int32), mask=chosen & (list_number >= 0))
    tl.store(words + list_number, k.to(tl.int32), mask=(list_number >= 0) & (piece == first_piece))
    if BITMAPS:
        ones = tl.sum(tl.reshape(chosen.to(tl.int32), (PIECE // 8, 8)) << tl.arange(0, 8)[None, :], 1)
        byte = tl.load(firsts + piece) // 8 + tl.arange(0, PIECE // 8)
        n = tl.load(bounds + block + 1) - tl.load(bounds + block)
        wanted = (byte < (n + 7) // 8) & (list_number < 0)
        tl.store(payload + tl.load(bitmap_starts + block) + byte, ones.to(tl.uint8), mask=wanted)
    if RESIDUAL:
        tl.store(at, tl.zeros((PIECE,), tl.float32), mask=chosen)


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
    tl.atomic_max(problem, worst, mask=worst > 0)


@triton.jit
def _count_ones(payload, bounds, owners, firsts, list_numbers, bitmap_starts, ones, PIECE: tl.constexpr):
    piece = tl.program_id(0)
    block = tl.load(owners + piece)
    n = tl.load(bounds + block + 1) - tl.load(bounds + block)
    byte = tl.load(firsts + piece) // 8 + tl.arange(0, PIECE // 8)
    mask = (byte < (n + 7) // 8) & (tl.load(list_numbers + block) < 0)
    eights = tl.load(payload + tl.load(bitmap_starts + block) + byte, mask=mask, other=0).to(tl.int32)
    eights -= (eights >> 1) & 0x55
    eights = (eights & 0x33) + ((eights >> 2) & 0x33)
    tl.store(ones + piece, tl.sum((eights + (eights >> 4)) & 0x0F, 0))


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
        tl.atomic_max(problem, worst, mask=worst > 0)
