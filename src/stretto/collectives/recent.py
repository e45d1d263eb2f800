"""A dictionary that keeps what was set last, and so cannot grow for ever."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """At most so many keys: setting one more drops the key that was set longest ago. Setting a key again makes it the last."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.dropped(*self.popitem(last=False))

    def dropped(self, key: K, value: V) -> None:
        """Called for what there is no more room for."""
