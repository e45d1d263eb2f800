"""The sequence of an epoch, the same on every worker: a shuffle of 0 .. n-1, or what another sampler gives.

Both are functions of (seed, epoch) alone. Workers therefore agree without exchanging a word, and a resumed run finds
its place again without replaying the epochs before it.

A shuffle: sample i gets the i-th 64-bit word of Philox4x64 under the key (seed, epoch); samples are sorted by their
word. Words of a bit generator, unlike numpy's `permutation`, are promised to be the same in every version and on every
platform. Cost: O(n log n) per epoch, 16 bytes per sample while it is made.

Another sampler (`torch.utils.data.WeightedRandomSampler`, one of the user's own) draws from generators. While it
gives its items, torch's, numpy's and Python's generators, and those that it holds itself, begin from a number made of
(seed, epoch); afterwards they go on as if nothing had happened. Cost: lists of its items, of two epochs.

Reference: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler as TorchSampler

from stretto import random_state
from stretto.errors import ConfigurationError

Indices = npt.NDArray[np.int64]
PIECE = 4096  # indices turned into Python numbers at a time
KEPT = 2  # epochs whose items are kept: the one under way, and the next one at its end
NESTED = 8  # samplers within samplers that are looked through


def order(length: int, epoch: int, seed: int, shuffle: bool = True) -> Indices:
    """A permutation of 0 .. length-1, the same on every platform.

    >>> order(8, epoch=0, seed=0).tolist()
    [0, 2, 1, 5, 4, 3, 6, 7]
    """
    if not shuffle:
        return np.arange(length, dtype=np.int64)
    words = np.random.Philox(key=(seed % 2**64) << 64 | epoch).random_raw(length)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


class Numbers:
    """The samples 0 .. n-1 of a dataset."""

    def __init__(self, num_samples: int, shuffle: bool) -> None:
        self.num_samples = num_samples
        self.shuffle = shuffle

    def length(self, seed: int, epoch: int) -> int:
        return self.num_samples

    def pick(self, seed: int, epoch: int, positions: Indices) -> Iterator[int]:
        """What stands at these positions of the epoch's sequence."""
        picked = order(self.num_samples, epoch, seed, self.shuffle)[positions]
        for start in range(0, len(picked), PIECE):
            yield from picked[start : start + PIECE].tolist()

    def digest(self, seed: int, epoch: int) -> int | None:
        """Nothing needs to be compared: length, seed and epoch say all."""
        return None


class Drawn:
    """What another sampler gives in each epoch: samples, or whole batches of them."""

    shuffle = False  # the order is the other sampler's own

    def __init__(self, sampler: Iterable[Any], seed: int) -> None:
        self._sampler = sampler
        self._chain = list(_chain(sampler))
        self._drawn: dict[tuple[int, int], list[Any]] = {}
        _check_wrapped(sampler, self._chain)
        if repr(self._draw(seed, 0)) != repr(self._items(seed, 0)):
            raise ConfigurationError(
                f"Sampler.wrap({type(sampler).__name__}): two passes over it gave different items although torch's, numpy's and "
                f"Python's generators began alike both times. It must hold a generator of another kind, or change as it is "
                f"used; then workers would not agree on who takes what.\n"
                f"Let it draw from a torch.Generator that it keeps as an attribute, or give it a set_epoch(epoch) and make its "
                f"items a function of that epoch."
            )

    def length(self, seed: int, epoch: int) -> int:
        return len(self._items(seed, epoch))

    def pick(self, seed: int, epoch: int, positions: Indices) -> Iterator[Any]:
        items = self._items(seed, epoch)
        return iter([items[position] for position in positions.tolist()])

    def digest(self, seed: int, epoch: int) -> int | None:
        """A checksum of the epoch's items: they depend on more than numbers, on weights for instance."""
        return zlib.crc32(repr(self._items(seed, epoch)).encode())

    def _items(self, seed: int, epoch: int) -> list[Any]:
        if (seed, epoch) not in self._drawn:
            self._drawn[seed, epoch] = self._draw(seed, epoch)
            for old in list(self._drawn)[:-KEPT]:
                del self._drawn[old]
        return self._drawn[seed, epoch]

    def _draw(self, seed: int, epoch: int) -> list[Any]:
        for sampler in self._chain:
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)
        held = [value for sampler in self._chain for value in _attributes(sampler) if isinstance(value, torch.Generator)]
        with random_state.seeded((seed, epoch), held):
            return list(self._sampler)


def _chain(sampler: Any, depth: int = NESTED) -> Iterator[Any]:
    """The sampler and those inside it: a BatchSampler draws from another one."""
    yield sampler
    for inner in _attributes(sampler):
        if isinstance(inner, TorchSampler) and depth:
            yield from _chain(inner, depth - 1)


def _attributes(sampler: Any) -> Sequence[Any]:
    return list(getattr(sampler, "__dict__", {}).values())


def _check_wrapped(sampler: Any, chain: Sequence[Any]) -> None:
    name = type(sampler).__name__
    if not hasattr(sampler, "__iter__") or not hasattr(sampler, "__len__"):
        raise ConfigurationError(
            f"Sampler.wrap({name}): an epoch of it is shared out as a whole, so it must have an end and begin anew each time, "
            f"and {name} has no {'__iter__' if not hasattr(sampler, '__iter__') else '__len__'}.\n"
            f"Give a sampler with __iter__ and __len__, or a list. An endless sampler that takes its own share goes to the "
            f"DataLoader as it is."
        )
    for each in chain:
        if hasattr(each, "num_replicas") or hasattr(each, "world_size"):
            raise ConfigurationError(
                f"Sampler.wrap({name}): {type(each).__name__} takes a worker's share by itself, and a share of that share "
                f"would leave most samples out.\n"
                f"Wrap the sampler that gives all samples, or use {type(each).__name__} without wrap."
            )
