"""Memory for what lives long."""

from __future__ import annotations

from pathlib import Path

import torch

from stretto.engine.arena import ALIGNED_BYTES, MemoryKind, laid_out, shrink_heap

CPU = torch.device("cpu")


def test_vectors_of_one_kind_lie_side_by_side_and_apart_from_others() -> None:
    wide, narrow = MemoryKind(torch.float32, CPU), MemoryKind(torch.bfloat16, CPU)
    lengths = [(wide, 100_000), (narrow, 7), (wide, 1), (wide, 0), (narrow, 100_000), (wide, 50_000)]
    found = laid_out(lengths)
    assert [(each.dtype, len(each)) for each in found] == [(kind.dtype, length) for kind, length in lengths]
    for number, each in enumerate(found):
        each.fill_(number)
    assert all(bool((each == number).all()) for number, each in enumerate(found))  # nothing overlaps
    assert len({each.untyped_storage().data_ptr() for each in found}) == 2
    starts = [each.data_ptr() - each.untyped_storage().data_ptr() for each in found]
    assert all(start % ALIGNED_BYTES == 0 for start in starts)
    assert sum(each.untyped_storage().nbytes() for each in (found[0], found[1])) <= 4 * 150_001 + 2 * 100_007 + 6 * ALIGNED_BYTES


def test_nothing_is_laid_out_of_nothing() -> None:
    assert laid_out([]) == []
    (empty,) = laid_out([(MemoryKind(torch.float32, CPU), 0)])
    assert len(empty) == 0


def test_what_is_made_in_inference_mode_may_be_written_to_outside() -> None:
    with torch.inference_mode():
        (large,) = laid_out([(MemoryKind(torch.float32, CPU), 1 << 20)])
    large.requires_grad_()
    torch.autograd.backward((large * 2).sum())
    assert large.grad is not None


def test_the_memory_goes_back_when_nobody_has_a_part_of_it() -> None:
    first, second = laid_out([(MemoryKind(torch.uint8, CPU), 1 << 24), (MemoryKind(torch.uint8, CPU), 1 << 26)])
    middle = second.data_ptr() + (1 << 25)
    assert _is_mapped(middle)
    del first
    assert _is_mapped(middle) and len(second) == 1 << 26
    del second
    assert not _is_mapped(middle)
    shrink_heap()


def _is_mapped(address: int) -> bool:
    ranges = (line.split()[0].partition("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, _, end in ranges)
