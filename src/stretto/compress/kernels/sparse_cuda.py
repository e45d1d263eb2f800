"""Reading a payload of `sparse_format` on a GPU: adds the chosen elements, and refuses what `sparse_format.read` refuses."""

# What Triton compiles has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.compress import sparse_format
from stretto.compress.kernels.flag_cuda import new_flag, wait_for
from stretto.compress.kernels.int8_cuda import word_at
from stretto.compress.kernels.spans_cuda import MAGNITUDE, SPAN, lowest_one, num_ones, sums_of
from stretto.compress.kernels.starting_cuda import kernel
from stretto.compress.kernels.top_k_cuda import INDICES, TopKPlan, plan_of
from stretto.compress.layout import Blocks
from stretto.compress.top_k import TopK
from stretto.errors import MalformedPayload

INFINITE = tl.constexpr(0x7F800000)
BAD_COUNT, BAD_INDEX, BAD_PADDING = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # places in sparse_format.PROBLEMS
BAD_BITMAP, NOT_FINITE = tl.constexpr(4), tl.constexpr(5)


def decode(codec: TopK, payload: Tensor, blocks: Blocks, out: Tensor, adding: bool) -> None:
    """If the payload is refused, `out` is of no use. Waits for the device."""
    plan = plan_of(codec.fraction, blocks, out.device)
    if len(payload) != plan.num_bytes:
        raise MalformedPayload(f"{len(payload)} bytes, not {plan.num_bytes}")
    if not adding:
        out.zero_()
    problem = _added(payload, plan, out) if len(blocks) else 0
    if problem:
        raise MalformedPayload(sparse_format.PROBLEMS[problem - 1])


def _added(payload: Tensor, plan: TopKPlan, out: Tensor) -> int:
    """0, or 1 + a place in `sparse_format.PROBLEMS`."""
    problem, spans, indices, counts = new_flag(out.device), plan.spans, plan.indices, plan.search.counts
    aligned = payload.data_ptr() % 4 == 0 and payload.storage_offset() % 4 == 0
    words = payload[: len(payload) // 4 * 4].view(torch.int32) if aligned else payload
    if len(indices.owners):
        _read_lists[(len(indices.owners),)](
            words, out, plan.search.bounds, *indices.columns, counts, plan.list_numbers, plan.index_starts, plan.value_starts,
            problem, PIECE=INDICES, ALIGNED=aligned,
        )  # fmt: skip
    if plan.any_bitmapped:
        bitmaps = (*spans.columns, spans.heads, plan.list_numbers, plan.bitmap_starts)
        ones = torch.empty(1, len(spans), dtype=torch.int32, device=out.device)
        _count_ones[(len(spans),)](payload, *bitmaps, ones, SPAN=SPAN, num_warps=1)
        _read_bitmaps[(len(spans),)](
            payload, words, out, *bitmaps, spans.tails, sums_of(ones), counts, plan.value_starts, problem,
            SPAN=SPAN, ALIGNED=aligned, num_warps=1,
        )  # fmt: skip
    return wait_for(problem, out.device)


@triton.jit
def _word(words, index, mask, ALIGNED: tl.constexpr):
    """`words`: bytes, if they are not aligned."""
    return tl.load(words + index, mask=mask, other=0) if ALIGNED else word_at(words, index, mask)


@triton.jit
def _add(out, word, mask):
    tl.store(out, tl.load(out, mask=mask) + word.to(tl.float32, bitcast=True), mask=mask)


@kernel()
def _read_lists(
    words, out, bounds, owners, firsts, counts, list_numbers, index_starts, value_starts, problem,
    PIECE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    block = tl.load(owners + tl.program_id(0))
    first, k = tl.load(firsts + tl.program_id(0)), tl.load(counts + block)
    start, stop = tl.load(bounds + block), tl.load(bounds + block + 1)
    j = first + tl.arange(0, PIECE)
    value = _word(words, tl.load(value_starts + block) + j, j < k, ALIGNED)
    at = tl.load(index_starts + block) + j
    index, previous = _word(words, at, j < k, ALIGNED), _word(words, at - 1, (j > 0) & (j < k), ALIGNED)
    right = (index >= 0) & (start + index < stop) & ((index > previous) | (j == 0)) & (j < k)
    _add(out + start + index, value, right)
    problems = tl.where(right | (j >= k), 0, BAD_INDEX)
    worst = tl.max(tl.maximum(problems, tl.where((value & MAGNITUDE) >= INFINITE, NOT_FINITE, 0)), 0)
    count = _word(words, tl.load(list_numbers + block), first == 0, ALIGNED)
    worst = tl.maximum(worst, tl.where(count != tl.where(first == 0, k, 0), BAD_COUNT, 0))
    tl.store(problem, worst, mask=worst > 0)


@triton.jit
def _bytes_of(payload, owners, begins, ends, heads, list_numbers, bitmap_starts, span, row, SPAN: tl.constexpr):
    """The bytes of a span's bitmap; 0 for spans of blocks that are listed."""
    block, begin = tl.load(owners + span), tl.load(begins + span)
    wanted = (begin + 8 * row < tl.load(ends + span)) & (tl.load(list_numbers + block) < 0)
    at = tl.load(bitmap_starts + block) + (span - tl.load(heads + span)).to(tl.int64) * (SPAN // 8) + row
    return tl.load(payload + at, mask=wanted, other=0).to(tl.int32)


@kernel()
def _count_ones(payload, owners, begins, ends, heads, list_numbers, bitmap_starts, ones, SPAN: tl.constexpr):
    span, row = tl.program_id(0), tl.arange(0, SPAN // 8)
    eights = _bytes_of(payload, owners, begins, ends, heads, list_numbers, bitmap_starts, span, row, SPAN)
    tl.store(ones + span, tl.sum(num_ones(eights), 0))


@kernel()
def _read_bitmaps(
    payload, words, out, owners, begins, ends, heads, list_numbers, bitmap_starts, tails, sums, counts, value_starts, problem,
    SPAN: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    span, row = tl.program_id(0), tl.arange(0, SPAN // 8)
    eights = _bytes_of(payload, owners, begins, ends, heads, list_numbers, bitmap_starts, span, row, SPAN)
    block, begin = tl.load(owners + span), tl.load(begins + span)
    if tl.load(list_numbers + block) < 0:
        k, head, tail = tl.load(counts + block), tl.load(heads + span), tl.load(tails + span)
        at = begin + 8 * row
        room = tl.minimum(tl.maximum(tl.load(ends + span) - at, 0), 8).to(tl.int32)
        ones = num_ones(eights)
        rank = tl.load(sums + span) - tl.load(sums + head) + tl.cumsum(ones, 0) - ones
        worst = tl.where((eights >> room) != 0, BAD_PADDING, 0)
        left = eights & ((tl.full(eights.shape, 1, tl.int32) << room) - 1)
        while tl.max(left, 0) > 0:
            bit, right = lowest_one(left), (left > 0) & (rank < k)
            value = _word(words, tl.load(value_starts + block) + rank, right, ALIGNED)
            _add(out + at + bit, value, right)
            worst = tl.maximum(worst, tl.where((value & MAGNITUDE) >= INFINITE, NOT_FINITE, 0))
            rank += 1
            left &= left - 1
        total = tl.load(sums + tail) - tl.load(sums + head)
        found = tl.maximum(tl.max(worst, 0), tl.where(total != k, BAD_BITMAP, 0))
        tl.store(problem, found, mask=found > 0)
