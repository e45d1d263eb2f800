"""One server with one small range, and workers that speak to it directly: no network, no time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.aggregate.parameter_server.consistency import SyncAnswer
from stretto.aggregate.parameter_server.head import UpdateRecord
from stretto.aggregate.parameter_server.layout import RangeLayout, ServedParameter
from stretto.aggregate.parameter_server.messages import PullValues, PushGradient, ValuesPulled
from stretto.aggregate.parameter_server.round_sum import RoundSum
from stretto.aggregate.parameter_server.server import ServerMachine
from stretto.protocol.machine import SendMessage

LAYOUT = RangeLayout([ServedParameter("w", 2)])


class Steps(RoundSum):
    """Notes every update that it is told to make."""

    def __init__(self) -> None:
        super().__init__(2)
        self.made: list[tuple[list[float], float, int | None]] = []

    def apply(
        self, gradient: NDArray[np.float32], options: Mapping[str, Any], *, lr_scale: float = 1.0, worker: int | None = None
    ) -> None:
        super().apply(gradient, options, lr_scale=lr_scale, worker=worker)
        self.made.append((gradient.tolist(), lr_scale, worker))


class OneServer:
    """One server with one range of two elements, and workers 0, 1, ... that speak to it."""

    def __init__(self, sync: SyncAnswer, workers: int, *, filled: bool = True) -> None:
        self.steps = Steps()
        self.records: list[UpdateRecord] = []
        self.machine = ServerMachine(
            9, LAYOUT, servers=[9], workers=range(workers), sync=sync, filled=filled,
            make_values=self._make_values, on_update=self.records.append,
            fault_in=lambda options: None if options == {"lr": 0.1} else "such options do not exist",
        )  # fmt: skip
        self.machine.on_start(0.0)

    def _make_values(self, index: int, values: memoryview | None) -> Steps:
        if values is not None:
            self.steps.install(values)
        return self.steps

    def tell(self, worker: int, header: Any, payload: bytes = b"") -> list[SendMessage]:
        return list(self.machine.on_message(0.0, worker, header, memoryview(payload)))  # type: ignore[arg-type]

    def push(self, worker: int, clock: int, version: int, gradient: tuple[float, float] = (1, 1), weight: float = 1.0) -> Any:
        header = PushGradient(LAYOUT.digest, 0, 1, 0, clock, version, weight, {"lr": 0.1})
        return [(each.to, each.header) for each in self.tell(worker, header, np.array(gradient, np.float32).tobytes())]

    def pull(self, worker: int, clock: int, newer_than: int = -1) -> list[int]:
        """Who gets values then."""
        sent = self.tell(worker, PullValues(LAYOUT.digest, 0, 1, 0, clock, newer_than))
        return [int(each.to) for each in sent if isinstance(each.header, ValuesPulled)]
