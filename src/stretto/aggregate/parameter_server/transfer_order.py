"""What a schedule's plan means to pushes and pulls: ranges as parts of transfers, and windows of a few of them.

A transfer is cut where a schedule cuts it into parts, or smaller where servers need that for equal shares, or where a range would
be more than the credit. The credit is for each server and each way. It takes a round trip to hear that a push has come, in which
the link would be idle: so at least `AT_LEAST` ranges may be under way to all servers together. Without a schedule that orders,
these are two for each server, or more where the link is fast (`send_window.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Final

from stretto.aggregate.parameter_server.layout import (
    LEAST_RANGE_BYTES,
    VALUE_BYTES,
    ParameterRange,
    ServedParameter,
    range_bytes_for,
)
from stretto.collectives.urgency import Urgency
from stretto.plan.transfers import TransferPlan

AT_LEAST: Final = 4


def range_bytes_of(plan: TransferPlan, parameters: Sequence[ServedParameter], num_servers: int) -> int:
    """The size of ranges that are parts of these transfers: all ranges have one, that of the smallest part."""
    limits = [transfer.part_bytes for transfer in plan.transfers if transfer.part_bytes is not None]
    if plan.credit_bytes is not None:
        limits.append(max(plan.credit_bytes, LEAST_RANGE_BYTES))
    return max(VALUE_BYTES, min([range_bytes_for(parameters, num_servers), *limits]))


def urgency_with_servers(urgency: Urgency | None, range_bytes: int, num_servers: int) -> Urgency | None:
    """The same, with room for enough ranges."""
    least = range_bytes * ceil(AT_LEAST / num_servers)
    return None if urgency is None else urgency._replace(credit_bytes=max(urgency.credit_bytes, least))


def least_bytes_under_way(ranges: Sequence[ParameterRange], num_servers: int) -> int:
    """How many bytes without urgency may be under way to all servers together, in any case."""
    return max(AT_LEAST, 2 * num_servers) * max((each.num_bytes for each in ranges), default=0)
