"""How chosen elements are written: which they are, and their values. Used by every codec that sends some elements and not others.

A payload has four sections, each for all blocks one after the other, without gaps (u32 and f32 are little-endian):

    counts    u32   for each listed block: how many of its elements are chosen
    indices   u32   for each chosen element of a listed block: its index in the block, strictly ascending within the block
    values    f32   for each chosen element of any block, in order of blocks and of index
    bitmaps   u8    for each bitmapped block of n elements ceil(n / 8) bytes, LSB first: 1 is chosen; padded with 0

A block with k chosen takes 4 + 8k bytes listed and ceil(n / 8) + 4k bytes bitmapped. Where k is known beforehand, so is which of
the two is smaller, and that one is used (listed if equal); nothing on the wire says which.

Invariant: what `read` lets pass is what `write` writes: counts as expected, indices ascending and in range, bitmaps with as many
ones as expected, nothing in the padding, and finite values. Reading takes no more memory than a few words per byte of payload.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stretto.compress.backend import accelerated
from stretto.compress.checks import check, is_number
from stretto.compress.layout import Blocks
from stretto.compress.random_numbers import MASK
from stretto.errors import MalformedPayload

COUNT, INDEX, PADDING, BITMAP, VALUE = PROBLEMS = (
    "a count is not what it must be",
    "an index is out of range, or they do not ascend",
    "the padding of a bitmap is not zero",
    "a bitmap has more or fewer ones than it must",
    "a value is not finite",
)


class Chosen(NamedTuple):
    """Elements of a flat vector: their places (int64, ascending) and values (float32)."""

    places: Tensor
    values: Tensor

    @property
    def device(self) -> torch.device:
        return self.places.device


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """What a payload looks like: for each block how many elements are chosen, and whether a bitmap says which. On the CPU.

    `sections`: how long they are, in bytes.
    """

    blocks: Blocks
    counts: Tensor
    bitmapped: Tensor
    sections: tuple[int, int, int, int]

    @classmethod
    def smallest(cls, blocks: Blocks, counts: Tensor) -> Form:
        """Each block as a list or as a bitmap, whichever takes less."""
        maps = bitmap_bytes(blocks.lengths)
        bitmapped = maps < 4 + 4 * counts
        mapped, all_chosen = int((counts * bitmapped).sum()), int(counts.sum())
        num_listed = len(blocks) - int(bitmapped.sum())
        return cls(
            blocks, counts, bitmapped, (4 * num_listed, 4 * (all_chosen - mapped), 4 * all_chosen, int((maps * bitmapped).sum()))
        )

    @classmethod
    def listed(cls, blocks: Blocks, counts: Tensor) -> Form:
        num_chosen = int(counts.sum())
        none = torch.zeros(len(blocks), dtype=torch.bool, device="cpu")
        return cls(blocks, counts, none, (4 * len(blocks), 4 * num_chosen, 4 * num_chosen, 0))

    @property
    def num_chosen(self) -> int:
        return self.sections[2] // 4

    @property
    def num_bytes(self) -> int:
        return sum(self.sections)


def bitmap_bytes(lengths: Tensor) -> Tensor:
    return (lengths + 7) // 8


def counts_of(fraction: float, blocks: Blocks) -> Tensor:
    """max(1, ceil(fraction * n)) for each block, with the fraction as it is written: 7 of 100 for 0.07, where floats give 8."""
    over, under = Fraction(str(fraction)).as_integer_ratio()
    return torch.tensor([max(1, -(-n * over // under)) for n in blocks.lengths.tolist()], dtype=torch.int64, device="cpu")


def checked_fraction(asked: Any) -> float:
    """That of a codec, as a float."""
    is_right = is_number(asked.fraction) and 0 < asked.fraction <= 1
    why, instead = "the share of elements that are sent is a number above 0 and up to 1", "(0.01) to send one in a hundred"
    check(is_right, asked, "fraction", why, type(asked).__name__ + instead)
    return float(asked.fraction)


@accelerated(cpu="sparse_cpu.write")
def write(chosen: Chosen, form: Form) -> Tensor:
    """The payload for these elements: as many of each block as the form says."""
    places, values = chosen
    device = places.device
    bounds, _ = form.blocks.on(device)
    bitmapped, numbers = form.bitmapped.to(device), _numbers(form, device)
    counts = form.counts[~form.bitmapped].to(device)
    indices = (places - bounds[numbers])[~bitmapped[numbers]]
    sections = [counts.to(torch.int32), indices.to(torch.int32), values, _bitmaps(places, numbers, form, device)]
    return torch.cat([section.view(torch.uint8) for section in sections])


@accelerated(cpu="sparse_cpu.read")
def read(payload: Tensor, form: Form) -> Chosen:
    """The reverse, on the payload's device. Raises `MalformedPayload` for what `write` does not write."""
    check_length(payload, form)
    device = payload.device
    bounds, _ = form.blocks.on(device)
    counts, indices, values, bitmaps = torch.split(payload, list(form.sections))
    if not torch.equal(unsigned(counts), form.counts[~form.bitmapped].to(device)):
        raise MalformedPayload(COUNT)
    numbers, bitmapped = _numbers(form, device), form.bitmapped.to(device)
    numbers, index = numbers[~bitmapped[numbers]], unsigned(indices)
    listed = bounds[numbers] + index
    if bool((index >= bounds.diff()[numbers]).any()) or bool((listed.diff() <= 0).any()):
        raise MalformedPayload(INDEX)
    places = torch.cat([listed, _places_in(bitmaps, form)]).sort().values
    floats = words_of(values).view(torch.float32)
    if not bool(floats.isfinite().all()):
        raise MalformedPayload(VALUE)
    return Chosen(places, floats)


def check_length(payload: Tensor, form: Form) -> None:
    if len(payload) != form.num_bytes:
        raise MalformedPayload(f"{len(payload)} bytes, not {form.num_bytes}")


@accelerated(cpu="sparse_cpu.add")
def add(chosen: Chosen, total: Tensor) -> None:
    """Add the chosen elements to a vector."""
    total.index_add_(0, chosen.places, chosen.values)


@accelerated(cpu="sparse_cpu.erase")
def erase(places: Tensor, values: Tensor) -> None:
    """Zero at these places: the residual where values are sent exactly."""
    values[places] = 0.0


def spread(chosen: Chosen, num_elements: int) -> Tensor:
    """The vector that has these elements, and zeros elsewhere."""
    out = torch.zeros(num_elements, device=chosen.values.device, dtype=torch.float32)
    out[chosen.places] = chosen.values
    return out


def words_of(payload: Tensor) -> Tensor:
    """Its whole 32-bit words, as int32. Copied if it begins where words may not: a row of a table may."""
    payload = payload[: len(payload) // 4 * 4]
    aligned = payload.is_contiguous() and payload.storage_offset() % 4 == 0 and payload.data_ptr() % 4 == 0
    return (payload if aligned else payload.clone(memory_format=torch.contiguous_format)).view(torch.int32)


def unsigned(section: Tensor) -> Tensor:
    """Its 32-bit words as int64, none of them negative."""
    return words_of(section).long() & MASK


def bits_of(vector: Tensor) -> Any:
    """A float32 or int32 vector on the CPU as a numpy array of unsigned integers, in the same memory."""
    return vector.numpy().view(np.uint32)


def _numbers(form: Form, device: torch.device) -> Tensor:
    """For each chosen element the number of its block."""
    return torch.repeat_interleave(torch.arange(len(form.blocks), dtype=torch.int64, device="cpu"), form.counts).to(device)


def _bits_of_bitmaps(form: Form, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each bit of the bitmaps, padding included: the number of its block, and its index in the block."""
    widths = 8 * bitmap_bytes(form.blocks.lengths) * form.bitmapped
    numbers = torch.repeat_interleave(torch.arange(len(form.blocks), dtype=torch.int64, device="cpu"), widths)
    starts = widths.cumsum(0) - widths
    return numbers.to(device), (torch.arange(len(numbers), dtype=torch.int64, device="cpu") - starts[numbers]).to(device)


def _bitmaps(places: Tensor, numbers: Tensor, form: Form, device: torch.device) -> Tensor:
    bounds, _ = form.blocks.on(device)
    owners, index = _bits_of_bitmaps(form, device)
    chosen = torch.zeros(form.blocks.num_elements + 1, dtype=torch.uint8, device=device)
    chosen[places] = 1
    inside = index < bounds.diff()[owners]
    bits = chosen[torch.where(inside, bounds[owners] + index, form.blocks.num_elements)]
    weights = (1 << torch.arange(8, device=device, dtype=torch.int64)).to(torch.uint8)
    return (bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def _places_in(bitmaps: Tensor, form: Form) -> Tensor:
    device = bitmaps.device
    bounds, _ = form.blocks.on(device)
    bits = ((bitmaps[:, None] >> torch.arange(8, dtype=torch.uint8, device=device)) & 1).flatten().bool()
    owners, index = _bits_of_bitmaps(form, device)
    owners, index = owners[bits], index[bits]
    if bool((index >= bounds.diff()[owners]).any()):
        raise MalformedPayload(PADDING)
    if not torch.equal(torch.bincount(owners, minlength=len(form.blocks)).cpu(), form.counts * form.bitmapped):
        raise MalformedPayload(BITMAP)
    return bounds[owners] + index
