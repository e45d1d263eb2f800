"""The values of a range with `Synchronous`: the sum of the last round. The servers only sum, and the workers step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from stretto.aggregate.parameter_server.shard_optimizer import OptionValue
from stretto.errors import MalformedPayload


class RoundSum:
    """Float32 values. `value` is never written to: the next sum is another array."""

    def __init__(self, numel: int) -> None:
        self._sum: NDArray[np.float32] = np.zeros(numel, np.float32)

    def apply(
        self,
        gradient: NDArray[np.float32],
        options: Mapping[str, OptionValue],
        *,
        lr_scale: float = 1.0,
        worker: int | None = None,
    ) -> None:
        self._sum = gradient.copy()

    def value(self) -> memoryview:
        return self._sum.data.cast("B")

    def pulled_by(self, worker: int) -> None:
        """Nothing here depends on it."""

    def forget(self, worker: int) -> None:
        """Nothing here depends on it."""

    def export(self) -> bytes:
        return self._sum.tobytes()

    def install(self, data: memoryview) -> None:
        if data.nbytes != self._sum.nbytes:
            raise MalformedPayload(f"the sum of a range of {self._sum.nbytes} bytes has {data.nbytes}.")
        self._sum = np.frombuffer(data, np.float32).copy()
