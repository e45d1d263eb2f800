"""What only the first worker of a group fetches, and then gives to the others of the group; or its error, if it failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from torch import Tensor

from stretto.collectives.group import Group
from stretto.collectives.plan import Kind
from stretto.errors import WireError

ALGORITHM: Final = "chain"  # in segments: it takes as long as one copy, however large the group is


class FromFirst:
    """All workers of the group make one together, and give and take in the same order. `what`: is given, for messages."""

    def __init__(self, group: Group, what: str) -> None:
        self._group, self._what = group, what
        self._channel = group.new_channel()

    def give(self, part: Tensor) -> None:
        """Replace everybody's by the first worker's."""
        if self._group.size > 1:
            name = self._group.next_name(self._channel)
            self._group.run(Kind.BROADCAST, part, ALGORITHM, root=0, name=name, label=self._label)

    @contextmanager
    def telling(self, part: Tensor) -> Iterator[None]:
        """Around what the first worker does before it gives that part: its error is that of the others, who wait for it."""
        try:
            yield
        except Exception as error:
            if self._group.rank == 0 and self._group.size > 1:
                rank, name = self._group.ranks[0], self._group.next_name(self._channel)
                # Never ready: nothing of it is sent before it fails.
                never = self._group.start(
                    Kind.BROADCAST, part, ALGORITHM, root=0, name=name, ready=lambda: False, label=self._label
                )
                text = f"rank {rank} did not get {self._what} for its group: {type(error).__name__}: {error}"
                self._group.fail(never, WireError(text))
            raise

    @property
    def _label(self) -> str:
        return f" of {self._what}"
