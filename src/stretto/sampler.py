"""This worker's share of a dataset: no sample twice, none never, and a place to resume from with any number of workers.

An epoch is one sequence, the *order*, that depends on (seed, epoch) and the length alone. P workers share what is
left of it,

    rest[0]  rest[1]  ...  rest[P-1]  rest[P] ...        worker r takes rest[r], rest[r + P], rest[r + 2P], ...

so k equal batches of b on every worker are exactly its first k*P*b samples. What has been taken is a list of *stages*:

    taken = [[24], [3, 2, 2]]     24 from the front; then three workers shared the rest and took 3, 2 and 2 of theirs

The rest after a stage [c_0 ... c_{P-1}] is every element j with j // P >= c_{j mod P}, in the same order. Whoever
knows `taken` knows the rest, exactly, whatever the sizes of batches were and however many workers share it next.

The order: sample i gets the i-th 64-bit word of Philox4x64 under the key (seed, epoch); samples are sorted by their
word. Words of a bit generator, unlike numpy's `permutation`, are promised to be the same in every version and on
every platform.

Cost: O(n log n) per epoch, 16 bytes per sample while it is made.
Reference: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Sampler as TorchSampler

from stretto.api import current_job
from stretto.errors import ConfigurationError
from stretto.session import Job

B = TypeVar("B")
Indices = npt.NDArray[np.int64]
PIECE = 4096  # indices turned into Python numbers at a time


class Sampler(TorchSampler[int]):
    """Gives a DataLoader this worker's samples of each epoch, and remembers how far the training loop has come.

        sampler = stretto.Sampler(dataset, seed=1)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=2)
        while sampler.epoch < 10:
            for x, y in sampler.follow(loader):
                ...

    Each iteration is the next epoch, with another order. If the samples cannot be shared equally the last workers get
    one less: put `stretto.join(model)` around the loop, or choose `drop_last=True` (the last few of the order are
    left out, others each epoch) or `pad=True` (the first few come once more), which give all workers the same number.

    A DataLoader draws samples long before the loop sees them, so the place to resume from is not counted here by
    itself: loop over `follow(loader)`, which counts each batch as it is handed over, or call `consumed(n)` after each
    step.
    """

    def __init__(
        self,
        dataset_or_length: Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        pad: bool = False,
        job: Job | None = None,
    ) -> None:
        self.length = _length_of(dataset_or_length)
        if drop_last and pad:
            raise ConfigurationError(
                "Sampler(drop_last=True, pad=True): one leaves samples out and the other repeats some, both so that all "
                "workers get the same number. Choose one."
            )
        _check_whole("seed", seed)
        job = job or current_job()
        self.rank, self.world_size = job.rank, job.world_size
        self.shuffle, self.seed, self.drop_last, self.pad = bool(shuffle), seed, drop_last, pad
        self.epoch = 0  # of the iteration under way, or the next one
        self._before: list[list[int]] = []  # stages of this epoch that are over
        self._consumed = 0  # by this worker, in the stage under way
        self._begun = False
        self._counted = False  # since the iteration began, somebody has said what was consumed

    # -- giving -------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        if self._begun:
            self._begin_epoch(self.epoch + 1)
        self._begun, self._counted = True, False
        share = self._share()[self._consumed :]
        for start in range(0, len(share), PIECE):
            yield from share[start : start + PIECE].tolist()

    def __len__(self) -> int:
        """How many samples this worker gets in a whole epoch (also while the rest of one is resumed)."""
        return self._share_length(self.rank, self.length)

    def _share(self) -> Indices:
        rest = remaining(order(self.length, self.epoch, self.seed, self.shuffle), self._before)
        return rest[self._positions(len(rest))]

    def _positions(self, length: int) -> Indices:
        """Which of the `length` elements that are left are this worker's; padding begins again at the front."""
        count = self._share_length(self.rank, length)
        return (self.rank + self.world_size * np.arange(count)) % max(length, 1)

    def _share_length(self, rank: int, length: int) -> int:
        each, over = divmod(length, self.world_size)
        if self.drop_last:
            return each
        return each + (over > 0 if self.pad else rank < over)

    @property
    def _num_left(self) -> int:
        """How much of the epoch was left when this stage began."""
        return self.length - sum(map(sum, self._before))

    # -- counting -----------------------------------------------------------------------------------------------------

    def follow(self, loader: Iterable[B], *, batch_size: int | None = None) -> Iterator[B]:
        """The batches of `loader`, each counted as consumed when it is handed to the loop; its end is the end of the epoch.

        Put it outermost, around anything that fetches ahead. `loader` is a DataLoader over this sampler, or the
        sampler itself; for another iterable, `batch_size` says how many samples each item has (the last one may have
        fewer).
        """
        size = _batch_size(loader, self) if batch_size is None else _check_whole("batch_size", batch_size, least=1)
        for batch in self._begin(loader):
            self._counted = True
            self._consumed = min(self._consumed + size, self._share_length(self.rank, self._num_left))
            yield batch
        self._begin_epoch(self.epoch + 1)

    def _begin(self, loader: Iterable[B]) -> Iterator[B]:
        if self._begun or not (self._consumed or self._before):
            return iter(loader)
        # A DataLoader draws a number from torch's generator when it begins. In the middle of an epoch the run that we
        # resume has done so before: done twice, every random number after it would be another one.
        state = torch.get_rng_state()
        try:
            return iter(loader)
        finally:
            torch.set_rng_state(state)

    def consumed(self, num_samples: int) -> None:
        """Count `num_samples` more of this worker's samples as seen by the training loop. Not needed with `follow`."""
        _check_whole("consumed", num_samples)
        share = self._share_length(self.rank, self._num_left)
        if self._consumed + num_samples > share:
            raise ConfigurationError(
                f"consumed({num_samples}) after {self._consumed}: this worker's share of epoch {self.epoch} is {share} samples.\n"
                f"Give the number of samples in this worker's own batch, once per batch, and not together with follow()."
            )
        self._counted = True
        self._consumed += num_samples

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` with the next iteration. The one that is next anyway (or the rest of it) stays as it is."""
        _check_whole("epoch", epoch)
        if self._begun or epoch != self.epoch:
            self._begin_epoch(epoch)

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch, self._before, self._consumed, self._begun = epoch, [], 0, False

    # -- saving and resuming ------------------------------------------------------------------------------------------

    @property
    def num_consumed(self) -> int:
        """How many samples this worker's loop has seen since the epoch began or was resumed."""
        if self._begun and not self._counted:
            raise ConfigurationError(
                f"nobody has said how many samples of epoch {self.epoch} were consumed: a DataLoader fetches ahead, so "
                f"those drawn are more than those seen.\n"
                f"Write `for batch in sampler.follow(loader):`, or call sampler.consumed(len(x)) after each step."
            )
        return self._consumed

    def state_dict(self, counts: Sequence[int] | None = None) -> dict[str, Any]:
        """Where the training loop is: plain numbers, good for any number of workers.

        Without `counts` (each worker's `num_consumed`, by rank) it says that all workers have consumed as many as
        this one, which is so after equal numbers of equal batches. `stretto.save` gives everybody's.
        """
        mine = self.num_consumed
        all_counts = [mine] * self.world_size if counts is None else list(counts)
        taken = [min(count, self._share_length(rank, self._num_left)) for rank, count in enumerate(all_counts)]
        return {
            "length": self.length,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "epoch": self.epoch,
            "taken": [*(list(stage) for stage in self._before), taken],
        }

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise unless `load_state_dict` can take up this state."""
        if state["length"] != self.length:
            raise ConfigurationError(
                f"this sampler's dataset has {self.length} samples, and the state is about one of {state['length']}: its "
                f"place in the order means nothing here.\n"
                f"Give the sampler the dataset it was saved with, or leave the sampler out and begin anew."
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was made, also with another number of workers. The order's seed and shuffle are taken from it."""
        self.check_state_dict(state)
        self.shuffle, self.seed = state["shuffle"], state["seed"]
        self._begin_epoch(state["epoch"])
        *before, last = (list(stage) for stage in state["taken"])
        if len(last) == self.world_size:  # the same stage goes on
            self._before, self._consumed = before, last[self.rank]
        else:
            self._before = merged(before, last, self.length)


# -- the arithmetic ---------------------------------------------------------------------------------------------------


def order(length: int, epoch: int, seed: int, shuffle: bool = True) -> Indices:
    """The sequence of an epoch: a permutation of 0 .. length-1, the same on every platform.

    >>> order(8, epoch=0, seed=0).tolist()
    [0, 2, 1, 5, 4, 3, 6, 7]
    """
    if not shuffle:
        return np.arange(length, dtype=np.int64)
    words = np.random.Philox(key=(seed % 2**64) << 64 | epoch).random_raw(length)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def remaining(sequence: Indices, taken: Iterable[Sequence[int]]) -> Indices:
    """What is left of `sequence`, in its order, after the stages `taken`.

    >>> remaining(np.arange(10), [[2], [2, 0]]).tolist()
    [3, 5, 6, 7, 8, 9]
    """
    for counts in taken:
        position = np.arange(len(sequence))
        sequence = sequence[position // len(counts) >= np.asarray(counts)[position % len(counts)]]
    return sequence


def merged(before: list[list[int]], last: list[int], length: int) -> list[list[int]]:
    """The stages `before` and then `last`, as few as can be: a stage that took everything from the front is one number.

    >>> merged([[8]], [3, 3, 2], length=40), merged([[8]], [3, 0, 2], length=40)
    ([[16]], [[8], [3, 0, 2]])
    """
    left, size = length - sum(map(sum, before)), len(last)
    counts = [min(count, len(range(rank, left, size))) for rank, count in enumerate(last)]  # without what was padding
    total = sum(counts)
    if counts != [len(range(rank, total, size)) for rank in range(size)]:
        return [*before, counts]
    if before and len(before[-1]) == 1:
        return [*before[:-1], [before[-1][0] + total]]
    return [*before, [total]]


# -- checks -----------------------------------------------------------------------------------------------------------


def _length_of(dataset_or_length: Sized | int) -> int:
    if isinstance(dataset_or_length, int) and not isinstance(dataset_or_length, bool):
        return _check_whole("length", dataset_or_length)
    try:
        return len(dataset_or_length)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigurationError(
            f"Sampler({type(dataset_or_length).__name__}): it shares out the numbers 0 .. length-1, and this has no length.\n"
            f"Give a dataset with __len__ or the number of samples. An IterableDataset takes no sampler: let it skip to "
            f"its own share, for instance itertools.islice(stream, stretto.rank(), None, stretto.world_size())."
        ) from None


def _check_whole(name: str, value: int, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise ConfigurationError(f"{name}={value!r}: a whole number from {least} on is needed here. Write for instance {name}=1.")
    return value


def _batch_size(loader: Any, sampler: Sampler) -> int:
    """How many samples of `sampler` each item of `loader` has."""
    if loader is sampler:
        return 1
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(
            f"follow({type(loader).__name__}): it cannot be seen how many samples each of its items has.\n"
            f"Give the DataLoader itself, or follow(..., batch_size=...)."
        )
    if loader.num_workers > 0 and not getattr(loader, "in_order", True):
        raise ConfigurationError(
            "follow(DataLoader(in_order=False)): batches come in another order than they are drawn, so the ones that "
            "have come say nothing about where to resume.\nUse in_order=True, the default."
        )
    batches = loader.batch_sampler
    if batches is None and loader.sampler is sampler:
        return 1
    size = getattr(batches, "batch_size", None)
    if getattr(batches, "sampler", None) is sampler and isinstance(size, int):
        return size
    raise ConfigurationError(
        "follow(loader): this DataLoader does not draw from this sampler in batches of one size.\n"
        "Make it with DataLoader(dataset, batch_size=..., sampler=sampler), or call sampler.consumed(n) after each step."
    )
