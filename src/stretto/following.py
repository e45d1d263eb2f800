"""A loader whose batches are counted as the training loop gets them: what `Sampler.follow` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from torch.utils.data import DataLoader

from stretto.errors import ConfigurationError

B = TypeVar("B")


class Batching(NamedTuple):
    """How a loader cuts a sequence of items into batches."""

    size: int
    drop_last: bool

    def num_batches(self, num_items: int) -> int:
        return num_items // self.size if self.drop_last else -(-num_items // self.size)


class Followed(Generic[B]):
    """The batches of what is left of an epoch, or of the next one: loop over it as over a DataLoader, as often as you like."""

    def __init__(self, begin: Callable[[], Iterator[B]], num_batches: Callable[[], int]) -> None:
        self._begin = begin
        self._num_batches = num_batches
        self._under_way: int | None = None  # how many batches the pass under way has

    def __iter__(self) -> Iterator[B]:
        self._under_way = self._num_batches()
        try:
            yield from self._begin()
        finally:
            self._under_way = None

    def __len__(self) -> int:
        """How many batches the pass under way has from its beginning to its end; before it begins, how many the next one has."""
        return self._num_batches() if self._under_way is None else self._under_way


def batching_of(loader: Any, sampler: object) -> Batching:
    """How `loader` cuts the items of `sampler` into batches."""
    if loader is sampler:
        return Batching(1, False)
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
    if batches is sampler or (batches is None and loader.sampler is sampler):
        return Batching(1, False)
    size = getattr(batches, "batch_size", None)
    if getattr(batches, "sampler", None) is sampler and isinstance(size, int):
        return Batching(size, bool(getattr(batches, "drop_last", False)))
    raise ConfigurationError(
        "follow(loader): this DataLoader does not draw from this sampler in batches of one size.\n"
        "Make it with DataLoader(dataset, batch_size=..., sampler=sampler), or call sampler.consumed(n) after each step."
    )
