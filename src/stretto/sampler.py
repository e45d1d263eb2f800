"""This worker's share of a dataset: every sample in every epoch, as many for each worker, and a place to resume from.

An epoch is one sequence, the *order* (`epoch_order.py`), that is the same on all workers and depends on (seed, epoch)
and the data alone. P workers share what is left of it,

    rest[0]  rest[1]  ...  rest[P-1]  rest[P] ...        worker r takes rest[r], rest[r + P], rest[r + 2P], ...

so k equal batches of b on every worker are exactly its first k*P*b samples. Where P does not divide what is left, the
first few of it come once more at the end (*padding*), so that all workers get the same number. What has been taken is
a list of *stages*:

    taken = [[24], [3, 2, 2]]     24 from the front; then three workers shared the rest and took 3, 2 and 2 of theirs

The rest after a stage [c_0 ... c_{P-1}] is every element j with j // P >= c_{j mod P}, in the same order. Whoever
knows `taken` knows the rest, exactly, whatever the sizes of batches were and however many workers share it next.

The place in an epoch moves when somebody counts (`follow`, `consumed`), and not when samples are drawn: a DataLoader
draws ahead, and a look at one batch, `next(iter(loader))`, is not training. A loop that nobody counts still ends its
epoch if the job's models were trained in it: when it is left, or, where the loader has drawn everything long before, when
the next one begins. (In a job that trains no model, when everything is drawn.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils.data import Sampler as TorchSampler

from stretto.api import current_job
from stretto.epoch_order import Drawn, Indices, Numbers
from stretto.errors import ConfigurationError
from stretto.following import Batching, Followed, batching_of
from stretto.job import Job

B = TypeVar("B")


@dataclass(eq=False, slots=True)
class _Pass:
    """An iteration under way: of what, and how far the place and the training were when it began."""

    epoch: int
    num_left: int  # of the epoch, when its stage began
    move: int
    trained: WeakKeyDictionary[Any, int]  # how far each model was


class Sampler(TorchSampler[Any]):
    """Gives a DataLoader this worker's samples of each epoch, and remembers how far the training loop has come.

        sampler = stretto.Sampler(dataset, seed=1)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=2)
        while sampler.epoch < 10:
            for x, y in sampler.follow(loader):
                ...

    Each epoch has another order. All workers get the same number of samples: if they cannot be shared equally, the first
    few of the order come once more (as with torch's DistributedSampler), or with `drop_last=True` its last few are left out.
    `pad=False` gives each sample exactly once and the last workers one less: for evaluation, or with `stretto.join(model)`
    around the loop. `Sampler.wrap` shares what another sampler gives.

    A DataLoader draws samples long before the loop sees them, so the place to resume from is not counted here by
    itself: loop over `follow(loader)`, which counts each batch as it is handed over, or call `consumed(n)` after each
    step. Without either, do not begin a second iteration (a look at a batch, on one rank only) in the middle of a loop whose
    loader has drawn everything ahead: it would be taken for the next epoch.
    """

    def __init__(
        self,
        dataset_or_length: Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        pad: bool | None = None,
        job: Job | None = None,
    ) -> None:
        length = _length_of(dataset_or_length)
        if drop_last and pad:
            raise ConfigurationError(
                "Sampler(drop_last=True, pad=True): one leaves samples out and the other repeats some, both so that all "
                "workers get the same number. Choose one."
            )
        _check_whole("seed", seed)
        job = job or current_job()
        self.rank, self.world_size = job.rank, job.world_size
        self.seed, self.drop_last, self.pad = seed, drop_last, pad is not False and not drop_last
        self._epoch = 0
        self._order: Numbers | Drawn = Numbers(length, bool(shuffle))
        self._engines = job.engines  # of the models that train in this job
        self._before: list[list[int]] = []  # stages of this epoch that are over
        self._consumed = 0  # by this worker, in the stage under way
        self._touched = False  # something of this epoch has been counted here
        self._spent = False  # this epoch has been used up by a loop that nobody counted
        self._moves = 0  # how often the place has changed
        self._passes: list[_Pass] = []  # iterations under way
        self._drained: _Pass | None = None  # the last one that has drawn everything, perhaps long before the loop sees it
        self._drawn = 0  # the epoch of the one that began last
        self._following = False  # a pass of `follow` is under way
        self._in_pass = False  # the state that was loaded was made within such a pass

    @classmethod
    def wrap(
        cls,
        sampler: Iterable[Any],
        *,
        seed: int = 0,
        drop_last: bool = False,
        pad: bool | None = None,
        job: Job | None = None,
    ) -> Sampler:
        """Share what `sampler` gives in each epoch: a torch sampler, a list of indices, anything with `__iter__` and `__len__`.

            weighted = WeightedRandomSampler(weights, num_samples=1000)
            loader = DataLoader(data, batch_size=8, sampler=stretto.Sampler.wrap(weighted, seed=1))
            loader = DataLoader(data, batch_sampler=stretto.Sampler.wrap(BatchSampler(...)))   # whole batches are shared

        All workers draw the same items: while `sampler` gives them, torch's, numpy's and Python's generators and any
        torch.Generator that it holds are set to a number made of `seed` and the epoch. If it has a `set_epoch`, that is
        called. Items count as samples do: with a BatchSampler, `consumed(1)` is a batch.
        """
        made = cls(0, shuffle=False, seed=seed, drop_last=drop_last, pad=pad, job=job)
        made._order = Drawn(sampler, seed)
        return made

    @property
    def epoch(self) -> int:
        """The epoch of the pass under way; between passes, of the next one."""
        self._settle_drained()
        return self._epoch

    @property
    def shuffle(self) -> bool:
        return self._order.shuffle

    @property
    def length(self) -> int:
        """How many items the epoch has, for all workers together."""
        return self._order.length(self.seed, self._epoch)

    # -- giving -------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        self._settle_drained()
        self._drained = None  # if it still is: nothing was trained since, so it was only a look
        begun = self._pass()
        share = self._share(begun.epoch, [], 0) if self._over else self._share(begun.epoch, self._before, self._consumed)
        watched = not self._following and not self._is_even(begun.num_left)
        self._passes.append(begun)
        self._drawn = begun.epoch
        try:
            for item in share:
                if watched:
                    self._refuse_uneven(begun, "a loop over the loader itself")
                yield item
            if watched:
                self._refuse_uneven(begun, "a loop over the loader itself")
            self._drained = begun
        finally:
            self._passes.remove(begun)
            if self._trained_since(begun) or (self._drained is begun and not self._engines):
                self._use_up(begun)

    def __len__(self) -> int:
        """How many samples this worker gets in a whole epoch (also while the rest of one is resumed)."""
        return self._share_length(self.rank, self._order.length(self.seed, self._epoch + self._over))

    def _pass(self) -> _Pass:
        """The next pass: of the rest of this epoch, or of the next one if this is used up."""
        num_left = self._order.length(self.seed, self._epoch + 1) if self._over else self._num_left
        progress = WeakKeyDictionary({engine: self._progress(engine) for engine in self._engines})
        return _Pass(self._epoch + self._over, num_left, self._moves, progress)

    def _share(self, epoch: int, before: list[list[int]], consumed: int) -> Iterator[Any]:
        """This worker's items of what is left; padding begins again at the front."""
        rest = remaining(np.arange(self._order.length(self.seed, epoch)), before)
        count = self._share_length(self.rank, len(rest))
        mine = (self.rank + self.world_size * np.arange(consumed, count)) % max(len(rest), 1)
        return self._order.pick(self.seed, epoch, rest[mine])

    def _share_length(self, rank: int, length: int) -> int:
        each, over = divmod(length, self.world_size)
        if self.drop_last:
            return each
        return each + (over > 0 if self.pad else rank < over)

    @property
    def _num_left(self) -> int:
        """How much of the epoch was left when this stage began."""
        return self.length - sum(map(sum, self._before))

    @property
    def _over(self) -> bool:
        """Whether this epoch was used up here, so that the next pass is one of the next epoch."""
        self._settle_drained()
        return self._spent or (self._touched and self._consumed >= self._share_length(self.rank, self._num_left))

    def _settle_drained(self) -> None:
        """A loader that fetches ahead may have drawn everything before the loop saw any of it. Was it trained on since?"""
        drained = self._drained
        if drained is not None and self._trained_since(drained):
            self._drained = None
            self._use_up(drained)

    def _use_up(self, begun: _Pass) -> None:
        """The loop over these samples has ended. If nobody has counted them, the whole epoch counts as used."""
        if self._drained is begun:
            self._drained = None
        if begun.move == self._moves:
            if begun.epoch != self._epoch:
                self._go_to(begun.epoch)
            self._spent = True

    def _trained_since(self, begun: _Pass) -> bool:
        """Whether any of this job's models has been trained since the pass began. Models come and go meanwhile."""
        return any(self._progress(engine) > begun.trained.get(engine, 0) for engine in self._engines)

    def _progress(self, engine: Any) -> int:
        """A number that grows with every training step of a model.

        Several workers count rounds, which are the same on all of them. One worker combines nothing and has none, but
        torch counts the changes of every parameter.
        """
        if self.world_size > 1:
            return int(engine.rounds)
        return sum(parameter._version for parameter in engine.model.parameters() if not parameter.is_inference())

    # -- unequal shares -----------------------------------------------------------------------------------------------

    def _is_even(self, length: int) -> bool:
        return self.pad or self.drop_last or length % self.world_size == 0

    def _refuse_uneven(self, begun: _Pass, what: str) -> None:
        """Raise if workers that have different numbers of batches are training, and no `join` lets some of them end earlier."""
        if self._trained_since(begun) and not any(engine.joining for engine in self._engines):
            each, over = divmod(begun.num_left, self.world_size)
            raise ConfigurationError(
                f"Sampler(pad=False), {what}: {begun.num_left} samples are shared by {self.world_size} workers, the first {over} "
                f"of which have {each + 1} and the others {each}. Those with less would begin their next epoch while the others "
                f"are in this one, and gradients of different epochs would be combined.\n"
                f"Leave pad=False out (the first few samples come once more), use drop_last=True, or put "
                f"`with stretto.join(model):` around the loop. If the numbers of *batches* are equal, loop over "
                f"sampler.follow(loader), which knows them."
            )

    # -- counting -----------------------------------------------------------------------------------------------------

    def follow(self, loader: Iterable[B], *, batch_size: int | None = None) -> Followed[B]:
        """The batches of `loader`, each counted as consumed when it is handed to the loop; its end is the end of the epoch.

        It has a length, so progress bars know their end. A loop that is left early has an epoch's rest left over, and the
        next one goes on there. Put it outermost, around anything that fetches ahead. `loader` is a DataLoader over this
        sampler, or the sampler itself; for another iterable, `batch_size` says how many samples each item has (the last
        one may have fewer).
        """
        if batch_size is None:
            batching = batching_of(loader, self)
        else:
            batching = Batching(_check_whole("batch_size", batch_size, least=1), False)
        return Followed(lambda: self._follow(loader, batching), lambda: self._num_batches(self.rank, batching))

    def _follow(self, loader: Iterable[B], batching: Batching) -> Iterator[B]:
        if self._over:
            self._go_to(self._epoch + 1)
        begun, ranks = self._pass(), range(self.world_size)
        watched = not self._is_even(begun.num_left) and len({self._num_batches(rank, batching) for rank in ranks}) > 1
        self._following = True
        try:
            for batch in self._begin(loader):
                if watched:
                    self._refuse_uneven(begun, f"followed in batches of {batching.size}")
                if self._epoch == begun.epoch:
                    self._count(min(batching.size, self._share_length(self.rank, self._num_left) - self._consumed))
                yield batch
            if watched:
                self._refuse_uneven(begun, f"followed in batches of {batching.size}")
        finally:
            self._following = False
        if self._epoch == begun.epoch:
            self._go_to(self._epoch + 1)

    def _num_batches(self, rank: int, batching: Batching) -> int:
        """How many batches a worker has in the next pass, if all have consumed as many samples as this one."""
        consumed = 0 if self._over else self._consumed
        return batching.num_batches(max(0, self._share_length(rank, self._pass().num_left) - consumed))

    def _begin(self, loader: Iterable[B]) -> Iterator[B]:
        if not self._in_pass:
            return iter(loader)
        # A DataLoader draws a number from torch's generator when it begins. In the middle of a pass the run that we
        # resume has done so before: done twice, every random number after it would be another one.
        self._in_pass = False
        state = torch.get_rng_state()
        try:
            return iter(loader)
        finally:
            torch.set_rng_state(state)

    def consumed(self, num_samples: int) -> None:
        """Count `num_samples` more of this worker's samples as seen by the training loop. Not needed with `follow`."""
        _check_whole("consumed", num_samples)
        if self._over and self._drawn == self._epoch + 1:
            self._go_to(self._drawn)
        share = self._share_length(self.rank, self._num_left)
        if self._consumed + num_samples > share:
            raise ConfigurationError(
                f"consumed({num_samples}) after {self._consumed}: this worker's share of epoch {self.epoch} is {share} samples.\n"
                f"Give the number of samples in this worker's own batch, once per batch, and not together with follow()."
            )
        self._count(num_samples)

    def _count(self, num_samples: int) -> None:
        self._consumed += num_samples
        self._touched, self._spent, self._drained = True, False, None
        self._moves += 1

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` with the next iteration. The one that is next anyway (or the rest of it) stays as it is."""
        _check_whole("epoch", epoch)
        if epoch != self.epoch or self._touched or self._spent:
            self._go_to(epoch)

    def _go_to(self, epoch: int) -> None:
        self._epoch, self._before, self._consumed = epoch, [], 0
        self._drained = None
        self._touched = self._spent = self._in_pass = False
        self._moves += 1

    # -- saving and resuming ------------------------------------------------------------------------------------------

    @property
    def num_consumed(self) -> int:
        """How many samples this worker's loop has seen since the epoch began or was resumed."""
        self._settle_drained()
        if self._spent or any(self._is_uncounted(each) for each in self._passes):
            raise ConfigurationError(
                f"nobody has said how many samples of epoch {self.epoch} were consumed: a DataLoader fetches ahead, so "
                f"those drawn are more than those seen.\n"
                f"Write `for batch in sampler.follow(loader):`, or call sampler.consumed(len(x)) after each step."
            )
        return self._consumed

    def _is_uncounted(self, begun: _Pass) -> bool:
        """Whether a loop trains on these samples and nobody counts them. Without a model to look at, it might."""
        return begun.move == self._moves and (not self._engines or self._trained_since(begun))

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
            "epoch": self._epoch,
            "taken": [*(list(stage) for stage in self._before), taken],
            "in_pass": self._following or self._in_pass,
            "digest": self._order.digest(self.seed, self._epoch),
        }

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise unless `load_state_dict` can take up this state."""
        length = self._order.length(state["seed"], state["epoch"])
        if state["length"] != length:
            raise ConfigurationError(
                f"this sampler's dataset has {length} samples, and the state is about one of {state['length']}: its "
                f"place in the order means nothing here.\n"
                f"Give the sampler the dataset it was saved with, or leave the sampler out and begin anew."
            )
        if state.get("digest") != self._order.digest(state["seed"], state["epoch"]):
            raise ConfigurationError(
                f"this sampler gives epoch {state['epoch']} in another order than the one whose state this is: its place in "
                f"the order means nothing here.\n"
                f"Wrap the same sampler, with the same weights, over the same data; or leave the sampler out and begin anew."
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was made, also with another number of workers. The order's seed and shuffle are taken from it."""
        self.check_state_dict(state)
        self._order.shuffle, self.seed = state["shuffle"], state["seed"]
        self._go_to(state["epoch"])
        *before, last = (list(stage) for stage in state["taken"])
        if len(last) == self.world_size:  # the same stage goes on
            self._before, self._consumed = before, last[self.rank]
        else:
            self._before = merged(before, last, self.length)
        self._in_pass = state.get("in_pass", True) and bool(self._before or any(last))


# -- the arithmetic ---------------------------------------------------------------------------------------------------


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
    if isinstance(dataset_or_length, TorchSampler):
        name = type(dataset_or_length).__name__
        raise ConfigurationError(
            f"Sampler({name}): it shares out the numbers 0 .. length-1 of a dataset, and what {name} chooses would be lost.\n"
            f"Write Sampler.wrap({name}(...))."
        )
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
