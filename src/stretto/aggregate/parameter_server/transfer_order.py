"""What a schedule's plan means to pushes and pulls: ranges as parts of transfers, and windows of a few of them.

A transfer is cut where a schedule cuts it into parts, or smaller where servers need that for equal shares. Its credit is for each
server and each way. At least two ranges may be under way, for it takes a round trip to hear that one has come, in which the link
would be idle.
"""

from __future__ import annotations

from collections.abc import Sequence

from stretto.aggregate.parameter_server.layout import VALUE_BYTES, ServedParameter, range_bytes_for
from stretto.collectives.urgency import Urgency
from stretto.plan.transfers import TransferPlan


def range_bytes_of(plan: TransferPlan, parameters: Sequence[ServedParameter], num_servers: int) -> int:
    """The size of ranges that are parts of these transfers: all ranges have one, that of the smallest part."""
    parts = [transfer.part_bytes for transfer in plan.transfers if transfer.part_bytes is not None]
    return max(VALUE_BYTES, min([range_bytes_for(parameters, num_servers), *parts]))


def urgency_with_servers(urgency: Urgency | None, range_bytes: int) -> Urgency | None:
    """The same, with room for two ranges."""
    return None if urgency is None else urgency._replace(credit_bytes=max(urgency.credit_bytes, 2 * range_bytes))
