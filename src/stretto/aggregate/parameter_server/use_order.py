"""In which order the forward reads parameters, for servers that step: seen in every step, not planned.

A schedule that orders (`Tic`, `Tac`, `Priority`) has the ranges of what is read first pushed first, and pulled first. A module's
forward asks for its parameters (`Training.before_use`); in the order of these calls after one step the next step is pushed. Until
a forward was seen the order is that of registration. A range is as urgent as the most urgent parameter in it.

No times are measured: workers that step by themselves meet nowhere to share a profile, and at `optimizer.step()` all gradients
are ready at once. Modules are seen as a sequence, and on a sequence the orders of TIC and TAC are that of first use.

A call for everything (evaluation, `state_dict`) says nothing about an order, and neither does a step in which nothing else came:
then the last order stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from stretto.aggregate.parameter_server.inventory import KeptParameter
from stretto.aggregate.parameter_server.layout import VALUE_BYTES, ParameterRange, ServedParameter, range_bytes_for
from stretto.aggregate.parameter_server.transfer_order import urgency_with_servers
from stretto.collectives.urgency import Urgency
from stretto.errors import ConfigurationError
from stretto.schedule.caramel import Caramel
from stretto.schedule.merged import Merged
from stretto.schedule.orders import FixedOrder
from stretto.schedule.priority import Priority

if TYPE_CHECKING:
    from stretto.strategy import Schedule, Strategy

Turn = tuple[ParameterRange, Urgency | None]


class UseOrder:
    """The order of one model's parameters. See the module's text."""

    def __init__(self, schedule: Schedule, entries: Sequence[KeptParameter], range_bytes: int, num_servers: int) -> None:
        self._is_ordered = not isinstance(schedule, FixedOrder)
        credit = schedule.credit if isinstance(schedule, Priority) else None
        self._urgency = urgency_with_servers(Urgency(0, credit or 0), range_bytes, num_servers)
        self._name = {each.parameter: each.name for each in entries}
        self._place = {each.name: place for place, each in enumerate(entries)}
        self._seen: dict[str, int] = {}  # since the last step: the number of the call that first asked for it
        self._num_calls = 0

    def used(self, parameters: Iterable[Tensor]) -> None:
        """A forward is about to read these."""
        fresh = [name for p in parameters if (name := self._name.get(p)) is not None and name not in self._seen]
        self._seen.update(dict.fromkeys(fresh, self._num_calls))
        self._num_calls += bool(fresh)

    def turns(self, ranges: Sequence[ParameterRange]) -> list[Turn]:
        """These ranges in the order in which they are to be pushed and pulled, for a step that begins now."""
        if not self._is_ordered or self._urgency is None:
            return [(each, None) for each in ranges]
        if self._num_calls > 1:
            self._place = {name: self._seen.get(name, self._num_calls) for name in self._place}
        self._seen, self._num_calls = {}, 0
        places = {each.index: min(self._place[piece.name] for piece in each.slices) for each in ranges}
        in_order = sorted(ranges, key=lambda each: places[each.index])
        return [(each, self._urgency._replace(priority=places[each.index])) for each in in_order]


def range_bytes_for_steps(schedule: Schedule, parameters: Sequence[ServedParameter], num_servers: int) -> int:
    """Parts of `Priority(partition)` are ranges, of one value at least."""
    size = range_bytes_for(parameters, num_servers)
    if not isinstance(schedule, Priority) or schedule.partition is None:
        return size
    return max(VALUE_BYTES, min(size, schedule.partition))


def check_schedule(strategy: Strategy) -> None:
    """The schedules that mean something where gradients are pushed by `optimizer.step()`."""
    if isinstance(strategy.schedule, (Merged, Caramel)):
        raise ConfigurationError(
            f"sync={strategy.sync!r} with schedule={strategy.schedule!r}: it plans by when gradients become ready, and servers "
            f"that step get all of them at once, from optimizer.step().\n"
            f"Write schedule=Priority(), Tic() or Tac(), which order by first use, leave it out, or write sync=Synchronous()."
        )
