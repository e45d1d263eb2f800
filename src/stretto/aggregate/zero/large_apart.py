"""A large parameter has a transfer to itself, which needs no memory while it is under way (`bucket.py`).

Cost: a start-up for each, which is nothing beside the transfer of so many bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from stretto.engine.bucket import gradient_dtype
from stretto.engine.training import Named
from stretto.plan.transfers import Transfer, TransferPlan

LARGE_BYTES = 4 << 20  # of a parameter


def large_ones_apart(plan: TransferPlan, named: Sequence[Named]) -> TransferPlan:
    num_bytes = {name: parameter.numel() * gradient_dtype(parameter).itemsize for name, parameter in named}
    transfers: list[Transfer] = []
    for transfer in plan.transfers:
        parts: list[tuple[str, ...]] = []
        for name in transfer.parameters:
            is_large = num_bytes[name] >= LARGE_BYTES
            if not parts or is_large or num_bytes[parts[-1][-1]] >= LARGE_BYTES:
                parts.append(())
            parts[-1] = (*parts[-1], name)
        transfers += [replace(transfer, parameters=part, num_bytes=sum(num_bytes[name] for name in part)) for part in parts]
    return replace(plan, transfers=tuple(transfers))
