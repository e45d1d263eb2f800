"""A machine for all workers of a job, run among some of them: there they have the numbers 0, 1, ... in the order of their ranks.

The machine inside is told of its group alone, and what it sends reaches its group alone. Whoever else runs the same channel runs
it in a group of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stretto.protocol.machine import Actions, Machine, SendMessage


class AmongMembers(Machine):
    """`members`: ranks, this worker's among them. `count` is told of each payload: rank, bytes sent, bytes received."""

    def __init__(self, machine: Machine, members: Sequence[int], count: Callable[[int, int, int], None]) -> None:
        self.header_type = machine.header_type  # type: ignore[misc]  # it depends on the machine inside
        self._machine, self._members, self._count = machine, list(members), count
        self._numbers = {rank: number for number, rank in enumerate(members)}

    def on_start(self, now: float) -> Actions:
        return self._outwards(self._machine.on_start(now))

    def on_message(self, now: float, source: int, header: Any, payload: memoryview) -> Actions:
        if source not in self._numbers:
            return ()
        if payload.nbytes:
            self._count(source, 0, payload.nbytes)
        return self._outwards(self._machine.on_message(now, self._numbers[source], header, payload))

    def on_timer(self, now: float, name: str) -> Actions:
        return self._outwards(self._machine.on_timer(now, name))

    def on_sent(self, now: float, token: int) -> Actions:
        return self._outwards(self._machine.on_sent(now, token))

    def on_request(self, now: float, ticket: int, request: Any) -> Actions:
        return self._outwards(self._machine.on_request(now, ticket, request))

    def on_view(self, now: float, joined: Sequence[int], left: Sequence[int], generation: int) -> Actions:
        return self._outwards(self._machine.on_view(now, self._inwards(joined), self._inwards(left), generation))

    def _inwards(self, ranks: Iterable[int]) -> list[int]:
        return [self._numbers[rank] for rank in ranks if rank in self._numbers]

    def _outwards(self, actions: Actions) -> list[Any]:
        out: list[Any] = []
        for action in actions:
            if isinstance(action, SendMessage):
                rank, num_bytes = self._members[int(action.to)], memoryview(action.payload).nbytes
                if num_bytes:
                    self._count(rank, num_bytes, 0)
                action = action._replace(to=rank)  # noqa: PLW2901
            out.append(action)
        return out
