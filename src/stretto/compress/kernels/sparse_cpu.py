"""Lists of chosen elements on a CPU: written and checked (see `sparse_format.py`), and drawn at random (see `random_k.py`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.compress.kernels.compiling import compiled
from stretto.compress.kernels.random_numbers_cpu import mix
from stretto.compress.layout import Blocks
from stretto.compress.random_k import grid
from stretto.compress.random_numbers import GOLDEN, RandomKeys, mix_tensor
from stretto.compress.sparse_format import PROBLEMS, Chosen, Form, bits_of, check_length, words_of
from stretto.errors import MalformedPayload

Array = Any  # numpy.ndarray, whose dtype and shape mean nothing to Numba's callers

BAD_COUNT, BAD_INDEX, BAD_PADDING, BAD_BITMAP, NOT_FINITE = 1, 2, 3, 4, 5  # places in sparse_format.PROBLEMS
EXPONENT = np.uint32(0x7F800000)
STEP = np.uint32(GOLDEN)
ROUNDS = 4


def write(chosen: Chosen, form: Form) -> Tensor:
    payload = torch.empty(form.num_bytes, dtype=torch.uint8, device="cpu")
    words, bitmaps = bits_of(words_of(payload)), payload[sum(form.sections[:3]) :]
    _write(chosen.places.numpy(), bits_of(chosen.values), *_described(form), words, bitmaps.numpy())
    return payload


def read(payload: Tensor, form: Form) -> Chosen:
    check_length(payload, form)
    words, bitmaps = words_of(payload), payload[sum(form.sections[:3]) :].contiguous()
    where = torch.empty(form.num_chosen, dtype=torch.int64, device="cpu")
    problem = _read(bits_of(words), bitmaps.numpy(), *_described(form), where.numpy())
    if problem:
        raise MalformedPayload(PROBLEMS[problem - 1])
    first = sum(form.sections[:2]) // 4
    return Chosen(where, words[first : first + len(where)].view(torch.float32))


def _described(form: Form) -> tuple[Array, Array, Array]:
    return form.blocks.bounds.numpy(), form.counts.numpy(), form.bitmapped.numpy()


def add(chosen: Chosen, total: Tensor) -> None:
    _add_at(total.numpy(), chosen.places.numpy(), chosen.values.numpy())


def erase(where: Tensor, values: Tensor) -> None:
    _erase_at(values.numpy(), where.numpy())


def places(blocks: Blocks, counts: Tensor, random: RandomKeys, device: torch.device) -> Tensor:
    (rows, columns), out = grid(blocks.lengths), torch.empty(int(counts.sum()), dtype=torch.int64, device="cpu")
    bases = bits_of(mix_tensor(blocks.keys ^ random.shared).to(torch.int32))
    _draw_places(blocks.bounds.numpy(), counts.numpy(), rows.numpy(), columns.numpy(), bases, out.numpy())
    return out


@compiled
def _write(places: Array, values: Array, bounds: Array, counts: Array, bitmapped: Array, words: Array, bitmaps: Array) -> None:
    """Fill the sections counts, indices and values in `words`, and `bitmaps`."""
    index, value = _sections(counts, bitmapped)
    listed, place, byte = 0, 0, 0
    bitmaps[:] = 0
    for b in range(len(counts)):
        start, stop = bounds[b], place + counts[b]
        if bitmapped[b]:
            for i in range(place, stop):
                within = places[i] - start
                bitmaps[byte + (within >> 3)] |= np.uint8(1 << (within & 7))
            byte += (bounds[b + 1] - start + 7) // 8
        else:
            words[listed] = counts[b]
            listed += 1
            for i in range(place, stop):
                words[index + i - place] = places[i] - start
            index += counts[b]
        place = stop
    for i in range(place):
        words[value + i] = values[i]


@compiled
def _read(words: Array, bitmaps: Array, bounds: Array, counts: Array, bitmapped: Array, places: Array) -> int:
    """Write the chosen elements' places; 0, or the number of the problem. The sections are as long as they must be."""
    index, value = _sections(counts, bitmapped)
    listed, place, byte = 0, 0, 0
    for b in range(len(counts)):
        here = places[place : place + counts[b]]
        length = bounds[b + 1] - bounds[b]
        if bitmapped[b]:
            num_bytes = (length + 7) // 8
            problem = _read_bitmap(bitmaps[byte : byte + num_bytes], length, here)
            byte += num_bytes
        elif words[listed] != counts[b]:
            problem = BAD_COUNT
        else:
            problem = _read_list(words[index : index + counts[b]], length, here)
            listed += 1
            index += counts[b]
        if problem:
            return problem
        here += bounds[b]
        place += counts[b]
    return NOT_FINITE if _any_not_finite(words[value : value + place]) else 0


@compiled
def _sections(counts: Array, bitmapped: Array) -> tuple[int, int]:
    """At which words the indices begin, and the values."""
    num_listed, num_indices = 0, 0
    for b in range(len(counts)):
        if not bitmapped[b]:
            num_listed += 1
            num_indices += counts[b]
    return num_listed, num_listed + num_indices


@compiled
def _read_list(indices: Array, length: int, places: Array) -> int:
    before, num_bad = np.int64(-1), 0
    for i in range(len(places)):
        index = np.int64(indices[i])
        num_bad += 1 if index <= before else 0
        places[i] = index
        before = index
    return BAD_INDEX if num_bad or before >= length else 0


@compiled
def _read_bitmap(bitmap: Array, length: int, places: Array) -> int:
    if length % 8 and bitmap[-1] >> (length % 8):
        return BAD_PADDING
    count = 0
    for byte in range(len(bitmap)):
        if bitmap[byte] == 0:
            continue
        for bit in range(8):
            if (bitmap[byte] >> bit) & 1:
                if count == len(places):
                    return BAD_BITMAP
                places[count] = 8 * byte + bit
                count += 1
    return 0 if count == len(places) else BAD_BITMAP


@compiled
def _any_not_finite(values: Array) -> bool:
    bad = False
    for i in range(len(values)):
        bad |= np.uint32(values[i] & EXPONENT) == EXPONENT
    return bad


@compiled
def _add_at(total: Array, places: Array, values: Array) -> None:
    for i in range(len(places)):
        total[places[i]] += values[i]


@compiled
def _erase_at(values: Array, places: Array) -> None:
    for i in range(len(places)):
        values[places[i]] = 0.0


@compiled
def _draw_places(bounds: Array, counts: Array, rows: Array, columns: Array, bases: Array, places: Array) -> None:
    """The reference in `random_k.py`, block by block: permute all, then go on with the few that left the block."""
    keys = np.empty(ROUNDS + 1, np.uint32)
    place = 0
    for b in range(len(counts)):
        length = bounds[b + 1] - bounds[b]
        for r in range(ROUNDS + 1):
            keys[r] = mix(np.uint32(bases[b] + np.uint32(STEP * np.uint32(r + 1))))
        offset = np.int64((np.uint64(keys[ROUNDS] >> np.uint32(1)) * np.uint64(length)) >> np.uint64(31))
        here = places[place : place + counts[b]]
        for first in range(0, len(here), columns[b]):
            _permute_row(first // columns[b], rows[b], columns[b], keys, here[first : first + columns[b]])
        for j in range(len(here)):
            at = here[j]
            while at >= length:
                at = _permuted(at // columns[b], at % columns[b], rows[b], columns[b], keys[0], keys[1], keys[2], keys[3])
            at += offset
            here[j] = at - (length if at >= length else 0) + bounds[b]
        place += counts[b]


@compiled
def _permute_row(row: int, rows: int, columns: int, keys: Array, places: Array) -> None:
    """The elements that begin in one row of the grid: no division, and nothing that keeps it from being vectorised."""
    a, b, c, d = keys[0], keys[1], keys[2], keys[3]
    for column in range(len(places)):
        places[column] = _permuted(row, column, rows, columns, a, b, c, d)


@compiled
def _permuted(
    at_row: int, at_column: int, rows: int, columns: int, a: np.uint32, b: np.uint32, c: np.uint32, d: np.uint32
) -> int:
    row, column = np.uint32(at_row), np.uint32(at_column)
    row = _moved(row, column, rows, a)
    column = _moved(column, row, columns, b)
    row = _moved(row, column, rows, c)
    column = _moved(column, row, columns, d)
    return np.int64(row) * columns + np.int64(column)  # type: ignore[return-value]


@compiled
def _moved(coordinate: np.uint32, other: np.uint32, size: int, key: np.uint32) -> np.uint32:
    by = np.uint32((np.uint64(mix(np.uint32(other + key))) * np.uint64(size)) >> np.uint64(32))
    moved = np.uint32(coordinate + by)
    return np.uint32(moved - size) if moved >= size else moved
