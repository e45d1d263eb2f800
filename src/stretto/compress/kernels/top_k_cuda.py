"""The k largest of each block on a GPU, exactly as the reference in `top_k.py` chooses them, and no waiting for the device.

    1. `edge_cuda` finds a window in which the k-th largest magnitude lies (the *edge*), with few elements in it or all of them
       equal: as a rule in one pass over the values
    2. a second pass marks, a bit each, what reaches the window, and counts it in every span
    3. where a window has few elements, they are written to a list, which says which of them are among the k largest. The others
       lose their marks
    4. sums of the counts say where a span writes what it has marked. Where all of the window are equal, the first are taken until
       there are k

Memory while it runs: 28 KiB for each block longer than 8192, and for every span (2048 elements of a block, the last perhaps
fewer) 256 bytes of marks and 28 of counts: less than two bits per value of long blocks. A plan, kept from round to round, has 24
bytes for every span, and for those of long blocks 24 more.
"""

# What Triton compiles has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.compress import sparse_format
from stretto.compress.kernels.device_blocks_cuda import Pieces, device_blocks_of, pieces_of
from stretto.compress.kernels.edge_cuda import FEW_PROGRAMS, HIGH, LOW, Search, Windows, windows_of
from stretto.compress.kernels.spans_cuda import (
    MAGNITUDE,
    NUM_WARPS,
    SPAN,
    Spans,
    eights_of,
    lowest_one,
    magnitudes_at,
    num_ones,
    sums_of,
)
from stretto.compress.kernels.starting_cuda import kernel
from stretto.compress.layout import Blocks
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.sparse_format import Form
from stretto.compress.top_k import TopK

INDICES = 4096  # of a list, for one program that reads it
MOST_LISTED = 1024  # elements in a window whose ends differ


@dataclass(frozen=True, slots=True)
class TopKPlan:
    """What does not depend on the values, for one cut and fraction. Tensors have one number per block, in the device's memory.

    It must not refer to its `Blocks`: plans are kept for as long as these live.
    """

    num_bytes: int  # of a payload
    num_word_bytes: int  # of these, in front: counts, indices and values
    search: Search
    spans: Spans  # of all blocks
    step: int  # divides all bounds
    list_numbers: Tensor  # of the listed blocks, in order; -1 of a bitmapped one
    index_starts: Tensor  # in words of the payload
    value_starts: Tensor
    bitmap_starts: Tensor  # in bytes of the payload
    any_bitmapped: bool
    indices: Pieces  # of the lists


def plan_of(fraction: float, blocks: Blocks, device: torch.device) -> TopKPlan:
    """Made once."""
    cut = device_blocks_of(blocks, device)
    if ("top_k", fraction) not in cut.made:
        cut.made["top_k", fraction] = _plan(Form.smallest(blocks, sparse_format.counts_of(fraction, blocks)), cut.step, device)
    plan: TopKPlan = cut.made["top_k", fraction]
    return plan


def _plan(form: Form, step: int, device: torch.device) -> TopKPlan:
    blocks, listed = form.blocks, ~form.bitmapped
    maps = sparse_format.bitmap_bytes(blocks.lengths) * form.bitmapped
    num_listed, num_indices = form.sections[0] // 4, form.sections[1] // 4
    return TopKPlan(
        num_bytes=form.num_bytes,
        num_word_bytes=sum(form.sections[:3]),
        search=Search.of(blocks, form.counts, MOST_LISTED, device),
        spans=Spans.of(blocks, torch.ones(len(blocks), dtype=torch.bool, device="cpu"), device),
        step=step,
        list_numbers=torch.where(listed, listed.cumsum(0) - 1, -1).to(device),
        index_starts=(num_listed + _before(form.counts * listed)).to(device),
        value_starts=(num_listed + num_indices + _before(form.counts)).to(device),
        bitmap_starts=(sum(form.sections[:3]) + _before(maps)).to(device),
        any_bitmapped=bool(form.bitmapped.any()),
        indices=pieces_of(form.counts * listed, INDICES, device),
    )


def _before(sizes: Tensor) -> Tensor:
    return sizes.cumsum(0) - sizes


def encode(codec: TopK, values: Tensor, blocks: Blocks, random: RandomKeys, residual: bool) -> Tensor:
    """The payload of the largest. With `residual`, `values` becomes zero where they were."""
    plan = plan_of(codec.fraction, blocks, values.device)
    payload = torch.empty(plan.num_bytes, dtype=torch.uint8, device=values.device)
    if len(blocks):
        windows = windows_of(values, plan.search, random.shared)
        marks, tallies = _marked(values, plan, windows)
        words, spans = payload[: plan.num_word_bytes].view(torch.int32), plan.spans
        _write[(len(spans),)](
            values, payload, words, *spans.columns, spans.heads, spans.tails, windows.state, sums_of(tallies), marks,
            plan.search.counts, plan.list_numbers, plan.index_starts, plan.value_starts, plan.bitmap_starts, len(spans),
            RESIDUAL=residual, BITMAPS=plan.any_bitmapped, SPAN=SPAN, num_warps=1,
        )  # fmt: skip
    return payload


def _marked(values: Tensor, plan: TopKPlan, windows: Windows) -> tuple[Tensor, Tensor]:
    """The marks (a bit for every element of every span, the first the lowest), and for each span how many are certainly chosen,
    and how many marked ones are on an edge that not all may be."""
    num, num_blocks, search, device = len(plan.spans), len(plan.search.counts), plan.search, values.device
    marks = torch.empty(num * (SPAN // 8), dtype=torch.uint8, device=device)
    tallies = torch.empty(2, num, dtype=torch.int32, device=device)
    lengths = torch.zeros(num_blocks + 1, dtype=torch.int32, device=device)  # of the lists, and of `some`
    some = torch.empty(num, dtype=torch.int32, device=device)  # spans that have elements of a list
    columns, shape = plan.spans.columns, {"SPAN": SPAN, "num_warps": NUM_WARPS}
    _mark[(num,)](values, *columns, windows.state, marks, tallies, lengths, some, num, num_blocks, STEP=plan.step, **shape)
    if search.num_rows:
        listed = torch.empty(search.num_rows, MOST_LISTED, dtype=torch.int32, device=device)
        places = torch.empty(search.num_rows, MOST_LISTED, dtype=torch.int64, device=device)
        lists = (lengths, listed, places, search.bin_rows)
        programs = min(num, FEW_PROGRAMS)
        _list[(programs,)](values, *columns, windows.state, some, *lists, num_blocks, MOST=MOST_LISTED, **shape)
        _settle[(num_blocks,)](windows.state, windows.rest, marks.view(torch.int32), tallies, *lists, MOST=MOST_LISTED, **shape)
    return marks, tallies


@kernel("num_spans", "num_blocks")
def _mark(
    values, owners, begins, ends, state, marks, tallies, lengths, some, num_spans, num_blocks,
    SPAN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0)
    magnitude = magnitudes_at(values, tl.load(begins + span), tl.load(ends + span), SPAN, STEP)
    block = tl.load(owners + span)
    low, high = tl.load(state + 4 * block + LOW), tl.load(state + 4 * block + HIGH)
    both = tl.sum((magnitude > high).to(tl.int32) + tl.where(magnitude >= low, 1 << 16, 0), 0)
    above, reaching = both & 0xFFFF, both >> 16
    tl.store(tallies + span, tl.where(low != high, reaching, above))
    tl.store(tallies + num_spans + span, tl.where(low != high, 0, reaching - above))
    eights = eights_of(magnitude >= low, SPAN).to(tl.uint8)
    tl.store(marks + span.to(tl.int64) * (SPAN // 8) + tl.arange(0, SPAN // 8), eights)
    if (low != high) & (reaching > above):
        tl.store(some + tl.atomic_add(lengths + num_blocks, 1, sem="relaxed"), span)


@kernel("num_blocks")
def _list(
    values, owners, begins, ends, state, some, lengths, listed, places, list_rows, num_blocks,
    MOST: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The elements in windows of the spans in `some`: magnitudes and places, in no order."""
    for number in range(tl.program_id(0), tl.load(lengths + num_blocks), tl.num_programs(0)):
        span = tl.load(some + number)
        block = tl.load(owners + span)
        magnitude = magnitudes_at(values, tl.load(begins + span), tl.load(ends + span), SPAN, 1)
        inside = (magnitude >= tl.load(state + 4 * block + LOW)) & (magnitude <= tl.load(state + 4 * block + HIGH))
        slot = tl.atomic_add(lengths + block + tl.zeros((SPAN,), tl.int32), 1, mask=inside, sem="relaxed")
        at = tl.load(list_rows + block).to(tl.int64) * MOST + slot
        fits = inside & (slot < MOST)  # always
        tl.store(listed + at, magnitude, mask=fits)
        tl.store(places + at, span.to(tl.int64) * SPAN + tl.arange(0, SPAN), mask=fits)


@kernel()
def _settle(state, rest, marks, tallies, lengths, listed, places, list_rows, MOST: tl.constexpr, SPAN: tl.constexpr):
    """Take their marks from those in a list that are not among the k largest. `marks`: as words of 32."""
    block = tl.program_id(0)
    low, high = tl.load(state + 4 * block + LOW), tl.load(state + 4 * block + HIGH)
    if low != high:
        num, wanted, row = tl.load(lengths + block), tl.load(rest + block), tl.load(list_rows + block).to(tl.int64) * MOST
        present = tl.arange(0, MOST) < num
        magnitude = tl.load(listed + row + tl.arange(0, MOST), mask=present, other=-1)
        place = tl.load(places + row + tl.arange(0, MOST), mask=present, other=0)
        edge, beyond = low, high + 1  # so many reach `edge`, and not `beyond`
        while beyond - edge > 1:
            middle = edge + (beyond - edge) // 2
            enough = tl.sum((magnitude >= middle).to(tl.int32), 0) >= wanted
            edge, beyond = tl.where(enough, middle, edge), tl.where(enough, beyond, middle)
        equal = magnitude == edge
        spare = wanted - tl.sum((magnitude > edge).to(tl.int64), 0)
        last, before = tl.max(place, 0), tl.full((), -1, tl.int64)  # of equals so many are up to `last`, not up to `before`
        all_equals = tl.sum(equal.to(tl.int64), 0) == spare
        before = tl.where(all_equals, last, before)
        while last - before > 1:
            middle = before + (last - before) // 2
            enough = tl.sum((equal & (place <= middle)).to(tl.int64), 0) >= spare
            last, before = tl.where(enough, middle, last), tl.where(enough, before, middle)
        lost = present & ((magnitude < edge) | (equal & (place > last)))
        tl.atomic_xor(marks + place // 32, (tl.full((MOST,), 1, tl.int32) << (place % 32).to(tl.int32)), mask=lost)
        tl.atomic_add(tallies + place // SPAN, -1, mask=lost)


@kernel("num_spans")
def _write(
    values, payload, words, owners, begins, ends, heads, tails, state, sums, marks, counts, list_numbers, index_starts,
    value_starts, bitmap_starts, num_spans, RESIDUAL: tl.constexpr, BITMAPS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0)
    block, begin = tl.load(owners + span), tl.load(begins + span)
    row = tl.arange(0, SPAN // 8)
    left = tl.load(marks + span.to(tl.int64) * (SPAN // 8) + row).to(tl.int32)
    head, tail = tl.load(heads + span), tl.load(tails + span)
    first = (span - head) * SPAN
    k, list_number = tl.load(counts + block), tl.load(list_numbers + block)

    on_edge = sums + num_spans + 1
    on, until = tl.load(on_edge + span) - tl.load(on_edge + head), tl.load(on_edge + span + 1) - tl.load(on_edge + head)
    spare = k - (tl.load(sums + tail) - tl.load(sums + head))  # so many of the block on the edge are chosen
    at = values + begin + 8 * row
    if (until > on) & (until > spare):
        left = _first_of_equals(at, left, tl.load(state + 4 * block + LOW), spare - on)
    if BITMAPS:
        wanted = (begin + 8 * row < tl.load(ends + span)) & (list_number < 0)
        tl.store(payload + tl.load(bitmap_starts + block) + first // 8 + row, left.to(tl.uint8), mask=wanted)
    tl.store(words + list_number, k.to(tl.int32), mask=(list_number >= 0) & (span == head))

    ones = num_ones(left)
    before = tl.load(sums + span) - tl.load(sums + head) + tl.minimum(on, spare)
    rank = tl.cumsum(ones, 0) - ones
    value_words = words + (tl.load(value_starts + block) + before)
    index_words = words + (tl.load(index_starts + block) + before)
    while tl.max(left, 0) > 0:  # of every eight the first that is left: where few are chosen, few rounds
        some, bit = left > 0, lowest_one(left)
        bits = tl.load(at + bit, mask=some).to(tl.int32, bitcast=True)
        tl.store(value_words + rank, bits, mask=some)
        tl.store(index_words + rank, first + 8 * row + bit, mask=some & (list_number >= 0))
        if RESIDUAL:
            tl.store(at + bit, tl.zeros_like(bits).to(tl.float32), mask=some)
        rank += 1
        left &= left - 1


@triton.jit
def _first_of_equals(at, marked, edge, spare):
    """Leave the marks of the first `spare` elements that are on the edge. A byte of `marked` has the marks of eight values."""
    equal = tl.zeros_like(marked)
    for bit in tl.static_range(8):
        is_marked = ((marked >> bit) & 1) != 0
        bits = tl.load(at + bit, mask=is_marked, other=0.0).to(tl.int32, bitcast=True)
        equal |= (is_marked & ((bits & MAGNITUDE) == edge)).to(tl.int32) << bit
    ones = num_ones(equal)
    room = spare - (tl.cumsum(ones, 0) - ones)
    kept = tl.zeros_like(marked)
    left = equal
    for number in tl.static_range(8):
        kept |= tl.where(room > number, left & -left, 0)
        left &= left - 1
    return (marked & ~equal) | kept
