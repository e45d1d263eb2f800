"""The handle of a collective that was started and not waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from stretto.collectives.request import Pending

T = TypeVar("T")


class Started(Generic[T]):
    """A collective under way, as `start_...` returns it. Its tensors must not be touched before `wait` has returned."""

    __public__ = ("done", "wait")  # what docs/api.md shows

    def __init__(self, pending: Pending | None, result: Callable[[], T]) -> None:
        self._pending = pending  # None: there is nothing to wait for
        self._result = result  # brings the tensor back to where it belongs, so it is called once
        self._value: list[T] = []
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        return self._pending is None or self._pending.done

    def wait(self) -> T:
        """The result, when the collective has ended; what went wrong is raised. Bounded in time as the collective itself is."""
        with self._lock:
            if not self._value:
                if self._pending is not None:
                    self._pending.wait()
                self._value.append(self._result())
            return self._value[0]
