"""Choosing elements by magnitude on a CPU: the k largest of each block, or all that reach a threshold.

Without their sign bit, the bits of a float32 order like integers, so everything here counts and compares unsigned integers: no
rounding, nothing special about denormals or zeros. Loops run from zero over slices: elsewhere Numba checks every index for being
negative, and nothing is vectorised.

The k largest, ties to the lower index, exactly, in about one pass over memory:

    1. a sample of at most 16384 elements gives a floor that somewhat more than k elements should reach
    2. one pass lists those that do, in order of index
    3. the k-th largest magnitude of that short list is found by counting (8 bits at a time)
    4. everything above it is taken, and of its equals the first, until there are k

If the sample misled (fewer than k reach the floor, or far more), steps 3 and 4 work on the whole block: the same result in a few
more passes. So the sample decides how long it takes and never what is chosen.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.compress.kernels.compiling import compiled
from stretto.compress.layout import Blocks
from stretto.compress.sparse_format import Chosen, Form, bits_of

Array = Any  # numpy.ndarray, whose dtype and shape mean nothing to Numba's callers

MAGNITUDE = np.uint32(0x7FFFFFFF)
TILE = 2048  # elements whose flags are written in one go; they stay in the first-level cache
GROUP = 8  # flags are bytes, read back as one word of this many
SAMPLE = 16384


def largest(values: Tensor, form: Form) -> Chosen:
    chosen = _room(form.num_chosen)
    _choose_largest(bits_of(values), form.blocks.bounds.numpy(), form.counts.numpy(), *_arrays(chosen))
    return chosen


def at_least(values: Tensor, floor: int, blocks: Blocks) -> tuple[Chosen, Form]:
    bits, least = bits_of(values), np.uint32(floor)
    counts = torch.empty(len(blocks), dtype=torch.int64, device="cpu")
    _count_at_least(bits, blocks.bounds.numpy(), least, counts.numpy())
    places, found = chosen = _room(int(counts.sum()) + GROUP)
    count = _list_at_least(bits, least, *_arrays(chosen))
    return Chosen(places[:count], found[:count]), Form.listed(blocks, counts)


def count_reaching(values: Tensor, threshold: Tensor) -> int:
    counts = np.empty(1, np.int64)
    _count_at_least(bits_of(values), np.array([0, len(values)]), _floor(threshold), counts)
    return int(counts[0])


def reaching(values: Tensor, threshold: Tensor) -> Tensor:
    chosen = _room(count_reaching(values, threshold) + GROUP)
    count = _list_at_least(bits_of(values), _floor(threshold), *_arrays(chosen))
    return chosen.places[:count]


def _floor(threshold: Tensor) -> np.uint32:
    """Above zero, whose bits are 0."""
    return np.uint32(max(1, int(threshold.view(torch.int32))))


def _room(count: int) -> Chosen:
    places = torch.empty(count, dtype=torch.int64, device="cpu")
    return Chosen(places, torch.empty(count, dtype=torch.float32, device="cpu"))


def _arrays(chosen: Chosen) -> tuple[Array, Array]:
    return chosen.places.numpy(), bits_of(chosen.values)


@compiled
def _choose_largest(bits: Array, bounds: Array, counts: Array, chosen: Array, words: Array) -> None:
    """Write to `chosen` (int64) the places of the `counts[b]` largest of each block, ascending, and to `words` their bits."""
    put = 0
    for b in range(len(counts)):
        start, k = bounds[b], counts[b]
        places = chosen[put : put + k]
        _choose(bits[start : bounds[b + 1]], k, places, words[put : put + k])
        places += start
        put += k


@compiled
def _count_at_least(bits: Array, bounds: Array, floor: np.uint32, counts: Array) -> None:
    """For each block how many magnitudes reach `floor` (a magnitude's bits)."""
    for b in range(len(counts)):
        part = bits[bounds[b] : bounds[b + 1]]
        count = np.uint32(0)
        for i in range(len(part)):
            count += np.uint32(np.uint32(part[i] & MAGNITUDE) >= floor)
        counts[b] = count


@compiled
def _list_at_least(bits: Array, floor: np.uint32, found: Array, words: Array) -> int:
    """Write to `found` the places of all magnitudes that reach `floor`, ascending, and to `words` their bits, while they are in
    the cache; how many, or -1 if they might not fit.

    There must be room for GROUP more than there are: places are written first and counted after, which costs no branch.
    """
    flags = np.empty(TILE, np.uint8)
    octets = flags.view(np.uint64)
    hits = np.empty(TILE // GROUP, np.uint32)
    count, tiles = 0, len(bits) // TILE * TILE
    for first in range(0, tiles, TILE):
        tile = bits[first : first + TILE]
        for j in range(TILE):
            flags[j] = np.uint32(tile[j] & MAGNITUDE) >= floor
        num_hits = 0
        for w in range(TILE // GROUP):
            hits[num_hits] = w * GROUP
            num_hits += octets[w] != 0
        if count + GROUP * num_hits > len(found) and count + np.int64(np.sum(flags)) + GROUP > len(found):
            return -1
        for h in range(num_hits):
            for j in range(GROUP):
                at = hits[h] + np.uint32(j)
                found[count] = first + at
                words[count] = tile[at]
                count += flags[at]
    for i in range(tiles, len(bits)):
        if np.uint32(bits[i] & MAGNITUDE) >= floor:
            if count == len(found):
                return -1
            found[count] = i
            words[count] = bits[i]
            count += 1
    return count


@compiled
def _choose(bits: Array, k: int, chosen: Array, words: Array) -> None:
    n = len(bits)
    if n > TILE and k < n // 4:
        floor, room = _guess(bits, k)
        found, candidates = np.empty(room, np.int64), np.empty(room, np.uint32)
        count = _list_at_least(bits, floor, found, candidates)
        if count >= k:
            edge, spare = _kth_largest(candidates[:count], k)
            _take(candidates[:count], edge, spare, chosen, words)
            for i in range(k):
                chosen[i] = found[chosen[i]]
            return
        if count >= 0 and floor == 1:  # all that are not zero are fewer than k
            _take(bits, np.uint32(0), k - count, chosen, words)
            return
    edge, spare = _kth_largest(bits, k)
    _take(bits, edge, spare, chosen, words)


@compiled
def _guess(bits: Array, k: int) -> tuple[np.uint32, int]:
    """A magnitude above zero that at least k elements should reach (by three deviations), and room for those that should."""
    n = len(bits)
    step = max(n // SAMPLE, 4) | 1  # odd: an even one meets the same columns of a matrix again and again
    size = (n - 1) // step + 1
    sample = np.empty(size, np.uint32)
    for i in range(size):
        sample[i] = bits[i * step]
    expected = size * k / n
    rank = min(size, int(expected + 3 * np.sqrt(expected) + 4))
    edge, _ = _kth_largest(sample, rank)
    room = (rank + 4 * np.sqrt(rank) + 8) * n / size + GROUP
    return max(edge, np.uint32(1)), int(min(room, n + GROUP))


@compiled
def _take(bits: Array, edge: np.uint32, spare: int, chosen: Array, words: Array) -> None:
    """Those above the edge, and the first `spare` of those on it."""
    count = 0
    for i in range(len(bits)):
        magnitude = np.uint32(bits[i] & MAGNITUDE)
        if magnitude >= edge:
            on_it = magnitude == edge
            if on_it and spare == 0:
                continue
            spare -= on_it
            chosen[count] = i
            words[count] = bits[i]
            count += 1


@compiled
def _kth_largest(bits: Array, k: int) -> tuple[np.uint32, int]:
    """The k-th largest magnitude, and how many of its equals are among the k largest. Digit by digit, each time of fewer."""
    counts = np.empty(256, np.int64)
    edge, left = np.uint32(0), bits
    for shift in (23, 15, 7, 0):
        below, digits = np.uint32(shift), np.uint32(127 if shift == 0 else 255)
        counts[:] = 0
        for i in range(len(left)):
            counts[(np.uint32(left[i] & MAGNITUDE) >> below) & digits] += 1
        digit = int(digits)
        while counts[digit] < k:
            k -= counts[digit]
            digit -= 1
        edge |= np.uint32(np.uint32(digit) << below)
        left = _with_digit(left, below, digits, digit, counts[digit])
    return edge, k


@compiled
def _with_digit(bits: Array, below: np.uint32, digits: np.uint32, digit: int, count: int) -> Array:
    """Those that have this digit: `count`."""
    same = np.empty(count + 1, np.uint32)
    at = 0
    for i in range(len(bits)):
        same[at] = bits[i]
        at += ((np.uint32(bits[i] & MAGNITUDE) >> below) & digits) == digit
    return same[:count]
